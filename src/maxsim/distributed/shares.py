"""What a rank computes of one block: its scores, and what it adds to the gradients, in float32 or float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import autograd
from ..layout import Problem
from ..result import Scored
from .blocks import Block


@dataclass(frozen=True)
class Shares:
    """The local queries with anyone's documents. Of `problem` all counts but the tokens of the queries and whatever are
    documents."""

    problem: Problem
    backend: str | None

    @property
    def wide(self) -> torch.dtype:
        """Of gradients until they are whole: those of half precision are rounded once, at the end."""
        return self.problem.result_dtype

    def scored(self, queries: Tensor, block: Block, rows: Tensor, winners: bool) -> Scored:
        return autograd.run(self._with(queries, block, rows), self.backend, winners)

    def gradients(
        self, queries: Tensor, block: Block, rows: Tensor, winners: Tensor, grad: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Not rounded."""
        problem = self._with(queries, block, rows)
        return autograd.gradients(problem, winners, grad, self.backend, needed, self.wide)

    def _with(self, queries: Tensor, block: Block, rows: Tensor) -> Problem:
        return replace(self.problem, queries=replace(self.problem.queries, data=queries), documents=block.tokens(rows))
