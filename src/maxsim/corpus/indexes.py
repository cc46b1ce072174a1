"""Codes that are there already: index folders of other programs, files of `Quantized.save`; and the ids of documents.

PyLate                  FOLDER/NAME of `indexes.PLAID`: an index of fast-plaid or ColBERT beside its maps of ids,
                        which are pickles, or of older releases SQLite files that hold such: of these an export as JSON
                        is read, plaid_ids_to_documents_ids.json
fast-plaid, ColBERT     the folder with metadata.json; documents are named by their numbers in the index, from 0
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ..quantized import Quantized, plaid
from . import lines
from .adding import Taker
from .arrays import Row
from .documents import Id, check_id, encode_metadata
from .errors import FileError

SOME = 1 << 14  # documents at a time
MAP = "plaid_ids_to_documents_ids"  # of PyLate: number in the index → id


def folder_of(path: Path) -> Path | None:
    """The folder of the index itself, None where there is none."""
    for folder in (path, path / "fast_plaid_index"):
        there = {name for name in ("metadata.json", "centroids.npy", "centroids.pt") if (folder / name).is_file()}
        if "metadata.json" in there and len(there) > 1:
            return folder
    return None


class Index:
    """An index of another program. `tables`: what its codes are decoded by.

    Raises:
        FileError: not a whole index, or a map of ids that is a pickle alone. OSError: a file is missing.
    """

    def __init__(self, path: Path) -> None:
        folder = folder_of(path)
        if folder is None:
            raise FileError(f"{path}: no index of PyLate, fast-plaid or ColBERT: it has no metadata.json and centroids")
        self.path = path
        self._ids = _ids(path)
        try:
            self._index = plaid.Index(folder)
        except ValueError as error:
            raise FileError(str(error)) from error
        self.tables = self._index.tables

    def add_to(self, taker: Taker, replace: bool) -> None:
        """All documents: codes as they are where the corpus keeps them so, else what they decode to.

        Raises:
            FileError: a damaged index, or ids that are not its. ValueError: as `Taker.adopt` and `Corpus.add`.
        """
        taker.adopt(self.tables)
        for ids, documents in self._parts():
            taker.add_documents([(id, None, None) for id in ids], documents, replace)

    def _parts(self) -> Iterator[tuple[list[Id], Quantized]]:
        """Ids and documents, a chunk of the index at a time."""
        count = 0
        try:
            for documents in self._index.chunks():
                numbers = range(count, count + len(documents))
                count += len(documents)
                if self._ids is None:
                    yield list(numbers), documents
                elif count <= len(self._ids):
                    yield self._ids[numbers.start : count], documents
        except ValueError as error:
            raise FileError(str(error)) from error
        if self._ids is not None and count != len(self._ids):
            raise FileError(f"{self.path / MAP}.json names {len(self._ids)} documents, the index holds {count}")


def _ids(path: Path) -> list[Id] | None:
    """Of PyLate's map; None where there is none."""
    made, kept = path / f"{MAP}.json", [path / f"{MAP}.pkl", path / f"{MAP}.sqlite"]
    pickled = next((each for each in kept if each.exists()), None)
    if not made.exists() and pickled is None:
        return None
    if pickled is not None and not (made.exists() and pickled.stat().st_mtime <= made.stat().st_mtime):
        what = "is older than" if made.exists() else "is missing beside"
        kind, read = "a pickle", f"pickle.load(open({str(pickled)!r}, 'rb'))"
        if pickled.suffix == ".sqlite":  # of the package sqlitedict
            rows = f"sqlite3.connect({str(pickled)!r}).execute('SELECT key, value FROM unnamed')"
            kind, read = "SQLite with a pickle a document", f"{{n: pickle.loads(id) for n, id in {rows}}}"
        raise FileError(
            f"{made} {what} {pickled.name}, {kind}, which runs whatever code it holds when it is read, so it is not; "
            f'if you trust it, export it: python -c "import json, pickle, sqlite3; json.dump({read}, '
            f"open({str(made)!r}, 'w'))\""
        )
    try:
        held = json.loads(made.read_text(encoding="utf-8"))
        if not isinstance(held, dict):
            raise ValueError(f"expected an object of numbers and ids, got {type(held).__name__}")
        # removing documents leaves gaps in what PyLate remembers of ColBERT's numbers, and none in the index
        return [check_id(held[number]) for number in sorted(held, key=int)]
    except (ValueError, TypeError, RecursionError) as error:
        raise FileError(f"{made}: {error}") from error


class CodesFile:
    """A file of `Quantized.save`, with JSON lines beside it or none. `tables`: as of `Index`.

    Raises:
        FileError: damaged, with a mask, or lines that are not of its documents.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._documents = Quantized.load(path).flat()
        except ValueError as error:
            raise FileError(str(error)) from error
        if self._documents.mask is not None:
            raise FileError(f"{path}: holds codes with a mask: quantise documents of different lengths as `Packed`")
        self.tables = self._documents.parameters

    def add_to(self, taker: Taker, replace: bool) -> None:
        """All documents: codes as they are where the corpus keeps them so, else what they decode to.

        Raises:
            ValueError: as `Taker.adopt` and `Corpus.add`.
        """
        taker.adopt(self.tables)
        told, count = lines.beside(self.path), len(self._documents)
        rows: Iterator[Row] = (Row(f"{self.path.name}:{number}", None) for number in range(1, count + 1))
        if told.is_file():
            rows = lines.joined((Row(None, None) for _ in range(count)), told)
        for low in range(0, max(count, 1), SOME):
            # one more step than there are documents, so that lines beyond the last are found
            some = islice(rows, SOME if low + SOME < count else None)
            given = [(id := check_id(row.id), row.text, encode_metadata(id, row.metadata)) for row in some]
            taker.add_documents(given, self._documents[low : low + SOME], replace)
