"""Documents out of indexes of ColBERT (`*.pt`) and fast-plaid (`*.npy`): their codes as they are.

Both keep `metadata.json`, the codec's centroids and bucket weights, and per chunk the lengths of documents, the
centroid of each token and its packed bytes. Nothing that is pickled is run: PyTorch's files are read with
`weights_only`, numpy's without objects. Whatever a file holds is looked at where it is read, so that errors name it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packed import Packed
from . import residual
from .check import check
from .codes import Codes
from .container import BLOCK, Quantized

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int32, torch.int64)
MOST = 2**62  # tokens

_mapped: Any = np.lib.format.open_memmap

Load = Callable[[Path], Any]


def read(path: str | os.PathLike[str]) -> Quantized:
    """As `Quantized.from_index`, on the CPU."""
    folder = Path(path)
    try:
        return _read(folder)
    except ValueError as error:
        raise ValueError(f"{folder}: not a whole index of ColBERT or fast-plaid: {error}") from error


def _read(folder: Path) -> Quantized:
    metadata = _json(folder / "metadata.json")
    count = metadata.get("num_chunks") if isinstance(metadata, dict) else None
    if type(count) is not int or count < 1:
        raise ValueError(f"metadata.json: num_chunks must be a whole number of at least 1, got {count!r}")
    numpy = (folder / "centroids.npy").exists()
    load, kind = (_numpy, "npy") if numpy else (_torch, "pt")
    centroids = _floats(load(folder / f"centroids.{kind}"), f"centroids.{kind}", 2)
    if not centroids.shape[1]:
        raise ValueError(f"centroids.{kind} has shape {list(centroids.shape)}")
    if numpy:
        cutoffs, weights = (load(folder / f"bucket_{name}.npy") for name in ("cutoffs", "weights"))
    else:
        buckets = load(folder / "buckets.pt")
        if not isinstance(buckets, (tuple, list)) or len(buckets) != 2:
            raise ValueError(f"buckets.pt: expected two tensors, cutoffs and weights, got {type(buckets).__name__}")
        cutoffs, weights = buckets
    cutoffs, weights = (_floats(each, f"buckets ({kind})", 1) for each in (cutoffs, weights))
    lengths, codes, own = [], [], []
    for n in range(count):
        names = f"{n}.residuals.{kind}", f"{n}.codes.{kind}", f"doclens.{n}.json"
        codes.append(_tensor(load(folder / names[0]), names[0], (torch.uint8,), 2))
        own.append(_tensor(load(folder / names[1]), names[1], WHOLE, 1))
        some = _lengths(_json(folder / names[2]), names[2])
        if not sum(some) == len(codes[-1]) == len(own[-1]):
            raise ValueError(
                f"{names[2]} holds {sum(some)} tokens, {names[0]} {len(codes[-1])} and {names[1]} {len(own[-1])}"
            )
        if codes[-1].shape[1] != codes[0].shape[1]:
            raise ValueError(f"{names[0]} holds {codes[-1].shape[1]} bytes a token, 0.residuals {codes[0].shape[1]}")
        wrong = own[-1][(own[-1] < 0) | (own[-1] >= len(centroids))]
        if len(wrong):
            raise ValueError(f"{names[1]} names centroid {int(wrong[0])}, they are numbered 0 to {len(centroids) - 1}")
        lengths += some
    parameters = Codes(
        "residual",
        centroids.shape[1],
        centroid=torch.cat(own).int(),
        centroids=centroids,
        cutoffs=cutoffs.float(),
        weights=weights,
        normalized=True,
    )
    places = Packed(torch.cat(codes), torch.tensor([0, *accumulate(lengths)], dtype=torch.int64))
    plain = Quantized(places.tokens, parameters, places.max_length, places.starts, places.ends, True)
    check(plain)  # before anything is decoded
    parameters = dataclasses.replace(parameters, inverse=_inverses(plain.codes, parameters), renormalize=True)
    documents = Quantized(places.tokens, parameters, places.max_length, places.starts, places.ends, True)
    check(documents)
    return documents


def _inverses(codes: Tensor, parameters: Codes) -> Tensor:
    read = dataclasses.replace(parameters, inverse=None).reader(codes)
    parts = [residual.inverses(read(slice(low, low + BLOCK))) for low in range(0, len(codes), BLOCK)]
    return torch.cat(parts) if parts else torch.empty(0, device="cpu")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8
        raise ValueError(f"{path.name}: {error}") from error


def _numpy(path: Path) -> Any:
    """An array, mapped: what its header promises is there."""
    try:
        return torch.from_numpy(_mapped(path, mode="c"))
    except OSError:
        raise
    except Exception as error:  # of numpy, and of torch for dtypes that it has not
        raise ValueError(f"{path.name}: {error}") from error


def _torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # pickle's own, of which torch names no common one
        raise ValueError(f"{path.name}: {error}") from error


def _tensor(value: Any, name: str, dtypes: tuple[torch.dtype, ...], ndim: int) -> Tensor:
    """Numbers of one of these dtypes."""
    wanted = f"{name} must hold {' or '.join(map(str, dtypes))}"
    if not isinstance(value, Tensor):
        raise ValueError(f"{wanted}, got {type(value).__name__}")
    if value.dtype not in dtypes or value.layout != torch.strided or value.is_meta:
        raise ValueError(f"{wanted}, got {value.dtype}, {value.layout}, on {value.device}")
    if value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}, got shape {list(value.shape)}")
    return value.detach()


def _floats(value: Any, name: str, ndim: int) -> Tensor:
    """float16 as it comes, else float32; finite."""
    found = _tensor(value, name, FLOATS, ndim)
    kept = torch.float16 if found.dtype == torch.float16 else torch.float32
    found = found.detach().to(kept, memory_format=torch.contiguous_format, copy=True)  # the file may change
    if not bool(found.isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinity")
    return found


def _lengths(value: Any, name: str) -> list[int]:
    """Of documents: whole numbers."""
    if not isinstance(value, list):
        raise ValueError(f"{name} must hold a list of whole numbers, got {type(value).__name__}")
    for place, length in enumerate(value):
        if type(length) is not int or not 0 <= length < MOST:
            raise ValueError(f"{name} must hold whole numbers of at least 0, got {length!r} at {place}")
    return value
