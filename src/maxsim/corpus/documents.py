"""What `add` takes: any accepted form of ids, embeddings, texts and metadata → one row a document, checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from ..packed import Packed, Views, as_tensor

Id: TypeAlias = str | int
MOST_LEVELS = 100  # of metadata: SQLite reads no JSON beyond 1,000
_END = object()


def check_id(value: object) -> Id:
    """The id as Python's str or int; TypeError or ValueError for anything that SQLite would not give back unchanged."""
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"an id must be a str or an int, got {type(value).__name__}: {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"an int id must fit in 64 bits, got {value}")
    if isinstance(value, str):
        _check_unicode(value, f"the id {value!r}")
        return str.__str__(value)  # of an enumeration too, whose own str is its name
    return int(value)


def id_list(ids: object) -> list[Id]:
    """Checked ids of any iterable but a single str."""
    return [check_id(id) for id in _ids(ids)]


def check_text(id: Id, text: object) -> str | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise TypeError(f"the text of document {id!r} must be a str or None, got {type(text).__name__}")
    _check_unicode(text, f"the text of document {id!r}")
    return text


def encode_metadata(id: Id, metadata: object) -> str | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"the metadata of document {id!r} must be a dict or None, got {type(metadata).__name__}")
    _check_metadata(id, metadata, MOST_LEVELS)
    try:
        return json.dumps(dict(metadata), allow_nan=False)
    except (TypeError, ValueError):
        for key, value in metadata.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"the metadata of document {id!r} is not JSON, at {key!r}: {error}") from None
        raise


def _check_metadata(id: Id, value: object, levels: int) -> None:
    """What JSON would change or SQLite would not read: keys that are no str, nesting, and the character 0."""
    if levels == 0:
        raise ValueError(f"the metadata of document {id!r} are nested more than {MOST_LEVELS} deep")
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError(f"the metadata of document {id!r} hold the character 0, at which filters end: {value!r}")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the metadata of document {id!r} have a key that is no str: {key!r}")
            _check_metadata(id, key, levels)
            _check_metadata(id, each, levels - 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_metadata(id, each, levels - 1)


def documents_of(embeddings: object) -> tuple[int | None, Iterator[Tensor]]:
    """How many documents there are, None if only reading tells, and the documents as [L, D] tensors of floats."""
    if isinstance(embeddings, (Packed, Views)):
        return len(embeddings), _from_ragged(embeddings)
    if isinstance(embeddings, np.ndarray) and embeddings.dtype == object and embeddings.ndim > 1:
        embeddings = embeddings.astype(np.float64)  # of items of one length numpy makes a block of Python floats
    items: Iterable[Any]
    if isinstance(embeddings, Tensor) and embeddings.is_nested:
        items = embeddings.unbind()
    elif isinstance(embeddings, Tensor) or (isinstance(embeddings, np.ndarray) and embeddings.dtype != object):
        if embeddings.ndim != 3:
            raise ValueError(
                f"embeddings must be [N, L, D] or a list of [L, D], got shape {list(embeddings.shape)}; "
                "put a single document in a list"
            )
        items = embeddings  # a mapped array is read document by document
    else:
        items = _iterable(embeddings, "embeddings")
    return _count(items), (document_of(item, number) for number, item in enumerate(items))


def together(
    ids: object, embeddings: object, texts: object = None, metadata: object = None, cut: object = None
) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
    """One row a document, None for what is not given; ValueError when one input ends before another (at once where
    lengths are known)."""
    given: dict[str, Iterable[Any]] = {"ids": _ids(ids)}
    count = None
    if embeddings is not None:
        count, given["embeddings"] = documents_of(embeddings)
    if texts is not None:
        given["texts"] = _iterable(texts, "texts")
    if metadata is not None:
        given["metadata"] = _iterable(metadata, "metadata")
    if cut is not None:
        given["cut"] = _iterable(cut, "cut")
    counts = {name: count if name == "embeddings" else _count(value) for name, value in given.items()}
    if len(set(counts.values()) - {None}) > 1:
        listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count is not None)
        raise ValueError(f"each document needs one of each, got {listed}; nothing was added")
    return _rows(given)


def _rows(given: dict[str, Iterable[Any]]) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
    iterators = {name: iter(value) for name, value in given.items()}
    count = 0
    while True:
        row = {name: next(iterator, _END) for name, iterator in iterators.items()}
        ended = [name for name, value in row.items() if value is _END]
        if len(ended) == len(row):
            return
        if ended:
            raise ValueError(f"{ended[0]} ended after {count}, the other inputs go on; nothing was added")
        yield row["ids"], row.get("embeddings"), row.get("texts"), row.get("metadata"), row.get("cut")
        count += 1


def document_of(item: Any, number: object) -> Tensor:
    """A tensor of floats [L, D]; TypeError or ValueError for anything else."""
    tensor = as_tensor(item, f"embeddings[{number}]").detach()
    if tensor.ndim != 2:
        raise ValueError(
            f"embeddings[{number}] must have shape [L, D], got {list(tensor.shape)}; expected a list of [L, D]"
        )
    if not tensor.is_floating_point():
        raise TypeError(f"embeddings[{number}] must hold floats, got {tensor.dtype}")
    if tensor.is_meta:
        raise ValueError(f"embeddings[{number}] must hold values, got a meta tensor")
    return tensor


def _from_ragged(value: Packed | Views) -> Iterator[Tensor]:
    T = value.tokens.shape[0]
    for number, (start, end) in enumerate(zip(value.starts.tolist(), value.ends.tolist(), strict=True)):
        if not 0 <= start <= end <= T:  # offsets given on a GPU have not been checked
            raise ValueError(f"embeddings[{number}] spans the tokens {start} to {end}, there are {T}")
        yield document_of(value.tokens[start:end], number)


def _count(value: object) -> int | None:
    return len(value) if isinstance(value, Sized) else None


def _ids(ids: object) -> Iterable[Any]:
    if isinstance(ids, Tensor) and ids.is_meta:
        raise ValueError("ids must hold values, got a meta tensor")
    return _iterable(ids.tolist() if hasattr(ids, "tolist") else ids, "ids")  # numpy and torch ids become Python's


def _iterable(value: object, what: str) -> Iterable[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{what} must be a list or another iterable, got {type(value).__name__}")
    return value


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not valid Unicode text: {error}") from None
