"""The exact top-k through quantised documents: what their scores rule out is never read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from . import best
from .best import check_k, merge
from .bounds import QuerySizes, bound, query_sizes
from .graph import run
from .layout import MaskLike, Problem, Tokens, TokensLike, make_problem
from .quantized import Quantized
from .quantized.codes import rows_of

CANDIDATES = 1 << 24  # of queries that are searched for together: 40 bytes each


class MismatchError(ValueError):
    """Exact documents that are not those that were quantised."""


class CertifiedTopK(NamedTuple):
    """scores, indices: as of `TopK`. rescored: int64 `[NQ]`, how many documents were scored exactly for each query."""

    scores: Tensor
    indices: Tensor
    rescored: Tensor


def certified_topk(
    queries: TokensLike,
    documents: Quantized,
    exact: TokensLike,
    k: int,
    query_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
    backend: str | None = None,
) -> CertifiedTopK:
    """The k best documents of each query: what `topk(queries, exact, k)` gives, bit for bit, for reading codes and few
    documents. Not differentiable.

    All codes are scored. A document whose score plus `error_bound` stays below the k-th best is provably no hit; the
    others are scored exactly, the most promising first, until none is left that could be.

    Args:
        queries: as for `topk`.
        documents: the codes, with the mask that `quantize` was given.
        exact: the documents that were quantised, in the same order and dtype and any form, on any device: the GPU may
            hold the codes, and the CPU's memory the documents; or a file of them, mapped by `numpy.memmap(mode="c")` or
            as safetensors are, of which only what is scored is read. (Mapped with mode "r" an array is copied.)
        k: as for `topk`.
        query_mask: as for `topk`.
        masked: as for `topk`.
        normalize: as for `topk`.
        backend: what scores the exact documents, as for `topk`.

    Returns:
        `CertifiedTopK`: scores and indices as of `topk`, and rescored, int64 `[NQ]`, on the device of `exact`.

    Raises:
        TypeError: as `topk`, documents that are not `Quantized`, and `exact` of another dtype than what was quantised.
            Documents of float64 are never served: cast them before `quantize`.
        ValueError: as `topk`, and `exact` that cannot be what was quantised: another number, width or lengths, or
            scores that are further apart than the bound; codes without a bound (`fp8` on a GPU too).
        UnsupportedError: as `topk`.
    """
    k = check_k(k)
    if not isinstance(documents, Quantized):
        raise TypeError(f"documents must be Quantized, got {type(documents).__name__}")
    with torch.no_grad():
        truth = make_problem(queries, exact, query_mask, None, masked, normalize)
        scan = make_problem(queries, documents, query_mask, None, masked, normalize)
        if truth.documents.data.is_meta:
            raise ValueError("exact is on the meta device, which holds no values")
        if truth.per_query or scan.per_query:
            raise ValueError("certified_topk takes documents [ND, LD, D] or a flat list, got candidates per query")
        truth = dataclasses.replace(truth, documents=_same(truth.documents, scan.documents))
        k = min(k, scan.documents.count)
        if not k or not scan.queries.count:
            none = best.top_documents(truth, k, backend)
            return CertifiedTopK(*none, none.indices.new_zeros(scan.queries.count))
        numbers = torch.arange(scan.documents.count, device=scan.device)

        def some(low: int, high: int) -> CertifiedTopK:
            codes, exact = (dataclasses.replace(p, queries=p.queries.slice(low, high)) for p in (scan, truth))

            def score(pairs: Tensor) -> Tensor:
                return run(dataclasses.replace(exact, pairs=pairs), backend).scores

            return certify([Part(codes, numbers)], score, k, truth.device)

        return in_groups(some, scan.queries.count)


class Part(NamedTuple):
    """Codes to scan, and the numbers of their documents, int64 `[n]`, which rise in each part and from part to part."""

    problem: Problem
    numbers: Tensor


class TooManyError(Exception):
    """More documents may be hits than are kept in memory."""


def in_groups(search: Callable[[int, int], CertifiedTopK], NQ: int) -> CertifiedTopK:
    """`search(low, high)` of all queries, together where what may be a hit is not too much, else of fewer at a time."""

    def attempt(low: int, high: int) -> list[CertifiedTopK]:
        try:
            return [search(low, high)]
        except TooManyError:
            half = (low + high) // 2
            return [*attempt(low, half), *attempt(half, high)]

    return CertifiedTopK(*(torch.cat(each) for each in zip(*attempt(0, NQ), strict=True)))


def certify(parts: Iterable[Part], score: Callable[[Tensor], Tensor], k: int, where: torch.device) -> CertifiedTopK:
    """The k best documents of each query of the parts, which all have the same queries, by number.

    Args:
        parts: at least one; read one after another, once.
        score: exact scores `[P]` of pairs (query, number), int64 `[P, 2]`, on the device `where`.
        k: at least 1, and no more than there are documents.

    Raises:
        TooManyError: of several queries, more than CANDIDATES documents may be hits.
    """
    candidates, queries = _candidates(parts, k, where)
    return _rescore(score, candidates.to(where), queries, k)


def _same(exact: Tokens, quantised: Tokens) -> Tokens:
    """The exact documents with the mask of the quantised ones.

    Raises:
        TypeError, ValueError: they cannot be what was quantised.
    """
    assert quantised.codes is not None
    if exact.codes is not None:
        raise TypeError("exact must be the documents that were quantised, got Quantized")
    source = quantised.codes.source
    if source is not None and exact.data.dtype != source:
        raise TypeError(f"the documents that were quantised are {source}, exact {exact.data.dtype}")
    if exact.count != quantised.count:
        raise ValueError(f"{quantised.count} documents were quantised, exact holds {exact.count}")
    lengths, wanted = (_lengths(side).cpu() for side in (exact, quantised))
    if not torch.equal(lengths, wanted):
        n = int((lengths != wanted).nonzero()[0])
        raise ValueError(f"document {n} had {int(wanted[n])} tokens when it was quantised, in exact {int(lengths[n])}")
    if quantised.mask is None:
        return exact
    mask = quantised.mask
    if quantised.starts is not None and quantised.ends is not None:
        mask = mask[rows_of(quantised.starts, quantised.ends)]
    mask = mask.to(exact.data.device)
    if exact.starts is None or exact.ends is None:
        return dataclasses.replace(exact, mask=mask.reshape(exact.data.shape[:-1]))
    kept = mask.new_zeros(exact.data.shape[0])
    kept[rows_of(exact.starts, exact.ends)] = mask.reshape(-1)
    return dataclasses.replace(exact, mask=kept)


def _lengths(tokens: Tokens) -> Tensor:
    if tokens.starts is None or tokens.ends is None:
        return torch.full((tokens.count,), tokens.max_length, dtype=torch.int64, device="cpu")
    return tokens.ends.long() - tokens.starts.long()


class Candidates(NamedTuple):
    """Documents that may be hits, those of a query together, falling by `upper`. `position` is a candidate's place
    among its query's; exact scores are at most `bound` from `score`, float64, and at most `upper`."""

    query: Tensor
    document: Tensor
    position: Tensor
    score: Tensor
    bound: Tensor

    @property
    def upper(self) -> Tensor:
        return torch.where(self.bound.isinf(), self.bound, self.score + self.bound)

    def to(self, device: torch.device) -> Candidates:
        return Candidates(*(each.to(device) for each in self))


def _candidates(parts: Iterable[Part], k: int, where: torch.device) -> tuple[Candidates, int]:
    """All documents but those that k others are certainly better than, and how many queries there are."""
    found: list[tuple[Tensor, ...]] = []
    sizes: QuerySizes | None = None
    blank: Tensor | None = None
    floor = torch.empty(0, dtype=torch.float64, device="cpu")
    NQ = kept = 0
    for scan, numbers in parts:
        if sizes is None:
            sizes, NQ = query_sizes(scan), scan.queries.count
            blank = best.without_tokens(scan.queries, False)
            # the best certain scores
            floor = torch.full((NQ, k), float("-inf"), dtype=torch.float64, device=scan.device)
        empty = best.without_tokens(scan.documents, scan.masked_zero)
        step = max(1, best.CHUNK_BYTES // (48 * NQ))
        for low in range(0, len(numbers), step):
            high = min(low + step, len(numbers))
            part = dataclasses.replace(scan, documents=scan.documents.slice(low, high))
            most = bound(sizes, part, where)
            score = run(part, None).scores.double()
            most = most.masked_fill(~score.isfinite(), float("inf"))  # nothing is known of it
            may = torch.ones(NQ, high - low, dtype=torch.bool, device=scan.device)
            if empty is not None:
                may &= ~empty[low:high]
            if blank is not None:
                may &= ~blank[:, None]
            least = torch.where(may & most.isfinite(), score - most, float("-inf"))
            floor = torch.cat([floor, least], 1).topk(k, dim=1).values
            may &= most.isinf() | (score + most >= floor[:, -1:])
            query, column = may.nonzero(as_tuple=True)
            found.append((query, numbers[low + column], score[may], most[may]))
            kept += len(query)
            if NQ > 1 and kept > CANDIDATES:
                found = [_above(found, floor)]
                kept = len(found[0][0])
                if kept > CANDIDATES // 2:
                    raise TooManyError
    query, document, score, most = _above(found, floor)
    upper = torch.where(most.isinf(), most, score + most)
    order = upper.sort(descending=True, stable=True).indices
    order = order[query[order].sort(stable=True).indices]
    query = query[order]
    position = torch.arange(len(query), device=query.device) - torch.searchsorted(query, query)
    return Candidates(query, document[order], position, score[order], most[order]), NQ


def _above(found: list[tuple[Tensor, ...]], floor: Tensor) -> tuple[Tensor, ...]:
    """Those of queries, numbers, scores and bounds that may be hits yet."""
    query, document, score, most = (torch.cat(each) for each in zip(*found, strict=True))
    may = most.isinf() | (score + most >= floor[query, -1])
    return query[may], document[may], score[may], most[may]


def _rescore(score: Callable[[Tensor], Tensor], candidates: Candidates, NQ: int, k: int) -> CertifiedTopK:
    """Exact scores of candidates, the most promising of each query first, until none that is left can be a hit."""
    query, device = candidates.query, candidates.query.device
    kth = torch.full((NQ, k), float("-inf"), dtype=torch.float32, device=device)
    upper = candidates.upper
    pairs, scores = [], []
    low, high = 0, k
    while True:
        chosen = (candidates.position >= low) & (candidates.position < high) & ~(upper < kth[query, -1])
        at = chosen.nonzero()[:, 0]
        if not len(at):
            break
        pair = torch.stack([query[at], candidates.document[at]], 1)
        found = score(pair)
        _check(candidates, at, found)
        pairs.append(pair)
        scores.append(found)
        kth = (
            _table(pair[:, 0], found, NQ, float("-inf"), kth)
            .nan_to_num(math.inf, math.inf, -math.inf)
            .topk(k, dim=1)
            .values
        )
        low, high = high, 2 * high
    pair = torch.cat(pairs) if pairs else query.new_zeros(0, 2)
    exact = torch.cat(scores) if scores else kth.new_zeros(0)
    order = pair[:, 1].sort(stable=True).indices  # ties: in the order of documents
    order = order[pair[order, 0].sort(stable=True).indices]
    query, document, exact = pair[order, 0], pair[order, 1], exact[order]
    indices = _table(query, document, NQ, -1, document.new_full((NQ, k), -1))
    values, indices = merge(_table(query, exact, NQ, float("-inf"), torch.full_like(kth, float("-inf"))), indices, k)
    rescored = torch.bincount(query, minlength=NQ)
    return CertifiedTopK(values.masked_fill(indices < 0, float("-inf")), indices, rescored)


def _table(query: Tensor, values: Tensor, NQ: int, fill: float, beside: Tensor) -> Tensor:
    """Values of queries, any number of each, in rows of a table with `beside` at its right."""
    order = query.sort(stable=True).indices
    query, values = query[order], values[order]
    counts = torch.bincount(query, minlength=NQ)
    column = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
    table = values.new_full((NQ, int(counts.max()) if NQ else 0), fill)
    table[query, column] = values
    return torch.cat([table, beside], 1)


def _check(candidates: Candidates, at: Tensor, exact: Tensor) -> None:
    """Raises MismatchError where an exact score is not within the bound, as it would be of what was quantised."""
    apart = (exact.double() - candidates.score[at]).abs() > candidates.bound[at]
    if bool(apart.any()):
        n = int(apart.nonzero()[0])
        i = int(at[n])
        raise MismatchError(
            f"exact document {int(candidates.document[i])} is not what was quantised: query {int(candidates.query[i])} "
            f"scores {float(exact[n]):.9g}, and of the codes {float(candidates.score[i]):.9g} ± "
            f"{float(candidates.bound[i]):.3g}"
        )
