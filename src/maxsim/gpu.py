"""What the GPU backends share: tokens as kernels take them, and the right device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .kernels.sides import Side
from .layout import Tokens


def side(tokens: Tokens) -> Side:
    data, mask = tokens.data, tokens.mask
    strides = (0, 0, 0, 0, *data.stride())
    mask_strides = (0, 0, 0, *(() if mask is None else mask.stride()))
    ragged = tokens.ragged
    return Side(
        data,
        tokens.count,
        tokens.max_length,
        data.shape[0] if ragged else 0,
        data.shape[1] if data.ndim == 4 else max(tokens.count, 1),
        strides[-4],
        strides[-3],
        strides[-2],
        strides[-1],
        tokens.starts,
        tokens.ends,
        tokens.consecutive,
        mask,
        mask_strides[-3],
        mask_strides[-2],
        mask_strides[-1],
    )


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the tensors' device, whatever the current one is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
