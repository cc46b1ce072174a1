"""Codes that are numbers: a token is its codes times a scale. `int8` (symmetric, −127 to 127) and `fp8` (e4m3fn).

A code is the token divided by its scale, the quotient rounded in float32, then to the nearest code, ties to even;
beyond the largest code it saturates. A scale is the largest magnitude of what it covers divided by the largest code,
and never below the smallest normal float32, so that zero tokens have codes of 0 and a scale like others.

A scale of a token is that of its document times a factor, a whole number so small that a product of `int8` codes times
it is exact in int32: the maximum of such products is one of integers still.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = {"int8": 127.0, "fp8": 448.0}  # the largest code
BEYOND = {"int8": 127.5, "fp8": 464.0}  # quotients from here on saturate: below, rounding makes them the largest code
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LEAST = 2.0**-126


def scale_of(largest: Tensor, codec: str) -> Tensor:
    """Of tokens whose largest magnitudes are `largest`, float32 of any shape."""
    return (largest / LIMIT[codec]).clamp_min(LEAST)


def largest_factor(width: int, codec: str) -> int:
    """A power of two, so that the largest token's scale is its own. Raises ValueError where tokens are too wide."""
    most = 1 << 14 if codec == "fp8" else min(1 << 14, (2**31 - 1) // (127 * 127 * width))
    if most < 1:
        raise ValueError(f"int8 codes of width {width} have no room for scales of tokens: take those of documents")
    return 1 << (most.bit_length() - 1)


def factors(wanted: Tensor, scale: Tensor, most: int) -> Tensor:
    """Scales wanted for tokens `[m]`, and their documents' `[m]` → factors that reach them, int16."""
    return (wanted / scale).ceil().clamp(1, most).to(torch.int16)


def encode(tokens: Tensor, scale: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """float32 `[m, D]` with scales `[m]` → codes `[m, D]`, and how many saturated, int64."""
    quotient = tokens / scale[:, None]
    saturated = (quotient.abs() > BEYOND[codec]).sum()
    quotient = quotient.clamp_(-LIMIT[codec], LIMIT[codec])
    return (quotient.round_() if codec == "int8" else quotient).to(STORED[codec]), saturated


def decode(codes: Tensor) -> Tensor:
    """Codes of any shape as float32. Those of fp8 from their bits, seven times as fast as PyTorch's conversion: moved
    by seven they are float16's bits of the value divided by 256, subnormal ones too."""
    if codes.dtype == torch.int8:
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)


def encode_queries(tokens: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """Query tokens `[m, D]`, float32 or float64 → their codes as numbers of that dtype, and their scales, float32
    `[m]`. A token with NaN or infinity has codes of 0 and the scale NaN, which makes its terms NaN and no others."""
    largest = tokens.abs().amax(1).float()
    finite = largest.isfinite()
    scale = scale_of(torch.where(finite, largest, 0.0), codec)
    codes, _ = encode(torch.where(finite[:, None], tokens, 0.0).float(), scale, codec)
    return decode(codes).to(tokens.dtype), torch.where(finite, scale, float("nan"))
