"""What PyTorch's own switches say of float32 matrix products on a GPU."""

from __future__ import annotations

import torch


def float32_is_exact() -> bool:
    """False where `torch.set_float32_matmul_precision` or the newer `fp32_precision` switches allow TF32."""
    # this one follows the older switch and the general one, and unlike the older getter never contradicts the newer
    return str(torch.backends.cuda.matmul.fp32_precision) != "tf32"
