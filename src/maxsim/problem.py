"""What a backend is given: `Tokens`, one side whatever its form, and `Problem`, two of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .quantized import Codes


@dataclass(frozen=True)
class Tokens:
    """One side of a problem: `count` items, item n holding the rows of `data` that belong to it.

    Padded: `data` is `[N, L, D]` or, for candidates, `[NQ, K, L, D]` (count = NQ·K), any strides; `starts` is None.
    Ragged: `data` is `[T, D]`; item n is `data[starts[n]:ends[n]]`, and `consecutive` says that items follow one
    another. `max_length` bounds an item's tokens. `mask` is boolean with the shape `data.shape[:-1]`, True = keep, or
    None. Of quantised documents `data` are the codes, and `codes` says what they stand for; `floats`, where gradients
    go straight through them, are the tokens themselves, in the layout of the codes.
    """

    data: Tensor
    count: int
    max_length: int
    starts: Tensor | None = None
    ends: Tensor | None = None
    consecutive: bool = False
    mask: Tensor | None = None
    codes: Codes | None = None
    floats: Tensor | None = None

    @property
    def width(self) -> int:
        return self.data.shape[-1] if self.codes is None else self.codes.width

    @property
    def leaf(self) -> Tensor:
        """What gradients are for."""
        return self.data if self.floats is None else self.floats

    @property
    def ragged(self) -> bool:
        return self.starts is not None

    @property
    def columns(self) -> int:
        """Token rows of all items: the width of a winners table. Items that may overlap get `max_length` each."""
        return self.data.shape[0] if self.consecutive else self.count * self.max_length

    def to(self, device: torch.device) -> Tokens:
        if self.data.device == device:
            return self

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return dataclasses.replace(
            self,
            data=self.data.to(device, non_blocking=True),
            starts=move(self.starts),
            ends=move(self.ends),
            mask=move(self.mask),
            codes=None if self.codes is None else self.codes.to(device),
            floats=move(self.floats),
        )

    def with_leaf(self, leaf: Tensor) -> Tokens:
        # as `dataclasses.replace` does, in a fifth of the time: a backward's host time is that of small steps
        data, floats = (leaf, None) if self.floats is None else (self.data, leaf)
        return Tokens(
            data, self.count, self.max_length, self.starts, self.ends, self.consecutive, self.mask, self.codes, floats
        )

    def unquantised(self) -> Tokens:
        """The tokens that `floats` are."""
        return dataclasses.replace(self, data=self.leaf, codes=None, floats=None)

    def slice(self, low: int, high: int) -> Tokens:
        """Items low to high, without copying tokens."""
        codes = None if self.codes is None else self.codes.range(low, high, self.ragged)
        if self.starts is not None and self.ends is not None:
            starts, ends = self.starts[low:high], self.ends[low:high]
            whole = self.consecutive and (low, high) == (0, self.count)
            return dataclasses.replace(self, count=high - low, starts=starts, ends=ends, consecutive=whole, codes=codes)
        mask, floats = (None if each is None else each[low:high] for each in (self.mask, self.floats))
        return dataclasses.replace(
            self, data=self.data[low:high], count=high - low, mask=mask, codes=codes, floats=floats
        )


@dataclass(frozen=True)
class Problem:
    """What to score: every query with every document, the given `pairs`, or `per_query` own documents of each query.

    `pairs` is int64 `[P, 2]` (query, document). With `per_query` = K > 0, document p belongs to query p // K.
    """

    queries: Tokens
    documents: Tokens
    pairs: Tensor | None = None
    per_query: int = 0
    masked_zero: bool = False
    normalize: bool = False

    @property
    def grid(self) -> bool:
        return self.pairs is None and not self.per_query

    @property
    def device(self) -> torch.device:
        return self.documents.data.device

    @property
    def dtype(self) -> torch.dtype:
        """Of both sides; where documents are quantised that of the queries."""
        return self.queries.data.dtype

    @property
    def result_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the backend's result: `[NQ, ND]` for a grid, else `[P]`."""
        if self.grid:
            return (self.queries.count, self.documents.count)
        return (self.documents.count if self.pairs is None else self.pairs.shape[0],)

    @property
    def winners_shape(self) -> tuple[int, int]:
        """`[ND, TQ]` for a grid (a column a query token), else `[P, LQ]`."""
        if self.grid:
            return (self.documents.count, self.queries.columns)
        return (self.shape[0], self.queries.max_length)

    @property
    def winners_dtype(self) -> torch.dtype:
        """Two bytes hold an index where no document has more than 65,535 tokens (read as unsigned: 65,535 is none)."""
        return torch.int16 if self.documents.max_length <= 65535 else torch.int32

    def with_leaves(self, queries: Tensor, documents: Tensor) -> Problem:
        q, d = self.queries.with_leaf(queries), self.documents.with_leaf(documents)
        return Problem(q, d, self.pairs, self.per_query, self.masked_zero, self.normalize)
