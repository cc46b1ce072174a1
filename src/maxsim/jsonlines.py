"""Lines of texts: decoded, and as JSON objects that say what one document is. Of texts to encode, and of those beside
embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple


class SourceError(ValueError):
    """A text that cannot be read; the message names the file and the line."""


class Line(NamedTuple):
    """One document; `fields` are those beside its id and text."""

    number: int
    id: str | int
    text: str | None
    fields: dict[str, Any]


def decoded(file: BinaryIO, place: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1, split at line feeds only; the byte order mark is dropped.

    Raises:
        SourceError: not UTF-8. OSError: it cannot be read.
    """
    position = 0
    for number, raw in enumerate(file, 1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            bad, offset = raw[error.start], position + error.start
            raise SourceError(f"{place}:{number}: not UTF-8: byte 0x{bad:02x} at offset {offset}") from None
        yield number, line.removeprefix("\ufeff") if number == 1 else line
        position += len(raw)


def read(lines: Iterable[tuple[int, str]], file: str) -> Iterator[Line]:
    """Each line but empty ones: an object with "id" (or "_id", as BEIR has it), perhaps "text", and other fields.

    Raises:
        SourceError: another form.
    """
    for number, line in lines:
        if not line.strip():
            continue
        place = f"{file}:{number}"
        record = _object(line, place)
        own = "id" if "id" in record or "_id" not in record else "_id"
        if own not in record:
            raise SourceError(f'{place}: no "id"; the line has {", ".join(record) or "no fields"}')
        id, text = record.pop(own), record.pop("text", None)
        if isinstance(id, bool) or not isinstance(id, (str, int)):
            raise SourceError(f"{place}: an id must be a string or a whole number, got {json.dumps(id)}")
        if not isinstance(text, (str, type(None))):
            raise SourceError(f"{place}: the text of id {id!r} must be a string, got {json.dumps(text)[:40]}")
        yield Line(number, id, text, record)


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        if not line.endswith("\n"):  # the last one
            raise SourceError(
                f"{place}: not JSON: {error.msg} (column {error.colno} of {len(line)}); the file ends in this "
                "line, without a line feed, and may be cut off"
            ) from None
        raise SourceError(f"{place}: not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{place}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise SourceError(f'{place}: expected an object with "id" and "text", got {type(record).__name__}')
    return record


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
