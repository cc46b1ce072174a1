"""Checksums of what the catalogue says, kept in the catalogue: bits that changed on the disk are told from others.

Every row of `documents` has one. One more is of the settings, the segments and the tables' own definitions: small, and
looked at whenever they are read.
"""

from __future__ import annotations

import hashlib
import sqlite3
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

# As SQLite gives them back; of `corpus` all but its own checksum.
SETTINGS = "dim, dtype, encoder, generation, exact, options, positions, numbers, state, summed"
SEGMENTS = "number, first, last, documents, tokens, bytes, sha256, deleted"
OF_ROW = "position, id, text, metadata, deleted"


def row_sum(*row: Any) -> int:
    """Of a document's position, id, text, metadata, whether it is deleted and whether its text was cut."""
    return zlib.crc32(ascii(row).encode())  # what repr escapes depends on Python's tables of Unicode


def state_sum(db: sqlite3.Connection) -> str:
    """Of settings, segments and definitions as they are now."""
    rows = [
        db.execute(f"SELECT {columns} FROM {table} ORDER BY 1, 2").fetchall()
        for table, columns in (
            ("sqlite_master", "type, name, tbl_name, sql"),
            ("corpus", SETTINGS),
            ("segments", SEGMENTS),
            ("codebook", "file, bytes, sha256"),
        )
    ]
    return hashlib.blake2b(ascii(rows).encode(), digest_size=16).hexdigest()


def seal(db: sqlite3.Connection) -> None:
    """Writes the checksum of settings, segments and definitions, last in a change."""
    db.execute("UPDATE corpus SET sum = ?", (state_sum(db),))


def broken(db: sqlite3.Connection) -> bool:
    """Whether settings, segments or definitions have changed since they were written."""
    kept = db.execute("SELECT sum FROM corpus").fetchall()
    return [row[0] for row in kept] != [state_sum(db)]


class RowsSum(NamedTuple):
    """How rows of `documents` are looked at: OF_ROW and then `columns` are what `differs` takes. Rows before the
    position `since` were written before there were checksums, and may have none."""

    since: int
    columns: str

    def differs(self, row: Sequence[Any]) -> bool:
        """Whether a row has changed since it was written."""
        kept = row[-1]
        return bool(row[0] >= self.since if kept is None else kept != row_sum(*row[:-1]))


def rows_sum(db: sqlite3.Connection) -> RowsSum:
    (since,) = db.execute("SELECT summed FROM corpus").fetchone()
    cut = "EXISTS (SELECT 1 FROM cut WHERE cut.position = documents.position)" if has_cut(db) else "0"
    return RowsSum(since, f"{cut}, sum")


def broken_rows(db: sqlite3.Connection) -> list[int]:
    """Positions of documents whose rows have changed since they were written."""
    rows = rows_sum(db)
    return [row[0] for row in db.execute(f"SELECT {OF_ROW}, {rows.columns} FROM documents") if rows.differs(row)]


def has_cut(db: sqlite3.Connection) -> bool:
    """Whether it is kept of which documents only the beginning was encoded."""
    return bool(db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'cut'").fetchone()[0])
