"""Hopper forward for few query rows and `pq` documents of 16 codewords of eight dimensions: bound by the reading of
codewords in shared memory.

Owns: a program keeps the codewords and, of GROUPS warpgroups, each has the query rows and a run of documents of its own
(`hopper_few`), whose codes a warp of its own brings. Codewords go from shared memory into the registers that multiply
them (`hopper_codewords`), and the tensor cores take those as they take plain documents: so scores have the bits of the
documents as decoded.
"""

from __future__ import annotations

import torch

from .configs import FewConfig, HopperConfig, power_of_two
from .gluon_names import TensorDescriptor, fence_async_shared, gl, gluon, mbarrier, thread_barrier, tma_load
from .hopper_codewords import WIDTH, WORDS, gathered, keep_table
from .hopper_few import few_partition
from .hopper_group import score_partition
from .hopper_launch import documents_from, rows_from
from .hopper_load import load_partition
from .hopper_maxima import ROWS
from .hopper_stream import RUN_TIME, TABLES, each_tile
from .queries import kept_rows, sum_parts, tiled
from .scores_launch import PARTS_BYTES, Outputs
from .sides import Side
from .spans import places

GROUPS = gl.constexpr(4)  # the registers of a multiprocessor
PIECE = gl.constexpr(32)  # rows that are decoded at once


@gluon.jit(do_not_specialize=(*RUN_TIME, "words"), do_not_specialize_on_alignment=TABLES)
def _hopper_product_kernel(
    d_desc, table_ptr, words, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    NQ, ND, LQ, LD, TQ, TD, D, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, Q_ALIGNED: gl.constexpr, BY_TOKENS: gl.constexpr,
    BLOCK_LQ: gl.constexpr, BLOCK_LD: gl.constexpr, STAGES: gl.constexpr, K,
):  # fmt: skip
    q_type: gl.constexpr = q_ptr.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LQ, WIDTH], q_type)
    q_smem = gl.allocate_shared_memory(q_type, [GROUPS, BLOCK_LQ, WIDTH], q_layout)
    d_smem = gl.allocate_shared_memory(gl.int32, [GROUPS * STAGES, BLOCK_LD, 4], d_desc.layout)
    table = gl.allocate_shared_memory(q_type, [WORDS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [GROUPS * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [GROUPS * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    where = keep_table(table_ptr, words, table, True)
    thread_barrier()
    stream = gl.program_id(0) * GROUPS
    streams = gl.num_programs(0) * GROUPS
    given = (
        streams, q_ptr, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, full, empty,
        NQ, ND, LQ, LD, TQ, TD, D, block_log2, q_item, q_row, d_item, winner_columns, K,
        None, None, None, where,
    )  # fmt: skip
    tiles = (streams, 1, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item, K, None, None)
    gl.warp_specialize([
        (few_partition, (stream, given, q_col, 0, Q_CONSECUTIVE, Q_ALIGNED, BY_TOKENS, BLOCK_LQ, BLOCK_LD, STAGES)),
        (few_partition, (stream + 1, given, q_col, 1, Q_CONSECUTIVE, Q_ALIGNED, BY_TOKENS, BLOCK_LQ, BLOCK_LD, STAGES)),
        (few_partition, (stream + 2, given, q_col, 2, Q_CONSECUTIVE, Q_ALIGNED, BY_TOKENS, BLOCK_LQ, BLOCK_LD, STAGES)),
        (few_partition, (stream + 3, given, q_col, 3, Q_CONSECUTIVE, Q_ALIGNED, BY_TOKENS, BLOCK_LQ, BLOCK_LD, STAGES)),
        (load_partition, (stream, tiles, 0, BY_TOKENS, False, BLOCK_LD, STAGES)),
        (load_partition, (stream + 1, tiles, 1, BY_TOKENS, False, BLOCK_LD, STAGES)),
        (load_partition, (stream + 2, tiles, 2, BY_TOKENS, False, BLOCK_LD, STAGES)),
        (load_partition, (stream + 3, tiles, 3, BY_TOKENS, False, BLOCK_LD, STAGES)),
    ], [4, 4, 4, 1, 1, 1, 1], [112, 112, 112, 40, 40, 40, 40])  # fmt: skip
    table._keep_alive()


@gluon.jit
def _decode(
    step, row, tile, d_desc, raw, raw_full, d_smem, full, empty, where, MORE: gl.constexpr = True
):  # fmt: skip
    """Decodes the tile of codes that was asked for RAW steps ago, and if there are MORE asks for another."""
    RAW: gl.constexpr = raw.shape[0]
    STAGES: gl.constexpr = d_smem.shape[0]
    PIECES: gl.constexpr = raw.shape[1] // PIECE
    before = step - RAW
    stage = before % STAGES
    place = step % RAW
    if before >= 0:
        mbarrier.wait(raw_full.index(place), (before // RAW) & 1)
        mbarrier.wait(empty.index(stage), ((before // STAGES) & 1) ^ 1)
        for j in gl.static_range(PIECES):
            tokens = gathered(raw.index(place).slice(j * PIECE, PIECE, 0), where, d_smem.dtype)
            d_smem.index(stage).slice(j * PIECE, PIECE, 0).store(tokens)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
    if MORE:
        mbarrier.expect(raw_full.index(place), d_desc.block_type.nbytes)
        tma_load(d_desc, [row, 0], raw_full.index(place), raw.index(place))


@gluon.jit
def _decode_partition(
    stream, streams, q_tiles, d_desc, starts, ends, d_bits, raw, raw_full, d_smem, full, empty, where, ND, LD, TD,
    d_item, BY_TOKENS: gl.constexpr, BLOCK_LD: gl.constexpr,
):  # fmt: skip
    """A warpgroup: brings the tiles of a stream and puts what they stand for into its ring."""
    places = (d_desc, raw, raw_full, d_smem, full, empty, where)
    step = each_tile(
        stream, streams, q_tiles, starts, ends, d_bits, ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, 4, _decode, places
    )
    for i in range(raw.shape[0]):
        _decode(step + i, 0, 0, *places, MORE=False)


@gluon.jit(do_not_specialize=(*RUN_TIME, "words"), do_not_specialize_on_alignment=TABLES)
def _hopper_product_scores_kernel(
    d_desc, table_ptr, words, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    q_tiles, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, Q_ALIGNED: gl.constexpr,
    BLOCK_LD: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    """For many query rows: `hopper_scores` with a warpgroup that decodes in place of the warp that loads."""
    q_type: gl.constexpr = q_ptr.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], q_type)
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LD, WIDTH], q_type)
    q_smem = gl.allocate_shared_memory(q_type, [2, ROWS, WIDTH], q_layout)
    d_smem = gl.allocate_shared_memory(q_type, [STAGES, BLOCK_LD, WIDTH], d_layout)
    raw = gl.allocate_shared_memory(gl.uint8, [RAW, BLOCK_LD, 16], d_desc.layout)
    table = gl.allocate_shared_memory(q_type, [WORDS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    raw_full = gl.allocate_shared_memory(gl.int64, [RAW, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RAW):
        mbarrier.init(raw_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    where = keep_table(table_ptr, words, table, False)
    thread_barrier()
    stream = gl.program_id(0)
    streams = gl.num_programs(0)
    given = (
        streams, q_tiles, q_ptr, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, None, None,
        full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, d_item, winner_columns,
        None, None, None, None, None, None, None,
    )  # fmt: skip
    # registers: a multiprocessor has 512 for each thread of a warpgroup, and there are three
    gl.warp_specialize([
        (score_partition, (
            stream, given, q_col, 0, Q_CONSECUTIVE, BY_TOKENS, True, BLOCK_LD, WIDTH, STAGES, False, Q_ALIGNED)),
        (score_partition, (
            stream, given, q_col, 1, Q_CONSECUTIVE, BY_TOKENS, True, BLOCK_LD, WIDTH, STAGES, False, Q_ALIGNED)),
        (_decode_partition, (
            stream, streams, q_tiles, d_desc, starts, ends, d_bits, raw, raw_full, d_smem, full, empty, where, ND, LD,
            TD, d_item, BY_TOKENS, BLOCK_LD)),
    ], [4, 4], [208, 96])  # fmt: skip
    table._keep_alive()


def hopper_product_few(
    q: Side, d: Side, out: Outputs, d_rows: int, d_item: int, processors: int, masked_zero: bool, config: FewConfig,
    per_query: int = 0,
) -> None:  # fmt: skip
    """As `hopper_few`."""
    assert d.decoder is not None
    D = q.data.shape[-1]
    q_rows, q_kept = kept_rows(q)
    block = config.BLOCK_LQ if per_query else max(16, power_of_two(q.length))
    box = [config.BLOCK_LD, 4]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int32)
    codes = TensorDescriptor(d.data.view(torch.int32), [d_rows, 4], [d.row // 4, 1], box, layout)
    programs = min(processors, -(-d.count // GROUPS.value))
    _hopper_product_kernel[(programs,)](
        codes, d.decoder.table, d.decoder.words, q.data, out.scores, out.winners, out.maxima,
        q.starts, q.ends, q_rows, q_kept, *places(d, d_item, masked_zero),
        q.count, d.count, q.length, min(d.length, d_rows), q.rows, d_rows, D, block.bit_length() - 1,
        q.item, q.row, q.col, d_item, 0 if out.winners is None else out.winners.shape[1],
        q.consecutive, q.aligned, d.consecutive, config.BLOCK_LQ, config.BLOCK_LD, config.stages, per_query or None,
        num_warps=4,
    )  # fmt: skip


def hopper_product(
    q: Side, d: Side, out: Outputs, d_rows: int, d_item: int, processors: int, masked_zero: bool, config: HopperConfig,
) -> None:  # fmt: skip
    """As `hopper_scores`, for every query and document."""
    assert d.decoder is not None
    D = q.data.shape[-1]
    q_rows, q_kept = kept_rows(q)
    block, parts, tiles = tiled(q.length, q.count, 128)
    step = d.count
    if parts > 1:
        step = max(1, min(step, PARTS_BYTES // (4 * q.count * parts)))
    sums = out.scores
    if parts > 1:
        sums = torch.empty(q.count * step * parts, dtype=torch.float32, device=d.data.device)
    box = [config.BLOCK_LD, 16]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.uint8)
    for first in range(0, d.count, step):
        part = documents_from(d, first, min(step, d.count - first))
        rows = d_rows - first * d_item
        _hopper_product_scores_kernel[(processors,)](
            TensorDescriptor(part.data, [rows, 16], [d.row, 1], box, layout), d.decoder.table, d.decoder.words, q.data,
            sums, rows_from(out.winners, first), rows_from(out.maxima, first),
            q.starts, q.ends, q_rows, q_kept, *places(part, d_item, masked_zero),
            -(-tiles // 2), q.count, part.count, q.length, min(d.length, d_rows), q.rows, rows, D, parts,
            block.bit_length() - 1, q.item, q.row, q.col, d_item,
            0 if out.winners is None else out.winners.shape[1],
            q.consecutive, d.consecutive and step == d.count, q.aligned, config.BLOCK_LD, config.stages,
            config.raw_stages, num_warps=4,
        )  # fmt: skip
        if parts > 1:
            sum_parts(sums, out.scores, first, part.count, d.count, q.count * part.count, parts)
