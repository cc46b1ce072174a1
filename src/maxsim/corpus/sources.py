"""What there is at a path that `add_file` reads, and what a corpus of it would keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..quantized import Codes, Quantized
from ..quantized.files import is_codes
from . import files, lines
from .documents import document_of
from .errors import FileError
from .indexes import Index, folder_of

TEXTS = (".txt", ".jsonl", ".ndjson")


class Kept(NamedTuple):
    """The width of embeddings, how a corpus keeps them as they are, and the options of a codec for that."""

    dim: int
    dtype: str
    options: dict[str, Any]


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
    there = sorted(each for each in path.rglob("*") if each.is_file())
    embeddings = [each for each in there if each.suffix.lower() in files.KINDS]
    told = {lines.beside(each) for each in embeddings}
    texts = [each for each in there if each.suffix.lower() in TEXTS and each not in told]
    if embeddings and texts:
        both = f"embeddings ({embeddings[0]}) and texts ({texts[0]})"
        raise FileError(f"{path}: holds {both}: give each a folder of its own")
    return bool(embeddings)


def kept_by(path: Path) -> Kept:
    """Of the documents at a path; of floats the first one says the width.

    Raises:
        FileError, ImportError, OSError: as `files.read`, or there are no documents.
    """
    if folder_of(path) is not None:
        return _of_codes(Index(path).tables)
    if path.suffix.lower() == ".safetensors" and path.is_file() and is_codes(path):
        try:
            return _of_codes(Quantized.load(path).parameters)
        except ValueError as error:
            raise FileError(str(error)) from error
    row = next(files.read(path), None)
    if row is None:
        raise FileError(f"{path}: holds no documents")
    return Kept(document_of(row.embeddings, row.id).shape[1], "float16", {})


def _of_codes(codes: Codes) -> Kept:
    options: dict[str, Any] = {} if codes.factor is None else {"scale": "token"}
    if codes.renormalize:
        options["renormalize"] = True
    return Kept(codes.width, codes.codec, options)
