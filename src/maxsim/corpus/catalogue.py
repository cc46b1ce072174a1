"""The catalogue: one SQLite file that says which documents exist. What it does not name does not exist.

Every operation opens its own connection, so a handle may be used from threads and after a fork, and nothing stays
locked. SQLite's rollback journal makes each change one transaction; readers never see half of one.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from . import sums
from .errors import CorpusError

FORMAT = 3
APPLICATION = 0x6D617873  # "maxs": tells this catalogue from any other SQLite file
FILE = "catalogue.sqlite"
WAIT_SECONDS = 60.0  # how long a second writer waits for the first

# Tables of format 1. A document's position is its place in the order of adding, and never used again. `id` has no type,
# so 1 and "1" are two ids. A deleted document keeps its row until `compact`: a reader that still holds the earlier
# snapshot can name its hits. `cut` names documents of which only the beginning was encoded; corpora made before it came
# do without.
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

# What format 2 has more: how codes are made, a state that is another one after each change (a corpus that has taken
# this one's place has none of its states), positions and numbers given so far (which outlive what `compact` drops), the
# last position of a segment, since a compacted one has gaps, and the tables that codes are decoded by. A corpus of
# an earlier format is read as it is, and becomes one of the newest with its next change.
TO_FORMAT_2 = """
ALTER TABLE corpus ADD COLUMN exact TEXT;
ALTER TABLE corpus ADD COLUMN options TEXT NOT NULL DEFAULT '{}';
ALTER TABLE corpus ADD COLUMN positions INTEGER NOT NULL DEFAULT 0;
ALTER TABLE corpus ADD COLUMN numbers INTEGER NOT NULL DEFAULT 0;
ALTER TABLE corpus ADD COLUMN state TEXT NOT NULL DEFAULT '';
ALTER TABLE segments ADD COLUMN last INTEGER NOT NULL DEFAULT 0;
CREATE TABLE codebook (file TEXT NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL);
UPDATE segments SET last = first + documents - 1;
UPDATE corpus SET positions = (SELECT coalesce(max(last) + 1, 0) FROM segments),
    numbers = (SELECT coalesce(max(number), 0) FROM segments);
"""

# What format 3 has more: checksums (`sums`). Rows of documents before the position `summed` may have none.
TO_FORMAT_3 = """
ALTER TABLE corpus ADD COLUMN sum TEXT NOT NULL DEFAULT '';
ALTER TABLE corpus ADD COLUMN summed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE documents ADD COLUMN sum INTEGER;
UPDATE corpus SET summed = positions;
"""


NEW_STATE = "UPDATE corpus SET state = lower(hex(randomblob(16)))"


class Catalogue:
    """Transactions on `folder`/catalogue.sqlite."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def absent(self) -> bool:
        """Whether there is no catalogue; a file left empty by an interrupted creation counts as none."""
        return not self.path.is_file() or not self.path.stat().st_size

    @contextmanager
    def creating(self) -> Iterator[sqlite3.Connection]:
        """Makes the tables where the catalogue is absent; with what the block adds there is a corpus when it ends.

        Raises:
            FileExistsError: there is a corpus already.
        """
        with self._connection("rwc") as db:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise FileExistsError(f"{self.path.parent} already holds a corpus")
            _execute(db, SCHEMA)
            _execute(db, TO_FORMAT_2)
            _execute(db, TO_FORMAT_3)
            yield db
            db.execute(NEW_STATE)
            sums.seal(db)
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
            version = self._check_format(db)
            self.check(db)  # what is damaged must not get a new checksum
            if version < 2:
                _execute(db, TO_FORMAT_2)
            if version < FORMAT:
                _execute(db, TO_FORMAT_3)
                db.execute(f"PRAGMA user_version = {FORMAT}")
            yield db
            db.execute("UPDATE corpus SET generation = generation + 1")
            db.execute(NEW_STATE)
            sums.seal(db)
            db.execute("COMMIT")

    def discard(self, keep: bool) -> None:
        """As `Store.discard`."""
        with self._connection("rw") as db:
            db.execute("PRAGMA busy_timeout = 0")
            try:
                db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if "locked" in str(error):  # somebody is adding
                    return
                raise
            self._check_format(db)
            empty = not db.execute("SELECT count(*) FROM segments").fetchone()[0]
            if empty and os.name != "nt":  # before another writer can begin
                _remove(self.path.parent, keep)
        if empty and os.name == "nt":  # which removes no open file
            _remove(self.path.parent, keep)

    def check(self, db: sqlite3.Connection) -> None:
        """Raises CorpusError where settings, segments or definitions of tables have changed since they were written."""
        if format_of(db) >= 3 and sums.broken(db):
            raise CorpusError(
                f"{self.path}: its settings or its list of segments have changed since they were written (checksum "
                "differs); restore the file from a copy"
            )

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

    def _check_format(self, db: sqlite3.Connection) -> int:
        try:
            return self._format(db)
        except UnicodeDecodeError as error:  # of an error message that quotes what is damaged
            raise CorpusError(f"{self.path}: damaged: {error}") from error

    def _format(self, db: sqlite3.Connection) -> int:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = format_of(db)
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
        if version < 3 and "sum" in {row[1] for row in db.execute("PRAGMA table_info(corpus)")}:
            raise CorpusError(f"{self.path}: says that it has format {version}, and has the tables of a newer one")
        return version


def _remove(folder: Path, keep: bool) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not keep:
        folder.rmdir()


def format_of(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _execute(db: sqlite3.Connection, script: str) -> None:
    for statement in script.strip().split(";\n"):
        db.execute(statement)
