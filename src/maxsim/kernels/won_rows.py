"""Gradients of documents of which few tokens won anything (few query tokens, long documents): programs own entries of
the lists instead of rows, those of the first entry of a row its sum; others fill the rows that won nothing with zeros
meanwhile. Lists are whole (of one chunk), so that a row's counter lies at its place. KD of 32 queries of 32 tokens with
32 documents of 300 each: 9 rows of 10 won nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lists import won_by
from .sides import span

FILL = tl.constexpr(32)  # rows that a program fills


@triton.jit
def won_row(entry, entries, first, columns, order, counters, winners, starts, ends, LD, TD, rows):
    """The row that an entry of the lists is the first of; `rows` where it is of none."""
    live = entry < entries
    doc = first + entry // columns
    at = tl.load(order + entry, mask=live, other=0).to(tl.int32) & 0xFFFF
    live = live & (at < columns)  # not every place of a list is written
    won = won_by(winners, doc * columns + at, live)
    live = live & (won >= 0)
    if starts is None:
        row = (doc - first) * LD + won
    else:
        row = span(tl.where(live, doc, 0), starts, ends, LD, TD)[0] + won
    begin = tl.load(counters + row - 1, mask=live & (won > 0), other=0)
    return tl.where(live & (begin == entry % columns), row, rows)


@triton.jit
def fill_others(
    block, out, first_row, rows, first, some, counters, owner, starts, ends, LD, TD, D, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Zeros in rows of a block that won nothing: of documents of this chunk, and with its first one those of none."""
    row = block * FILL + tl.arange(0, FILL)
    mine = row < rows
    if owner is None:
        i = row % LD
        held = mine
    else:
        doc = tl.load(owner + row, mask=mine, other=-1).to(tl.int64)
        held = mine & (doc >= first) & (doc < first + some)
        mine = held | (mine & (doc < 0) & (first == 0))
        i = row - span(tl.where(held, doc, 0), starts, ends, LD, TD)[0]
        held = held & (i < LD)  # longer documents are cut there
    end = tl.load(counters + row, mask=held, other=0)
    begin = tl.load(counters + row - 1, mask=held & (i > 0), other=0)
    mine = mine & (end == begin)
    d = tl.arange(0, BLOCK_D)
    zeros = tl.zeros([FILL, BLOCK_D], out.dtype.element_ty)
    tl.store(out + (first_row + row)[:, None] * D + d[None, :], zeros, mask=mine[:, None] & (d < D)[None, :])
