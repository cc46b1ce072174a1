"""Where the tokens of a corpus live while it is searched, and how a search comes by them: block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..corpus import Coding, Segment, Selection
from ..packed import Packed, Views
from ..quantized import Quantized


class Block(NamedTuple):
    """Documents on the device that scores them, and their positions, int64 `[n]`, which rise."""

    documents: Views | Packed | Quantized
    positions: Tensor


class Home:
    """Files mapped into memory, on the CPU: nothing is copied, and a page is read when it is scored."""

    name = "mapped"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def blocks(self, selection: Selection) -> Iterator[Block]:
        """All documents of a selection, in the order of adding: codes, where the corpus has them."""
        coding = selection.snapshot.coding
        for segment, rows in selection.parts:
            if rows is None or len(rows):
                yield _in_place(coding, segment, rows, False)

    def pick(self, selection: Selection, positions: Tensor, exact: bool) -> Iterator[Block]:
        """Some documents, by their positions, int64 on the CPU, rising; nothing else is read.

        exact: their float copies in place of codes, where there are any.
        """
        coding = selection.snapshot.coding
        for segment, rows in places(selection, positions):
            yield _in_place(coding, segment, rows, exact)


def places(selection: Selection, positions: Tensor) -> Iterator[tuple[Segment, Tensor]]:
    """The segments that hold documents of these positions (rising), with their rows."""
    segments = selection.snapshot.segments
    low = 0
    while low < len(positions):
        segment = segments[selection.snapshot.segment_of(int(positions[low]))]
        high = int(torch.searchsorted(positions, segment.record.last, right=True))
        yield segment, segment.rows(positions[low:high])
        low = high


def _in_place(coding: Coding, segment: Segment, rows: Tensor | None, exact: bool) -> Block:
    starts, lengths = segment.starts, segment.lengths
    if exact and "exact" in segment.tensors:
        if rows is not None:
            starts, lengths = starts[rows], lengths[rows]
        documents: Views | Quantized = Views(segment.tensors["exact"], starts, lengths, max_length=segment.longest)
    else:
        documents = coding.documents(segment.tensors, starts, lengths, segment.longest, rows)
    return Block(documents, segment.positions_of(rows))
