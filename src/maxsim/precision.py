"""What PyTorch's own switches say of float32 matrix products."""

from __future__ import annotations

import torch


def float32_precision() -> str:
    """ "highest" (IEEE), "high" (TF32) or "medium" (bfloat16), as set by `torch.set_float32_matmul_precision` or the
    `fp32_precision` switches."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer switches were used, which this older question cannot answer
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
