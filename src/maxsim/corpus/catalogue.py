"""The catalogue: one SQLite file that says which documents exist. What it does not name does not exist.

Every operation opens its own connection, so a handle may be used from threads and after a fork, and nothing stays
locked. SQLite's rollback journal makes each change one transaction; readers never see half of one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .errors import CorpusError
from .segments import DTYPES, SegmentRecord

FORMAT = 1
APPLICATION = 0x6D617873  # "maxs": tells this catalogue from any other SQLite file
FILE = "catalogue.sqlite"
WAIT_SECONDS = 60.0  # how long a second writer waits for the first

# A document's position is its place in the order of adding, and never used again. `id` has no type, so 1 and "1" are
# two ids. A deleted document keeps its row: a reader that still holds the earlier snapshot can name its hits. `cut`
# names documents of which only the beginning was encoded; corpora made before it came do without.
SCHEMA = """
CREATE TABLE corpus (dim INTEGER NOT NULL, dtype TEXT NOT NULL, encoder TEXT, generation INTEGER NOT NULL);
CREATE TABLE segments (
    number INTEGER PRIMARY KEY, first INTEGER NOT NULL, documents INTEGER NOT NULL, tokens INTEGER NOT NULL,
    bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, deleted INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE documents (
    position INTEGER PRIMARY KEY, id NOT NULL, text TEXT, metadata TEXT, deleted INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX live_ids ON documents (id) WHERE deleted = 0;
CREATE INDEX tombstones ON documents (position) WHERE deleted = 1;
CREATE TABLE cut (position INTEGER PRIMARY KEY);
"""


class Settings(NamedTuple):
    dim: int
    dtype: str
    encoder: str | None
    generation: int


class Catalogue:
    """Transactions on `folder`/catalogue.sqlite."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def absent(self) -> bool:
        """Whether there is no catalogue; a file left empty by an interrupted creation counts as none."""
        return not self.path.is_file() or not self.path.stat().st_size

    def create(self, dim: int, dtype: str, encoder: str | None) -> None:
        """Makes the tables where the catalogue is absent.

        Raises:
            FileExistsError: there is a corpus already.
        """
        with self._connection("rwc") as db:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise FileExistsError(f"{self.path.parent} already holds a corpus")
            for statement in SCHEMA.strip().split(";\n"):
                db.execute(statement)
            db.execute("INSERT INTO corpus VALUES (?, ?, ?, 0)", (dim, dtype, encoder))
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            db.execute("COMMIT")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view, whatever writers do meanwhile.

        Raises:
            FileNotFoundError, NotADirectoryError: the catalogue is absent.
            CorpusError: it is damaged, of a newer format, or locked.
        """
        with self._connection("rw") as db:
            db.execute("BEGIN")
            self._check_format(db)
            yield db

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed when the block ends, undone when it raises. A second writer waits here.

        Raises:
            FileNotFoundError, NotADirectoryError: the catalogue is absent.
            CorpusError: another process kept it locked for WAIT_SECONDS, the folder is read-only, or the disk is full.
        """
        with self._connection("rw") as db:
            db.execute("PRAGMA synchronous = EXTRA")
            db.execute("PRAGMA cache_spill = OFF")  # a large change must not lock readers out before its commit
            db.execute("BEGIN IMMEDIATE")
            self._check_format(db)
            yield db
            db.execute("UPDATE corpus SET generation = generation + 1")
            db.execute("COMMIT")

    @contextmanager
    def _connection(self, mode: str) -> Iterator[sqlite3.Connection]:
        if mode != "rwc" and self.absent():
            self._raise_absent()
        db: sqlite3.Connection | None = None
        try:
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            db = sqlite3.connect(uri, uri=True, timeout=WAIT_SECONDS, isolation_level=None)
            yield db
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise CorpusError(
                    f"{self.path}: another process is writing; gave up after {WAIT_SECONDS:g} s"
                ) from error
            size = self.path.stat().st_size if self.path.exists() else 0
            raise CorpusError(f"{self.path}: {size} bytes: {error}") from error
        finally:
            if db is not None:
                db.close()  # undoes what was not committed

    def _raise_absent(self) -> NoReturn:
        folder = self.path.parent
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a corpus: it is a file, and a corpus is a folder")
        if not folder.exists():
            raise FileNotFoundError(f"{folder} is not a corpus: there is no such folder")
        what = f"its {FILE} is empty" if self.path.is_file() else f"it has no {FILE}"
        raise FileNotFoundError(f"{folder} is not a corpus: {what}")

    def _check_format(self, db: sqlite3.Connection) -> None:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if self.absent():  # SQLite has just undone an interrupted creation
            self._raise_absent()
        size = self.path.stat().st_size
        if application != APPLICATION:
            raise CorpusError(f"{self.path}: {size} bytes, not the catalogue of a corpus")
        pages, page_bytes = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        if size != pages * page_bytes:  # SQLite itself overlooks a last page that is cut
            raise CorpusError(f"{self.path}: {size} bytes, expected {pages * page_bytes}; restore the file from a copy")
        if version > FORMAT:
            raise CorpusError(
                f"{self.path}: format {version}, this version of maxsim reads up to {FORMAT}; upgrade maxsim"
            )


def settings(db: sqlite3.Connection, path: Path) -> Settings:
    row = db.execute("SELECT dim, dtype, encoder, generation FROM corpus").fetchone()
    if row is None or row[1] not in DTYPES or not isinstance(row[0], int) or row[0] < 1:
        raise CorpusError(f"{path}: unreadable settings {row}")
    return Settings(*row)


def segment_records(db: sqlite3.Connection) -> list[SegmentRecord]:
    columns = "number, first, documents, tokens, bytes, sha256, deleted"
    return [SegmentRecord(*row) for row in db.execute(f"SELECT {columns} FROM segments ORDER BY number")]


def insert_segment(db: sqlite3.Connection, record: SegmentRecord) -> None:
    values = (record.number, record.first, record.documents, record.tokens, record.bytes, record.sha256, record.deleted)
    db.execute("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)", values)


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


def deleted_rows(db: sqlite3.Connection, record: SegmentRecord) -> list[int]:
    query = "SELECT position FROM documents WHERE deleted = 1 AND position >= ? AND position < ?"
    return [row[0] - record.first for row in db.execute(query, (record.first, record.first + record.documents))]


def tombstone(db: sqlite3.Connection, position: int) -> None:
    db.execute("UPDATE documents SET deleted = 1, text = NULL, metadata = NULL WHERE position = ?", (position,))
    db.execute(
        "UPDATE segments SET deleted = deleted + 1 WHERE first <= ? AND ? < first + documents",
        (position, position),
    )
