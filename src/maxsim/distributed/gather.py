"""`method="gather"`: every rank has all documents at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

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
        self.whole, self.blocks = merged(blocks, device)
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
        of_queries, mine = None, sizes[self.talk.rank]
        with self.talk.together(Step.GRADIENTS):
            if needed[0]:
                of_queries, _ = self.shares.gradients(queries, self.whole, rows, winners, grad, (True, False))
            sent = rows.new_empty(sum(sizes), dtype=self.shares.wide)
            came = rows.new_empty(self.talk.size, mine, dtype=self.shares.wide)
            self._add_up(torch.split(sent, sizes), queries, rows, winners, grad)
        if sent.numel():
            self.talk.scatter(sent, sizes, came)
        if not needed[1]:
            return of_queries, None
        # in the order that blocks travel around a ring, so that both methods give the same bits
        total = came[self.talk.rank]
        for step in range(1, self.talk.size):
            total += came[(self.talk.rank + step) % self.talk.size]
        return of_queries, total.to(own.dtype)

    def _add_up(self, parts: Sequence[Tensor], queries: Tensor, rows: Tensor, winners: Tensor, grad: Tensor) -> None:
        """What this rank's scores add to the gradient of each rank's documents."""
        wide = self.shares.wide
        queries = queries.to(wide)
        ends = list(accumulate(block.count for block in self.blocks))
        for part, block, share, end in zip(parts, self.blocks, torch.split(rows, self.sizes), ends, strict=True):
            if part.numel():
                at = slice(end - block.count, end)
                _, found = self.shares.gradients(
                    queries, block, share.to(wide), winners[at], grad[:, at], (False, True)
                )
                assert found is not None
                part.copy_(found.view(-1))
