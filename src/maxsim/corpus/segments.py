"""Segments: immutable safetensors files of packed documents.

A file holds `offsets`, int64 [N + 1], and the tensors of the corpus' coding: of tokens a row each, [T, ...], document
n having those from offsets[n] to offsets[n + 1], and of documents an entry each, [N]. One that compaction made has gaps
in its documents' positions and holds these too, int64 [N]. It is written under another name, flushed to the disk and
renamed, so a name that the catalogue knows always stands for a whole file. Reading maps the file: a page is read when
it is scored.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..quantized import Quantized
from .coding import Coding, Shape, tables_of
from .errors import CorpusError
from .rows import FileRecord, SegmentRecord

# Tokens of one segment before they are encoded, unless a single document is larger. With what stands beside them less
# than a power of two, to which PyTorch rounds page-locked memory up.
SEGMENT_BYTES = 240 << 20
CODEBOOK = "codebook.safetensors"


class Tensors(Mapping[str, Tensor]):
    """Of a segment, by name. Codes are looked at before they are given out for the first time: kernels would read
    beyond a table's end."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], coding: Coding) -> None:
        self._path, self._tensors, self._coding, self._sound = path, tensors, coding, not coding.quantised

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors[name]
        if not self._sound and name in ("codes", "centroid"):
            wrong = self._coding.beyond(self._tensors)
            if wrong is not None:
                raise CorpusError(f"{self._path}: {wrong}; restore the file from a copy")
            self._sound = True
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Mapped(NamedTuple):
    """What a segment's file holds: tensors of tokens and documents by name, `offsets` int64 [N + 1], `longest`, the
    largest length, and `positions` int64 [N], None = they follow one another."""

    tensors: Mapping[str, Tensor]
    offsets: Tensor
    longest: int
    positions: Tensor | None


class SegmentFile:
    """A segment's file, mapped when it is first asked for what it holds."""

    def __init__(self, folder: Path, record: SegmentRecord, coding: Coding) -> None:
        self._of = folder, record, coding

    @cached_property
    def mapped(self) -> Mapped:
        """What it holds, looked at as `open_segment` does."""
        return open_segment(*self._of)


@dataclass(frozen=True)
class Segment:
    """A segment, without the documents at the positions `deleted`. Who has not called `open` while the catalogue named
    it may find that its file has gone."""

    record: SegmentRecord
    file: SegmentFile
    deleted: Sequence[int] = ()

    def open(self) -> None:
        """Maps its file; from then on that may be removed.

        Raises:
            CorpusError: as `open_segment`.
        """
        _ = self.file.mapped

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By name."""
        return self.file.mapped.tensors

    @property
    def offsets(self) -> Tensor:
        """Where documents begin and the last one ends, int64 [N + 1]."""
        return self.file.mapped.offsets

    @property
    def longest(self) -> int:
        """The largest length."""
        return self.file.mapped.longest

    @property
    def positions(self) -> Tensor | None:
        """Of documents, int64 [N], None = they follow one another."""
        return self.file.mapped.positions

    @cached_property
    def kept(self) -> Tensor | None:
        """The rows (documents) that are not deleted, int64, None = all."""
        if not self.deleted:
            return None
        kept = torch.ones(self.record.documents, dtype=torch.bool, device="cpu")
        kept[self.rows(self.deleted)] = False
        return kept.nonzero().flatten()

    @property
    def starts(self) -> Tensor:
        """Where documents begin, int64 [N]."""
        return self.offsets[:-1]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each document, int64 [N]."""
        return self.offsets.diff()

    def row(self, position: int) -> int:
        """The row of a document that this segment holds."""
        return int(self.rows([position])[0])

    def rows(self, positions: Sequence[int] | Tensor) -> Tensor:
        """The same of several, int64.

        Raises:
            CorpusError: a position that it does not hold.
        """
        places = torch.as_tensor(positions, dtype=torch.int64, device="cpu")
        if self.positions is None:
            found = places - self.record.first
            wrong = (found < 0) | (found >= self.record.documents)
        else:
            found = torch.searchsorted(self.positions, places).clamp_(max=self.record.documents - 1)
            wrong = self.positions[found] != places
        if bool(wrong.any()):
            raise CorpusError(
                f"{self.record.file}: holds no document at position {int(places[wrong][0])}, which the catalogue names"
                "; see `check`"
            )
        return found

    def positions_of(self, rows: Tensor | None) -> Tensor:
        """Positions of rows, None = of all, int64."""
        if rows is None:
            rows = torch.arange(self.record.documents, device="cpu")
        return rows + self.record.first if self.positions is None else self.positions[rows]


def write_segment(
    folder: Path,
    number: int,
    tensors: Mapping[str, Tensor],
    offsets: Tensor,
    first: int,
    positions: Tensor | None = None,
) -> SegmentRecord:
    """Writes a segment and returns what the catalogue must remember of it.

    Raises:
        CorpusError: the file cannot be written, on a full disk say.
    """
    count = len(offsets) - 1
    last = first + count - 1 if positions is None else int(positions[-1])
    record = SegmentRecord(number, first, last, count, int(offsets[-1]), 0, "")
    path, temporary = folder / record.file, folder / (record.file + ".tmp")
    gaps = {} if positions is None else {"positions": positions}
    try:
        save_file({"offsets": offsets, **gaps, **tensors}, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        record = replace(record, bytes=temporary.stat().st_size, sha256=sha256(temporary))
        os.replace(temporary, path)
        sync_folder(folder)
    except (SafetensorError, OSError) as error:
        raise CorpusError(f"{temporary}: cannot be written: {error}") from error
    return record


def open_segment(folder: Path, record: SegmentRecord, coding: Coding) -> Mapped:
    """Maps a segment's file after checking that it is what the catalogue says.

    Raises:
        CorpusError: missing, cut short, of other tensors, shapes or dtypes, offsets that fall or leave the tokens.
    """
    path = folder / record.file
    size = _size(path, record.bytes)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CorpusError(f"{path}: {size} bytes, not a whole safetensors file: {error}") from error
    N, T = record.documents, record.tokens
    expected: dict[str, Shape] = {"offsets": (torch.int64, (N + 1,))}
    if record.last - record.first >= N:
        expected["positions"] = (torch.int64, (N,))
    expected |= dict.fromkeys(coding.of_documents(), (torch.float32, (N,)))
    expected |= {name: (dtype, (T, *shape)) for name, (dtype, shape) in coding.of_tokens().items()}
    if set(tensors) != set(expected):
        raise CorpusError(f"{path}: holds {sorted(tensors)}, expected {' and '.join(expected)}")
    for name, (dtype, shape) in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise CorpusError(
                f"{path}: {name} are {tensor.dtype} {list(tensor.shape)}, the catalogue expects {dtype} {list(shape)}"
            )
    offsets, positions = tensors.pop("offsets"), tensors.pop("positions", None)
    _check_offsets(path, offsets, T)
    if positions is not None:
        _check_positions(path, positions, record)
    return Mapped(Tensors(path, tensors, coding), offsets, int(offsets.diff().max()), positions)


def write_codebook(folder: Path, coding: Coding) -> FileRecord:
    """Writes what codes are decoded by, a file beside the segments.

    Raises:
        CorpusError: the file cannot be written.
    """
    path = folder / CODEBOOK
    try:
        coding.like().save(path)
        sync_folder(folder)
        return FileRecord(CODEBOOK, path.stat().st_size, sha256(path))
    except OSError as error:
        raise CorpusError(f"{path}: cannot be written: {error}") from error


def open_codebook(folder: Path, record: FileRecord, coding: Coding) -> Coding:
    """The coding with its tables.

    Raises:
        CorpusError: missing, cut short, damaged, of another codec or width.
    """
    path = folder / record.file
    _size(path, record.bytes)
    try:
        codebook = Quantized.load(path)
    except (ValueError, OSError) as error:
        raise CorpusError(str(error)) from error
    if (codebook.codec, codebook.width) != (coding.name, coding.dim):
        raise CorpusError(
            f"{path}: tables of {codebook.codec} for width {codebook.width}, the catalogue expects {coding.name} for "
            f"{coding.dim}"
        )
    return replace(coding, tables=tables_of(codebook))


def _size(path: Path, expected: int) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CorpusError(f"{path}: missing, expected {expected} bytes ({error.strerror})") from error
    if size != expected:
        raise CorpusError(f"{path}: {size} bytes, expected {expected}; restore the file from a copy")
    return size


def _check_offsets(path: Path, offsets: Tensor, tokens: int) -> None:
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens:
        raise CorpusError(
            f"{path}: offsets run from {int(offsets[0])} to {int(offsets[-1])}, expected 0 to {tokens}, the token count"
        )
    falling = (offsets.diff() < 0).nonzero()
    if len(falling):
        row = int(falling[0])
        raise CorpusError(f"{path}: offsets fall from {int(offsets[row])} to {int(offsets[row + 1])} at document {row}")


def _check_positions(path: Path, positions: Tensor, record: SegmentRecord) -> None:
    first, last = int(positions[0]), int(positions[-1])
    if (first, last) != (record.first, record.last) or bool((positions.diff() <= 0).any()):
        raise CorpusError(
            f"{path}: positions go from {first} to {last}, the catalogue expects {record.first} to {record.last}"
        )


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
