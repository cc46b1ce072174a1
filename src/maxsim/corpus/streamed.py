"""A safetensors file written a piece at a time, where the library writes what is in memory.

The format (github.com/huggingface/safetensors): the header's length in 8 bytes, a header in JSON, padded with spaces,
and the tensors one after another; those of larger entries first, so that each begins at a multiple of its entries'
size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..quantized.files import checksum_of_rows, first_checksum
from .coding import Shape

NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
ROOM = 4096  # for the metadata, which may be known last


class SafetensorsWriter:
    """A context in which `write` appends rows to tensors of these dtypes and shapes, in any order; `metadata` is
    written when it ends. `checksums`: of what was written so far, as files of codes have them."""

    def __init__(self, path: Path, shapes: Mapping[str, Shape]) -> None:
        self.metadata: dict[str, str] = {}
        self._entries, self._ends, end = dict[str, dict[str, object]](), dict[str, int](), 0
        self._places = dict[str, int]()
        self.checksums = {name: first_checksum(name, *shape) for name, shape in shapes.items()}
        for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            size = torch.Size(shape).numel() * dtype.itemsize
            self._entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            self._places[name], self._ends[name] = end, end + size
            end += size
        self._room = -(-(len(json.dumps(self._entries)) + ROOM) // 8) * 8
        self._file = open(path, "wb")  # noqa: SIM115

    def __enter__(self) -> SafetensorsWriter:
        return self

    def write(self, name: str, rows: Tensor) -> None:
        rows = rows.contiguous()
        self._file.seek(8 + self._room + self._places[name])
        self._file.write(rows.reshape(-1).view(torch.uint8).numpy().data)
        self._places[name] += rows.nbytes
        self.checksums[name] = checksum_of_rows(rows, self.checksums[name])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is not None:
                return
            assert self._places == self._ends
            header = json.dumps({"__metadata__": self.metadata, **self._entries}).encode()
            assert len(header) <= self._room
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
