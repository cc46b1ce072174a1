"""A call like an earlier one repeats its launch without the checks: what a plain call does depends on the shapes,
strides, dtypes and alignment of two tensors and on whether gradients are asked for, never on values; and where
documents are ragged on where they lie, so those keep plans of their own for as long as they live."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .packed import Packed, Views
from .precision import float32_is_exact

Plan: TypeAlias = Callable[[Tensor, Tensor], Tensor]

MOST = 512  # plans kept, of padded documents and for each ragged ones; when there are more, all are made anew
_plans: dict[Hashable, Plan] = {}


class _Places(NamedTuple):
    """Plans of ragged documents, and where these lay when the plans were made."""

    starts: Tensor
    ends: Tensor
    max_length: int
    plans: dict[Hashable, Plan]


_ragged: WeakKeyDictionary[Packed | Views, _Places] = WeakKeyDictionary()


def key(queries: Any, documents: Any, normalize: bool, backend: str | None) -> Hashable | None:
    """What a call depends on; None where it is not plain: an ordinary CUDA tensor of queries, one of documents or of
    their tokens, on the current device."""
    tokens = documents.tokens if isinstance(documents, Packed | Views) else documents
    if type(queries) is not Tensor or type(tokens) is not Tensor or not tokens.is_cuda:
        return None
    if queries.layout != torch.strided or tokens.layout != torch.strided or queries.is_nested or tokens.is_nested:
        return None
    if forward_ad._current_level >= 0:
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
    """The plans that calls with such documents may use: none from before a ragged form was given other places."""
    if not isinstance(documents, Packed | Views):
        return _plans
    kept, starts, ends, longest = _ragged.get(documents), documents.starts, documents.ends, documents.max_length
    if kept is None or not (kept.starts is starts and kept.ends is ends and kept.max_length == longest):
        kept = _ragged[documents] = _Places(starts, ends, longest, {})
    return kept.plans


def recall(key: Hashable | None, queries: Any, documents: Any) -> Tensor | None:
    """The result of a call like an earlier one."""
    plan = None if key is None else _kept(documents).get(key)
    if plan is None:
        return None
    return plan(queries, documents.tokens if isinstance(documents, Packed | Views) else documents)


def remember(key: Hashable | None, documents: Any, plan: Plan | None) -> None:
    if key is None or plan is None:
        return
    plans = _kept(documents)
    if len(plans) >= MOST:
        plans.clear()
    plans[key] = plan
