"""Documents out of indexes of ColBERT (`*.pt`) and fast-plaid (`*.npy`): their codes as they are.

Both keep `metadata.json`, the codec's centroids and bucket weights, and per chunk the lengths of documents, the
centroid of each token and its packed bytes. Nothing that is pickled is run: PyTorch's files are read with
`weights_only`, numpy's without objects.
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


def read(path: str | os.PathLike[str]) -> Quantized:
    """As `Quantized.from_index`, on the CPU."""
    folder = Path(path)
    try:
        metadata = json.loads((folder / "metadata.json").read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / 'metadata.json'}: {error}") from error
    numpy = (folder / "centroids.npy").exists()
    load, kind = (_numpy, "npy") if numpy else (_torch, "pt")
    try:
        chunks = range(int(metadata["num_chunks"]))
        centroids = load(folder / f"centroids.{kind}")
        if numpy:
            cutoffs, weights = load(folder / "bucket_cutoffs.npy"), load(folder / "bucket_weights.npy")
        else:
            cutoffs, weights = load(folder / "buckets.pt")
        lengths = [length for n in chunks for length in json.loads((folder / f"doclens.{n}.json").read_text())]
        codes = _together(load, [folder / f"{n}.residuals.{kind}" for n in chunks], torch.uint8)
        centroid = _together(load, [folder / f"{n}.codes.{kind}" for n in chunks], None)
        if len(centroid) and not 0 <= int(centroid.min()) <= int(centroid.max()) < len(centroids):
            raise ValueError(f"centroids are numbered 0 to {len(centroids) - 1}, codes name {int(centroid.max())}")
        parameters = Codes(
            "residual",
            centroids.shape[-1],
            centroid=centroid.int(),
            inverse=torch.ones(len(codes), device="cpu"),
            centroids=_halves_or_singles(centroids),
            cutoffs=cutoffs.float(),
            weights=_halves_or_singles(weights),
            normalized=True,
            renormalize=True,
        )
        places = Packed(codes, torch.tensor([0, *accumulate(lengths)], dtype=torch.int64))
        documents = Quantized(codes, parameters, places.max_length, places.starts, places.ends, True)
        check(documents)
        parameters = dataclasses.replace(parameters, inverse=_inverses(codes, parameters))
        documents = documents._with(parameters=parameters)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: not a whole index of ColBERT or fast-plaid: {error}") from error
    return documents


def _halves_or_singles(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float16 else tensor.float()


def _inverses(codes: Tensor, parameters: Codes) -> Tensor:
    read = dataclasses.replace(parameters, inverse=None).reader(codes)
    parts = [residual.inverses(read(slice(low, low + BLOCK))) for low in range(0, len(codes), BLOCK)]
    return torch.cat(parts) if parts else torch.empty(0, device="cpu")


def _numpy(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path, allow_pickle=False))


def _torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:  # pickle's own, of which torch names no common one
        raise ValueError(f"{path}: {error}") from error


def _together(load: Callable[[Path], Any], paths: list[Path], dtype: torch.dtype | None) -> Tensor:
    """The chunks one after another. `dtype`: the only one that may be; None: whole numbers."""
    parts = [load(path) for path in paths]
    if not parts:
        raise ValueError("there are no chunks")
    for path, part in zip(paths, parts, strict=True):
        wanted = (dtype,) if dtype is not None else (torch.int32, torch.int64)
        if not isinstance(part, Tensor) or part.dtype not in wanted:
            raise ValueError(f"{path} must hold {' or '.join(map(str, wanted))}")
    return torch.cat(parts)
