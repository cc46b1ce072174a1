"""Portable Triton kernels: CUDA GPUs from sm_80, and the interpreter on a machine without one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from triton.runtime.interpreter import InterpretedFunction

from ..gpu import MOST_TOKENS, again, backward, codes_unsupported, on_device, outputs, side
from ..kernels.configs import forward_config
from ..kernels.scores import _scores_kernel
from ..kernels.scores_launch import scores
from ..layout import Problem
from ..precision import float32_is_exact
from ..result import Scored

__all__ = ["NAME", "backward", "forward", "preferred", "unsupported"]

NAME = "triton"
INTERPRETED = isinstance(_scores_kernel, InterpretedFunction)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The card's compute capability; of other makers' cards and the interpreter that of the smallest card served."""
    if device.type != "cuda" or torch.version.cuda is None:
        return (8, 0)
    return torch.cuda.get_device_capability(device)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def unsupported(problem: Problem) -> Sequence[str]:
    why = []
    device = problem.device
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        why.append(f"needs a CUDA device, the documents are on {device}")
    elif capability(device) < (8, 0):
        why.append(f"needs compute capability 8.0, {device} has {_dotted(capability(device))}")
    if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        why.append(f"serves float16, bfloat16 and float32, not {problem.dtype}")
    codes = problem.documents.codes
    if device.type == "cpu" and problem.dtype == torch.bfloat16 and (codes is None or not codes.scaled):
        why.append("serves no bfloat16 in Triton's interpreter, whose products of it are wrong")
    why += codes_unsupported(problem.documents)
    if codes is not None and codes.codec == "fp8" and device.type == "cuda" and capability(device) < (8, 9):
        why.append(f"needs compute capability 8.9 for fp8 codes, {device} has {_dotted(capability(device))}")
    if max(problem.documents.max_length, problem.queries.max_length) > MOST_TOKENS:
        why.append(f"serves at most {MOST_TOKENS} tokens an item")
    return why


def preferred(problem: Problem) -> bool:
    return True


def forward(problem: Problem, winners: bool, maxima: bool) -> Scored:
    q, d = problem.queries, problem.documents
    out = outputs(problem, winners, maxima)
    precision = "native"
    if problem.dtype == torch.float32 and (d.codes is None or not d.codes.scaled):  # see kernels/arithmetic.py
        precision = "f16x3" if float32_is_exact() else "f16"
    config = forward_config(
        (q if d.codes is not None and not d.codes.scaled else d).data.element_size(),
        q.width,
        q.max_length,
        q.count if problem.grid else 1,
        min(d.max_length, d.data.shape[0] // max(d.count, 1)) if d.ragged else d.max_length,
        d.count,
        winners,
        capability(problem.device),
    )
    with on_device(problem.device):
        launch = scores(
            side(q),
            side(d),
            out,
            problem.pairs,
            problem.per_query,
            problem.masked_zero,
            problem.normalize,
            precision,
            config,
        )
    if INTERPRETED:  # there is nothing compiled to repeat
        return Scored(*out)
    return Scored(*out, again(launch, problem, out))
