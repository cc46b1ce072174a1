"""Launches that were compiled once, to be repeated for tensors like those they were made for."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Repeatable(Protocol):
    """Scores other tensors of the same shapes, strides, dtypes and alignment."""

    def repeat(self, queries: Tensor, documents: Tensor, target: Tensor) -> None: ...


class Launch(NamedTuple):
    """One launch of a forward."""

    kernel: Any  # triton's CompiledKernel; None under the interpreter
    blocks: tuple[int, int, int]
    arguments: tuple[Any, ...]

    def repeat(self, queries: Tensor, documents: Tensor, target: Tensor) -> None:
        self.kernel[self.blocks](queries, documents, target, *self.arguments)


class InParts(NamedTuple):
    """A forward of long queries, and the launch that adds up what it finds for their blocks."""

    forward: Repeatable
    sums: int  # how many it finds
    total: Launch

    def repeat(self, queries: Tensor, documents: Tensor, target: Tensor) -> None:
        sums = torch.empty(self.sums, dtype=torch.float32, device=documents.device)
        self.forward.repeat(queries, documents, sums)
        self.total.kernel[self.total.blocks](sums, target, *self.total.arguments)
