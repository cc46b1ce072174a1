"""How far a score of quantised documents can be from the score of the documents they were made of."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import MaskLike, Problem, TokensLike, make_problem
from .precision import float32_is_exact
from .quantized import Quantized
from .quantized.scaled import encode_queries
from .stream import Stream

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SMALL = 2.0**-120  # a term's share of what underflow loses, for any width


def error_bound(
    queries: TokensLike,
    documents: Quantized,
    query_mask: MaskLike = None,
    document_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
) -> Tensor:
    """The most that `score(queries, documents)` can differ from the score of the documents that were quantised.

    With q_i the kept query tokens, q̂_i what is made of them (of "int8" and "fp8"; else q_i), r the largest ‖d − d̂‖ and
    h the largest ‖d̂‖ of a document's tokens, the bound is Σ‖q_i‖ r + Σ‖q_i − q̂_i‖ h, and what the arithmetic of both
    scores may add to that (documents in the queries' dtype). It is proven, not estimated: by Cauchy and Schwarz an
    inner product moves by no more than a norm times a distance, and a maximum by no more than its arguments; sums are
    bounded as by Higham (Accuracy and Stability of Numerical Algorithms, section 3.1). Actual differences are several
    times smaller. Masks leave it valid.

    Args:
        queries: as for `score`.
        documents: what `quantize` made.
        query_mask: as for `score`.
        document_mask: as for `score`.
        masked: as for `score`.
        normalize: as for `score`.

    Returns:
        float64 `[NQ, ND]` (candidates: `[NQ, K]`), infinite where a query token is not finite.

    Raises:
        TypeError: as `score`, and documents that are not `Quantized`.
        ValueError: as `score`, and documents whose tokens were never seen, read from an index of another library, and
            `fp8` codes on a GPU, whose tensor cores add up with an error that is not known.
    """
    if not isinstance(documents, Quantized):
        raise TypeError(f"documents must be Quantized, got {type(documents).__name__}")
    with torch.no_grad():
        problem = make_problem(queries, documents, query_mask, document_mask, masked, normalize)
        return bound(query_sizes(problem), problem)


class QuerySizes(NamedTuple):
    """Of each query, float64 `[NQ]`: Σ‖q_i‖, Σ‖q_i − q̂_i‖ and the number of its tokens."""

    norm: Tensor
    error: Tensor
    tokens: Tensor


def query_sizes(problem: Problem) -> QuerySizes:
    """Of the queries as the problem's codec takes them."""
    codes, stream = problem.documents.codes, Stream.of(problem.queries, problem.normalize)
    norms = torch.zeros(stream.rows, dtype=torch.float64, device=problem.device)
    errors = torch.zeros_like(norms)
    for block in stream.blocks():
        tokens = block.tokens.double()
        norms[block.low : block.high] = tokens.norm(dim=1)
        if codes is not None and codes.scaled:
            values, scale = encode_queries(block.tokens.float(), codes.codec)
            away = tokens - values.double() * scale.double()[:, None]
            errors[block.low : block.high] = away.norm(dim=1)
    norm, error, count = (stream.sums(each) for each in (norms, errors, torch.ones_like(norms)))
    if problem.normalize:  # here in float64, there in float32, which a code may be apart for, at a tie of almost equals
        error = error + 2.0**-20 * norm
    return QuerySizes(norm, error, count)


def bound(q: QuerySizes, problem: Problem, where: torch.device | None = None) -> Tensor:
    """`[NQ, ND]`, or `[NQ, K]`: of all queries of the problem and its documents. `where`: the device that scores the
    documents that were quantised, if another one.

    Raises:
        ValueError: codes whose documents were never seen, or that a GPU multiplies with an error that is not known.
    """
    codes, dtype, device = problem.documents.codes, problem.dtype, problem.device
    if codes is None or codes.radius is None or codes.norm is None:
        raise ValueError("these codes have no bound: the documents they were made of were never seen here")
    if codes.codec == "fp8" and device.type != "cpu":  # how tensor cores cut sums of e4m3 off is written nowhere
        raise ValueError(
            "fp8 codes have no proven bound on a GPU, whose tensor cores keep about 14 bits of a sum: "
            "take int8 codes, or documents.to('cpu')"
        )
    r, h = codes.radius.double(), codes.norm.double()
    if problem.per_query:
        r, h = r.view(-1, problem.per_query), h.view(-1, problem.per_query)
    exact = _product(dtype, codes.width, where or device)
    if codes.scaled:
        quantised = 2.0**-22 + (_product(torch.float32, codes.width, device) if codes.codec == "fp8" else 0.0)
    else:
        quantised = _product(dtype, codes.width, device) + 2 * ROUNDING[dtype]  # decoded tokens are rounded to it
    if codes.normalized:
        exact += 2.0**-20
    least = SMALL * q.tokens
    if not codes.scaled and dtype == torch.float16:  # decoded tokens beyond its range are inf, small ones less exact
        h = h.masked_fill(h >= torch.finfo(dtype).max, math.inf)
        least = least + q.norm * math.sqrt(codes.width) * 2.0**-24
    added = q.tokens * 2.0**-23  # sums over query tokens, in any order
    of_radius = q.norm * (1 + exact + added)
    of_norm = q.error + q.norm * (exact + added) + (q.norm + q.error) * (quantised + added)
    most = of_radius[:, None] * r + of_norm[:, None] * h
    # sums that may leave float32's range on the way are as far off as they like
    most = most.masked_fill((q.norm + q.error)[:, None] * (h + r) >= 2.0**126, math.inf)
    return (most * (1 + 2.0**-40) + least[:, None]).nan_to_num(nan=math.inf, posinf=math.inf)


def _product(dtype: torch.dtype, width: int, device: torch.device) -> float:
    """The error of an inner product relative to ‖q‖‖d‖: of float32 sums in any order, of tensor cores that truncate
    them, and of float32 inputs that PyTorch's switches let be rounded."""
    sums = 1.01 * width * (2.0**-24 if device.type == "cpu" else 2.0**-22)
    if dtype == torch.float64:
        return width * 2.0**-53
    if dtype != torch.float32:
        return sums
    if device.type == "cpu":
        exact = torch.backends.mkldnn.matmul.fp32_precision not in ("bf16", "tf32")  # type: ignore[attr-defined]
        return sums if exact else sums + 2.0**-7
    return sums + (2.0**-20 if float32_is_exact() else 2.0**-9)
