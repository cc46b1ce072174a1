"""`python -m benchmarks.corpus`: search of a synthetic corpus in each of its homes; keeps a record.

Documents have lognormal lengths (67 tokens on average, D = 128, unit vectors), queries 32 tokens, k = 10. A row is a
corpus, a home and a number of queries: p50 and p99 of the time from Python to hits, the bytes that a search reads, and
their rate beside what moves them: the bus for tokens of the host, measured in the same run by copies like segments,
for resident ones a maximum over as many bytes. Of small corpora hits are compared with scores of everything in float64.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maxsim
from maxsim.bench.records import environment, write
from maxsim.corpus import Snapshot
from maxsim.search.placing import bytes_of

RECORDS = Path(__file__).parent / "records"
D, LQ, K = 128, 32, 10
BLOCK = 4096  # documents made at a time
KEPT: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "int8-exact": {"dtype": "int8", "exact": "float16"},
}
CHECKED = 20_000  # documents, at most, of a corpus whose hits are compared


def lengths(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(count, generator=generator) * 0.5).exp_().mul_(59).clamp_(4, 300).long()


def documents(count: int, device: torch.device) -> Iterator[Tensor]:
    every, generator = lengths(count), torch.Generator(device).manual_seed(1)
    for some in every.split(BLOCK):
        tokens = torch.randn(int(some.sum()), D, generator=generator, device=device)
        yield from torch.nn.functional.normalize(tokens, dim=1).half().cpu().split(some.tolist())


def queries(count: int, seed: int) -> Tensor:
    tokens = torch.randn(count, LQ, D, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(tokens, dim=-1).half()


def best_rate(device: torch.device, home: str, size: int) -> float | None:
    """TB/s of what moves the bytes."""
    if device.type == "cpu":
        return None
    if home == "device":
        source = torch.ones(min(size, 8 << 30) // 4, dtype=torch.float32, device=device)
        moved, move = source.nbytes, source.amax
    else:
        host = torch.ones(240 << 20, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(host, device=device)
        moved, move = host.nbytes, lambda: target.copy_(host, non_blocking=True)
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        move()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(moved / min(times) / 1e9)


def check(corpus: maxsim.Corpus, kept: str, count: int, device: torch.device) -> None:
    """Hits of a sample against scores in float64, a document at a time; not of codes alone, nor of large corpora."""
    if count > CHECKED or kept == "int8":
        return
    asked = queries(2, 99)
    truth = torch.stack(
        [torch.einsum("qid,jd->qij", asked.double(), d.double()).amax(2).sum(1) for d in documents(count, device)], 1
    )
    for row, hits in zip(truth, corpus.search(asked, K), strict=True):
        wanted = row.topk(K).values
        for hit, score in zip(hits, wanted.tolist(), strict=True):
            assert abs(hit.score - score) < 1e-2 and abs(float(row[int(hit.id)]) - score) < 1e-2, (hit, score)


def measured(corpus: maxsim.Corpus, counts: list[int], seconds: float) -> Iterator[dict[str, Any]]:
    snapshot: Snapshot = corpus.select().snapshot
    size = bytes_of(snapshot, corpus.place)
    rate = best_rate(corpus.device, corpus.home, size)
    for count in counts:
        asked = queries(count, count)
        corpus.search(asked, K)
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - start < seconds:
            begun = time.perf_counter()
            corpus.search(asked, K)
            times.append(1e3 * (time.perf_counter() - begun))
        ordered = sorted(times)
        p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        yield {"queries": count, "p50_ms": p50, "p99_ms": p99, "runs": len(times), "bytes": size,
               "tbps": size / p50 / 1e9, "best_tbps": rate}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus", description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--kept", nargs="*", choices=list(KEPT), default=["float16", "int8-exact"])
    parser.add_argument("--homes", nargs="*", default=["device", "pinned", "mapped"])
    parser.add_argument("--queries", nargs="*", type=int, default=[1, 16, 128])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="instead of what git says")
    parser.add_argument("--out", type=Path, default=RECORDS)
    options = parser.parse_args()
    device = torch.device(options.device)
    where = asdict(environment(device, options.commit))
    rows = []
    for kept in options.kept:
        with tempfile.TemporaryDirectory() as folder:
            corpus, start = maxsim.Corpus.create(folder, D, **KEPT[kept]), time.perf_counter()
            corpus.add(range(options.documents), documents(options.documents, device))
            print(f"{kept}: {options.documents} documents in {time.perf_counter() - start:.0f} s", flush=True)
            for home in options.homes:
                opened = maxsim.Corpus.open(folder, device, home)
                check(opened, kept, options.documents, device)
                for row in measured(opened, options.queries, options.seconds):
                    rows.append({"documents": options.documents, "kept": kept, "home": home, **row, **where})
                    print(json.dumps({name: rows[-1][name] for name in ("kept", "home", *row)}), flush=True)
                del opened
    print("record:", write(rows, options.out, "corpus"))


if __name__ == "__main__":
    main()
