"""Reading embeddings that other programs wrote: a file or folder → documents, one at a time. Nothing is ever unpickled.

    .npz, .safetensors, .pt   `tokens` (or `embeddings`) [T, D] with `offsets` [N + 1] or `lengths` [N], or padded
                              `embeddings` [N, L, D], perhaps with `lengths`, or with a `mask` or `attention_mask`
                              [N, L] of 0 and 1; `ids` [N] perhaps; without these names one array [L, D] a document,
                              named by its id. A .pt file may also hold a list of [L, D], alone or as `embeddings`
    .npy                      [N, L, D]; in a folder also [L, D], one document
    .parquet                  a column `embeddings` (or `embedding`, `tokens`, `vectors`, `vector`) of lists of lists of
                              floats, or of tensors [L, D]; `id`, `ids` or `_id`, `text`; other columns become
                              metadata

Ids, texts and metadata may also stand in JSON lines beside a file (`lines`). Documents without ids are named
"file:number", from 1. Of a folder all such files below it are read, in the order of their paths, which stand in these
names; a .npy file of one document is named by its path without the ending.
"""

from __future__ import annotations

import errno
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..packed import as_tensor
from ..quantized.files import is_codes
from . import catalogue, lines, parquet
from .arrays import EXPORT, Arrays, Row, documents
from .errors import FileError

npy: Any = np.lib.format
BLOCK_BYTES = 4 << 20  # read at a time
KINDS = (".npz", ".npy", ".safetensors", ".parquet", ".pt", ".pth")
# what the readers of these formats raise where a file is damaged
DAMAGE = (
    SafetensorError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, ValueError, LookupError,
    ArithmeticError, NotImplementedError, MemoryError, RuntimeError, SyntaxError, TokenError,
)  # fmt: skip
# of an OSError that tells of damage: pyarrow's own have none, seeking before a file's beginning has EINVAL
OF_DAMAGE = (None, errno.EINVAL)


def read(path: Path) -> Iterator[Row]:
    """The documents of a file or folder, with bounded memory.

    Raises:
        FileError: another kind of file, one of other contents, or damaged. OSError: it cannot be read.
        ImportError: Parquet without pyarrow.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        yield from _folder(path)
    elif suffix in KINDS:
        yield from _file(path, path.name)
    elif suffix in (".pkl", ".pickle", ".joblib"):
        raise FileError(
            f"{path}: a pickle runs whatever code it holds when it is read, so it is not; save arrays with numpy.savez "
            "or safetensors, and ids as an array of str or int beside them"
        )
    else:
        raise FileError(f"{path}: expected a folder or one of {', '.join(KINDS)}")


def below(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files below a folder, without those of corpora, and the corpora: segments alone have no ids, and still hold
    what was deleted."""
    corpora = {each.parent for each in folder.rglob(catalogue.FILE)}
    there = (each for each in folder.rglob("*") if each.is_file() and corpora.isdisjoint(each.parents))
    return sorted(there), sorted(corpora)


def _folder(folder: Path) -> Iterator[Row]:
    there, corpora = below(folder)
    paths = [path for path in there if path.suffix.lower() in KINDS]
    if not paths and corpora:
        raise FileError(f"{corpora[0]} is a corpus: export it, and give the file that was written")
    if not paths:
        raise FileError(f"{folder}: holds no index of another program, and no {', '.join(KINDS)}")
    for path in paths:
        yield from _file(path, path.relative_to(folder).as_posix(), alone=False)


def _file(path: Path, name: str, alone: bool = True) -> Iterator[Row]:
    """`name` stands in ids. alone: not one of a folder's."""
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".npz": _npz, ".safetensors": _safetensors, ".parquet": parquet.read, ".pt": _pt, ".pth": _pt
    }  # fmt: skip
    suffix = path.suffix.lower()
    try:
        rows = _npy(path, name, alone) if suffix == ".npy" else readers[suffix](path)
        if lines.beside(path).is_file():
            rows = lines.joined(rows, lines.beside(path))
        for number, row in enumerate(rows, 1):
            yield row if row.id is not None else row._replace(id=f"{name}:{number}")
    except FileError:
        raise
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno not in OF_DAMAGE:
            raise
        what = f"{type(error).__name__}: {error}" if isinstance(error, (LookupError, MemoryError)) else error
        raise FileError(f"{path}: {path.stat().st_size} bytes, damaged: {what}") from error


def _npz(path: Path) -> Iterator[Row]:
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
        foreign = [member for member in members if not member.endswith(".npy")]
        if foreign or len(set(members)) < len(members):
            what = f"{foreign[0]!r}, which is no array" if foreign else "two arrays of one name"
            raise FileError(f"{path}: holds {what}: expected what numpy.savez writes")

        def whole(each: str) -> Any:
            with archive.open(f"{each}.npy") as file:
                found = _array(lambda: npy.read_array(file, allow_pickle=False), f"{path}: {each}", f"{each}: ")
                _ended(file, f"{path}: {each}")
                return found

        def blocks(each: str) -> Iterator[Any]:
            with archive.open(f"{each}.npy") as file:
                yield from _stream(file, f"{path}: {each}")
                _ended(file, f"{path}: {each}")

        yield from documents(Arrays(path, {each.removesuffix(".npy") for each in members}, whole, blocks))


def _ended(file: Any, where: str) -> None:
    """The end of an archive's member, where its checksum is looked at."""
    if file.read(1):
        raise FileError(f"{where} goes on after its array")


def _stream(file: Any, where: str) -> Iterator[Any]:
    """The array of an open .npy file by blocks of its first dimension, in Fortran order as a whole."""
    version = npy.read_magic(file)
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = header(file)
    if dtype.hasobject:
        raise FileError(f"{where} holds objects, which are pickled: {EXPORT}")
    if not shape or min(shape) < 0:
        raise FileError(f"{where} has shape {list(shape)}: expected rows")
    row_bytes = dtype.itemsize
    for size in shape[1:]:
        row_bytes *= size
    # in Fortran order a row is spread over all of the array
    step = shape[0] if fortran else max(1, BLOCK_BYTES // max(1, row_bytes))
    for low in range(0, shape[0], max(1, step)):
        count = min(step, shape[0] - low)
        raw = bytearray(file.read(count * row_bytes))
        if len(raw) != count * row_bytes:
            raise EOFError(f"{where} ends in row {low + len(raw) // max(1, row_bytes)} of {shape[0]}")
        yield np.frombuffer(raw, dtype).reshape(count, *shape[1:], order="F" if fortran else "C")


def _npy(path: Path, name: str, alone: bool) -> Iterator[Row]:
    array = _array(lambda: npy.open_memmap(path, mode="r"), str(path))
    if array.ndim == 2 and not alone:
        yield Row(name[: -len(path.suffix)], np.array(array))
        return
    if array.ndim != 3:
        one = "; a single document is read out of a folder" if array.ndim == 2 else ""
        raise FileError(f"{path}: expected [N, L, D], got shape {list(array.shape)}; {EXPORT} in a .npz file{one}")
    for document in array:
        yield Row(None, np.array(document))


def _array(load: Callable[[], Any], where: str, member: str = "") -> Any:
    try:
        return load()
    except ValueError as error:
        if "pickle" in str(error) or "Python objects" in str(error):
            raise FileError(f"{where} holds objects, which are pickled: {EXPORT}") from None
        raise ValueError(f"{member}{error}") from error


def _safetensors(path: Path) -> Iterator[Row]:
    if is_codes(path):
        raise FileError(f"{path}: holds codes, which are added by themselves, not as one file of a folder")
    with safe_open(path, framework="pt") as file:

        def blocks(each: str) -> Iterator[Any]:
            tensor = file.get_tensor(each)  # mapped
            step = max(1, BLOCK_BYTES // max(1, tensor[:1].nbytes)) if tensor.ndim else 1
            yield from tensor.split(step) if tensor.ndim else [tensor]

        yield from documents(Arrays(path, set(file.keys()), file.get_tensor, blocks))


def _pt(path: Path) -> Iterator[Row]:
    try:
        # before version 1.6 PyTorch wrote no archives, and those it cannot map
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except UnpicklingError as error:
        raise FileError(
            f"{path}: holds more than tensors, which only unpickling could read, and that runs whatever code it holds: "
            f"{EXPORT}, with torch.save of a dict or as safetensors ({_first_line(error)})"
        ) from None
    except Exception as error:  # of a damaged file torch raises whatever comes
        raise FileError(f"{path}: {path.stat().st_size} bytes, damaged: {_first_line(error)}") from None
    if isinstance(held, Tensor):
        held = {"embeddings": held}
    if isinstance(held, (list, tuple)):
        yield from (Row(None, tensor) for tensor in held)
        return
    if not isinstance(held, Mapping):
        raise FileError(f"{path}: expected a dict or a list of tensors, got {type(held).__name__}")

    def blocks(each: str) -> Iterator[Any]:
        if not isinstance(held[each], (list, tuple)):
            yield held[each]
            return
        for number, item in enumerate(held[each]):
            yield as_tensor(item, f"{path}: {each}[{number}]")[None]

    yield from documents(Arrays(path, set(held), held.__getitem__, blocks))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
