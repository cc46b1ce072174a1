"""Maxima of similarities, 128 query rows × document columns, in a Hopper warpgroup's registers, and which column has
them.

A thread has eight columns of 32, a group, of each of four rows. It keeps the largest similarity of its own columns; for
winners the first group that has it, and that group's columns, of which the document's end asks which it was. So a group
costs a comparison and moves; to find the column at once takes longer.
"""

from __future__ import annotations

from . import arithmetic
from .gluon_names import gl, gluon

lowest = arithmetic.lowest
maximum = gluon.jit(arithmetic.maximum.fn)

ROWS = gl.constexpr(128)  # query rows of a warpgroup
NOWHERE = gl.constexpr(2147483647)  # in place of no winner: beyond every row
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
# [128, 2, 2]: with the query row's bits in place of the lane's, one after the other
HALFWAY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0, 0], [0, 1, 0]],
        lane_bases=[[0, 0, 1], [64, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[128, 2, 2],
    )
)
# [128, 2]: until a thread has one query token, and a warp 32 in their order
ALONE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1]],
        lane_bases=[[8, 0], [64, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[128, 2],
    )
)


@gluon.constexpr_function
def _of(dtype, text):
    """Assembly for float32 similarities as it is for those of a dtype."""
    if dtype == gl.int32:
        text = text.replace("max.NaN.f32", "max.s32").replace("add.rn.f32", "add.s32").replace("0f00000000", "0")
    return text


@gluon.jit
def lane_maximum(x):
    """The largest value of each row among a thread's own columns: [128, N] → [128, 4]."""
    N: gl.constexpr = x.shape[1]
    if x.dtype == gl.int32:  # one after the other, of which three-way maxima are made
        own = gl.reshape(gl.permute(gl.reshape(x, [x.shape[0], N // 8, 4, 2]), (0, 2, 1, 3)), [x.shape[0], 4, N // 4])
        return gl.convert_layout(gl.reduce(own, 2, maximum), LANES, assert_trivial=True)
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
    return gl.where((((word >> column) & 1) != 0)[None, :], group, lowest(group.dtype))


@gluon.jit
def _own(group):
    """[128, SUB] → a thread's eight columns, lowest first: a tuple of [128, 4]."""
    x = gl.permute(gl.reshape(group, [ROWS, 2, 2, 4, 2]), (0, 3, 4, 2, 1))  # row, lane, pair, eight
    low, high = gl.split(x)
    a, b = gl.split(low)
    c, d = gl.split(high)
    own = ()
    for eight in gl.static_range(4):
        left, right = gl.split((a, b, c, d)[eight])
        left = gl.convert_layout(left, LANES, assert_trivial=True)
        right = gl.convert_layout(right, LANES, assert_trivial=True)
        own = own + (left, right)  # type: ignore[assignment]
    return own


# Sums with zero, under a predicate: of moves the assembler makes selections, or what takes twice as long as a sum. They
# keep values, and the bits of values that are equal, NaN too, are then equal.
KEEP = gl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $23, $24; @p mov.b32 $0, $25;"
    + "".join(f"@p add.rn.f32 ${1 + k}, ${16 + k}, 0f00000000;" for k in range(7))
    + "}"
)
KEEP_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + [str(k) for k in range(8)] + ["r"] * 10))


@gluon.jit
def take(best, best_low, held, group, low, WINNERS: gl.constexpr):
    """The maximum with a group of columns from row `low` on. With WINNERS the first group that has it too, and that
    group's columns but for each thread's last, of which the document's end asks which it was."""
    new = maximum(best, lane_maximum(group))
    if WINNERS:
        best_low, held = keep(best, new, best_low, held, group, low)
    return new, best_low, held


@gluon.jit
def keep(best, new, best_low, held, group, low):
    """Where the maximum is new, the group that has it, and its columns, those of other documents too."""
    # bits, not values: NaN, once in, stays the same NaN and keeps its place
    kept = gl.inline_asm_elementwise(
        _of(best.dtype, KEEP), KEEP_OPERANDS, (best_low,) + held + _own(group)[:7] + (new, best, low),
        dtype=(gl.int32,) + (best.dtype,) * 7, is_pure=True, pack=1,
    )  # fmt: skip
    return kept[0], kept[1:]


BETWEEN = gl.constexpr(
    "{ .reg .pred p; setp.le.s32 p, $12, $20; setp.gt.and.s32 p, $16, $20, p; @!p bra out;"
    "max.NaN.f32 $0, $0, $8; max.NaN.f32 $1, $1, $9; max.NaN.f32 $2, $2, $10; max.NaN.f32 $3, $3, $11; out: }"
)


@gluon.jit
def take_between(best, group, low, first, past):
    """The maximum with the columns of a group from row `low` on that are rows from `first` on and before `past`."""
    lane = low + gl.arange(0, 4, layout=gl.SliceLayout(0, LANES))[None, :] * 2
    own = _own(group)
    for k in gl.static_range(8):
        # a branch, of which the assembler makes maxima under a predicate: with selections they would be twice as many
        best = gl.inline_asm_elementwise(
            _of(best.dtype, BETWEEN),
            "=r,=r,=r,=r,0,1,2,3,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [best, own[k], first - lane, past - lane,
             gl.full([ROWS, 4], k // 2 * 8 + k % 2, gl.int32, LANES)],
            dtype=best.dtype, is_pure=True, pack=4,
        )  # fmt: skip
    return best


# The first of a thread's columns from a place on that has the maximum: the last where no other has. Assembly,
# or the compiler gathers comparisons in words of bits, and takes these apart again.
WHICH = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.b32 t, 25;"
    + "".join(
        f"setp.le.s32 p, $9, {at}; setp.eq.and.b32 p, ${1 + k}, $8, p; @p mov.b32 t, {at};"
        for k, at in reversed([(k, k // 2 * 8 + k % 2) for k in range(7)])
    )
    + "mov.b32 $0, t; }"
)
LARGER = gl.constexpr(
    "{ .reg .pred p, q; .reg .b32 m, s, t; max.NaN.f32 m, $2, $4; setp.eq.b32 p, m, $2; setp.eq.b32 q, m, $4;"
    "selp.b32 s, $3, 2147483647, p; selp.b32 t, $5, 2147483647, q; mov.b32 $0, m; min.s32 $1, s, t; }"
)


@gluon.jit
def _halfway(x):
    return gl.permute(gl.convert_layout(gl.reshape(x, [ROWS, 2, 2]), HALFWAY), (0, 2, 1))


@gluon.jit
def _larger(value, row):
    """Of the two on the last axis the larger, and its row; of equals the first row."""
    left, right = gl.split(value)
    left_row, right_row = gl.split(row)
    return gl.inline_asm_elementwise(
        _of(value.dtype, LARGER), "=r,=r,r,r,r,r", (left, left_row, right, right_row),
        dtype=(value.dtype, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def winner(best, best_low, held, first):
    """The largest similarity of each query row, and the first document row that has it, NOWHERE if none."""
    if best.dtype == gl.float32:
        best = best + 0.0  # as it is held
    lane = best_low + gl.arange(0, 4, layout=gl.SliceLayout(0, LANES))[None, :] * 2
    at = gl.inline_asm_elementwise(
        WHICH, "=r" + ",r" * 9, held + (best, first - lane), dtype=gl.int32, is_pure=True, pack=1
    )
    row = lane + at
    row = gl.where(best_low < 0, NOWHERE, row)
    best, row = _larger(_halfway(best), _halfway(row))
    best, row = _larger(gl.convert_layout(best, ALONE), gl.convert_layout(row, ALONE))
    alone: gl.constexpr = gl.SliceLayout(1, ALONE)
    return gl.convert_layout(best, alone, assert_trivial=True), gl.convert_layout(row, alone, assert_trivial=True)


@gluon.jit
def largest(best):
    """The largest similarity of each query row."""
    return gl.reduce(gl.convert_layout(gl.reduce(_halfway(best), 2, maximum), ALONE), 1, maximum)
