"""Products of tokens too wide for shared memory to hold them whole: slices of BLOCK_D columns that follow one another
through a ring, and query rows laid out such that the copy engine finds their slices."""

from __future__ import annotations

from .gluon_names import gl, gluon, mbarrier, tma_load, wgmma, wgmma_wait
from .hopper_halves import inverse, of_halves, power, split
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
    q_smem, d_smem, full, empty, step, slices, live, GROUP: gl.constexpr, RESIDENT: gl.constexpr, acc: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The similarities of a tile, accumulated over the slices from `step` on in their order; zeros for a query tile
    that is not there (`live`), whose slices are passed over."""
    STAGES: gl.constexpr = d_smem.shape[0]
    BLOCK_LD: gl.constexpr = d_smem.shape[1]
    sim = gl.zeros([ROWS, BLOCK_LD], acc, layout)
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    if live:
        product = wgmma(
            q_smem.index(GROUP if RESIDENT else stage * 2 + GROUP), d_smem.index(stage).permute((1, 0)), sim,
            use_acc=False, is_async=True,
        )  # fmt: skip
        sim = wgmma_wait(1, deps=[product])
        for c in range(1, slices):
            before = stage
            stage = (step + c) % STAGES
            mbarrier.wait(full.index(stage), ((step + c) // STAGES) & 1)
            product = wgmma(
                q_smem.index((c if RESIDENT else stage) * 2 + GROUP), d_smem.index(stage).permute((1, 0)), sim,
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


@gluon.jit
def bring_query_slices(step, row, tile, q_desc, q_smem, full, empty, slices, tiles, STAGES: gl.constexpr):
    """Brings, for a tile of documents, two query tiles' halves by slices, if there are as many."""
    BLOCK_D: gl.constexpr = q_smem.shape[2]
    HALVES: gl.constexpr = q_smem.shape[0] // (2 * STAGES)
    q_row = tile.to(gl.int32) * (2 * ROWS)
    for c in range(slices):
        at = step * slices + c
        stage = at % STAGES
        mbarrier.wait(empty.index(stage), ((at // STAGES) & 1) ^ 1)
        if tile * 2 + 1 < tiles:
            mbarrier.expect(full.index(stage), 2 * HALVES * q_desc.block_type.nbytes)
            for h in gl.static_range(HALVES):
                column = (c * HALVES + h) * BLOCK_D
                tma_load(q_desc, [q_row + ROWS, column], full.index(stage), q_smem.index((stage * 2 + 1) * HALVES + h))
        else:
            mbarrier.expect(full.index(stage), HALVES * q_desc.block_type.nbytes)
        for h in gl.static_range(HALVES):
            column = (c * HALVES + h) * BLOCK_D
            tma_load(q_desc, [q_row, column], full.index(stage), q_smem.index(stage * 2 * HALVES + h))


@gluon.jit
def of_slices_of_halves(
    q_smem, d_high, d_low, d_scale, full, empty, step, slices, live,
    GROUP: gl.constexpr, WINNERS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """`of_slices` of float32 tokens: the products of a slice are scaled, and added up in registers, as in
    `similarities`."""
    STAGES: gl.constexpr = d_high.shape[0]
    BLOCK_LD: gl.constexpr = d_high.shape[1]
    HALVES: gl.constexpr = 1 if d_low is None else 2
    zeros = gl.zeros([ROWS, BLOCK_LD], gl.float32, layout)
    sim = zeros
    for c in range(slices if live else 0):
        stage = (step + c) % STAGES
        at = (stage * 2 + GROUP) * HALVES
        mbarrier.wait(full.index(stage), ((step + c) // STAGES) & 1)
        scale = d_scale.index(stage).load(gl.SliceLayout(0, layout))
        if d_low is not None:
            q_high = q_smem.index(at)
            if not WINNERS:  # which take the registers: shared memory is read less when two products find it there
                q_high = q_high.load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2))
            part = of_halves(q_high, q_smem.index(at + 1), d_high.index(stage), d_low.index(stage), layout)
        else:
            part = wgmma(q_smem.index(at), d_high.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        part = wgmma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        sim += part * scale[None, :]
    for c in range(0 if live else slices):
        stage = (step + c) % STAGES
        mbarrier.wait(full.index(stage), ((step + c) // STAGES) & 1)
        mbarrier.arrive(empty.index(stage), count=1)
    return sim


@gluon.jit(do_not_specialize=("first_tile", "NQ", "LQ", "TQ", "D", "parts", "block_log2", "q_item", "q_row", "slices"),
           do_not_specialize_on_alignment=("q_starts", "q_ends", "q_kept_rows", "q_kept"))  # fmt: skip
def _query_halves_kernel(
    q_ptr, tiles_ptr, scales_ptr, q_starts, q_ends, q_kept_rows, q_kept,
    first_tile, NQ, LQ, TQ, D, parts, block_log2, q_item, q_row, q_col,
    Q_CONSECUTIVE: gl.constexpr, BLOCK_D: gl.constexpr, HALVES: gl.constexpr, PIECE: gl.constexpr, slices,
):  # fmt: skip
    """`_query_tiles_kernel` of float32 queries: one program PIECE rows of a tile, of each slice the high halves and
    the low ones; and their scales."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = gl.program_id(1) * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(1, by_row))
    at, _, live = query_rows(
        row, first_tile + gl.program_id(0), parts, q_starts, q_ends, q_kept_rows, q_kept, NQ, LQ, TQ, q_item, q_row,
        block_log2, Q_CONSECUTIVE,
    )  # fmt: skip
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, by_row))
    largest = gl.zeros([PIECE], gl.float32, gl.SliceLayout(1, by_row))
    for c in range(slices):
        column = c * BLOCK_D + d
        q = gl.load(
            q_ptr + at[:, None] + (column.to(gl.int64) * q_col)[None, :],
            mask=live[:, None] & (column < D)[None, :], other=0.0,
        )  # fmt: skip
        largest = gl.maximum(largest, gl.max(gl.abs(q), 1))
    factor = power(largest)
    slot = (gl.program_id(0) * ROWS + row).to(gl.int64)
    gl.store(scales_ptr + slot, inverse(factor))
    to = tiles_ptr + (slot * (slices * HALVES * BLOCK_D))[:, None] + d[None, :]
    for c in range(slices):
        column = c * BLOCK_D + d
        q = gl.load(
            q_ptr + at[:, None] + (column.to(gl.int64) * q_col)[None, :],
            mask=live[:, None] & (column < D)[None, :], other=0.0,
        )  # fmt: skip
        high, low = split(q, factor)
        gl.store(to + c * (HALVES * BLOCK_D), high)
        if HALVES == 2:
            gl.store(to + c * (HALVES * BLOCK_D) + BLOCK_D, low)
