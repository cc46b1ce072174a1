"""Hopper forward for wide tokens: `hopper_scores` where query rows and tiles of documents do not fit shared memory.

Owns: as there. A tile of similarities is accumulated over slices of BLOCK_D columns, of which a ring of STAGES holds
both query tiles' and the documents'; RESIDENT: the documents' alone, while the query rows stay.
"""

from __future__ import annotations

from .gluon_names import gl, gluon, mbarrier
from .hopper_group import score_partition
from .hopper_maxima import ROWS
from .hopper_slices import bring_slices
from .hopper_stream import RUN_TIME, TABLES, each_tile


@gluon.jit
def _load_partition(
    stream, streams, q_tiles, d_desc, q, starts, ends, d_bits, d_smem, q_smem, full, empty, slices, tiles,
    ND, LD, TD, d_item,
    BY_TOKENS: gl.constexpr, BLOCK_LD: gl.constexpr, RESIDENT: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """One warp: brings the tiles of a stream."""
    each_tile(
        stream, streams, q_tiles, starts, ends, d_bits, ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, 1,
        bring_slices, (d_desc, q, d_smem, q_smem, full, empty, slices, tiles, RESIDENT), SPLIT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=RUN_TIME + ("slices", "first_tile", "tiles"), do_not_specialize_on_alignment=TABLES)
def _hopper_wide_kernel(
    d_desc, q, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    q_tiles, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr,
    BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, Q_ALIGNED: gl.constexpr,
    RESIDENT: gl.constexpr, slices, first_tile, tiles, q_scales, scales,
):  # fmt: skip
    """q: the queries where they are RESIDENT slices in shared memory, else a descriptor of their tiles
    (`_query_tiles_kernel`)."""
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], d_desc.dtype)
    Q_SLICES: gl.constexpr = RESIDENT if RESIDENT else STAGES
    q_smem = gl.allocate_shared_memory(d_desc.dtype, [2 * Q_SLICES, ROWS, BLOCK_D], q_layout)
    d_smem = gl.allocate_shared_memory(d_desc.dtype, [STAGES, BLOCK_LD, BLOCK_D], d_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    stream = gl.program_id(0)
    streams = gl.num_programs(0)
    given = (
        streams, q_tiles, q, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, None, None,
        full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, d_item, winner_columns,
        None, slices, first_tile, tiles, q_scales, scales, None,
    )  # fmt: skip
    gl.warp_specialize([
        (score_partition, (
            stream, given, q_col, 0, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES, SPLIT, Q_ALIGNED,
            RESIDENT)),
        (score_partition, (
            stream, given, q_col, 1, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES, SPLIT, Q_ALIGNED,
            RESIDENT)),
        (_load_partition, (
            stream, streams, q_tiles, d_desc, q, starts, ends, d_bits, d_smem, q_smem, full, empty, slices, tiles,
            ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, RESIDENT, SPLIT)),
    ], [4, 1], [232, 40])  # fmt: skip
