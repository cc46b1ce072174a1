"""Hopper forward for many query rows: documents flow past the tensor cores as one stream of tokens.

Owns: a program keeps query rows in shared memory and is given a run of documents (`hopper_stream`). One warp brings
tiles of BLOCK_LD document tokens (TMA, a ring of STAGES); two warpgroups multiply, each 128 query rows. PAIRED: both
take the same tiles, for different rows; else they are two streams, for the same rows. While one takes maxima the other
multiplies. Reads every document token once for 256 (128) query rows; writes one number a query and document, and where
asked a winner and a maximum a query token. Bound by the tensor cores.

Query tokens are the rows of the product and document tokens its columns. Tiles are cut regardless of where documents
end: one that ends inside a tile costs a masked maximum of SUB columns and its sum. What follows it is the next document
where that begins in the same tile, else a tile of its own.

Exactness: as in `scores`: a similarity is accumulated over D in one order, in steps of 16; the sum over query tokens is
the same tree of adjacent pairs. Query tokens are laid in the tile such that each thread has four that follow one
another, and each warp 32.
"""

from __future__ import annotations

from .gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma_load,
    wgmma,
    wgmma_wait,
)
from .hopper_halves import keep_halves, of_halves, scaled
from .hopper_maxima import (
    ALONE,
    LANES,
    ROWS,
    SUB,
    columns,
    keep,
    kept,
    lane_maximum,
    lowest,
    maximum,
    take,
    take_between,
)
from .hopper_slices import of_slices, of_slices_of_halves
from .hopper_stream import (
    clamped,
    cut,
    each_tile,
    edges_of,
    enter,
    fetch,
    kept_words,
    next_kept,
    segment,
    share,
    tile_from,
)
from .hopper_tile import add_up_four, finish, keep_piece, keep_queries, query_rows, wait_for_four

RUN_TIME = (
    "q_tiles", "NQ", "ND", "LQ", "LD", "TQ", "TD", "D", "parts", "block_log2", "q_item", "q_row", "d_item",
    "winner_columns", "K",
)  # fmt: skip
# Their alignment changes with what is cut out of them, and no load of theirs is wide.
TABLES = (
    "out_ptr", "winners_ptr", "maxima_ptr", "q_starts", "q_ends", "q_kept_rows", "q_kept", "starts", "ends", "bases",
    "d_bits", "gaps", "q_scales", "scales",
)  # fmt: skip


@gluon.jit
def _begins_early(streams, starts, d_bits, ND):
    """Whether `begin` asks for the first tiles: where they are known at once, and every stream has one."""
    if starts is None and d_bits is None:
        return streams <= ND
    else:
        return False


@gluon.jit
def _ask(row, d_desc, d_smem, f_desc, f_smem, full, stage):
    """Asks for a tile, and the factors of its tokens where there are any."""
    mbarrier.expect(full.index(stage), d_desc.block_type.nbytes + (0 if f_desc is None else f_desc.block_type.nbytes))
    tma_load(d_desc, [row, 0], full.index(stage), d_smem.index(stage))
    if f_desc is not None:
        tma_load(f_desc, [row], full.index(stage), f_smem.index(stage))


@gluon.jit
def begin(
    stream, streams, d_desc, d_smem, f_desc, f_smem, full, starts, d_bits, ND, TD, d_item, FIRST: gl.constexpr = 0
):  # fmt: skip
    """Asks for the first tile of a stream of one query tile, before there are partitions, which take a microsecond."""
    if _begins_early(streams, starts, d_bits, ND):
        doc = cut(stream, streams, 1, ND, TD, starts, False, 4).to(gl.int32)
        _ask(tile_from(doc * d_item, f_desc is not None), d_desc, d_smem, f_desc, f_smem, full, FIRST)


@gluon.jit
def _bring(
    step, row, tile, d_desc, d_smem, f_desc, f_smem, full, empty, begun, FIRST: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    stage = FIRST + step % STAGES
    if (step > 0) | (not begun):
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        _ask(row, d_desc, d_smem, f_desc, f_smem, full, stage)


@gluon.jit
def _load_partition(
    stream, streams, q_tiles, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item,
    BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr, HALF: gl.constexpr, BLOCK_LD: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr = False, EARLY: gl.constexpr = False, K=None, f_desc=None, f_smem=None,
):  # fmt: skip
    """One warp: brings the tiles of a stream into its ring. Paired warpgroups have one stream."""
    if PAIRED and HALF == 1:
        return
    begun = False
    if EARLY:
        begun = _begins_early(streams, starts, d_bits, ND)
    each_tile(
        stream, streams, q_tiles, starts, ends, d_bits, ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, 1,
        _bring, (d_desc, d_smem, f_desc, f_smem, full, empty, begun, HALF * STAGES, STAGES), SPLIT, K,
        f_desc is not None,
    )  # fmt: skip


@gluon.jit
def _score_partition(
    stream, streams, q_tiles, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, d_low, d_scale,
    full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item, winner_columns,
    Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr, HALF: gl.constexpr,
    BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr = False,
    Q_ALIGNED: gl.constexpr = False, K=None, slices=None, RESIDENT: gl.constexpr = 0, first_tile=0, tiles=None,
    q_scales=None, scales=None, f_smem=None, EIGHTS: gl.constexpr = False,
):  # fmt: skip
    """A warpgroup: scores a stream's documents against 128 query rows.

    d_low, d_scale: of float32 tokens the low halves, or None, and the scales of documents; else None.
    SPLIT: out_ptr takes, for `sum_pieces`, what each stream finds of each document in place of its sum.
    slices: of wide tokens how many there are, RESIDENT of the queries in shared memory (all, or 0: they are brought);
    `tiles` query tiles from first_tile on are scored. Of float32 ones q_ptr has the scales.
    K: each query has as many documents of its own, a score each.
    q_scales, scales: of codes, else None; f_smem: of int8 codes the factors of a tile's tokens, or None. EIGHTS: tiles
    begin at multiples of 8 rows.
    """
    if d_scale is not None and not PAIRED and HALF == 1:
        return
    FIRST: gl.constexpr = 0 if PAIRED else HALF * STAGES
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_LD, 256 // d_smem.dtype.primitive_bitwidth]
    )
    acc: gl.constexpr = gl.int32 if d_smem.dtype == gl.int8 else gl.float32
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at, end, cuts = share(stream, streams, q_tiles, ND, LD, TD, starts, BY_TOKENS, SPLIT, BLOCK_LD, 4)
    # one query tile: both warpgroups write the same
    q_tile = q_smem.index(0 if q_smem.shape[0] == 1 else HALF)
    ND_OUT = ND if K is None else 0  # from a query's score to the next query's
    none = gl.full([ROWS, 4], lowest(acc), acc, LANES)
    nowhere = gl.full([ROWS, 4], -1, gl.int32, LANES)
    WINNERS: gl.constexpr = winners_ptr is not None
    # scores wait for one another where many documents end and registers are left; it is more code, which costs too
    WAIT: gl.constexpr = not WINNERS and d_scale is None and starts is not None and not SPLIT and gaps is None
    CONSECUTIVE: gl.constexpr = BY_TOKENS and d_bits is None
    by_query: gl.constexpr = LANES if WAIT else ALONE  # where a document ends, a thread's query tokens
    held = (none,) * 7
    nothing = gl.full([ROWS, 4], float("-inf"), gl.float32, LANES)
    step = 0
    while at < end:
        tile, doc, last = segment(at, end, q_tiles, ND, K)
        edges = edges_of(at, end, cuts, tile, doc, last, ND, LD) if SPLIT else None
        at += last - doc
        if SPLIT:  # a place for each document, and one more where a stream begins
            pieces_ptr = out_ptr + ((tile * ND + stream) * 2 + HALF) * ROWS
        tile = tile.to(gl.int32)
        live = True
        if PAIRED:
            tile = tile * 2 + HALF
            if slices is not None:
                live = tile < tiles
                tile += first_tile
        q_at, _, q_live = query_rows(
            gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_row)), tile, parts, q_starts, q_ends, q_kept_rows,
            q_kept, NQ, LQ, TQ, q_item, q_row, block_log2, Q_CONSECUTIVE,
        )  # fmt: skip
        q_high = None
        q_scale = None
        if slices is not None and d_scale is not None:
            slot = (tile - first_tile) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_query))
            q_scale = gl.load(q_ptr + slot, mask=slot < tiles * ROWS, other=1.0)
        elif d_scale is not None:
            q_high, q_scale = keep_halves(
                q_ptr, q_at, q_live, q_col, D, q_tile, d_low is not None, by_row, layout, by_query
            )
        elif slices is None:
            keep_queries(q_ptr, q_at, q_live, q_col, D, q_tile, by_row, Q_ALIGNED)
        elif RESIDENT:
            for c in gl.static_range(RESIDENT):
                keep_queries(q_ptr, q_at, q_live, q_col, D, q_smem.index(c * 2 + HALF), by_row, Q_ALIGNED, c * BLOCK_D)
        fence_async_shared()
        thread_barrier()
        slot_at, column, valid = query_rows(
            gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_query)), tile, parts, q_starts, q_ends, q_kept_rows, q_kept,
            NQ, LQ, TQ, q_item, q_row, block_log2, Q_CONSECUTIVE, K,
        )  # fmt: skip
        if q_scales is not None:
            q_scale = gl.load(q_scales + slot_at // q_row, mask=valid, other=0.0)

        start, end_row = fetch(doc, last, starts, ends)
        if CONSECUTIVE:
            start = clamped(start, TD)
        first, past, start, end_row = enter(doc, last, start, end_row, starts, ends, LD, d_item, TD, edges, CONSECUTIVE)
        best = none
        best_low = nowhere
        last1 = nothing
        last2 = nothing
        last3 = nothing
        waiting = 0
        while doc < last:
            run = past > first
            ended = past <= first
            row = tile_from(first, f_smem is not None or EIGHTS)
            while run:
                stage = step % STAGES
                if d_bits is not None:
                    row = next_kept(d_bits, row, BLOCK_LD)
                    bits = kept_words(d_bits, row, BLOCK_LD // SUB)
                if slices is not None and d_scale is not None:
                    sim = of_slices_of_halves(
                        q_smem, d_smem, d_low, d_scale, full, empty, step, slices, live, HALF, WINNERS, layout
                    )
                    step += slices
                elif slices is not None:
                    sim = of_slices(q_smem, d_smem, full, empty, step, slices, live, HALF, RESIDENT, acc, layout)
                    step += slices
                else:
                    mbarrier.wait(full.index(FIRST + stage), (step // STAGES) & 1)
                    if f_smem is not None:
                        factor = f_smem.index(FIRST + stage).load(gl.SliceLayout(0, layout))
                    if d_low is not None:
                        sim = of_halves(q_high, q_tile, d_smem.index(stage), d_low.index(stage), layout)
                    else:
                        sim = wgmma(
                            q_tile, d_smem.index(FIRST + stage).permute((1, 0)),
                            gl.zeros([ROWS, BLOCK_LD], acc, layout), use_acc=False, is_async=True,
                        )  # fmt: skip
                    sim = wgmma_wait(0, deps=[sim])
                    if d_scale is not None:
                        sim = scaled(sim, d_scale.index(stage))
                    if f_smem is not None:
                        sim = sim * factor.to(gl.int32)[None, :]
                    mbarrier.arrive(empty.index(FIRST + stage), count=1)
                    step += 1
                if (first <= row) & (past >= row + BLOCK_LD) and d_bits is None:
                    if WINNERS:
                        groups = columns(sim)
                        for g in gl.static_range(BLOCK_LD // SUB):
                            best, best_low, held = take(best, best_low, held, groups[g], row + g * SUB, WINNERS)
                    else:
                        best = maximum(best, lane_maximum(sim))
                    ended = past == row + BLOCK_LD
                    run = past > row + BLOCK_LD
                else:
                    groups = columns(sim)
                    for g in gl.static_range(BLOCK_LD // SUB):
                        low = row + g * SUB
                        high = low + SUB
                        group = groups[g]
                        if d_bits is not None:
                            group = kept(group, bits[g])
                        if run & (first <= low) & (past > high):
                            best, best_low, held = take(best, best_low, held, group, low, WINNERS)
                        elif WAIT:
                            if run:
                                best = take_between(best, group, low, first, past)
                                while run & (past <= high):
                                    waiting, last1, last2, last3 = wait_for_four(
                                        best, waiting, last1, last2, last3, doc, valid, tile, out_ptr, ND_OUT, parts,
                                        NQ, block_log2, q_scale, scales,
                                    )  # fmt: skip
                                    before = past
                                    doc += 1
                                    first, past, start, end_row = enter(
                                        doc, last, start, end_row, starts, ends, LD, d_item, TD, edges, CONSECUTIVE
                                    )
                                    run = (doc < last) & (first >= before) & (first < row + BLOCK_LD)
                                    best = take_between(none, group, low, first, gl.where(run, past, first))
                        else:
                            token = low + gl.arange(0, SUB, layout=gl.SliceLayout(0, group.type.layout))
                            inside = run
                            while inside:
                                if WINNERS:
                                    new = take_between(best, group, low, first, past)
                                    best_low, held = keep(best, new, best_low, held, group, low)
                                    best = new
                                else:
                                    inner = (token >= first) & (token < past)
                                    own = gl.where(inner[None, :], group, lowest(group.dtype))
                                    best, best_low, held = take(best, best_low, held, own, low, WINNERS)
                                inside = past <= high
                                if inside:
                                    if SPLIT:
                                        keep_piece(best, valid, pieces_ptr + doc * 2 * ROWS, doc, q_scale, scales)
                                    else:
                                        finish(
                                            best, best_low, held, q_scale, column, valid, doc, first, past <= first,
                                            bases, gaps, tile, out_ptr, winners_ptr, maxima_ptr, ND_OUT, TD, parts, NQ,
                                            block_log2, winner_columns, d_item, d_bits is not None, scales,
                                        )  # fmt: skip
                                    best = none
                                    best_low = nowhere
                                    before = past
                                    doc += 1
                                    first, past, start, end_row = enter(
                                        doc, last, start, end_row, starts, ends, LD, d_item, TD, edges, CONSECUTIVE
                                    )
                                    run = (doc < last) & (first >= before) & (first < row + BLOCK_LD)
                                    inside = run
                row += BLOCK_LD
            if ended:
                if WAIT:
                    waiting, last1, last2, last3 = wait_for_four(
                        best, waiting, last1, last2, last3, doc, valid, tile, out_ptr, ND_OUT, parts, NQ, block_log2,
                        q_scale, scales,
                    )  # fmt: skip
                elif SPLIT:
                    keep_piece(best, valid, pieces_ptr + doc * 2 * ROWS, doc, q_scale, scales)
                else:
                    finish(
                        best, best_low, held, q_scale, column, valid, doc, first, past <= first, bases, gaps, tile,
                        out_ptr, winners_ptr, maxima_ptr, ND_OUT, TD, parts, NQ, block_log2, winner_columns, d_item,
                        d_bits is not None, scales,
                    )  # fmt: skip
                best = none
                best_low = nowhere
                doc += 1
                first, past, start, end_row = enter(
                    doc, last, start, end_row, starts, ends, LD, d_item, TD, edges, CONSECUTIVE
                )
        if WAIT:
            if waiting > 0:
                add_up_four(
                    last1, last2, last3, last3, doc - 1, waiting, valid, tile, out_ptr, ND_OUT, parts, NQ, block_log2
                )  # fmt: skip


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
    # registers: a multiprocessor has 512 for each thread of a warpgroup, and there are three
    gl.warp_specialize([
        (_score_partition, (
            stream, streams, q_tiles, q_ptr, out_ptr, winners_ptr, maxima_ptr,
            q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, None, None,
            full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item, winner_columns,
            Q_CONSECUTIVE, BY_TOKENS, PAIRED, 0, BLOCK_LD, BLOCK_D, STAGES, SPLIT, Q_ALIGNED, K, None, 0, 0, None,
            q_scales, scales, f_smem)),
        (_score_partition, (
            other, streams, q_tiles, q_ptr, out_ptr, winners_ptr, maxima_ptr,
            q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, None, None,
            full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, q_col, d_item, winner_columns,
            Q_CONSECUTIVE, BY_TOKENS, PAIRED, 1, BLOCK_LD, BLOCK_D, STAGES, SPLIT, Q_ALIGNED, K, None, 0, 0, None,
            q_scales, scales, f_smem)),
        (_load_partition, (
            stream, streams, q_tiles, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item,
            BY_TOKENS, PAIRED, 0, BLOCK_LD, STAGES, SPLIT, not PAIRED, K, f_desc, f_smem)),
        (_load_partition, (
            other, streams, q_tiles, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item,
            BY_TOKENS, PAIRED, 1, BLOCK_LD, STAGES, SPLIT, not PAIRED, K, f_desc, f_smem)),
    ], [4, 1, 1], [232, 40, 40])  # fmt: skip
