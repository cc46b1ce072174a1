"""A warpgroup of the Hopper forward for many query rows (`hopper_scores`, and its variants for other documents): takes
tiles of document tokens as they come into a ring, multiplies, and keeps maxima.

Query tokens are the rows of the product and document tokens its columns. Tiles are cut regardless of where documents
end: one that ends inside a tile costs a masked maximum of SUB columns and its sum. What follows it is the next document
where that begins in the same tile, else a tile of its own.
"""

from __future__ import annotations

from .gluon_names import fence_async_shared, gl, gluon, mbarrier, thread_barrier, wgmma, wgmma_wait
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


@gluon.jit
def _tile_similarities(
    step, stage, q_tile, q_high, q_smem, d_smem, d_low, d_scale, f_smem, full, empty, slices, live, GROUP: gl.constexpr,
    FIRST: gl.constexpr, STAGES: gl.constexpr, RESIDENT: gl.constexpr, WINNERS: gl.constexpr, acc: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The similarities of the query rows with tile number `step`, in place `stage` of the ring that begins at FIRST,
    and the number of the next one; of wide tokens those of slices. The places are then free."""
    BLOCK_LD: gl.constexpr = d_smem.shape[1]
    if slices is not None and d_scale is not None:
        sim = of_slices_of_halves(
            q_smem, d_smem, d_low, d_scale, full, empty, step, slices, live, GROUP, WINNERS, layout
        )
        step += slices
    elif slices is not None:
        sim = of_slices(q_smem, d_smem, full, empty, step, slices, live, GROUP, RESIDENT, acc, layout)
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
    return sim, step


@gluon.jit
def _score_stream(
    stream, streams, q_tiles, q_ptr, out_ptr, winners_ptr, maxima_ptr,
    q_starts, q_ends, q_kept_rows, q_kept, starts, ends, bases, d_bits, gaps, q_smem, d_smem, d_low, d_scale,
    full, empty, NQ, ND, LQ, LD, TQ, TD, D, parts, block_log2, q_item, q_row, d_item, winner_columns,
    K, slices, first_tile, tiles, q_scales, scales, f_smem,
    q_col, GROUP: gl.constexpr, Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr,
    BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, Q_ALIGNED: gl.constexpr,
    RESIDENT: gl.constexpr, EIGHTS: gl.constexpr,
):  # fmt: skip
    """A warpgroup, the first or second (GROUP): scores a stream's documents against 128 query rows.

    d_low, d_scale: of float32 tokens the low halves, or None, and the scales of documents; else None.
    SPLIT: out_ptr takes, for `sum_pieces`, what each stream finds of each document in place of its sum.
    K: each query has as many documents of its own, a score each.
    slices: of wide tokens how many there are, RESIDENT of the queries in shared memory (all, or 0: they are brought);
    `tiles` query tiles from first_tile on are scored. Of float32 ones q_ptr has the scales. Else these are None.
    q_scales, scales: of codes, else None; f_smem: of int8 codes the factors of a tile's tokens, or None. EIGHTS: tiles
    begin at multiples of 8 rows.
    """
    if d_scale is not None and not PAIRED and GROUP == 1:
        return
    FIRST: gl.constexpr = 0 if PAIRED else GROUP * STAGES
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_LD, 256 // d_smem.dtype.primitive_bitwidth]
    )
    acc: gl.constexpr = gl.int32 if d_smem.dtype == gl.int8 else gl.float32
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at, end, cuts = share(stream, streams, q_tiles, ND, LD, TD, starts, BY_TOKENS, SPLIT, BLOCK_LD, 4)
    # one query tile: both warpgroups write the same
    q_tile = q_smem.index(0 if q_smem.shape[0] == 1 else GROUP)
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
            pieces_ptr = out_ptr + ((tile * ND + stream) * 2 + GROUP) * ROWS
        tile = tile.to(gl.int32)
        live = True
        if PAIRED:
            tile = tile * 2 + GROUP
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
                keep_queries(q_ptr, q_at, q_live, q_col, D, q_smem.index(c * 2 + GROUP), by_row, Q_ALIGNED, c * BLOCK_D)
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
        # what `enter`, the sums of a document and `finish` take besides the document
        documents = (starts, ends, LD, d_item, TD)
        target = (valid, tile, out_ptr, ND_OUT, parts, NQ, block_log2)
        ending = (scales, column, bases, gaps, winners_ptr, maxima_ptr, TD, winner_columns, d_item)
        first, past, start, end_row = enter(doc, last, start, end_row, *documents, edges, CONSECUTIVE)
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
                sim, step = _tile_similarities(
                    step, stage, q_tile, q_high, q_smem, d_smem, d_low, d_scale, f_smem, full, empty, slices, live,
                    GROUP, FIRST, STAGES, RESIDENT, WINNERS, acc, layout,
                )  # fmt: skip
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
                                        best, waiting, last1, last2, last3, doc, q_scale, scales, *target
                                    )
                                    before = past
                                    doc += 1
                                    first, past, start, end_row = enter(
                                        doc, last, start, end_row, *documents, edges, CONSECUTIVE
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
                                            best,
                                            best_low,
                                            held,
                                            doc,
                                            first,
                                            past <= first,
                                            d_bits is not None,
                                            q_scale,
                                            *ending,
                                            *target,
                                        )
                                    best = none
                                    best_low = nowhere
                                    before = past
                                    doc += 1
                                    first, past, start, end_row = enter(
                                        doc, last, start, end_row, *documents, edges, CONSECUTIVE
                                    )
                                    run = (doc < last) & (first >= before) & (first < row + BLOCK_LD)
                                    inside = run
                row += BLOCK_LD
            if ended:
                if WAIT:
                    waiting, last1, last2, last3 = wait_for_four(
                        best, waiting, last1, last2, last3, doc, q_scale, scales, *target
                    )
                elif SPLIT:
                    keep_piece(best, valid, pieces_ptr + doc * 2 * ROWS, doc, q_scale, scales)
                else:
                    finish(
                        best, best_low, held, doc, first, past <= first, d_bits is not None, q_scale, *ending, *target
                    )
                best = none
                best_low = nowhere
                doc += 1
                first, past, start, end_row = enter(doc, last, start, end_row, *documents, edges, CONSECUTIVE)
        if WAIT:
            if waiting > 0:
                add_up_four(last1, last2, last3, last3, doc - 1, waiting, *target)


@gluon.jit
def score_partition(
    stream, given, q_col, GROUP: gl.constexpr, Q_CONSECUTIVE: gl.constexpr, BY_TOKENS: gl.constexpr,
    PAIRED: gl.constexpr, BLOCK_LD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr = False, Q_ALIGNED: gl.constexpr = False, RESIDENT: gl.constexpr = 0,
    EIGHTS: gl.constexpr = False,
):  # fmt: skip
    """`_score_stream`. given: what both warpgroups have alike, its arguments from `streams` to `f_smem`. q_col and the
    flags are no part of it: a number that is known to the compiler (q_col = 1) is not, once it stands in a tuple."""
    _score_stream(
        stream, *given, q_col, GROUP, Q_CONSECUTIVE, BY_TOKENS, PAIRED, BLOCK_LD, BLOCK_D, STAGES, SPLIT, Q_ALIGNED,
        RESIDENT, EIGHTS,
    )  # fmt: skip
