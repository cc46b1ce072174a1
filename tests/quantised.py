"""Documents as codes of 8 bits, handed to the kernels themselves: what tests and the compile lane run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from maxsim.backends import hopper, triton
from maxsim.gpu import outputs, side
from maxsim.kernels.configs import few_codes_config, forward_config, hopper_codes_config, power_of_two
from maxsim.kernels.hopper_few_launch import hopper_few
from maxsim.kernels.hopper_launch import hopper_scores
from maxsim.kernels.scores_launch import Outputs, scores
from maxsim.layout import Problem, make_problem


def codes_of(shape: tuple[int, ...], code: torch.dtype, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    """Codes in rows that begin at multiples of 16 bytes."""
    pitch = -(-shape[-1] // 16) * 16
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    buffer = torch.zeros(*shape[:-1], pitch, dtype=code)
    buffer[..., : shape[-1]] = (values * 40).clamp(-127, 127).round().to(code)
    return buffer.to(device)[..., : shape[-1]]


def as_float(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of the same values and strides, which layouts take."""
    return torch.empty_strided(codes.shape, codes.stride(), dtype=dtype, device=codes.device).copy_(codes)


@dataclass
class Case:
    """Codes as they lie in a problem's documents, a scale a document, and of some a factor a token."""

    problem: Problem
    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor | None = None


def case(
    queries: Any, codes: torch.Tensor, wrap: Callable[[torch.Tensor], Any] | None = None, factors: bool = False,
    **options: Any,
) -> Case:  # fmt: skip
    """`wrap` makes documents of a tensor of tokens."""
    floats = as_float(codes, queries.dtype if isinstance(queries, torch.Tensor) else queries.tokens.dtype)
    problem = make_problem(queries, floats if wrap is None else wrap(floats), **options)
    generator = torch.Generator().manual_seed(2)
    scales = (torch.rand(problem.documents.count, generator=generator) + 0.5).to(codes.device) / 1000
    values = None
    if factors:
        most = min((2**31 - 1) // (127 * 127 * codes.shape[-1]), 32767)
        values = torch.randint(1, most + 1, (codes.shape[:-1].numel(),), generator=generator)
        values = values.to(torch.int16).to(codes.device)
    return Case(problem, codes, scales, values)


def run(which: str, given: Case, winners: bool = True) -> Outputs:
    """What a kernel makes of it."""
    problem = given.problem
    q, d = problem.queries, problem.documents
    out = outputs(problem, winners, winners)
    sides = side(q), side(d)._replace(data=given.codes, scales=given.scales, factors=given.factors)
    if which == "triton":
        count = q.count if problem.grid else 1
        card = triton.capability(problem.device)
        config = forward_config(1, q.width, q.max_length, count, d.max_length, d.count, winners, card)
        scores(*sides, out, problem.pairs, problem.per_query, problem.masked_zero, False, "native", config)
    else:
        rows, item = hopper._rows(d)
        _, processors = hopper._card(problem.device)
        end = processors, "native", problem.masked_zero
        if which == "few":
            count = 1 if problem.per_query else q.count
            config = few_codes_config(q.width, count * max(16, power_of_two(q.max_length)), winners)
            assert config is not None
            hopper_few(*sides, out, rows, item or 0, *end, config, problem.per_query)
        else:
            hopper_scores(*sides, out, rows, item or 0, *end, hopper_codes_config(q.width), problem.per_query)
    return out
