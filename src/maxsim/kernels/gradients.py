"""Portable backward. The terms of a query token are found by arithmetic: it meets each of its query's documents once.
Those of a document token are listed (`lists`), and programs that own rows add them up (`gradient_rows`). A row of more
than PIECE entries would keep one program busy: others sum up all pieces but the first beforehand. A row that several
items may hold (Views) takes their terms in the order in which the items begin.

Lists are made of a chunk of documents at a time, or of pairs in the order of their documents. A row that has entries in
several chunks is carried from one to the next as float32 sums: its bits are those of one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor

from .configs import GradientConfig, few_won_configs, gradient_config
from .decoding import NOTHING
from .gradient_pieces import _piece_kernel
from .gradient_rows import _few_won_kernel, _gradient_kernel
from .launches import Slot, Steps
from .list_places import SIZE
from .lists import Lists, Pairs, lists
from .owners import Held, held_of, holders_of, owners
from .sides import Side
from .won_rows import FILL, few_win, ranked

CHUNK_BYTES = 256 << 20  # lists held at once
MOST = 512  # plans kept; when there are more, all are made anew
_plans: dict[Any, Steps] = {}


class _Inputs(NamedTuple):
    """Tensors of a backward, as slots of its steps. Of each side: pairs in the order of its items (or positions) and
    where each one's begin, and items that may overlap (`Held`). d_marks: the row that each chunk of documents or pairs
    begins with, where rows may have entries in several."""

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
    q_pairs: Any = None
    q_pair_offsets: Any = None
    d_pairs: Any = None
    d_pair_offsets: Any = None
    d_marks: Any = None
    q_held: Any = None
    q_held_starts: Any = None
    q_reach: Any = None
    d_held: Any = None
    d_held_starts: Any = None
    d_reach: Any = None
    table: Any = None
    ids: Any = None
    weights: Any = None
    inverses: Any = None


def _step(d: Side, columns: int, pairs: bool) -> int:
    """How many documents, or pairs, have lists at once."""
    tokens = 0 if pairs or (d.rows and d.consecutive) else d.length
    return max(1, CHUNK_BYTES // (4 * max(columns + tokens, 1)))


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
        self.config: GradientConfig = gradient_config(self.D, 0 if d.decoder is None else d.decoder.codec)
        self.sizes = (self.K, q.count, d.count, max(q.length, 1), max(d.length, 1), q.rows, d.rows)
        self.grad_strides = tensors.grad.stride() if self.grid else (tensors.grad.stride(0), 0)
        # documents of a query, one after another; else they lie in groups
        self.d_group = d.group if d.data.ndim == 4 else self.K * d.item
        self.q_owner = owners(self.steps, self.q) if q.consecutive else None
        self.q_rows = q.rows or q.count * q.length
        of_queries = self.steps.result(0) if needed[0] and self.q_rows else None
        of_documents = self.steps.result(len(of) - 1) if needed[1] and (d.rows or d.count * d.length) else None
        self.q_holders = None
        if of_queries is not None:
            self.q_holders = holders_of(self.steps, q, Held(self.at.q_held, self.at.q_held_starts, self.at.q_reach))
        if of_documents is not None and tensors.pairs is None and tensors.d_held is None and few_win(self.columns, d):
            self._both_of_few(of_queries, of_documents)
            return
        if of_queries is not None:
            pairs = Pairs(self.at.q_pairs, self.at.q_pair_offsets)
            self._launch(of_queries, True, self.q_rows, pairs, self.at.q_held, self.q_holders)
        if of_documents is not None:
            self._documents(of_documents)

    def _documents(self, out: Slot) -> None:
        d, at, paired = self.d, self.at, self.at.pairs is not None
        held = Held(at.d_held, at.d_held_starts, at.d_reach)
        holders = holders_of(self.steps, d, held)
        owner = owners(self.steps, d) if d.consecutive else None
        step = _step(d, self.columns, paired)
        count = self.rows if paired else d.count
        carried = None
        if count > step and at.d_marks is not None:
            carried = self.steps.room(torch.float32, 2 * self._carried_rows * (self.D + 1))
        mark = len(self.steps.rooms)
        for chunk, first in enumerate(range(0, count, step)):
            some = min(step, count - first)
            self.steps.reuse(mark)
            pairs = Pairs(at.d_pairs, at.d_pair_offsets) if paired else None
            found = lists(self.steps, at.winners, d, first, some, self.columns, pairs, held.order)
            pieces = self._pieces(found, first, some)
            first_row, rows = 0, d.rows or d.count * d.length
            if not (d.rows or paired):  # a chunk has its own
                first_row, rows = first * d.length, some * d.length
            self._launch(
                out, False, rows, pairs or Pairs(None, None), held.order, holders, found, owner, pieces, carried,
                first, some, chunk, first_row,
            )  # fmt: skip

    def _both_of_few(self, q_out: Slot | None, d_out: Slot) -> None:
        """Of queries, if asked for, and of documents of which few tokens win (`won_rows`)."""
        q, d, at, columns = self.q, self.d, self.at, self.columns
        of_q, of_d = few_won_configs(self.D)
        step = max(1, CHUNK_BYTES // (4 * columns))
        mark = len(self.steps.rooms)
        for first in range(0, d.count, step):
            some = min(step, d.count - first)
            self.steps.reuse(mark)
            order = ranked(self.steps, at.winners, first, some, columns)
            first_row, rows = (0, d.rows) if d.rows else (first * d.length, some * d.length)
            programs = (
                0 if q_out is None else triton.cdiv(self.q_rows, of_q.ROWS),
                triton.cdiv(some * columns, of_d.ROWS), triton.cdiv(rows, FILL.value),
            )  # fmt: skip
            self.steps.launch(
                _few_won_kernel, sum(programs),
                q_out, d_out, at.winners, at.grad, order, q.data, d.data,
                q.starts, q.ends, self.q_owner, d.starts, d.ends, at.q_held, self.q_holders,
                first, some, first_row, rows, self.q_rows, columns, *programs,
                *self.sizes, self.D, *self.grad_strides,
                q.item, q.row, q.col, self.d_group, d.item, d.row, d.col,
                self.grid, self.normalize, of_q.ROWS, of_q.ENTRIES, of_d.ROWS, of_d.ENTRIES, of_d.BLOCK_D,
                num_warps=of_d.num_warps,
            )  # fmt: skip
            q_out = None

    @property
    def _carried_rows(self) -> int:
        """Rows that a chunk may leave to the next: they are those of one document, or begin with one."""
        return min(self.d.length, self.d.rows) if self.d.rows else self.d.length

    def _pieces(self, found: Lists, first: int, some: int) -> Slot | None:
        """Sums of the entries of long rows, PIECE at a time; None where no row can be long."""
        q, d, at, config = self.q, self.d, self.at, self.config
        log2 = config.PIECE.bit_length() - 1
        chunk_log2, counters, spare = found.shape
        entries = some * self.columns
        if at.pairs is None:
            more = (self.columns - 1) >> log2
            programs = some * more
        else:
            more, programs = 0, entries >> log2
        if programs == 0:
            return None
        pieces = self.steps.room(torch.float32, (entries >> log2) * self.D)
        self.steps.launch(
            _piece_kernel, programs,
            pieces, at.winners, at.grad, found.order, found.counters, at.pairs, at.d_pairs, at.d_pair_offsets,
            q.data, q.starts, q.ends, self.q_owner, d.starts, d.ends, at.d_held,
            first, some, d.count, self.columns, more, log2, chunk_log2, counters, spare, *self.sizes, self.D,
            *self.grad_strides, q.item, q.row, q.col,
            self.grid, self.normalize, config.PIECE, config.ENTRIES * config.ROWS, config.BLOCK_D,
            num_warps=config.num_warps,
        )  # fmt: skip
        return pieces

    def _launch(
        self, out: Slot, of_queries: bool, rows: int, pairs: Pairs, held: Slot | None, holders: Slot | None,
        found: Lists | None = None, owner: Slot | None = None, pieces: Slot | None = None, carried: Slot | None = None,
        first: int = 0, some: int = 0, chunk: int = 0, first_row: int = 0,
    ) -> None:  # fmt: skip
        q, d, at, config = self.q, self.d, self.at, self.config
        order, counters, (chunk_log2, of_first, spare) = found or (None, None, (0, 0, 0))
        parts = 1 if found is None else -(-self.columns // SIZE.value)
        self.steps.launch(
            _gradient_kernel, triton.cdiv(rows, config.ROWS),
            out, pieces, carried, None if carried is None else at.d_marks, at.winners, at.grad, order, counters,
            at.pairs, *pairs, q.data, d.data, q.starts, q.ends, self.q_owner, d.starts, d.ends, owner, held, holders,
            at.scales, at.factors,
            first, some, chunk, self._carried_rows, first_row, rows, self.columns, parts, chunk_log2, of_first, spare,
            *self.sizes, self.D, *self.grad_strides,
            q.item, q.row, q.col, self.d_group, d.item, d.row, d.col,
            self.grid, of_queries, self.normalize,
            0 if pieces is None else config.PIECE, config.ROWS, config.ENTRIES, config.BLOCK_D,
            *self.decoder,
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
    if need_queries:
        held = held_of(q)
        if pairs is not None:
            order, offsets, _ = _grouped(pairs[:, 0], q.count)
            tensors = tensors._replace(q_pairs=order, q_pair_offsets=offsets)
        tensors = tensors._replace(q_held=held.order, q_held_starts=held.starts, q_reach=held.reach)
    if need_documents:
        held = held_of(d)
        position = None
        if pairs is not None:
            order, offsets, position = _grouped(pairs[:, 1], d.count, held.order)
            tensors = tensors._replace(d_pairs=order, d_pair_offsets=offsets)
        tensors = tensors._replace(
            d_held=held.order, d_held_starts=held.starts, d_reach=held.reach,
            d_marks=_marks(d, held, position, winners.shape),
        )  # fmt: skip
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


def _grouped(item: Tensor, count: int, order: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs in the order of their items, `[P]`; where each item's begin, `[count + 1]`; and whose each is, `[P]`.
    order: items are counted by their position in it."""
    item = item.clamp(0, count - 1)
    every = torch.arange(count + 1, dtype=item.dtype, device=item.device)
    if order is not None:
        item = torch.empty_like(order).scatter_(0, order, every[:-1])[item]
    item, pairs = item.sort(stable=True)
    return pairs, torch.searchsorted(item, every), item


def _marks(d: Side, held: Held, position: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The first row of the document that each chunk begins with, and one more; None where there is but one chunk, or
    none has rows of another."""
    count = d.count if position is None else shape[0]
    step = _step(d, shape[1], position is not None)
    if count <= step or (held.order is None and position is None):
        return None
    at = torch.arange(0, count + step, step, device=d.data.device).clamp(max=count - 1)
    if position is not None:
        at = position[at]
    if held.starts is not None:
        return cast(Tensor, held.starts[at])
    return at * d.length if d.starts is None else d.starts[at].long().clamp(0, d.rows)
