"""Documents as codes, in the layout that they came in."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packed import Packed, numbers
from . import scaled
from .codes import Codes, owners, rows_of

BLOCK = 1 << 14  # rows decoded at a time


class Quantized:
    """Documents as codes, which `score`, `score_pairs`, `matches` and `topk` take in place of documents.

    `maxsim.quantize` makes one and `Quantized.load` reads one. `len` counts documents, and indexing selects some,
    without copying codes: by a slice, whole numbers or a boolean mask; a table `[NQ, K]` of whole numbers makes
    candidates, K of each query.

    codes: `[N, L, W]` for padded documents, else `[T, W]`, of which document n is `codes[starts[n]:ends[n]]`.
    mask: boolean, `[N, L]` or `[T]`, True = keep, as given to `quantize`, or None. It always applies; a
        `document_mask` of a scoring function leaves out more: it has one entry a row of `codes`, or, where documents
        are not padded (or were selected by other than a plain slice), it is one mask a document, as for a list.
    parameters: the codec's `Codes`.
    saturated: how many values were beyond the largest code (of all documents quantised together, whatever was selected
        since).
    floats: the documents' tokens in the layout of the codes, which gradients go straight through to (`quantize(...,
        straight_through=True)`), or None. No part of `nbytes`, nor of saved files.
    """

    __slots__ = (
        "__weakref__", "codes", "consecutive", "ends", "floats", "mask", "max_length", "parameters", "per_query",
        "saturated", "starts",
    )  # fmt: skip

    def __init__(
        self,
        codes: Tensor,
        parameters: Codes,
        max_length: int,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
        consecutive: bool = False,
        mask: Tensor | None = None,
        saturated: int = 0,
        per_query: int = 0,
        floats: Tensor | None = None,
    ):
        self.codes, self.parameters, self.max_length = codes, parameters, max_length
        self.starts, self.ends, self.consecutive = starts, ends, consecutive
        self.mask, self.saturated, self.per_query, self.floats = mask, saturated, per_query, floats

    @property
    def codec(self) -> str:
        """Which codec: "int8", "fp8", "residual" or "pq"."""
        return self.parameters.codec

    @property
    def width(self) -> int:
        """D, of the tokens that the codes stand for."""
        return self.parameters.width

    @property
    def device(self) -> torch.device:
        """Where the codes are, and so where they are scored."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Of the codes and everything kept beside them."""
        places = [tensor for tensor in (self.codes, self.starts, self.ends, self.mask) if tensor is not None]
        return sum(tensor.nbytes for tensor in (*places, *self.parameters.tensors().values()))

    @property
    def bytes_a_token(self) -> int:
        """Bytes of codes and of what each token has beside them."""
        beside = sum(tensor.element_size() for tensor in self.parameters.of_tokens().values())
        return self.codes.shape[-1] * self.codes.element_size() + beside

    def __len__(self) -> int:
        return self.codes.shape[0] if self.starts is None else self.starts.shape[0]

    def __repr__(self) -> str:
        what = f"{len(self)} documents, {self.codec} {list(self.codes.shape)} for width {self.width}"
        return f"Quantized({what}, {self.bytes_a_token} bytes a token, on {self.device})"

    def to(self, device: str | torch.device) -> Quantized:
        """On that device; itself where it is there.

        Args:
            device: such as "cpu" or "cuda:0".

        Raises:
            RuntimeError: a device that PyTorch does not know or does not have.
        """
        device = torch.device(device)
        if self.codes.device == device:
            return self

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return self._with(
            codes=self.codes.to(device),
            parameters=self.parameters.to(device),
            starts=move(self.starts),
            ends=move(self.ends),
            mask=move(self.mask),
            floats=move(self.floats),
        )

    def __getitem__(self, index: Any) -> Quantized:
        if self.per_query:
            raise TypeError("candidates cannot be selected from: select documents, then make candidates of them")
        if isinstance(index, slice):
            low, high, step = index.indices(len(self))
            if step == 1:
                return self._range(low, max(low, high))
            index = torch.from_numpy(np.arange(low, high, step))
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            index = [int(index)]
        chosen = numbers(index, "documents to select", "whole numbers")
        if chosen.numel() == 0:
            chosen = chosen.long()
        if chosen.dtype == torch.bool:
            if chosen.shape != (len(self),):
                raise IndexError(f"a mask of documents must have shape [{len(self)}], got {list(chosen.shape)}")
            chosen = chosen.nonzero()[:, 0]
        if chosen.dtype not in (torch.int32, torch.int64) or chosen.ndim not in (1, 2):
            raise IndexError(
                f"documents are selected by whole numbers [N], or [NQ, K] for candidates, got {chosen.dtype} "
                f"{list(chosen.shape)}"
            )
        return self._chosen(chosen.long())

    def _range(self, low: int, high: int) -> Quantized:
        ragged = self.starts is not None
        parameters = self.parameters.range(low, high, ragged)
        if self.starts is None or self.ends is None:
            mask, floats = (None if each is None else each[low:high] for each in (self.mask, self.floats))
            return self._with(codes=self.codes[low:high], parameters=parameters, mask=mask, floats=floats)
        whole = (low, high) == (0, len(self))
        places = {"starts": self.starts[low:high], "ends": self.ends[low:high]}
        return self._with(parameters=parameters, consecutive=self.consecutive and whole, **places)

    def _chosen(self, chosen: Tensor) -> Quantized:
        count = len(self)
        if chosen.numel() and not (-count <= int(chosen.min()) and int(chosen.max()) < count):
            raise IndexError(f"documents are numbered 0 to {count - 1}, got {int(chosen.min())} to {int(chosen.max())}")
        index = torch.where(chosen < 0, chosen + count, chosen).reshape(-1).to(self.codes.device)
        flat = self.flat()
        assert flat.starts is not None
        assert flat.ends is not None
        return flat._with(
            parameters=flat.parameters.select(index),
            starts=flat.starts[index],
            ends=flat.ends[index],
            consecutive=False,
            per_query=chosen.shape[1] if chosen.ndim == 2 else 0,
        )

    def flat(self) -> Quantized:
        """Padded documents as ragged ones, without copying codes."""
        if self.starts is not None:
            return self
        N, L, W = self.codes.shape
        starts = torch.arange(N, device=self.codes.device) * L
        return self._with(
            codes=self.codes.reshape(N * L, W),
            parameters=self.parameters.flat(),
            starts=starts,
            ends=starts + L,
            consecutive=True,
            mask=None if self.mask is None else self.mask.reshape(-1),
            floats=None if self.floats is None else self.floats.reshape(N * L, self.width),
        )

    def compact(self) -> Quantized:
        """Without rows that belong to no document: itself, or selected documents copied one after another."""
        if self.starts is None or self.ends is None or self.consecutive:
            return self
        rows, ends = rows_of(self.starts, self.ends), (self.ends - self.starts).cumsum(0)
        codes = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)  # fp8 too, which not every PyTorch can index
        return self._with(
            codes=codes,
            parameters=self.parameters.rows(rows),
            starts=ends - (self.ends - self.starts),
            ends=ends,
            consecutive=True,
            mask=None if self.mask is None else self.mask[rows],
            floats=None if self.floats is None else self.floats[rows],
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor | Packed:
        """What the codes stand for: `[N, L, D]` for padded documents, else `Packed` (of selected documents those).

        Tokens outside the mask are 0; scores of the result need `document_mask=quantized.compact().mask` as scores of
        the codes do not.

        Args:
            dtype: any float dtype; each value is computed in float32 and rounded to it once.

        Raises:
            TypeError: another dtype.
        """
        if not dtype.is_floating_point:
            raise TypeError(f"dtype must be one of floats, got {dtype}")
        if self.starts is None:
            N, L, _ = self.codes.shape
            return self._tokens(dtype).view(N, L, self.width)
        compact = self.compact()
        offsets = torch.cat([compact._ends.new_zeros(1), compact._ends])
        return Packed(compact._tokens(dtype), offsets, self.max_length)

    @property
    def _ends(self) -> Tensor:
        assert self.ends is not None
        return self.ends

    def _tokens(self, dtype: torch.dtype) -> Tensor:
        """All rows decoded, `[rows, D]`, of documents that lie one after another."""
        flat = self.flat()
        read = flat.parameters.reader(flat.codes)
        out = torch.empty(flat.codes.shape[0], self.width, dtype=dtype, device=self.codes.device)
        for low in range(0, out.shape[0], BLOCK):
            high = min(low + BLOCK, out.shape[0])
            tokens = read(slice(low, high)).float()
            if flat.parameters.factor is not None:
                tokens = tokens * flat.parameters.factor[low:high, None]
            if flat.parameters.scale is not None:
                tokens = tokens * flat.parameters.scale[owners(low, high, flat._ends), None]
            if flat.mask is not None:
                tokens = torch.where(flat.mask[low:high, None], tokens, 0.0)
            out[low:high] = tokens
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file (safetensors), at once under its name: it is whole or not there. Selected documents are
        written without the others.

        Args:
            path: the file; one that is there is replaced.

        Raises:
            ValueError: candidates, which share documents.
            OSError: the file cannot be written.
        """
        from .files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Quantized:
        """Reads what `save` wrote, after looking at every byte: checksums are those that were written, and no code is
        beyond its tables, which kernels read.

        Args:
            path: the file.
            device: where the codes go.

        Raises:
            ValueError: no such file of ours, one of a newer format, or cut short or damaged; says where.
            OSError: the file cannot be read.
        """
        from .files import load

        return load(path).to(device)

    @classmethod
    def from_index(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Quantized:
        """The documents of an index of ColBERT or fast-plaid (a folder), as "residual" codes, in the order of the
        index. What they decode to is divided by its norm, as those libraries do, here in float32. Their documents were
        never seen, so there is no bound, and nothing to certify.

        Args:
            path: the folder.
            device: where the codes go.

        Raises:
            ValueError: not such an index, or a damaged one; names the file.
            OSError: a file is missing or cannot be read.
        """
        from .plaid import read

        return read(path).to(device)

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "__weakref__"}

    def _with(self, **changes: Any) -> Quantized:
        return Quantized(**self._state() | changes)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes. Codes as bytes: PyTorch's pickles know no fp8."""
        return self._state() | {"codes": self.codes.view(torch.uint8)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.codes = self.codes.view(scaled.STORED.get(self.codec, torch.uint8))
