"""float32 tokens as float16 halves in shared memory, where a Hopper warpgroup multiplies them."""

from __future__ import annotations

from . import arithmetic
from .gluon_names import fence_async_shared, gl, gluon, mbarrier, thread_barrier, tma_load, wgmma

halves = gluon.jit(arithmetic.halves.fn)

# Eight threads read, and write, 16 bytes of as many rows, which lie in different banks.
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [0, 1]))


@gluon.jit
def keep_halves(
    q_ptr, q_at, q_live, q_col, D, q_tile, LOW: gl.constexpr, by_row: gl.constexpr, acc: gl.constexpr,
    lanes: gl.constexpr,
):  # fmt: skip
    """Query rows as halves: the high ones in `q_tile`, or with LOW in registers and the low ones there; and scales."""
    d = gl.arange(0, q_tile.shape[1], layout=gl.SliceLayout(0, by_row))
    q = gl.load(
        q_ptr + q_at[:, None] + (d.to(gl.int64) * q_col)[None, :], mask=q_live[:, None] & (d < D)[None, :], other=0.0
    )
    high, low, scale = halves(q)
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
def scaled(sim, scale):
    """Columns times their scales; −0 turns into 0, as in `similarities`."""
    return sim * scale.load(gl.SliceLayout(0, sim.type.layout))[None, :] + 0.0


@gluon.jit
def convert(step, row, d_desc, raw, raw_full, d_high, d_low, d_scale, full, empty, MORE: gl.constexpr = True):
    """Converts the tile that was brought RAW steps ago, and if there are MORE brings another in its place, piece by
    piece."""
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
            tma_load(d_desc, [row + j * PIECE, 0], raw_full.index(place), raw.index(place))
