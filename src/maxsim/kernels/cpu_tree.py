"""Sums over query tokens as a tree of adjacent pairs, the same bits whatever else is summed beside.

The tree of a query depends on the number of its values alone: a value without a partner goes up as it is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Tree:
    """Sums of `counts[n]` values each, which follow one another."""

    def __init__(self, counts: np.ndarray):
        self.items, self.total = len(counts), int(counts.sum())
        self.each = self.total // self.items
        self.levels = [] if bool((counts == self.each).all()) else _levels(counts)

    def sums(self, values: Tensor) -> Tensor:
        """`[total, n]` → `[items, n]`."""
        if self.levels:
            for left, right in self.levels:
                padded = torch.cat([values, values.new_zeros(1, values.shape[1])])
                values = padded.index_select(0, left).add_(padded.index_select(0, right))
            return values
        if not self.total:
            return values.new_zeros(self.items, values.shape[1])
        values = values.reshape(self.items, self.each, -1)
        while (count := values.shape[1]) > 1:
            even = values[:, : count // 2 * 2]
            added = even.unflatten(1, (-1, 2)).sum(2)
            values = torch.cat([added, values[:, -1:]], 1) if count % 2 else added
        return values[:, 0] + 0.0  # −0 becomes 0, as in the sums above


def _levels(counts: np.ndarray) -> list[tuple[Tensor, Tensor]]:
    """Which rows to add at each level, one past the last standing for zero. The last level leaves one row an item."""
    levels = []
    while True:
        total = int(counts.sum())
        after = np.maximum((counts + 1) // 2, 1)
        start = np.repeat(np.cumsum(counts) - counts, after)
        position = np.arange(int(after.sum())) - np.repeat(np.cumsum(after) - after, after)
        owned = np.repeat(counts, after)
        left = np.where(2 * position < owned, start + 2 * position, total)
        right = np.where(2 * position + 1 < owned, start + 2 * position + 1, total)
        levels.append((torch.from_numpy(left), torch.from_numpy(right)))
        counts = after
        if after.max() == 1:
            return levels
