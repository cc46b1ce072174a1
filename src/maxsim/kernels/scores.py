"""Portable forward: one program scores a few documents (or one pair) against up to BLOCK_LQ query tokens.

Owns: a tile of query tokens (of one query, of several short ones, or a part of a long one) and `docs` documents, one
after another. Reads the documents' tokens once, in tiles of BLOCK_LD rows, and the query tile once (width over BLOCK_D:
once a tile); writes one number a query and document, and where asked a winner and a maximum a query token. Bound by the
tensor cores for many query tokens, else by the bytes of the documents.

Document tokens are the rows of the product and query tokens its columns. The running maximum is elementwise over tiles,
so the loop holds no reduction; one at the document's end finds the maximum of each column. A tile that hangs over the
end repeats the last token, which changes no maximum, and no winner since the lowest index wins.

Exactness: a similarity is accumulated over D in one order whatever the tile. The sum over query tokens is a tree of
adjacent pairs in blocks of at most BLOCK_LQ, and goes from block to block in order; missing tokens add zero. So a score
has the same bits in any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import column_maximum, halves, inverse, lowest, maximum, ordered, power, similarities, split, unordered
from .decoding import decoded
from .lost import any_lost
from .sides import ONE_GROUP, base, columns_of, span, squares_of
from .spans import kept_span

CODES = ("q_scales", "scales", "factors")
DECODER = ("ids", "weights", "inverses")
# Sizes never make a new variant; strides do, since what is known of them decides how wide loads are.
RUN_TIME = (
    "first", "items", "docs", "NQ", "ND", "ND_OUT", "LQ", "LD", "TQ", "TD", "K", "tiles", "parts", "block_log2",
    "d_per_group", "m_group", "m_item", "m_row", "winner_columns", "words",
)  # fmt: skip
# Their alignment changes with what is cut out of them, and no load of theirs is wide.
TABLES = ("q_starts", "q_ends", "q_kept_rows", "q_kept", "d_starts", "d_ends", "pairs_ptr", *CODES, *DECODER)


@triton.jit
def _best(
    q_start, q, q_low, q_live, q_col, d_base, d_row, d_col, m_base, m_row, factors, d_first, low, high, D,
    WINNERS: tl.constexpr, MASKED: tl.constexpr, MASKED_ZERO: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_LQ: tl.constexpr, BLOCK_LD: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr, RESIDENT: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr,
    decoder, CODEC: tl.constexpr,
):  # fmt: skip
    """The largest similarity of each query token over one document's tokens low to high, and the first token that has
    it.

    RESIDENT: q holds the whole query tile; else it is read by slices of D along with the document's, and what halves
    are scaled by is q.
    """
    d = tl.arange(0, BLOCK_D)
    q_ptrs = q_start[:, None] + d[None, :].to(tl.int64) * q_col
    ACC: tl.constexpr = tl.int32 if d_base.dtype.element_ty == tl.int8 else tl.float32
    best = tl.full([BLOCK_LD, BLOCK_LQ], lowest(ACC), ACC)
    best_at = tl.full([BLOCK_LD, BLOCK_LQ], 2147483647 if MASKED else 0, tl.int32)  # no winner yet
    token = tl.arange(0, BLOCK_LD)
    zero = low.to(tl.int64) * 0  # widens what is added to it
    q_type: tl.constexpr = q_start.dtype.element_ty
    rows = (d_base - d_first * d_row, d_row, d_col, D)
    for at in tl.range(low, high, BLOCK_LD, num_stages=STAGES if RESIDENT else 1):
        row = tl.minimum(token, high - 1 - at)  # beyond the end the last one again
        row = row if NARROW else row.to(tl.int64)
        d_ptrs = d_base + (zero + at) * d_row + (row[:, None] * d_row + d[None, :] * d_col)
        sim = tl.zeros([BLOCK_LD, BLOCK_LQ], ACC)
        squares = tl.zeros([BLOCK_LD], tl.float32)
        if RESIDENT:
            if CODEC != 0:
                d_tile = decoded(rows, d_first + at + row, None, 0, decoder, CODEC, BLOCK_D, EVEN_D, q_type)
            else:
                d_tile = columns_of(d_ptrs, d[None, :] < D, EVEN_D)
            sim = similarities(d_tile, q, q_low, sim, PRECISION)
            if NORMALIZE and CODEC == 0:
                squares = squares_of(d_tile)
        else:
            for c in tl.range(0, D, BLOCK_D, num_stages=STAGES):
                d_at = d_ptrs + (zero + c) * d_col
                q_from = q_ptrs + (zero + c) * q_col
                if EVEN_D:
                    q_tile = tl.load(q_from, mask=q_live[:, None], other=0.0)
                else:
                    q_tile = tl.load(q_from, mask=q_live[:, None] & (d[None, :] < D - c), other=0.0)
                if CODEC != 0:
                    d_tile = decoded(rows, d_first + at + row, None, c, decoder, CODEC, BLOCK_D, EVEN_D, q_type)
                else:
                    d_tile = columns_of(d_at, d[None, :] < D - c, EVEN_D)
                q_rest = q_tile
                if PRECISION != "native":
                    q_tile, q_rest = split(q_tile, q)
                sim = similarities(d_tile, q_tile, q_rest, sim, PRECISION, True)
                if NORMALIZE and CODEC == 0:
                    squares += squares_of(d_tile)
        if NORMALIZE and CODEC == 0:  # of codes, those are of unit vectors already
            sim = sim / tl.maximum(tl.sqrt_rn(squares), 1e-12)[:, None] + 0.0  # no −0: it would lose against 0
        if factors is not None:
            sim = sim * tl.load(factors + d_first + at + row).to(ACC)[:, None]
        if MASKED:
            keep = tl.load(m_base + (at + row).to(tl.int64) * m_row) != 0
            sim = tl.where(keep[:, None], sim, 0 if MASKED_ZERO else lowest(ACC))
        new_best = maximum(best, sim)
        if WINNERS:
            # bits, not values: NaN, once in, stays the same NaN and keeps its place
            new = new_best.to(tl.int32, bitcast=True) != best.to(tl.int32, bitcast=True)
            if MASKED:
                new = new | ((keep[:, None] | MASKED_ZERO) & (best_at == 2147483647))
            best_at = tl.where(new, at, best_at)
        best = new_best

    if WINNERS:
        best_at = tl.where(best_at == 2147483647, best_at, best_at + token[:, None])
        # of equal values the lowest index: it is turned round in the low half of the key
        key = tl.max((ordered(best).to(tl.int64) << 32) | (2147483647 - best_at).to(tl.int64), 0)
        value = unordered((key >> 32).to(tl.int32), best.dtype)
        winner = 2147483647 - (key & 0x7FFFFFFF).to(tl.int32)
        winner = tl.minimum(winner, high - 1)  # beyond the end stands the last token, repeated
    else:
        value = column_maximum(best)
        winner = tl.zeros([BLOCK_LQ], tl.int32)
    return value, winner


@triton.jit
def _score_document(
    item, doc, d_start, length, q_at, q, q_low, q_scale, q_norm, valid, live, column, q_index, d_ptr, out_ptr,
    winners_ptr, maxima_ptr, d_starts, d_mask, scales, factors, decoder, first, ND_OUT, D, tile, part, parts, NQ,
    block_log2, q_col, d_per_group, d_group, d_item, d_row, d_col, m_group, m_item, m_row, winner_columns,
    GRID: tl.constexpr, MASKED_ZERO: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_LQ: tl.constexpr, BLOCK_LD: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, RESIDENT: tl.constexpr,
    NARROW: tl.constexpr, STAGES: tl.constexpr, LOG2: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """Scores one document, or pair, against the query tile and stores what comes of it."""
    d_base = d_ptr + base(doc, d_start, d_starts, d_per_group, d_group, d_item, d_row)
    m_base = d_mask
    d_first = length.to(tl.int64) * 0
    if factors is not None or CODEC != 0:
        d_first += base(doc, d_start, d_starts, d_per_group, d_group, d_item, d_row) // d_row
    low = length * 0
    high = length
    if d_mask is not None:
        m_base = d_mask + base(doc, d_start, d_starts, d_per_group, m_group, m_item, m_row)
        if not MASKED_ZERO:
            low, high = kept_span(m_base, m_row, length)
    low, high = low.to(tl.int32), high.to(tl.int32)
    empty = high <= low
    stop = tl.where(live, high, low)  # a tile beyond its query's end asks for no product

    value, winner = _best(
        q_at, q, q_low, valid, q_col, d_base, d_row, d_col, m_base, m_row, factors, d_first, low, stop, D,
        winners_ptr is not None, d_mask is not None, MASKED_ZERO, NORMALIZE, PRECISION,
        BLOCK_LQ, BLOCK_LD, BLOCK_D, EVEN_D, RESIDENT, NARROW, STAGES, decoder, CODEC,
    )  # fmt: skip
    if scales is not None:
        value = value.to(tl.float32) * tl.load(scales + doc) * q_scale
    elif PRECISION != "native":
        value = value * q_scale
        # inf has no halves, and scaled products may leave float32's range: those are found again by plain products
        lost = valid & ((tl.abs(value) < float("inf")) == 0) & (high > low)
        if tl.max(lost.to(tl.int32), 0) > 0:
            exact, exact_winner = _best(
                q_at, q_at, q_at, valid, q_col, d_base, d_row, d_col, m_base, m_row, factors, d_first, low, high, D,
                winners_ptr is not None, d_mask is not None, MASKED_ZERO, NORMALIZE, "native",
                BLOCK_LQ, 16, 16, False, False, NARROW, 1, decoder, CODEC,
            )  # fmt: skip
            value = tl.where(lost, exact, value)
            winner = tl.where(lost, exact_winner, winner)
    if NORMALIZE:
        value = value / q_norm
    value = tl.where(empty, float("-inf"), value)

    if winners_ptr is not None:
        winner = tl.where(empty, -1, winner)
        if d_mask is not None:
            if MASKED_ZERO:
                won = tl.load(m_base + winner.to(tl.int64) * m_row, mask=winner >= 0, other=0) != 0
                winner = tl.where(won, winner, -1)
        slot = item * winner_columns + q_index
        if GRID:
            slot += column
        tl.store(winners_ptr + slot, winner.to(winners_ptr.dtype.element_ty), mask=valid)
        if maxima_ptr is not None:
            tl.store(maxima_ptr + slot, value, mask=valid)

    # their sum: a tree of adjacent pairs, cut at the level where one sum is one query
    total = tl.where(valid, value, 0.0)
    for level in tl.static_range(LOG2 + 1):
        if level >= 4:
            g = tl.arange(0, BLOCK_LQ >> level)
            if level == block_log2:
                sums = tl.where(empty, float("-inf"), total)  # an empty query: 0, but −inf against an empty document
                if GRID:
                    m = (((tile // parts) << (LOG2 - block_log2)) + g).to(tl.int64)
                    tl.store(out_ptr + (m * ND_OUT + item - first) * parts + part, sums, mask=m < NQ)
                else:
                    tl.store(out_ptr + (item - first) * parts + part + g, sums, mask=g == 0)
        if level < LOG2:
            total = tl.sum(tl.reshape(total, [BLOCK_LQ >> (level + 1), 2]), 1)


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=TABLES)
def _scores_kernel(
    q_ptr, d_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, d_starts, d_ends, d_mask, q_scales, scales, factors, pairs_ptr,
    first, items, docs, NQ, ND, ND_OUT, LQ, LD, TQ, TD, D, K, tiles, parts, block_log2,
    q_item, q_row, q_col, d_per_group, d_group, d_item, d_row, d_col, m_group, m_item, m_row,
    winner_columns,
    Q_CONSECUTIVE: tl.constexpr, GRID: tl.constexpr, MASKED_ZERO: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_LQ: tl.constexpr, BLOCK_LD: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr, RESIDENT: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr, LOG2: tl.constexpr,
    MANY: tl.constexpr, LOST: tl.constexpr,
    table, words, ids, weights, inverses, CODEC: tl.constexpr,
):  # fmt: skip
    """LOST: scores again what is lost in `out_ptr`, every docs-th document a program, at so many of which it looks at
    once."""
    decoder = (table, words, ids, weights, inverses)
    pid = tl.program_id(0)
    tile = pid % tiles
    end = first + items
    if LOST > 0:
        begin = first + (pid // tiles).to(tl.int64)
        stride = docs
        lost = 0
        for block in range(begin, end, LOST * stride):
            there = block + tl.arange(0, LOST).to(tl.int64) * stride
            lost |= any_lost(out_ptr, tile, there, items, first, ND_OUT, tile % parts, parts, NQ, block_log2, LOG2)
        if lost == 0:
            return
    else:
        begin = first + (pid // tiles).to(tl.int64) * docs
        end = tl.minimum(begin + docs, end)
        stride = 1

    # which query tokens
    row = tl.arange(0, BLOCK_LQ)
    part = tile % parts
    i = (row & ((1 << block_log2) - 1)) + part * BLOCK_LQ  # position among the kept tokens of its query
    if GRID:
        n = ((tile // parts) << (LOG2 - block_log2)) + (row >> block_log2)
    elif pairs_ptr is None:
        n = begin // K + row * 0
    else:
        n = tl.minimum(tl.maximum(tl.load(pairs_ptr + begin * 2), 0), NQ - 1) + row * 0
    n = n.to(tl.int64)
    real = n < NQ
    safe_n = tl.where(real, n, 0)
    q_start, q_length = span(safe_n, q_starts, q_ends, LQ, TQ)
    column = q_start if Q_CONSECUTIVE else safe_n * LQ
    if q_kept is None:
        q_index = i.to(tl.int64)
    else:
        q_length = tl.load(q_kept + safe_n).to(tl.int64)
        q_index = tl.load(q_kept_rows + column + i, mask=real & (i < q_length), other=0).to(tl.int64)
    valid = real & (i < q_length)
    live = NQ > 0
    if q_starts is not None:  # where offsets are on the card, the longest query is a guess
        live = tl.max(valid.to(tl.int32), 0) > 0
    q_base = base(safe_n, q_start, q_starts, ONE_GROUP, 0, q_item, q_row) + q_index * q_row
    d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + q_base
    q_ptrs = q_at[:, None] + d[None, :].to(tl.int64) * q_col
    q, q_low, q_scale, q_norm = q_at, q_at, q_at, q_at  # stand-ins, for what this variant does not use
    if RESIDENT:
        q = tl.load(q_ptrs, mask=valid[:, None] if EVEN_D else valid[:, None] & (d[None, :] < D), other=0.0)
        if PRECISION != "native":
            q, q_low, q_scale = halves(q)
    elif PRECISION != "native":
        largest = tl.zeros([BLOCK_LQ], tl.float32)
        for c in range(0, D, BLOCK_D):
            at = q_ptrs + (begin * 0 + c) * q_col
            q_tile = tl.load(at, mask=valid[:, None] & (d[None, :] < D - c), other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(q_tile), 1))
        q = power(largest)
        q_scale = inverse(q)
    if q_scales is not None:
        q_scale = tl.load(q_scales + column + q_index, mask=valid, other=0.0)
    if NORMALIZE:
        squares = tl.zeros([BLOCK_LQ], tl.float32)
        for c in range(0, D, BLOCK_D):
            at = q_ptrs + (begin * 0 + c) * q_col
            squares += squares_of(tl.load(at, mask=valid[:, None] & (d[None, :] < D - c), other=0.0))
        q_norm = tl.maximum(tl.sqrt_rn(squares), 1e-12)

    doc = begin
    if pairs_ptr is not None:
        doc = tl.minimum(tl.maximum(tl.load(pairs_ptr + begin * 2 + 1), 0), ND - 1)
    d_start, length = span(doc, d_starts, d_ends, LD, TD)
    if MANY:
        for item in range(begin, end, stride):
            # the next document's place is read while this one is scored
            next_start, next_length = span(tl.minimum(item + stride, end - 1), d_starts, d_ends, LD, TD)
            wanted = True
            if LOST > 0:
                at = item + tl.arange(0, 1)
                wanted = any_lost(out_ptr, tile, at, items, first, ND_OUT, part, parts, NQ, block_log2, LOG2) > 0
            if wanted:
                _score_document(
                    item, item, d_start, length, q_at, q, q_low, q_scale, q_norm, valid, live, column, q_index, d_ptr,
                    out_ptr, winners_ptr, maxima_ptr, d_starts, d_mask, scales, factors, decoder, first, ND_OUT, D,
                    tile, part, parts, NQ, block_log2, q_col, d_per_group, d_group, d_item, d_row, d_col, m_group,
                    m_item, m_row, winner_columns, GRID, MASKED_ZERO, NORMALIZE, PRECISION, BLOCK_LQ, BLOCK_LD, BLOCK_D,
                    EVEN_D, RESIDENT, NARROW, STAGES, LOG2, CODEC,
                )  # fmt: skip
            d_start = next_start
            length = next_length
    else:
        _score_document(
            begin, doc, d_start, length, q_at, q, q_low, q_scale, q_norm, valid, live, column, q_index, d_ptr, out_ptr,
            winners_ptr, maxima_ptr, d_starts, d_mask, scales, factors, decoder, first, ND_OUT, D, tile, part, parts,
            NQ, block_log2, q_col, d_per_group, d_group, d_item, d_row, d_col, m_group, m_item, m_row, winner_columns,
            GRID, MASKED_ZERO, NORMALIZE, PRECISION, BLOCK_LQ, BLOCK_LD, BLOCK_D, EVEN_D, RESIDENT, NARROW,
            STAGES, LOG2, CODEC,
        )  # fmt: skip
