"""`method="gather"`: every rank has all documents at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import Block, Exchange, Facts, merged, sizes_of
from .shares import Shares
from .talk import Step, Talk


class Gather:
    """One call's transport: all documents come, one launch scores them, and what each rank adds to their gradients
    goes home in one exchange."""

    def __init__(self, talk: Talk, shares: Shares, facts: Facts):
        self.talk, self.shares, self.facts = talk, shares, facts
        self.sizes = sizes_of(facts, shares.problem)
        self.whole: Block | None = None

    def forward(self, queries: Tensor, documents: Tensor, winners: bool) -> tuple[Tensor, list[Tensor]]:
        """The scores, and what the backward reads."""
        with self.talk.together(Step.READY):
            own = documents.reshape(-1)
            exchange = Exchange(self.facts, self.shares.problem)
            rows = own.new_empty(sum(self.sizes))
        exchange.run(self.talk)
        self.talk.gather(own, self.sizes, rows)
        with self.talk.together(Step.SCORED):
            self.whole = merged(exchange.blocks, rows.device)
            found = self.shares.scored(queries, self.whole, rows, winners)
        return found.scores, [] if found.winners is None else [rows, found.winners]

    def backward(
        self, queries: Tensor, documents: Tensor, kept: Sequence[Tensor], grad: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the queries and of the own documents' rows, flat."""
        rows, winners = kept
        assert self.whole is not None
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
            total = came[self.talk.rank]
            home = total if total.dtype == documents.dtype else torch.empty_like(total, dtype=documents.dtype)
        if sent.numel():
            self.talk.scatter(sent, sizes, came)
        if not needed[1]:
            return of_queries, None
        # in the order that blocks travel around a ring, so that both methods give the same bits
        for step in range(1, self.talk.size):
            total += came[(self.talk.rank + step) % self.talk.size]
        return of_queries, total if home is total else home.copy_(total)
