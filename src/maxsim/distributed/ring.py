"""`method="ring"`: documents pass by, a rank's at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .blocks import Block, Exchange, Facts, sizes_of
from .shares import Shares
from .talk import Shift, Step, Talk


class Ring:
    """One call's transport: at step k a rank scores the documents of the rank k before it while the next ones come. The
    backward passes them again, each followed by its gradient, to which every rank adds, until it is home."""

    def __init__(self, talk: Talk, shares: Shares, facts: Facts):
        self.talk, self.shares, self.facts = talk, shares, facts
        self.sizes = sizes_of(facts, shares.problem)
        self.counts = [count for count, *_ in facts]
        self.ends = list(accumulate(self.counts))
        self.blocks: list[Block] = []

    def _owner(self, step: int) -> int:
        return (self.talk.rank - step) % self.talk.size

    def _columns(self, owner: int) -> slice:
        return slice(self.ends[owner] - self.counts[owner], self.ends[owner])

    def _rooms(self, own: Tensor) -> list[Tensor]:
        """Two, for what is at hand and what comes."""
        return [own.new_empty(max(self.sizes)) for _ in range(min(2, self.talk.size - 1))]

    def forward(self, queries: Tensor, documents: Tensor, winners: bool) -> tuple[Tensor, list[Tensor]]:
        """The scores, and what the backward reads: the winners, a block at a time, own documents first."""
        with self.talk.together(Step.READY):
            own = documents.reshape(-1)
            exchange = Exchange(self.facts, self.shares.problem)
            self.blocks = exchange.blocks
            rooms, nothing = self._rooms(own), self.talk.nothing(own)
            shape = (self.shares.problem.queries.count, self.ends[-1])
            scores = own.new_empty(shape, dtype=self.shares.wide)
        exchange.run(self.talk)
        kept: list[Tensor] = []
        failure: Exception | None = None
        rows = own
        for step in range(self.talk.size):
            coming = self._next(step, rows, rooms, nothing)
            if failure is None:  # a rank that has failed passes on what others need
                try:
                    owner = self._owner(step)
                    found = self.shares.scored(queries, self.blocks[owner], rows, winners)
                    scores[:, self._columns(owner)] = found.scores
                    kept += [] if found.winners is None else [found.winners]
                except Exception as error:
                    failure = error
            if coming is not None:
                rows = coming.wait()
        self.talk.agree(Step.SCORED, error=failure)
        return scores, kept if winners else []

    def _next(self, step: int, rows: Tensor, rooms: Sequence[Tensor], nothing: Tensor) -> Shift | None:
        """Starts the transfer of the next step's documents; None at the last step."""
        if step + 1 == self.talk.size:
            return None
        return self.talk.shift(rows, rooms[step % 2][: self.sizes[self._owner(step + 1)]], nothing)

    def backward(
        self, queries: Tensor, documents: Tensor, kept: Sequence[Tensor], grad: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the queries and of the own documents' rows, flat."""
        owners = [bool(need) for _, need in self.talk.agree(Step.BACKWARD, needed)]
        sizes = [size * need for size, need in zip(self.sizes, owners, strict=True)]
        wide = self.shares.wide
        with self.talk.together(Step.READY):
            own = documents.reshape(-1)
            rooms, nothing = self._rooms(own), self.talk.nothing(own)
            sums = [own.new_empty(max(sizes), dtype=wide) for _ in range(2)]
            of_queries = torch.zeros(queries.shape, dtype=wide, device=queries.device) if needed[0] else None
            rows, total = own, sums[1][: sizes[self.talk.rank]].zero_()
        failure: Exception | None = None
        gradient: Shift | None = None
        for step in range(self.talk.size):
            owner = self._owner(step)
            coming = self._next(step, rows, rooms, nothing)
            more: tuple[Tensor | None, Tensor | None] = (None, None)
            if failure is None:
                try:
                    more = self.shares.gradients(
                        queries,
                        self.blocks[owner],
                        rows,
                        kept[step],
                        grad[:, self._columns(owner)],
                        (needed[0], owners[owner]),
                    )
                    if of_queries is not None and more[0] is not None:
                        of_queries += more[0]
                except Exception as error:
                    failure = error
            if gradient is not None:
                total = gradient.wait()
            if more[1] is not None:
                total += more[1].view(-1)
            del more
            gradient = self.talk.shift(total, sums[step % 2][: sizes[self._owner(step + 1)]], nothing)
            if coming is not None:
                rows = coming.wait()
        if gradient is not None:
            total = gradient.wait()
        with self.talk.together(Step.GRADIENTS):
            if failure is not None:
                raise failure
            return (
                None if of_queries is None else of_queries.to(queries.dtype),
                total.to(own.dtype) if needed[1] else None,
            )
