"""JSON lines beside a file of embeddings: of each document, in the order of the file, its id, its text where there is
one, and its metadata as further fields. So they are texts for `maxsim index` too, which reads the same format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import jsonlines
from .arrays import Row
from .documents import Id, check_id, check_text
from .errors import FileError

RESERVED = ("id", "text")


def beside(path: Path) -> Path:
    """Where the lines of a file are."""
    return path.with_suffix(".jsonl")


def line(id: Id, text: str | None, metadata: dict[str, Any] | None) -> str:
    """Of a document.

    Raises:
        ValueError: metadata with a field that the lines keep for the id or the text.
    """
    fields = metadata or {}
    wrong = [name for name in RESERVED if name in fields]
    if wrong:
        raise ValueError(
            f"the metadata of document {id!r} have a field {wrong[0]!r}, which JSON lines keep for the document's own: "
            "rename it with `update`"
        )
    own: dict[str, Any] = {"id": id} if text is None else {"id": id, "text": text}
    return json.dumps(own | fields, ensure_ascii=False) + "\n"


def read(path: Path) -> Iterator[tuple[Id, str | None, dict[str, Any] | None]]:
    """Id, text and metadata of each document.

    Raises:
        FileError: a line of another form than `line` writes; names it. OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            for number, id, text, fields in jsonlines.read(jsonlines.decoded(file, str(path)), str(path)):
                try:
                    kept = check_id(id), check_text(id, text), fields or None
                except ValueError as error:
                    raise FileError(f"{path}:{number}: {error}") from error
                yield kept
        except jsonlines.SourceError as error:
            raise FileError(str(error)) from error


def joined(rows: Iterator[Row], path: Path) -> Iterator[Row]:
    """Documents with what the lines say of them.

    Raises:
        FileError: other numbers of documents and lines, ids that are not those of the file.
    """
    count, told = 0, read(path)
    for row in rows:
        found = next(told, None)
        if found is None:
            raise FileError(f"{path}: {count} lines, and more documents in the file beside it")
        id, text, metadata = found
        if row.id is not None and row.id != id:
            raise FileError(f"{path}: document {count + 1} is {id!r}, in the file beside it {row.id!r}")
        count += 1
        yield Row(id, row.embeddings, row.text if text is None else text, metadata or row.metadata)
    if next(told, None) is not None:
        raise FileError(f"{path}: more lines than the {count} documents of the file beside it")
