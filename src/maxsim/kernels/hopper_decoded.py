"""Hopper forward for documents of codes that are no numbers: `hopper_few` and `hopper_scores`, with a warpgroup that
decodes in place of the warp that loads.

Owns: as there; besides, tiles of codes on their way (TMA, RAW of them), and the numbers that rows have beside them. A
tile is decoded once for all query rows that a program has. Bound by the table's rows, which come from L2.
"""

from __future__ import annotations

from torch import Tensor

from .gluon_names import TensorDescriptor, gl, gluon, mbarrier
from .hopper_decoding import RAW, decode_partition
from .hopper_few import few_partition
from .hopper_group import score_partition
from .hopper_maxima import ROWS
from .hopper_stream import RUN_TIME, TABLES
from .sides import Side


@gluon.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=(*TABLES, "weights"))
def _hopper_few_decoded_kernel(
    c_desc, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    NQ, ND, LQ, LD, TQ, TD, D, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, Q_ALIGNED: gl.constexpr, BY_TOKENS: gl.constexpr,
    BLOCK_LQ: gl.constexpr, BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, K,
    REGISTERS: gl.constexpr,
    i_desc, v_desc, table, weights, EVEN_D: gl.constexpr,
):  # fmt: skip
    q_type: gl.constexpr = q_ptr.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LQ, BLOCK_D], q_type)
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LD, BLOCK_D], q_type)
    q_smem = gl.allocate_shared_memory(q_type, [1, BLOCK_LQ, BLOCK_D], q_layout)
    d_smem = gl.allocate_shared_memory(q_type, [STAGES, BLOCK_LD, BLOCK_D], d_layout)
    raw = gl.allocate_shared_memory(c_desc.dtype, [RAW] + c_desc.block_type.shape, c_desc.layout)
    ids = gl.allocate_shared_memory(i_desc.dtype, [RAW, BLOCK_LD], i_desc.layout)
    if v_desc is not None:
        inverses = gl.allocate_shared_memory(v_desc.dtype, [RAW, BLOCK_LD], v_desc.layout)
    else:
        inverses: gl.constexpr = None  # type: ignore[no-redef]
    raw_full = gl.allocate_shared_memory(gl.int64, [RAW, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RAW):
        mbarrier.init(raw_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    stream = gl.program_id(0)
    streams = gl.num_programs(0)
    given = (
        streams, q_ptr, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, full, empty,
        NQ, ND, LQ, LD, TQ, TD, D, block_log2, q_item, q_row, d_item, winner_columns, K,
        None, None, None, None,
    )  # fmt: skip
    gl.warp_specialize([
        (few_partition, (
            stream, given, q_col, 0, Q_CONSECUTIVE, Q_ALIGNED, BY_TOKENS, BLOCK_LQ, BLOCK_LD, STAGES, True)),
        (decode_partition, (
            stream, streams, 1, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, starts, ends, d_bits, d_smem,
            full, empty, table, weights, ND, LD, TD, D, d_item, BY_TOKENS, BLOCK_LD, K, EVEN_D,
            1, 0, 0, 0, STAGES)),
    ], [4], [REGISTERS])  # fmt: skip


@gluon.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=(*TABLES, "weights"))
def _hopper_decoded_kernel(
    c_desc, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    q_tiles, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr,
    BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, Q_ALIGNED: gl.constexpr,
    K, i_desc, v_desc, table, weights, EVEN_D: gl.constexpr,
):  # fmt: skip
    """As `_hopper_scores_kernel`. Paired warpgroups have one ring, which two decoders fill in turn."""
    RINGS: gl.constexpr = 1 if PAIRED else 2
    Q_TILES: gl.constexpr = 1 if not PAIRED and K is None else 2
    q_type: gl.constexpr = q_ptr.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], q_type)
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LD, BLOCK_D], q_type)
    q_smem = gl.allocate_shared_memory(q_type, [Q_TILES, ROWS, BLOCK_D], q_layout)
    d_smem = gl.allocate_shared_memory(q_type, [RINGS * STAGES, BLOCK_LD, BLOCK_D], d_layout)
    raw = gl.allocate_shared_memory(c_desc.dtype, [2 * RAW] + c_desc.block_type.shape, c_desc.layout)
    ids = gl.allocate_shared_memory(i_desc.dtype, [2 * RAW, BLOCK_LD], i_desc.layout)
    if v_desc is not None:
        inverses = gl.allocate_shared_memory(v_desc.dtype, [2 * RAW, BLOCK_LD], v_desc.layout)
    else:
        inverses: gl.constexpr = None  # type: ignore[no-redef]
    raw_full = gl.allocate_shared_memory(gl.int64, [2 * RAW, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [RINGS * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RINGS * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * RAW):
        mbarrier.init(raw_full.index(i), count=1)
    for i in gl.static_range(RINGS * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3 - RINGS)
    stream = gl.program_id(0) * RINGS
    other = stream + RINGS - 1
    streams = gl.num_programs(0) * RINGS
    given = (
        streams, q_tiles, q_ptr, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, None, None,
        full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, d_item, winner_columns,
        K, None, None, None, None, None, None,
    )  # fmt: skip
    # registers: a multiprocessor has 512 for each thread of a warpgroup, and there are four
    gl.warp_specialize([
        (score_partition, (
            stream, given, q_col, 0, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES, SPLIT, Q_ALIGNED,
            0, True)),
        (score_partition, (
            other, given, q_col, 1, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES, SPLIT, Q_ALIGNED,
            0, True)),
        (decode_partition, (
            stream, streams, q_tiles, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, starts, ends, d_bits,
            d_smem, full, empty, table, weights, ND, LD, TD, D, d_item, BY_TOKENS, BLOCK_LD, K, EVEN_D,
            3 - RINGS, 0, 0, 0, STAGES, SPLIT)),
        (decode_partition, (
            other, streams, q_tiles, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, starts, ends, d_bits,
            d_smem, full, empty, table, weights, ND, LD, TD, D, d_item, BY_TOKENS, BLOCK_LD, K, EVEN_D,
            3 - RINGS, 2 - RINGS, 1, (RINGS - 1) * STAGES, STAGES, SPLIT)),
    ], [4, 4, 4], [200, 56, 56])  # fmt: skip


def decoded_tiles(d: Side, rows: int, box: list[int]) -> tuple[TensorDescriptor | Tensor | bool | None, ...]:
    """Codes, and then what comes last of a kernel's arguments: what rows have beside them, as the copy engine brings
    both, what they are decoded by, and whether the tiles, of `box` rows and columns, are as wide as the tokens."""
    of = d.decoder
    assert of is not None
    columns = box[1] * of.codec // 8
    layout = gl.NVMMASharedLayout.get_default_for([box[0], columns], gl.uint8)
    codes = TensorDescriptor(d.data, [rows, d.data.shape[-1]], [d.row, 1], [box[0], columns], layout)
    ids, inverses = (
        None if each is None else TensorDescriptor(
            each, [rows], [1], box[:1], gl.NVMMASharedLayout.get_default_for(box[:1], dtype)
        )
        for each, dtype in ((of.ids, gl.int32), (of.inverses, gl.float32))
    )  # fmt: skip
    return codes, ids, inverses, of.table, of.weights, of.table.shape[1] == box[1]
