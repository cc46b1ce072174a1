"""Hopper forward for many query rows: documents flow past the tensor cores as one stream of tokens.

Owns: a program keeps query rows in shared memory and is given a run of documents (`hopper_stream`). One warp brings
tiles of BLOCK_LD document tokens (TMA, a ring of STAGES); two warpgroups multiply, each 128 query rows. PAIRED: both
take the same tiles, for different rows; else they are two streams, for the same rows. While one takes maxima the other
multiplies. Reads every document token once for 256 (128) query rows; writes one number a query and document. Bound by
the tensor cores.

Query tokens are the rows of the product and document tokens its columns. Tiles are cut regardless of where documents
end: one that ends inside a tile costs a masked maximum of SUB columns and its sum. What follows it is the next document
where that begins in the same tile, else a tile of its own.

Exactness: as in `scores`: a similarity is accumulated over D in one order, in steps of 16; the sum over query tokens is
the same tree of adjacent pairs. Query tokens are laid in the tile such that each thread has four that follow one
another, and each warp 32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arithmetic
from .configs import HopperConfig, power_of_two
from .gluon_names import TensorDescriptor, fence_async_shared, gl, gluon, mbarrier, tma_load, wgmma, wgmma_wait
from .hopper_stream import cut, fetch, kept_words, next_kept, place
from .queries import kept_rows, sum_parts
from .scores import PARTS_BYTES
from .sides import Side
from .spans import kept_bits, kept_spans

maximum = gluon.jit(arithmetic.maximum.fn)

RUN_TIME = (
    "q_tiles", "NQ", "ND", "LQ", "LD", "TQ", "TD", "D", "parts", "block_log2", "q_item", "q_row", "d_item",
)  # fmt: skip
ROWS = gl.constexpr(128)  # query rows of a warpgroup
SUB = gl.constexpr(32)  # columns that a document's end touches; a word of a mask
# [128, 4]: what each thread keeps of an accumulator after the maximum over its own columns
LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [64, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[128, 4],
    )
)


@gluon.jit
def _load_partition(
    stream, streams, q_tiles, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item,
    BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr, HALF: gl.constexpr, BLOCK_LD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: brings the tiles of a stream into its ring. Paired warpgroups have one stream."""
    FIRST: gl.constexpr = HALF * STAGES
    if PAIRED and HALF == 1:
        return
    at = cut(stream, streams, q_tiles, ND, TD, starts, BY_TOKENS, 1)
    end = cut(stream + 1, streams, q_tiles, ND, TD, starts, BY_TOKENS, 1)
    step = 0
    while at < end:
        tile = at // ND
        doc = (at - tile * ND).to(gl.int32)
        last = min(end - tile * ND, ND.to(gl.int64)).to(gl.int32)
        start, end_row = fetch(doc, last, starts, ends)
        first, past = place(doc, start, end_row, starts, LD, d_item, TD)
        start, end_row = fetch(doc + 1, last, starts, ends)
        while doc < last:
            run = past > first
            row = first
            if not run:
                doc += 1
                first, past = place(doc, start, end_row, starts, LD, d_item, TD)
                start, end_row = fetch(doc + 1, last, starts, ends)
            while run:
                stage = step % STAGES
                if d_bits is not None:
                    row = next_kept(d_bits, row, BLOCK_LD)
                mbarrier.wait(empty.index(FIRST + stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(FIRST + stage), d_desc.block_type.nbytes)
                tma_load(d_desc, [row, 0], full.index(FIRST + stage), d_smem.index(FIRST + stage))
                step += 1
                row += BLOCK_LD
                while run & (past <= row):
                    before = past
                    doc += 1
                    first, past = place(doc, start, end_row, starts, LD, d_item, TD)
                    start, end_row = fetch(doc + 1, last, starts, ends)
                    run = (doc < last) & (first >= before) & (first < row)
        at = tile * ND + last


@gluon.jit
def _lane_maximum(x):
    """The largest value of each row among a thread's own columns: [128, N] → [128, 4]."""
    N: gl.constexpr = x.shape[1]
    pairs = gl.reduce(gl.reshape(x, [x.shape[0], N // 8, 4, 2]), 3, maximum)
    return gl.convert_layout(gl.reduce(pairs, 1, maximum), LANES, assert_trivial=True)


@gluon.jit
def _left_and_right(x):
    """Left and right columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _columns(x):
    """[128, N] → a tuple of [128, SUB]."""
    if x.shape[1] == SUB:
        return (x,)
    else:
        left, right = _left_and_right(x)
        return _columns(left) + _columns(right)


@gluon.jit
def _kept(group, word):
    """Columns whose bit is not set turn into −inf."""
    column = gl.arange(0, group.shape[1], layout=gl.SliceLayout(0, group.type.layout))
    return gl.where((((word >> column) & 1) != 0)[None, :], group, float("-inf"))


@gluon.jit
def _token(row):
    """Row 64 b + 16 w + 8 h + l of the accumulator holds the tile's query token 32 w + 4 l + 2 b + h."""
    return ((row >> 4) & 3) * 32 + (row & 7) * 4 + (row >> 6) * 2 + ((row >> 3) & 1)


@gluon.jit
def _query_rows(
    row, tile, parts, q_starts, q_ends, q_kept_rows, q_kept, NQ, LQ, TQ, q_item, q_row, block_log2,
    Q_CONSECUTIVE: gl.constexpr,
):  # fmt: skip
    """Offsets of the query tokens in some rows of the accumulator, and which of them are there."""
    token = _token(row)
    i = (token & ((1 << block_log2) - 1)) + (tile % parts) * ROWS
    n = (((tile // parts) << (7 - block_log2)) + (token >> block_log2)).to(gl.int64)
    real = n < NQ
    n = gl.where(real, n, 0)
    if q_starts is None:
        start = n * 0
        length = start + LQ
        offset = n * q_item
    else:
        start = gl.minimum(gl.maximum(gl.load(q_starts + n).to(gl.int64), 0), TQ)
        end = gl.minimum(gl.maximum(gl.load(q_ends + n).to(gl.int64), start), TQ)
        length = gl.minimum(end - start, LQ)
        offset = start * q_row
    index = i.to(gl.int64)
    if q_kept is not None:
        column = start if Q_CONSECUTIVE else n * LQ
        length = gl.load(q_kept + n).to(gl.int64)
        index = gl.load(q_kept_rows + column + i, mask=real & (i < length), other=0).to(gl.int64)
    return offset + index * q_row, real & (i < length)


@gluon.jit
def _pair_sums(x):
    return gl.sum(gl.reshape(x, [x.shape[0] // 2, 2]), 1)


@gluon.jit
def _store_sums(sums, level: gl.constexpr, doc, empty, tile, out_ptr, ND, parts, NQ):
    """Stores the sums of 2^level query rows each."""
    n = (((tile // parts) << (7 - level)) + gl.arange(0, ROWS >> level, layout=sums.type.layout)).to(gl.int64)
    sums = gl.where(empty, float("-inf"), sums)  # an empty query: 0, but −inf against an empty document
    gl.store(out_ptr + (n * ND + doc) * parts + tile % parts, sums, mask=n < NQ)


@gluon.jit
def _finish(best, valid, doc, empty, tile, out_ptr, ND, parts, NQ, block_log2):
    """Adds up the maxima of a document that has ended, where one sum is one query, and stores its scores."""
    value = gl.where(valid, gl.reduce(best, 1, maximum), 0.0)
    value = gl.reshape(gl.permute(gl.reshape(value, [2, 4, 2, 8]), (1, 3, 0, 2)), [ROWS])  # by tokens
    of16 = _pair_sums(_pair_sums(_pair_sums(_pair_sums(value))))
    if block_log2 == 4:
        _store_sums(of16, 4, doc, empty, tile, out_ptr, ND, parts, NQ)
    else:
        of32 = _pair_sums(of16)
        if block_log2 == 5:
            _store_sums(of32, 5, doc, empty, tile, out_ptr, ND, parts, NQ)
        else:
            of64 = _pair_sums(of32)
            if block_log2 == 6:
                _store_sums(of64, 6, doc, empty, tile, out_ptr, ND, parts, NQ)
            else:
                _store_sums(_pair_sums(of64), 7, doc, empty, tile, out_ptr, ND, parts, NQ)


@gluon.jit
def _score_partition(
    stream, streams, q_tiles, q_ptr, out_ptr, q_starts, q_ends, q_kept_rows, q_kept, starts, ends, d_bits,
    q_smem, d_smem, full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item,
    Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr, HALF: gl.constexpr,
    BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: scores a stream's documents against 128 query rows."""
    FIRST: gl.constexpr = 0 if PAIRED else HALF * STAGES
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_LD, 16]
    )
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at = cut(stream, streams, q_tiles, ND, TD, starts, BY_TOKENS, 4)
    end = cut(stream + 1, streams, q_tiles, ND, TD, starts, BY_TOKENS, 4)
    q_tile = q_smem.index(HALF if PAIRED else 0)
    none = gl.full([ROWS, 4], float("-inf"), gl.float32, LANES)
    step = 0
    while at < end:
        tile = at // ND
        doc = (at - tile * ND).to(gl.int32)
        last = min(end - tile * ND, ND.to(gl.int64)).to(gl.int32)
        at = tile * ND + last
        tile = tile.to(gl.int32)
        if PAIRED:
            tile = tile * 2 + HALF
        q_at, q_live = _query_rows(
            gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_row)), tile, parts, q_starts, q_ends, q_kept_rows,
            q_kept, NQ, LQ, TQ, q_item, q_row, block_log2, Q_CONSECUTIVE,
        )  # fmt: skip
        for c in gl.static_range(0, BLOCK_D, 64):
            d = c + gl.arange(0, 64, layout=gl.SliceLayout(0, by_row))
            q = gl.load(
                q_ptr + q_at[:, None] + (d.to(gl.int64) * q_col)[None, :],
                mask=q_live[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            q_tile.slice(c, 64, 1).store(q)
        fence_async_shared()
        gl.thread_barrier()
        _, valid = _query_rows(
            gl.arange(0, ROWS, layout=gl.SliceLayout(1, LANES)), tile, parts, q_starts, q_ends, q_kept_rows, q_kept,
            NQ, LQ, TQ, q_item, q_row, block_log2, Q_CONSECUTIVE,
        )  # fmt: skip

        start, end_row = fetch(doc, last, starts, ends)
        first, past = place(doc, start, end_row, starts, LD, d_item, TD)
        start, end_row = fetch(doc + 1, last, starts, ends)
        while doc < last:
            run = past > first
            row = first
            if not run:
                _finish(none, valid, doc, True, tile, out_ptr, ND, parts, NQ, block_log2)
                doc += 1
                first, past = place(doc, start, end_row, starts, LD, d_item, TD)
                start, end_row = fetch(doc + 1, last, starts, ends)
            best = none
            while run:
                stage = step % STAGES
                if d_bits is not None:
                    row = next_kept(d_bits, row, BLOCK_LD)
                    bits = kept_words(d_bits, row, BLOCK_LD // SUB)
                mbarrier.wait(full.index(FIRST + stage), (step // STAGES) & 1)
                sim = wgmma(
                    q_tile, d_smem.index(FIRST + stage).permute((1, 0)),
                    gl.zeros([ROWS, BLOCK_LD], gl.float32, layout), use_acc=False, is_async=True,
                )  # fmt: skip
                sim = wgmma_wait(0, deps=[sim])
                mbarrier.arrive(empty.index(FIRST + stage), count=1)
                step += 1
                groups = _columns(sim)
                if (first <= row) & (past > row + BLOCK_LD):
                    if d_bits is None:
                        best = maximum(best, _lane_maximum(sim))
                    else:
                        for g in gl.static_range(BLOCK_LD // SUB):
                            best = maximum(best, _lane_maximum(_kept(groups[g], bits[g])))
                else:
                    for g in gl.static_range(BLOCK_LD // SUB):
                        low = row + g * SUB
                        high = low + SUB
                        group = groups[g]
                        if d_bits is not None:
                            group = _kept(group, bits[g])
                        if run & (first <= low) & (past > high):
                            best = maximum(best, _lane_maximum(group))
                        else:
                            token = low + gl.arange(0, SUB, layout=gl.SliceLayout(0, group.type.layout))
                            inside = run
                            while inside:
                                kept = (token >= first) & (token < past)
                                best = maximum(best, _lane_maximum(gl.where(kept[None, :], group, float("-inf"))))
                                inside = past <= high
                                if inside:
                                    _finish(best, valid, doc, past <= first, tile, out_ptr, ND, parts, NQ, block_log2)
                                    best = none
                                    before = past
                                    doc += 1
                                    first, past = place(doc, start, end_row, starts, LD, d_item, TD)
                                    start, end_row = fetch(doc + 1, last, starts, ends)
                                    run = (doc < last) & (first >= before) & (first < row + BLOCK_LD)
                                    inside = run
                row += BLOCK_LD


@gluon.jit(do_not_specialize=RUN_TIME)
def _hopper_scores_kernel(
    d_desc, q_ptr, out_ptr, q_starts, q_ends, q_kept_rows, q_kept, starts, ends, d_bits,
    q_tiles, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item,
    Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr,
    BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    RINGS: gl.constexpr = 1 if PAIRED else 2
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], d_desc.dtype)
    q_smem = gl.allocate_shared_memory(d_desc.dtype, [3 - RINGS, ROWS, BLOCK_D], q_layout)
    d_smem = gl.allocate_shared_memory(d_desc.dtype, [RINGS * STAGES, BLOCK_LD, BLOCK_D], d_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [RINGS * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RINGS * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RINGS * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3 - RINGS)
    stream = gl.program_id(0) * RINGS
    other = stream + RINGS - 1
    streams = gl.num_programs(0) * RINGS
    gl.warp_specialize([
        (_score_partition, (
            stream, streams, q_tiles, q_ptr, out_ptr, q_starts, q_ends, q_kept_rows, q_kept, starts, ends, d_bits,
            q_smem, d_smem, full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item,
            Q_CONSECUTIVE, BY_TOKENS, PAIRED, 0, BLOCK_LD, BLOCK_D, STAGES)),
        (_score_partition, (
            other, streams, q_tiles, q_ptr, out_ptr, q_starts, q_ends, q_kept_rows, q_kept, starts, ends, d_bits,
            q_smem, d_smem, full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item,
            Q_CONSECUTIVE, BY_TOKENS, PAIRED, 1, BLOCK_LD, BLOCK_D, STAGES)),
        (_load_partition, (
            stream, streams, q_tiles, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item,
            BY_TOKENS, PAIRED, 0, BLOCK_LD, STAGES)),
        (_load_partition, (
            other, streams, q_tiles, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item,
            BY_TOKENS, PAIRED, 1, BLOCK_LD, STAGES)),
    ], [4, 1, 1], [224, 56, 56])  # fmt: skip


GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class HopperLaunch(NamedTuple):
    """One launch, compiled: `repeat` it for tensors like those it was made for."""

    kernel: Any  # triton's CompiledKernel
    programs: tuple[int, int, int]
    describe: tuple[Any, ...]  # shape, strides, block and layout of the documents' descriptor
    arguments: tuple[Any, ...]

    def repeat(self, queries: Tensor, documents: Tensor, scores: Tensor) -> None:
        self.kernel[self.programs](TensorDescriptor(documents, *self.describe), queries, scores, *self.arguments)


def hopper_scores(
    q: Side, d: Side, out: Tensor, d_rows: int, d_item: int, processors: int, config: HopperConfig
) -> HopperLaunch | None:
    """Writes `out`, [NQ, ND], for every query and document.

    Documents are rows of a `[d_rows, D]` matrix whose row stride is `d.row`; padded ones begin every `d_item` rows; a
    mask has an entry a row. Returns the launch where it was the only one, to be repeated on other tensors of the same
    shapes, strides and alignment.
    """
    D = q.data.shape[-1]
    rows, kept = (None, None) if q.mask is None else kept_rows(q)
    block = min(128, max(16, power_of_two(q.length)))
    parts = max(1, -(-q.length // 128))
    tiles = parts * q.count if parts > 1 else -(-q.count * block // 128)
    paired = tiles > 1
    starts, ends = (d.starts, d.ends) if d.mask is None else kept_spans(d, d_item)
    bits = None if d.mask is None else kept_bits(d.mask)
    step = d.count
    if parts > 1:
        step = max(1, min(step, PARTS_BYTES // (4 * q.count * parts)))
    sums = out
    if parts > 1:
        sums = torch.empty(q.count * step * parts, dtype=torch.float32, device=out.device)
    layout = gl.NVMMASharedLayout.get_default_for([config.BLOCK_LD, config.BLOCK_D], GLUON[d.data.dtype])
    programs = (processors, 1, 1)
    for first in range(0, d.count, step):
        columns = min(step, d.count - first)
        documents, count = d.data, d_rows
        if starts is None and first:  # padded documents are counted from the first of these
            documents, count = d.data[first:], d_rows - first * d_item
        describe = ([count, D], [d.row, 1], [config.BLOCK_LD, config.BLOCK_D], layout)
        arguments = (
            q.starts, q.ends, rows, kept,
            None if starts is None else starts[first:], None if ends is None else ends[first:], bits,
            -(-tiles // 2) if paired else tiles, q.count, columns, q.length, d.length, q.rows, count, D, parts,
            block.bit_length() - 1, q.item, q.row, q.col, d_item,
            q.consecutive, d.consecutive and step == d.count, paired,
            config.BLOCK_LD, config.BLOCK_D, config.stages if paired else config.unpaired_stages,
        )  # fmt: skip
        kernel = _hopper_scores_kernel[programs](
            TensorDescriptor(documents, *describe), q.data, sums, *arguments, num_warps=4
        )
        if parts > 1:
            sum_parts(sums, out, first, columns, d.count, q.count * columns, parts)
    plain = parts == 1 and q.mask is None and d.mask is None
    return HopperLaunch(kernel, programs, describe, arguments) if plain else None
