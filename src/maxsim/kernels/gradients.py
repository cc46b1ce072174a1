"""Portable backward: one program owns one token row's gradient and adds the terms of the scores that row won (or, for a
query token, of the document tokens it chose), in a fixed order: no atomics.

The terms of a row are either found by arithmetic (a query token meets every document once) or listed: the winners
sorted by the row they name (a stable sort), as compressed sparse rows. Reads one token row a term; bound by that
gather.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import power_of_two
from .sides import Side, base, span

CHUNK_BYTES = 256 << 20  # keys, their order and the sort's own copies, held at once
BYTES_A_WINNER = 24
# Sizes never make a new variant; strides do.
COMMON = ("first", "first_entry", "columns", "K", "NQ", "ND", "LQ", "LD", "TQ", "TD")


@triton.jit
def _entry(
    e, live, winners, pairs, q_starts, q_ends, query_of, d_starts, d_ends, columns, K, NQ, ND, LQ, LD, TQ, TD,
    GRID: tl.constexpr,
):  # fmt: skip
    """Entry e of the winners table → pair, query, its token, document, its token (−1: none won)."""
    p = e // columns
    col = e % columns
    if GRID:
        doc = p
        if query_of is None:
            n = col // LQ
            i = col % LQ
        else:
            n = tl.load(query_of + col, mask=live, other=0).to(tl.int64)
            i = col - tl.load(q_starts + n, mask=live & (n >= 0), other=0).to(tl.int64)
    else:
        i = col
        if pairs is None:
            n = p // K
            doc = p
        else:
            n = tl.minimum(tl.maximum(tl.load(pairs + p * 2, mask=live, other=0), 0), NQ - 1)
            doc = tl.minimum(tl.maximum(tl.load(pairs + p * 2 + 1, mask=live, other=0), 0), ND - 1)
    won = tl.load(winners + e, mask=live, other=-1).to(tl.int64)
    if winners.dtype.element_ty == tl.int16:
        won = tl.where(won == -1, won, won & 0xFFFF)
    return p, n, i, doc, won


@triton.jit(do_not_specialize=(*COMMON, "count", "none"))
def _keys_kernel(
    keys, winners, pairs, q_starts, q_ends, query_of, d_starts, d_ends,
    first, first_entry, count, columns, K, NQ, ND, LQ, LD, TQ, TD, none,
    GRID: tl.constexpr, OF_QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each entry the row that its term belongs to; `none` where nothing won, so that a sort puts those last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    p, n, i, doc, won = _entry(
        first_entry + at, live, winners, pairs, q_starts, q_ends, query_of, d_starts, d_ends,
        columns, K, NQ, ND, LQ, LD, TQ, TD, GRID,
    )  # fmt: skip
    if OF_QUERIES:
        start, _ = span(n, q_starts, q_ends, LQ, TQ)
        row = start + i if q_starts is not None else n * LQ + i
    else:
        start, _ = span(doc, d_starts, d_ends, LD, TD)
        row = start + won if d_starts is not None else (doc - first) * LD + won
    tl.store(keys + at, tl.where(won < 0, none, row).to(keys.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=(*COMMON, "first_row", "d_per_group", "grad_query", "grad_document"))
def _gradient_kernel(
    out, winners, grad, order, offsets, pairs, q_ptr, d_ptr, q_starts, q_ends, query_of, d_starts, d_ends,
    first, first_entry, first_row, columns, K, NQ, ND, LQ, LD, TQ, TD, D, grad_query, grad_document,
    q_item, q_row, q_col, d_per_group, d_group, d_item, d_row, d_col,
    GRID: tl.constexpr, OF_QUERIES: tl.constexpr, NORMALIZE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, ENTRIES)
    d = tl.arange(0, BLOCK_D)
    inside = d[None, :] < D
    # the terms of this row: [low, high) of the sorted list, or one a document
    if order is not None:
        low = tl.load(offsets + r)
        high = tl.load(offsets + r + 1)
    else:
        low = r * 0
        high = low + (ND if GRID else K)
        if GRID:
            start_entry = r
            if query_of is not None:
                high = tl.where(tl.load(query_of + r) < 0, 0, high)  # a row of no query
        else:
            start_entry = (r // LQ) * K * columns + r % LQ
    acc = tl.zeros([ENTRIES, BLOCK_D], tl.float32)
    terms = tl.zeros([ENTRIES], tl.int32)
    for k in range(low, high, ENTRIES):
        live = k + lane < high
        if order is not None:
            e = first_entry + tl.load(order + k + lane, mask=live, other=0)
        else:
            e = start_entry + (k + lane) * columns
        p, n, i, doc, won = _entry(
            e, live, winners, pairs, q_starts, q_ends, query_of, d_starts, d_ends,
            columns, K, NQ, ND, LQ, LD, TQ, TD, GRID,
        )  # fmt: skip
        live = live & (won >= 0)
        terms += live.to(tl.int32)
        n = tl.where(live, n, 0)
        doc = tl.where(live, doc, 0)
        if GRID:
            g = tl.load(grad + n * grad_query + doc * grad_document, mask=live, other=0.0)
        else:
            g = tl.load(grad + p * grad_query, mask=live, other=0.0)
        if OF_QUERIES:
            start, _ = span(doc, d_starts, d_ends, LD, TD)
            at = d_ptr + base(doc, start, d_starts, d_per_group, d_group, d_item, d_row) + won * d_row
            term = tl.load(at[:, None] + d[None, :].to(tl.int64) * d_col, mask=live[:, None] & inside, other=0.0)
        else:
            start, _ = span(n, q_starts, q_ends, LQ, TQ)
            at = q_ptr + base(n, start, q_starts, 2147483647, 0, q_item, q_row) + i * q_row
            term = tl.load(at[:, None] + d[None, :].to(tl.int64) * q_col, mask=live[:, None] & inside, other=0.0)
        term = term.to(tl.float32)
        if NORMALIZE:
            term = term / tl.maximum(tl.sqrt_rn(tl.sum(term * term, 1)), 1e-12)[:, None]
        acc += tl.where(live[:, None], g.to(tl.float32)[:, None] * term, 0.0)
    total = tl.sum(acc, 0)
    if NORMALIZE:
        # through x / |x|: what points along x is taken out, the rest is divided by |x|
        if OF_QUERIES:
            if q_starts is None:
                at_own = (r // LQ) * q_item + (r % LQ) * q_row
            else:
                at_own = r * q_row
            own = tl.load(q_ptr + at_own + d.to(tl.int64) * q_col, mask=d < D, other=0.0).to(tl.float32)
        else:
            if d_starts is None:
                owner = first + r // LD
                at_own = base(owner, owner, d_starts, d_per_group, d_group, d_item, d_row) + (r % LD) * d_row
            else:
                at_own = r * d_row
            own = tl.load(d_ptr + at_own + d.to(tl.int64) * d_col, mask=d < D, other=0.0).to(tl.float32)
        norm = tl.maximum(tl.sqrt_rn(tl.sum(own * own, 0)), 1e-12)
        own = own / norm
        projected = (total - tl.sum(total * own, 0) * own) / norm
        total = tl.where(tl.sum(terms, 0) > 0, projected, 0.0)  # a row that won nothing is 0, whatever it holds
    tl.store(out + (first_row + r) * D + d, total.to(out.dtype.element_ty), mask=d < D)


def gradients(
    q: Side,
    d: Side,
    winners: Tensor,
    grad: Tensor,
    pairs: Tensor | None,
    per_query: int,
    normalize: bool,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of both sides, contiguous, in the shape and dtype of their data, from winners `[ND, TQ]` (grid) or `[P,
    LQ]`.

    grad: upstream, `[NQ, ND]` or `[P]`, any strides.
    """
    grid = pairs is None and not per_query
    query_of = _query_of(q) if grid and q.consecutive else None

    def launch(out: Tensor, of_queries: bool, listed: bool, first: int, rows: int, count: int) -> None:
        _launch(
            out, of_queries, listed, first, rows, count, q, d, winners, grad, pairs, per_query, normalize, query_of
        )  # fmt: skip

    grad_queries = grad_documents = None
    if need_queries:
        grad_queries = torch.empty(q.data.shape, dtype=q.data.dtype, device=q.data.device)
        # a row met in several pairs, or held by several views, needs its list; else arithmetic finds its terms
        listed = pairs is not None or (q.starts is not None and not (q.consecutive and grid))
        launch(grad_queries, True, listed, 0, q.rows or q.count * q.length, winners.numel())
    if need_documents:
        grad_documents = torch.empty(d.data.shape, dtype=d.data.dtype, device=d.data.device)
        if d.starts is not None or pairs is not None:
            launch(grad_documents, False, True, 0, d.rows or d.count * d.length, winners.numel())
        else:
            columns = winners.shape[1]
            step = max(1, CHUNK_BYTES // (BYTES_A_WINNER * max(columns, 1)))
            for low in range(0, d.count, step):
                some = min(step, d.count - low)
                launch(grad_documents, False, True, low, some * d.length, some * columns)
    return grad_queries, grad_documents


def _query_of(q: Side) -> Tensor:
    """For consecutive queries the query of each token row, int64 `[TQ]`, −1 past the last."""
    assert q.ends is not None
    row = torch.arange(q.rows, device=q.data.device)
    found = torch.searchsorted(q.ends.contiguous().long(), row, right=True)
    return found.masked_fill_(found >= q.count, -1)


def _launch(
    out: Tensor,
    of_queries: bool,
    listed: bool,
    first: int,
    rows: int,
    count: int,
    q: Side,
    d: Side,
    winners: Tensor,
    grad: Tensor,
    pairs: Tensor | None,
    per_query: int,
    normalize: bool,
    query_of: Tensor | None,
) -> None:
    """Gradient rows of one side; of documents those from document `first` on. `listed`: from a sorted list of
    winners."""
    if rows == 0:
        return
    grid = pairs is None and not per_query
    D = q.data.shape[-1]
    columns = winners.shape[1]
    shape = (columns, max(per_query, 1), q.count, d.count, max(q.length, 1), max(d.length, 1), q.rows, d.rows)
    tables = (pairs, q.starts, q.ends, query_of, d.starts, d.ends)
    order = offsets = None
    if listed:
        keys = torch.empty(count, dtype=torch.int32 if rows < 2**31 - 1 else torch.int64, device=winners.device)
        if count:
            _keys_kernel[(triton.cdiv(count, 1024),)](
                keys, winners, *tables, first, first * columns, count, *shape, rows,
                GRID=grid, OF_QUERIES=of_queries, BLOCK=1024,
            )  # fmt: skip
        keys, order = keys.sort(stable=True)
        offsets = torch.searchsorted(keys, torch.arange(rows + 1, dtype=keys.dtype, device=keys.device))
    strides = grad.stride() if grid else (grad.stride(0), 0)
    BLOCK_D = max(16, power_of_two(D))
    _gradient_kernel[(rows,)](
        out, winners, grad, order, offsets, pairs, q.data, d.data, *tables[1:],
        first, first * columns, first * d.length, *shape, D, *strides,
        q.item, q.row, q.col, d.per_group, d.group, d.item, d.row, d.col,
        GRID=grid, OF_QUERIES=of_queries, NORMALIZE=normalize, ENTRIES=4 if BLOCK_D <= 256 else 1, BLOCK_D=BLOCK_D,
        num_warps=1 if BLOCK_D <= 256 else 4,
    )  # fmt: skip
