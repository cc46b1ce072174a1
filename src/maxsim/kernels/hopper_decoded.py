"""Hopper forward for documents of codes that are no numbers: `hopper_few` and `hopper_scores`, with a warpgroup that
decodes in place of the warp that loads.

Owns: as there; besides, tiles of codes on their way (TMA, RAW of them), and the numbers that rows have beside them. A
tile is decoded once for all query rows that a program has. Bound by the table's rows, which come from L2.
"""

from __future__ import annotations

from .gluon_names import TensorDescriptor, gl, gluon, mbarrier
from .hopper_decoding import RAW, decode_partition
from .hopper_few import _few_partition
from .hopper_scores import RUN_TIME, TABLES
from .sides import Side

DECODER = ("weights",)


@gluon.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=(*TABLES, *DECODER))
def _hopper_few_decoded_kernel(
    c_desc, i_desc, v_desc, table, weights, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    NQ, ND, LQ, LD, TQ, TD, D, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, Q_ALIGNED: gl.constexpr, BY_TOKENS: gl.constexpr,
    BLOCK_LQ: gl.constexpr, BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, K,
    EVEN_D: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    q_type: gl.constexpr = q_ptr.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LQ, BLOCK_D], q_type)
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LD, BLOCK_D], q_type)
    q_smem = gl.allocate_shared_memory(q_type, [1, BLOCK_LQ, BLOCK_D], q_layout)
    d_smem = gl.allocate_shared_memory(q_type, [STAGES, BLOCK_LD, BLOCK_D], d_layout)
    raw = gl.allocate_shared_memory(c_desc.dtype, [TURNS * RAW] + c_desc.block_type.shape, c_desc.layout)
    ids = gl.allocate_shared_memory(i_desc.dtype, [TURNS * RAW, BLOCK_LD], i_desc.layout)
    if v_desc is not None:
        inverses = gl.allocate_shared_memory(v_desc.dtype, [TURNS * RAW, BLOCK_LD], v_desc.layout)
    else:
        inverses: gl.constexpr = None  # type: ignore[no-redef]
    raw_full = gl.allocate_shared_memory(gl.int64, [TURNS * RAW, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TURNS * RAW):
        mbarrier.init(raw_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    stream = gl.program_id(0)
    streams = gl.num_programs(0)
    gl.warp_specialize([
        (_few_partition, (
            stream, streams, q_ptr, out_ptr, winners_ptr, maxima_ptr,
            q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, full, empty,
            NQ, ND, LQ, LD, TQ, TD, D, block_log2, q_item, q_row, q_col, d_item, winner_columns,
            Q_CONSECUTIVE, Q_ALIGNED, BY_TOKENS, BLOCK_LQ, BLOCK_LD, BLOCK_D, STAGES, K, None, None, None, True)),
        (decode_partition, (
            stream, streams, 1, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, starts, ends, d_bits, d_smem,
            full, empty, table, weights, ND, LD, TD, D, d_item, BY_TOKENS, BLOCK_LD, K, EVEN_D, TURNS, 0)),
        (decode_partition, (
            stream, streams, 1, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, starts, ends, d_bits, d_smem,
            full, empty, table, weights, ND, LD, TD, D, d_item, BY_TOKENS, BLOCK_LD, K, EVEN_D, TURNS, 1)),
        (decode_partition, (
            stream, streams, 1, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, starts, ends, d_bits, d_smem,
            full, empty, table, weights, ND, LD, TD, D, d_item, BY_TOKENS, BLOCK_LD, K, EVEN_D, TURNS, 2)),
    ], [4] * TURNS, [REGISTERS] * TURNS)  # fmt: skip


def descriptors(d: Side, rows: int, box: list[int]) -> tuple[TensorDescriptor | None, ...]:
    """Codes, and what their rows have beside them, as the copy engine brings them: tiles of `box`, rows and columns of
    what is decoded."""
    of = d.decoder
    assert of is not None
    count, columns = d.data.shape[-1], box[1] * of.codec // 8
    layout = gl.NVMMASharedLayout.get_default_for([box[0], columns], gl.uint8)
    codes = TensorDescriptor(d.data, [rows, count], [d.row, 1], [box[0], columns], layout)
    beside = []
    for each, dtype in ((of.ids, gl.int32), (of.inverses, gl.float32)):
        layout = gl.NVMMASharedLayout.get_default_for([box[0]], dtype)
        beside.append(None if each is None else TensorDescriptor(each, [rows], [1], [box[0]], layout))
    return codes, *beside
