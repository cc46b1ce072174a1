"""Reading texts: a file or a folder → documents with an id, a text and the place where they stand.

    file.jsonl, file.ndjson   one JSON object a line with "id" (or "_id", as BEIR has it; str or int) and "text"; other
                              fields become metadata
    file.tsv                  one document a line as ColBERT has it: its id, a tab and its text, perhaps another tab and
                              its title, which becomes metadata; a first line whose id is "id" names the columns
    .json                     is refused: its lines are no documents
    any other file            one document a line, its id is "name:line"; lines of white space only are skipped
    folder                    every .txt file below it is one document, its id is its path in the folder ("a/b.txt");
                              .jsonl and .ndjson files below it are read as above, other files are not read

Files are UTF-8, with or without a byte order mark. A .txt file of white space only, and a line of JSON or with tabs
whose text is that, are no documents: they are passed over and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from . import jsonlines
from .jsonlines import SourceError, decoded

__all__ = ["SourceError", "Text", "read", "read_stream"]

JSON_LINES = (".jsonl", ".ndjson")


class Text(NamedTuple):
    """One document; `place` is "file:line" or "file"."""

    id: str | int
    text: str
    metadata: dict[str, Any] | None
    place: str


def read(path: str | Path, empty: list[str] | None = None) -> Iterator[Text]:
    """The documents of a file or folder, folders in the order of their paths.

    Texts are read one by one and not kept; the ids and the places of all of them are, to find an id that comes twice.

    Args:
        empty: is given the places of documents that were passed over, since their text is empty.

    Raises:
        SourceError: missing or empty, not UTF-8, not JSON, without an id or text, an id that comes twice (names both
            places).
    """
    path = Path(path)
    kinds = "no .txt, .jsonl or .ndjson file with text" if path.is_dir() else "no text"
    yield from _checked(_read_any(path, [] if empty is None else empty), f"{path}: holds {kinds}")


def read_stream(file: BinaryIO, name: str) -> Iterator[Text]:
    """The documents of an open stream, one a line; `name` stands in ids and places.

    Raises:
        SourceError: empty, not UTF-8.
    """
    return _checked(_read_lines(decoded(file, name), name, name), f"{name}: holds no text")


def _checked(texts: Iterable[Text], nothing: str) -> Iterator[Text]:
    places: dict[str | int, str] = {}
    for text in texts:
        _check_values(text)
        if text.id in places:
            raise SourceError(f"{text.place}: id {text.id!r} was already used at {places[text.id]}")
        places[text.id] = text.place
        yield text
    if not places:
        raise SourceError(nothing)


def _read_any(path: Path, empty: list[str]) -> Iterable[Text]:
    if path.is_dir():
        return _read_folder(path, empty)
    if path.exists() and not path.is_file():
        raise SourceError(
            f"{path} is neither a file nor a folder; a source is read more than once, so save it to a file"
        )
    if not path.exists():
        raise SourceError(f"{path}: no such file or folder")
    if path.suffix.lower() in JSON_LINES:
        return _read_json_lines(path, empty)
    if path.suffix.lower() == ".tsv":
        return _read_tabs(path, empty)
    if path.suffix.lower() == ".json":
        raise SourceError(
            f'{path}: JSON is read by lines: write an object with "id" and "text" a line, to a .jsonl file'
        )
    return _read_lines(_lines(path), path.name, str(path))


def _read_folder(folder: Path, empty: list[str]) -> Iterator[Text]:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if path.suffix.lower() in JSON_LINES:
            yield from _read_json_lines(path, empty)
        elif path.suffix.lower() == ".txt":
            text = "".join(line for _, line in _lines(path))
            if not text.strip():
                empty.append(str(path))
                continue
            yield Text(path.relative_to(folder).as_posix(), text.strip(), None, str(path))


def _read_lines(lines: Iterable[tuple[int, str]], name: str, place: str) -> Iterator[Text]:
    for number, line in lines:
        if line.strip():
            yield Text(f"{name}:{number}", line.strip(), None, f"{place}:{number}")


def _read_tabs(path: Path, empty: list[str]) -> Iterator[Text]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        id, *fields = line.rstrip("\r\n").split("\t")
        if number == 1 and id == "id":  # names of columns, which files of DPR begin with
            continue
        if len(fields) not in (1, 2):
            raise SourceError(
                f"{path}:{number}: expected an id, a tab and a text, perhaps another tab and a title, got "
                f"{len(fields)} tab{'s' * (len(fields) != 1)}"
            )
        if not fields[0].strip():
            empty.append(f"{path}:{number}")
            continue
        title = {"title": fields[1]} if len(fields) == 2 else None
        yield Text(id.strip(), fields[0].strip(), title, f"{path}:{number}")


def _read_json_lines(path: Path, empty: list[str]) -> Iterator[Text]:
    for number, id, text, fields in jsonlines.read(_lines(path), str(path)):
        place = f"{path}:{number}"
        if text is None:
            raise SourceError(f'{place}: no "text"; the line has {", ".join(["an id", *fields])}')
        if not text.strip():
            empty.append(place)
            continue
        yield Text(id, text, fields or None, place)


def _check_values(text: Text) -> None:
    """What JSON and file names can hold but a corpus cannot."""
    for value in (text.id, text.text):
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise SourceError(f"{ascii(text.place)[1:-1]}: half a surrogate pair is not Unicode text") from None
        elif not -(2**63) <= value < 2**63:
            raise SourceError(f"{text.place}: the id {value} does not fit in 64 bits")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, "rb") as file:
            yield from decoded(file, str(path))
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
