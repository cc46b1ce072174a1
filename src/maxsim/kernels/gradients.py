"""Portable backward. The terms of a query token are found by arithmetic: it meets each of its query's documents once.
Those of a document token are listed (`lists`), and programs that own rows add them up (`gradient_rows`). A row of more
than PIECE entries would keep one program busy: others sum up all pieces but the first beforehand. Rows that several
items may hold (Views) have their terms listed by a sort of all winners.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import GradientConfig, gradient_config
from .decoding import NOTHING
from .gradient_rows import COMMON, TABLES, _gradient_kernel, _piece_kernel
from .launches import Slot, Steps
from .lists import SIZE, Lists, Pairs, lists, won_by
from .sides import Side, span

CHUNK_BYTES = 256 << 20  # lists held at once
MOST = 512  # plans kept; when there are more, all are made anew
_plans: dict[Any, Steps] = {}


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=("starts", "ends"))
def _owners_kernel(owners, starts, ends, count, rows, steps, BLOCK: tl.constexpr):
    """Which of consecutive items holds each row, −1: none."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + count
    for _ in range(steps):  # of a binary search for the first item that ends after the row
        middle = (low + high) // 2
        open = low < high
        past = tl.load(ends + middle, mask=open, other=0) > row
        high = tl.where(open & past, middle, high)
        low = tl.where(open & (past == 0), middle + 1, low)
    start = tl.load(starts + low, mask=low < count, other=0)
    tl.store(owners + row, tl.where((low < count) & (row >= start), low, -1), mask=row < rows)


@triton.jit(do_not_specialize=COMMON, do_not_specialize_on_alignment=TABLES)
def _keys_kernel(
    keys, winners, pairs, q_starts, q_ends, q_owner, d_starts, d_ends, count, columns, K, NQ, ND, LQ, LD, TQ, TD, none,
    GRID: tl.constexpr, OF_QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each winner the row that its term belongs to; `none` where nothing won, so that a sort puts those last."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = e < count
    won = won_by(winners, e, live)
    live = live & (won >= 0)
    p = e // columns
    i = e % columns
    side: tl.constexpr = 0 if OF_QUERIES else 1
    if GRID and OF_QUERIES:
        item = i // LQ
        i = i % LQ
    elif pairs is not None:
        item = tl.load(pairs + p * 2 + side, mask=live, other=0)
        item = tl.minimum(tl.maximum(item, 0), (NQ if OF_QUERIES else ND) - 1)
    else:
        item = p // K if OF_QUERIES else p
    if OF_QUERIES:
        start, _ = span(tl.where(live, item, 0), q_starts, q_ends, LQ, TQ)
        row = start + i
    else:
        start, _ = span(tl.where(live, item, 0), d_starts, d_ends, LD, TD)
        row = start + won
    tl.store(keys + e, tl.where(live, row, none).to(keys.dtype.element_ty), mask=e < count)


class _Inputs(NamedTuple):
    """Tensors of a backward, as slots of its steps. Of each side: pairs by its items and where each item's begin, or
    terms by the rows they belong to and where each row's end."""

    winners: Any
    grad: Any
    pairs: Any
    q: Any
    q_starts: Any
    q_ends: Any
    d: Any
    d_starts: Any
    d_ends: Any
    scales: Any = None
    factors: Any = None
    q_order: Any = None
    q_ends_of_order: Any = None
    d_order: Any = None
    d_ends_of_order: Any = None
    table: Any = None
    ids: Any = None
    weights: Any = None
    inverses: Any = None


class _Backward:
    """The steps of `gradients`, from sizes alone."""

    def __init__(
        self, q: Side, d: Side, tensors: _Inputs, per_query: int, normalize: bool, needed: tuple[bool, bool],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        of = [side.data for side, need in zip((q, d), needed, strict=True) if need]
        self.steps = Steps(len(tensors), [(each.shape, dtype) for each in of])
        self.at = _Inputs(*(None if each is None else Slot(i) for i, each in enumerate(tensors)))
        self.q = q._replace(data=self.at.q, starts=self.at.q_starts, ends=self.at.q_ends)
        self.d = d._replace(data=self.at.d, starts=self.at.d_starts, ends=self.at.d_ends)
        at, self.decoder = self.at, NOTHING
        if d.decoder is not None:
            self.decoder = (at.table, d.decoder.words, at.ids, at.weights, at.inverses, d.decoder.codec)
        self.D = q.data.shape[-1]
        self.grid = tensors.pairs is None and not per_query
        self.K = max(per_query, 1)
        self.normalize = normalize
        self.rows, self.columns = tensors.winners.shape
        self.config: GradientConfig = gradient_config(self.D, d.decoder is not None and d.decoder.codec < 0)
        self.sizes = (self.K, q.count, d.count, max(q.length, 1), max(d.length, 1), q.rows, d.rows)
        self.grad_strides = tensors.grad.stride() if self.grid else (tensors.grad.stride(0), 0)
        # documents of a query, one after another; else they lie in groups
        self.d_group = d.group if d.data.ndim == 4 else self.K * d.item
        self.q_owner = owners(self.steps, self.q) if q.consecutive else None
        if needed[0]:
            self._queries(self.steps.result(0))
        if needed[1] and (d.rows or d.count * d.length):
            self._documents(self.steps.result(len(of) - 1))

    def _queries(self, out: Slot) -> None:
        q = self.q
        sorted = q.starts is not None and not q.consecutive
        self._launch(
            out, True, q.rows or q.count * q.length, sorted, order=self.at.q_order, ends=self.at.q_ends_of_order
        )

    def _documents(self, out: Slot) -> None:
        d = self.d
        if d.starts is not None and not d.consecutive:
            self._launch(out, False, d.rows, True, order=self.at.d_order, ends=self.at.d_ends_of_order)
            return
        owner = owners(self.steps, d) if d.consecutive else None
        step = max(1, CHUNK_BYTES // (4 * max(self.columns + (0 if d.rows else d.length), 1)))
        if self.at.pairs is not None:
            step = d.count
        mark = len(self.steps.rooms)
        for first in range(0, d.count, step):
            some = min(step, d.count - first)
            self.steps.reuse(mark)
            found = self._lists(first, some)
            pieces = self._pieces(found, first, some)
            self._launch(
                out, False, d.rows or some * d.length, found=found, owner=owner, pieces=pieces, first=first, some=some
            )  # fmt: skip

    def _lists(self, first: int, some: int) -> Lists:
        pairs = None if self.at.pairs is None else Pairs(self.at.d_order, self.at.d_ends_of_order)
        return lists(self.steps, self.at.winners, self.d, first, some, self.rows, self.columns, pairs)

    def _pieces(self, found: Lists, first: int, some: int) -> Slot | None:
        """Sums of the entries of long rows, PIECE at a time; None where no row can be long."""
        q, d, config = self.q, self.d, self.config
        log2 = config.PIECE.bit_length() - 1
        chunk_log2, rows, spare = found.shape
        if self.at.pairs is None:
            more = (self.columns - 1) >> log2
            programs, entries = some * more, some * self.columns
        else:
            more, entries = 0, self.rows * self.columns
            programs = entries >> log2
        if programs == 0:
            return None
        pieces = self.steps.room(torch.float32, (entries >> log2) * self.D)
        self.steps.launch(
            _piece_kernel, programs,
            pieces, self.at.winners, self.at.grad, found.order, found.counters,
            self.at.pairs, self.at.d_order, self.at.d_ends_of_order,
            q.data, q.starts, q.ends, self.q_owner, d.starts, d.ends,
            first, some, rows, self.columns, more, log2, chunk_log2, spare, *self.sizes, self.D,
            *self.grad_strides, q.item, q.row, q.col,
            self.grid, self.normalize, config.PIECE, config.ENTRIES * config.ROWS, config.BLOCK_D,
            num_warps=config.num_warps,
        )  # fmt: skip
        return pieces

    def _launch(
        self, out: Slot, of_queries: bool, rows: int, sorted: bool = False, order: Slot | None = None,
        ends: Slot | None = None, found: Lists | None = None, owner: Slot | None = None, pieces: Slot | None = None,
        first: int = 0, some: int = 0,
    ) -> None:  # fmt: skip
        if rows == 0:
            return
        q, d, config = self.q, self.d, self.config
        entries, counters, (chunk_log2, _, spare) = found or ((order, ends) if sorted else (None, None)) + ((0, 0, 0),)
        parts = 1 if found is None else -(-self.columns // SIZE.value)
        pairs = (None, None) if sorted else (order, ends) if of_queries else (self.at.d_order, self.at.d_ends_of_order)
        self.steps.launch(
            _gradient_kernel, triton.cdiv(rows, config.ROWS),
            out, pieces, self.at.winners, self.at.grad, entries, counters, self.at.pairs, *pairs, q.data, d.data,
            q.starts, q.ends, self.q_owner, d.starts, d.ends, owner, self.at.scales, self.at.factors,
            first, some, 0 if d.rows else first * d.length, rows, self.columns, parts, chunk_log2, spare,
            *self.sizes, self.D, *self.grad_strides,
            q.item, q.row, q.col, self.d_group, d.item, d.row, d.col,
            self.grid, of_queries, sorted, self.normalize,
            0 if pieces is None else config.PIECE, config.ROWS, config.ENTRIES, config.BLOCK_D, *self.decoder,
            num_warps=config.num_warps,
        )  # fmt: skip


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
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of both sides, contiguous, in the shape of their data, from winners `[ND, TQ]` (grid) or `[P, LQ]`.

    grad: upstream, `[NQ, ND]` or `[P]`, any strides. Documents that are codes have none.
    """
    tensors = _Inputs(winners, grad, pairs, q.data, q.starts, q.ends, d.data, d.starts, d.ends, d.scales, d.factors)
    if d.decoder is not None:
        of = d.decoder
        tensors = tensors._replace(table=of.table, ids=of.ids, weights=of.weights, inverses=of.inverses)
    for of_queries, side in ((True, q), (False, d)):
        if need_queries if of_queries else need_documents:
            order = None
            if side.starts is not None and not side.consecutive:
                order = _sorted(q, d, tensors, per_query, of_queries)
            elif pairs is not None:
                order = _grouped(pairs[:, 0 if of_queries else 1], side.count)
            if order is not None and of_queries:
                tensors = tensors._replace(q_order=order[0], q_ends_of_order=order[1])
            elif order is not None:
                tensors = tensors._replace(d_order=order[0], d_ends_of_order=order[1])
    key = (
        *_kind(q), *_kind(d), winners.shape, winners.dtype, winners.data_ptr() % 16, grad.stride(), grad.dtype,
        pairs is None, per_query, normalize, need_queries, need_documents, dtype, CHUNK_BYTES, winners.device,
    )  # fmt: skip
    steps = _plans.get(key)
    if steps is None:
        steps = _Backward(q, d, tensors, per_query, normalize, (need_queries, need_documents), dtype).steps
        if len(_plans) >= MOST:
            _plans.clear()
        _plans[key] = steps
    results = steps.run(winners.device, *tensors)
    return results[0] if need_queries else None, results[-1] if need_documents else None


def _kind(side: Side) -> tuple[Any, ...]:
    """What a side's steps depend on."""
    data, starts = side.data, side.starts
    return (
        data.shape, data.dtype, data.data_ptr() % 16, *side[1:9], None if starts is None else starts.dtype,
        side.consecutive, side.scales is None, side.factors is None,
        None if side.decoder is None else side.decoder.kind,
    )  # fmt: skip


def owners(steps: Steps, side: Side) -> Slot:
    """For consecutive items the one that holds each token row, int32 `[T]`, −1: none."""
    found = steps.room(torch.int32, side.rows)
    if side.rows:
        steps.launch(
            _owners_kernel, triton.cdiv(side.rows, 256),
            found, side.starts, side.ends, side.count, side.rows, side.count.bit_length(), 256,
        )  # fmt: skip
    return found


def _grouped(item: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their items, and where each item's begin: `[P]` and `[count + 1]`."""
    item, order = item.clamp(0, count - 1).sort(stable=True)
    every = torch.arange(count + 1, dtype=item.dtype, device=item.device)
    return order, torch.searchsorted(item, every)


def _sorted(q: Side, d: Side, tensors: _Inputs, per_query: int, of_queries: bool) -> tuple[Tensor, Tensor]:
    """All winners in the order of the rows that their terms belong to, and where each row's end."""
    winners = tensors.winners
    count, rows = winners.numel(), q.rows if of_queries else d.rows
    keys = torch.empty(count, dtype=torch.int32 if rows < 2**31 - 1 else torch.int64, device=winners.device)
    _keys_kernel[(triton.cdiv(count, 1024),)](
        keys, winners, tensors.pairs, q.starts, q.ends, None, d.starts, d.ends,
        count, winners.shape[1], max(per_query, 1), q.count, d.count, max(q.length, 1), max(d.length, 1), q.rows,
        d.rows, rows, GRID=tensors.pairs is None and not per_query, OF_QUERIES=of_queries, BLOCK=1024,
    )  # fmt: skip
    keys, order = keys.sort(stable=True)
    every = torch.arange(rows, dtype=keys.dtype, device=keys.device)
    return order, torch.searchsorted(keys, every, right=True)
