"""Lists of what each document token won, for the backward: a counting sort of the winners of every document.

The entries of a document (a row of the winners table; with pairs its rows one after another) are cut in lists of at
most SIZE, so that a position in a list takes two bytes. A list is sorted by the token that won and then by position, in
three steps: how often each token won in each chunk of a list, where its entries begin, and where each entry goes. A
list of one chunk takes one launch. The order is fixed: counters are integers, and the chunks of a list have counters of
their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import power_of_two
from .sides import Side, span

SIZE = tl.constexpr(65536)
PLACE = 64
CHUNKS = tl.constexpr(64)  # of a list, at most
# Sizes never make a new variant.
COMMON = ("first", "columns", "parts", "chunk", "chunks", "rows", "LD", "TD")
TABLES = ("pair_order", "pair_offsets", "starts", "ends")


class Lists(NamedTuple):
    """order: positions in a list's part of the table, list after list. counters: `[parts, chunks, rows]`, of the last
    chunk where a row's entries end. pair_order, pair_offsets: the pairs of each document."""

    order: Tensor | None
    counters: Tensor | None
    parts: int
    chunks: int
    pair_order: Tensor | None
    pair_offsets: Tensor | None


@triton.jit
def list_base(doc, part, first, columns, pair_offsets):
    """Where the entries of a list begin, in the table (pairs: in `pair_order`) and in `order`; how many they are."""
    if pair_offsets is None:
        skipped = part * SIZE
        size = tl.minimum(columns - skipped, SIZE)
        at = doc.to(tl.int64) * columns + skipped
        to = (doc.to(tl.int64) - first) * columns + skipped
    else:
        at = tl.load(pair_offsets + doc).to(tl.int64)
        size = (tl.load(pair_offsets + doc + 1) - at) * columns
        to = at * columns
    return at, to, size.to(tl.int32)


@triton.jit
def won_by(winners, at, live):
    """The document tokens at these places of the winners table, −1: none."""
    won = tl.load(winners + at, mask=live, other=-1).to(tl.int32)
    if winners.dtype.element_ty == tl.int16:
        won = tl.where(won == -1, won, won & 0xFFFF)
    return won


@triton.jit
def _winners(winners, pair_order, at, v, end, columns):
    """Which tokens won the entries v of a list that begins at `at`."""
    live = v < end
    if pair_order is None:
        place = at + v
    else:
        pair = tl.load(pair_order + at + v // columns, mask=live, other=0).to(tl.int64)
        place = pair * columns + v % columns
    return won_by(winners, place, live)


@triton.jit
def _counters(counters, doc, part, c, first, chunks, rows, starts, ends, LD, TD):
    """The counters of a chunk for the tokens of a document, and the number of those."""
    start, tokens = span(doc, starts, ends, LD, TD)
    if starts is None:
        start = (doc - first) * LD
    return counters + (part * chunks + c).to(tl.int64) * rows + start, tokens.to(tl.int32)


@triton.jit
def _place(order, counters, winners, pair_order, at, to, begin, end, size, columns, STEP: tl.constexpr):
    """Puts entries begin to end where they belong, STEP at a time: after those of the same token that came before."""
    i = tl.arange(0, STEP)
    after = _winners(winners, pair_order, at, begin + i, end, columns)
    for low in range(begin, end, STEP):
        won = after
        after = _winners(winners, pair_order, at, low + STEP + i, end, columns)
        live = won >= 0
        # of the same token: earlier ones count 1, this one and later ones 65536
        weight = tl.where(i[:, None] < i[None, :], 1, 65536)
        same = tl.sum(tl.where(won[:, None] == won[None, :], weight, 0), 0)
        place = tl.load(counters + won, mask=live, other=0) + (same & 0xFFFF)
        tl.debug_barrier()
        tl.store(order + to + place, (low + i).to(order.dtype.element_ty), mask=live & (place < size))
        tl.store(counters + won, place + 1, mask=live & ((same >> 16) == 1))
        tl.debug_barrier()


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _count_kernel(
    order, counters_ptr, winners, pair_order, pair_offsets, starts, ends,
    first, columns, parts, chunk, chunks, rows, LD, TD,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program a chunk. WHOLE: it is all of a list, and is sorted at once."""
    c = tl.program_id(0) % chunks
    part = tl.program_id(0) // chunks % parts
    doc = first + (tl.program_id(0) // chunks // parts).to(tl.int64)
    at, to, size = list_base(doc, part, first, columns, pair_offsets)
    counters, tokens = _counters(counters_ptr, doc, part, c, first, chunks, rows, starts, ends, LD, TD)
    begin = c * chunk
    end = size if WHOLE else tl.minimum(begin + chunk, size)
    lane = tl.arange(0, BLOCK)
    for low in range(0, tokens, BLOCK):
        tl.store(counters + low + lane, 0, mask=low + lane < tokens)
    tl.debug_barrier()
    for low in range(begin, end, BLOCK):
        won = _winners(winners, pair_order, at, low + lane, end, columns)
        tl.atomic_add(counters + won, 1, mask=won >= 0, sem="relaxed")
    if WHOLE:
        tl.debug_barrier()
        earlier = tokens * 0
        for low in range(0, tokens, BLOCK):
            # from where the atomics went, past the nearer cache
            count = tl.load(counters + low + lane, mask=low + lane < tokens, other=0, cache_modifier=".cg")
            tl.store(counters + low + lane, earlier + tl.cumsum(count, 0) - count, mask=low + lane < tokens)
            earlier += tl.sum(count, 0)
    if WHOLE:
        tl.debug_barrier()
        _place(order, counters, winners, pair_order, at, to, begin, end, size, columns, STEP)


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _begin_kernel(
    counters_ptr, starts, ends, first, parts, chunks, rows, LD, TD, BLOCK: tl.constexpr, CHUNKS: tl.constexpr
):
    """One program a list: how often each token won in each chunk → where those entries begin."""
    part = tl.program_id(0) % parts
    doc = first + (tl.program_id(0) // parts).to(tl.int64)
    counters, tokens = _counters(counters_ptr, doc, part, 0, first, chunks, rows, starts, ends, LD, TD)
    chunk = tl.arange(0, CHUNKS)
    earlier = tokens * 0
    for low in range(0, tokens, BLOCK):
        token = low + tl.arange(0, BLOCK)
        at = counters + chunk[:, None].to(tl.int64) * rows + token[None, :]
        real = (chunk < chunks)[:, None] & (token < tokens)[None, :]
        count = tl.load(at, mask=real, other=0)
        whole = tl.sum(count, 0)
        begin = earlier + tl.cumsum(whole, 0) - whole
        tl.store(at, begin[None, :] + tl.cumsum(count, 0) - count, mask=real)
        earlier += tl.sum(whole, 0)


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _place_kernel(
    order, counters_ptr, winners, starts, ends, first, columns, parts, chunk, chunks, rows, LD, TD, STEP: tl.constexpr
):
    """One program a chunk: its entries go where they belong."""
    c = tl.program_id(0) % chunks
    part = tl.program_id(0) // chunks % parts
    doc = first + (tl.program_id(0) // chunks // parts).to(tl.int64)
    at, to, size = list_base(doc, part, first, columns, None)
    counters, _ = _counters(counters_ptr, doc, part, c, first, chunks, rows, starts, ends, LD, TD)
    end = tl.minimum((c + 1) * chunk, size)
    _place(order, counters, winners, None, at, to, c * chunk, end, size, columns, STEP)


def chunk_size(tokens: int) -> int:
    """Entries of a chunk for documents of about so many tokens: its counters take a byte an entry at most."""
    return min(max(power_of_two(4 * tokens), 1024), int(SIZE.value))


def lists(
    winners: Tensor, d: Side, first: int, documents: int, pair_order: Tensor | None, pair_offsets: Tensor | None
) -> Lists:
    """The lists of `documents` documents from `first` on."""
    device, columns = winners.device, winners.shape[1]
    rows = d.rows or documents * d.length
    sizes = (d.length, d.rows)
    if pair_order is not None:
        parts, chunk, chunks, whole = 1, SIZE.value, 1, True
        # zeros: where wrong offsets make documents overlap, not every place is written
        order = torch.zeros(winners.numel(), dtype=torch.int32, device=device)
    else:
        parts = -(-columns // SIZE.value)
        chunk = chunk_size(d.rows // max(d.count, 1) if d.rows else d.length)
        whole = columns <= max(chunk, 2048)
        chunks = 1 if whole else -(-min(columns, SIZE.value) // chunk)
        order = torch.empty(documents * columns, dtype=torch.int16, device=device)
    counters = torch.empty(parts * chunks * rows, dtype=torch.int32, device=device)
    programs = (documents * parts * chunks,)
    shape = (first, columns, parts, chunk, chunks, rows, *sizes)
    _count_kernel[programs](
        order, counters, winners, pair_order, pair_offsets, d.starts, d.ends, *shape,
        WHOLE=whole, BLOCK=1024, STEP=128, num_warps=4,
    )  # fmt: skip
    if not whole:
        _begin_kernel[(documents * parts,)](
            counters, d.starts, d.ends, first, parts, chunks, rows, *sizes, BLOCK=64, CHUNKS=CHUNKS
        )
        _place_kernel[programs](order, counters, winners, d.starts, d.ends, *shape, STEP=PLACE, num_warps=1)
    return Lists(order, counters, parts, chunks, pair_order, pair_offsets)
