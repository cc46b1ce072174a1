"""Hopper forward for many query rows: documents flow past the tensor cores as one stream of tokens.

Owns: a program keeps query rows in shared memory and is given a run of documents (`hopper_stream`). One warp brings
tiles of BLOCK_LD document tokens (TMA, a ring of STAGES); two warpgroups multiply, each 128 query rows. PAIRED: both
take the same tiles, for different rows; else they are two streams, for the same rows. While one takes maxima the other
multiplies. Reads every document token once for 256 (128) query rows; writes one number a query and document, and where
asked a winner and a maximum a query token. Bound by the tensor cores.

What a warpgroup does is `hopper_group`.

Exactness: as in `scores`: a similarity is accumulated over D in one order, in steps of 16; the sum over query tokens is
the same tree of adjacent pairs. Query tokens are laid in the tile such that each thread has four that follow one
another, and each warp 32.
"""

from __future__ import annotations

from .gluon_names import gl, gluon, mbarrier
from .hopper_group import score_partition
from .hopper_load import begin, load_partition
from .hopper_maxima import ROWS
from .hopper_stream import RUN_TIME, TABLES


@gluon.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=TABLES)
def _hopper_scores_kernel(
    d_desc, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    q_tiles, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr,
    BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, Q_ALIGNED: gl.constexpr,
    K, q_scales, scales, f_desc,
):  # fmt: skip
    """K: None, or each query has as many documents of its own and `q_tiles`; not paired, the two streams are then at
    different queries."""
    RINGS: gl.constexpr = 1 if PAIRED else 2
    Q_TILES: gl.constexpr = 1 if not PAIRED and K is None else 2
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], d_desc.dtype)
    q_smem = gl.allocate_shared_memory(d_desc.dtype, [Q_TILES, ROWS, BLOCK_D], q_layout)
    d_smem = gl.allocate_shared_memory(d_desc.dtype, [RINGS * STAGES, BLOCK_LD, BLOCK_D], d_desc.layout)
    if f_desc is not None:
        f_smem = gl.allocate_shared_memory(f_desc.dtype, [RINGS * STAGES, BLOCK_LD], f_desc.layout)
    else:
        f_smem: gl.constexpr = None  # type: ignore[no-redef]
    full = gl.allocate_shared_memory(gl.int64, [RINGS * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RINGS * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RINGS * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3 - RINGS)
    stream = gl.program_id(0) * RINGS
    other = stream + RINGS - 1
    streams = gl.num_programs(0) * RINGS
    if not PAIRED:  # else the loop of products was compiled to more: 128x32 vs 1000x300 took 1.4 % longer
        begin(stream, streams, d_desc, d_smem, f_desc, f_smem, full, starts, d_bits, ND, TD, d_item)
        begin(other, streams, d_desc, d_smem, f_desc, f_smem, full, starts, d_bits, ND, TD, d_item, STAGES)
    given = (
        streams, q_tiles, q_ptr, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, None, None,
        full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, d_item, winner_columns,
        K, None, None, None, q_scales, scales, f_smem,
    )  # fmt: skip
    tiles = (streams, q_tiles, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item, K, f_desc, f_smem)
    # registers: a multiprocessor has 512 for each thread of a warpgroup, and there are three
    gl.warp_specialize([
        (score_partition, (
            stream, given, q_col, 0, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES, SPLIT, Q_ALIGNED)),
        (score_partition, (
            other, given, q_col, 1, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES, SPLIT, Q_ALIGNED)),
        (load_partition, (stream, tiles, 0, BY_TOKENS, PAIRED, BLOCK_LD, STAGES, SPLIT, not PAIRED)),
        (load_partition, (other, tiles, 1, BY_TOKENS, PAIRED, BLOCK_LD, STAGES, SPLIT, not PAIRED)),
    ], [4, 1, 1], [232, 40, 40])  # fmt: skip
