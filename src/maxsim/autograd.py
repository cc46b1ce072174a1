"""One autograd Function for all backends; the only room that knows `ctx`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import select
from .layout import Problem
from .result import Scored


def differentiable_scores(problem: Problem, backend: str | None) -> Tensor:
    """The scores of a problem, `Problem.shape`, with gradients for the tokens that ask for them."""
    queries, documents = problem.queries.data, problem.documents.data
    if torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad):
        detached = problem.with_data(queries.detach(), documents.detach())
        return cast(Tensor, _MaxSim.apply(queries, documents, detached, backend))
    return run(problem, backend).scores


def run(problem: Problem, backend: str | None, winners: bool = False, maxima: bool = False) -> Scored:
    """The backend's forward, outside autograd and autocast; an empty problem never reaches a kernel."""
    module = select(problem, backend)
    with _no_autocast(problem.device.type):
        if 0 in problem.shape or (0 in problem.winners_shape and problem.documents.data.numel() == 0):
            return _empty(problem)
        return module.forward(problem, winners, maxima)


def _empty(problem: Problem) -> Scored:
    """No scores at all, or neither a query token nor a document token anywhere: every document is empty."""
    scores = torch.full(problem.shape, float("-inf"), dtype=problem.result_dtype, device=problem.device)
    winners = torch.full(problem.winners_shape, -1, dtype=problem.winners_dtype, device=problem.device)
    return Scored(
        scores, winners, torch.zeros(problem.winners_shape, dtype=problem.result_dtype, device=problem.device)
    )


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, documents: Tensor, problem: Problem, backend: str | None) -> Tensor:
        result = run(problem, backend, winners=True)
        # the tokens go through save_for_backward, which notices in-place edits; the problem keeps the rest
        ctx.save_for_backward(queries, documents, result.winners)
        ctx.problem = problem.with_data(queries.new_empty(0), documents.new_empty(0))
        ctx.backend = backend
        return result.scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        queries, documents, winners = ctx.saved_tensors
        problem = ctx.problem.with_data(queries.detach(), documents.detach())
        need_queries, need_documents = ctx.needs_input_grad[:2]
        if winners.numel() == 0:
            zeros = torch.zeros_like
            return zeros(queries) if need_queries else None, zeros(documents) if need_documents else None, None, None
        with _no_autocast(problem.device.type):
            module = select(problem, ctx.backend)
            grads = module.backward(problem, winners, grad, need_queries, need_documents)
        return *grads, None, None
