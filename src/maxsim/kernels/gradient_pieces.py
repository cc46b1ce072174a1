"""Sums of the entries of long rows for the backward, beforehand: a program that owns such a row takes all of its
entries but the first PIECE from here."""

from __future__ import annotations

import triton
import triton.language as tl

from .gradient_rows import COMMON, TABLES
from .gradient_terms import sum_terms
from .list_places import SIZE, ends_of, entries_of, item_of, list_base, position_of, tokens_of


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _piece_kernel(
    pieces, winners, grad, order, counters, pairs, pair_order, pair_offsets,
    q_ptr, q_starts, q_ends, q_owner, d_starts, d_ends, held,
    first, some, items, columns, more, piece_log2, chunk_log2, all_counters, spare, K, NQ, ND, LQ, LD, TQ, TD, D,
    grad_query, grad_document, q_item, q_row, q_col,
    GRID: tl.constexpr, NORMALIZE: tl.constexpr, PIECE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program PIECE entries of a list: their sum where they belong to one long row that began before them.

    more: such pieces that each document has, but for the first one.
    """
    pid = tl.program_id(0)
    if pair_offsets is None:
        position = first + (pid // more).to(tl.int64)
        piece = pid % more + 1
    else:
        position, piece = position_of(pid, first, some, columns, items, piece_log2, pair_offsets)
    doc = item_of(position, held)
    part = piece // (SIZE // PIECE)
    begin = (piece - part * (SIZE // PIECE)) * PIECE
    at, over, to, size = list_base(position, doc, part, first, some, columns, pair_offsets)
    before = entries_of(position, first, some, columns, pair_offsets)[0]
    start, tokens = tokens_of(position, doc, first, pair_offsets, held, d_starts, d_ends, LD, TD)
    past = ends_of(counters, start, part, size, before, chunk_log2, all_counters, spare, pair_offsets)
    # the first token whose entries end after `begin`
    left = tokens * 0
    right = tl.where((begin > 0) & (begin < size), tokens, 0)
    while left < right:
        middle = (left + right) // 2
        if tl.load(past + middle) > begin:
            right = middle
        else:
            left = middle + 1
    if (begin > 0) & (begin < size) & (left < tokens):
        low = tl.load(past + left - 1, mask=left > 0, other=0)
        high = tl.minimum(tl.load(past + left), size)
        if (high - low > PIECE) & (low < begin):
            lane = tl.arange(0, ENTRIES)
            zero = lane.to(tl.int64) * 0
            total = sum_terms(
                begin + lane * 0, tl.minimum(high, begin + PIECE) + lane * 0, lane, zero, zero + doc // K, zero + doc,
                at, over, to, size, part * SIZE,
                winners, grad, order, pairs, pair_order, q_ptr, q_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
                columns, K, NQ, ND, LQ, LD, TQ, TD, D, grad_query, grad_document,
                q_item, q_row, q_col, 0, 0, 0, 0,
                GRID, False, NORMALIZE, 1, ENTRIES, BLOCK_D,
            )[0]  # fmt: skip
            d = tl.arange(0, BLOCK_D)
            tl.store(pieces + (before // PIECE + piece - 1) * D + d[None, :], total, mask=(d < D)[None, :])
