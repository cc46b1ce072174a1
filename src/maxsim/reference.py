"""The oracle: float64, plain loops, one line of the contract after another. Slow on purpose; imports nothing of
ours."""

from __future__ import annotations

import math

import numpy as np


def similarities(query: np.ndarray, document: np.ndarray, normalize: bool = False) -> np.ndarray:
    """`[LQ, D]` and `[LD, D]` → float64 `[LQ, LD]` inner products, of unit vectors where `normalize` (a zero row stays
    zero)."""
    query, document = np.asarray(query, np.float64), np.asarray(document, np.float64)
    if normalize:
        query = query / np.maximum(np.sqrt((query**2).sum(-1, keepdims=True)), 1e-12)
        document = document / np.maximum(np.sqrt((document**2).sum(-1, keepdims=True)), 1e-12)
    with np.errstate(invalid="ignore"):
        return np.array([[float(np.sum(q * d)) for d in document] for q in query]).reshape(len(query), len(document))


def best(row: np.ndarray, mask: np.ndarray | None, masked: str) -> tuple[float, int]:
    """One query token's similarities → the largest and where: the first of equals; −1 for nothing and for a masked
    zero."""
    value, where, found = -math.inf, -1, False
    for j, similarity in enumerate(row):
        keep = mask is None or bool(mask[j])
        if not keep and masked == "exclude":
            continue
        candidate = float(similarity) if keep else 0.0
        if math.isnan(value):
            break
        if not found or candidate > value or math.isnan(candidate):
            value, where, found = candidate, (j if keep else -1), True
    return value, where


def matches(
    query: np.ndarray,
    document: np.ndarray,
    query_mask: np.ndarray | None = None,
    document_mask: np.ndarray | None = None,
    masked: str = "exclude",
    normalize: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """→ index int64 `[LQ]`, similarity float64 `[LQ]`; −1 and 0 for masked query tokens."""
    index, value = np.full(len(query), -1, np.int64), np.zeros(len(query))
    rows = similarities(query, document, normalize)
    for i, row in enumerate(rows):
        if query_mask is None or query_mask[i]:
            value[i], index[i] = best(row, document_mask, masked)
    return index, value


def score(
    query: np.ndarray,
    document: np.ndarray,
    query_mask: np.ndarray | None = None,
    document_mask: np.ndarray | None = None,
    masked: str = "exclude",
    normalize: bool = False,
) -> float:
    """One query `[LQ, D]` against one document `[LD, D]`: Σ_i max_j ⟨q_i, d_j⟩ over the kept tokens."""
    has_tokens = len(document) > 0 if masked == "zero" or document_mask is None else bool(np.any(document_mask))
    if not has_tokens:
        return -math.inf
    _, value = matches(query, document, query_mask, document_mask, masked, normalize)
    total = 0.0
    for v in value:
        total += v
    return total


def gradients(
    query: np.ndarray,
    document: np.ndarray,
    index: np.ndarray,
    upstream: float = 1.0,
    normalize: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of `upstream · score` given the winners `index` `[LQ]` (−1: none) → float64 `[LQ, D]`, `[LD, D]`."""
    query, document = np.asarray(query, np.float64), np.asarray(document, np.float64)
    grad_query, grad_document = np.zeros_like(query), np.zeros_like(document)
    for i, j in enumerate(index):
        if j < 0:
            continue
        q, d = query[i], document[j]
        if not normalize:
            grad_query[i] += upstream * d
            grad_document[j] += upstream * q
            continue
        q_norm, d_norm = max(math.sqrt((q**2).sum()), 1e-12), max(math.sqrt((d**2).sum()), 1e-12)
        q, d = q / q_norm, d / d_norm
        grad_query[i] += upstream * (d - (q @ d) * q) / q_norm
        grad_document[j] += upstream * (q - (q @ d) * d) / d_norm
    return grad_query, grad_document


def code_scale(tokens: np.ndarray, codec: str) -> np.float32:
    """Of all these tokens together, `[D]` or `[L, D]`: the largest magnitude becomes the largest code."""
    largest = np.float32(np.abs(np.asarray(tokens, np.float64)).max(initial=0.0))
    limit = {"int8": 127, "fp8": 448}[codec]
    return max(np.float32(largest / np.float32(limit)), np.float32(2.0**-126))


def code_factors(document: np.ndarray, codec: str) -> tuple[np.float32, np.ndarray]:
    """Where tokens have scales of their own: the document's scale, and how often each token's is that, a whole number
    up to a power of two that keeps products of `int8` codes below 2^31."""
    most = 2**14
    while codec == "int8" and most * 127 * 127 * document.shape[1] >= 2**31:
        most //= 2
    wanted = np.array([code_scale(token, codec) for token in document], np.float32)
    scale = max(np.float32(wanted.max(initial=0.0) / np.float32(most)), np.float32(2.0**-126))
    return scale, np.clip(np.ceil(wanted / scale), 1, most).astype(np.float64)


def code_values(token: np.ndarray, scale: np.float32, codec: str) -> np.ndarray:
    """A token `[D]` → its codes as numbers: the float32 quotients, rounded to the nearest, ties to even, saturating.

    A quantised token is `scale * codes` (`scale` the document's, or that times the token's factor, rounded to float32
    for the quotient but not for the product); a score of quantised documents is the score of such documents and, of
    `int8` and `fp8`, of query tokens quantised each with a scale of its own.
    """
    known = np.arange(128.0)
    if codec == "fp8":  # e4m3: 4 bits of exponent, of which the last has no infinity, 3 of mantissa, and no sign
        bits = np.arange(127)
        exponent, mantissa = bits >> 3, bits & 7
        known = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    codes = []
    for x in np.asarray(token, np.float64):
        quotient = float(np.float32(x) / scale)
        distance = np.abs(known - abs(quotient))
        nearest = np.flatnonzero(distance == distance.min())
        place = nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1]
        codes.append(math.copysign(float(known[place]), quotient))
    return np.array(codes)


def residual_token(
    codes: np.ndarray, centroid: np.ndarray, weights: np.ndarray, renormalize: bool = False
) -> np.ndarray:
    """Bytes `[W]` → the token `[D]`: its centroid and, of each dimension, the weight of a bucket. A byte holds numbers
    from its highest bits down, each with its lowest bit first."""
    bits, numbers = int(math.log2(len(weights))), []
    for byte in codes:
        digits = format(int(byte), "08b")
        numbers += [int(digits[at : at + bits][::-1], 2) for at in range(0, 8, bits)]
    token: np.ndarray = np.array([float(c) + float(weights[n]) for c, n in zip(centroid, numbers, strict=False)])
    return token / max(math.sqrt(float((token**2).sum())), 1e-12) if renormalize else token


def product_token(codes: np.ndarray, books: np.ndarray) -> np.ndarray:
    """Numbers of codewords `[M]` → the token, theirs side by side. `books`: `[M, K, D / M]`."""
    return np.concatenate([np.asarray(book[code], np.float64) for code, book in zip(codes, books, strict=True)])
