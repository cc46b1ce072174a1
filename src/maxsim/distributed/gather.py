"""`method="gather"`: every rank has all documents at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import Block, merged
from .shares import Shares
from .talk import Step, Talk


class Gather:
    """One call's transport: all documents come, one launch scores them, and what each rank adds to their gradients
    goes home in one exchange."""

    def __init__(self, talk: Talk, shares: Shares, blocks: Sequence[Block], device: torch.device):
        self.talk, self.shares = talk, shares
        self.whole = merged(blocks, device)
        self.sizes = [block.rows * block.width for block in blocks]

    def forward(self, queries: Tensor, own: Tensor, winners: bool) -> tuple[Tensor, list[Tensor]]:
        """The scores, and what the backward reads."""
        with self.talk.together(Step.READY):
            rows = own.new_empty(sum(self.sizes))
        self.talk.gather(own, self.sizes, rows)
        with self.talk.together(Step.SCORED):
            found = self.shares.scored(queries, self.whole, rows, winners)
        return found.scores, [] if found.winners is None else [rows, found.winners]

    def backward(
        self, queries: Tensor, own: Tensor, kept: Sequence[Tensor], grad: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the queries and of the own documents' rows, flat."""
        rows, winners = kept
        owners = [bool(need) for _, need in self.talk.agree(Step.BACKWARD, needed)]
        sizes = [size * need for size, need in zip(self.sizes, owners, strict=True)]
        mine = sizes[self.talk.rank]
        with self.talk.together(Step.GRADIENTS):
            of_queries, of_rows = self.shares.gradients(
                queries, self.whole, rows, winners, grad, (needed[0], any(sizes))
            )
            if of_queries is not None:
                of_queries = of_queries.to(queries.dtype)
            sent = rows.new_empty(0, dtype=self.shares.wide) if of_rows is None else of_rows.view(-1)
            if sum(sizes) < sent.numel():
                parts = torch.split(sent, self.sizes)
                sent = torch.cat([part for part, need in zip(parts, owners, strict=True) if need])
            came = rows.new_empty(self.talk.size, mine, dtype=self.shares.wide)
        if sent.numel():
            self.talk.scatter(sent, sizes, came)
        if not needed[1]:
            return of_queries, None
        # in the order that blocks travel around a ring, so that both methods give the same bits
        total = came[self.talk.rank]
        for step in range(1, self.talk.size):
            total += came[(self.talk.rank + step) % self.talk.size]
        return of_queries, total.to(own.dtype)
