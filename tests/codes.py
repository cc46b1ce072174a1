"""What tests of quantised documents share: sides that a codec holds exactly, and the oracle's codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from forms import Side, make_side

from maxsim import Quantized, reference

SCALED = ("int8", "fp8")
CODECS = (*SCALED, "residual", "pq")
SCALES = ("document", "token")
LARGEST = {"int8": 127, "fp8": 448}
BOUND = {"int8": 100, "fp8": 8}  # every integer up to it is a code


def served(lane) -> tuple[str, ...]:
    """The codecs that a lane's backend serves."""
    if lane.backend == "cpu":
        return CODECS
    fp8 = lane.device == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
    return ("int8", "residual", "pq") + (("fp8",) if fp8 else ())


def needs_codec(lane, codec: str) -> None:
    if codec not in served(lane):
        pytest.skip(f"serves no {codec} codes")


def exact_side(seed: int, lengths: list[int], D: int, masks: str, codec: str) -> Side:
    """Integers of which every token's largest is the codec's largest code, so that every scale is 1."""
    side = make_side(seed, lengths, D, masks, bound=BOUND[codec])
    for item in side.items:
        if len(item):  # the sign follows from the token, since items may overlap
            item[:, 0] = LARGEST[codec] * (1 - 2 * (np.abs(item.sum(1)) % 2))
    if len(side.items) > 1 and 0 < lengths[-1] < lengths[0]:
        side.items[-1] = side.items[0][lengths[0] - lengths[-1] :]
    return side


def quantised_tokens(item: np.ndarray, codec: str, scale: str) -> np.ndarray:
    """The oracle's quantised document, float64 `[L, D]`; a query is one of "query" scales."""
    if scale == "token":
        whole, factors = reference.code_factors(item, codec)
        scales = [(whole * np.float32(factor), float(whole) * factor) for factor in factors]
    else:
        each = [reference.code_scale(item if scale == "document" else token, codec) for token in item]
        scales = [(s, float(s)) for s in each]
    return np.array(
        [s * reference.code_values(token, by, codec) for (by, s), token in zip(scales, item, strict=True)]
    ).reshape(item.shape)


def quantised_queries(q: torch.Tensor, codec: str = "int8") -> torch.Tensor:
    """Query tokens `[NQ, LQ, D]` as a scan takes them, float64."""
    return torch.tensor(np.array([quantised_tokens(x, codec, "query") for x in q.double().cpu().numpy()]))


def unit(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(values, dim=-1).to(dtype)


def same_documents(a: Quantized, b: Quantized) -> bool:
    """Codes, parameters and places, bit for bit."""

    def bits(tensor: torch.Tensor | None) -> object:
        return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8))

    pairs = [(a.codes, b.codes), (a.mask, b.mask), (a.starts, b.starts), (a.ends, b.ends)]
    names = set(a.parameters.tensors()) | set(b.parameters.tensors())
    pairs += [(getattr(a.parameters, name), getattr(b.parameters, name)) for name in names]
    for x, y in pairs:
        x, y = bits(x), bits(y)
        if (x is None) != (y is None) or (x is not None and (x[:2] != y[:2] or not torch.equal(x[2], y[2]))):
            return False
    plain = ("codec", "width", "normalized", "source")
    return all(getattr(a.parameters, name) == getattr(b.parameters, name) for name in plain) and (
        a.max_length,
        a.consecutive,
        a.saturated,
    ) == (b.max_length, b.consecutive, b.saturated)
