"""Some documents of mapped segments, one after another in new memory: nothing else is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..quantized.codes import rows_of
from .coding import Coding
from .reading import Snapshot
from .segments import Segment

GATHER_BYTES = 64 << 20  # of documents that are gathered together, unless one is larger


class Lot(NamedTuple):
    """Documents: tensors by name as in a segment, offsets int64 `[n + 1]`, positions int64 `[n]`, the longest."""

    tensors: dict[str, Tensor]
    offsets: Tensor
    positions: Tensor
    longest: int


def gathered(snapshot: Snapshot, positions: Tensor, exact: bool) -> Iterator[Lot]:
    """Documents of these positions, int64 and rising, some at a time. exact: float copies in place of codes, where
    there are any."""
    if not len(positions):  # of a codec, perhaps, that is not trained
        return
    coding = snapshot.coding
    names = list(coding.of_tokens())
    if "exact" in names:
        names = ["exact"] if exact else [name for name in names if name != "exact"]
    row_bytes = coding.dim * 4
    held: list[tuple[Segment, Tensor]] = []
    size = 0
    for segment, rows in snapshot.places(positions):
        before = segment.lengths[rows].cumsum(0) * row_bytes
        low = 0
        while low < len(rows):
            done = int(before[low - 1]) if low else 0
            high = int(torch.searchsorted(before, done + GATHER_BYTES - size, right=True))
            if high <= low and held:
                yield join(coding, held, names)
                held, size = [], 0
                continue
            high = max(high, low + 1)
            held.append((segment, rows[low:high]))
            size += int(before[high - 1]) - done
            low = high
    if held:
        yield join(coding, held, names)


def join(coding: Coding, held: Sequence[tuple[Segment, Tensor]], names: Iterable[str]) -> Lot:
    """Rows (documents) of segments, with these tensors of tokens; tensors of documents where there are codes."""
    tokens = []
    for segment, rows in held:
        starts = segment.starts[rows]
        tokens.append(rows_of(starts, starts + segment.lengths[rows]))
    tensors = {
        name: joined([_rows(segment.tensors[name], own) for (segment, _), own in zip(held, tokens, strict=True)])
        for name in names
    }
    if "codes" in tensors:
        for name in coding.of_documents():
            tensors[name] = torch.cat([segment.tensors[name][rows] for segment, rows in held])
    lengths = torch.cat([segment.lengths[rows] for segment, rows in held])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    positions = torch.cat([segment.positions_of(rows) for segment, rows in held])
    return Lot(tensors, offsets, positions, max(segment.longest for segment, _ in held))


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    if tensor.dtype == torch.float8_e4m3fn:  # which not every PyTorch can index
        return tensor.view(torch.uint8)[rows].view(tensor.dtype)
    return tensor[rows]


def joined(tensors: list[Tensor]) -> Tensor:
    """One after another in new memory, as bytes: autocast would change floats, not every PyTorch can join float8."""
    return torch.cat([each.view(torch.uint8) for each in tensors]).view(tensors[0].dtype)
