"""Segments: immutable safetensors files of packed tokens.

A file holds `offsets`, int64 [N + 1], and `tokens`, [T, D] in the corpus' dtype; document n of the segment is
`tokens[offsets[n]:offsets[n + 1]]`. It is written under another name, flushed to the disk and renamed, so a name that
the catalogue knows always stands for a whole file. Reading maps the file: a page is read when it is scored.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import CorpusError

SEGMENT_BYTES = 256 << 20  # tokens of one segment, unless a single document is larger
FINITE_CHECK = 1 << 22  # elements looked at in one go

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class SegmentRecord:
    """What the catalogue knows of a segment. Its documents have the positions first … first + documents − 1."""

    number: int
    first: int
    documents: int
    tokens: int
    bytes: int
    sha256: str
    deleted: int = 0

    @property
    def file(self) -> str:
        return f"{self.number:08d}.safetensors"


@dataclass(frozen=True)
class Segment:
    """An open segment. `tokens` [T, D], `starts` and `lengths` int64 [N] lie on one device; `longest` is the largest
    length; `kept` are the rows that are not deleted, None = all."""

    record: SegmentRecord
    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    longest: int
    kept: Tensor | None = None


class SegmentBuffer:
    """Collects documents for one segment: converted to the store's dtype, at most SEGMENT_BYTES of them."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self.dim = dim
        self.dtype = dtype
        self._tokens = torch.empty(0, dim, dtype=dtype)
        self._offsets = [0]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def room(self, length: int) -> bool:
        """Whether a document of `length` tokens still fits; the first one always does."""
        row_bytes = self.dim * self.dtype.itemsize
        return len(self) == 0 or (self._offsets[-1] + length) * row_bytes <= SEGMENT_BYTES

    def append(self, document: Tensor) -> None:
        start, end = self._offsets[-1], self._offsets[-1] + document.shape[0]
        if end > self._tokens.shape[0]:
            grown = torch.empty(max(end, 2 * self._tokens.shape[0]), self.dim, dtype=self.dtype)
            grown[:start] = self._tokens[:start]
            self._tokens = grown
        self._tokens[start:end].copy_(document)
        self._offsets.append(end)

    def first_not_finite(self) -> int | None:
        """The first row (document) that holds NaN or infinity in the store's dtype."""
        tokens = self._tokens[: self._offsets[-1]].view(-1)
        for low in range(0, tokens.numel(), FINITE_CHECK):
            finite = torch.isfinite(tokens[low : low + FINITE_CHECK])
            if not bool(finite.all()):
                token = (low + int((~finite).nonzero()[0])) // self.dim
                return int(torch.searchsorted(torch.tensor(self._offsets), token, right=True)) - 1
        return None

    def write(self, folder: Path, number: int, first: int) -> SegmentRecord:
        """Writes the segment and returns what the catalogue must remember of it. Empties the buffer.

        Raises:
            CorpusError: the file cannot be written, on a full disk say.
        """
        tokens = self._tokens[: self._offsets[-1]]
        record = SegmentRecord(number, first, len(self), tokens.shape[0], 0, "")
        path, temporary = folder / record.file, folder / (record.file + ".tmp")
        try:
            save_file({"offsets": torch.tensor(self._offsets), "tokens": tokens}, temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            record = replace(record, bytes=temporary.stat().st_size, sha256=sha256(temporary))
            os.replace(temporary, path)
            sync_folder(folder)
        except (SafetensorError, OSError) as error:
            raise CorpusError(f"{temporary}: cannot be written: {error}") from error
        self._offsets = [0]
        return record


def open_segment(folder: Path, record: SegmentRecord, dim: int, dtype: torch.dtype, device: torch.device) -> Segment:
    """Maps a segment (or copies it to a GPU) after checking that it is what the catalogue says.

    Raises:
        CorpusError: missing, cut short, of another shape or dtype, offsets that fall or leave the tokens.
    """
    path = folder / record.file
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CorpusError(f"{path}: missing, expected {record.bytes} bytes ({error.strerror})") from error
    if size != record.bytes:
        raise CorpusError(f"{path}: {size} bytes, expected {record.bytes}; restore the file from a copy")
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            if names != ["offsets", "tokens"]:
                raise CorpusError(f"{path}: holds {names}, expected offsets and tokens")
            offsets, tokens = file.get_tensor("offsets"), file.get_tensor("tokens")
    except (SafetensorError, OSError) as error:
        raise CorpusError(f"{path}: {size} bytes, not a whole safetensors file: {error}") from error
    expected = ((record.documents + 1,), torch.int64), ((record.tokens, dim), dtype)
    for name, tensor, (shape, kind) in zip(("offsets", "tokens"), (offsets, tokens), expected, strict=True):
        if tuple(tensor.shape) != shape or tensor.dtype != kind:
            raise CorpusError(
                f"{path}: {name} are {tensor.dtype} {list(tensor.shape)}, the catalogue expects {kind} {list(shape)}"
            )
    _check_offsets(path, offsets, record.tokens)
    lengths = offsets.diff()
    return Segment(record, tokens.to(device), offsets[:-1].to(device), lengths.to(device), int(lengths.max()))


def _check_offsets(path: Path, offsets: Tensor, tokens: int) -> None:
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens:
        raise CorpusError(
            f"{path}: offsets run from {int(offsets[0])} to {int(offsets[-1])}, expected 0 to {tokens}, the token count"
        )
    falling = (offsets.diff() < 0).nonzero()
    if len(falling):
        row = int(falling[0])
        raise CorpusError(f"{path}: offsets fall from {int(offsets[row])} to {int(offsets[row + 1])} at document {row}")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable (Windows has no such call and needs none)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_rows(segment: Segment, deleted_rows: Sequence[int]) -> Tensor | None:
    """The rows of a segment that are not deleted, on its device; None = all."""
    if not deleted_rows:
        return None
    kept = torch.ones(segment.record.documents, dtype=torch.bool)
    kept[torch.tensor(deleted_rows)] = False
    return kept.nonzero().flatten().to(segment.tokens.device)
