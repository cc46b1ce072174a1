"""The rows of the catalogue: what is asked of an open connection, and what changes them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from .catalogue import format_of
from .coding import NAMES
from .errors import CorpusError
from .filtering import Filter
from .sums import OF_ROW, SEGMENTS, has_cut, row_sum, rows_sum

Found = TypeVar("Found")
CHANGED_ROW = "the row of the document at position {} has changed since it was written (checksum differs)"


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

    def belongs(self, shard: tuple[int, int]) -> bool:
        """Whether it is one of those of a rank; shard: (rank, size)."""
        rank, size = shard
        return self.number % size == rank


class FileRecord(NamedTuple):
    """A file beside the segments."""

    file: str
    bytes: int
    sha256: str


class Row(NamedTuple):
    """What the catalogue holds of a document; `metadata` as JSON."""

    position: int
    id: str | int
    text: str | None
    metadata: str | None


class Held(NamedTuple):
    """What the catalogue holds of a document."""

    position: int
    id: str | int
    text: str | None
    metadata: dict[str, Any] | None


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
    try:
        options = json.loads(row[5])
    except (ValueError, TypeError, RecursionError) as error:
        raise CorpusError(f"{path}: unreadable settings {row}") from error
    return made._replace(options=options, codebook=codebook, state=row[6])


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
    values = [getattr(record, name) for name in SEGMENTS.split(", ")]
    db.execute(f"INSERT INTO segments ({SEGMENTS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    db.execute(
        "UPDATE corpus SET positions = max(positions, ?), numbers = max(numbers, ?)", (record.last + 1, record.number)
    )


def remove_segment(db: sqlite3.Connection, record: SegmentRecord) -> None:
    """With the rows of its deleted documents."""
    db.execute("DELETE FROM segments WHERE number = ?", (record.number,))
    places = (record.first, record.last)
    if has_cut(db):
        gone = "SELECT position FROM documents WHERE deleted = 1 AND position BETWEEN ? AND ?"
        db.execute(f"DELETE FROM cut WHERE position IN ({gone})", places)
    db.execute("DELETE FROM documents WHERE deleted = 1 AND position BETWEEN ? AND ?", places)


def insert_document(
    db: sqlite3.Connection, position: int, id: str | int, text: str | None, metadata: str | None, cut: bool = False
) -> None:
    """cut: whether its text goes on behind what was encoded. Raises ValueError for an id that is there already."""
    cut = cut and has_cut(db)
    kept = row_sum(position, id, text, metadata, 0, int(cut))
    try:
        db.execute("INSERT INTO documents VALUES (?, ?, ?, ?, 0, ?)", (position, id, text, metadata, kept))
        if cut:
            db.execute("INSERT INTO cut VALUES (?)", (position,))
    except sqlite3.IntegrityError:
        raise ValueError(
            f"id {id!r} is already in the corpus, or twice among the new ones; nothing was added"
        ) from None


def count_cut(db: sqlite3.Connection) -> int | None:
    """Documents of which only the beginning was encoded; None where this is not kept."""
    if not has_cut(db):
        return None
    query = "SELECT count(*) FROM cut JOIN documents USING (position) WHERE deleted = 0"
    return int(db.execute(query).fetchone()[0])


def find(db: sqlite3.Connection, id: str | int) -> int | None:
    """The position of a document that is not deleted, None if there is none."""
    row = db.execute("SELECT position FROM documents WHERE id = ? AND deleted = 0", (id,)).fetchone()
    return None if row is None else int(row[0])


def checked(db: sqlite3.Connection, path: Path, where: str) -> Callable[..., Iterator[Row]]:
    """→ rows(*values), those that `where` asks for with these values.

    Raises:
        CorpusError: (rows) one has changed since it was written.
    """
    sums = rows_sum(db) if format_of(db) >= 3 else None
    query = f"SELECT {OF_ROW}, {'0, 0' if sums is None else sums.columns} FROM documents WHERE {where}"

    def rows(*values: str | int) -> Iterator[Row]:
        for row in db.execute(query, values):
            if sums is not None and sums.differs(row):
                raise CorpusError(f"{path}: {CHANGED_ROW.format(row[0])}")
            yield Row(*row[:4])

    return rows


def row_of(db: sqlite3.Connection, path: Path) -> Callable[[str | int], Row | None]:
    """→ row(id), of a document that is not deleted, None if there is none.

    Raises:
        CorpusError: (row) it has changed since it was written.
    """
    rows = checked(db, path, "id = ? AND deleted = 0")
    return lambda id: next(rows(id), None)


def held(path: Path, row: Row) -> Held:
    """Raises CorpusError where the metadata are no JSON."""
    try:
        return Held(*row[:3], None if row.metadata is None else json.loads(row.metadata))
    except (ValueError, TypeError, RecursionError) as error:
        raise CorpusError(f"{path}: the metadata of the document at position {row.position} are no JSON") from error


def holding(db: sqlite3.Connection, path: Path) -> Callable[[str | int], Held | None]:
    """→ held(id), as `row_of`, its metadata read."""
    row = row_of(db, path)
    return lambda id: None if (found := row(id)) is None else held(path, found)


def set_beside(db: sqlite3.Connection, position: int, text: str | None, metadata: str | None) -> None:
    """The row was `checked`: what is damaged must not get a new checksum."""
    db.execute("UPDATE documents SET text = ?, metadata = ? WHERE position = ?", (text, metadata, position))
    _sum(db, position)


def _sum(db: sqlite3.Connection, position: int) -> None:
    """Of a row that was changed."""
    row, cut = db.execute(f"SELECT {OF_ROW} FROM documents WHERE position = ?", (position,)).fetchone(), 0
    if has_cut(db):
        (cut,) = db.execute("SELECT count(*) FROM cut WHERE position = ?", (position,)).fetchone()
    db.execute("UPDATE documents SET sum = ? WHERE position = ?", (row_sum(*row, cut), position))


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


def has_field(db: sqlite3.Connection, name: str) -> bool:
    """Whether a document that is not deleted has a field in its metadata."""
    query = (
        "SELECT EXISTS (SELECT 1 FROM documents, json_each(documents.metadata) AS f WHERE deleted = 0 AND f.key = ?)"
    )
    return bool(db.execute(query, (name,)).fetchone()[0])


def existing(id: str | int, found: Found | None) -> Found:
    """What was found of a document; KeyError where there is none."""
    if found is None:
        raise KeyError(f"no document has the id {id!r}")
    return found


def position_of(db: sqlite3.Connection, id: str | int) -> int:
    """Raises KeyError where no document has that id."""
    return existing(id, find(db, id))


def deleted_positions(db: sqlite3.Connection, record: SegmentRecord) -> list[int]:
    query = "SELECT position FROM documents WHERE deleted = 1 AND position BETWEEN ? AND ?"
    return [row[0] for row in db.execute(query, (record.first, record.last))]


def tombstone(db: sqlite3.Connection, position: int) -> None:
    """The row was `checked`, as for `set_beside`."""
    db.execute("UPDATE documents SET deleted = 1, text = NULL, metadata = NULL WHERE position = ?", (position,))
    _sum(db, position)
    db.execute("UPDATE segments SET deleted = deleted + 1 WHERE ? BETWEEN first AND last", (position,))
