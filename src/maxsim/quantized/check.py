"""Whether codes and their parameters are what a codec can have made: looked at before any kernel reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import scaled
from .codes import DOCUMENT, TOKEN
from .container import Quantized

BLOCK = 1 << 24  # codes looked at in one go


def check(documents: Quantized) -> None:
    """Every shape, dtype and value.

    Raises:
        ValueError: naming the first thing that is wrong, and where.
    """
    codes, parameters = documents.codes, documents.parameters
    token = codes.shape[:-1]
    _expect("codes", codes, _stored(documents), (*token, _row(documents)))
    if documents.mask is not None:
        _expect("mask", documents.mask, torch.bool, token)
    wanted = _wanted(documents)
    for name in wanted:
        tensor = getattr(parameters, name)
        if tensor is None:
            raise ValueError(f"{name} is missing")
        shape = (len(documents),) if name in DOCUMENT else token if name in TOKEN else wanted[name][1]
        _expect(name, tensor, wanted[name][0], shape)
    for name, tensor in parameters.tensors().items():
        if name in wanted:
            continue
        if name not in ("radius", "norm"):
            raise ValueError(f"{name} means nothing to {parameters.codec}")
        _expect(name, tensor, torch.float32, (len(documents),))
    for name, tensor in parameters.tensors().items():
        if tensor.is_floating_point():
            wrong = ~tensor.isfinite()
            if name in ("scale", "token_scale"):
                wrong |= tensor < scaled.LEAST
            elif name in ("radius", "norm"):
                wrong |= tensor < 0
            _refuse(name, tensor, wrong)
    _check_codes(documents)


def _stored(documents: Quantized) -> torch.dtype:
    return scaled.STORED[documents.codec]


def _row(documents: Quantized) -> int:
    return documents.width


def _wanted(documents: Quantized) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that a codec needs: dtype, and the shape of those that all documents share."""
    return {"scale" if documents.parameters.token_scale is None else "token_scale": (torch.float32, ())}


def _check_codes(documents: Quantized) -> None:
    flat = documents.codes.reshape(-1, documents.codes.shape[-1])
    step = max(1, BLOCK // max(1, flat.shape[1]))
    for low in range(0, len(flat), step):
        part = flat[low : low + step]
        wrong = part == -128 if documents.codec == "int8" else part.view(torch.uint8) & 0x7F == 0x7F
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(f"the code of token row {low + row}, column {column}, is none of {documents.codec}")


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")


def _refuse(name: str, tensor: Tensor, wrong: Tensor) -> None:
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name} holds {float(tensor[tuple(at)])} at {at}")
