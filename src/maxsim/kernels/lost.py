"""Which scores of products of float16 halves must be found again: halves lose inf and what is beyond float32's range.
Such a score is NaN or inf; −inf is an empty document's alone."""

from __future__ import annotations

import triton
import triton.language as tl

LOST_DOCUMENTS = 64  # at which a program looks at once


@triton.jit
def any_lost(out_ptr, tile, item, items, first, ND_OUT, part, parts, NQ, block_log2, LOG2: tl.constexpr):
    """1 where a score of a query tile with some documents is lost, else 0."""
    g = tl.arange(0, 1 << (LOG2 - 4))
    m = ((tile // parts) << (LOG2 - block_log2)) + g
    there = ((g < (1 << (LOG2 - block_log2))) & (m < NQ))[:, None] & (item < first + items)[None, :]
    at = (m.to(tl.int64)[:, None] * ND_OUT + (item - first)[None, :]) * parts + part
    score = tl.load(out_ptr + at, mask=there, other=0.0)
    lost = ((score < float("inf")) == 0).to(tl.int32)
    return tl.max(tl.max(lost, 1), 0)
