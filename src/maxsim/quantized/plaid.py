"""Documents out of indexes of ColBERT (`*.pt`) and fast-plaid (`*.npy`): their codes as they are.

Both keep `metadata.json`, the codec's centroids and bucket weights, and per chunk the lengths of documents, the
centroid of each token and its packed bytes (from fast-plaid 1.7 on those of all chunks in one file). Nothing that is
pickled is run: PyTorch's files are read with `weights_only`, numpy's without objects. Whatever a file holds is looked
at where it is read, so that errors name it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    index = Index(path)
    parts = list(index.chunks())
    codes, lengths = torch.cat([part.codes for part in parts]), torch.cat([lengths_of(part) for part in parts])
    beside: dict[str, Any] = {
        name: torch.cat([getattr(part.parameters, name) for part in parts]) for name in ("centroid", "inverse")
    }
    ends = lengths.cumsum(0)
    longest = max(part.max_length for part in parts)
    parameters = dataclasses.replace(parts[0].parameters, **beside)
    return Quantized(codes, parameters, longest, ends - lengths, ends, True)


def lengths_of(documents: Quantized) -> Tensor:
    """Tokens of each, int64 `[N]`, of ragged documents."""
    assert documents.starts is not None
    assert documents.ends is not None
    return documents.ends - documents.starts


class Index:
    """An open index, of which a chunk is read at a time. `tables`: what all chunks are decoded by; `count`: of chunks.

    Raises:
        ValueError: not such an index, or a damaged one; names the file. OSError: a file is missing or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(path)
        with self._named():
            self._open()

    def chunks(self) -> Iterator[Quantized]:
        """The documents of each chunk, in the order of the index."""
        before = 0
        for n in range(self.count):
            with self._named():
                lengths = _lengths(_json(self.folder / f"doclens.{n}.json"), f"doclens.{n}.json")
                made = self._chunk(n, lengths, before)
            before += sum(lengths)
            yield made

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.folder}: not a whole index of ColBERT or fast-plaid: {error}") from error

    def _open(self) -> None:
        folder = self.folder
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
        self.count, self._load, self._kind, self._row = count, load, kind, -1
        self.tables = Codes(
            "residual",
            centroids.shape[1],
            centroids=centroids,
            cutoffs=cutoffs.float(),
            weights=weights,
            normalized=True,
            renormalize=True,
        )

    def _chunk(self, n: int, lengths: list[int], before: int) -> Quantized:
        """Chunk n, of documents of these lengths, with so many tokens in the chunks before it."""
        first, second = self._part(n, "residuals", lengths, before), self._part(n, "codes", lengths, before)
        codes, own = _tensor(*first, (torch.uint8,), 2), _tensor(*second, WHOLE, 1)
        names = first[1], second[1]
        if not sum(lengths) == len(codes) == len(own):
            raise ValueError(
                f"doclens.{n}.json holds {sum(lengths)} tokens, {names[0]} {len(codes)} and {names[1]} {len(own)}"
            )
        if self._row >= 0 and codes.shape[1] != self._row:
            raise ValueError(f"{names[0]} holds {codes.shape[1]} bytes a token, 0.residuals {self._row}")
        self._row = codes.shape[1]
        count = len(_centroids(self.tables))
        wrong = own[(own < 0) | (own >= count)]
        if len(wrong):
            raise ValueError(f"{names[1]} names centroid {int(wrong[0])}, they are numbered 0 to {count - 1}")
        plain = dataclasses.replace(self.tables, centroid=own.int(), renormalize=False)
        ends = torch.tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends])[:-1]
        made = Quantized(codes.contiguous(), plain, max(lengths, default=0), starts, ends, True)
        check(made)  # before anything is decoded
        parameters = dataclasses.replace(plain, inverse=_inverses(made.codes, plain), renormalize=True)
        documents = Quantized(made.codes, parameters, made.max_length, starts, ends, True)
        check(documents)
        return documents

    def _part(self, n: int, what: str, lengths: list[int], before: int) -> tuple[Any, str]:
        """An array of chunk n and the name of its file: its own, or the merged one of fast-plaid from 1.7 on, where
        chunks that have none follow one another."""
        own, merged = f"{n}.{what}.{self._kind}", f"merged_{what}.npy"
        if (self.folder / own).exists() or not (self._kind == "npy" and (self.folder / merged).exists()):
            return self._load(self.folder / own), own
        whole, manifest = self._load(self.folder / merged), self.folder / f"merged_{what}.manifest.json"
        if not whole.ndim:
            raise ValueError(f"{merged} holds a single number")
        if not manifest.exists():  # which fast-plaid then makes anew of the lengths
            return whole[before : before + sum(lengths)], merged
        kept = _json(manifest)
        entries = [kept.get(f"{each}.{what}.npy") if isinstance(kept, dict) else None for each in range(n + 1)]
        rows: list[Any] = [  # "merged" is new in 1.7: of an index that 1.6 has frozen all chunks are
            each.get("rows") if isinstance(each, dict) and each.get("merged", True) else 0 for each in entries
        ]
        if any(type(each) is not int for each in rows) or rows[-1] != sum(lengths) or sum(rows[:-1]) != before:
            raise ValueError(
                f"merged_{what}.manifest.json does not say where the {sum(lengths)} tokens of chunk {n} lie; a change "
                "of the index has not ended: open it with fast-plaid once"
            )
        return whole[before : before + sum(lengths)], merged


def _centroids(tables: Codes) -> Tensor:
    assert tables.centroids is not None
    return tables.centroids


def _inverses(codes: Tensor, parameters: Codes) -> Tensor:
    read = dataclasses.replace(parameters, inverse=None).reader(codes)
    parts = [residual.inverses(read(slice(low, low + BLOCK))) for low in range(0, len(codes), BLOCK)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")


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
