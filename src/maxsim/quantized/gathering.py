"""Many short rows out of a small table."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

WIDE = {4: torch.float32, 8: torch.float64, 16: torch.complex128}  # bytes of an element


def gathered(table: Tensor, rows: Tensor) -> Tensor:
    """float32 `[n, d]`, contiguous, and int32 `[m]` → `[m, d]`. A row that is as wide as an element of some dtype is
    moved as one, which takes a third of the time (4 floats, one thread of an AMD EPYC, Zen 3: 1.0 ns for 3.6)."""
    wide = WIDE.get(4 * table.shape[1])
    if wide is None:
        return embedding(rows, table)
    if table.data_ptr() % wide.itemsize:  # as in a mapped file; PyTorch moves wide elements as if none did
        table = table.clone()
    return table.view(wide).view(-1).index_select(0, rows).view(torch.float32).view(-1, table.shape[1])
