"""The two small kernels around the forward: which query tokens are kept, and the sum of a long query's blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import Launch
from .sides import Side, base, span


@triton.jit(do_not_specialize=("LQ", "TQ", "m_item", "m_row"))
def _kept_rows_kernel(mask_ptr, starts, ends, rows_ptr, kept_ptr, LQ, TQ, m_item, m_row, CONSECUTIVE: tl.constexpr):
    """One program a query: the positions of its kept tokens, in order, and their number."""
    n = tl.program_id(0).to(tl.int64)
    start, length = span(n, starts, ends, LQ, TQ)
    column = start if CONSECUTIVE else n * LQ
    mask_ptr += base(n, start, starts, 2147483647, 0, m_item, m_row)
    position = tl.arange(0, 1024)
    kept = tl.zeros([1], tl.int32)
    for low in range(0, length, 1024):
        at = low + position
        keep = (tl.load(mask_ptr + at.to(tl.int64) * m_row, mask=at < length, other=0) != 0).to(tl.int32)
        slot = column + kept + tl.cumsum(keep, 0) - 1
        tl.store(rows_ptr + slot, at.to(tl.int32), mask=keep != 0)
        kept += tl.sum(keep, 0)
    tl.store(kept_ptr + n + tl.arange(0, 1), kept)


def kept_rows(q: Side) -> tuple[Tensor, Tensor]:
    """Positions of the kept tokens of each masked query, compacted: int32, a slot a token row, and their number, int32
    `[NQ]`."""
    assert q.mask is not None
    slots = q.rows if q.consecutive else q.count * q.length
    rows = torch.empty(max(slots, 1), dtype=torch.int32, device=q.data.device)
    kept = torch.empty(q.count, dtype=torch.int32, device=q.data.device)
    _kept_rows_kernel[(q.count,)](
        q.mask, q.starts, q.ends, rows, kept, q.length, q.rows, q.mask_item, q.mask_row, CONSECUTIVE=q.consecutive
    )
    return rows, kept


@triton.jit(do_not_specialize=("first", "columns", "ND_OUT", "count", "parts"))
def _sum_parts_kernel(parts_ptr, out_ptr, first, columns, ND_OUT, count, parts, BLOCK: tl.constexpr):
    """Sums of the blocks of long queries, in order: parts `[rows, columns, parts]` → out `[rows, ND_OUT]` from column
    `first`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts_ptr + at * parts, mask=at < count, other=0.0)
    for part in range(1, parts):
        total += tl.load(parts_ptr + at * parts + part, mask=at < count, other=0.0)
    tl.store(out_ptr + (at // columns) * ND_OUT + first + at % columns, total, mask=at < count)


def sum_parts(parts: Tensor, out: Tensor, first: int, columns: int, items: int, count: int, blocks: int) -> Launch:
    """Adds up the blocks of `count` scores of long queries, in order."""
    programs = (-(-count // 256), 1, 1)
    arguments = (first, columns, items, count, blocks, 256)
    return Launch(_sum_parts_kernel[programs](parts, out, *arguments), programs, arguments)
