"""Portable backward. The terms of a query token are found by arithmetic: it meets each of its query's documents once.
Those of a document token are listed (`lists`), and programs that own rows add them up (`gradient_rows`). A row of more
than PIECE entries would keep one program busy: others sum up all pieces but the first beforehand. Rows that several
items may hold (Views) have their terms listed by a sort of all winners.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import GradientConfig, gradient_config
from .gradient_rows import COMMON, TABLES, _gradient_kernel, _piece_kernel
from .lists import SIZE, Lists, lists, won_by
from .sides import Side, span

CHUNK_BYTES = 256 << 20  # lists held at once


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


class _Backward:
    """One call of `gradients`: what its launches share."""

    def __init__(
        self, q: Side, d: Side, winners: Tensor, grad: Tensor, pairs: Tensor | None, per_query: int, normalize: bool
    ):
        self.q, self.d, self.winners, self.grad, self.pairs = q, d, winners, grad, pairs
        self.grid = pairs is None and not per_query
        self.K = max(per_query, 1)
        self.normalize = normalize
        self.columns = winners.shape[1]
        self.q_owner = _owners(q) if q.consecutive else None
        self.config: GradientConfig = gradient_config(q.data.shape[-1])
        self.sizes = (self.K, q.count, d.count, max(q.length, 1), max(d.length, 1), q.rows, d.rows)
        self.grad_strides = grad.stride() if self.grid else (grad.stride(0), 0)

    def queries(self) -> Tensor:
        q, out = self.q, torch.empty(self.q.data.shape, dtype=self.q.data.dtype, device=self.q.data.device)
        if q.starts is not None and not q.consecutive:
            self._launch(out, True, q.rows, sorted=self._sorted(True, q.rows))
        else:
            pairs = None if self.pairs is None else _grouped(self.pairs[:, 0], q.count)
            self._launch(out, True, q.rows or q.count * q.length, pair_lists=pairs)
        return out

    def documents(self) -> Tensor:
        d, out = self.d, torch.empty(self.d.data.shape, dtype=self.d.data.dtype, device=self.d.data.device)
        rows = d.rows or d.count * d.length
        if rows == 0:
            return out
        if d.starts is not None and not d.consecutive:
            self._launch(out, False, rows, sorted=self._sorted(False, rows))
            return out
        owner = _owners(d) if d.consecutive else None
        if self.pairs is not None:
            of_pairs = _grouped(self.pairs[:, 1], d.count)
            self._launch(
                out, False, rows, found=lists(self.winners, d, 0, d.count, *of_pairs), owner=owner, some=d.count
            )
            return out
        step = max(1, CHUNK_BYTES // (4 * max(self.columns + (0 if d.rows else d.length), 1)))
        for first in range(0, d.count, step):
            some = min(step, d.count - first)
            found = lists(self.winners, d, first, some, None, None)
            pieces = self._pieces(found, first, some) if self.columns > self.config.PIECE else None
            self._launch(
                out, False, d.rows or some * d.length, found=found, owner=owner, pieces=pieces, first=first, some=some
            )  # fmt: skip
        return out

    def _pieces(self, found: Lists, first: int, some: int) -> Tensor:
        q, d, config = self.q, self.d, self.config
        D = q.data.shape[-1]
        per_list = self._per_list()
        programs = some * found.parts * per_list
        pieces = torch.empty(programs * D, dtype=torch.float32, device=d.data.device)
        _piece_kernel[(programs,)](
            pieces, self.winners, self.grad, found.order, found.counters,
            q.data, q.starts, q.ends, self.q_owner, d.starts, d.ends,
            first, d.rows or some * d.length, self.columns, found.parts, found.chunks, per_list, *self.sizes, D,
            *self.grad_strides, q.item, q.row, q.col,
            GRID=self.grid, NORMALIZE=self.normalize, PIECE=config.PIECE, ENTRIES=config.ENTRIES * config.ROWS,
            BLOCK_D=config.BLOCK_D, num_warps=config.num_warps,
        )  # fmt: skip
        return pieces

    def _per_list(self) -> int:
        return -(-min(self.columns, int(SIZE.value)) // self.config.PIECE)

    def _launch(
        self,
        out: Tensor,
        of_queries: bool,
        rows: int,
        sorted: tuple[Tensor, Tensor] | None = None,
        pair_lists: tuple[Tensor, Tensor] | None = None,
        found: Lists | None = None,
        owner: Tensor | None = None,
        pieces: Tensor | None = None,
        first: int = 0,
        some: int = 0,
    ) -> None:
        if rows == 0:
            return
        q, d, config = self.q, self.d, self.config
        if found is None:
            every, past = sorted or (None, None)
            pair_order, pair_offsets = pair_lists or (None, None)
            found = Lists(every, past, 1, 1, pair_order, pair_offsets)
        order, counters, parts, chunks, *of_pairs = found
        # documents of a query, one after another; else they lie in groups
        d_group = d.group if d.data.ndim == 4 else self.K * d.item
        _gradient_kernel[(triton.cdiv(rows, config.ROWS),)](
            out, pieces, self.winners, self.grad, order, counters, self.pairs, *of_pairs, q.data, d.data,
            q.starts, q.ends, self.q_owner, d.starts, d.ends, owner,
            first, some, 0 if d.rows else first * d.length, rows, self.columns, parts, chunks, self._per_list(),
            *self.sizes, q.data.shape[-1], *self.grad_strides,
            q.item, q.row, q.col, d_group, d.item, d.row, d.col,
            GRID=self.grid, OF_QUERIES=of_queries, SORTED=sorted is not None, NORMALIZE=self.normalize,
            PIECE=0 if pieces is None else config.PIECE, ROWS=config.ROWS, ENTRIES=config.ENTRIES,
            BLOCK_D=config.BLOCK_D, num_warps=config.num_warps,
        )  # fmt: skip

    def _sorted(self, of_queries: bool, rows: int) -> tuple[Tensor, Tensor]:
        """All winners in the order of the rows that their terms belong to, and where each row's end."""
        count = self.winners.numel()
        keys = torch.empty(count, dtype=torch.int32 if rows < 2**31 - 1 else torch.int64, device=self.winners.device)
        _keys_kernel[(triton.cdiv(count, 1024),)](
            keys, self.winners, self.pairs, self.q.starts, self.q.ends, self.q_owner, self.d.starts, self.d.ends,
            count, self.columns, *self.sizes, rows, GRID=self.grid, OF_QUERIES=of_queries, BLOCK=1024,
        )  # fmt: skip
        keys, order = keys.sort(stable=True)
        every = torch.arange(rows, dtype=keys.dtype, device=keys.device)
        return order, torch.searchsorted(keys, every, right=True)


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
    backward = _Backward(q, d, winners, grad, pairs, per_query, normalize)
    return backward.queries() if need_queries else None, backward.documents() if need_documents else None


def _owners(side: Side) -> Tensor:
    """For consecutive items the one that holds each token row, int32 `[T]`, −1: none."""
    owners = torch.empty(side.rows, dtype=torch.int32, device=side.data.device)
    if side.rows:
        _owners_kernel[(triton.cdiv(side.rows, 256),)](
            owners, side.starts, side.ends, side.count, side.rows, side.count.bit_length(), BLOCK=256
        )
    return owners


def _grouped(item: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their items, and where each item's begin: `[P]` and `[count + 1]`."""
    item, order = item.clamp(0, count - 1).sort(stable=True)
    every = torch.arange(count + 1, dtype=item.dtype, device=item.device)
    return order, torch.searchsorted(item, every)
