"""Devices: their names, checked where they are given, not where they fail; and what PyTorch does on them unasked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def device_of(device: str | torch.device) -> torch.device:
    """The device of a name: "cpu", "cuda" or "cuda:N", one that this machine has.

    Raises:
        ValueError: another name, or a GPU that is not there.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f'a device is "cpu", "cuda" or "cuda:N", got {str(device)!r}')
    count = torch.cuda.device_count() if found.type == "cuda" and torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        seen = "no CUDA GPU" if not count else "1 CUDA GPU" if count == 1 else f"{count} CUDA GPUs"
        raise ValueError(f"{found}: PyTorch finds {seen} here")
    return found


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Arithmetic in the dtypes that it is given, in a `with`."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
