"""Device functions on tiles: maxima that keep NaN, an order of floats as integers, products of tiles."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


# The interpreter is quick at its own maximum only; cards reduce with ours, which needs no detour over integers.
INTERPRETED = tl.constexpr(isinstance(maximum, InterpretedFunction))


@triton.constexpr_function
def lowest(dtype):
    """Below all similarities, or products of codes."""
    return -2147483648 if dtype == tl.int32 else float("-inf")


@triton.jit
def ordered(x):
    """float32 → int32 in the same order, NaN above all; int32 as it is."""
    bits = x.to(tl.int32, bitcast=True)
    if x.dtype == tl.float32:
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        bits = tl.where(x != x, 0x7FFFFFFF, bits)
    return bits


@triton.jit
def unordered(key, dtype: tl.constexpr):
    """What `ordered` made it of."""
    if dtype == tl.float32:
        key = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    return key


@triton.jit
def column_maximum(x):
    """The largest value of each column, NaN above all."""
    if INTERPRETED:
        value = unordered(tl.max(ordered(x), 0), x.dtype)
    else:
        value = tl.reduce(x, 0, maximum)
    return value


@triton.jit
def power(largest):
    """The power of two that rows are scaled by, whose largest elements these are: they become 2^13 to 2^14, in the
    middle of float16's range."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return (tl.minimum(tl.maximum(267 - exponent, 1), 253) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse(factor):
    """Of a power of two."""
    return ((254 << 23) - factor.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def split(x, factor):
    """float32 rows, scaled → two float16 rows that add up to them."""
    y = x * factor[:, None]
    high = y.to(tl.float16)
    return high, (y - high.to(tl.float32)).to(tl.float16)


@triton.jit
def bounded(scale):
    """Scales of slices of rows (`halves`); NaN, so that they are lost, of those with elements of 2^97 or more: sums of
    such slices might leave float32's range and return."""
    return tl.where(scale < 19342813113834066795298816.0, scale, float("nan"))  # 2^84


@triton.jit
def halves(x):
    """float32 rows → two float16 rows that add up to them times a power of two a row, which is returned inverted.

    Of a row's largest element 22 bits are kept. Of a row with inf or NaN the low half is NaN.
    """
    factor = power(tl.max(tl.abs(x), 1))
    high, low = split(x, factor)
    return high, low, inverse(factor)


@triton.jit
def similarities(d_tile, q, q_low, acc, PRECISION: tl.constexpr, SLICE: tl.constexpr = False):
    """One product of tiles, `[BLOCK_LD, BLOCK_D]` with `[BLOCK_LQ, BLOCK_D]`, added to acc; SLICE: of several.

    "native": as the tensor cores take the dtype, IEEE for float32. "f16": float32 rows scaled and rounded to float16,
    whose 11 bits are TF32's; q comes so. "f16x3": three products of halves; q comes as halves, and what the two low
    ones would add is below float32's own error.
    """
    if PRECISION == "native":
        acc = tl.dot(d_tile, tl.trans(q), acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        d_high, d_low, scale = halves(d_tile)
        if PRECISION == "f16x3":
            part = tl.dot(d_low, tl.trans(q))
            part = tl.dot(d_high, tl.trans(q_low), part)
            part = tl.dot(d_high, tl.trans(q), part)
        else:
            part = tl.dot(d_high, tl.trans(q))
        if SLICE:
            scale = bounded(scale)
        acc += part * scale[:, None]
    return acc
