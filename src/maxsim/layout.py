"""Every accepted form of queries and documents becomes one `Tokens`, checked once; two of them make a `Problem`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .packed import Packed, Views, as_tensor, kind_of, numbers
from .problem import Problem as Problem
from .problem import Tokens as Tokens
from .quantized import Quantized

Array: TypeAlias = Tensor | np.ndarray
TokensLike: TypeAlias = Array | Packed | Views | Quantized | Sequence[Any] | Iterable[Any]
MaskLike: TypeAlias = Array | Sequence[Any] | None

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def make_problem(
    queries: TokensLike,
    documents: TokensLike,
    query_mask: MaskLike = None,
    document_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
    pairs: Array | Sequence[Any] | None = None,
    pairwise: bool = False,
) -> Problem:
    """Checks and converts the arguments of the public functions. `pairwise`: for `score_pairs`."""
    if masked not in ("exclude", "zero"):
        raise ValueError(f"masked must be 'exclude' or 'zero', got {masked!r}")
    if not isinstance(normalize, (bool, np.bool_)):
        raise TypeError(f"normalize must be True or False, got {type(normalize).__name__}")
    q, q_groups = tokens_of(queries, query_mask, "queries")
    d, groups = tokens_of(documents, document_mask, "documents")
    if q.codes is not None:
        raise TypeError("queries must be tokens, got Quantized: only documents can be quantised")
    if normalize and d.codes is not None and not d.codes.normalized:
        raise ValueError(
            "normalize=True takes documents whose unit vectors were quantised: quantize(documents, normalize=True)"
        )
    if q_groups is not None:
        raise ValueError("queries must be [NQ, LQ, D], [LQ, D] or a flat list of [LQ, D], got one level too many")
    q, d = _agree(q, d)
    pair_index, per_query = None, 0
    if pairwise:
        if groups is not None:
            raise ValueError("score_pairs takes documents [ND, LD, D] or a flat list, got candidates per query")
        pair_index, per_query = _pairs(pairs, q.count, d.count, d.data.device)
    elif groups is not None:
        lists, per_query = groups
        if lists != q.count:
            raise ValueError(f"candidates: expected one list of documents for each of {q.count} queries, got {lists}")
    return Problem(q, d, pair_index, per_query, masked == "zero", bool(normalize))


def tokens_of(value: TokensLike, mask: MaskLike, side: str) -> tuple[Tokens, tuple[int, int] | None]:
    """→ tokens, and (NQ, K) where the value holds K documents for each of NQ queries."""
    if isinstance(value, (Packed, Views)):
        return _from_ragged(value, mask, side), None
    if isinstance(value, Quantized):
        groups = (len(value) // value.per_query, value.per_query) if value.per_query else None
        return _from_quantized(value, mask, side), groups
    if isinstance(value, np.ndarray) and value.dtype == object:
        # of items of one length numpy makes a block of Python floats, whose dtype is lost: float32 then
        value = list(value) if value.ndim == 1 else value.astype(np.float32)
    if isinstance(value, (Tensor, np.ndarray)):
        tensor = as_tensor(value, side)
        if tensor.is_nested:
            return _from_nested(tensor, mask, side), None
        return _from_padded(tensor, mask, side)
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
        raise TypeError(f"{side} must be a tensor, an array, a list of them, Packed or Views, got {kind_of(value)}")
    items = list(value)
    if items and isinstance(items[0], (list, tuple)):
        return _from_nested_lists(items, mask, side)
    if items and all(getattr(item, "ndim", 0) == 3 for item in items):  # a list of [K, L, D]: candidates per query
        return _from_nested_lists([list(item) for item in items], mask, side)
    return _from_list(items, mask, side), None


def _from_padded(tensor: Tensor, mask: MaskLike, side: str) -> tuple[Tokens, tuple[int, int] | None]:
    if tensor.ndim not in (2, 3, 4):
        raise ValueError(f"{side} must have shape [N, L, D] or [L, D] (or [NQ, K, L, D]), got {list(tensor.shape)}")
    given = None if mask is None else _bool(mask, side, tensor.device)
    if given is not None and given.shape != tensor.shape[:-1]:
        raise ValueError(
            f"{side} mask must have shape {list(tensor.shape[:-1])} for {side} of shape {list(tensor.shape)}, "
            f"got {list(given.shape)}"
        )
    if tensor.ndim == 2:
        tensor = tensor[None]
        given = None if given is None else given[None]
    groups = (tensor.shape[0], tensor.shape[1]) if tensor.ndim == 4 else None
    count = tensor.shape[0] if groups is None else groups[0] * groups[1]
    if groups is not None and count == 0:  # without candidates there is nothing a K could divide
        tensor = tensor.flatten(0, 1)
        given = None if given is None else given.flatten(0, 1)
    return Tokens(tensor, count, tensor.shape[-2], mask=given), groups


def _from_ragged(value: Packed | Views, mask: MaskLike, side: str) -> Tokens:
    tokens = value.tokens
    given = None if mask is None else _bool(mask, side, tokens.device)
    if given is not None and given.shape != tokens.shape[:1]:
        raise ValueError(f"{side} mask must have one entry a token, [{tokens.shape[0]}], got {list(given.shape)}")
    return Tokens(tokens, len(value), value.max_length, value.starts, value.ends, isinstance(value, Packed), given)


def _from_quantized(value: Quantized, mask: MaskLike, side: str) -> Tokens:
    kept = value.mask
    if mask is not None:
        if value.starts is not None and not (isinstance(mask, (Tensor, np.ndarray)) and mask.ndim == 1):
            value = value.compact()  # a document that was selected twice has two masks
            assert value.starts is not None
            assert value.ends is not None
            if value.per_query:
                mask = _of_candidates(mask)
            mask, kept = _list_mask(mask, (value.ends - value.starts).tolist(), side), value.mask
        given, shape = _bool(mask, side, value.device), value.codes.shape[:-1]
        if given.shape != shape:
            raise ValueError(f"{side} mask must have the shape of the codes, {list(shape)}, got {list(given.shape)}")
        kept = given if kept is None else kept & given
    return Tokens(
        value.codes,
        len(value),
        value.max_length,
        value.starts,
        value.ends,
        value.consecutive,
        kept,
        value.parameters,
        value.floats,
    )


def _from_nested(tensor: Any, mask: MaskLike, side: str) -> Tokens:
    if tensor.layout != torch.jagged or tensor.ndim != 3 or not isinstance(tensor.shape[1], torch.SymInt):
        raise ValueError(f"nested {side} must have the jagged layout and shape [N, *, D]")
    if mask is not None and isinstance(mask, Tensor) and mask.is_nested:
        mask = mask.values()
    lengths = tensor.lengths()
    if lengths is None:
        return _from_ragged(Packed(tensor.values(), tensor.offsets()), mask, side)
    return _from_ragged(Views(tensor.values(), tensor.offsets()[:-1], lengths), mask, side)


def _from_list(items: list[Any], mask: MaskLike, side: str) -> Tokens:
    tensors = [as_tensor(item, f"{side}[{i}]") for i, item in enumerate(items)]
    for i, item in enumerate(tensors):
        if item.ndim != 2:
            raise ValueError(
                f"{side}[{i}] must have shape [L, D], got {list(item.shape)}; "
                "expected a list of [L, D], a list of such lists, or one [N, L, D]"
            )
        first = tensors[0]
        if item.shape[1] != first.shape[1]:
            raise ValueError(f"{side}[{i}] has width {item.shape[1]}, {side}[0] has {first.shape[1]}")
        if item.dtype != first.dtype:
            raise TypeError(f"{side}[{i}] is {item.dtype}, {side}[0] is {first.dtype}: cast them to one dtype")
        if item.device != first.device:
            raise ValueError(f"{side}[{i}] is on {item.device}, {side}[0] is on {first.device}")
    if not tensors:
        return Tokens(torch.empty(0, 0, dtype=torch.float32, device="cpu"), 0, 0, mask=None)
    packed = Packed.from_list(tensors)
    if mask is not None and not (isinstance(mask, (Tensor, np.ndarray)) and mask.ndim == 1):
        mask = _list_mask(mask, [len(item) for item in tensors], side)
    return _from_ragged(packed, mask, side)


def _from_nested_lists(items: list[Any], mask: MaskLike, side: str) -> tuple[Tokens, tuple[int, int]]:
    counts = {len(inner) for inner in items}
    if len(counts) > 1:
        raise ValueError(f"every query needs as many candidates as the others, got lists of {sorted(counts)}")
    mask = None if mask is None else _of_candidates(mask)
    flat = _from_list([item for inner in items for item in inner], mask, side)
    return flat, (len(items), counts.pop())


def _of_candidates(mask: Any) -> Any:
    """Masks `[NQ, K, L]`, or as lists in lists, one after another."""
    if isinstance(mask, (Tensor, np.ndarray)):
        return mask.reshape(-1, mask.shape[-1]) if mask.ndim == 3 else mask
    return [m for inner in mask for m in inner]


def _list_mask(mask: Any, lengths: list[int], side: str) -> Tensor:
    """A mask an item (or one padded [N, L]) → one entry a token."""
    if isinstance(mask, (str, bytes)) or not isinstance(mask, Iterable):
        raise TypeError(f"{side} mask must hold booleans (True = keep), one row an item, got {type(mask).__name__}")
    rows = list(mask)
    if len(rows) != len(lengths):
        raise ValueError(f"{side} mask must have one row for each of {len(lengths)} {side}, got {len(rows)}")
    padded = isinstance(mask, (Tensor, np.ndarray))
    kept = []
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        row = _bool(row, f"{side}[{i}]", None)
        if row.shape != ((max(lengths),) if padded else (length,)):
            expected = f"[{len(lengths)}, {max(lengths)}] in all" if padded else f"[{length}]"
            raise ValueError(f"{side}[{i}] mask must have shape {expected}, got {list(row.shape)}")
        known = padded and row.device.type == "cpu" and not torch.compiler.is_compiling()
        if known and bool(row[length:].any()) and not bool(row[:length].all()):
            raise ValueError(
                f"{side}[{i}] has {length} tokens, to which the first entries of its mask belong, but that keeps some "
                "beyond them: of a list padded on the left give one mask an item"
            )
        kept.append(row[:length])
    return torch.cat(kept) if kept else torch.empty(0, dtype=torch.bool, device="cpu")


def _bool(mask: Any, side: str, device: torch.device | None) -> Tensor:
    tensor = numbers(mask, f"{side} mask", "booleans (True = keep)")
    if not isinstance(mask, Tensor) and not tensor.numel():
        tensor = tensor.bool()  # an empty list has no dtype of its own
    if tensor.dtype != torch.bool:
        # .bool() would turn an additive mask, as attention has it, into its opposite
        how = "mask == 0 of an additive one (0 and -inf), mask > 0 of one of 1 and 0"
        use = how if tensor.is_floating_point() else "mask.bool()"
        raise TypeError(f"{side} mask must be boolean (True = keep), got {tensor.dtype}: use {use}")
    return tensor if device is None else tensor.to(device, non_blocking=True)


def check_tokens(tokens: Tokens, side: str) -> None:
    """Floats, at least one column."""
    if tokens.data.dtype not in FLOATS:
        raise TypeError(
            f"{side} must be float16, bfloat16, float32 or float64, got {tokens.data.dtype}; "
            "integer codes mean nothing without their scales: see maxsim.quantize"
        )
    if tokens.width == 0:
        raise ValueError(f"{side} must have at least one column, got shape {list(tokens.data.shape)}")


def _agree(q: Tokens, d: Tokens) -> tuple[Tokens, Tokens]:
    """Same dtype, width and device on both sides; an empty list takes those of the other side."""
    if q.data.shape == (0, 0):
        dtype = d.data.dtype if d.codes is None else torch.float32
        q = dataclasses.replace(q, data=d.data.new_empty(0, 0, max(d.width, 1), dtype=dtype))
    if d.data.shape == (0, 0):
        d = dataclasses.replace(d, data=q.data.new_empty(0, 0, max(q.width, 1)))
    check_tokens(q, "queries")
    if d.codes is None:
        check_tokens(d, "documents")
    if q.data.is_meta and not d.data.is_meta:
        raise ValueError(f"queries are on the meta device, which holds no values, and documents on {d.data.device}")
    if d.codes is not None and q.data.dtype == torch.float64:
        raise TypeError("queries are torch.float64 and documents quantised: cast, for example queries.float()")
    if d.codes is None and q.data.dtype != d.data.dtype:
        raise TypeError(
            f"queries are {q.data.dtype} and documents {d.data.dtype}: cast one, for example queries.to({d.data.dtype})"
        )
    if d.floats is not None and q.data.dtype != d.floats.dtype:
        raise TypeError(
            f"queries are {q.data.dtype} and the documents that gradients go straight through to {d.floats.dtype}: "
            f"cast one, for example queries.to({d.floats.dtype})"
        )
    if q.width != d.width:
        raise ValueError(f"queries have width {q.width} and documents {d.width}")
    return q.to(d.data.device), d


def _pairs(pairs: Any, NQ: int, ND: int, device: torch.device) -> tuple[Tensor | None, int]:
    """→ the pairs on the documents' device, or None and K = 1 where query i goes with document i."""
    if pairs is None:
        if NQ != ND:
            raise ValueError(f"without pairs, query i is scored with document i: got {NQ} queries, {ND} documents")
        return None, 1
    index = numbers(pairs, "pairs", "whole numbers, int32 or int64, in two columns (query, document)")
    if index.numel() == 0 and index.ndim == 1:
        index = index.new_empty((0, 2)).long()
    if index.ndim != 2 or index.shape[1] != 2:
        raise ValueError(f"pairs must have shape [P, 2] (query, document), got {list(index.shape)}")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"pairs must be int32 or int64, got {index.dtype}")
    if index.shape[0] and (NQ == 0 or ND == 0):
        raise ValueError(f"{index.shape[0]} pairs but {NQ} queries and {ND} documents")
    if torch.compiler.is_compiling():  # values are not looked at
        index = torch.stack((index[:, 0].clamp(0, max(NQ - 1, 0)), index[:, 1].clamp(0, max(ND - 1, 0))), 1)
    elif index.device.type == "cpu" and index.shape[0]:
        low, high = index.amin(0).tolist(), index.amax(0).tolist()
        if low[0] < 0 or low[1] < 0 or high[0] >= NQ or high[1] >= ND:
            raise ValueError(f"pairs must lie in 0..{NQ - 1} and 0..{ND - 1}, got {low} to {high}")
    return index.to(device=device, dtype=torch.int64, non_blocking=True).contiguous(), 0
