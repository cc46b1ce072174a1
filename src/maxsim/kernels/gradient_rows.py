"""Backward: a program owns the gradients of a few token rows, each the sum of its terms in a fixed order: rows of the
other side times upstream gradients. No atomics; bound by that gather (`gradient_terms`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gradient_terms import sum_terms
from .list_places import SIZE, ends_of, entries_of, list_base
from .sides import span
from .won_rows import entry_of, fill_others

# Sizes never make a new variant; strides do.
COMMON = (
    "first", "some", "items", "chunk", "carried_rows", "first_row", "rows", "columns", "parts", "chunk_log2",
    "all_counters", "spare", "K", "NQ", "ND", "LQ", "LD", "TQ", "TD", "grad_query", "grad_document", "d_group",
    "more", "piece_log2", "words", "q_rows", "of_queries", "of_entries", "of_rows",
)  # fmt: skip
TABLES = (
    "grad", "pairs", "pair_order", "pair_offsets", "marks", "held", "holders", "q_starts", "q_ends", "q_owner",
    "d_starts", "d_ends", "d_owner", "scales", "factors", "ids", "weights", "inverses",
)  # fmt: skip


@triton.jit
def _chunk_of_row(live, first, some, low, high, pair_offsets):
    """Of a row that positions low to high may hold: whether it is of a chunk (without entries of the first), and
    whether it has entries before and after the chunk."""
    begin = low
    end = tl.maximum(high, low)
    if pair_offsets is not None:
        begin = tl.load(pair_offsets + begin, mask=live, other=0).to(tl.int64)
        end = tl.load(pair_offsets + end, mask=live, other=0).to(tl.int64)
    within = live & (begin < end) & (begin < first + some) & (end > first)
    mine = within | (live & (begin == end) & (first == 0))
    return mine, within & (begin < first), within & (end > first + some)


@triton.jit
def _through_norm(total, won, x):
    """Gradients of unit vectors x / |x| → of x: what points along x is taken out, the rest is divided by |x|. A row
    that won nothing is 0, whatever it holds."""
    norm = tl.maximum(tl.sqrt_rn(tl.sum(x * x, 1)), 1e-12)[:, None]
    x = x / norm
    projected = (total - tl.sum(total * x, 1)[:, None] * x) / norm
    return tl.where(won[:, None], projected, 0.0)


@triton.jit
def _rows_of(
    pid, out, pieces, carried, marks, winners, grad, order, counters, pairs, pair_order, pair_offsets, q_ptr, d_ptr,
    q_starts, q_ends, q_owner, d_starts, d_ends, d_owner, held, holders, scales, factors,
    first, some, chunk, carried_rows, first_row, rows, columns, parts, chunk_log2, all_counters, spare,
    K, NQ, ND, LQ, LD, TQ, TD, D,
    grad_query, grad_document, q_item, q_row, q_col, d_group, d_item, d_row, d_col,
    GRID: tl.constexpr, OF_QUERIES: tl.constexpr, NORMALIZE: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr, FEW_WON: tl.constexpr,
    table, words, ids, weights, inverses, CODEC: tl.constexpr,
):  # fmt: skip
    """Block pid of rows. FEW_WON: of entries, the first of a row for all of them (`won_rows`)."""
    decoder = (table, words, ids, weights, inverses)
    lane = tl.arange(0, ROWS * ENTRIES)
    slot = lane % ENTRIES
    block = pid.to(tl.int64) * ROWS
    row = block + lane // ENTRIES
    own_row = block + tl.arange(0, ROWS)
    real = row < rows
    mine = own_row < rows  # rows to be written
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    terms = tl.zeros([ROWS * ENTRIES], tl.int32)
    d = tl.arange(0, BLOCK_D)
    # the item that each row belongs to; or the positions of those that may hold it, which are taken in turn
    n = row * 0
    i = row * 0
    doc = row * 0
    low_position = row * 0
    past_position = row * 0
    turns = 1
    if FEW_WON:
        entries = some.to(tl.int64) * columns
        of = (entries, first, columns, order, winners, d_starts, d_ends, LD, TD)
        doc, i, _, low, high = entry_of(row, *of)
        real = high > low
    elif holders is not None:
        low_position = tl.load(holders + row, mask=real, other=0).to(tl.int64)
        past_position = tl.load(holders + rows + row, mask=real, other=0).to(tl.int64)
        turns = tl.maximum(tl.max(past_position - low_position, 0), 0).to(tl.int32)
    elif OF_QUERIES:
        if q_owner is None:
            n = row // LQ
            i = row % LQ
        else:
            n = tl.load(q_owner + row, mask=real, other=-1).to(tl.int64)
            real = real & (n >= 0)
            n = tl.where(real, n, 0)
            if not GRID:
                i = row - span(n, q_starts, q_ends, LQ, TQ)[0]
                real = real & (i < LQ)
    else:
        if d_owner is None:
            doc = row // LD
            if pair_offsets is None:
                doc += first
            doc = tl.where(real, doc, 0)
            i = row % LD
        else:
            doc = tl.load(d_owner + row, mask=real, other=-1).to(tl.int64)
            real = real & (doc >= 0)
            doc = tl.where(real, doc, 0)
            i = row - span(doc, d_starts, d_ends, LD, TD)[0]
            real = real & (i < LD)  # longer documents are cut there
        low_position = doc
        past_position = doc + real.to(tl.int64)
    if not (OF_QUERIES or FEW_WON) and ((d_owner is not None) or (holders is not None) or (pair_offsets is not None)):
        within, begun, unfinished = _chunk_of_row(row < rows, first, some, low_position, past_position, pair_offsets)
        real = real & within
        mine = tl.max(tl.reshape(within.to(tl.int32), [ROWS, ENTRIES]), 1) > 0
        if carried is not None:
            # what chunks before this one found of a row, and in one column more whether that was anything
            begun = tl.max(tl.reshape(begun.to(tl.int32), [ROWS, ENTRIES]), 1) > 0
            unfinished = tl.max(tl.reshape(unfinished.to(tl.int32), [ROWS, ENTRIES]), 1) > 0
            from_row = ((chunk % 2) * carried_rows + own_row - tl.load(marks + chunk)) * (D + 1)
            total = tl.load(carried + from_row[:, None] + d[None, :], mask=begun[:, None] & (d < D)[None, :], other=0.0)
            any_before = (tl.load(carried + from_row + D, mask=begun, other=0.0) > 0).to(tl.int32)
            terms += tl.reshape(tl.broadcast_to(any_before[:, None], [ROWS, ENTRIES]), [ROWS * ENTRIES])
    for turn in range(turns):
        here = real
        position = doc
        if holders is not None:
            position = low_position + turn
            here = real & (position < past_position)
            if (not OF_QUERIES) and (pair_offsets is None):
                here = here & (position >= first) & (position < first + some)
            position = tl.where(here, position, 0)
            item = tl.load(held + position, mask=here, other=0)
            if OF_QUERIES:
                n = item
                start, tokens = span(item, q_starts, q_ends, LQ, TQ)
            else:
                doc = item
                start, tokens = span(item, d_starts, d_ends, LD, TD)
            i = row - start
            here = here & (i < tokens)
        column = i
        if GRID:
            column = row
            if holders is not None:
                column = n * LQ + i
        if (not GRID) and (pairs is None) and (not OF_QUERIES):
            n = doc // K
        turn_parts = parts
        if (pair_offsets is not None) and (not OF_QUERIES):
            entries = entries_of(position, first, some, columns, pair_offsets)[1]
            turn_parts = tl.max((tl.where(here, entries, 0) + SIZE - 1) // SIZE, 0).to(tl.int32)
        elif holders is not None:
            turn_parts = tl.where(tl.max(here.to(tl.int32), 0) > 0, parts, 0)
        for part in range(turn_parts):
            at = row * 0
            over = 0
            to = row * 0
            size = 0
            skipped = part * SIZE
            if OF_QUERIES:
                if GRID:
                    low = row * 0
                    high = tl.where(here, ND, low)
                elif pairs is None:
                    low = n * K
                    high = low + tl.where(here, K, 0)
                else:
                    low = tl.load(pair_offsets + n, mask=here, other=0).to(tl.int64)
                    high = tl.load(pair_offsets + n + 1, mask=here, other=0).to(tl.int64)
            else:
                at, over, to, size = list_base(position, doc, part, first, some, columns, pair_offsets)
            if not (OF_QUERIES or FEW_WON):
                before = entries_of(position, first, some, columns, pair_offsets)[0]
                if holders is None:
                    counter = row - i
                elif pair_offsets is None:
                    counter = (position - first) * LD
                else:
                    counter = position * LD
                past = ends_of(counters, counter, part, size, before, chunk_log2, all_counters, spare, pair_offsets) + i
                there = here
                if pair_offsets is not None:
                    there = here & (size > 0)
                low = tl.load(past - 1, mask=there & (i > 0), other=0)
                high = tl.load(past, mask=there, other=0)
                high = tl.maximum(tl.minimum(high, size), low)
            stop = high
            if PIECE > 0:
                stop = tl.where(high - low > PIECE, (low // PIECE + 1) * PIECE, high)
            found, some_terms = sum_terms(
                low, stop, slot, column, n, doc, at, over, to, size, skipped,
                winners, grad, order, pairs, pair_order, q_ptr, d_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
                columns, K, NQ, ND, LQ, LD, TQ, TD, D, grad_query, grad_document,
                q_item, q_row, q_col, d_group, d_item, d_row, d_col,
                GRID, OF_QUERIES, NORMALIZE, ROWS, ENTRIES, BLOCK_D, scales, factors, decoder, CODEC, FEW_WON,
            )  # fmt: skip
            total += found
            terms += some_terms
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
    won = tl.sum(tl.reshape(terms, [ROWS, ENTRIES]), 1) > 0
    if FEW_WON:  # found once more, so that they take no registers meanwhile
        _, _, own_row, own_low, own_high = entry_of(own_row, *of)
        mine = own_high > own_low
    if carried is not None:
        to_row = (((chunk + 1) % 2) * carried_rows + own_row - tl.load(marks + chunk + 1)) * (D + 1)
        tl.store(carried + to_row[:, None] + d[None, :], total, mask=unfinished[:, None] & (d < D)[None, :])
        tl.store(carried + to_row + D, won.to(tl.float32), mask=unfinished)
        mine = mine & (unfinished == 0)
    if NORMALIZE:
        if OF_QUERIES:
            at = own_row * q_row
            if q_starts is None:
                at = (own_row // LQ) * q_item + (own_row % LQ) * q_row
            x_ptrs = q_ptr + at[:, None] + d[None, :].to(tl.int64) * q_col
        else:
            at = own_row * d_row
            if d_starts is None:
                doc = own_row // LD
                if pair_offsets is None:
                    doc += first
                at = (own_row % LD) * d_row
                if GRID or pairs is not None:
                    at += doc * d_item
                else:
                    at += (doc // K) * d_group + (doc % K) * d_item
            x_ptrs = d_ptr + at[:, None] + d[None, :].to(tl.int64) * d_col
        x = tl.load(x_ptrs, mask=mine[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        total = _through_norm(total, won, x)
    to_ptrs = out + (first_row + own_row)[:, None] * D + d[None, :]
    tl.store(to_ptrs, total.to(out.dtype.element_ty), mask=mine[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _gradient_kernel(
    out, pieces, carried, marks, winners, grad, order, counters, pairs, pair_order, pair_offsets, q_ptr, d_ptr,
    q_starts, q_ends, q_owner, d_starts, d_ends, d_owner, held, holders, scales, factors,
    first, some, chunk, carried_rows, first_row, rows, columns, parts, chunk_log2, all_counters, spare,
    K, NQ, ND, LQ, LD, TQ, TD, D,
    grad_query, grad_document, q_item, q_row, q_col, d_group, d_item, d_row, d_col,
    GRID: tl.constexpr, OF_QUERIES: tl.constexpr, NORMALIZE: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
    table, words, ids, weights, inverses, CODEC: tl.constexpr,
):  # fmt: skip
    """Gradients of one side."""
    _rows_of(
        tl.program_id(0), out, pieces, carried, marks, winners, grad, order, counters, pairs, pair_order, pair_offsets,
        q_ptr, d_ptr, q_starts, q_ends, q_owner, d_starts, d_ends, d_owner, held, holders, scales, factors,
        first, some, chunk, carried_rows, first_row, rows, columns, parts, chunk_log2, all_counters, spare,
        K, NQ, ND, LQ, LD, TQ, TD, D,
        grad_query, grad_document, q_item, q_row, q_col, d_group, d_item, d_row, d_col,
        GRID, OF_QUERIES, NORMALIZE, PIECE, ROWS, ENTRIES, BLOCK_D, False,
        table, words, ids, weights, inverses, CODEC,
    )  # fmt: skip


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _few_won_kernel(
    q_out, d_out, winners, grad, order, q_ptr, d_ptr,
    q_starts, q_ends, q_owner, d_starts, d_ends, held, holders,
    first, some, first_row, rows, q_rows, columns, of_queries, of_entries, of_rows,
    K, NQ, ND, LQ, LD, TQ, TD, D,
    grad_query, grad_document, q_item, q_row, q_col, d_group, d_item, d_row, d_col,
    GRID: tl.constexpr, NORMALIZE: tl.constexpr, Q_ROWS: tl.constexpr, Q_TERMS: tl.constexpr,
    D_ROWS: tl.constexpr, D_TERMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, by the first `of_queries` programs, and of documents of which few tokens win (`won_rows`):
    by those of entries, which wait for what they read, and of rows, bound by what they write, in turn."""
    pid = tl.program_id(0)
    if pid < of_queries:
        if q_out is not None:
            _rows_of(
                pid, q_out, None, None, None, winners, grad, None, None, None, None, None, q_ptr, d_ptr,
                q_starts, q_ends, q_owner, d_starts, d_ends, None, held, holders, None, None,
                first, some, 0, 0, 0, q_rows, columns, 1, 0, 0, 0,
                K, NQ, ND, LQ, LD, TQ, TD, D,
                grad_query, grad_document, q_item, q_row, q_col, d_group, d_item, d_row, d_col,
                GRID, True, NORMALIZE, 0, Q_ROWS, Q_TERMS, BLOCK_D, False,
                None, 0, None, None, None, 0,
            )  # fmt: skip
    else:
        pid -= of_queries
        in_turn = tl.minimum(of_entries, of_rows)
        entries = pid % 2 == 0
        at = pid // 2
        if pid >= 2 * in_turn:
            entries = of_entries > of_rows
            at = pid - in_turn
        if entries:
            _rows_of(
                at, d_out, None, None, None, winners, grad, order, None, None, None, None, q_ptr, d_ptr,
                q_starts, q_ends, q_owner, d_starts, d_ends, None, None, None, None, None,
                first, some, 0, 0, first_row, rows, columns, 1, 0, 0, 0,
                K, NQ, ND, LQ, LD, TQ, TD, D,
                grad_query, grad_document, q_item, q_row, q_col, d_group, d_item, d_row, d_col,
                GRID, False, NORMALIZE, 0, D_ROWS, D_TERMS, BLOCK_D, True,
                None, 0, None, None, None, 0,
            )  # fmt: skip
        else:
            fill_others(
                at.to(tl.int64), d_out, first_row, rows, first, some, winners, columns, d_starts, d_ends, ND, LD, TD,
                D, BLOCK_D,
            )  # fmt: skip
