"""Whether codes and their parameters are what a codec can have made: looked at before any kernel reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import product, residual, scaled
from .container import Quantized

OPTIONAL = ("radius", "norm", "cutoffs", "factor")  # some unknown of what another library has quantised
WHOLE = {"centroid": torch.int32, "factor": torch.int16}
BLOCK = 1 << 24  # codes looked at in one go


def check(documents: Quantized) -> None:
    """Every shape, dtype and value.

    Raises:
        ValueError: naming the first thing that is wrong, and where.
    """
    codes, parameters = documents.codes, documents.parameters
    token = codes.shape[:-1]
    dtype, width = _row(documents)
    _expect("codes", codes, dtype, (*token, width))
    if documents.mask is not None:
        _expect("mask", documents.mask, torch.bool, token)
    tensors, shapes = parameters.tensors(), _shapes(documents)
    for name in shapes:
        if name not in tensors and name not in OPTIONAL:
            raise ValueError(f"{name} is missing")
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ValueError(f"{name} means nothing to {parameters.codec}")
        half = name in ("centroids", "weights") and tensor.dtype == torch.float16
        _expect(name, tensor, torch.float16 if half else WHOLE.get(name, torch.float32), shapes[name])
        if name in WHOLE:
            least, most = _limits(name, documents)
            _refuse(name, tensor, (tensor < least) | (tensor > most))
            continue
        wrong = ~tensor.isfinite()
        if name == "scale":
            wrong |= tensor < scaled.LEAST
        elif name == "inverse":
            wrong |= tensor <= 0
        elif name in ("radius", "norm"):  # beyond float32's range infinite, and so is the bound
            wrong = ~(tensor >= 0)
        elif name == "cutoffs":
            wrong[1:] |= tensor.diff() < 0
        _refuse(name, tensor, wrong)
    _check_codes(documents)


def _row(documents: Quantized) -> tuple[torch.dtype, int]:
    """Of a row of codes."""
    parameters = documents.parameters
    if parameters.codec in scaled.LIMIT:
        return scaled.STORED[parameters.codec], parameters.width
    if parameters.codec == "residual":
        count = 0 if parameters.weights is None or parameters.weights.ndim != 1 else len(parameters.weights)
        if count not in [1 << bits for bits in residual.BITS]:
            raise ValueError(f"weights must be 2, 4, 16 or 256, got {count}")
        return torch.uint8, residual.bytes_a_row(parameters.width, parameters.bits)
    books = parameters.books
    if books is None or books.ndim != 3 or not 0 < books.shape[1] <= product.WORDS:
        raise ValueError(f"books must have shape [M, 1..{product.WORDS}, D / M]")
    if books.shape[0] * books.shape[2] != parameters.width:
        raise ValueError(f"books of shape {list(books.shape)} do not make tokens of width {parameters.width}")
    return torch.uint8, len(books)


def _limits(name: str, documents: Quantized) -> tuple[int, int]:
    """Of whole numbers: centroids that there are, factors that keep products in int32."""
    parameters = documents.parameters
    if name == "centroid":
        return 0, (0 if parameters.centroids is None else len(parameters.centroids)) - 1
    return 1, scaled.largest_factor(parameters.width, parameters.codec)


def _shapes(documents: Quantized) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a codec may have."""
    parameters, token = documents.parameters, tuple(documents.codes.shape[:-1])
    shapes: dict[str, tuple[int, ...]] = {"radius": (len(documents),), "norm": (len(documents),)}
    if parameters.codec in scaled.LIMIT:
        return shapes | {"scale": (len(documents),), "factor": token}
    if parameters.codec == "residual":
        count = 0 if parameters.centroids is None else len(parameters.centroids)
        buckets = 1 << parameters.bits
        shapes |= {"centroid": token, "centroids": (count, parameters.width)}
        if parameters.renormalize:
            shapes["inverse"] = token
        return shapes | {"weights": (buckets,), "cutoffs": (buckets - 1,)}
    assert parameters.books is not None
    return shapes | {"books": tuple(parameters.books.shape)}


def _check_codes(documents: Quantized) -> None:
    """Codes that no codec makes, or that would be read beyond what there is."""
    flat, books = documents.codes.reshape(-1, documents.codes.shape[-1]), documents.parameters.books
    step = max(1, BLOCK // max(1, flat.shape[1]))
    for low in range(0, len(flat), step):
        part = flat[low : low + step]
        if documents.codec == "int8":
            wrong = part == -128
        elif documents.codec == "fp8":
            wrong = part.view(torch.uint8) & 0x7F == 0x7F
        elif books is not None:
            wrong = part > books.shape[1] - 1  # 256 is no uint8, and would be taken for 0
        else:
            return
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
