"""The rows of the catalogue: what is asked of an open connection, and what changes them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from .catalogue import format_of
from .coding import NAMES
from .errors import CorpusError
from .filtering import Filter


@dataclass(frozen=True)
class SegmentRecord:
    """What the catalogue knows of a segment. The positions of its documents rise from `first` to `last`."""

    number: int
    first: int
    last: int
    documents: int
    tokens: int
    bytes: int
    sha256: str
    deleted: int = 0

    @property
    def file(self) -> str:
        return f"{self.number:08d}.safetensors"


class FileRecord(NamedTuple):
    """A file beside the segments."""

    file: str
    bytes: int
    sha256: str


class Settings(NamedTuple):
    """Of a corpus. `options` are those of the codec; `codebook` holds the tables it decodes by."""

    dim: int
    dtype: str
    encoder: str | None
    generation: int
    exact: str | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    codebook: FileRecord | None = None
    state: str = ""


def settings(db: sqlite3.Connection, path: Path) -> Settings:
    more = ", exact, options, state" if format_of(db) > 1 else ""
    row = db.execute(f"SELECT dim, dtype, encoder, generation{more} FROM corpus").fetchone()
    if row is None or row[1] not in NAMES or not isinstance(row[0], int) or row[0] < 1:
        raise CorpusError(f"{path}: unreadable settings {row}")
    if not more:
        return Settings(*row)
    codebook = db.execute("SELECT file, bytes, sha256 FROM codebook").fetchone()
    made = Settings(*row[:5])
    codebook = None if codebook is None else FileRecord(*codebook)
    return made._replace(options=json.loads(row[5]), codebook=codebook, state=row[6])


def insert_settings(db: sqlite3.Connection, made: Settings) -> None:
    values = (made.dim, made.dtype, made.encoder, made.generation, made.exact, json.dumps(dict(made.options)))
    db.execute("INSERT INTO corpus (dim, dtype, encoder, generation, exact, options) VALUES (?, ?, ?, ?, ?, ?)", values)


def insert_codebook(db: sqlite3.Connection, record: FileRecord) -> None:
    db.execute("INSERT INTO codebook VALUES (?, ?, ?)", record)


def segment_records(db: sqlite3.Connection) -> list[SegmentRecord]:
    """In the order of positions."""
    last = "last" if format_of(db) > 1 else "first + documents - 1"
    columns = f"number, first, {last}, documents, tokens, bytes, sha256, deleted"
    return [SegmentRecord(*row) for row in db.execute(f"SELECT {columns} FROM segments ORDER BY first")]


def counters(db: sqlite3.Connection) -> tuple[int, int]:
    """The next document's position, and the next segment's number: neither was ever given before."""
    positions, numbers = db.execute("SELECT positions, numbers FROM corpus").fetchone()
    return positions, numbers + 1


def insert_segment(db: sqlite3.Connection, record: SegmentRecord) -> None:
    columns = "number, first, last, documents, tokens, bytes, sha256, deleted"
    values = [getattr(record, name) for name in columns.split(", ")]
    db.execute(f"INSERT INTO segments ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    db.execute(
        "UPDATE corpus SET positions = max(positions, ?), numbers = max(numbers, ?)", (record.last + 1, record.number)
    )


def remove_segment(db: sqlite3.Connection, record: SegmentRecord) -> None:
    """With the rows of its deleted documents."""
    db.execute("DELETE FROM segments WHERE number = ?", (record.number,))
    places = (record.first, record.last)
    if _counts_cut(db):
        gone = "SELECT position FROM documents WHERE deleted = 1 AND position BETWEEN ? AND ?"
        db.execute(f"DELETE FROM cut WHERE position IN ({gone})", places)
    db.execute("DELETE FROM documents WHERE deleted = 1 AND position BETWEEN ? AND ?", places)


def insert_document(
    db: sqlite3.Connection, position: int, id: str | int, text: str | None, metadata: str | None
) -> None:
    """Raises ValueError for an id that is there already."""
    try:
        db.execute("INSERT INTO documents VALUES (?, ?, ?, ?, 0)", (position, id, text, metadata))
    except sqlite3.IntegrityError:
        raise ValueError(
            f"id {id!r} is already in the corpus, or twice among the new ones; nothing was added"
        ) from None


def _counts_cut(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'cut'").fetchone()[0])


def insert_cut(db: sqlite3.Connection, position: int) -> None:
    if _counts_cut(db):
        db.execute("INSERT INTO cut VALUES (?)", (position,))


def count_cut(db: sqlite3.Connection) -> int | None:
    """Documents of which only the beginning was encoded; None where this is not kept."""
    if not _counts_cut(db):
        return None
    query = "SELECT count(*) FROM cut JOIN documents USING (position) WHERE deleted = 0"
    return int(db.execute(query).fetchone()[0])


def find(db: sqlite3.Connection, id: str | int, columns: str = "position") -> Any:
    """The chosen columns of a document that is not deleted, None if there is none."""
    return db.execute(f"SELECT {columns} FROM documents WHERE id = ? AND deleted = 0", (id,)).fetchone()


def set_beside(db: sqlite3.Connection, position: int, text: str | None, metadata: str | None) -> None:
    db.execute("UPDATE documents SET text = ?, metadata = ? WHERE position = ?", (text, metadata, position))


def matching(db: sqlite3.Connection, filter: Filter) -> list[int]:
    """Positions of documents that are not deleted and whose metadata have one of the values of each field, rising."""
    each = "EXISTS (SELECT 1 FROM json_each(documents.metadata) AS f WHERE f.key = ? AND ({}))"
    one_of = "f.type IN ({}) AND f.atom IN (SELECT value FROM json_each(?))"
    clauses, parameters = ["deleted = 0"], list[Any]()
    for name, wanted in filter.items():
        kinds = [f"f.type = '{json.dumps(flag)}'" for flag in wanted.constants]
        texts = one_of.format("'text'"), one_of.format("'integer', 'real'")
        clause, more = (
            each.format(" OR ".join([*texts, *kinds])),
            [name, json.dumps(wanted.texts), json.dumps(wanted.numbers)],
        )
        if None in wanted.constants:
            clause = f"({clause} OR NOT {each.format('1')})"
            more.append(name)
        clauses.append(clause)
        parameters += more
    query = f"SELECT position FROM documents WHERE {' AND '.join(clauses)} ORDER BY position"
    return [row[0] for row in db.execute(query, parameters)]


def existing(db: sqlite3.Connection, id: str | int, columns: str) -> Any:
    """As `find`; KeyError where no document has that id."""
    row = find(db, id, columns)
    if row is None:
        raise KeyError(f"no document has the id {id!r}")
    return row


def position_of(db: sqlite3.Connection, id: str | int) -> int:
    """Raises KeyError where no document has that id."""
    return int(existing(db, id, "position")[0])


def deleted_positions(db: sqlite3.Connection, record: SegmentRecord) -> list[int]:
    query = "SELECT position FROM documents WHERE deleted = 1 AND position BETWEEN ? AND ?"
    return [row[0] for row in db.execute(query, (record.first, record.last))]


def tombstone(db: sqlite3.Connection, position: int) -> None:
    db.execute("UPDATE documents SET deleted = 1, text = NULL, metadata = NULL WHERE position = ?", (position,))
    db.execute("UPDATE segments SET deleted = deleted + 1 WHERE ? BETWEEN first AND last", (position,))
