"""A call like an earlier one repeats its launch without the checks: what a plain call does depends on the shapes,
strides, dtypes and alignment of two tensors and on whether gradients are asked for, never on values; where documents
are ragged also on where they lie, and where they are codes on what these stand for, so those keep plans of their own
for as long as they live."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .packed import Packed, Views
from .precision import float32_is_exact
from .quantized import Quantized

Plan: TypeAlias = Callable[[Tensor, Tensor], Tensor]

MOST = 512  # plans kept, of padded documents and for each ragged ones; when there are more, all are made anew
_plans: dict[Hashable, Plan] = {}


class _Places(NamedTuple):
    """Plans of ragged or quantised documents, and where these lay and what they stood for when the plans were made."""

    kept: tuple[Any, ...]
    max_length: int
    plans: dict[Hashable, Plan]


_own: WeakKeyDictionary[Packed | Views | Quantized, _Places] = WeakKeyDictionary()


def _tokens(documents: Any) -> Any:
    """The tensor that a launch reads documents from."""
    if isinstance(documents, Quantized):
        return documents.codes
    return documents.tokens if isinstance(documents, Packed | Views) else documents


def key(queries: Any, documents: Any, normalize: bool, backend: str | None) -> Hashable | None:
    """What a call depends on; None where it is not plain: an ordinary CUDA tensor of queries, one of documents or of
    their tokens, on the current device."""
    tokens = _tokens(documents)
    if isinstance(documents, Quantized) and (documents.mask is not None or documents.per_query):
        return None
    if type(queries) is not Tensor or type(tokens) is not Tensor or not tokens.is_cuda:
        return None
    if queries.layout != torch.strided or tokens.layout != torch.strided or queries.is_nested or tokens.is_nested:
        return None
    if forward_ad._current_level >= 0 or queries.is_neg() or tokens.is_neg():
        return None
    if type(normalize) is not bool or type(backend) not in (str, type(None)):
        return None
    device = tokens.device
    if queries.device != device or device.index != torch.cuda.current_device():
        return None
    try:
        alignment = (queries.data_ptr() % 16, tokens.data_ptr() % 16)
    except RuntimeError:  # wrapped by a transform of torch.func
        return None
    return (
        queries.shape,
        queries.stride(),
        queries.dtype,
        tokens.shape,
        tokens.stride(),
        tokens.dtype,
        alignment,
        device.index,
        normalize,
        backend,
        tokens.dtype != torch.float32 or float32_is_exact(),
        torch.is_grad_enabled() and (queries.requires_grad or tokens.requires_grad),
    )


def _kept(documents: Any) -> dict[Hashable, Plan]:
    """The plans that calls with such documents may use: none from before they were given other places or meanings."""
    if not isinstance(documents, Packed | Views | Quantized):
        return _plans
    own = _own.get(documents)
    now = (documents.starts, documents.ends, documents.parameters if isinstance(documents, Quantized) else None)
    if (
        own is None
        or own.max_length != documents.max_length
        or any(a is not b for a, b in zip(own.kept, now, strict=True))
    ):
        own = _own[documents] = _Places(now, documents.max_length, {})
    return own.plans


def recall(key: Hashable | None, queries: Any, documents: Any) -> Tensor | None:
    """The result of a call like an earlier one."""
    plan = None if key is None else _kept(documents).get(key)
    if plan is None:
        return None
    return plan(queries, _tokens(documents))


def remember(key: Hashable | None, documents: Any, plan: Plan | None) -> None:
    if key is None or plan is None:
        return
    plans = _kept(documents)
    if len(plans) >= MOST:
        plans.clear()
    plans[key] = plan
