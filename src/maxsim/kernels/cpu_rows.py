"""Token rows in the dtype of the arithmetic, a block at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .cpu_product import LEAST
from .cpu_threads import Scratch


class Rows:
    """Rows of `data` `[..., D]` (any strides), numbered as those of `[rows, D]`, as `dtype`, unit vectors where
    asked."""

    decode: Callable[[Tensor | slice], Tensor] | None = None
    weight: Tensor | None = None  # of each row, for what multiplies its similarities

    def __init__(self, data: Tensor, dtype: torch.dtype, normalize: bool):
        self.data, self.dtype, self.normalize = data, dtype, normalize
        self.count, self.width = data.shape[:-1].numel(), data.shape[-1]
        self.flat = _flat(data)
        self.in_place = (  # a matrix product can read the rows where they are
            self.flat is not None
            and data.dtype == dtype
            and not normalize
            and (self.width == 1 or self.flat.stride(1) == 1)
            and (self.flat.shape[0] <= 1 or self.flat.stride(0) >= self.width)
        )

    @classmethod
    def decoded(
        cls,
        count: int,
        width: int,
        decode: Callable[[Tensor | slice], Tensor],
        dtype: torch.dtype,
        weight: Tensor | None = None,
    ) -> Rows:
        """`count` rows that `decode` makes of their numbers, `[m, width]`, whenever they are read."""
        made = cls(torch.empty(0, width, dtype=dtype, device="cpu"), dtype, False)
        made.count, made.decode, made.weight, made.in_place = count, decode, weight, False
        return made

    def weights(self, rows: np.ndarray | slice) -> Tensor | None:
        """`[m, 1]` in the dtype of the arithmetic, None where rows have none."""
        if self.weight is None:
            return None
        return self.weight[rows if isinstance(rows, slice) else torch.from_numpy(rows), None].to(self.dtype)

    def block(self, rows: np.ndarray | slice, scratch: Scratch, least: int = LEAST) -> Tensor:
        """→ `[max(m, least), D]`, rows past m zero: a view where it can be, else in the scratch."""
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if isinstance(rows, slice) and self.in_place and self.flat is not None and count >= least:
            return self.flat[rows]
        out = scratch.take("rows", (max(count, least), self.width), self.dtype)
        self.read(rows, out[:count])
        out[count:] = 0
        if self.normalize:
            out /= norms(out)
        return out

    def table(self, rows: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """A contiguous table `[_, D]` that holds all of `rows`, and where in it each of them is."""
        if self.in_place and self.flat is not None and self.flat.is_contiguous():
            return self.flat, rows
        needed, where = np.unique(rows, return_inverse=True)
        return self.block(needed, Scratch(), 2), where

    def read(self, rows: np.ndarray | slice, out: Tensor) -> None:
        """Copies rows as they are into `out` `[m, D]`."""
        if self.decode is not None:
            out.copy_(self.decode(rows if isinstance(rows, slice) else torch.from_numpy(rows)))
        elif self.flat is None:
            index = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            places = np.unravel_index(index, self.data.shape[:-1])
            out.copy_(self.data[tuple(torch.from_numpy(place) for place in places)])
        elif isinstance(rows, slice):
            out.copy_(self.flat[rows])
        elif self.flat.dtype == out.dtype:
            torch.index_select(self.flat, 0, torch.from_numpy(rows), out=out)
        else:
            out.copy_(self.flat.index_select(0, torch.from_numpy(rows)))


def consecutive(index: np.ndarray) -> np.ndarray | slice:
    """Rising by one each, as a slice: read and written in place."""
    if len(index) == 0:
        return slice(0, 0)
    low, high = int(index[0]), int(index[-1]) + 1
    return slice(low, high) if high - low == len(index) and bool((np.diff(index) == 1).all()) else index


def norms(rows: Tensor) -> Tensor:
    """`[m, D]` → the divisors that make unit vectors, `[m, 1]`; a zero row stays zero."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return lengths.clamp_min_(1e-12)


def _flat(data: Tensor) -> Tensor | None:
    try:
        return data.view(-1, data.shape[-1])
    except RuntimeError:  # strides that no single row stride describes
        return None
