"""float32 tokens as float16 halves in shared memory or registers, where a Hopper warpgroup multiplies them."""

from __future__ import annotations

from . import arithmetic
from .gluon_names import fence_async_shared, gl, gluon, mbarrier, thread_barrier, tma_load, wgmma

halves = gluon.jit(arithmetic.halves.fn)
power = gluon.jit(arithmetic.power.fn)
inverse = gluon.jit(arithmetic.inverse.fn)
split = gluon.jit(arithmetic.split.fn)
bounded = gluon.jit(arithmetic.bounded.fn)

# Eight threads read, and write, 16 bytes of as many rows, which lie in different banks.
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [0, 1]))


@gluon.constexpr_function
def _by_token(columns):
    """[64, columns]: which thread multiplies which number of a tile of tokens where these lie in rows as in `token_of`.
    Threads that read at once then find theirs in different banks, as the copy engine has swizzled them."""
    wide = [[0, 1 << i] for i in range(4, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], [0, 8], *wide],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def _queries(q_ptr, q_at, q_live, d, q_col, D):
    """Columns d of query rows."""
    at = q_at[:, None] + (d.to(gl.int64) * q_col)[None, :]
    return gl.load(q_ptr + at, mask=q_live[:, None] & (d < D)[None, :], other=0.0)


@gluon.jit
def keep_halves(
    q_ptr, q_at, q_live, q_col, D, q_tile, LOW: gl.constexpr, by_row: gl.constexpr, acc: gl.constexpr,
    lanes: gl.constexpr,
):  # fmt: skip
    """Query rows as halves: the high ones in `q_tile`, or with LOW in registers and the low ones there; and scales."""
    d = gl.arange(0, q_tile.shape[1], layout=gl.SliceLayout(0, by_row))
    high, low, scale = halves(_queries(q_ptr, q_at, q_live, d, q_col, D))
    q_tile.store(high)
    q_high = q_tile
    if LOW:
        thread_barrier()
        q_high = q_tile.load(gl.DotOperandLayout(operand_index=0, parent=acc, k_width=2))
        thread_barrier()
        q_tile.store(low)
    return q_high, gl.convert_layout(scale, gl.SliceLayout(1, lanes))


@gluon.jit
def of_halves(q_high, q_low, d_high, d_low, layout: gl.constexpr):
    """The three products of `similarities`, in its order."""
    ROWS: gl.constexpr = q_low.shape[0]
    COLUMNS: gl.constexpr = d_high.shape[0]
    high = d_high.permute((1, 0))
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    sim = wgmma(q_high, d_low.permute((1, 0)), zeros, use_acc=False, is_async=True)
    sim = wgmma(q_low, high, sim, is_async=True)
    return wgmma(q_high, high, sim, is_async=True)


@gluon.jit
def store_halves(q_ptr, q_at, q_live, q_col, D, q_smem, by_row: gl.constexpr, acc: gl.constexpr):
    """Query rows as the halves that `q_smem` has room for; and scales of the columns of a product."""
    d = gl.arange(0, q_smem.shape[2], layout=gl.SliceLayout(0, by_row))
    high, low, scale = halves(_queries(q_ptr, q_at, q_live, d, q_col, D))
    q_smem.index(0).store(high)
    if q_smem.shape[0] == 2:
        q_smem.index(1).store(low)
    return gl.convert_layout(scale, gl.SliceLayout(0, acc))


@gluon.jit
def token_of(row):
    """The document token in a row of a product with `halves_in_registers`."""
    return (row & ~7) | ((row & 3) << 1) | ((row >> 2) & 1)


@gluon.jit
def halves_in_registers(raw, acc: gl.constexpr):
    """A tile of documents as halves in the registers that multiply it, and scales, in rows as in `token_of`."""
    COLUMNS: gl.constexpr = raw.shape[1]
    x = gl.reshape(raw.load(_by_token(COLUMNS)), [8, 4, 2, COLUMNS])
    high, low, scale = halves(gl.reshape(gl.permute(x, (0, 2, 1, 3)), [64, COLUMNS]))
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc, k_width=2)
    high = gl.convert_layout(high, operand, assert_trivial=True)
    low = gl.convert_layout(low, operand, assert_trivial=True)
    return high, low, gl.convert_layout(scale, gl.SliceLayout(1, acc), assert_trivial=True)


@gluon.jit
def of_registers(d_high, d_low, q_smem, layout: gl.constexpr):
    """The products of `similarities`, in its order, of halves of documents in registers with those of queries."""
    COLUMNS: gl.constexpr = q_smem.shape[1]
    high = q_smem.index(0).permute((1, 0))
    zeros = gl.zeros([64, COLUMNS], gl.float32, layout)
    if q_smem.shape[0] == 2:
        sim = wgmma(d_low, high, zeros, use_acc=False, is_async=True)
        sim = wgmma(d_high, q_smem.index(1).permute((1, 0)), sim, is_async=True)
        return wgmma(d_high, high, sim, is_async=True)
    else:
        return wgmma(d_high, high, zeros, use_acc=False, is_async=True)


@gluon.jit
def scaled(sim, scale):
    """Columns times their scales; −0 turns into 0, as in `similarities`."""
    return sim * scale.load(gl.SliceLayout(0, sim.type.layout))[None, :] + 0.0


@gluon.jit
def convert(
    step, row, tile, d_desc, raw, raw_full, d_high, d_low, d_scale, full, empty, MORE: gl.constexpr = True,
    column=None,
):  # fmt: skip
    """Converts the tile that was brought RAW steps ago, and if there are MORE brings another in its place, piece by
    piece. column: where the slice of wide tokens begins that the tile is of."""
    STAGES: gl.constexpr = d_high.shape[0]
    PIECE: gl.constexpr = raw.shape[1]
    PIECES: gl.constexpr = d_high.shape[1] // PIECE
    RAW: gl.constexpr = raw.shape[0] // PIECES
    before = step - RAW
    stage = before % STAGES
    for j in gl.static_range(PIECES):
        place = (step % RAW) * PIECES + j
        if before >= 0:
            mbarrier.wait(raw_full.index(place), (before // RAW) & 1)
            high, low, scale = halves(raw.index(place).load(LAYOUT))
            if column is not None:
                scale = bounded(scale)
            if j == 0:
                mbarrier.wait(empty.index(stage), ((before // STAGES) & 1) ^ 1)
            d_high.index(stage).slice(j * PIECE, PIECE, 0).store(high)
            if d_low is not None:
                d_low.index(stage).slice(j * PIECE, PIECE, 0).store(low)
            d_scale.index(stage).slice(j * PIECE, PIECE, 0).store(scale)
            fence_async_shared()
            thread_barrier()
            if j == PIECES - 1:
                mbarrier.arrive(full.index(stage), count=1)
        if MORE:
            mbarrier.expect(raw_full.index(place), d_desc.block_type.nbytes)
            at = 0 if column is None else column
            tma_load(d_desc, [row + j * PIECE, at], raw_full.index(place), raw.index(place))
