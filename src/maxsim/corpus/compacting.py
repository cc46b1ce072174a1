"""Compaction: segments without their deleted documents, and small neighbours in one file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import torch

from . import rows as sql
from . import segments
from .coding import Coding
from .gathering import join
from .reading import Snapshot
from .rows import SegmentRecord
from .segments import Segment, write_segment


def compact(db: sqlite3.Connection, folder: Path, snapshot: Snapshot) -> tuple[list[SegmentRecord], int]:
    """Writes what takes the place of segments, inside a transaction. Returns the segments that are no more, whose files
    go after the commit, and how many bytes fewer there are."""
    removed, freed = list[SegmentRecord](), 0
    for group in _groups(snapshot):
        if len(group) == 1 and group[0].kept is None:
            continue
        records = [segment.record for segment in group]
        for record in records:
            sql.remove_segment(db, record)
        removed += records
        freed += sum(record.bytes for record in records)
        _, number = sql.counters(db)
        made = _merge(folder, number, group, snapshot.coding)
        if made is not None:
            sql.insert_segment(db, made)
            freed -= made.bytes
    return removed, freed


def _groups(snapshot: Snapshot) -> list[list[Segment]]:
    """Neighbours that fit in one segment, as `add` counts."""
    row_bytes = snapshot.coding.dim * snapshot.coding.dtype.itemsize
    groups, room = list[list[Segment]](), -1
    for segment in snapshot.segments:
        lengths = segment.lengths if segment.kept is None else segment.lengths[segment.kept]
        size = int(lengths.sum()) * row_bytes
        if groups and size <= room:
            groups[-1].append(segment)
            room -= size
        else:
            groups.append([segment])
            room = segments.SEGMENT_BYTES - size
    return groups


def _merge(folder: Path, number: int, group: Sequence[Segment], coding: Coding) -> SegmentRecord | None:
    """One segment of what is kept of several, None where nothing is."""
    every = ((s, torch.arange(s.record.documents, device="cpu") if s.kept is None else s.kept) for s in group)
    held = [(segment, rows) for segment, rows in every if len(rows)]
    if not held:
        return None
    lot = join(coding, held, coding.of_tokens())
    first, last = int(lot.positions[0]), int(lot.positions[-1])
    gaps = lot.positions if last - first >= len(lot.positions) else None
    return write_segment(folder, number, lot.tensors, lot.offsets, first, gaps)
