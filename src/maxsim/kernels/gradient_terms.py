"""The terms of a token row's gradient, for the backward: where they stand, and their sum in a fixed order.

ENTRIES terms of each of ROWS rows are read at once, and where the next ones stand is found meanwhile. With one warp and
32 terms each lane finds one; the lanes then read rows together, whatever each belongs to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decoding import decoded
from .list_places import won_by
from .sides import span
from .won_rows import PLACE


@triton.jit
def _find(
    k, live, own, to, order, pair_order, winners, columns, OF_QUERIES: tl.constexpr, FEW_WON: tl.constexpr
):  # fmt: skip
    """Term k → where it stands, in the table, among pairs or in its list, and the document token that won it."""
    if OF_QUERIES:
        at = k.to(tl.int64)
        if pair_order is not None:
            at = tl.load(pair_order + k, mask=live, other=0).to(tl.int64)
        won = won_by(winners, at * columns + own, live)
    else:
        at = tl.load(order + to + k, mask=live, other=0).to(tl.int32)
        if order.dtype.element_ty == tl.int16:
            at &= 0xFFFF
        if FEW_WON:
            at &= PLACE
        won = tl.where(live, 0, -1)
    return at, won


@triton.jit
def sum_terms(
    low, high, slot, own, n, doc, at, over, to, size, skipped,
    winners, grad, order, pairs, pair_order, q_ptr, d_ptr, q_starts, q_ends, q_owner, d_starts, d_ends,
    columns, K, NQ, ND, LQ, LD, TQ, TD, D, grad_query, grad_document,
    q_item, q_row, q_col, d_group, d_item, d_row, d_col,
    GRID: tl.constexpr, OF_QUERIES: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr, scales=None, factors=None,
    decoder=None, CODEC: tl.constexpr = 0, FEW_WON: tl.constexpr = False,
):  # fmt: skip
    """Sums of the terms low to high of ROWS rows, ENTRIES at a time; and how many there were, for each lane.

    own: of queries the column of the table; n, doc: the item that a row belongs to; at, over, to, size: the list of a
    document (`list_base`), `skipped` entries after its first one's. scales, factors: of documents that are codes, and
    where rows are normalised codes of unit vectors; decoder: of codes that are no numbers.
    """
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    terms = tl.zeros([ROWS * ENTRIES], tl.int32)
    k = low + slot
    next_at, next_won = _find(k, k < high, own, to, order, pair_order, winners, columns, OF_QUERIES, FEW_WON)
    for _ in range(0, tl.max(high - low, 0), ENTRIES):
        where = next_at
        won = next_won
        k += ENTRIES  # the next ones are found while these are read
        next_at, next_won = _find(k, k < high, own, to, order, pair_order, winners, columns, OF_QUERIES, FEW_WON)
        live = won >= 0
        # which pair p, query with its token, and document
        if OF_QUERIES:
            p = where
            column = own
        elif GRID or pairs is None:
            p = doc
            column = skipped + where
            live = live & (where < size)  # where documents overlap, not every place of a list is written
        else:
            live = live & (where < size)
            p = tl.load(pair_order + at + (over + where) // columns, mask=live, other=0).to(tl.int64)
            column = (over + where) % columns
        query = n
        document = doc
        token = column
        if OF_QUERIES:
            document = p
            if pairs is not None:
                document = tl.load(pairs + p * 2 + 1, mask=live, other=0).to(tl.int64)
                document = tl.minimum(tl.maximum(document, 0), ND - 1)
        else:
            if GRID:
                if q_owner is None:
                    query = (column.to(tl.uint32) // LQ.to(tl.uint32)).to(tl.int32)
                    token = column - query * LQ
                else:
                    query = tl.maximum(tl.load(q_owner + column, mask=live, other=0), 0)
            elif pairs is not None:
                query = tl.minimum(tl.maximum(tl.load(pairs + p * 2, mask=live, other=0), 0), NQ - 1)
        if GRID:
            g = tl.load(grad + query.to(tl.int64) * grad_query + document * grad_document, mask=live, other=0.0)
        else:
            g = tl.load(grad + p * grad_query, mask=live, other=0.0)
        if OF_QUERIES:
            at_row = won.to(tl.int64) * d_row
            if d_starts is not None:
                at_row += span(tl.where(live, document, 0), d_starts, d_ends, LD, TD)[0] * d_row
            elif GRID or pairs is not None:
                at_row += document * d_item
            else:
                at_row += n * d_group + (p - n * K) * d_item
            if scales is not None:
                g = g.to(tl.float32) * tl.load(scales + document, mask=live, other=0.0)
            if factors is not None:
                g *= tl.load(factors + at_row // d_row, mask=live, other=0).to(tl.float32)
        else:
            at_row = token.to(tl.int64) * q_row
            if q_starts is None:
                at_row += query.to(tl.int64) * q_item
            elif (not GRID) or q_owner is None:
                at_row += span(tl.where(live, query, 0), q_starts, q_ends, LQ, TQ)[0] * q_row
        if CODEC != 0 and OF_QUERIES:
            tile = decoded(
                (d_ptr, d_row, d_col, D), tl.where(live, at_row // d_row, 0), live, 0, decoder, CODEC, BLOCK_D, False,
                q_ptr.dtype.element_ty,
            )  # fmt: skip
        else:
            at_row = tl.where(live, at_row, -1024)[:, None]  # a power of two, or loads would be narrow
            if OF_QUERIES:
                tile_ptrs = d_ptr + at_row + d[None, :].to(tl.int64) * d_col
            else:
                tile_ptrs = q_ptr + at_row + d[None, :].to(tl.int64) * q_col
            tile = tl.load(tile_ptrs, mask=(at_row >= 0) & (d < D)[None, :], other=0.0)
        term = tile.to(tl.float32)
        if NORMALIZE:
            if scales is None and CODEC == 0:
                term = term / tl.maximum(tl.sqrt_rn(tl.sum(term * term, 1)), 1e-12)[:, None]
            terms += live.to(tl.int32)
        term *= g.to(tl.float32)[:, None]
        total += tl.sum(tl.reshape(term, [ROWS, ENTRIES, BLOCK_D]), 1)
    return total, terms
