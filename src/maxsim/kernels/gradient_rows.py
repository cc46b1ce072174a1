"""Backward: a program owns the gradients of a few token rows, each the sum of its terms in a fixed order: rows of the
other side times upstream gradients. No atomics; bound by that gather (`gradient_terms`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gradient_terms import sum_terms
from .lists import SIZE, document_of, ends_of, entries_of, list_base, tokens_of
from .sides import span

# Sizes never make a new variant; strides do.
COMMON = (
    "first", "documents", "first_row", "rows", "columns", "parts", "chunk_log2", "spare", "K", "NQ", "ND", "LQ", "LD",
    "TQ", "TD", "grad_query", "grad_document", "d_group", "count", "none", "steps", "more", "piece_log2",
    "words",
)  # fmt: skip
TABLES = (
    "grad", "pairs", "pair_order", "pair_offsets", "q_starts", "q_ends", "q_owner", "d_starts", "d_ends", "d_owner",
    "scales", "factors", "ids", "weights", "inverses",
)  # fmt: skip


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _gradient_kernel(
    out, pieces, winners, grad, order, counters, pairs, pair_order, pair_offsets, q_ptr, d_ptr,
    q_starts, q_ends, q_owner, d_starts, d_ends, d_owner, scales, factors,
    first, documents, first_row, rows, columns, parts, chunk_log2, spare, K, NQ, ND, LQ, LD, TQ, TD, D,
    grad_query, grad_document, q_item, q_row, q_col, d_group, d_item, d_row, d_col,
    GRID: tl.constexpr, OF_QUERIES: tl.constexpr, SORTED: tl.constexpr, NORMALIZE: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
    table, words, ids, weights, inverses, CODEC: tl.constexpr,
):  # fmt: skip
    decoder = (table, words, ids, weights, inverses)
    lane = tl.arange(0, ROWS * ENTRIES)
    slot = lane % ENTRIES
    block = tl.program_id(0).to(tl.int64) * ROWS
    row = block + lane // ENTRIES
    own_row = block + tl.arange(0, ROWS)
    real = row < rows
    mine = own_row < rows  # rows to be written
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    terms = tl.zeros([ROWS * ENTRIES], tl.int32)
    d = tl.arange(0, BLOCK_D)
    # the item that each row belongs to
    n = row * 0
    i = row * 0
    doc = row * 0
    if not SORTED:
        if OF_QUERIES:
            if q_owner is None:
                n = row // LQ
                i = row % LQ
            else:
                n = tl.load(q_owner + row, mask=real, other=-1).to(tl.int64)
                real = real & (n >= 0)
                n = tl.where(real, n, 0)
                if not GRID:
                    start, length = span(n, q_starts, q_ends, LQ, TQ)
                    i = row - start
                    real = real & (i < LQ)
        else:
            if d_owner is None:
                doc = tl.where(real, first + row // LD, first)
                i = row % LD
            else:
                doc = tl.load(d_owner + row, mask=real, other=-1).to(tl.int64)
                own = tl.load(d_owner + own_row, mask=mine, other=-1)
                mine = mine & (((own >= first) & (own < first + documents)) | ((own < 0) & (first == 0)))
                real = real & (doc >= first) & (doc < first + documents)
                doc = tl.where(real, doc, first)
                start, length = span(doc, d_starts, d_ends, LD, TD)
                i = row - start
                real = real & (i < LD)  # longer documents are cut there
            if pairs is None:
                if not GRID:
                    n = doc // K
    if pair_offsets is not None and not OF_QUERIES:
        earlier, entries = entries_of(doc, first, columns, pair_offsets)
        parts = tl.max((tl.where(real, entries, 0) + SIZE - 1) // SIZE, 0).to(tl.int32)
    for part in range(parts):
        at = row * 0
        over = 0
        to = row * 0
        size = 0
        skipped = part * SIZE
        if SORTED:
            low = tl.load(counters + row - 1, mask=real & (row > 0), other=0)
            high = tl.load(counters + row, mask=real, other=0)
        elif OF_QUERIES:
            if GRID:
                low = row * 0
                high = tl.where(real, ND, low)
            elif pairs is None:
                low = n * K
                high = low + tl.where(real, K, 0)
            else:
                low = tl.load(pair_offsets + n, mask=real, other=0).to(tl.int64)
                high = tl.load(pair_offsets + n + 1, mask=real, other=0).to(tl.int64)
        else:
            at, over, to, size = list_base(doc, part, first, columns, pair_offsets)
            before, all = entries_of(doc, first, columns, pair_offsets)
            past = ends_of(counters, row - i, part, size, before, chunk_log2, rows, spare, pair_offsets) + i
            there = real
            if pair_offsets is not None:
                there = real & (size > 0)
            low = tl.load(past - 1, mask=there & (i > 0), other=0)
            high = tl.load(past, mask=there, other=0)
            high = tl.maximum(tl.minimum(high, size), low)
        stop = high
        if PIECE > 0:
            stop = tl.where(high - low > PIECE, (low // PIECE + 1) * PIECE, high)
        sum, some = sum_terms(
            low, stop, slot, row if GRID else i, n, doc, at, over, to, size, skipped,
            winners, grad, order, pairs, pair_order, q_ptr, d_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
            columns, K, NQ, ND, LQ, LD, TQ, TD, D, grad_query, grad_document,
            q_item, q_row, q_col, d_group, d_item, d_row, d_col,
            GRID, OF_QUERIES, SORTED, NORMALIZE, ROWS, ENTRIES, BLOCK_D, scales, factors, decoder, CODEC,
        )  # fmt: skip
        total += sum
        terms += some
        if PIECE > 0:
            if tl.max(high - stop, 0) > 0:
                # of each row: where the rest of its entries begins and ends
                rest = tl.max(tl.reshape(stop, [ROWS, ENTRIES]), 1).to(tl.int64)
                end = tl.max(tl.reshape(high, [ROWS, ENTRIES]), 1)
                begins = tl.max(tl.reshape(before // PIECE, [ROWS, ENTRIES]), 1) + part * (SIZE // PIECE) - 1
                for _ in range(tl.max((high - stop + PIECE - 1) // PIECE, 0)):
                    value_ptrs = pieces + ((begins + rest // PIECE) * D)[:, None] + d[None, :]
                    total += tl.load(value_ptrs, mask=(rest < end)[:, None] & (d < D)[None, :], other=0.0)
                    rest += PIECE
    if NORMALIZE:
        # through x / |x|: what points along x is taken out, the rest is divided by |x|
        if OF_QUERIES:
            at = own_row * q_row
            if q_starts is None:
                at = (own_row // LQ) * q_item + (own_row % LQ) * q_row
            x_ptrs = q_ptr + at[:, None] + d[None, :].to(tl.int64) * q_col
        else:
            at = own_row * d_row
            if d_starts is None:
                doc = first + own_row // LD
                at = (own_row % LD) * d_row
                if GRID or pairs is not None:
                    at += doc * d_item
                else:
                    at += (doc // K) * d_group + (doc % K) * d_item
            x_ptrs = d_ptr + at[:, None] + d[None, :].to(tl.int64) * d_col
        x = tl.load(x_ptrs, mask=mine[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        norm = tl.maximum(tl.sqrt_rn(tl.sum(x * x, 1)), 1e-12)[:, None]
        x = x / norm
        projected = (total - tl.sum(total * x, 1)[:, None] * x) / norm
        won = tl.sum(tl.reshape(terms, [ROWS, ENTRIES]), 1) > 0
        total = tl.where(won[:, None], projected, 0.0)  # a row that won nothing is 0, whatever it holds
    to_ptrs = out + (first_row + own_row)[:, None] * D + d[None, :]
    tl.store(to_ptrs, total.to(out.dtype.element_ty), mask=mine[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _piece_kernel(
    pieces, winners, grad, order, counters, pairs, pair_order, pair_offsets,
    q_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
    first, documents, rows, columns, more, piece_log2, chunk_log2, spare, K, NQ, ND, LQ, LD, TQ, TD, D,
    grad_query, grad_document, q_item, q_row, q_col,
    GRID: tl.constexpr, NORMALIZE: tl.constexpr, PIECE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program PIECE entries of a list: their sum where they belong to one long row that began before them.

    more: such pieces that each document has, but for the first one.
    """
    pid = tl.program_id(0)
    if pair_offsets is None:
        doc = first + (pid // more).to(tl.int64)
        piece = pid % more + 1
    else:
        doc, piece = document_of(pid, documents, columns, piece_log2, pair_offsets)
    part = piece // (SIZE // PIECE)
    begin = (piece - part * (SIZE // PIECE)) * PIECE
    at, over, to, size = list_base(doc, part, first, columns, pair_offsets)
    before, own = entries_of(doc, first, columns, pair_offsets)
    start, tokens = tokens_of(doc, first, d_starts, d_ends, LD, TD)
    past = ends_of(counters, start, part, size, before, chunk_log2, rows, spare, pair_offsets)
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
            total, terms = sum_terms(
                begin + lane * 0, tl.minimum(high, begin + PIECE) + lane * 0, lane, zero, zero + doc // K, zero + doc,
                at, over, to, size, part * SIZE,
                winners, grad, order, pairs, pair_order, q_ptr, q_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
                columns, K, NQ, ND, LQ, LD, TQ, TD, D, grad_query, grad_document,
                q_item, q_row, q_col, 0, 0, 0, 0,
                GRID, False, False, NORMALIZE, 1, ENTRIES, BLOCK_D,
            )  # fmt: skip
            d = tl.arange(0, BLOCK_D)
            tl.store(pieces + (before // PIECE + piece - 1) * D + d[None, :], total, mask=(d < D)[None, :])
