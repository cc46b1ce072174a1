"""The documents of one rank as the others know them: what they are, and a `Tokens` of any copy of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..layout import Problem, Tokens
from .talk import Talk

Facts: TypeAlias = Sequence[Sequence[int]]  # of each rank (`facts_of`)


@dataclass(frozen=True)
class Block:
    """count, rows: documents and rows of token data. length: of every document where they are padded, else −1. mask:
    `[rows]` or None. starts, ends: of ragged documents."""

    count: int
    rows: int
    width: int
    length: int
    max_length: int
    consecutive: bool
    starts: Tensor | None = None
    ends: Tensor | None = None
    mask: Tensor | None = None

    def tokens(self, rows: Tensor) -> Tokens:
        """With the rows given, flat."""
        if self.starts is not None:
            data = rows.view(self.rows, self.width)
            return Tokens(data, self.count, self.max_length, self.starts, self.ends, self.consecutive, self.mask)
        shape = (self.count, self.length)
        mask = None if self.mask is None else self.mask.view(shape)
        return Tokens(rows.view(*shape, self.width), self.count, self.length, mask=mask)

    def ragged(self, max_length: int, device: torch.device) -> Block:
        """The same documents as items of a stream."""
        if self.starts is not None:
            return replace(self, max_length=max_length)
        starts = torch.arange(self.count, device=device) * self.length
        return replace(
            self, length=-1, max_length=max_length, consecutive=True, starts=starts, ends=starts + self.length
        )


def facts_of(problem: Problem) -> list[int]:
    """What a rank tells of its documents: with `Exchange` all that others need to know."""
    d = problem.documents
    rows = d.data.numel() // d.width
    length = -1 if d.ragged else d.max_length
    return [d.count, rows, length, d.max_length, int(d.consecutive), int(d.mask is not None)]


def sizes_of(facts: Facts, problem: Problem) -> list[int]:
    """Elements of each rank's token data."""
    return [rows * problem.documents.width for _, rows, *_ in facts]


class Exchange:
    """The blocks of all ranks, from their facts, and where to their masks (a byte a token) and places (16 bytes a
    document) come: `run` is a collective that allocates nothing."""

    def __init__(self, facts: Facts, problem: Problem):
        d = problem.documents
        self._mask_sizes = [rows * masked for _, rows, _, _, _, masked in facts]
        self._place_sizes = [2 * count if length < 0 else 0 for count, _, length, _, _, _ in facts]
        self._mask = d.data.new_empty(0, dtype=torch.bool) if d.mask is None else d.mask.reshape(-1)
        self._places = d.data.new_empty(0, dtype=torch.int64)
        if d.starts is not None and d.ends is not None:
            self._places = torch.cat((d.starts.long(), d.ends.long()))
        self._masks = self._mask.new_empty(sum(self._mask_sizes))
        self._all_places = self._places.new_empty(sum(self._place_sizes))
        masks = torch.split(self._masks, self._mask_sizes)
        places = torch.split(self._all_places, self._place_sizes)
        self.blocks: list[Block] = []
        for (count, rows, length, max_length, consecutive, masked), kept, place in zip(
            facts, masks, places, strict=True
        ):
            starts, ends = (place[:count], place[count:]) if length < 0 else (None, None)
            mask = kept if masked else None
            self.blocks.append(Block(count, rows, d.width, length, max_length, bool(consecutive), starts, ends, mask))

    def run(self, talk: Talk) -> None:
        """Fills masks and places of the blocks."""
        talk.gather(self._mask, self._mask_sizes, self._masks)
        talk.gather(self._places, self._place_sizes, self._all_places)


def merged(blocks: Sequence[Block], device: torch.device) -> Block:
    """One block of all documents, whose rows are all rows in rank order."""
    held = [block for block in blocks if block.count or block.rows]
    lengths = {block.length for block in held}
    count, rows, width = sum(block.count for block in blocks), sum(block.rows for block in blocks), blocks[0].width
    starts = ends = mask = None
    length = lengths.pop() if len(lengths) == 1 else -1
    longest = max((block.max_length for block in held), default=0)
    if length < 0:
        blocks = [block.ragged(longest, device) for block in blocks]
        bases = [sum(block.rows for block in blocks[:rank]) for rank in range(len(blocks))]
        starts = torch.cat(
            [base + block.starts for base, block in zip(bases, blocks, strict=True) if block.starts is not None]
        )
        ends = torch.cat(
            [base + block.ends for base, block in zip(bases, blocks, strict=True) if block.ends is not None]
        )
    if any(block.mask is not None for block in blocks):
        mask = torch.cat(
            [
                torch.ones(block.rows, dtype=torch.bool, device=device) if block.mask is None else block.mask
                for block in blocks
            ]
        )
    consecutive = length < 0 and all(block.consecutive for block in blocks)
    return Block(count, rows, width, length, longest, consecutive, starts, ends, mask)
