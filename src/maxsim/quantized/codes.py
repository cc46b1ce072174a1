"""What rows of codes stand for: the parameters of a codec, beside the codes themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import product, residual, scaled

CODECS = ("int8", "fp8", "residual", "pq")
DOCUMENT = ("scale", "radius", "norm")  # one entry a document
TOKEN = ("factor", "centroid", "inverse")  # one entry a row of codes: their shape, without the last dimension
SHARED = ("centroids", "cutoffs", "weights", "books")  # of all documents
TENSORS = DOCUMENT + TOKEN + SHARED


@dataclass(frozen=True)
class Codes:
    """The parameters of `codec` for tokens of `width` dimensions.

    scale, factor: float32 `[N]`, positive, and perhaps int16 one a token, at least 1: a token of `int8` or `fp8` is its
    codes times its document's scale, times its factor.
    centroid, centroids, weights: int32 one a token, `[C, D]` and `[2^bits]`, float16 or float32: a token of
    `residual` is its centroid and, of each dimension, the weight of a bucket; where `renormalize` times its inverse,
    float32 one a token, 1 / its norm. cutoffs: float32 `[2^bits - 1]`, where buckets end, to quantise more documents;
    None where unknown.
    books: float32 `[M, K, D / M]`, the codewords of `pq`.
    radius, norm: float32 `[N]`, the largest ‖d − decoded d‖ and ‖decoded d‖ over a document's kept tokens, rounded
    up; None where the tokens were never seen, as in an index of another library.
    normalized: the tokens were divided by their norms before they were quantised.
    source: the dtype of the tokens, None where unknown.
    """

    codec: str
    width: int
    scale: Tensor | None = None
    factor: Tensor | None = None
    centroid: Tensor | None = None
    inverse: Tensor | None = None
    centroids: Tensor | None = None
    cutoffs: Tensor | None = None
    weights: Tensor | None = None
    books: Tensor | None = None
    radius: Tensor | None = None
    norm: Tensor | None = None
    normalized: bool = False
    renormalize: bool = False
    source: torch.dtype | None = None

    @property
    def scaled(self) -> bool:
        """Whether codes multiply codes: queries are quantised like the documents."""
        return self.codec in scaled.LIMIT

    @property
    def bits(self) -> int:
        """Of a dimension's bucket, of `residual`."""
        assert self.weights is not None
        return len(self.weights).bit_length() - 1

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

    def scale_of(self, low: int, high: int, owner: Tensor) -> Tensor:
        """float32 `[high - low]`, of rows that belong to the documents `owner`, int64 `[high - low]`."""
        assert self.scale is not None
        own = self.scale[owner]
        return own if self.factor is None else own * self.factor[low:high]

    def reader(self, codes: Tensor) -> Callable[[Tensor | slice], Tensor]:
        """→ read(rows), tokens `[m, width]` in float32, or int8 as they are; without the scales. `codes` are flat,
        `[rows, W]`."""
        if self.codec == "fp8":
            bits = codes.view(torch.int8)  # which every PyTorch can index
            return lambda rows: scaled.decode(bits[rows].view(torch.float8_e4m3fn))
        if self.codec == "pq":
            assert self.books is not None
            books = self.books
            return lambda rows: product.decode(codes[rows], books)
        if self.codec == "residual":
            assert self.weights is not None
            assert self.centroid is not None
            assert self.centroids is not None
            table = self.weights.float()[residual.unpacked(self.bits, codes.device)]
            own, centroids = self.centroid.reshape(-1), self.centroids
            inverse = None if self.inverse is None else self.inverse.reshape(-1)
            return lambda rows: residual.decode(
                codes[rows], own[rows], centroids, table, None if inverse is None else inverse[rows]
            )
        return lambda rows: codes[rows]


def owners(low: int, high: int, ends: Tensor) -> Tensor:
    """The documents of rows low to high, int64, where documents that end at `ends` follow one another."""
    rows = torch.arange(low, high, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, rows, right=True)


def rows_of(starts: Tensor, ends: Tensor) -> Tensor:
    """The rows of ragged items, in their order, int64."""
    lengths = ends - starts
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=starts.device) + (starts - before).repeat_interleave(lengths)
