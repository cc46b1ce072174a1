"""Whether a corpus on disk is what its catalogue says, byte by byte."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

from . import rows as sql
from .catalogue import Catalogue, format_of
from .coding import Coding
from .errors import CorpusError
from .segments import open_codebook, open_segment, sha256
from .sums import broken_rows

MOST_TOLD = 5  # rows
CHANGED = "its bytes have changed since it was written (checksum differs); restore the file from a copy"


def problems_of(folder: Path) -> list[str]:
    """Everything that is wrong, [] for a sound corpus. Also of a corpus that cannot be opened any more.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no corpus.
    """
    catalogue, place = Catalogue(folder), folder / "segments"
    try:
        with catalogue.reading() as db:
            catalogue.check(db)
            problems = [f"{catalogue.path}: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
            made, records = sql.settings(db, catalogue.path), sql.segment_records(db)
            if not problems:
                problems += [f"{catalogue.path}: {each}" for each in _miscounted(db, records)]
                problems += [f"{catalogue.path}: {each}" for each in _changed(db)]
    except CorpusError as error:
        return [str(error)]
    coding = Coding(made.dim, made.dtype, made.exact, made.options)
    if made.codebook is not None:
        try:
            coding = open_codebook(place, made.codebook, coding)
            _compare(place, made.codebook)
        except CorpusError as error:
            problems.append(str(error))
    if not coding.trained and records:
        problems.append(f"{place}: {len(records)} segments cannot be looked at without their tables")
        records = []
    wrong = dict[str, str]()  # by file
    for record in records:
        try:
            list(open_segment(place, record, coding).tensors.values())  # codes are looked at where they are given out
            _compare(place, record)
        except CorpusError as error:
            wrong[record.file] = str(error)
    if wrong:
        with suppress(CorpusError), catalogue.reading() as db:
            there = {record.file for record in sql.segment_records(db)}
            wrong = {file: what for file, what in wrong.items() if file in there}  # others were compacted meanwhile
    return [*problems, *wrong.values()]


def _compare(place: Path, record: sql.SegmentRecord | sql.FileRecord) -> None:
    """Raises CorpusError where a file's bytes are not those that were written, or cannot be read."""
    path = place / record.file
    try:
        same = sha256(path) == record.sha256
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error}") from error
    if not same:
        raise CorpusError(f"{path}: {CHANGED}")


def _changed(db: sqlite3.Connection) -> list[str]:
    """Documents whose rows are not what was written."""
    rows = broken_rows(db) if format_of(db) >= 3 else []
    more = [f"and {len(rows) - MOST_TOLD} more rows of documents"] if len(rows) > MOST_TOLD else []
    return [sql.CHANGED_ROW.format(position) for position in rows[:MOST_TOLD]] + more


def _miscounted(db: sqlite3.Connection, records: list[sql.SegmentRecord]) -> list[str]:
    """Segments and documents that do not agree."""
    wrong, before = [], -1
    for record in records:
        query = "SELECT count(*), coalesce(sum(deleted), 0) FROM documents WHERE position BETWEEN ? AND ?"
        count, deleted = db.execute(query, (record.first, record.last)).fetchone()
        if record.first <= before:
            wrong.append(f"segment {record.number} begins at position {record.first}, after one that ends at {before}")
        if (count, deleted) != (record.documents, record.deleted):
            wrong.append(
                f"segment {record.number} has {record.documents} documents, {record.deleted} of them deleted, the "
                f"table of documents {count} and {deleted}"
            )
        before = record.last
    listed, total = sum(r.documents for r in records), db.execute("SELECT count(*) FROM documents").fetchone()[0]
    if not wrong and listed != total:
        wrong.append(f"{total} documents, of which {listed} have a segment")
    return wrong
