"""A lane is a backend on a device: the same tests run in each lane that this machine has."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import maxsim

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
TRITON = importlib.util.find_spec("triton") is not None

NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


@dataclass(frozen=True)
class Lane:
    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-interpreted" if self.interpreted else self.backend

    @property
    def interpreted(self) -> bool:
        return self.backend == "triton" and self.device == "cpu"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        if self.interpreted:  # its bfloat16 dot is wrong
            return (torch.float16, torch.float32)
        if self.backend == "cpu":
            return (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        return (torch.float16, torch.bfloat16, torch.float32)

    def score(self, *args: Any, **options: Any) -> torch.Tensor:
        return maxsim.score(*args, backend=self.backend, **options)

    def score_pairs(self, *args: Any, **options: Any) -> torch.Tensor:
        return maxsim.score_pairs(*args, backend=self.backend, **options)

    def matches(self, *args: Any, **options: Any) -> maxsim.Matches:
        return maxsim.matches(*args, backend=self.backend, **options)

    def topk(self, *args: Any, **options: Any) -> maxsim.TopK:
        return maxsim.topk(*args, backend=self.backend, **options)

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.as_tensor(values).to(device=self.device, dtype=dtype)


def lanes() -> list[Lane]:
    """Under the interpreter only its own lane: the others ran without it."""
    if INTERPRETED:
        return [Lane("triton", "cpu")]
    return [Lane("cpu", "cpu")] + ([Lane("triton", "cuda")] if CUDA and TRITON else [])


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Normal values, the same on every device."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def integers(
    seed: int, *shape: int, bound: int = 2, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.Tensor:
    """Small integers: every product and sum of a test is exact in every dtype."""
    values = torch.randint(-bound, bound + 1, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(device)


def interpreter_when(predicate: Callable[..., bool]) -> pytest.MarkDecorator:
    """Puts a test in the interpreter's quick lane for the parameters that `predicate` accepts."""
    return pytest.mark.interpreter_when.with_args(predicate)
