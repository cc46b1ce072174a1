"""Whether a corpus on disk is what its catalogue says, byte by byte."""

from __future__ import annotations

import sqlite3
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
    coding, files = Coding(made.dim, made.dtype, made.exact, made.options), list[tuple[str, str]]()
    if made.codebook is not None:
        try:
            coding = open_codebook(place, made.codebook, coding)
            files.append((made.codebook.file, made.codebook.sha256))
        except CorpusError as error:
            problems.append(str(error))
    if not coding.trained and records:
        problems.append(f"{place}: {len(records)} segments cannot be looked at without their tables")
        records = []
    for record in records:
        try:
            list(open_segment(place, record, coding).tensors.values())  # codes are looked at where they are given out
            files.append((record.file, record.sha256))
        except CorpusError as error:
            problems.append(str(error))
    problems += [f"{place / name}: {CHANGED}" for name, digest in files if sha256(place / name) != digest]
    return problems


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
