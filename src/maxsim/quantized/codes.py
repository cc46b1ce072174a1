"""What rows of codes stand for: the parameters of a codec, beside the codes themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import scaled

CODECS = ("int8", "fp8")
DOCUMENT = ("scale", "radius", "norm")  # one entry a document
TOKEN = ("token_scale",)  # one entry a row of codes, in the shape of the codes without their last dimension
SHARED: tuple[str, ...] = ()  # of all documents
TENSORS = DOCUMENT + TOKEN + SHARED


@dataclass(frozen=True)
class Codes:
    """The parameters of `codec` for tokens of `width` dimensions.

    scale, token_scale: float32 `[N]` or one a token, all positive: a token of `int8` or `fp8` is its codes times the
    scale of its document or its own.
    radius, norm: float32 `[N]`, the largest ‖d − decoded d‖ and ‖decoded d‖ over a document's kept tokens, rounded
    up; None where the tokens were never seen, as in an index of another library.
    normalized: the tokens were divided by their norms before they were quantised.
    source: the dtype of the tokens, None where unknown.
    """

    codec: str
    width: int
    scale: Tensor | None = None
    token_scale: Tensor | None = None
    radius: Tensor | None = None
    norm: Tensor | None = None
    normalized: bool = False
    source: torch.dtype | None = None

    @property
    def scaled(self) -> bool:
        """Whether codes multiply codes: queries are quantised like the documents."""
        return self.codec in scaled.LIMIT

    def tensors(self) -> dict[str, Tensor]:
        """Those there are, by name."""
        named = ((name, getattr(self, name)) for name in TENSORS)
        return {name: tensor for name, tensor in named if tensor is not None}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Codes:
        """With `change(name, tensor)` in place of each tensor."""
        changed: dict[str, Any] = {name: change(name, tensor) for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, **changed)

    def of_tokens(self) -> dict[str, Tensor]:
        """Those with an entry a token."""
        return {name: tensor for name, tensor in self.tensors().items() if name in TOKEN}

    def to(self, device: torch.device) -> Codes:
        return self.map(lambda _, tensor: tensor.to(device, non_blocking=True))

    def range(self, low: int, high: int, ragged: bool) -> Codes:
        """Of documents low to high; rows of ragged ones stay where they are."""
        kinds = DOCUMENT if ragged else DOCUMENT + TOKEN
        return self.map(lambda name, tensor: tensor[low:high] if name in kinds else tensor)

    def select(self, documents: Tensor) -> Codes:
        """Of some ragged documents, int64 `[n]`."""
        return self.map(lambda name, tensor: tensor[documents] if name in DOCUMENT else tensor)

    def flat(self) -> Codes:
        """Of rows one after another."""
        return self.map(lambda name, tensor: tensor.reshape(-1) if name in TOKEN else tensor)

    def rows(self, rows: Tensor) -> Codes:
        """Of some rows, int64 `[m]`."""
        return self.map(lambda name, tensor: tensor[rows] if name in TOKEN else tensor)

    def scale_of_rows(self, low: int, high: int, ends: Tensor) -> Tensor:
        """float32 `[high - low]`, of rows of documents that end at `ends` `[N]` and follow one another."""
        if self.token_scale is not None:
            return self.token_scale[low:high]
        assert self.scale is not None
        return self.scale[owners(low, high, ends)]

    def reader(self, codes: Tensor) -> Callable[[Tensor | slice], Tensor]:
        """→ read(rows), tokens `[m, width]` in float32, or int8 as they are; without the scales. `codes` are flat,
        `[rows, W]`."""
        if self.codec == "fp8":
            return lambda rows: scaled.decode(codes[rows])
        return lambda rows: codes[rows]


def owners(low: int, high: int, ends: Tensor) -> Tensor:
    """The documents of rows low to high, int64, where documents that end at `ends` follow one another."""
    rows = torch.arange(low, high, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, rows, right=True)
