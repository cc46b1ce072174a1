"""Queries in tiles: how many there are, which tokens are kept, and the sum of a long query's blocks, on Hopper of
pieces of documents too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import maximum
from .configs import power_of_two
from .launches import Launch
from .sides import ONE_GROUP, Side, base, span


def tiled(length: int, count: int, rows: int) -> tuple[int, int, int]:
    """`count` queries of up to `length` tokens in tiles of so many rows: the rows of a query's block, a power of two;
    how many blocks a query has; how many tiles there are. Queries of one block share tiles."""
    block, parts = min(rows, max(16, power_of_two(length))), max(1, -(-length // rows))
    return block, parts, parts * count if parts > 1 else -(-count * block // rows)


@triton.jit(do_not_specialize=("LQ", "TQ", "m_item", "m_row"))
def _kept_rows_kernel(mask_ptr, starts, ends, rows_ptr, kept_ptr, LQ, TQ, m_item, m_row, CONSECUTIVE: tl.constexpr):
    """One program a query: the positions of its kept tokens, in order, and their number."""
    n = tl.program_id(0).to(tl.int64)
    start, length = span(n, starts, ends, LQ, TQ)
    column = start if CONSECUTIVE else n * LQ
    mask_ptr += base(n, start, starts, ONE_GROUP, 0, m_item, m_row)
    position = tl.arange(0, 1024)
    kept = tl.zeros([1], tl.int32)
    for low in range(0, length, 1024):
        at = low + position
        keep = (tl.load(mask_ptr + at.to(tl.int64) * m_row, mask=at < length, other=0) != 0).to(tl.int32)
        slot = column + kept + tl.cumsum(keep, 0) - 1
        tl.store(rows_ptr + slot, at.to(tl.int32), mask=keep != 0)
        kept += tl.sum(keep, 0)
    tl.store(kept_ptr + n + tl.arange(0, 1), kept)


def kept_rows(q: Side) -> tuple[Tensor | None, Tensor | None]:
    """Positions of the kept tokens of each masked query, compacted: int32, a slot a token row, and their number, int32
    `[NQ]`; None twice without a mask."""
    if q.mask is None:
        return None, None
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


@triton.jit
def _begins(doc, starts, ND, LD, TD):
    """Which of all document tokens is a document's first; one past the last for the document after the last."""
    if starts is None:
        first = doc.to(tl.int64) * LD
    else:
        first = tl.load(starts + tl.minimum(doc, ND - 1)).to(tl.int64)
        first = tl.where(doc < ND, tl.minimum(tl.maximum(first, 0), TD), TD)
    return first


@triton.jit(do_not_specialize=("ND", "LD", "TD", "q_tiles", "parts", "streams"))
def _sum_pieces_kernel(pieces_ptr, out_ptr, starts, ND, LD, TD, q_tiles, parts, streams, BLOCK_LD: tl.constexpr):
    """One program a score: the maxima of 128 query tokens over the pieces of the document, their sum as a tree of
    adjacent pairs, and the sum of those sums in order."""
    score = tl.program_id(0)
    doc = score % ND
    row = tl.arange(0, 128)
    tokens = _begins(ND, starts, ND, LD, TD)
    # A stream begins at token stream · q_tiles · tokens // streams, there in the last document that begins at or before
    # it; at the document's first token if fewer than BLOCK_LD lie between. A query tile begins with document 0.
    past = tl.maximum(_begins(doc + 1, starts, ND, LD, TD), 1)
    begun = tl.minimum(_begins(doc, starts, ND, LD, TD) + BLOCK_LD, past)
    total = tl.full([1], -0.0, tl.float32)
    for part in range(parts):
        tile = (score // ND).to(tl.int64) * parts + part
        pair = tile // 2
        first = ((pair * tokens + begun) * streams - 1) // (q_tiles * tokens)  # the last that begins before
        last = ((pair * tokens + past) * streams - 1) // (q_tiles * tokens)
        value = tl.full([128], float("-inf"), tl.float32)
        for stream in range(first, last + 1):
            value = maximum(value, tl.load(pieces_ptr + ((pair * ND + doc + stream) * 2 + tile % 2) * 128 + row))
        for level in tl.static_range(7):
            value = tl.sum(tl.reshape(value, [64 >> level, 2]), 1)
        total += value
    tl.store(out_ptr + score + tl.arange(0, 1), total)


def sum_pieces(
    pieces: Tensor, out: Tensor, starts: Tensor | None, queries: int, documents: int, length: int, rows: int,
    q_tiles: int, parts: int, streams: int, block: int,
) -> Launch:  # fmt: skip
    """Scores of long queries from the maxima that streams found of documents: pieces `[q_tiles · documents + streams,
    2, 128]`, of a document and a stream at the sum of their numbers."""
    programs = (queries * documents, 1, 1)
    arguments = (starts, documents, length, rows, q_tiles, parts, streams, block)
    return Launch(_sum_pieces_kernel[programs](pieces, out, *arguments, num_warps=1), programs, arguments)
