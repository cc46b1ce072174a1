"""The limits of the machine, measured among the contenders: they move with its power and temperature."""

from __future__ import annotations

import torch

from .timer import Call, Timing

_GEMM = {"cuda": (8192, torch.float16), "cpu": (1024, torch.float32)}
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}


class Ceilings:
    """A matrix product (8192³ float16 on a GPU, 1024³ float32 on a CPU) and a copy within the device's memory."""

    def __init__(self, device: torch.device):
        size, dtype = _GEMM[device.type]
        self.left = torch.randn(size, size, device=device).to(dtype)
        self.right = torch.randn(size, size, device=device).to(dtype)
        self.product = torch.empty_like(self.left)
        self.source = torch.randint(0, 127, (_COPY_BYTES[device.type],), dtype=torch.int8, device=device)
        self.target = torch.empty_like(self.source)

    def calls(self) -> dict[str, Call]:
        return {
            "gemm": lambda: torch.mm(self.left, self.right, out=self.product),
            "copy": lambda: self.target.copy_(self.source),
        }

    def gemm_tflops(self, timing: Timing) -> float:
        return 2 * self.left.shape[0] ** 3 / timing.median_ms / 1e9

    def copy_tbps(self, timing: Timing) -> float:
        return 2 * self.source.numel() / timing.median_ms / 1e9
