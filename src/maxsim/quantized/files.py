"""Quantised documents in one safetensors file: nothing pickled, and nothing believed that has not been looked at.

The file holds `codes`, for ragged documents `offsets` (int64 `[N + 1]`), perhaps `mask`, and the tensors of `Codes` by
name; its metadata say what the codes are, and hold CRC-32 checksums of every tensor and of themselves. FORMAT grows
when an older version would read a file wrongly.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..packed import Packed
from .check import check
from .codes import CODECS, TENSORS, Codes
from .container import Quantized

FORMAT = 1
KIND = "maxsim.quantized"
SOURCES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def name_beside(path: Path) -> Path:
    """For a file that takes the place of `path` when it is whole. Raises FileNotFoundError where there is no such
    folder."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    return path.with_name(f".{uuid.uuid4().hex}.tmp")


def save(documents: Quantized, path: str | os.PathLike[str]) -> None:
    """As `Quantized.save`."""
    if documents.per_query:
        raise ValueError("candidates cannot be saved: save the documents that they were made of")
    documents = documents.compact()
    codes = documents.parameters
    tensors: dict[str, Tensor] = {"codes": documents.codes, **codes.tensors()}
    if documents.ends is not None:
        tensors["offsets"] = torch.cat([documents.ends.new_zeros(1), documents.ends])
    if documents.mask is not None:
        tensors["mask"] = documents.mask
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sums = {name: checksum(name, tensor) for name, tensor in tensors.items()}
    path = Path(path).resolve()  # a link stays, what it names is replaced
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    temporary = name_beside(path)
    metadata = metadata_of(codes, documents.saturated, sums)
    try:
        with open(temporary, "x") as file:
            mode = os.fstat(file.fileno()).st_mode  # as the process' umask says, which safetensors does not ask
        save_file(tensors, temporary, metadata)
        os.chmod(temporary, mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def metadata_of(codes: Codes, saturated: int, checksums: dict[str, int]) -> dict[str, str]:
    """What a file says of itself."""
    about = {
        "codec": codes.codec,
        "width": codes.width,
        "normalized": codes.normalized,
        "renormalize": codes.renormalize,
        "source": next((name for name, dtype in SOURCES.items() if dtype == codes.source), None),
        "saturated": saturated,
        "checksums": checksums,
    }
    words = json.dumps(about)
    return {"kind": KIND, "format": str(FORMAT), "about": words, "checksum": str(zlib.crc32(words.encode()))}


def checksum(name: str, tensor: Tensor) -> int:
    """Of a tensor on the CPU: its name, dtype, shape and bytes."""
    return checksum_of_rows(tensor, first_checksum(name, tensor.dtype, tensor.shape))


def first_checksum(name: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Before any bytes."""
    return zlib.crc32(f"{name} {dtype} {list(shape)}".encode())


def checksum_of_rows(rows: Tensor, before: int) -> int:
    """After more bytes of a tensor."""
    return zlib.crc32(rows.reshape(-1).view(torch.uint8).numpy().data, before)


def is_codes(path: Path) -> bool:
    """Whether a file says that it holds quantised documents."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("kind") == KIND
    except SafetensorError:
        return False


def load(path: str | os.PathLike[str]) -> Quantized:
    """As `Quantized.load`, on the CPU; the codes are mapped, not copied."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "a folder, where codes are one file; Quantized.from_index reads an index", str(path)
        )
    size = path.stat().st_size

    def refuse(why: object) -> NoReturn:
        raise ValueError(f"{path}: {size} bytes: {why}")

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        refuse(f"not a whole safetensors file: {error}")
    if metadata.get("kind") != KIND:
        refuse("not quantised documents of maxsim")
    version = metadata.get("format", "")
    if not version.isdecimal() or int(version) > FORMAT:
        refuse(f"format {version!r}, this version of maxsim reads up to {FORMAT}; upgrade maxsim")
    try:
        if metadata["checksum"] != str(zlib.crc32(metadata["about"].encode())):
            raise ValueError("the metadata have changed since they were written (checksum differs)")
        about = json.loads(metadata["about"])
        written = dict(about["checksums"])
        if gone := sorted(set(written) - set(tensors)):
            raise ValueError(f"{gone[0]} is missing")
        for name, tensor in tensors.items():
            if checksum(name, tensor) != written.get(name):
                raise ValueError(f"{name} has changed since it was written (checksum differs)")
        return _documents(tensors, about)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        refuse(f"damaged: {error}")


def _documents(tensors: dict[str, Tensor], about: dict[str, Any]) -> Quantized:
    codec, width, saturated = about["codec"], about["width"], about["saturated"]
    flags: dict[str, Any] = {name: about[name] for name in ("normalized", "renormalize")}
    source = None if about["source"] is None else SOURCES[about["source"]]
    numbers = type(width) is int and type(saturated) is int and width > 0 and saturated >= 0
    if codec not in CODECS or not numbers or not all(type(flag) is bool for flag in flags.values()):
        raise ValueError(f"unreadable metadata {about}")
    codes, offsets, mask = tensors.pop("codes"), tensors.pop("offsets", None), tensors.pop("mask", None)
    if unknown := sorted(set(tensors) - set(TENSORS)):
        raise ValueError(f"unknown tensors {unknown}")
    named: dict[str, Any] = {**flags, **tensors}
    parameters = Codes(codec, width, source=source, **named)
    if offsets is None:
        if codes.ndim != 3:
            raise ValueError(f"codes have shape {list(codes.shape)}, expected [N, L, W] without offsets")
        documents = Quantized(codes, parameters, codes.shape[1], mask=mask, saturated=saturated)
    else:
        if offsets.dtype != torch.int64:
            raise ValueError(f"offsets are {offsets.dtype}, expected torch.int64")
        places = Packed(codes, offsets)
        documents = Quantized(codes, parameters, places.max_length, places.starts, places.ends, True, mask, saturated)
    check(documents)
    return documents
