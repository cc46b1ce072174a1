"""Where tokens lie, as kernels take it, and the small device functions that find and read them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .decoding import Decoder

ONE_GROUP = tl.constexpr(2147483647)  # `per_group` of items that all are in one


class Side(NamedTuple):
    """Queries or documents: raw tensors and integers. Strides count elements."""

    data: Tensor
    count: int  # type: ignore[assignment]  # hides tuple.count, on purpose
    length: int  # tokens of one item: all of them (padded) or at most (ragged)
    rows: int  # token rows of a ragged buffer, else 0
    per_group: int  # items of one group: a query's candidates, else all
    group: int  # from one group to the next
    item: int  # from one item of a group to the next
    row: int
    col: int
    starts: Tensor | None
    ends: Tensor | None
    consecutive: bool
    mask: Tensor | None
    mask_group: int
    mask_item: int
    mask_row: int
    scales: Tensor | None = None  # of codes: one a document, one a slot of queries in a table of winners
    factors: Tensor | None = None  # int16, one a row of documents: times the document's scale the token's
    decoder: Decoder | None = None  # of documents whose codes are no numbers

    @property
    def aligned(self) -> bool:
        """Whether rows begin and end at multiples of 16 bytes."""
        wide = 16 // self.data.element_size()
        strides = self.group % wide + self.item % wide + self.row % wide + self.data.shape[-1] % wide
        return self.col == 1 and strides == 0 and self.data.data_ptr() % 16 == 0


@triton.jit
def span(n, starts, ends, length, rows):
    """First row and number of tokens of item n: of a ragged side clamped into its buffer, of a padded one 0 and all."""
    if starts is None:
        start = n * 0
        tokens = start + length
    else:
        start = tl.minimum(tl.maximum(tl.load(starts + n).to(tl.int64), 0), rows)
        end = tl.minimum(tl.maximum(tl.load(ends + n).to(tl.int64), start), rows)
        tokens = tl.minimum(end - start, length)
    return start, tokens


@triton.jit
def base(n, start, starts, per_group, group, item, row):
    """Offset in elements of item n's first token, from `span`'s start."""
    if starts is None:
        offset = (n // per_group) * group + (n % per_group) * item
    else:
        offset = start * row
    return offset


@triton.jit
def columns_of(ptrs, there, ALL: tl.constexpr):
    """What is there, or ALL is; else 0."""
    return tl.load(ptrs) if ALL else tl.load(ptrs, mask=there, other=0.0)


@triton.jit
def squares_of(rows):
    return tl.sum(rows.to(tl.float32) * rows.to(tl.float32), 1)
