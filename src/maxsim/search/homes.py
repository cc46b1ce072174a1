"""Where the tokens of a corpus live while it is searched, and how a search comes by them: block by block."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..corpus import Coding, Segment, Selection, gathered
from ..packed import Packed, Views
from ..quantized import Quantized

GROUP_BYTES = 4 << 30  # of neighbouring segments that lie in one buffer: few launches, and little to load again


class Block(NamedTuple):
    """Documents on the device that scores them, and their positions, int64 `[n]`, which rise."""

    documents: Views | Packed | Quantized
    positions: Tensor


class Home:
    """Files mapped into memory, on the CPU: nothing is copied, and a page is read when it is scored.

    `shard` (rank, size): this process' segments are those whose number leaves that rank.
    """

    name = "mapped"

    def __init__(self, device: torch.device, shard: tuple[int, int] = (0, 1)) -> None:
        self.device, self.shard = device, shard
        self._tables: tuple[Coding, Coding] | None = None

    def owns(self, segment: Segment) -> bool:
        return segment.record.belongs(self.shard)

    def parts(self, selection: Selection) -> list[tuple[Segment, Tensor | None]]:
        """What there is to score here."""
        return [(segment, rows) for segment, rows in selection.parts if rows is None or len(rows)]

    def blocks(self, selection: Selection) -> Iterator[Block]:
        """All documents of a selection, in the order of adding: codes, where the corpus has them."""
        coding = selection.snapshot.coding
        for segment, rows in self.parts(selection):
            documents = coding.documents(segment.tensors, segment.offsets, segment.longest, rows)
            yield Block(documents, segment.positions_of(rows))

    def pick(self, selection: Selection, positions: Tensor, exact: bool) -> Iterator[Block]:
        """Some documents, by their positions, int64 on the CPU, rising; nothing else is read.

        exact: their float copies in place of codes, where there are any.
        """
        coding = selection.snapshot.coding
        for segment, rows in selection.snapshot.places(positions):
            starts, lengths = segment.starts, segment.lengths
            if exact and "exact" in segment.tensors:
                copy = segment.tensors["exact"]
                documents: Views | Packed | Quantized = Views(
                    copy, starts[rows], lengths[rows], max_length=segment.longest
                )
            else:
                documents = coding.documents(segment.tensors, segment.offsets, segment.longest, rows)
            yield Block(documents, segment.positions_of(rows))

    def copied(self, selection: Selection, positions: Tensor, exact: bool) -> Iterator[Block]:
        """`pick` of documents that lie elsewhere: they alone are copied to the device, some at a time."""
        coding = self.coding(selection)
        for lot in gathered(selection.snapshot, positions, exact):
            tensors = {name: tensor.to(self.device, non_blocking=True) for name, tensor in lot.tensors.items()}
            places = lot.positions.to(self.device, non_blocking=True)
            if exact and "exact" in tensors:
                yield Block(Packed(tensors["exact"], lot.offsets), places)
            else:
                yield Block(coding.documents(tensors, lot.offsets.to(self.device), lot.longest), places)

    def coding(self, selection: Selection) -> Coding:
        """With its tables on the device."""
        coding = selection.snapshot.coding
        if coding.tables is None or self.device.type == "cpu":
            return coding
        if self._tables is None or self._tables[0].tables is not coding.tables:
            self._tables = coding, dataclasses.replace(coding, tables=coding.tables.to(self.device))
        return self._tables[1]


@dataclasses.dataclass(frozen=True)
class Group:
    """Neighbouring segments in one buffer of the device. `firsts`: the row (document) each begins at, by number, and
    `tokens`: its first token; `count`: all documents."""

    firsts: dict[int, int]
    tokens: list[int]
    count: int
    tensors: dict[str, Tensor]
    offsets: Tensor
    positions: Tensor
    longest: int

    @classmethod
    def of(cls, segments: list[Segment], coding: Coding, device: torch.device) -> Group:
        tokens = [segment.record.tokens for segment in segments]
        firsts, before = dict[int, int](), 0
        for segment in segments:
            firsts[segment.record.number] = before
            before += segment.record.documents
        tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in coding.of_tokens().items():
            if name != "exact":  # of which little is read: from the files
                whole = tensors[name] = torch.empty(sum(tokens), *shape, dtype=dtype, device=device)
                for part, segment in zip(torch.split(whole, tokens), segments, strict=True):
                    part.copy_(segment.tensors[name])
        for name in coding.of_documents():
            tensors[name] = torch.cat([segment.tensors[name] for segment in segments]).to(device)
        lengths = torch.cat([segment.lengths for segment in segments])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        positions = torch.cat([segment.positions_of(None) for segment in segments])
        longest = max(segment.longest for segment in segments)
        begins = [0, *accumulate(tokens)]
        return cls(firsts, begins, before, tensors, offsets.to(device), positions.to(device), longest)

    def part(self, coding: Coding, low: int, high: int) -> Group:
        """Segments low to high alone, in the same memory."""
        bounds = [*self.firsts.values(), self.count]
        first, last, tokens = bounds[low], bounds[high], slice(self.tokens[low], self.tokens[high])
        return Group(
            {number: row - first for number, row in list(self.firsts.items())[low:high]},
            [begin - self.tokens[low] for begin in self.tokens[low : high + 1]],
            last - first,
            {
                name: _aligned(tensor[slice(first, last) if name in coding.of_documents() else tokens])
                for name, tensor in self.tensors.items()
            },
            self.offsets[first : last + 1] - self.tokens[low],
            self.positions[first:last],
            self.longest,
        )


def _aligned(rows: Tensor) -> Tensor:
    """Numbers beside codes where the copy engine takes them from, a copy if need be; codes lie as they do."""
    return rows.clone() if rows.ndim == 1 and rows.data_ptr() % 16 else rows


class Run(NamedTuple):
    """Documents of a group, `rows` None = all."""

    group: Group
    rows: Tensor | None


class Resident(Home):
    """Tokens copied to the device, and scored there in place. Float copies beside codes stay in their files."""

    name = "device"

    def __init__(self, device: torch.device, shard: tuple[int, int] = (0, 1)) -> None:
        super().__init__(device, shard)
        self._lock = threading.Lock()
        self._groups: list[Group] = []
        self._runs: dict[int, tuple[list[Tensor | None], list[Run]]] = {}  # of groups, by their first segment

    def load(self, selection: Selection) -> list[Group]:
        """The groups of a snapshot, in the order of adding; those that did not change stay."""
        segments = [segment for segment in selection.snapshot.segments if self.owns(segment)]
        with self._lock:
            there = {segment.record.number for segment in segments}
            kept = [group for group in self._groups if group.firsts.keys() <= there]
            if len(kept) < len(self._groups):
                self._runs.clear()
            self._groups = []  # what is dropped gives its memory back before more is taken
            held = {number: group for group in kept for number in group.firsts}
            groups, run, size = list[Group](), list[Segment](), 0

            def flush() -> None:
                nonlocal size
                if run:
                    groups.append(Group.of(run, selection.snapshot.coding, self.device))
                run.clear()
                size = 0

            for segment in segments:
                group = held.get(segment.record.number)
                if group is not None:
                    flush()
                    if not groups or groups[-1] is not group:
                        groups.append(group)
                    continue
                if size + segment.record.bytes > GROUP_BYTES:
                    flush()
                run.append(segment)
                size += segment.record.bytes
            flush()
            self._groups = groups
            return groups

    def blocks(self, selection: Selection) -> Iterator[Block]:
        groups = self.load(selection)
        parts = {segment.record.number: (segment, rows) for segment, rows in self.parts(selection)}
        for group in groups:
            mine = [parts.get(number) for number in group.firsts]
            if any(mine):
                coding = self.coding(selection)
                for run in self._runs_of(coding, group, mine):
                    yield self._block(coding, run.group, run.rows)

    def pick(self, selection: Selection, positions: Tensor, exact: bool) -> Iterator[Block]:
        places = list(selection.snapshot.places(positions))
        of_files = exact and selection.snapshot.coding.exact is not None
        if of_files or not all(self.owns(segment) for segment, _ in places):
            yield from self.copied(selection, positions, exact)
            return
        rows: dict[int, list[Tensor]] = {}
        groups = self.load(selection)
        of = {number: n for n, group in enumerate(groups) for number in group.firsts}
        for segment, local in places:
            n = of[segment.record.number]
            rows.setdefault(n, []).append(local + groups[n].firsts[segment.record.number])
        for n, each in rows.items():
            yield self._block(self.coding(selection), groups[n], torch.cat(each).to(self.device))

    def _block(self, coding: Coding, group: Group, rows: Tensor | None) -> Block:
        documents = coding.documents(group.tensors, group.offsets, group.longest, rows)
        return Block(documents, group.positions if rows is None else group.positions[rows])

    def _runs_of(
        self, coding: Coding, group: Group, mine: Sequence[tuple[Segment, Tensor | None] | None]
    ) -> Sequence[Run]:
        """What is asked of a group: neighbouring whole segments as consecutive documents, and rows of others. Those of
        the last search are kept: the same ones, mostly."""
        if all(part is not None and part[1] is None for part in mine):
            return [Run(group, None)]
        key = next(iter(group.firsts))
        asked = [None if part is None else part[1] for part in mine]
        before, runs = self._runs.get(key, ([], []))
        present = all(part is not None for part in mine)
        same = len(before) == len(asked) and all(a is b for a, b in zip(asked, before, strict=True))
        if not same or not present:
            runs, low = [], 0
            for whole, some in groupby(mine, key=lambda part: part is not None and part[1] is None):
                parts = list(some)
                high = low + len(parts)
                if whole:
                    runs.append(Run(group.part(coding, low, high), None))
                elif any(part is not None for part in parts):
                    firsts = list(group.firsts.values())[low:high]
                    rows = [
                        row + part[1] for row, part in zip(firsts, parts, strict=True) if part and part[1] is not None
                    ]
                    runs.append(Run(group, torch.cat(rows).to(self.device)))
                low = high
            if present:
                self._runs[key] = asked, runs
        return runs
