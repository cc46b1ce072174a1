"""Where lists lie that `lists` makes, for the kernels that make and read them: their entries, and their counters.

A position is a document's place in the order that lists are made in; `first` and `some` are as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sides import span

SIZE = tl.constexpr(65536)  # entries of a list, at most


@triton.jit
def item_of(pos, held):
    """The document at a position."""
    item = pos
    if held is not None:
        item = tl.load(held + pos)
    return item


@triton.jit
def _pairs_before(pos, first, some, pair_offsets):
    """How many of `some` pairs from `first` on belong to documents before a position."""
    return tl.minimum(tl.maximum(tl.load(pair_offsets + pos).to(tl.int64) - first, 0), some)


@triton.jit
def entries_of(pos, first, some, columns, pair_offsets):
    """How many entries of the lists made at once are those of documents before a position, and how many of the one
    there."""
    if pair_offsets is None:
        before = (pos.to(tl.int64) - first) * columns
        own = columns
    else:
        before = _pairs_before(pos, first, some, pair_offsets) * columns
        own = _pairs_before(pos + 1, first, some, pair_offsets) * columns - before
    return before, own


@triton.jit
def list_base(pos, doc, part, first, some, columns, pair_offsets):
    """Where the entries of a list begin: in the table (pairs: in `pair_order`, and in the row of that pair) and in
    `order`; how many they are."""
    before, own = entries_of(pos, first, some, columns, pair_offsets)
    if pair_offsets is None:
        skipped = part * SIZE
        at = doc.to(tl.int64) * columns + skipped
        rest = 0
        size = tl.minimum(columns - skipped, SIZE)
    else:
        skipped = (own * 0 + part) * SIZE
        at = first + _pairs_before(pos, first, some, pair_offsets) + skipped // columns
        rest = (skipped % columns).to(tl.int32)
        size = tl.minimum(tl.maximum(own - skipped, 0), SIZE)
    return at, rest, before + skipped, size.to(tl.int32)


@triton.jit
def won_by(winners, at, live):
    """The document tokens at these places of the winners table, −1: none."""
    won = tl.load(winners + at, mask=live, other=-1).to(tl.int32)
    if winners.dtype.element_ty == tl.int16:
        won = tl.where(won == -1, won, won & 0xFFFF)
    return won


@triton.jit
def tokens_of(pos, doc, first, pair_offsets, held, starts, ends, LD, TD):
    """The counter of a document's first token (in the document's first chunk), and how many tokens it has."""
    start, tokens = span(doc, starts, ends, LD, TD)
    if starts is None or held is not None:
        if pair_offsets is None:
            start = (pos - first) * LD
        else:
            start = pos * LD
    return start, tokens.to(tl.int32)


@triton.jit
def counters_of(start, c, before, chunk_log2, rows, spare):
    """Where the counters of chunk c begin, of a document whose first token has counter `start`.

    The first chunks of all documents have `rows` counters together; the others as many again each, or where that is
    less `spare`.
    """
    c = c.to(tl.int64)
    at = start + c * rows
    if spare > 0:
        at = tl.where(c > 0, rows + ((before >> chunk_log2) + c - 1) * spare, start + c * 0)
    return at


@triton.jit
def ends_of(counters, start, part, size, before, chunk_log2, rows, spare, pair_offsets):
    """The counters of a list's last chunk: where the entries of each token end."""
    if pair_offsets is None:
        last = part * SIZE
    else:
        last = (before * 0 + part) * SIZE
    last = (last + tl.maximum(size, 1) - 1) >> chunk_log2
    return counters + counters_of(start, last, before, chunk_log2, rows, spare)


@triton.jit
def position_of(j, first, some, columns, items, log2, pair_offsets):
    """Of blocks of 2 ** log2 entries, but for the first of each document: whose block j is, and which of its own; one
    past its last where j is nobody's."""
    low = items * 0
    high = items - 1
    while low < high:
        middle = (low + high + 1) // 2
        if (_pairs_before(middle, first, some, pair_offsets) * columns) >> log2 <= j:
            low = middle
        else:
            high = middle - 1
    earlier = (_pairs_before(low, first, some, pair_offsets) * columns) >> log2
    return low.to(tl.int64), (j - earlier + 1).to(tl.int32)
