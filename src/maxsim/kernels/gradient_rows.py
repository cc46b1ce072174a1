"""Backward: a program owns the gradients of a few token rows, each the sum of its terms in a fixed order: rows of the
other side times upstream gradients. No atomics; bound by that gather.

ENTRIES terms of each of ROWS rows are read at once, and where the next ones stand is found meanwhile. With one warp and
32 terms each lane finds one; the lanes then read rows together, whatever each belongs to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lists import SIZE, list_base, won_by
from .sides import span

# Sizes never make a new variant; strides do.
COMMON = (
    "first", "documents", "first_row", "rows", "columns", "parts", "chunks", "per_list", "K", "NQ", "ND", "LQ", "LD",
    "TQ", "TD", "grad_query", "grad_document", "d_group", "count", "none", "steps", "programs",
)  # fmt: skip
TABLES = (
    "grad", "pairs", "pair_order", "pair_offsets", "q_starts", "q_ends", "q_owner", "d_starts", "d_ends", "d_owner",
)  # fmt: skip


@triton.jit
def _find(
    k, live, own, to, order, pair_order, winners, columns,
    OF_QUERIES: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Term k → where it stands, in the table, among pairs or in its list, and the document token that won it."""
    if SORTED:
        at = tl.load(order + k, mask=live, other=0)
        won = won_by(winners, at, live)
    elif OF_QUERIES:
        at = k.to(tl.int64)
        if pair_order is not None:
            at = tl.load(pair_order + k, mask=live, other=0).to(tl.int64)
        won = won_by(winners, at * columns + own, live)
    else:
        at = tl.load(order + to + k, mask=live, other=0).to(tl.int32)
        if order.dtype.element_ty == tl.int16:
            at &= 0xFFFF
        won = tl.where(live, 0, -1)
    return at, won


@triton.jit
def _sum(
    low, high, slot, own, n, i, doc, at, to, skipped,
    winners, grad, order, pairs, pair_order, q_ptr, d_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
    columns, K, NQ, ND, LQ, LD, TQ, TD, D, grad_query, grad_document,
    q_item, q_row, q_col, d_group, d_item, d_row, d_col,
    GRID: tl.constexpr, OF_QUERIES: tl.constexpr, SORTED: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums of the terms low to high of ROWS rows, ENTRIES at a time; and how many there were, for each lane."""
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    terms = tl.zeros([ROWS * ENTRIES], tl.int32)
    k = low + slot
    next_at, next_won = _find(k, k < high, own, to, order, pair_order, winners, columns, OF_QUERIES, SORTED)
    for _ in range(0, tl.max(high - low, 0), ENTRIES):
        where = next_at
        won = next_won
        k += ENTRIES  # the next ones are found while these are read
        next_at, next_won = _find(k, k < high, own, to, order, pair_order, winners, columns, OF_QUERIES, SORTED)
        live = won >= 0
        # which pair p, query with its token, and document
        if SORTED:
            p = where // columns
            column = where % columns
        elif OF_QUERIES:
            p = where
            column = own
        elif GRID or pairs is None:
            p = doc
            column = skipped + where
            live = live & (column < columns)
        else:
            p = tl.load(pair_order + at + where // columns, mask=live, other=0).to(tl.int64)
            column = where % columns
        query = n
        document = doc
        token = column
        if SORTED or OF_QUERIES:
            document = p
            if pairs is not None:
                document = tl.load(pairs + p * 2 + 1, mask=live, other=0).to(tl.int64)
                document = tl.minimum(tl.maximum(document, 0), ND - 1)
        if SORTED or not OF_QUERIES:
            if GRID:
                if q_owner is None:
                    query = (column.to(tl.uint32) // LQ.to(tl.uint32)).to(tl.int32)
                    token = column - query * LQ
                else:
                    query = tl.maximum(tl.load(q_owner + column, mask=live, other=0), 0)
            elif pairs is not None:
                query = tl.minimum(tl.maximum(tl.load(pairs + p * 2, mask=live, other=0), 0), NQ - 1)
            elif SORTED:
                query = p // K
        if GRID:
            g = tl.load(grad + query.to(tl.int64) * grad_query + document * grad_document, mask=live, other=0.0)
        else:
            g = tl.load(grad + p * grad_query, mask=live, other=0.0)
        if OF_QUERIES:
            at_row = won.to(tl.int64) * d_row
            if d_starts is not None:
                start, _ = span(tl.where(live, document, 0), d_starts, d_ends, LD, TD)
                at_row += start * d_row
            elif GRID or pairs is not None:
                at_row += document * d_item
            else:
                query = p // K if SORTED else n
                at_row += query * d_group + (p - query * K) * d_item
        else:
            at_row = token.to(tl.int64) * q_row
            if q_starts is None:
                at_row += query.to(tl.int64) * q_item
            elif (not GRID) or q_owner is None:
                start, _ = span(tl.where(live, query, 0), q_starts, q_ends, LQ, TQ)
                at_row += start * q_row
        at_row = tl.where(live, at_row, -1024)[:, None]  # a power of two, or loads would be narrow
        if OF_QUERIES:
            tile_ptrs = d_ptr + at_row + d[None, :].to(tl.int64) * d_col
        else:
            tile_ptrs = q_ptr + at_row + d[None, :].to(tl.int64) * q_col
        tile = tl.load(tile_ptrs, mask=(at_row >= 0) & (d < D)[None, :], other=0.0)
        term = tile.to(tl.float32)
        if NORMALIZE:
            term = term / tl.maximum(tl.sqrt_rn(tl.sum(term * term, 1)), 1e-12)[:, None]
            terms += live.to(tl.int32)
        term *= g.to(tl.float32)[:, None]
        total += tl.sum(tl.reshape(term, [ROWS, ENTRIES, BLOCK_D]), 1)
    return total, terms


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _gradient_kernel(
    out, pieces, winners, grad, order, counters, pairs, pair_order, pair_offsets, q_ptr, d_ptr,
    q_starts, q_ends, q_owner, d_starts, d_ends, d_owner,
    first, documents, first_row, rows, columns, parts, chunks, per_list, K, NQ, ND, LQ, LD, TQ, TD, D,
    grad_query, grad_document, q_item, q_row, q_col, d_group, d_item, d_row, d_col,
    GRID: tl.constexpr, OF_QUERIES: tl.constexpr, SORTED: tl.constexpr, NORMALIZE: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
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
                    start, _ = span(n, q_starts, q_ends, LQ, TQ)
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
                start, _ = span(doc, d_starts, d_ends, LD, TD)
                i = row - start
                real = real & (i < LD)  # longer documents are cut there
            if pairs is None:
                if not GRID:
                    n = doc // K
    own = row if GRID else i
    for part in range(parts):
        at = row * 0
        to = row * 0
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
            at, to, size = list_base(doc, part, first, columns, pair_offsets)
            past = counters + ((part + 1) * chunks - 1).to(tl.int64) * rows + row
            low = tl.load(past - 1, mask=real & (i > 0), other=0)
            high = tl.load(past, mask=real, other=0)
            high = tl.maximum(tl.minimum(high, size), low)
        stop = high
        if PIECE > 0:
            stop = tl.where(high - low > PIECE, (low // PIECE + 1) * PIECE, high)
        sum, some = _sum(
            low, stop, slot, own, n, i, doc, at, to, part * SIZE,
            winners, grad, order, pairs, pair_order, q_ptr, d_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
            columns, K, NQ, ND, LQ, LD, TQ, TD, D, grad_query, grad_document,
            q_item, q_row, q_col, d_group, d_item, d_row, d_col,
            GRID, OF_QUERIES, SORTED, NORMALIZE, ROWS, ENTRIES, BLOCK_D,
        )  # fmt: skip
        total += sum
        terms += some
        if PIECE > 0:
            if tl.max(high - stop, 0) > 0:
                # of each row: where the rest of its entries begins and ends
                rest = tl.max(tl.reshape(stop, [ROWS, ENTRIES]), 1).to(tl.int64)
                end = tl.max(tl.reshape(high, [ROWS, ENTRIES]), 1)
                begins = pieces + (tl.max(tl.reshape(doc - first, [ROWS, ENTRIES]), 1) * parts + part) * per_list * D
                for _ in range(tl.max((high - stop + PIECE - 1) // PIECE, 0)):
                    value_ptrs = (begins + rest // PIECE * D)[:, None] + d[None, :]
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
    pieces, winners, grad, order, counters, q_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
    first, rows, columns, parts, chunks, per_list, K, NQ, ND, LQ, LD, TQ, TD, D,
    grad_query, grad_document, q_item, q_row, q_col,
    GRID: tl.constexpr, NORMALIZE: tl.constexpr, PIECE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program PIECE entries of a list: their sum where they belong to one long row that began before them."""
    program = tl.program_id(0).to(tl.int64)
    begin = (program % per_list * PIECE).to(tl.int32)
    part = program // per_list % parts
    doc = first + program // per_list // parts
    start, tokens = span(doc, d_starts, d_ends, LD, TD)
    if d_starts is None:
        start = (doc - first) * LD
    at, to, size = list_base(doc, part, first, columns, None)
    past = counters + ((part + 1) * chunks - 1) * rows + start
    # the first token whose entries end after `begin`
    left = tokens * 0
    right = tokens
    while left < right:
        middle = (left + right) // 2
        if tl.load(past + middle) > begin:
            right = middle
        else:
            left = middle + 1
    if left < tokens:
        low = tl.load(past + left - 1, mask=left > 0, other=0)
        high = tl.minimum(tl.load(past + left), size)
        if (high - low > PIECE) & (low < begin):
            lane = tl.arange(0, ENTRIES)
            zero = lane.to(tl.int64) * 0
            total, _ = _sum(
                begin + lane * 0, tl.minimum(high, begin + PIECE) + lane * 0, lane, zero, zero + doc // K, zero,
                zero + doc, at, to, part * SIZE,
                winners, grad, order, None, None, q_ptr, q_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
                columns, K, NQ, ND, LQ, LD, TQ, TD, D, grad_query, grad_document,
                q_item, q_row, q_col, 0, 0, 0, 0,
                GRID, False, False, NORMALIZE, 1, ENTRIES, BLOCK_D,
            )  # fmt: skip
            d = tl.arange(0, BLOCK_D)
            tl.store(pieces + program * D + d[None, :], total, mask=(d < D)[None, :])
