"""What there is at a path that `add_file` reads, and what a corpus of it would keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..quantized import Codes
from ..quantized.files import is_codes
from . import files, lines
from .adding import Taker
from .documents import document_of
from .errors import FileError
from .indexes import CodesFile, Index, folder_of

TEXTS = (".txt", ".jsonl", ".ndjson")


class Kept(NamedTuple):
    """The width of embeddings, how a corpus keeps them as they are, and the options of a codec for that."""

    dim: int
    dtype: str
    options: dict[str, Any]


class Floats:
    """A file of floats, or a folder of such files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add_to(self, taker: Taker, replace: bool) -> None:
        """All documents.

        Raises:
            FileError: as `files.read`, and ids, embeddings or metadata of a type that a corpus does not take.
            ImportError, OSError: as `files.read`. ValueError: as `Corpus.add`.
        """
        try:
            taker.add_rows(self._rows(taker.dim), replace)
        except TypeError as error:
            raise FileError(f"{self.path}: {error}") from error

    def dim(self) -> int:
        """The width of the first document that says one.

        Raises:
            FileError, ImportError, OSError: as `add_to`, or there are no documents, or none that has tokens.
        """
        what = "documents"
        try:
            for row in files.read(self.path):
                width = document_of(row.embeddings, row.id).shape[1]
                if width:
                    return width
                what = "tokens, which say how wide a corpus is"
        except TypeError as error:
            raise FileError(f"{self.path}: {error}") from error
        raise FileError(f"{self.path}: holds no {what}")

    def _rows(self, dim: int) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
        for row in files.read(self.path):
            document = document_of(row.embeddings, row.id)
            # of no tokens the width may be unknown
            yield row.id, document if len(document) else document.new_empty(0, dim), row.text, row.metadata, None


Source: TypeAlias = Index | CodesFile | Floats


def holds_embeddings(path: Path) -> bool:
    """Whether a path is a file of embeddings, an index of another program, or a folder of such files. JSON lines beside
    a file of embeddings are of its documents.

    Raises:
        FileError: a folder of embeddings and of texts.
    """
    if not path.is_dir():
        return path.suffix.lower() in files.KINDS
    if folder_of(path) is not None:
        return True
    there, corpora = files.below(path)
    embeddings = [each for each in there if each.suffix.lower() in files.KINDS]
    told = {lines.beside(each) for each in embeddings}
    texts = [each for each in there if each.suffix.lower() in TEXTS and each not in told]
    if embeddings and texts:
        both = f"embeddings ({embeddings[0]}) and texts ({texts[0]})"
        raise FileError(f"{path}: holds {both}: give each a folder of its own")
    return bool(embeddings or (corpora and not texts))  # a corpus alone is refused where it is read


def opened(path: Path) -> Source:
    """What `add_file` adds, opened once.

    Raises:
        FileError, OSError: as `Index` and `CodesFile`. Other files are read later.
    """
    if folder_of(path) is not None:
        return Index(path)
    if path.suffix.lower() == ".safetensors" and is_codes(path):
        return CodesFile(path)
    return Floats(path)


def kept_by(source: Source) -> Kept:
    """Of the documents of a source; of floats the first one says the width.

    Raises:
        FileError, ImportError, OSError: as `Floats.dim`.
    """
    if not isinstance(source, Floats):
        return _of_codes(source.tables)
    return Kept(source.dim(), "float16", {})


def _of_codes(codes: Codes) -> Kept:
    options: dict[str, Any] = {} if codes.factor is None else {"scale": "token"}
    if codes.renormalize:
        options["renormalize"] = True
    return Kept(codes.width, codes.codec, options)
