"""A call like an earlier one repeats its launch without the checks: what a plain call does depends on the shapes,
strides, dtypes and alignment of two tensors, never on their values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .precision import float32_is_exact

Plan: TypeAlias = Callable[[Tensor, Tensor], Tensor]

MOST = 512  # plans kept; when there are more, all are made anew
_plans: dict[Hashable, Plan] = {}


def key(queries: Any, documents: Any, normalize: bool, backend: str | None) -> Hashable | None:
    """What a call depends on; None where it is not plain: two ordinary CUDA tensors without gradients, on the current
    device."""
    if type(queries) is not Tensor or type(documents) is not Tensor or not documents.is_cuda:
        return None
    if queries.layout != torch.strided or documents.layout != torch.strided or queries.is_nested or documents.is_nested:
        return None
    if torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad):
        return None
    device = documents.device
    if queries.device != device or device.index != torch.cuda.current_device():
        return None
    try:
        alignment = (queries.data_ptr() % 16, documents.data_ptr() % 16)
    except RuntimeError:  # wrapped by a transform of torch.func
        return None
    return (
        queries.shape,
        queries.stride(),
        queries.dtype,
        documents.shape,
        documents.stride(),
        documents.dtype,
        alignment,
        device.index,
        bool(normalize),
        backend,
        documents.dtype != torch.float32 or float32_is_exact(),
    )


def recall(key: Hashable | None) -> Plan | None:
    return None if key is None else _plans.get(key)


def remember(key: Hashable | None, plan: Plan | None) -> None:
    if key is None or plan is None:
        return
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = plan
