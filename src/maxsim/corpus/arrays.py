"""Named arrays of a file, packed, padded or one a document → documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..packed import as_tensor
from .documents import Id
from .errors import FileError
from .gathering import joined

TOKENS = ("tokens", "embeddings")
MASKS = ("mask", "attention_mask")
EXPORT = "save documents packed (tokens [T, D] and offsets [N + 1]), ids as an array of str or int"


class Row(NamedTuple):
    """A document of a file; `id` is None where the file has none."""

    id: Id | None
    embeddings: Any
    text: str | None = None
    metadata: dict[str, Any] | None = None


class Arrays(NamedTuple):
    """Arrays of a file by name: `whole(name)` is one, `blocks(name)` the same in pieces."""

    path: Path
    names: set[Any]
    whole: Callable[[Any], Any]
    blocks: Callable[[Any], Iterator[Any]]


def documents(arrays: Arrays) -> Iterator[Row]:
    """One row a document.

    Raises:
        FileError: arrays that do not fit together.
    """
    path, names = arrays.path, arrays.names
    tokens = next((each for each in TOKENS if each in names), None)
    if tokens is None or (tokens == "tokens" and not names & {"offsets", "lengths"}):
        for each in sorted(names, key=str):
            yield Row(each, arrays.whole(each))
        return
    ids = _ids(path, arrays.whole("ids")) if "ids" in names else None
    lengths = _lengths(arrays)
    if lengths is not None and ids is not None and len(lengths) != len(ids):
        raise FileError(f"{path}: {len(lengths)} documents, {len(ids)} ids")
    mask = _mask(arrays)
    if mask is not None and lengths is not None:
        raise FileError(f"{path}: a mask, and lengths or offsets too: keep one that says which tokens there are")
    count = 0
    for document in _cut(path, arrays.blocks(tokens), lengths):
        if ids is not None and count == len(ids):
            raise FileError(f"{path}: {len(ids)} ids, and more documents")
        if mask is not None:
            if count == len(mask) or mask.shape[1] != len(document):
                shape = list(mask.shape)
                raise FileError(f"{path}: a mask {shape}, and a document {count} of {len(document)} tokens")
            document = document[mask[count]]
        yield Row(None if ids is None else ids[count], document)
        count += 1
    if ids is not None and count < len(ids):
        raise FileError(f"{path}: {len(ids)} ids, {count} documents")
    if mask is not None and count < len(mask):
        raise FileError(f"{path}: a mask of {len(mask)} documents, {count} documents")


def _mask(arrays: Arrays) -> Tensor | None:
    """bool [N, L], True = keep; None where there is none."""
    name = next((each for each in MASKS if each in arrays.names), None)
    if name is None:
        return None
    given = _numbers(arrays.path, name, arrays.whole(name))
    if given.ndim != 2 or given.dtype.kind not in "iufb" or not ((given == 0) | (given == 1)).all():
        raise FileError(f"{arrays.path}: {name} must hold 0 and 1 [N, L], got {given.dtype} {list(given.shape)}")
    return torch.from_numpy(given != 0)


def _ids(path: Path, ids: Any) -> list[Id]:
    if isinstance(ids, (list, tuple)):  # of a .pt file, which has no arrays of str
        return list(ids)
    if not isinstance(ids, (np.ndarray, Tensor)):
        raise FileError(f"{path}: ids must be one array of str or int, got {type(ids).__name__}")
    if ids.ndim != 1 or (isinstance(ids, np.ndarray) and ids.dtype.kind not in "iuU"):
        raise FileError(f"{path}: ids must be one array of str or int, got {ids.dtype} {list(ids.shape)}")
    listed: list[Id] = _numbers(path, "ids", ids).tolist()
    return listed


def _lengths(arrays: Arrays) -> list[int] | None:
    """Tokens of each document; None where nothing says."""
    path = arrays.path
    name = next((each for each in ("lengths", "offsets") if each in arrays.names), None)
    if name is None:
        return None
    given = _numbers(path, name, arrays.whole(name))
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise FileError(f"{path}: {name} must be whole numbers of one dimension, got {given.dtype} {list(given.shape)}")
    if name == "offsets":
        if not len(given) or given[0] != 0:
            raise FileError(f"{path}: offsets must begin with 0, got {given[:1].tolist()}")
        wrong = np.flatnonzero(given[1:] < given[:-1])
        if len(wrong):
            at = int(wrong[0])
            raise FileError(f"{path}: offsets must not fall: {given[at]}, then {given[at + 1]} at {at + 1}")
        given = np.diff(given)
    elif len(wrong := np.flatnonzero(given < 0)):
        raise FileError(f"{path}: lengths must not be negative, got {given[wrong[0]]} at {wrong[0]}")
    counted: list[int] = given.tolist()
    return counted


def _numbers(path: Path, name: str, value: Any) -> Any:
    """As an array of numpy; a tensor may hold no values."""
    if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided):
        raise FileError(f"{path}: {name} must be a dense tensor with values, got {value.layout} on {value.device}")
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # ragged lists, dtypes that numpy has not
        raise FileError(f"{path}: {name} must be one array: {error}") from error


def _cut(path: Path, blocks: Iterator[Any], lengths: list[int] | None) -> Iterator[Any]:
    """Documents out of blocks: [n, L, D], or rows of tokens [n, D] of documents of these lengths."""
    held, wanted = list[Tensor](), iter(lengths or [])
    need, have, count, padded = next(wanted, None), 0, 0, False
    for block in blocks:
        part = as_tensor(block, str(path))
        if part.ndim == 3:
            for document in part:
                if lengths is not None and count >= len(lengths):
                    raise FileError(f"{path}: {len(lengths)} lengths, and more documents")
                if lengths is not None and lengths[count] > len(document):
                    raise FileError(f"{path}: document {count} has length {lengths[count]}, of {len(document)} tokens")
                yield document if lengths is None else document[: lengths[count]]
                count += 1
            need, padded = None, True
            continue
        if part.ndim != 2 or lengths is None:
            raise FileError(
                f"{path}: expected embeddings [N, L, D], or tokens [T, D] with offsets [N + 1] or lengths [N], got "
                f"shape […{', '.join(map(str, part.shape[1:]))}]"
            )
        held.append(part)
        have += len(part)
        while need is not None and have >= need:
            rows = joined(held) if len(held) > 1 else held[0]
            yield rows[:need]
            held, have = [rows[need:]], have - need
            need = next(wanted, None)
    if padded and lengths is not None and count < len(lengths):
        raise FileError(f"{path}: {len(lengths)} lengths, {count} documents")
    while need == 0:  # empty documents behind the last token
        yield torch.empty(0, held[0].shape[1] if held else 0, dtype=torch.float32, device="cpu")
        need = next(wanted, None)
    if need is not None or have:
        what = "end before the documents do" if need is not None else f"go on for {have} after the last document"
        raise FileError(f"{path}: tokens {what}")
