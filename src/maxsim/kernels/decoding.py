"""Rows of codes that are no numbers, as the tokens they stand for: decoded as they come, one tile at a time."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Decoder(NamedTuple):
    """What rows of codes stand for. `codec` > 0: `residual` of so many bits, < 0: `pq` with words of so many
    dimensions.

    table: centroids `[C, D]`, or codewords `[M, words, D / M]`, contiguous. ids: int32, the centroid of each row.
    weights: `[2^bits]`. inverses: float32, what each row is multiplied by in the end, or None.
    """

    codec: int
    table: Tensor
    words: int = 0
    ids: Tensor | None = None
    weights: Tensor | None = None
    inverses: Tensor | None = None

    def begin(self, row: int) -> Decoder:
        """Of rows from one on."""
        return self._replace(
            ids=None if self.ids is None else self.ids[row:],
            inverses=None if self.inverses is None else self.inverses[row:],
        )

    def aligned(self) -> Decoder:
        """With what rows have beside them at multiples of 16 bytes, whatever they were cut out of."""
        ids, inverses = (
            each.clone() if each is not None and each.data_ptr() % 16 else each for each in (self.ids, self.inverses)
        )
        return self._replace(ids=ids, inverses=inverses)

    @property
    def kind(self) -> tuple[object, ...]:
        """What kernels are compiled for."""
        return (self.codec, self.words, self.table.dtype, self.table.data_ptr() % 16, self.inverses is None)

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """As kernels take them, in this order, as their last."""
        return (self.table, self.words, self.ids, self.weights, self.inverses, self.codec)


NOTHING = (None, 0, None, None, None, 0)  # in place of a decoder's arguments


@triton.jit
def reversed_bits(byte):
    """Bits of a byte from the last to the first."""
    byte = ((byte & 0x55) << 1) | ((byte >> 1) & 0x55)
    byte = ((byte & 0x33) << 2) | ((byte >> 2) & 0x33)
    return ((byte & 0x0F) << 4) | ((byte >> 4) & 0x0F)


@triton.jit
def _residual(
    codes, row, live, d_row, d_col, c, D, decoder, BITS: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr
):  # fmt: skip
    """A centroid plus the weight of a bucket in each dimension, times a number a row where there is one."""
    table, words, ids, weights, inverses = decoder
    ROWS: tl.constexpr = row.shape[0]
    EACH: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = BLOCK_D // EACH
    row = row.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    byte = tl.arange(0, BYTES)
    mask = None
    beside = None
    if not EVEN_D:
        mask = (c // EACH + byte < (D + EACH - 1) // EACH)[None, :]
        beside = (c + d < D)[None, :]
    if live is not None:
        mask = live[:, None] if EVEN_D else mask & live[:, None]
        beside = live[:, None] if EVEN_D else beside & live[:, None]
    first = tl.load(ids + row, mask=live).to(tl.int64) * D
    codes_at = codes + row[:, None] * d_row + ((c // EACH + byte).to(tl.int64) * d_col)[None, :]
    code = tl.load(codes_at, mask=mask)
    x = tl.load(table + (first[:, None] + (c + d)[None, :]), mask=beside).to(tl.float32)
    code = reversed_bits(code.to(tl.int32))  # the first dimension in the lowest bits, in their usual order
    bucket = code[:, :, None] >> (tl.arange(0, EACH) * BITS)[None, None, :]
    if BITS == 1:
        weight = tl.where((bucket & 1) == 0, tl.load(weights), tl.load(weights + 1))
    elif BITS == 2:
        even = tl.where((bucket & 2) == 0, tl.load(weights), tl.load(weights + 2))
        odd = tl.where((bucket & 2) == 0, tl.load(weights + 1), tl.load(weights + 3))
        weight = tl.where((bucket & 1) == 0, even, odd)
    else:
        weight = tl.load(weights + (bucket & ((1 << BITS) - 1)))
    x += tl.reshape(weight, [ROWS, BLOCK_D])
    if inverses is not None:
        x *= tl.load(inverses + row, mask=live)[:, None]
    return x if beside is None else tl.where(beside, x, 0.0)


@triton.jit
def _product(
    codes, row, live, d_row, d_col, c, D, decoder, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr
):  # fmt: skip
    """Codewords of SIZE dimensions side by side, read by the widest power of two that divides it."""
    table, words, ids, weights, inverses = decoder
    ROWS: tl.constexpr = row.shape[0]
    EACH: tl.constexpr = min(SIZE & -SIZE, BLOCK_D)
    d = c + tl.arange(0, BLOCK_D // EACH) * EACH
    part = d // SIZE
    mask = (d < D)[None, :]
    if live is not None:
        mask = live[:, None] if EVEN_D else mask & live[:, None]
    code = tl.load(codes + row.to(tl.int64)[:, None] * d_row + (part.to(tl.int64) * d_col)[None, :], mask=mask, other=0)
    word = ((part * words)[None, :] + code.to(tl.int32)) * SIZE + (d % SIZE)[None, :]
    x = tl.load(table + (word[:, :, None] + tl.arange(0, EACH)[None, None, :]), mask=mask[:, :, None], other=0.0)
    return tl.reshape(x, [ROWS, BLOCK_D])


@triton.jit
def decoded(
    rows, row, live, c, decoder, CODEC: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Columns c to c + BLOCK_D of the tokens in some rows of a matrix, rounded once to `dtype`; 0 beyond column D
    and of rows that are not `live` (None: all are).

    rows: where the matrix of codes begins, how far from one row and column to the next, and the width of tokens.
    decoder: a `Decoder`'s arguments but for the last, which is CODEC.
    """
    codes, d_row, d_col, D = rows
    if CODEC > 0:
        x = _residual(codes, row, live, d_row, d_col, c, D, decoder, CODEC, BLOCK_D, EVEN_D)
    else:
        x = _product(codes, row, live, d_row, d_col, c, D, decoder, -CODEC, BLOCK_D, EVEN_D)
    return x.to(dtype)
