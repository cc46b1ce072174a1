"""`python -m benchmarks.distributed`: `maxsim.distributed.score` by both methods, a process a GPU; keeps a record.

Beside them "naive", torch's all-gather with gradients, then einsum, maximum and sum; and "alone", the same scores and
gradients where all documents are local already: what nothing but moving them adds to. A time is that of the slowest
rank, from a barrier until its GPU is done; memory is the most that a rank held above its inputs. Sizes in a case's name
are a rank's. Without GPUs it runs over gloo on the CPU, to be tried.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor

import maxsim
from maxsim.bench.cases import Case, parse
from maxsim.bench.records import Record, environment, write
from maxsim.bench.timer import timing

RECORDS = Path(__file__).parent / "records"
CASES = (
    "128x32-128x300-d128-float32-train",
    "128x32-128x300-d128-bfloat16-train",
    "64x32-64x768-d128-bfloat16-train",
    "128x1024-128x1024-d128-bfloat16-train",
    "128x32-4096x300-d128-bfloat16",
    "128x32-4096x300-d128-bfloat16-train",
)
CONTENDERS = ("maxsim-gather", "maxsim-ring", "alone", "naive")
NAIVE_ELEMENTS = 2**33  # of similarities: more do not fit beside their gradient


def naive(queries: Tensor, documents: Tensor) -> Tensor:
    everything = torch.cat(torch.distributed.nn.functional.all_gather(documents))
    if everything.requires_grad:
        everything.register_hook(Tensor.contiguous)  # which sending gradients home asks for
    return torch.einsum("qid,njd->qnij", queries, everything).amax(-1).float().sum(-1)


def calls(case: Case, queries: Tensor, documents: Tensor, everything: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Scores, and with `-train` gradients too; the scores are returned."""

    def trained(score: Callable[[Tensor, Tensor], Tensor], others: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            queries.grad = others.grad = None
            scores = score(queries, others)
            if case.train:
                scores.sum().backward()
            return scores.detach()

        return call

    found = {
        "maxsim-gather": trained(lambda q, d: maxsim.distributed.score(q, d, method="gather"), documents),
        "maxsim-ring": trained(lambda q, d: maxsim.distributed.score(q, d, method="ring"), documents),
        "alone": trained(maxsim.score, everything),
        "naive": trained(naive, documents),
    }
    if case.NQ * case.LQ * everything.shape[0] * case.LD > NAIVE_ELEMENTS:
        del found["naive"]
    return found


def slowest(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def measured(case: Case, seconds: float, device: torch.device, commit: str | None) -> list[Record]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, case.dtype)

    def tokens(seed: int, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)
        return torch.nn.functional.normalize(values, dim=-1).to(dtype)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    queries = tokens(rank, case.NQ, case.LQ, case.D).requires_grad_(case.train)
    documents = tokens(100 + rank, case.ND, case.LD, case.D).requires_grad_(case.train)
    everything = torch.cat([tokens(100 + other, case.ND, case.LD, case.D) for other in range(size)])
    everything.requires_grad_(case.train)
    players = calls(case, queries, documents, everything)
    truth = players["alone"]()
    errors, peaks = {}, {}
    samples: dict[str, list[float]] = {name: [] for name in players}
    for name, call in players.items():
        errors[name] = slowest(float((call() - truth).abs().max()))
        if name.startswith("maxsim") and errors[name]:
            raise AssertionError(f"{case.name}: {name} has other bits than one process")
        queries.grad = documents.grad = everything.grad = None
        if device.type == "cuda":
            synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            call()
            synchronize()
            peaks[name] = slowest((torch.cuda.max_memory_allocated(device) - before) / 2**20)
    start = time.perf_counter()
    while slowest(time.perf_counter() - start) < seconds or len(samples["alone"]) < 5:
        for name, call in players.items():
            synchronize()
            dist.barrier()
            begun = time.perf_counter()
            call()
            synchronize()
            samples[name].append(slowest(1e3 * (time.perf_counter() - begun)))
    where = asdict(environment(device, commit))
    rows = []
    for name in players:
        times = timing(samples[name])
        rows.append(
            Record(
                case=case.name,
                contender=name,
                median_ms=times.median_ms,
                p20_ms=times.p20_ms,
                p80_ms=times.p80_ms,
                host_us=None,
                peak_mib=peaks.get(name),
                max_error=errors[name],
                gemm_tflops=None,
                copy_tbps=None,
                **where,
            )
        )
    return rows


def work(
    rank: int, size: int, where: str, names: Sequence[str], seconds: float, out: str, commit: str | None, cuda: bool
) -> None:
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=where, rank=rank, world_size=size)
    records = []
    for name in names:
        rows = measured(parse(name), seconds, device, commit)
        records += rows
        for row in rows if rank == 0 else ():
            memory = "" if row.peak_mib is None else f"{row.peak_mib:9.1f} MiB"
            print(f"{row.case:45} {row.contender:14} {row.median_ms:9.3f} ms {memory}", flush=True)
    if rank == 0:
        print("record:", write(records, Path(out), f"distributed-{size}"))
    dist.destroy_process_group()


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Times maxsim.distributed.score on the GPUs of one machine.")
    parser.add_argument("cases", nargs="*", default=CASES, help="such as 128x32-128x300-d128-bfloat16-train, a rank's")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if cuda else 2)
    parser.add_argument("--seconds", type=float, default=3.0, help="for one case")
    parser.add_argument("--out", default=str(RECORDS), help="directory of the record")
    parser.add_argument("--commit", help="for the record, where the tree has no history")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/group"
        arguments = (chosen.ranks, where, chosen.cases, chosen.seconds, chosen.out, chosen.commit, cuda)
        torch.multiprocessing.spawn(work, arguments, chosen.ranks)


if __name__ == "__main__":
    main()
