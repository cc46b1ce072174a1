"""What a Hopper warpgroup does with the maxima of 128 query rows at a document's end: sums and winners.

Query tokens lie in the tile such that each thread has four that follow one another and each warp 32, so that the sum of
a query of 32 tokens leaves no warp.
"""

from __future__ import annotations

from .gluon_names import gl, gluon
from .hopper_maxima import ALONE, NOWHERE, ROWS, largest, lowest, maximum, winner
from .hopper_zero import or_zero, zero_wins

# [128, 2, 2, 2, 2]: of four documents, with a bit of the document in place of a bit of the lane
SWAPPED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0, 0, 0, 0], [64, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 1, 0, 0]],
        lane_bases=[[0, 0, 0, 1, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]],
        block_bases=[],
        shape=[128, 2, 2, 2, 2],
    )
)
# [128, 2, 2, 2]: the same after the maximum over that bit, with the other bits too
OF_FOUR = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0, 0, 0], [64, 0, 0, 0], [0, 1, 0, 0]],
        lane_bases=[[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[128, 2, 2, 2],
    )
)


@gluon.jit
def _token(row):
    """Row 64 b + 16 w + 8 h + l of the accumulator holds the tile's query token 32 w + 4 l + 2 b + h."""
    return ((row >> 4) & 3) * 32 + (row & 7) * 4 + (row >> 6) * 2 + ((row >> 3) & 1)


@gluon.jit
def query_tokens(
    token, tile, parts, q_starts, q_ends, q_kept_rows, q_kept, NQ, LQ, TQ, q_item, q_row, block_log2,
    Q_CONSECUTIVE: gl.constexpr, K=None,
):  # fmt: skip
    """Of some query tokens of a tile: offsets, columns in a table of winners, which are there. K: a row of that table
    is one query's."""
    i = (token & ((1 << block_log2) - 1)) + (tile % parts) * ROWS
    n = (((tile // parts) << (7 - block_log2)) + (token >> block_log2)).to(gl.int64)
    real = n < NQ
    n = gl.where(real, n, 0)
    if q_starts is None:
        start = n * 0
        length = start + LQ
        offset = n * q_item
    else:
        start = gl.minimum(gl.maximum(gl.load(q_starts + n).to(gl.int64), 0), TQ)
        end = gl.minimum(gl.maximum(gl.load(q_ends + n).to(gl.int64), start), TQ)
        length = gl.minimum(end - start, LQ)
        offset = start * q_row
    index = i.to(gl.int64)
    column = start if Q_CONSECUTIVE else n * LQ
    if q_kept is not None:
        length = gl.load(q_kept + n).to(gl.int64)
        index = gl.load(q_kept_rows + column + i, mask=real & (i < length), other=0).to(gl.int64)
    return offset + index * q_row, column + index if K is None else index, real & (i < length)


@gluon.jit
def query_rows(
    row, tile, parts, q_starts, q_ends, q_kept_rows, q_kept, NQ, LQ, TQ, q_item, q_row, block_log2,
    Q_CONSECUTIVE: gl.constexpr, K=None,
):  # fmt: skip
    """`query_tokens` of the tokens in some rows of the accumulator."""
    return query_tokens(
        _token(row), tile, parts, q_starts, q_ends, q_kept_rows, q_kept, NQ, LQ, TQ, q_item, q_row, block_log2,
        Q_CONSECUTIVE, K,
    )  # fmt: skip


@gluon.jit
def keep_queries(
    q_ptr, q_at, q_live, q_col, D, q_tile, by_row: gl.constexpr, ALIGNED: gl.constexpr, FIRST: gl.constexpr = 0
):  # fmt: skip
    """Query rows, of them the columns from FIRST on, into shared memory. ALIGNED: they begin and end at multiples of 16
    bytes, and are loaded in whole pieces, a fifth of the time; offsets and mask are written such that the compiler sees
    that it may."""
    WIDE: gl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth if ALIGNED else 1
    COLUMNS: gl.constexpr = q_tile.shape[1]
    for c in gl.static_range(0, COLUMNS, 64):
        d = FIRST + c + gl.arange(0, 64, layout=gl.SliceLayout(0, by_row))
        q = gl.load(
            q_ptr + (q_at // WIDE * WIDE)[:, None] + (d.to(gl.int64) * q_col)[None, :],
            mask=q_live[:, None] & (d // WIDE < D // WIDE)[None, :], other=0.0,
        )  # fmt: skip
        q_tile.slice(c, 64, 1).store(q)


@gluon.jit
def pair_sums(x):
    return gl.sum(gl.reshape(x, [x.shape[0] // 2, 2] + x.shape[1:]), 1)


@gluon.jit
def _store_sums(sums, level: gl.constexpr, doc, count, tile, out_ptr, ND, parts, NQ):
    """Stores the sums of 2^level query rows each, of `count` documents that end with `doc`, which comes first."""
    layout: gl.constexpr = sums.type.layout
    n = gl.arange(0, ROWS >> level, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    n = (((tile // parts) << (7 - level)) + n).to(gl.int64)[:, None, None]
    back = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    if sums.shape[2] > 1:
        back += 2 * gl.arange(0, sums.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    gl.store(out_ptr + (n * ND + (doc - back)) * parts + tile % parts, sums, mask=(n < NQ) & (back < count))


@gluon.jit
def _add_up(value, doc, count, valid, tile, out_ptr, ND, parts, NQ, block_log2):
    """Adds up the maxima of documents, where one sum is one query, and stores their scores: value [ROWS, A, B]."""
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, value.type.layout))
    # rows without a token are zero: their maximum is −inf where there is no document token, and so then is the score
    valid = gl.convert_layout(valid, by_row, assert_trivial=True)[:, None, None] | (value == float("-inf"))
    value = gl.where(valid, value, 0.0)
    A: gl.constexpr = value.shape[1]
    B: gl.constexpr = value.shape[2]
    value = gl.permute(gl.reshape(value, [2, 4, 2, 8, A, B]), (1, 3, 0, 2, 4, 5))
    value = gl.reshape(value, [ROWS, A, B])  # by tokens
    of16 = pair_sums(pair_sums(pair_sums(pair_sums(value))))
    if block_log2 == 4:
        _store_sums(of16, 4, doc, count, tile, out_ptr, ND, parts, NQ)
    else:
        of32 = pair_sums(of16)
        if block_log2 == 5:
            _store_sums(of32, 5, doc, count, tile, out_ptr, ND, parts, NQ)
        else:
            of64 = pair_sums(of32)
            if block_log2 == 6:
                _store_sums(of64, 6, doc, count, tile, out_ptr, ND, parts, NQ)
            else:
                _store_sums(pair_sums(of64), 7, doc, count, tile, out_ptr, ND, parts, NQ)


@gluon.jit
def add_up_four(best0, best1, best2, best3, doc, count, valid, tile, out_ptr, ND, parts, NQ, block_log2):
    """Scores of up to four documents that have ended, the last of them `doc`, whose maxima are `best0`. Four at once
    take as long as one: each thread of four gets a document, in exchange for the others' columns."""
    four = gl.reshape(gl.join(gl.join(best0, best1), gl.join(best2, best3)), [ROWS, 2, 2, 2, 2])
    two = gl.reduce(gl.convert_layout(four, SWAPPED), 2, maximum)
    value = gl.reduce(gl.convert_layout(two, OF_FOUR), 1, maximum)
    _add_up(value, doc, count, valid, tile, out_ptr, ND, parts, NQ, block_log2)


@gluon.jit
def wait_for_four(
    best, waiting, last1, last2, last3, doc, q_scale, scales, valid, tile, out_ptr, ND, parts, NQ, block_log2
):  # fmt: skip
    """The maxima of a document that has ended wait until there are four documents'."""
    if scales is not None:
        best = of_codes(best, q_scale[:, None], scales, doc)
    waiting += 1
    if waiting == 4:
        add_up_four(best, last1, last2, last3, doc, 4, valid, tile, out_ptr, ND, parts, NQ, block_log2)
        waiting = 0
    return waiting, best, last1, last2


@gluon.jit
def keep_piece(best, valid, pieces_ptr, doc, q_scale, scales):
    """Stores the maxima of a piece of a document by query tokens, as `finish` adds them up."""
    value = largest(best)
    if scales is not None:
        value = of_codes(value, q_scale, scales, doc)
    token = _token(gl.arange(0, ROWS, layout=gl.SliceLayout(1, ALONE)))
    gl.store(pieces_ptr + token, gl.where(valid | (value == float("-inf")), value, 0.0))


@gluon.jit
def of_codes(value, q_scale, scales, doc):
    """Similarities from maxima of products of codes, times the scales of document and query token."""
    similarity = value.to(gl.float32) * gl.load(scales + doc) * q_scale
    return gl.where(value == lowest(value.dtype), float("-inf"), similarity)


@gluon.jit
def scaled_maxima(value, q_scale, empty):
    """Maxima of a document times their scales. −inf is an empty document's alone: what else comes to it is lost, and
    turns into NaN."""
    product = value * q_scale
    return gl.where(empty, value, gl.where(product > float("-inf"), product, float("nan")))


@gluon.jit
def store_winner(
    winners_ptr, slot, value, row, doc, first, empty, valid, bases, gaps, d_item, TD, MASKED: gl.constexpr
):  # fmt: skip
    """Stores the token of a document that has the largest similarity, found in `row` of the buffer; -1: none."""
    base = first
    if MASKED:  # the first kept row is not the document's first
        if bases is None:
            base = doc * d_item
        else:
            base = min(max(gl.load(bases + doc), 0), TD).to(gl.int32)
    won = gl.where(empty, -1, row - base)
    if gaps is not None:
        won = gl.where(zero_wins(value, row, gl.load(gaps + doc)), -1, won)
    gl.store(winners_ptr + slot, won.to(winners_ptr.dtype.element_ty), mask=valid)


@gluon.jit
def settled(value, doc, empty, q_scale, scales, gaps):
    """Largest products, whose winners are known, as similarities: with their scales, and masked tokens' zeros."""
    if scales is not None:
        value = of_codes(value, q_scale, scales, doc)
    elif q_scale is not None:
        value = scaled_maxima(value, q_scale, empty)
    if gaps is not None:
        value = or_zero(value, gl.load(gaps + doc))
    return value


@gluon.jit
def finish(
    best, best_low, held, doc, first, empty, MASKED: gl.constexpr, q_scale, scales, column, bases, gaps, winners_ptr,
    maxima_ptr, TD, winner_columns, d_item, valid, tile, out_ptr, ND, parts, NQ, block_log2,
):  # fmt: skip
    """Adds up the maxima of a document that has ended, where one sum is one query, and stores its scores; where asked,
    the maxima and the tokens that have them too."""
    if winners_ptr is None:
        value = largest(best)
    else:
        value, row = winner(best, best_low, held, first)
        row = gl.where(row == NOWHERE, first, row)  # −inf everywhere: the first
        slot = doc.to(gl.int64) * winner_columns + column
        store_winner(winners_ptr, slot, value, row, doc, first, empty, valid, bases, gaps, d_item, TD, MASKED)
    value = settled(value, doc, empty, q_scale, scales, gaps)
    if maxima_ptr is not None:
        gl.store(maxima_ptr + slot, value, mask=valid)
    _add_up(gl.reshape(value, [ROWS, 1, 1]), doc, 1, valid, tile, out_ptr, ND, parts, NQ, block_log2)
