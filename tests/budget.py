"""The project's one allowance for rounding, and who may use it.

truth      float64, on the inputs as the dtype rounded them
scale      Σ ‖q‖·max‖d‖ of a score (for a gradient Σ |upstream|·‖·‖ of what is added up)
plain      the largest |plain PyTorch float32 − truth| / scale of the same inputs
allowed    BUDGET · (plain + 2⁻²⁴) · scale, and for a gradient half a step of its dtype more (it is rounded once)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Largest shares measured, 2026-11-29: scores and float32 gradients 0.12 on the CPU, 0.19 under the interpreter (float32
# highest); half-precision gradients 0.99, which is their own last rounding. The end of a run prints its shares.
BUDGET = 3.0
ROUNDING = 2.0**-24
STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150, torch.float64: 0.0}

WORST: dict[str, float] = {}


def rounded(value: Tensor, precision: str) -> Tensor:
    """float32 inputs as a matrix product at that precision takes them: TF32 keeps 10 bits, bfloat16 7."""
    if value.dtype != torch.float32 or precision == "highest":
        return value
    drop = 13 if precision == "high" else 16
    bits = value.view(torch.int32)
    return ((bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) & -(1 << drop)).view(torch.float32)


def plain_scores(
    q: Tensor, d: Tensor, q_mask: Tensor, d_mask: Tensor, precision: str = "highest", masked: str = "exclude"
) -> Tensor:
    """float32 PyTorch, as one would write it: `[NQ, LQ, D]` and `[ND, LD, D]`, masked rows without NaN."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    similarity = torch.einsum("qid,njd->qnij", rounded(q, precision).float(), rounded(d, precision).float())
    torch.set_float32_matmul_precision(before)
    similarity = similarity.masked_fill(~d_mask[None, :, None, :], float("-inf") if masked == "exclude" else 0.0)
    return (similarity.amax(-1) * q_mask[:, None]).sum(-1)


def true_scores(q: Tensor, d: Tensor, q_mask: Tensor, d_mask: Tensor, masked: str = "exclude") -> Tensor:
    """The oracle, vectorised; `test_budget.py` holds it to `reference.py`."""
    similarity = torch.einsum("qid,njd->qnij", q.double(), d.double())
    similarity = similarity.masked_fill(~d_mask[None, :, None, :], float("-inf") if masked == "exclude" else 0.0)
    return torch.where(q_mask[:, None], similarity.amax(-1), 0.0).sum(-1)


def scores_scale(q: Tensor, d: Tensor, q_mask: Tensor, d_mask: Tensor) -> Tensor:
    longest = (d.double().norm(dim=-1) * d_mask).amax(-1)
    return (q.double().norm(dim=-1) * q_mask).sum(-1)[:, None] * longest


def check(
    what: str, found: Tensor, truth: Tensor, plain: Tensor, scale: Tensor, step: float = 0.0, tiny: float = 0.0
) -> None:
    """Fails with every value of the worst element. `step`, `tiny`: half a step of the result's dtype, relative and
    least."""
    found, truth, plain, scale = (x.detach().double().cpu() for x in (found, truth, plain, scale))
    assert found.shape == truth.shape
    assert found.numel()
    assert bool(torch.isfinite(found).all()), (
        f"{what}: not finite at {torch.isfinite(found).logical_not().nonzero()[0].tolist()}"
    )
    share_of_plain = float(((plain - truth).abs() / scale.clamp_min(1e-300)).max())
    allowed = BUDGET * (share_of_plain + ROUNDING) * scale + step * truth.abs() + tiny
    error = (found - truth).abs()
    ratio = (error / allowed.clamp_min(1e-300)).masked_fill(error == 0, 0)
    worst = int(ratio.argmax())
    WORST[what] = max(WORST.get(what, 0.0), float(ratio.flatten()[worst]))
    at = tuple(int(i) for i in np.unravel_index(worst, tuple(ratio.shape)))
    assert float(ratio[at]) <= 1, (
        f"{what}: worst element {at}: found {found[at]:.9g}, truth {truth[at]:.9g}, error {error[at]:.3g}, "
        f"allowed {allowed[at]:.3g} = {BUDGET} × ({share_of_plain:.3g} + {ROUNDING:.3g}) × scale {scale[at]:.3g} "
        f"+ step {step * abs(truth[at]):.3g}; plain float32 {plain[at]:.9g}"
    )
