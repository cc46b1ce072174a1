"""Hopper forward for few query rows: bound by the documents' bytes.

Owns: a program keeps all query rows in shared memory and is given a run of documents (`hopper_stream`). One warp
brings tiles of BLOCK_LD document tokens (TMA, a ring of STAGES that does not drain where documents end); one warpgroup
multiplies. Several programs share a multiprocessor: while one is busy with a document's end, the others' bytes come.
Reads every document token once; writes one number a query and document, and where asked a winner and a maximum a query
token.

float32 tokens turn into float16 halves in the registers that multiply them (`hopper_halves`); scores are those of
`scores` bit for bit where they are not lost (`lost`), and those are scored again.

Document tokens are the rows of the product and query tokens its columns, as in `scores`: the running maximum is
elementwise, and where documents end inside a tile each takes its rows of it. Only an end reduces.

Exactness: as in `scores`: a similarity is accumulated over D in one order, in steps of 16, and the sum over query
tokens is the same tree of adjacent pairs.
"""

from __future__ import annotations

from . import arithmetic
from .gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    wgmma,
    wgmma_wait,
)
from .hopper_codewords import tokens_of
from .hopper_halves import halves_in_registers, of_registers, store_halves, token_of
from .hopper_load import begin, load_partition
from .hopper_maxima import NOWHERE, lowest, maximum
from .hopper_stream import RUN_TIME, TABLES, cut, enter, fetch, next_kept, segment, tile_from
from .hopper_tile import keep_queries, pair_sums, query_tokens, settled, store_winner
from .spans import NO_GAP

ordered = gluon.jit(arithmetic.ordered.fn)
unordered = gluon.jit(arithmetic.unordered.fn)


@gluon.jit
def _finish(
    best, best_at, token, q_scale, column, valid, doc, first, empty, bases, gaps, out_ptr, winners_ptr, maxima_ptr,
    ND, TD, NQ, block_log2, winner_columns, d_item, MASKED: gl.constexpr, scales=None,
):  # fmt: skip
    """Adds up the maxima of a document that has ended, where one sum is one query, and stores its scores; where asked,
    the maxima and the tokens that have them too."""
    N: gl.constexpr = best.shape[1]
    LOG2: gl.constexpr = N.bit_length() - 1
    if winners_ptr is None:
        value = gl.reduce(best, 0, maximum)
    else:
        row = gl.where(best_at == NOWHERE, best_at, best_at + token[:, None])
        # of equal values the lowest row: it is turned round in the low half of the key
        key = gl.max((ordered(best).to(gl.int64) << 32) | (NOWHERE - row).to(gl.int64), 0)
        value = unordered((key >> 32).to(gl.int32), best.dtype)
        winner = NOWHERE - (key & NOWHERE).to(gl.int32)
        winner = gl.where(winner == NOWHERE, first, winner)  # −inf everywhere: the first
        slot = doc.to(gl.int64) * winner_columns + column
        store_winner(winners_ptr, slot, value, winner, doc, first, empty, valid, bases, gaps, d_item, TD, MASKED)
    nothing = empty
    if gaps is not None:
        nothing = empty & (gl.load(gaps + doc) == NO_GAP)
    value = settled(value, doc, empty, q_scale, scales, gaps)
    if maxima_ptr is not None:
        gl.store(maxima_ptr + slot, value, mask=valid)
    total = gl.where(valid, value, 0.0)
    for level in gl.static_range(LOG2 + 1):
        if level >= 4:
            if level == block_log2:
                n = gl.arange(0, N >> level, layout=total.type.layout).to(gl.int64)
                sums = gl.where(nothing, float("-inf"), total)  # an empty query: 0, but −inf against an empty document
                gl.store(out_ptr + n * ND + doc, sums, mask=n < NQ)
        if level < LOG2:
            total = pair_sums(total)


@gluon.jit
def few_partition(
    stream, given, q_col, GROUP: gl.constexpr, Q_CONSECUTIVE: gl.constexpr, Q_ALIGNED: gl.constexpr,
    BY_TOKENS: gl.constexpr, BLOCK_LQ: gl.constexpr, BLOCK_LD: gl.constexpr, STAGES: gl.constexpr,
    EIGHTS: gl.constexpr = False,
):  # fmt: skip
    """A warpgroup, of several number GROUP: scores a stream's documents against all query rows.

    given: what all groups have alike, in this order, as in `score_partition`. K: each query has as many documents of
    its own, and they are scored against its rows. q_scales, scales: of codes, else None. f_smem: of int8 codes the
    factors of a tile's tokens, or None. table: of codes in tiles where codewords begin, else None. EIGHTS: tiles begin
    at multiples of 8 rows.
    """
    (
        streams, q_ptr, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, full, empty,
        NQ, ND, LQ, LD, TQ, TD, D, block_log2, q_item, q_row, d_item, winner_columns, K,
        q_scales, scales, f_smem, table,
    ) = given  # fmt: skip
    FIRST: gl.constexpr = GROUP * STAGES
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_LQ, 256 // q_smem.dtype.primitive_bitwidth]
    )
    acc: gl.constexpr = gl.int32 if d_smem.dtype == gl.int8 else gl.float32
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.arange(0, BLOCK_LD, layout=gl.SliceLayout(1, layout))
    if d_smem.dtype == gl.float32:
        token = token_of(token)
    none = gl.full([BLOCK_LD, BLOCK_LQ], lowest(acc), acc, layout)
    nowhere = gl.full([BLOCK_LD, BLOCK_LQ], NOWHERE, gl.int32, layout)
    at = cut(stream, streams, 1, ND, TD, starts, BY_TOKENS, 4)
    end = cut(stream + 1, streams, 1, ND, TD, starts, BY_TOKENS, 4)
    step = 0
    while at < end:
        tile, doc, last = segment(at, end, 1, ND, K)
        if K is None:
            tile = 0
            of_query = block_log2
            at = end  # there are no others
        else:
            tile = tile.to(gl.int32)
            of_query = 7
            at += last - doc
            thread_barrier()  # no warp multiplies by the query before
        q_at, _, q_live = query_tokens(
            gl.arange(0, BLOCK_LQ, layout=gl.SliceLayout(1, by_row)), tile, 1, q_starts, q_ends, q_kept_rows, q_kept,
            NQ, LQ, TQ, q_item, q_row, of_query, Q_CONSECUTIVE, K,
        )  # fmt: skip
        q_scale = None
        if d_smem.dtype != gl.float32:
            keep_queries(q_ptr, q_at, q_live, q_col, D, q_smem.index(GROUP), by_row, Q_ALIGNED)
        else:
            q_scale = store_halves(q_ptr, q_at, q_live, q_col, D, q_smem, by_row, layout)
        fence_async_shared()
        thread_barrier()
        slot_at, column, valid = query_tokens(
            gl.arange(0, BLOCK_LQ, layout=gl.SliceLayout(0, layout)), tile, 1, q_starts, q_ends, q_kept_rows, q_kept,
            NQ, LQ, TQ, q_item, q_row, of_query, Q_CONSECUTIVE, K,
        )  # fmt: skip
        if q_scales is not None:
            q_scale = gl.load(q_scales + slot_at // q_row, mask=valid, other=0.0)
        start, end_row = fetch(doc, last, starts, ends)
        first, past, start, end_row = enter(doc, last, start, end_row, starts, ends, LD, d_item, TD)
        while doc < last:
            run = past > first
            row = tile_from(first, f_smem is not None or EIGHTS)
            if not run:
                _finish(
                    none, nowhere, token, q_scale, column, valid, doc, first, True, bases, gaps, out_ptr, winners_ptr,
                    maxima_ptr, ND, TD, NQ, block_log2, winner_columns, d_item, d_bits is not None, scales,
                )  # fmt: skip
                doc += 1
                first, past, start, end_row = enter(doc, last, start, end_row, starts, ends, LD, d_item, TD)
            best = none
            best_at = nowhere
            while run:
                stage = FIRST + step % STAGES
                if d_bits is not None:
                    row = next_kept(d_bits, row, BLOCK_LD)
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                if table is not None:
                    tokens = tokens_of(d_smem.index(stage), table, min(ND, 1), layout, q_smem.dtype)
                    sim = wgmma(
                        tokens, q_smem.index(GROUP).permute((1, 0)),
                        gl.zeros([BLOCK_LD, BLOCK_LQ], acc, layout), use_acc=False, is_async=True,
                    )  # fmt: skip
                    thread_barrier()
                    mbarrier.arrive(empty.index(stage), count=1)
                    sim = wgmma_wait(0, deps=[sim])
                elif d_smem.dtype == gl.float32:
                    high, low, scale = halves_in_registers(d_smem.index(stage), layout)
                    thread_barrier()
                    mbarrier.arrive(empty.index(stage), count=1)
                    sim = wgmma_wait(0, deps=[of_registers(high, low, q_smem, layout)])
                    sim = sim * scale[:, None] + 0.0  # no −0, as in `similarities`
                else:
                    sim = wgmma(
                        d_smem.index(stage), q_smem.index(0).permute((1, 0)),
                        gl.zeros([BLOCK_LD, BLOCK_LQ], acc, layout), use_acc=False, is_async=True,
                    )  # fmt: skip
                    sim = wgmma_wait(0, deps=[sim])
                    if f_smem is not None:
                        sim = sim * f_smem.index(stage).load(gl.SliceLayout(1, layout)).to(acc)[:, None]
                    mbarrier.arrive(empty.index(stage), count=1)
                step += 1
                here = row + token
                if d_bits is not None:
                    word = gl.load(d_bits + (here >> 5))
                    sim = gl.where((((word >> (here & 31)) & 1) != 0)[:, None], sim, lowest(acc))
                inside = run
                if table is not None and winners_ptr is None:  # what is selected takes as long as what is multiplied
                    if (first <= row) & (past > row + BLOCK_LD):
                        best = maximum(best, sim)
                        inside = past <= row
                while inside:
                    inner = (here >= first) & (here < past)
                    new = maximum(best, gl.where(inner[:, None], sim, lowest(acc)))
                    if winners_ptr is not None:
                        # bits, not values: NaN, once in, stays the same NaN and keeps its place
                        more = new.to(gl.int32, bitcast=True) != best.to(gl.int32, bitcast=True)
                        best_at = gl.where(more, row, best_at)
                    best = new
                    inside = past <= row + BLOCK_LD
                    if inside:
                        _finish(
                            best, best_at, token, q_scale, column, valid, doc, first, past <= first, bases, gaps,
                            out_ptr, winners_ptr, maxima_ptr, ND, TD, NQ, block_log2, winner_columns, d_item,
                            d_bits is not None, scales,
                        )  # fmt: skip
                        best = none
                        best_at = nowhere
                        before = past
                        doc += 1
                        first, past, start, end_row = enter(doc, last, start, end_row, starts, ends, LD, d_item, TD)
                        run = (doc < last) & (first >= before) & (first < row + BLOCK_LD)
                        inside = run
                row += BLOCK_LD


@gluon.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=TABLES)
def _hopper_few_kernel(
    d_desc, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps,
    NQ, ND, LQ, LD, TQ, TD, D, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, Q_ALIGNED: gl.constexpr, BY_TOKENS: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_LQ: gl.constexpr, BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, K,
    q_scales, scales, f_desc,
):  # fmt: skip
    """HALVES: of a query token, one of float32 or two; else it is as it comes, and this is 1."""
    q_type: gl.constexpr = gl.float16 if d_desc.dtype == gl.float32 else d_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_LQ, BLOCK_D], q_type)
    q_smem = gl.allocate_shared_memory(q_type, [HALVES, BLOCK_LQ, BLOCK_D], q_layout)
    d_smem = gl.allocate_shared_memory(d_desc.dtype, [STAGES, BLOCK_LD, BLOCK_D], d_desc.layout)
    if f_desc is not None:
        f_smem = gl.allocate_shared_memory(f_desc.dtype, [STAGES, BLOCK_LD], f_desc.layout)
    else:
        f_smem: gl.constexpr = None  # type: ignore[no-redef]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    stream = gl.program_id(0)
    streams = gl.num_programs(0)
    begin(stream, streams, d_desc, d_smem, f_desc, f_smem, full, starts, d_bits, ND, TD, d_item)
    given = (
        streams, q_ptr, out_ptr, winners_ptr, maxima_ptr,
        q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, full, empty,
        NQ, ND, LQ, LD, TQ, TD, D, block_log2, q_item, q_row, d_item, winner_columns, K,
        q_scales, scales, f_smem, None,
    )  # fmt: skip
    tiles = (streams, 1, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item, K, f_desc, f_smem)
    gl.warp_specialize([
        (few_partition, (stream, given, q_col, 0, Q_CONSECUTIVE, Q_ALIGNED, BY_TOKENS, BLOCK_LQ, BLOCK_LD, STAGES)),
        (load_partition, (stream, tiles, 0, BY_TOKENS, True, BLOCK_LD, STAGES, False, True)),
    ], [1], [40])  # fmt: skip
