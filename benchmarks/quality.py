"""`python -m benchmarks.quality`: what each codec of `maxsim.quantize` costs in quality; keeps a record.

On judged collections (`benchmarks.judged`; `-128` behind a name: their tokens cut to 128 principal directions) and on
random unit vectors, beside float32: nDCG@10; how many of the 20 best documents are float32's; how far scores are from
float32's at most and on average (the mean score of the best document stands by); bytes a token; and the share of the
documents that `certified_topk` scored exactly for the 10 best, whose result is compared with `topk`'s. `int8-group32`
and `-group64` are int8 with a scale for each so many dimensions of a document and of a query token: made of several
codes here, since no kernel takes them, so they certify nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import maxsim
from benchmarks import judged
from maxsim import Packed, Quantized
from maxsim.bench.records import environment, write

RECORDS = Path(__file__).parent / "records"
CACHE = Path(tempfile.gettempdir()) / "maxsim-quality"
COLLECTIONS = ("faq", "attack", "random-128", "fitz-gov-128", "wiki-128", "fitz-gov")
BEST, HITS = 20, 10
CLAIMS = "published: int8 within 0.003 nDCG, float16 the same 20 best as float32 (Flash-MaxSim, arXiv 2605.29517)"

Documents = Packed | Quantized
Codec = Callable[[Packed, Packed], tuple[Packed, Documents]]


@dataclass(frozen=True)
class Quality:
    """A codec on a collection. best: the mean score of the best document. ndcg, rescored: None where there are no
    judgements, no certificate."""

    collection: str
    contender: str
    documents: int
    tokens: int
    width: int
    queries: int
    bytes_a_token: float
    ndcg: float | None
    same_of_20: float
    mean_error: float
    max_error: float
    best: float
    rescored: float | None
    seconds: float
    card: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str | None
    kernels: str
    date: str


def random_collection(width: int, documents: int = 2000, queries: int = 100) -> judged.Judged:
    """Unit vectors, documents of 100 tokens and queries of 32."""

    def side(seed: int, count: int, length: int) -> Packed:
        values = torch.randn(count * length, width, generator=torch.Generator().manual_seed(seed))
        return Packed(torch.nn.functional.normalize(values, dim=-1), torch.arange(count + 1) * length)

    return judged.Judged("random", side(0, documents, 100), side(1, queries, 32), [])


def cast(dtype: torch.dtype) -> Codec:
    def change(side: Packed) -> Packed:
        return Packed(side.tokens.to(dtype), side.offsets)

    return lambda queries, documents: (change(queries), change(documents))


def coded(codec: str, **options: object) -> Codec:
    return lambda queries, documents: (queries, maxsim.quantize(documents, codec, **options))


def grouped(size: int) -> Codec:
    """int8 with a scale for `size` dimensions of a document, and of a query token."""

    def change(side: Packed, offsets: Tensor) -> Packed:
        parts = [maxsim.quantize(Packed(part, offsets)).dequantize().tokens for part in side.tokens.split(size, 1)]
        return Packed(torch.cat(parts, 1), side.offsets)

    return lambda queries, documents: (
        change(queries, torch.arange(len(queries.tokens) + 1)),
        change(documents, documents.offsets),
    )


def codecs(width: int, centroids: int | None) -> dict[str, Codec]:
    made = {
        "float16": cast(torch.float16),
        "bfloat16": cast(torch.bfloat16),
        "int8": coded("int8"),
        "int8-token": coded("int8", scale="token"),
        "int8-group64": grouped(64),
        "int8-group32": grouped(32),
        "fp8": coded("fp8"),
        "fp8-token": coded("fp8", scale="token"),
    }
    for bits in (4, 2, 1):
        made[f"residual-{bits}"] = coded("residual", bits=bits, centroids=centroids, renormalize=True)
    for parts in sorted({width // 4, 32, 16}, reverse=True):
        if width % parts == 0:
            made[f"pq-{parts}"] = coded("pq", parts=parts)
    return made


def best_of(scores: Tensor, k: int) -> Tensor:
    """The k best documents of each query, equal ones in their order."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


def ndcg(scores: Tensor, relevant: list[set[int]]) -> float | None:
    if not relevant:
        return None
    return judged.example("judged_texts").quality(best_of(scores, HITS).tolist(), relevant)[0]


def width_of(documents: Documents) -> float:
    """Bytes a token."""
    if isinstance(documents, Quantized):
        return documents.bytes_a_token
    return documents.tokens.shape[1] * documents.tokens.element_size()


def rescored(found: judged.Judged, documents: Documents, asked: int) -> float | None:
    """The share of the documents that is scored exactly; AssertionError where the result is not the exact one."""
    if not isinstance(documents, Quantized) or not asked:
        return None
    queries = judged.first(found.queries, asked)
    certified = maxsim.certified_topk(queries, documents, found.documents, HITS)
    exact = maxsim.topk(queries, found.documents, HITS)
    if not (torch.equal(certified.scores, exact.scores) and torch.equal(certified.indices, exact.indices)):
        raise AssertionError(f"{found.name}: {documents.codec} does not certify the exact result")
    return certified.rescored.double().mean().item() / len(documents)


def measured(
    found: judged.Judged, chosen: Sequence[str] | None, centroids: int | None, asked: int, commit: str | None
) -> list[Quality]:
    """Codecs on a collection, all or those chosen, each printed."""
    where = asdict(environment("cpu", commit))
    width = found.documents.tokens.shape[1]
    exact = maxsim.score(found.queries, found.documents)
    truth = best_of(exact, BEST)
    sizes = f"{len(found.documents)} documents, {len(found.documents.tokens)} tokens of width {width}"
    print(f"\n{found.name}: {sizes}, {len(found.queries)} queries\n{HEADER}", flush=True)
    rows: list[Quality] = []
    for name, make in {"float32": lambda *sides: sides, **codecs(width, centroids)}.items():
        if rows and chosen and name not in chosen:
            continue
        begun = time.perf_counter()
        queries, documents = make(found.queries, found.documents)
        seconds = time.perf_counter() - begun
        scores = exact if name == "float32" else maxsim.score(queries, documents)
        apart = (scores.double() - exact.double()).abs()
        same = (best_of(scores, BEST)[:, :, None] == truth[:, None, :]).any(2).sum(1)
        rows.append(
            Quality(
                collection=found.name,
                contender=name,
                documents=len(found.documents),
                tokens=len(found.documents.tokens),
                width=width,
                queries=len(found.queries),
                bytes_a_token=width if "group" in name else width_of(documents),
                ndcg=ndcg(scores, found.relevant),
                same_of_20=same.double().mean().item(),
                mean_error=apart.mean().item(),
                max_error=apart.max().item(),
                best=exact.amax(1).double().mean().item(),
                rescored=rescored(found, documents, asked),
                seconds=seconds,
                **where,
            )
        )
        print(line(rows[-1], rows[0]), flush=True)
    return rows


def shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


HEADER = (
    f"{'':14}{'bytes':>7}{'nDCG@10':>9}{'change':>9}{'of 20':>7}{'mean error':>12}{'max error':>11}{'rescored':>10}"
    f"{'made in s':>11}"
)


def line(row: Quality, exact: Quality) -> str:
    change = None if row.ndcg is None or exact.ndcg is None else row.ndcg - exact.ndcg
    share = "–" if row.rescored is None else f"{100 * row.rescored:.1f} %"
    return (
        f"{row.contender:14}{row.bytes_a_token:7.0f}{shown(row.ndcg, 4):>9}"
        f"{'–' if change is None else f'{change:+.4f}':>9}{row.same_of_20:7.2f}"
        f"{row.mean_error:12.2g}{row.max_error:11.2g}{share:>10}{row.seconds:11.1f}"
    )


def collection(name: str, queries: int, cache: Path) -> judged.Judged:
    """By its name, `-WIDTH` behind it for that many principal directions (of `random`: for its width)."""
    kind, _, width = name.rpartition("-")
    if kind == "random":
        return random_collection(int(width))
    if width.isdecimal() and kind:
        return judged.narrowed(judged.embeddings(kind, queries, cache), int(width))
    return judged.embeddings(name, queries, cache)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measures what quantised documents cost in quality.")
    names = ", ".join((*judged.COLLECTIONS, "random-128"))
    parser.add_argument("collections", nargs="*", default=COLLECTIONS, help=f"of {names}; -WIDTH behind any")
    parser.add_argument("--codecs", type=lambda text: text.split(","), help="such as int8,pq-16 (all)")
    parser.add_argument("--queries", type=int, default=250, help="of a collection, at most 500")
    parser.add_argument("--certified", type=int, default=50, help="queries to search with a certificate")
    parser.add_argument("--centroids", type=int, default=1024, help="of residual codes; 0: 16 √tokens, as PLAID has")
    parser.add_argument("--cache", default=str(CACHE), help="folder of embeddings, which take minutes to make")
    parser.add_argument("--out", default=str(RECORDS), help="directory of the record")
    parser.add_argument("--commit", help="for the record, where the tree has no history")
    chosen = parser.parse_args(argv)
    rows: list[Quality] = []
    kept = None
    for name in chosen.collections:
        try:
            found = collection(name, chosen.queries, Path(chosen.cache))
        except SystemExit as missing:  # a package
            print(f"\n{name}: left out: {missing}", flush=True)
            continue
        rows += measured(found, chosen.codecs, chosen.centroids or None, chosen.certified, chosen.commit)
        kept = write(rows, Path(chosen.out), "quality")  # after every collection: what follows may be stopped
    print(f"\n{CLAIMS}\nrecord: {kept}")


if __name__ == "__main__":
    main()
