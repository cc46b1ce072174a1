"""Every layout that the public functions take, built from the same items, and the reference's answer for what was
built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim import Packed, Views, reference

NAN = float("nan")
MASKS = ("none", "prefix", "left", "holes")


@dataclass
class Side:
    """Items `[L_i, D]` in float64, with values that the tested dtype holds exactly, and masks `[L_i]` (True = keep)
    or None."""

    items: list[np.ndarray]
    masks: list[np.ndarray] | None = None


@dataclass
class Built:
    """`value()` and `mask` are arguments. `seen` is what the reference scores: a padded row appears in it as a
    masked row.

    `leaves` take gradients; `spread` turns gradients of the items of `seen` into those of the leaves.
    """

    value: Callable[[], Any]
    mask: Any
    seen: Side
    leaves: list[Tensor]
    spread: Callable[[list[np.ndarray]], list[np.ndarray]]


def make_side(seed: int, lengths: list[int], D: int, masks: str = "none", bound: int = 2) -> Side:
    """Small integers; the last item repeats the first one's tail, so that views can overlap."""
    random = np.random.default_rng(seed)
    items = [random.integers(-bound, bound + 1, (length, D)).astype(np.float64) for length in lengths]
    kept = None if masks == "none" else [_mask(random, masks, length) for length in lengths]
    if len(items) > 1 and lengths[-1] < lengths[0]:
        items[-1] = items[0][lengths[0] - lengths[-1] :]
        if kept is not None:
            kept[-1] = kept[0][lengths[0] - lengths[-1] :]
    return Side(items, kept)


def _mask(random: np.random.Generator, kind: str, length: int) -> np.ndarray:
    if kind == "holes":
        return random.random(length) < 0.6
    prefix = np.arange(length) < random.integers(0, length + 1)
    return prefix if kind == "prefix" else ~prefix


def build(form: str, side: Side, dtype: torch.dtype, device: str, copies: int = 1) -> Built:
    """`copies`: the number of queries, for candidates: each query gets all documents."""
    return _BUILDERS[form](side, dtype, device, copies)


def tensor(value: np.ndarray, dtype: torch.dtype, device: str) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).to(dtype).to(device)


def _pad(side: Side) -> Side:
    """Equal lengths: new rows hold NaN and are masked."""
    longest = max((len(item) for item in side.items), default=0)
    if side.masks is None and all(len(item) == longest for item in side.items):
        return side
    masks = side.masks or [np.ones(len(item), bool) for item in side.items]
    items = [np.pad(item, ((0, longest - len(item)), (0, 0)), constant_values=NAN) for item in side.items]
    return Side(items, [np.pad(mask, (0, longest - len(mask))) for mask in masks])


def _padded_from(side: Side, device: str, leaf: Tensor, view: Callable[[Any], Any]) -> Built:
    """`view` picks the padded tensor out of the leaf, and out of a numpy array like it."""
    mask = None if side.masks is None else torch.tensor(np.array(side.masks), device=device)

    def spread(grads: list[np.ndarray]) -> list[np.ndarray]:
        whole = np.zeros(tuple(leaf.shape))
        view(whole)[...] = np.array(grads)
        return [whole]

    return Built(lambda: view(leaf), mask, side, [leaf], spread)


def _padded(side: Side, dtype: torch.dtype, device: str, copies: int) -> Built:
    side = _pad(side)
    return _padded_from(side, device, tensor(np.array(side.items), dtype, device), lambda x: x)


def _strided(side: Side, dtype: torch.dtype, device: str, copies: int) -> Built:
    """Rows two apart, an odd offset, NaN all around."""
    side = _pad(side)
    N, (L, D) = len(side.items), side.items[0].shape
    big = np.full((N, 2 * L + 1, D + 5), NAN)
    big[:, 1::2, 3 : 3 + D] = np.array(side.items)
    return _padded_from(side, device, tensor(big, dtype, device), lambda x: x[:, 1::2, 3 : 3 + D])


def _transposed(side: Side, dtype: torch.dtype, device: str, copies: int) -> Built:
    """Tokens in columns: the last dimension is not contiguous."""
    side = _pad(side)
    return _padded_from(
        side, device, tensor(np.array(side.items).swapaxes(1, 2), dtype, device), lambda x: x.swapaxes(1, 2)
    )


def _list_of(side: Side, dtype: torch.dtype, device: str, shape: Callable[[list[Tensor]], Any]) -> Built:
    leaves = [tensor(item, dtype, device) for item in side.items]
    masks = None if side.masks is None else [torch.tensor(mask) for mask in side.masks]
    return Built(lambda: shape(leaves), masks, side, leaves, lambda grads: grads)


def _arrays_of(side: Side, dtype: torch.dtype, shape: Callable[[list[np.ndarray]], Any]) -> Built:
    arrays = [tensor(item, dtype, "cpu").numpy() for item in side.items]
    return Built(lambda: shape(arrays), side.masks, side, [], lambda grads: [])


def _object_array(arrays: list[np.ndarray]) -> np.ndarray:
    whole = np.empty(len(arrays), object)
    for i, item in enumerate(arrays):
        whole[i] = item
    return whole


def _flat(side: Side, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor | None, list[int]]:
    offsets = [0, *np.cumsum([len(item) for item in side.items]).tolist()]
    mask = None if side.masks is None else torch.tensor(np.concatenate(side.masks), device=device)
    return tensor(np.concatenate(side.items), dtype, device), mask, offsets


def _packed(side: Side, dtype: torch.dtype, device: str, make: Callable[[Tensor, list[int]], Any]) -> Built:
    leaf, mask, offsets = _flat(side, dtype, device)
    return Built(lambda: make(leaf, offsets), mask, side, [leaf], lambda grads: [np.concatenate(grads)])


def _views(side: Side, dtype: torch.dtype, device: str, copies: int) -> Built:
    """A buffer of shuffled items with NaN between them; the last item lies inside the first where it repeats its
    tail."""
    items, N = side.items, len(side.items)
    inside = (
        N > 1
        and len(items[-1]) <= len(items[0])
        and np.array_equal(items[-1], items[0][len(items[0]) - len(items[-1]) :])
    )
    if inside and side.masks is not None:
        inside = np.array_equal(side.masks[-1], side.masks[0][len(items[0]) - len(items[-1]) :])
    starts, T = np.zeros(N, np.int64), 3
    for i in np.random.default_rng(N).permutation(N - 1 if inside else N):
        starts[i] = T
        T += len(items[i]) + 2
    if inside:
        starts[-1] = starts[0] + len(items[0]) - len(items[-1])
    lengths = np.array([len(item) for item in items], np.int64)
    buffer, kept = np.full((T, items[0].shape[1]), NAN), np.ones(T, bool)
    for i, item in enumerate(items):
        buffer[starts[i] : starts[i] + len(item)] = item
        if side.masks is not None:
            kept[starts[i] : starts[i] + len(item)] = side.masks[i]
    leaf = tensor(buffer, dtype, device)

    def spread(grads: list[np.ndarray]) -> list[np.ndarray]:
        whole = np.zeros(buffer.shape)
        for start, grad in zip(starts, grads, strict=True):
            whole[start : start + len(grad)] += grad
        return [whole]

    mask = None if side.masks is None else torch.tensor(kept, device=device)
    return Built(lambda: Views(leaf, starts, lengths), mask, side, [leaf], spread)


def _jagged(side: Side, dtype: torch.dtype, device: str, copies: int) -> Built:
    def make(leaf: Tensor, offsets: list[int]) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(leaf, torch.tensor(offsets, device=device))

    return _packed(side, dtype, device, make)


def _jagged_holes(side: Side, dtype: torch.dtype, device: str, copies: int) -> Built:
    """A jagged tensor with lengths: two NaN rows, which belong to nobody, after each item."""
    items = [np.pad(item, ((0, 2), (0, 0)), constant_values=NAN) for item in side.items]
    masks = None if side.masks is None else [np.pad(mask, (0, 2), constant_values=True) for mask in side.masks]
    leaf, mask, offsets = _flat(Side(items, masks), dtype, device)
    lengths = torch.tensor([len(item) for item in side.items], device=device)

    def value() -> Tensor:
        return torch.nested.nested_tensor_from_jagged(leaf, torch.tensor(offsets, device=device), lengths)

    def spread(grads: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([np.pad(grad, ((0, 2), (0, 0))) for grad in grads])]

    return Built(value, mask, side, [leaf], spread)


def _candidates(side: Side, dtype: torch.dtype, device: str, copies: int) -> Built:
    built = _padded(side, dtype, device, copies)
    leaf = built.leaves[0]
    mask = None if built.mask is None else built.mask.expand(copies, -1, -1)
    return Built(lambda: leaf.expand(copies, -1, -1, -1), mask, built.seen, [leaf], built.spread)


def _candidate_lists(side: Side, dtype: torch.dtype, device: str, copies: int) -> Built:
    built = _list_of(side, dtype, device, lambda leaves: [leaves] * copies)
    built.mask = None if built.mask is None else [built.mask] * copies
    return built


_BUILDERS: dict[str, Callable[[Side, torch.dtype, str, int], Built]] = {
    "padded": _padded,
    "strided": _strided,
    "transposed": _transposed,
    "list": lambda side, dtype, device, copies: _list_of(side, dtype, device, list),
    "tuple": lambda side, dtype, device, copies: _list_of(side, dtype, device, tuple),
    "generator": lambda side, dtype, device, copies: _list_of(side, dtype, device, iter),
    "numpy": lambda side, dtype, device, copies: _arrays_of(side, dtype, list),
    "object": lambda side, dtype, device, copies: _arrays_of(side, dtype, _object_array),
    "packed32": lambda side, dtype, device, copies: _packed(
        side, dtype, device, lambda leaf, offsets: Packed(leaf, np.array(offsets, np.int32))
    ),
    "packed64": lambda side, dtype, device, copies: _packed(
        side, dtype, device, lambda leaf, offsets: Packed(leaf, torch.tensor(offsets, device=device))
    ),
    "views": _views,
    "jagged": _jagged,
    "jagged-holes": _jagged_holes,
    "candidates": _candidates,
    "candidate-lists": _candidate_lists,
}
CANDIDATES = ("candidates", "candidate-lists")
NUMPY = ("numpy", "object")  # no bfloat16, no gradients, always on the CPU
QUERY_FORMS = tuple(form for form in _BUILDERS if form not in CANDIDATES)
DOCUMENT_FORMS = tuple(_BUILDERS)


def expected(
    q: Side, d: Side, masked: str = "exclude", normalize: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The reference's scores `[NQ, ND]`, winners and similarities `[NQ, ND, LQ]` of the longest query."""
    NQ, ND, LQ = len(q.items), len(d.items), max((len(item) for item in q.items), default=0)
    scores, index, value = np.zeros((NQ, ND)), np.full((NQ, ND, LQ), -1, np.int64), np.zeros((NQ, ND, LQ))
    for a, query in enumerate(q.items):
        for b, document in enumerate(d.items):
            q_mask = None if q.masks is None else q.masks[a]
            d_mask = None if d.masks is None else d.masks[b]
            scores[a, b] = reference.score(query, document, q_mask, d_mask, masked, normalize)
            found = reference.matches(query, document, q_mask, d_mask, masked, normalize)
            index[a, b, : len(query)], value[a, b, : len(query)] = found
    return scores, index, value


def expected_grads(
    q: Side, d: Side, index: np.ndarray, upstream: np.ndarray, normalize: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The reference's gradients of every item, given winners `[NQ, ND, LQ]` and the scores' gradients `[NQ, ND]`."""
    q_grads, d_grads = [np.zeros(item.shape) for item in q.items], [np.zeros(item.shape) for item in d.items]
    for a, query in enumerate(q.items):
        for b, document in enumerate(d.items):
            winners = index[a, b, : len(query)]
            of_query, of_document = reference.gradients(query, document, winners, float(upstream[a, b]), normalize)
            q_grads[a] += of_query
            d_grads[b] += of_document
    return q_grads, d_grads
