"""Which items hold each token row: of consecutive items one, of others those at some positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launches import Slot, Steps
from .sides import Side

SIZES = ("count", "rows", "steps")


@triton.jit
def _first_beyond(values, row, count, steps):
    """How many of rising values are not beyond each row."""
    low = (row * 0).to(tl.int32)
    high = low + count
    for _ in range(steps):  # of a binary search
        middle = (low + high) // 2
        searched = low < high
        beyond = tl.load(values + middle, mask=searched, other=0) > row
        high = tl.where(searched & beyond, middle, high)
        low = tl.where(searched & (beyond == 0), middle + 1, low)
    return low


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=("starts", "ends"))
def _owners_kernel(found, starts, ends, count, rows, steps, BLOCK: tl.constexpr):
    """Which of consecutive items holds each row, −1: none."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = _first_beyond(ends, row, count, steps)
    start = tl.load(starts + low, mask=low < count, other=0)
    tl.store(found + row, tl.where((low < count) & (row >= start), low, -1), mask=row < rows)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=("starts", "reach"))
def _holders_kernel(holders, starts, reach, count, rows, steps, BLOCK: tl.constexpr):
    """Which items may hold each row, by position, of items in the order in which they begin: the first to end after it,
    and one past the last to begin before. reach: where the items up to a position end at most."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(holders + row, _first_beyond(reach, row, count, steps), mask=row < rows)
    tl.store(holders + rows + row, _first_beyond(starts, row, count, steps), mask=row < rows)


class Held(NamedTuple):
    """Items that may overlap, in the order in which they begin; where those begin, and where those so far end at
    most."""

    order: Any = None
    starts: Any = None
    reach: Any = None


def owners(steps: Steps, side: Side) -> Slot:
    """For consecutive items the one that holds each token row, int32 `[T]`, −1: none."""
    return _searched(steps, side, _owners_kernel, side.rows, side.starts, side.ends)


def holders_of(steps: Steps, side: Side, held: Held) -> Slot | None:
    """For items that may overlap the positions of those that may hold each token row, int32 `[2, T]`: the first, and
    one past the last."""
    if held.order is None:
        return None
    return _searched(steps, side, _holders_kernel, 2 * side.rows, held.starts, held.reach)


def _searched(steps: Steps, side: Side, kernel: Any, size: int, starts: Any, ends: Any) -> Slot:
    """What a kernel finds for each token row: int32, `size` numbers."""
    found = steps.room(torch.int32, size)
    if side.rows:
        steps.launch(
            kernel, triton.cdiv(side.rows, 256),
            found, starts, ends, side.count, side.rows, side.count.bit_length(), 256,
        )  # fmt: skip
    return found


def held_of(side: Side) -> Held:
    """Items that may overlap in the order in which they begin; of others nothing."""
    if side.starts is None or side.ends is None or side.consecutive:
        return Held()
    starts = side.starts.long().clamp(0, side.rows)
    ends = torch.minimum(side.ends.long().clamp(max=side.rows), starts + side.length)
    starts, order = starts.sort(stable=True)
    return Held(order, starts, ends[order].cummax(0).values)
