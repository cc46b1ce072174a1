"""What a Hopper warpgroup does with a tile of similarities, 128 query rows × document columns, in its registers: maxima
of columns, the columns that may hold a winner, and at a document's end sums and winners.

Query tokens lie in the tile such that each thread has four that follow one another and each warp 32, so that the sum of
a query of 32 tokens leaves no warp.
"""

from __future__ import annotations

from . import arithmetic
from .gluon_names import gl, gluon

maximum = gluon.jit(arithmetic.maximum.fn)

ROWS = gl.constexpr(128)  # query rows of a warpgroup
SUB = gl.constexpr(32)  # columns that a document's end touches; a word of a mask
# [128, 4]: what each thread keeps of an accumulator after the maximum over its own columns
LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [64, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[128, 4],
    )
)
# [128, 4, 4, 2]: the same before that maximum, of 32 columns
OWN = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 2, 0], [8, 0, 0, 0], [64, 0, 0, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[128, 4, 4, 2],
    )
)

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
def lane_maximum(x):
    """The largest value of each row among a thread's own columns: [128, N] → [128, 4]."""
    N: gl.constexpr = x.shape[1]
    pairs = gl.reduce(gl.reshape(x, [x.shape[0], N // 8, 4, 2]), 3, maximum)
    return gl.convert_layout(gl.reduce(pairs, 1, maximum), LANES, assert_trivial=True)


@gluon.jit
def _left_and_right(x):
    """Left and right columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def columns(x):
    """[128, N] → a tuple of [128, SUB]."""
    if x.shape[1] == SUB:
        return (x,)
    else:
        left, right = _left_and_right(x)
        return columns(left) + columns(right)


@gluon.jit
def kept(group, word):
    """Columns whose bit is not set turn into −inf."""
    column = gl.arange(0, group.shape[1], layout=gl.SliceLayout(0, group.type.layout))
    return gl.where((((word >> column) & 1) != 0)[None, :], group, float("-inf"))


@gluon.jit
def _by_lane(x):
    by_lane: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, OWN))
    return gl.convert_layout(x, by_lane, assert_trivial=True)[:, :, None, None]


@gluon.jit
def take(best, best_low, held, group, low, WINNERS: gl.constexpr):
    """The maximum with a group of columns from row `low` on. With WINNERS the first group that has it too,
    and that group's columns, of which the document's end asks which it was."""
    new = maximum(best, lane_maximum(group))
    if not WINNERS:
        return new, best_low, held
    else:
        # bits, not values: NaN, once in, stays the same NaN and keeps its place
        more = new.to(gl.int32, bitcast=True) != best.to(gl.int32, bitcast=True)
        own = gl.permute(gl.reshape(group, [ROWS, 4, 4, 2]), (0, 2, 1, 3))
        # a branch, of which the assembler makes moves under a predicate: they are cheaper than selections
        held = gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.b32 p, $24, $32; @p bra out;"
            "mov.b32 $0, $16; mov.b32 $1, $17; mov.b32 $2, $18; mov.b32 $3, $19;"
            "mov.b32 $4, $20; mov.b32 $5, $21; mov.b32 $6, $22; mov.b32 $7, $23; out: }",
            "=r,=r,=r,=r,=r,=r,=r,=r,0,1,2,3,4,5,6,7,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [held, gl.convert_layout(own, OWN, assert_trivial=True), _by_lane(new), _by_lane(best)],
            dtype=gl.float32, is_pure=True, pack=8,
        )  # fmt: skip
        return new, gl.where(more, low, best_low), held


@gluon.jit
def _own(group):
    """[128, SUB] → a thread's eight columns, lowest first: a tuple of [128, 4]."""
    x = gl.permute(gl.reshape(group, [ROWS, 2, 2, 4, 2]), (0, 3, 4, 2, 1))  # row, lane, pair, eight
    low, high = gl.split(x)
    a, b = gl.split(low)
    c, d = gl.split(high)
    return gl.split(a) + gl.split(b) + gl.split(c) + gl.split(d)


@gluon.jit
def take_between(best, group, low, first, past):
    """The maximum with the columns of a group from row `low` on that are rows from `first` on and before `past`."""
    lane = low + gl.arange(0, 4, layout=gl.SliceLayout(0, LANES))[None, :] * 2
    own = _own(group)
    for k in gl.static_range(8):
        # a branch, of which the assembler makes maxima under a predicate: with selections they would be twice as many
        best = gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.le.s32 p, $12, $20; setp.gt.and.s32 p, $16, $20, p; @!p bra out;"
            "max.NaN.f32 $0, $0, $8; max.NaN.f32 $1, $1, $9; max.NaN.f32 $2, $2, $10; max.NaN.f32 $3, $3, $11;"
            "out: }",
            "=r,=r,=r,=r,0,1,2,3,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [best, gl.convert_layout(own[k], LANES, assert_trivial=True), first - lane, past - lane,
             gl.full([ROWS, 4], k // 2 * 8 + k % 2, gl.int32, LANES)],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    return best


@gluon.jit
def _least(a, b):
    return gl.minimum(a, b)


@gluon.jit
def _winner(best, value, best_low, held, first):
    """Row of the first document token that has the largest similarity `value` of each query row."""
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, OWN))))[None, :, None, None]
    eight = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, OWN))))[None, None, :, None]
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, OWN))))[None, None, None, :]
    # plus zero: the bits of values that are equal, NaN too, are then equal
    best = (best + 0.0).to(gl.int32, bitcast=True)
    found = (held + 0.0).to(gl.int32, bitcast=True) == _by_lane(best)
    at = gl.where(found, eight * 8 + lane * 2 + pair, 64)
    at = gl.convert_layout(gl.reduce(gl.reduce(at, 3, _least), 2, _least), LANES, assert_trivial=True)
    won = (best == (value + 0.0).to(gl.int32, bitcast=True)[:, None]) & (best_low >= 0)
    row = gl.reduce(gl.where(won, best_low + at, 2147483647), 1, _least)
    return gl.where(row == 2147483647, first, row)  # −inf everywhere: the first


@gluon.jit
def _token(row):
    """Row 64 b + 16 w + 8 h + l of the accumulator holds the tile's query token 32 w + 4 l + 2 b + h."""
    return ((row >> 4) & 3) * 32 + (row & 7) * 4 + (row >> 6) * 2 + ((row >> 3) & 1)


@gluon.jit
def query_tokens(
    token, tile, parts, q_starts, q_ends, q_kept_rows, q_kept, NQ, LQ, TQ, q_item, q_row, block_log2,
    Q_CONSECUTIVE: gl.constexpr,
):  # fmt: skip
    """Of some query tokens of a tile: offsets, columns in a table of winners, which are there."""
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
    return offset + index * q_row, column + index, real & (i < length)


@gluon.jit
def query_rows(
    row, tile, parts, q_starts, q_ends, q_kept_rows, q_kept, NQ, LQ, TQ, q_item, q_row, block_log2,
    Q_CONSECUTIVE: gl.constexpr,
):  # fmt: skip
    """`query_tokens` of the tokens in some rows of the accumulator."""
    return query_tokens(
        _token(row), tile, parts, q_starts, q_ends, q_kept_rows, q_kept, NQ, LQ, TQ, q_item, q_row, block_log2,
        Q_CONSECUTIVE,
    )  # fmt: skip


@gluon.jit
def keep_queries(q_ptr, q_at, q_live, q_col, D, q_tile, by_row: gl.constexpr, ALIGNED: gl.constexpr):
    """Query rows, into shared memory. ALIGNED: they begin and end at multiples of 16 bytes, and are loaded 16 at once,
    a fifth of the time; offsets and mask are written such that the compiler sees that it may."""
    WIDE: gl.constexpr = 8 if ALIGNED else 1
    COLUMNS: gl.constexpr = q_tile.shape[1]
    for c in gl.static_range(0, COLUMNS, 64):
        d = c + gl.arange(0, 64, layout=gl.SliceLayout(0, by_row))
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
def _add_up(value, doc, count, valid, q_scale, tile, out_ptr, ND, parts, NQ, block_log2):
    """Adds up the maxima of documents, where one sum is one query, and stores their scores: value [ROWS, A, B]."""
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, value.type.layout))
    # rows without a token are zero: their maximum is −inf where there is no document token, and so then is the score
    valid = gl.convert_layout(valid, by_row, assert_trivial=True)[:, None, None] | (value == float("-inf"))
    if q_scale is not None:
        value *= gl.convert_layout(q_scale, by_row, assert_trivial=True)[:, None, None]
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
    _add_up(value, doc, count, valid, None, tile, out_ptr, ND, parts, NQ, block_log2)


@gluon.jit
def wait_for_four(
    best, waiting, last1, last2, last3, doc, valid, tile, out_ptr, ND, parts, NQ, block_log2
):  # fmt: skip
    """The maxima of a document that has ended wait until there are four documents'."""
    waiting += 1
    if waiting == 4:
        add_up_four(best, last1, last2, last3, doc, 4, valid, tile, out_ptr, ND, parts, NQ, block_log2)
        waiting = 0
    return waiting, best, last1, last2


@gluon.jit
def keep_piece(best, valid, pieces_ptr):
    """Stores the maxima of a piece of a document by query tokens, as `finish` adds them up."""
    value = gl.reduce(best, 1, maximum)
    token = _token(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LANES)))
    gl.store(pieces_ptr + token, gl.where(valid | (value == float("-inf")), value, 0.0))


@gluon.jit
def finish(
    best, best_low, held, q_scale, column, valid, doc, first, empty, bases, tile, out_ptr, winners_ptr, maxima_ptr,
    ND, TD, parts, NQ, block_log2, winner_columns, d_item, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds up the maxima of a document that has ended, where one sum is one query, and stores its scores; where asked,
    the maxima and the tokens that have them too."""
    value = gl.reduce(best, 1, maximum)
    if winners_ptr is not None:
        slot = doc.to(gl.int64) * winner_columns + column
        base = first
        if MASKED:  # the first kept row is not the document's first
            if bases is None:
                base = doc * d_item
            else:
                base = min(max(gl.load(bases + doc), 0), TD).to(gl.int32)
        winner = gl.where(empty, -1, _winner(best, value, best_low, held, first) - base)
        gl.store(winners_ptr + slot, winner.to(winners_ptr.dtype.element_ty), mask=valid)
        if maxima_ptr is not None:
            largest = value if q_scale is None else value * q_scale  # winners are found by the value as multiplied
            gl.store(maxima_ptr + slot, largest, mask=valid)
    _add_up(gl.reshape(value, [ROWS, 1, 1]), doc, 1, valid, q_scale, tile, out_ptr, ND, parts, NQ, block_log2)
