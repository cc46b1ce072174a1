"""Hopper forward for float32 tokens: `hopper_scores` with float16 halves of them, and scales.

Owns: as there. In place of the warp that loads stands a warpgroup that brings float32 tiles (TMA, RAW of them on their
way, in pieces of which each makes room for the next tile's) and puts their halves into the ring. Of three products of
halves (LOW) two take the high halves of the queries from registers, so that shared memory is read for the documents
alone. Unpaired there is one query tile, and one warpgroup multiplies. Bound by the conversion, which shares the shared
memory with the products; for one query tile by the bytes of the documents.

Scores are those of `scores` bit for bit where they are not lost (`lost`), and those are scored again.
"""

from __future__ import annotations

from .gluon_names import gl, gluon, mbarrier
from .hopper_group import score_partition
from .hopper_halves import convert
from .hopper_maxima import ROWS
from .hopper_stream import RUN_TIME, TABLES, each_tile


@gluon.jit
def _convert_partition(
    stream, streams, q_tiles, d_desc, starts, ends, d_bits, raw, raw_full, d_high, d_low, d_scale, full, empty,
    ND, LD, TD, d_item, BY_TOKENS: gl.constexpr, BLOCK_LD: gl.constexpr, RAW: gl.constexpr, K,
):  # fmt: skip
    """A warpgroup: brings the tiles of a stream and converts them."""
    places = (d_desc, raw, raw_full, d_high, d_low, d_scale, full, empty)
    step = each_tile(
        stream, streams, q_tiles, starts, ends, d_bits, ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, 4,
        convert, places, K=K,
    )  # fmt: skip
    for i in range(RAW):
        convert(step + i, 0, 0, *places, MORE=False)


@gluon.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=TABLES)
def _hopper_float32_kernel(
    d_desc, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    q_tiles, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr,
    BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr, LOW: gl.constexpr,
    K,
):  # fmt: skip
    TILES: gl.constexpr = 2 if PAIRED else 1
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], gl.float16)
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LD, BLOCK_D], gl.float16)
    q_smem = gl.allocate_shared_memory(gl.float16, [TILES, ROWS, BLOCK_D], q_layout)
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
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=TILES)
    # registers: a multiprocessor has 504 for each thread of a warpgroup, and there are three
    CONVERTER: gl.constexpr = 104 if PIECE == 64 else 88
    stream = gl.program_id(0)
    streams = gl.num_programs(0)
    given = (
        streams, q_tiles, q_ptr, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_high, d_low, d_scale,
        full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, d_item, winner_columns,
        K, None, None, None, None, None, None,
    )  # fmt: skip
    gl.warp_specialize([
        (score_partition, (stream, given, q_col, 0, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES)),
        (score_partition, (stream, given, q_col, 1, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES)),
        (_convert_partition, (
            stream, streams, q_tiles, d_desc, starts, ends, d_bits, raw, raw_full, d_high, d_low, d_scale, full, empty,
            ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, RAW, K)),
    ], [4, 4], [252 - CONVERTER // 2, CONVERTER])  # fmt: skip
