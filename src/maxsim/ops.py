"""The public scoring functions: arguments in, one `Problem`, one backend, a tensor out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import plans
from .autograd import planned_scores
from .dispatch import select
from .graph import differentiable_scores, run
from .layout import Array, MaskLike, Problem, TokensLike, make_problem
from .result import Scored


class Matches(NamedTuple):
    """Which document token each query token matched, and how well.

    index: int64 `[NQ, ND, LQ]` (candidates: `[NQ, K, LQ]`), −1 where nothing, or a masked zero, wins, and for masked
        query tokens.
    similarity: float32 (float64 for float64 inputs) of the same shape; exactly the terms summed in the score (0 for
        masked query tokens).
    """

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, on purpose
    similarity: Tensor


def score(
    queries: TokensLike,
    documents: TokensLike,
    query_mask: MaskLike = None,
    document_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Late-interaction scores, `Σ_i max_j ⟨q_i, d_j⟩`, of every query with every document. Differentiable in both.

    Args:
        queries: `[NQ, LQ, D]`, one `[LQ, D]`, a list of `[L_i, D]` (torch or numpy), `Packed`, `Views` or a jagged
            nested tensor, in float16, bfloat16 or float32 (float64 on the CPU). They move to the documents' device.
        documents: the same forms and dtype; or candidates of each query, `[NQ, K, LD, D]` or a list of lists; or
            `Quantized` (see `quantize`), with queries of any dtype but float64. Never moved or copied, but a list
            costs one packed copy.
        query_mask: boolean, True = keep, any pattern: `[NQ, LQ]`, for a list one mask an item (or one
            `[N, longest]`, of which each item takes as many entries as it has tokens, from the left; one that keeps
            some beyond and not all of these is refused where it is on the CPU), for `Packed` and `Views` `[T]`.
        document_mask: the same for documents (`[NQ, K, LD]` with candidates).
        masked: "exclude": masked document tokens take no part. "zero": they compete with similarity 0, as padding with
            zero vectors does.
        normalize: score unit vectors (each token divided by its L2 norm, a zero token stays zero).
        backend: "cpu", "triton" or "hopper"; None takes the fastest that serves the problem exactly.

    Returns:
        float32 (float64 for float64 inputs) `[NQ, ND]`, with candidates `[NQ, K]`, on the documents' device. A document
        without kept tokens scores −inf; a query without kept tokens 0 (−inf against an empty document). May be
        overwritten in place.

    Raises:
        TypeError: dtypes that differ or are not floats, masks that are not boolean.
        ValueError: wrong shapes, widths that differ, unknown `masked`.
        UnsupportedError: no backend, or not the one asked for, serves the problem; says why.
        NotImplementedError: inside a transform of torch.func, or with a forward-mode tangent; says what to use instead.

    The formula is equation 3 of ColBERT (Khattab and Zaharia, arXiv 2004.12832).
    """
    key = None
    plain = query_mask is None and document_mask is None and masked == "exclude"
    if plain and not torch.compiler.is_compiling():
        key = plans.key(queries, documents, normalize, backend)
        found = plans.recall(key, queries, documents)
        if found is not None:
            return found
    problem = make_problem(queries, documents, query_mask, document_mask, masked, normalize)
    if key is None:
        return _grid(differentiable_scores(problem, backend), problem)
    scores, plan = planned_scores(problem, backend)
    plans.remember(key, documents, plan)
    return _grid(scores, problem)


def score_pairs(
    queries: TokensLike,
    documents: TokensLike,
    pairs: Array | Sequence[Any] | None = None,
    query_mask: MaskLike = None,
    document_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Scores of chosen (query, document) pairs. Differentiable in both.

    Args:
        queries: as for `score`.
        documents: as for `score`, without candidates.
        pairs: int32 or int64 `[P, 2]`, (query, document) a row, in any order, repeats allowed. None: query i with
            document i.
        query_mask: as for `score`.
        document_mask: as for `score`.
        masked: as for `score`.
        normalize: as for `score`.
        backend: as for `score`.

    Returns:
        float32 (float64 for float64 inputs) `[P]`, each with the bits that `score` gives that pair.

    Raises:
        TypeError: as `score`, and pairs that are not whole numbers.
        ValueError: as `score`, and pairs of another shape or out of range (checked where they are on the CPU, clamped
            on a GPU and in a compiled function); without pairs, numbers of queries and documents that differ.
        UnsupportedError: as `score`.
        NotImplementedError: as `score`.
    """
    problem = make_problem(queries, documents, query_mask, document_mask, masked, normalize, pairs, pairwise=True)
    return differentiable_scores(problem, backend)


def matches(
    queries: TokensLike,
    documents: TokensLike,
    query_mask: MaskLike = None,
    document_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
    backend: str | None = None,
) -> Matches:
    """Which document token each query token matched: the explanation of a score, token by token. Not differentiable.

    Packed queries whose offsets live on a GPU are the one form that is waited for: their longest length is a dimension
    of the result.

    Args:
        queries: as for `score`.
        documents: as for `score`.
        query_mask: as for `score`.
        document_mask: as for `score`.
        masked: as for `score`.
        normalize: as for `score`.
        backend: as for `score`.

    Returns:
        `Matches`: index, int64, and similarity, float32 (float64 for float64 inputs), both `[NQ, ND, LQ]`, with
            candidates `[NQ, K, LQ]`, on the documents' device. Of equal similarities the lowest document token wins. A
            query of a ragged form that is shorter than the longest is filled with index −1 and similarity 0.

    Raises:
        TypeError: as `score`.
        ValueError: as `score`.
        UnsupportedError: as `score`.
        NotImplementedError: as `score`.
    """
    with torch.no_grad():
        problem = make_problem(queries, documents, query_mask, document_mask, masked, normalize)
        return matches_of(run(problem, backend, winners=True, maxima=True), problem)


def backend_for(
    queries: TokensLike,
    documents: TokensLike,
    query_mask: MaskLike = None,
    document_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
) -> str:
    """Which backend `score` would take for these arguments. Nothing is scored.

    Args:
        queries: as for `score`.
        documents: as for `score`.
        query_mask: as for `score`.
        document_mask: as for `score`.
        masked: as for `score`.
        normalize: as for `score`.

    Returns:
        "cpu", "triton" or "hopper".

    Raises:
        TypeError: as `score`.
        ValueError: as `score`.
        UnsupportedError: as `score`.
    """
    problem = make_problem(queries, documents, query_mask, document_mask, masked, normalize)
    return select(problem).NAME


def matches_of(result: Scored, problem: Problem) -> Matches:
    """What a backend found, by query and document."""
    assert result.winners is not None
    assert result.maxima is not None
    index = result.winners.long()
    if result.winners.dtype == torch.int16:
        index = torch.where(index == -1, index, index & 0xFFFF)
    return Matches(_per_token(index, problem, -1), _per_token(result.maxima, problem, 0))


def _grid(scores: Tensor, problem: Problem) -> Tensor:
    return scores.view(problem.queries.count, problem.per_query) if problem.per_query else scores


def _per_token(table: Tensor, problem: Problem, fill: Any) -> Tensor:
    """A winners table (`Problem.winners_shape`) → `[NQ, ND or K, LQ]`."""
    q = problem.queries
    if problem.per_query:
        return table.view(q.count, problem.per_query, q.max_length)
    ND = problem.documents.count
    if not q.consecutive:
        return table.view(ND, q.count, q.max_length).transpose(0, 1)
    assert q.starts is not None
    assert q.ends is not None
    longest = min(int((q.ends - q.starts).max()), q.max_length) if q.count else 0
    position = torch.arange(longest, device=table.device)
    column = (q.starts[:, None] + position).clamp(0, max(q.columns - 1, 0))
    if q.columns == 0:
        return table.new_full((q.count, ND, 0), fill)
    inside = position < (q.ends - q.starts)[:, None]
    return torch.where(
        inside[:, None], table[:, column].transpose(0, 1), torch.full((), fill, dtype=table.dtype, device=table.device)
    )
