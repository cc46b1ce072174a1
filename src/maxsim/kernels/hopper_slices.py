"""Products of tokens too wide for shared memory to hold them whole: slices of BLOCK_D columns that follow one another
through a ring, and query rows laid out such that the copy engine finds their slices."""

from __future__ import annotations

from .gluon_names import gl, gluon, mbarrier, tma_load, wgmma, wgmma_wait
from .hopper_maxima import ROWS
from .hopper_tile import query_rows


@gluon.jit
def bring_slices(
    step, row, tile, d_desc, q_desc, d_smem, q_smem, full, empty, slices, tiles, RESIDENT: gl.constexpr
):  # fmt: skip
    """Brings a tile of documents by slices; unless they are RESIDENT, with each that of two query tiles, if there are
    as many."""
    STAGES: gl.constexpr = d_smem.shape[0]
    BLOCK_D: gl.constexpr = d_smem.shape[2]
    for c in range(slices):
        at = step * slices + c
        stage = at % STAGES
        mbarrier.wait(empty.index(stage), ((at // STAGES) & 1) ^ 1)
        if RESIDENT:
            mbarrier.expect(full.index(stage), d_desc.block_type.nbytes)
        else:
            q_row = tile.to(gl.int32) * (2 * ROWS)
            if tile * 2 + 1 < tiles:
                mbarrier.expect(full.index(stage), d_desc.block_type.nbytes + 2 * q_desc.block_type.nbytes)
                tma_load(q_desc, [q_row + ROWS, c * BLOCK_D], full.index(stage), q_smem.index(stage * 2 + 1))
            else:
                mbarrier.expect(full.index(stage), d_desc.block_type.nbytes + q_desc.block_type.nbytes)
            tma_load(q_desc, [q_row, c * BLOCK_D], full.index(stage), q_smem.index(stage * 2))
        tma_load(d_desc, [row, c * BLOCK_D], full.index(stage), d_smem.index(stage))


@gluon.jit
def of_slices(
    q_smem, d_smem, full, empty, step, slices, live, HALF: gl.constexpr, RESIDENT: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The similarities of a tile, accumulated over the slices from `step` on in their order; zeros for a query tile
    that is not there (`live`), whose slices are passed over."""
    STAGES: gl.constexpr = d_smem.shape[0]
    BLOCK_LD: gl.constexpr = d_smem.shape[1]
    sim = gl.zeros([ROWS, BLOCK_LD], gl.float32, layout)
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    if live:
        product = wgmma(
            q_smem.index(HALF if RESIDENT else stage * 2 + HALF), d_smem.index(stage).permute((1, 0)), sim,
            use_acc=False, is_async=True,
        )  # fmt: skip
        sim = wgmma_wait(1, deps=[product])
        for c in range(1, slices):
            before = stage
            stage = (step + c) % STAGES
            mbarrier.wait(full.index(stage), ((step + c) // STAGES) & 1)
            product = wgmma(
                q_smem.index((c if RESIDENT else stage) * 2 + HALF), d_smem.index(stage).permute((1, 0)), sim,
                is_async=True,
            )  # fmt: skip
            sim = wgmma_wait(1, deps=[product])
            mbarrier.arrive(empty.index(before), count=1)
        sim = wgmma_wait(0, deps=[sim])
    else:
        for c in range(1, slices):
            mbarrier.arrive(empty.index(stage), count=1)
            stage = (step + c) % STAGES
            mbarrier.wait(full.index(stage), ((step + c) // STAGES) & 1)
    mbarrier.arrive(empty.index(stage), count=1)
    return sim


@gluon.jit(do_not_specialize=("first_tile", "NQ", "LQ", "TQ", "D", "parts", "block_log2", "q_item", "q_row"),
           do_not_specialize_on_alignment=("q_starts", "q_ends", "q_kept_rows", "q_kept"))  # fmt: skip
def _query_tiles_kernel(
    q_ptr, tiles_ptr, q_starts, q_ends, q_kept_rows, q_kept,
    first_tile, NQ, LQ, TQ, D, parts, block_log2, q_item, q_row, q_col,
    Q_CONSECUTIVE: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """One program a slice of a query tile: copies its rows as they stand in the accumulator, zeros where none is."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_row))
    at, _, live = query_rows(
        row, first_tile + gl.program_id(0), parts, q_starts, q_ends, q_kept_rows, q_kept, NQ, LQ, TQ, q_item, q_row,
        block_log2, Q_CONSECUTIVE,
    )  # fmt: skip
    d = gl.program_id(1) * BLOCK_D + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, by_row))
    q = gl.load(
        q_ptr + at[:, None] + (d.to(gl.int64) * q_col)[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
    )
    to = (gl.program_id(0) * ROWS + row).to(gl.int64) * (gl.num_programs(1) * BLOCK_D)
    gl.store(tiles_ptr + to[:, None] + d[None, :], q)
