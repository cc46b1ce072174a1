"""Queries of any form in the dtype, on the device and of the width of a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..corpus import Coding, Id, id_list
from ..packed import Packed, Views, as_tensor, kind_of


def queries_of(queries: Any, coding: Coding, device: torch.device) -> Tensor | Packed:
    """`[NQ, LQ, D]` or packed, of the corpus' width and finite.

    Raises:
        TypeError, ValueError: as `Corpus.search`.
    """
    if isinstance(queries, np.ndarray) and queries.dtype == object:
        # of items of one length numpy makes a block of Python floats
        queries = list(queries) if queries.ndim == 1 else queries.astype(np.float64)

    def convert(tensor: Tensor, what: str) -> Tensor:
        return _convert(tensor, coding, device, what)

    if isinstance(queries, Packed):
        asked: Tensor | Packed = Packed(convert(queries.tokens, "queries"), queries.offsets, queries.max_length)
    elif isinstance(queries, Views):
        items = [queries.tokens[a:b] for a, b in zip(queries.starts.tolist(), queries.ends.tolist(), strict=True)]
        return queries_of(items, coding, device)
    elif isinstance(queries, (Tensor, np.ndarray)):
        tensor = as_tensor(queries, "queries")
        if tensor.is_nested:
            return queries_of(list(tensor.unbind()), coding, device)
        if tensor.ndim not in (2, 3):
            raise ValueError(f"queries must have shape [NQ, LQ, D] or [LQ, D], got {list(tensor.shape)}")
        asked = convert(tensor if tensor.ndim == 3 else tensor[None], "queries")
    elif isinstance(queries, (str, bytes, dict)) or not isinstance(queries, Iterable):
        raise TypeError(f"queries must be a tensor, an array, a list of them, Packed or Views, got {kind_of(queries)}")
    else:
        items = [convert(as_tensor(item, f"queries[{i}]"), f"queries[{i}]") for i, item in enumerate(queries)]
        for i, item in enumerate(items):
            if item.ndim != 2:
                raise ValueError(f"queries[{i}] must have shape [L, D], got {list(item.shape)}")
        nothing = torch.empty(0, 0, coding.dim, dtype=coding.dtype, device=device)
        asked = Packed.from_list(items) if items else nothing
    values = asked if isinstance(asked, Tensor) else asked.tokens
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"queries hold NaN or infinity in the corpus' dtype, {coding.dtype}")
    return asked


def count_of(asked: Tensor | Packed) -> int:
    return asked.shape[0] if isinstance(asked, Tensor) else len(asked)


def query_lengths(asked: Tensor | Packed) -> Tensor:
    """int64 `[NQ]`, on the queries' device."""
    if isinstance(asked, Tensor):
        return torch.full((asked.shape[0],), asked.shape[1], dtype=torch.int64, device=asked.device)
    return asked.offsets.long().diff()


def candidate_lists(ids: Any, NQ: int) -> list[list[Id]]:
    """Checked ids, a list for each query.

    Raises:
        TypeError, ValueError: as `Corpus.rerank`.
    """
    if isinstance(ids, Tensor) and ids.is_meta:
        raise ValueError("ids must hold values, got a meta tensor")
    if isinstance(ids, (np.ndarray, Tensor)):
        ids = ids.tolist()
    if isinstance(ids, (str, bytes, dict)) or not isinstance(ids, Iterable):
        raise TypeError(f"ids must be a list of ids, or a list of them for each query, got {type(ids).__name__}")
    items = list(ids)
    nested = [not isinstance(item, (str, int, np.integer)) for item in items]
    if not items or not any(nested):
        return [id_list(items) for _ in range(NQ)]
    if not all(nested):
        raise TypeError("ids must be ids, or lists of ids, not both")
    if len(items) != NQ:
        raise ValueError(f"expected one list of ids for each of {NQ} queries, got {len(items)}")
    return [id_list(item) for item in items]


def some_of(asked: Tensor | Packed, low: int, high: int) -> Tensor | Packed:
    """Queries low to high."""
    if isinstance(asked, Tensor):
        return asked[low:high]
    offsets = asked.offsets[low : high + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    return Packed(asked.tokens[first:last], offsets - first)


def _convert(tensor: Tensor, coding: Coding, device: torch.device, what: str) -> Tensor:
    if not tensor.is_floating_point():
        raise TypeError(f"{what} must hold floats, got {tensor.dtype}")
    if tensor.ndim == 0 or tensor.shape[-1] != coding.dim:
        raise ValueError(f"{what} must have the corpus' width {coding.dim}, got shape {list(tensor.shape)}")
    if tensor.is_meta:
        raise ValueError(f"{what} must hold values, got a meta tensor")
    return tensor.detach().to(device, coding.dtype)
