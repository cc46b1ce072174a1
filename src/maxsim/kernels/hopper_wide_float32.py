"""Hopper forward for wide float32 tokens: `hopper_wide` with float16 halves of slices, as `hopper_float32` makes them.

Owns: as there. A ring of STAGES holds a slice of both query tiles' halves, which one warp brings as
`_query_halves_kernel` has laid them out, and of the documents', which a warpgroup makes of float32 slices (RAW of them
on their way) with a scale a token. A slice's products are scaled and added up in registers, so a thread has two tiles,
and these are narrow: the tensor cores' own sums lose more the longer they are. Bound by shared memory.

Scores are those of `scores` bit for bit where they are not lost (`lost`), and those are scored again.
"""

from __future__ import annotations

from .gluon_names import gl, gluon, mbarrier
from .hopper_group import score_partition
from .hopper_halves import convert
from .hopper_maxima import ROWS
from .hopper_slices import bring_query_slices
from .hopper_stream import RUN_TIME, TABLES, each_tile


@gluon.jit
def _convert_slices(step, row, tile, slices, places):
    BLOCK_D: gl.constexpr = places[1].shape[2]
    for c in range(slices):
        convert(step * slices + c, row, tile, *places, column=c * BLOCK_D)


@gluon.jit
def _convert_partition(
    stream, streams, q_tiles, d_desc, starts, ends, d_bits, raw, raw_full, d_high, d_low, d_scale, full, empty, slices,
    ND, LD, TD, d_item, BY_TOKENS: gl.constexpr, BLOCK_LD: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    """A warpgroup: brings the slices of a stream's documents and converts them."""
    places = (d_desc, raw, raw_full, d_high, d_low, d_scale, full, empty)
    step = each_tile(
        stream, streams, q_tiles, starts, ends, d_bits, ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, 4,
        _convert_slices, (slices, places),
    )  # fmt: skip
    for i in range(RAW):
        convert(step * slices + i, 0, 0, *places, MORE=False, column=0)


@gluon.jit
def _load_partition(
    stream, streams, q_tiles, q_desc, starts, ends, d_bits, q_smem, full, empty, slices, tiles, ND, LD, TD, d_item,
    BY_TOKENS: gl.constexpr, BLOCK_LD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: brings the slices of query tiles."""
    each_tile(
        stream, streams, q_tiles, starts, ends, d_bits, ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, 1,
        bring_query_slices, (q_desc, q_smem, full, empty, slices, tiles, STAGES),
    )  # fmt: skip


@gluon.jit(do_not_specialize=RUN_TIME + ("slices", "first_tile", "tiles"), do_not_specialize_on_alignment=TABLES)
def _hopper_wide_float32_kernel(
    d_desc, q_desc, q_scale, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    q_tiles, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr,
    BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr, LOW: gl.constexpr,
    slices, first_tile, tiles,
):  # fmt: skip
    """q_desc, q_scale: of `_query_halves_kernel`."""
    HALVES: gl.constexpr = 2 if LOW else 1
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LD, BLOCK_D], gl.float16)
    q_smem = gl.allocate_shared_memory(gl.float16, [2 * STAGES * HALVES, ROWS, BLOCK_D], q_desc.layout)
    d_high = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_LD, BLOCK_D], d_layout)
    if LOW:
        d_low = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_LD, BLOCK_D], d_layout)
    else:
        d_low: gl.constexpr = None  # type: ignore[no-redef]
    d_scale = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_LD], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    PIECE: gl.constexpr = d_desc.block_type.shape[0]
    PIECES: gl.constexpr = RAW * (BLOCK_LD // PIECE)
    raw = gl.allocate_shared_memory(gl.float32, [PIECES, PIECE, BLOCK_D], d_desc.layout)
    raw_full = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PIECES):
        mbarrier.init(raw_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    stream = gl.program_id(0)
    streams = gl.num_programs(0)
    given = (
        streams, q_tiles, q_scale, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_high, d_low, d_scale,
        full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, d_item, winner_columns,
        None, slices, first_tile, tiles, None, None, None,
    )  # fmt: skip
    # registers: a multiprocessor has 512 for each thread of a warpgroup, and there are four
    gl.warp_specialize([
        (score_partition, (stream, given, q_col, 0, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES)),
        (score_partition, (stream, given, q_col, 1, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES)),
        (_convert_partition, (
            stream, streams, q_tiles, d_desc, starts, ends, d_bits, raw, raw_full, d_high, d_low, d_scale, full, empty,
            slices, ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, RAW)),
        (_load_partition, (
            stream, streams, q_tiles, q_desc, starts, ends, d_bits, q_smem, full, empty, slices, tiles,
            ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, STAGES)),
    ], [4, 4, 1], [200, 88, 24])  # fmt: skip
