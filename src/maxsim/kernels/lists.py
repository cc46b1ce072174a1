"""Lists of what each document token won, for the backward: a counting sort of the winners of every document.

The entries of a document (a row of the winners table; with pairs its rows one after another) are cut in lists of at
most SIZE, so that a place in a list takes two bytes. A list is sorted by the token that won and then by place, in
three steps: how often each token won in each chunk of a list, where its entries begin, and where each entry goes. A
list of one chunk takes one launch. The order is fixed: counters are integers, and the chunks of a list have counters of
their own.

Documents are counted by position: those that may overlap (`held`) in the order in which they begin, others as they
come. Lists are made of `some` positions from `first` on; with pairs, which are in the order of their documents, of
`some` pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .configs import power_of_two
from .launches import Slot, Steps
from .list_places import SIZE, counters_of, entries_of, item_of, list_base, position_of, tokens_of, won_by
from .sides import Side

PLACE = 64  # entries that a program puts where they belong at once
CHUNKS = tl.constexpr(64)  # of a list, at most
# Sizes never make a new variant.
COMMON = ("first", "some", "columns", "items", "list_log2", "chunk_log2", "chunks", "rows", "spare", "LD", "TD")
TABLES = ("pair_order", "pair_offsets", "held", "starts", "ends")


class Pairs(NamedTuple):
    """The pairs of each item: one after another, and where each item's begin."""

    order: Slot | None
    offsets: Slot | None


class Lists(NamedTuple):
    """order: positions in a list, list after list. counters: those of a document's chunks (`counters_of`); of a list's
    last chunk, where the entries of each token end."""

    order: Slot
    counters: Slot
    shape: tuple[int, int, int]  # chunk_log2, rows, spare


@triton.jit
def _winners(winners, pair_order, at, rest, v, end, columns):
    """Which tokens won the entries v of a list that begins at `at`."""
    live = v < end
    if pair_order is None:
        place = at + v
    else:
        pair = tl.load(pair_order + at + (rest + v) // columns, mask=live, other=0).to(tl.int64)
        place = pair * columns + (rest + v) % columns
    return won_by(winners, place, live)


@triton.jit
def _block(first, some, columns, items, log2, blocks, pair_offsets):
    """A program's block of 2 ** log2 entries: whose it is, and which of its own (`blocks` where all have as many)."""
    pid = tl.program_id(0)
    if pair_offsets is None:
        pos = first + (pid // blocks).to(tl.int64)
        block = pid % blocks
    else:
        pos = pid.to(tl.int64)
        block = pid * 0
        if pid >= items:
            pos, block = position_of(pid - items, first, some, columns, items, log2, pair_offsets)
    return pos, block


@triton.jit
def _chunk(
    counters, first, some, columns, items, chunk_log2, chunks, rows, spare, pair_offsets, held, starts, ends, LD, TD
):  # fmt: skip
    """A program's chunk: where its list begins and how many entries that has (`list_base`), its counters and their
    number, where in the list it begins and ends, and whether it is all of it."""
    pos, c = _block(first, some, columns, items, chunk_log2, chunks, pair_offsets)
    doc = item_of(pos, held)
    skipped = c.to(tl.int64) << chunk_log2
    part = skipped // SIZE
    at, rest, to, size = list_base(pos, doc, part, first, some, columns, pair_offsets)
    before, _ = entries_of(pos, first, some, columns, pair_offsets)
    start, tokens = tokens_of(pos, doc, first, pair_offsets, held, starts, ends, LD, TD)
    counters += counters_of(start, c, before, chunk_log2, rows, spare)
    begin = (skipped - part * SIZE).to(tl.int32)
    end = tl.minimum(begin + (1 << chunk_log2), size)
    tokens = tl.where((c == 0) | (begin < size), tokens, 0)  # nobody's chunk has none
    return at, rest, to, size, counters, tokens, begin, end, (begin == 0) & (end == size)


@triton.jit
def _place(
    order, counters, winners, pair_order, at, rest, to, begin, end, size, columns, STEP: tl.constexpr
):  # fmt: skip
    """Puts entries begin to end where they belong, STEP at a time: after those of the same token that came before."""
    i = tl.arange(0, STEP)
    after = _winners(winners, pair_order, at, rest, begin + i, end, columns)
    for low in range(begin, end, STEP):
        won = after
        after = _winners(winners, pair_order, at, rest, low + STEP + i, end, columns)
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
    order, counters_ptr, winners, pair_order, pair_offsets, held, starts, ends,
    first, some, columns, items, chunk_log2, chunks, rows, spare, LD, TD,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program a chunk. WHOLE: one that is all of a list is sorted at once."""
    at, rest, to, size, counters, tokens, begin, end, whole = _chunk(
        counters_ptr, first, some, columns, items, chunk_log2, chunks, rows, spare, pair_offsets, held, starts, ends,
        LD, TD,
    )  # fmt: skip
    lane = tl.arange(0, BLOCK)
    for low in range(0, tokens, BLOCK):
        tl.store(counters + low + lane, 0, mask=low + lane < tokens)
    tl.debug_barrier()
    for low in range(begin, end, BLOCK):
        won = _winners(winners, pair_order, at, rest, low + lane, end, columns)
        tl.atomic_add(counters + won, 1, mask=won >= 0, sem="relaxed")
    if WHOLE:
        tl.debug_barrier()
        if whole:
            earlier = tokens * 0
            for low in range(0, tokens, BLOCK):
                # from where the atomics went, past the nearer cache
                count = tl.load(counters + low + lane, mask=low + lane < tokens, other=0, cache_modifier=".cg")
                tl.store(counters + low + lane, earlier + tl.cumsum(count, 0) - count, mask=low + lane < tokens)
                earlier += tl.sum(count, 0)
            tl.debug_barrier()
            _place(order, counters, winners, pair_order, at, rest, to, begin, end, size, columns, STEP)


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _begin_kernel(
    counters_ptr, pair_offsets, held, starts, ends,
    first, some, columns, items, list_log2, chunk_log2, chunks, rows, spare, LD, TD,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program a list, `chunks` a document: how often each token won in each chunk → where those entries begin.
    WHOLE: but in a list of one chunk."""
    pos, part = _block(first, some, columns, items, list_log2, chunks, pair_offsets)
    doc = item_of(pos, held)
    _, _, _, size = list_base(pos, doc, part, first, some, columns, pair_offsets)
    before, _ = entries_of(pos, first, some, columns, pair_offsets)
    start, tokens = tokens_of(pos, doc, first, pair_offsets, held, starts, ends, LD, TD)
    chunk = tl.arange(0, CHUNKS)
    c = part.to(tl.int64) << (list_log2 - chunk_log2)
    step = tl.where(spare > 0, spare, rows)  # from a chunk's counters to those of the next, but for the first of all
    others = counters_of(start, c + 1, before, chunk_log2, rows, spare) + (chunk.to(tl.int64) - 1) * step
    counters = counters_ptr + tl.where(chunk == 0, counters_of(start, c, before, chunk_log2, rows, spare), others)
    there = (chunk << chunk_log2) < size
    earlier = tokens * 0
    if WHOLE:
        tokens = tl.where(size > (1 << chunk_log2), tokens, 0)
    for low in range(0, tokens, BLOCK):
        token = low + tl.arange(0, BLOCK)
        at = counters[:, None] + token[None, :]
        real = there[:, None] & (token < tokens)[None, :]
        count = tl.load(at, mask=real, other=0)
        whole = tl.sum(count, 0)
        begin = earlier + tl.cumsum(whole, 0) - whole
        tl.store(at, begin[None, :] + tl.cumsum(count, 0) - count, mask=real)
        earlier += tl.sum(whole, 0)


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _place_kernel(
    order, counters_ptr, winners, pair_order, pair_offsets, held, starts, ends,
    first, some, columns, items, chunk_log2, chunks, rows, spare, LD, TD,
    WHOLE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program a chunk: its entries go where they belong. WHOLE: but of a list of one chunk."""
    at, rest, to, size, counters, _, begin, end, whole = _chunk(
        counters_ptr, first, some, columns, items, chunk_log2, chunks, rows, spare, pair_offsets, held, starts, ends,
        LD, TD,
    )  # fmt: skip
    if WHOLE:
        end = tl.where(whole, begin, end)
    _place(order, counters, winners, pair_order, at, rest, to, begin, end, size, columns, STEP)


def chunk_size(tokens: int) -> int:
    """Entries of a chunk for documents of up to so many tokens: its counters take a byte an entry at most."""
    return min(max(power_of_two(4 * tokens), 1024), int(SIZE.value))


def lists(
    steps: Steps, winners: Slot, d: Side, first: int, some: int, columns: int, pairs: Pairs | None, held: Slot | None
) -> Lists:
    """The lists of `some` documents from position `first` on (with pairs of all, of as many pairs), of winners
    `[.., columns]`."""
    size_log2, documents = SIZE.value.bit_length() - 1, some if pairs is None else d.count
    tokens = d.rows if d.rows and held is None else documents * d.length
    longest = min(d.length, d.rows) if d.rows else d.length
    entries = some * columns
    chunk = chunk_size(longest)
    together = pairs is not None or columns <= max(chunk, 2048)  # whether lists of one chunk are sorted at once
    if together:  # of pairs without asking how many a document has: others' launches end at once
        chunk = max(chunk, min(2048 if pairs is None else 4096, SIZE.value))
    log2 = chunk.bit_length() - 1
    chunks, parts = -(-columns // chunk), -(-columns >> size_log2)
    # counters of all chunks but the first of each document
    spare = longest
    others = (entries >> log2) * spare
    if pairs is None and (chunks - 1) * tokens <= others:
        spare, others = 0, (chunks - 1) * tokens
    order = steps.room(torch.int16, entries)
    counters = steps.room(torch.int32, tokens + others)
    of_pairs = pairs or Pairs(None, None)
    sizes = (tokens, spare, d.length, d.rows)
    if pairs is None:
        programs, of_lists, longer = documents * chunks, documents * parts, not together
    else:  # a chunk and a list for each document, and as many more as there can be
        programs, of_lists = documents + (entries >> log2), documents + (entries >> size_log2)
        longer = programs > documents
    places = (held, d.starts, d.ends, first, some, columns, documents)
    where = (order, counters, winners, *of_pairs, *places, log2, chunks, *sizes)
    steps.launch(_count_kernel, programs, *where, together, 1024, 128)
    if longer:  # where a list may have several chunks
        steps.launch(
            _begin_kernel, of_lists, counters, of_pairs.offsets, *places, size_log2, log2, parts, *sizes, together, 64,
            CHUNKS.value,
        )  # fmt: skip
        steps.launch(_place_kernel, programs, *where, together, PLACE, num_warps=1)
    return Lists(order, counters, (log2, tokens, spare))
