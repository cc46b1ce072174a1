"""The best documents of each query, in memory."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from .graph import run
from .layout import MaskLike, Problem, Tokens, TokensLike, make_problem

CHUNK_BYTES = 16 << 20  # scores and keys of one chunk of documents


class TopK(NamedTuple):
    """scores: `[NQ, min(k, ND)]`, falling; indices: int64 of the same shape. −inf and −1 where there is no further
    hit."""

    scores: Tensor
    indices: Tensor


def topk(
    queries: TokensLike,
    documents: TokensLike,
    k: int,
    query_mask: MaskLike = None,
    document_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
    backend: str | None = None,
) -> TopK:
    """The k best documents of each query: score descending, then document index ascending. Not differentiable.

    Args:
        queries: as for `score`.
        documents: as for `score`, without candidates.
        k: at least 0; beyond the number of documents it gives them all.
        query_mask: as for `score`.
        document_mask: as for `score`.
        masked: as for `score`.
        normalize: as for `score`.
        backend: as for `score`.

    Returns:
        `TopK`: scores, float32 (float64 for float64 inputs), and indices, int64, both `[NQ, min(k, ND)]`, on the
            documents' device. Documents without kept tokens are never hits, and a query without kept tokens has none;
            a document that scores −inf by its similarities is one. `[NQ, ND]` scores are never held: documents are
            scored in chunks, whose size changes no hit.

    Raises:
        TypeError: as `score`, and k that is not an integer.
        ValueError: as `score`, and negative k, candidates per query.
        UnsupportedError: as `score`.
        NotImplementedError: as `score`.
    """
    k = check_k(k)
    with torch.no_grad():
        problem = make_problem(queries, documents, query_mask, document_mask, masked, normalize)
        if problem.per_query:
            raise ValueError("topk takes documents [ND, LD, D] or a flat list, got candidates per query")
        return top_documents(problem, k, backend)


def check_k(k: object) -> int:
    """k as Python's int; TypeError or ValueError for anything else than a whole number of at least 0."""
    try:
        if isinstance(k, bool):
            raise TypeError
        number = operator.index(k)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"k must be a whole number, got {type(k).__name__}: {k!r}") from None
    if number < 0:
        raise ValueError(f"k must not be negative, got {number}")
    return number


def top_documents(problem: Problem, k: int, backend: str | None = None) -> TopK:
    """`topk` of a checked problem."""
    NQ, ND = problem.shape
    k = min(k, ND)
    scores = torch.empty(NQ, 0, dtype=problem.result_dtype, device=problem.device)
    indices = torch.empty(NQ, 0, dtype=torch.int64, device=problem.device)
    blank = without_tokens(problem.queries, False)
    empty = without_tokens(problem.documents, problem.masked_zero)
    step = max(1, CHUNK_BYTES // (12 * max(NQ, 1)))
    for low in range(0, ND if k else 0, step):
        high = min(low + step, ND)
        part = Problem(
            problem.queries,
            problem.documents.slice(low, high),
            masked_zero=problem.masked_zero,
            normalize=problem.normalize,
        )
        found = run(part, backend).scores
        index = torch.arange(low, high, device=problem.device).expand(NQ, -1)
        if empty is not None:
            index = index.masked_fill(empty[low:high], -1)
        if blank is not None:
            index = index.masked_fill(blank[:, None], -1)
        scores, indices = merge(torch.cat([scores, found], 1), torch.cat([indices, index], 1), k)
    return TopK(scores.masked_fill(indices < 0, float("-inf")), indices)


def merge(scores: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best columns of each row, equal scores in the order of the columns: `[NQ, N]` twice → `[NQ, min(k, N)]`
    twice. Columns of a negative index are no hits and come last."""
    # a hit's −inf counts as the lowest finite score: before all that is no hit
    key = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill(indices < 0, float("-inf"))
    # sort, not topk: topk leaves the order of equal scores open
    order = key.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores.gather(1, order), indices.gather(1, order)


def without_tokens(tokens: Tokens, masked_count: bool) -> Tensor | None:
    """True for items without a kept token, `[count]`, or None where there is none. `masked_count`: masked rows count
    too."""
    mask = None if masked_count else tokens.mask
    if tokens.starts is None or tokens.ends is None:
        if mask is not None:
            return ~mask.any(1)
        return torch.ones(tokens.count, dtype=torch.bool, device=tokens.data.device) if tokens.max_length == 0 else None
    if mask is None:
        return tokens.ends <= tokens.starts
    kept = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    T = tokens.data.shape[0]
    return kept[tokens.ends.clamp(0, T)] <= kept[tokens.starts.clamp(0, T)]
