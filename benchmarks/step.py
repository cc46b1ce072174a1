"""`python -m benchmarks.step`: a whole training step, encoder included, with more and more pairs; keeps a record.

The encoder has BERT-base's shape and random weights; B queries are scored with B documents, the loss is in-batch
contrast, autocast is bfloat16. "step" holds every activation of the encoder; "cached-step" (GradCache) encodes twice,
some documents at a time, so that scores and what their backward keeps bound the batch. B doubles until memory, or
`--longest`, ends it: a row without a time ran out of memory. Memory is the most that one step held above weights and
gradients.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maxsim
from maxsim.bench.records import Record, environment, write
from maxsim.bench.timer import timing

RECORDS = Path(__file__).parent / "records"
SHAPES = ("32x300", "32x1030", "1024x1024")  # tokens of a query and a document: passages, page images, image queries
WORDS = 30522

Score = Callable[[Tensor, Tensor], Tensor]


def naive(queries: Tensor, documents: Tensor) -> Tensor:
    return torch.einsum("qid,njd->qnij", queries, documents).amax(-1).float().sum(-1)


SCORES: dict[str, Score] = {"maxsim": maxsim.score, "naive": naive}


class Encoder(torch.nn.Module):
    """Token embeddings of unit length: [N, L] → [N, L, 128]."""

    def __init__(self, layers: int, width: int, most_tokens: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        self.places = torch.nn.Embedding(most_tokens, width)
        layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            embedded = self.words(tokens) + self.places.weight[: tokens.shape[1]]
            return torch.nn.functional.normalize(self.head(self.layers(embedded)).float(), dim=-1).bfloat16()


def contrast(scores: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))


def plain_step(encoder: Encoder, score: Score, queries: Tensor, documents: Tensor, chunk: int) -> Tensor:
    loss = contrast(score(encoder(queries), encoder(documents)))
    loss.backward()
    return loss.detach()


def cached_step(encoder: Encoder, score: Score, queries: Tensor, documents: Tensor, chunk: int) -> Tensor:
    """Luyu Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021)."""
    sides = (queries, documents)
    with torch.no_grad():
        found = [torch.cat([encoder(part) for part in side.split(chunk)]) for side in sides]
    loss = contrast(score(*(each.requires_grad_() for each in found)))
    loss.backward()
    for side, each in zip(sides, found, strict=True):
        for part, gradient in zip(side.split(chunk), each.grad.split(chunk), strict=True):
            encoder(part).backward(gradient)
    return loss.detach()


STEPS = {"step": plain_step, "cached-step": cached_step}


@dataclass
class Found:
    """Milliseconds of the steps, the most memory one held, and the loss."""

    samples: list[float]
    peak_mib: float | None
    loss: float

    @property
    def median(self) -> float:
        return timing(self.samples).median_ms


def measured(
    step: Callable[..., Tensor], encoder: Encoder, score: Score, sides: Sequence[Tensor], chunk: int, count: int
) -> Found | None:
    """`count` steps after a first one; None where memory ran out."""
    device = sides[0].device
    cuda = device.type == "cuda"
    samples: list[float] = []
    peak, loss = None, 0.0
    try:
        for number in range(count + 1):
            for parameter in encoder.parameters():
                parameter.grad = torch.zeros_like(parameter)
            if cuda:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            begun = time.perf_counter()
            loss = step(encoder, score, *sides, chunk).item()  # waits
            if number:
                samples.append(1e3 * (time.perf_counter() - begun))
            if cuda:
                peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    return Found(samples, peak, loss)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times whole training steps with more and more pairs.")
    parser.add_argument("shapes", nargs="*", default=SHAPES, help="tokens of a query and of a document, as 32x300")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--least", type=int, default=64, help="pairs to begin with")
    parser.add_argument("--most", type=int, default=8192, help="pairs to end with")
    parser.add_argument(
        "--longest", type=float, default=5.0, help="seconds of a step after which no longer one follows"
    )
    parser.add_argument("--tokens", type=int, default=1 << 15, help="that the cached step encodes at once")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--count", type=int, default=3, help="steps to time")
    parser.add_argument("--out", default=str(RECORDS), help="directory of the record")
    parser.add_argument("--commit", help="for the record, where the tree has no history")
    chosen = parser.parse_args(argv)
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    where = asdict(environment(device, chosen.commit))
    records: list[Record] = []
    kept = None
    for shape in chosen.shapes:
        LQ, LD = map(int, shape.split("x"))
        encoder = Encoder(chosen.layers, chosen.width, max(LQ, LD)).to(device)
        for kind in STEPS:
            players, pairs = list(SCORES), chosen.least
            while players and pairs <= chosen.most:
                sides = [torch.randint(WORDS, (pairs, length), device=device) for length in (LQ, LD)]
                case = f"{pairs}x{LQ}-{pairs}x{LD}-d128-bfloat16-train"
                chunk = max(1, chosen.tokens // LD)
                found = {
                    name: measured(STEPS[kind], encoder, SCORES[name], sides, chunk, chosen.count) for name in players
                }
                for name, each in found.items():
                    records.append(row(case, f"{name}-{kind}", each, where))
                agree(case, found)
                players = [name for name, each in found.items() if each and each.median <= 1e3 * chosen.longest]
                kept = write(records, Path(chosen.out), "step")  # after every size: what follows may be stopped
                pairs *= 2
        del encoder
    print("record:", kept)


def row(case: str, contender: str, found: Found | None, where: dict[str, Any]) -> Record:
    """A row of the record, printed too."""
    times = timing(found.samples) if found else None
    memory = f"{found.peak_mib:10.0f} MiB" if found and found.peak_mib is not None else ""
    shown = "out of memory" if times is None else f"{times.median_ms:9.1f} ms {memory}"
    print(f"{case:42} {contender:18} {shown}", flush=True)
    return Record(
        case=case,
        contender=contender,
        median_ms=times.median_ms if times else None,
        p20_ms=times.p20_ms if times else None,
        p80_ms=times.p80_ms if times else None,
        host_us=None,
        peak_mib=found.peak_mib if found else None,
        max_error=None,
        gemm_tflops=None,
        copy_tbps=None,
        **where,
    )


def agree(case: str, found: dict[str, Found | None]) -> None:
    """Raises AssertionError where the losses of a step differ by more than the rounding of bfloat16."""
    losses = {name: each.loss for name, each in found.items() if each}
    if max(losses.values(), default=0) - min(losses.values(), default=0) > 0.02 * max(losses.values(), default=0):
        raise AssertionError(f"{case}: losses {losses}")


if __name__ == "__main__":
    main()
