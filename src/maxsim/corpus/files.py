"""Reading embeddings that other programs wrote: a file → documents, one at a time. Nothing is ever unpickled.

    .npz, .safetensors, .pt   `tokens` (or `embeddings`) [T, D] with `offsets` [N + 1] or `lengths` [N], or padded
                              `embeddings` [N, L, D], perhaps with `lengths`; `ids` [N] perhaps; without these names one
                              array [L, D] a document, named by its id. A .pt file may also hold a list of [L, D]
    .npy                      [N, L, D]
    .parquet                  a column `embeddings` (or `embedding`, `tokens`, `vectors`) of lists of lists of floats,
                              `id` or `ids`, `text`; other columns become metadata

Documents without ids are named "file:number", from 1.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..packed import as_tensor
from .documents import Id

npy: Any = np.lib.format
TOKENS = ("tokens", "embeddings")
COLUMNS = ("embeddings", "embedding", "tokens", "vectors")
BLOCK_BYTES = 4 << 20  # read at a time


class Row(NamedTuple):
    """A document of a file."""

    id: Id
    embeddings: Any
    text: str | None = None
    metadata: dict[str, Any] | None = None


class FileError(ValueError):
    """A file that cannot be read as embeddings; the message names it and says what was expected."""


def read(path: Path) -> Iterator[Row]:
    """The documents of a file, with bounded memory.

    Raises:
        FileError: another kind of file, one of other contents, or damaged. OSError: it cannot be read.
        ImportError: Parquet without pyarrow.
    """
    kinds: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".npz": _npz, ".npy": _npy, ".safetensors": _safetensors, ".parquet": _parquet, ".pt": _pt, ".pth": _pt
    }  # fmt: skip
    suffix = path.suffix.lower()
    if suffix in (".pkl", ".pickle", ".joblib"):
        raise FileError(
            f"{path}: a pickle runs whatever code it holds when it is read, so it is not; save arrays with numpy.savez "
            "or safetensors, and ids as an array of str or int beside them"
        )
    if suffix not in kinds:
        raise FileError(f"{path}: expected one of {', '.join(kinds)}")
    try:
        yield from kinds[suffix](path)
    except (SafetensorError, zipfile.BadZipFile, EOFError) as error:
        raise FileError(f"{path}: {path.stat().st_size} bytes, damaged: {error}") from error


def _npz(path: Path) -> Iterator[Row]:
    with zipfile.ZipFile(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}

        def whole(name: str) -> Any:
            with archive.open(f"{name}.npy") as file:
                return _array(lambda: npy.read_array(file, allow_pickle=False), f"{path}: {name}")

        def blocks(name: str) -> Iterator[Any]:
            with archive.open(f"{name}.npy") as file:
                yield from _stream(file, f"{path}: {name}")

        yield from _documents(path, names, whole, blocks)


def _stream(file: Any, where: str) -> Iterator[Any]:
    """The array of an open .npy file by blocks of its first dimension."""
    version = npy.read_magic(file)
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = header(file)
    if dtype.hasobject:
        raise FileError(f"{where} holds objects, which are pickled: {EXPORT}")
    if fortran or not shape:
        raise FileError(
            f"{where} has shape {list(shape)}{' in Fortran order' if fortran else ''}: save a C-ordered copy"
        )
    row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for low in range(0, shape[0], step):
        count = min(step, shape[0] - low)
        raw = bytearray(file.read(count * row_bytes))
        if len(raw) != count * row_bytes:
            raise EOFError(f"{where} ends in row {low + len(raw) // max(1, row_bytes)} of {shape[0]}")
        yield np.frombuffer(raw, dtype).reshape(count, *shape[1:])


EXPORT = "save documents packed (tokens [T, D] and offsets [N + 1]), ids as an array of str or int"


def _npy(path: Path) -> Iterator[Row]:
    array = _array(lambda: np.load(path, mmap_mode="r", allow_pickle=False), str(path))
    if array.ndim != 3:
        raise FileError(f"{path}: expected [N, L, D], got shape {list(array.shape)}; {EXPORT} in a .npz file")
    for number, document in enumerate(array, 1):
        yield Row(f"{path.name}:{number}", np.array(document))


def _array(load: Callable[[], Any], where: str) -> Any:
    try:
        return load()
    except ValueError as error:
        if "pickle" in str(error) or "Python objects" in str(error):
            raise FileError(f"{where} holds objects, which are pickled: {EXPORT}") from None
        raise FileError(f"{where}: {error}") from error


def _safetensors(path: Path) -> Iterator[Row]:
    with safe_open(path, framework="pt") as file:

        def blocks(name: str) -> Iterator[Any]:
            tensor = file.get_tensor(name)  # mapped
            step = max(1, BLOCK_BYTES // max(1, tensor[:1].nbytes))
            yield from tensor.split(step)

        yield from _documents(path, set(file.keys()), file.get_tensor, blocks)


def _pt(path: Path) -> Iterator[Row]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError) as error:
        raise FileError(
            f"{path}: holds more than tensors, which only unpickling could read, and that runs whatever code it holds: "
            f"{EXPORT}, with torch.save of a dict or as safetensors ({str(error).splitlines()[0]})"
        ) from None
    if isinstance(held, Tensor):
        held = {"embeddings": held}
    if isinstance(held, (list, tuple)):
        held = {f"{path.name}:{number}": tensor for number, tensor in enumerate(held, 1)}
    if not isinstance(held, Mapping):
        raise FileError(f"{path}: expected a dict or a list of tensors, got {type(held).__name__}")
    yield from _documents(path, set(held), held.__getitem__, lambda name: iter([held[name]]))


def _documents(
    path: Path, names: set[Any], whole: Callable[[Any], Any], blocks: Callable[[str], Iterator[Any]]
) -> Iterator[Row]:
    """`whole(name)` is an array, `blocks(name)` the same in pieces."""
    tokens = next((name for name in TOKENS if name in names), None)
    if tokens is None or (tokens == "tokens" and not names & {"offsets", "lengths"}):
        for name in sorted(names, key=str):
            yield Row(name, whole(name))
        return
    ids = _ids(path, whole("ids")) if "ids" in names else None
    lengths = _lengths(path, names, whole)
    if lengths is not None and ids is not None and len(lengths) != len(ids):
        raise FileError(f"{path}: {len(lengths)} documents, {len(ids)} ids")
    count = 0
    for document in _cut(path, blocks(tokens), lengths):
        if ids is not None and count == len(ids):
            raise FileError(f"{path}: {len(ids)} ids, and more documents")
        yield Row(f"{path.name}:{count + 1}" if ids is None else ids[count], document)
        count += 1
    if ids is not None and count < len(ids):
        raise FileError(f"{path}: {len(ids)} ids, {count} documents")


def _ids(path: Path, ids: Any) -> list[Id]:
    if isinstance(ids, (list, tuple)):  # of a .pt file, which has no arrays of str
        return list(ids)
    if not hasattr(ids, "ndim") or ids.ndim != 1 or (isinstance(ids, np.ndarray) and ids.dtype.kind not in "iuU"):
        raise FileError(f"{path}: ids must be one array of str or int, got {ids.dtype} {list(ids.shape)}")
    listed: list[Id] = ids.tolist()
    return listed


def _lengths(path: Path, names: set[Any], whole: Callable[[Any], Any]) -> list[int] | None:
    if not names & {"offsets", "lengths"}:
        return None
    if "lengths" in names:
        lengths = np.asarray(whole("lengths"))
    else:
        offsets = np.asarray(whole("offsets"))
        lengths = np.diff(offsets)
        if not len(offsets) or offsets[0] != 0:
            raise FileError(f"{path}: offsets must begin with 0")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise FileError(f"{path}: offsets must be whole numbers that do not fall, and lengths not negative")
    counted: list[int] = lengths.tolist()
    return counted


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
            rows = torch.cat(held) if len(held) > 1 else held[0]
            yield rows[:need]
            held, have = [rows[need:]], have - need
            need = next(wanted, None)
    if padded and lengths is not None and count < len(lengths):
        raise FileError(f"{path}: {len(lengths)} lengths, {count} documents")
    while need == 0:  # empty documents behind the last token
        yield torch.empty(0, held[0].shape[1]) if held else torch.empty(0, 0)
        need = next(wanted, None)
    if need is not None or have:
        what = "end before the documents do" if need is not None else f"go on for {have} after the last document"
        raise FileError(f"{path}: tokens {what}")


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ImportError(f"{path}: Parquet files need pyarrow: pip install 'maxsim[parquet]'") from None
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise FileError(f"{path}: not a Parquet file: {error}") from error
    names = file.schema_arrow.names
    column = next((name for name in COLUMNS if name in names), None)
    if column is None:
        raise FileError(f"{path}: expected a column named {' or '.join(COLUMNS)}, got {names}")
    id_name = next((name for name in ("id", "ids") if name in names), None)
    others = [name for name in names if name not in (column, id_name, "text")]
    number = 0
    for batch in file.iter_batches(batch_size=1024):
        beside = batch.select([name for name in names if name != column]).to_pylist()
        for values, document in zip(beside, _lists(path, column, batch.column(column)), strict=True):
            number += 1
            id = f"{path.name}:{number}" if id_name is None else values[id_name]
            metadata = {name: values[name] for name in others if values[name] is not None}
            yield Row(id, document, values.get("text"), metadata or None)


def _lists(path: Path, name: str, column: Any) -> Iterator[Any]:
    """Documents of a column of lists of lists of floats."""
    import pyarrow as pa

    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not hasattr(kind.value_type, "value_type"):
        raise FileError(f"{path}: column {name!r} must hold lists of lists of floats, got {kind}")
    if column.null_count:
        raise FileError(f"{path}: column {name!r} holds {column.null_count} nulls: write empty lists")
    tokens = column.flatten()
    if pa.types.is_fixed_size_list(tokens.type):
        width = tokens.type.list_size
    else:
        widths = tokens.value_lengths().unique().to_pylist()
        if len(widths) > 1:
            raise FileError(f"{path}: column {name!r} holds tokens of widths {sorted(widths, key=str)}")
        width = widths[0] if widths else 0
    values = tokens.flatten()
    if tokens.null_count or values.null_count or not pa.types.is_floating(values.type):
        raise FileError(f"{path}: column {name!r} must hold floats without nulls, got {values.type}")
    rows = values.to_numpy(zero_copy_only=False).reshape(-1, width or 1)
    low = 0
    for length in column.value_lengths().to_pylist():
        yield rows[low : low + length, :width]
        low += length
