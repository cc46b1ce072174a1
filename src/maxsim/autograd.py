"""One autograd Function for all backends; the only room that knows `ctx`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .dispatch import select
from .layout import Problem
from .result import Scored


def differentiable_scores(problem: Problem, backend: str | None) -> Tensor:
    """The scores of a problem, `Problem.shape`, with gradients for the tokens that ask for them."""
    queries, documents = problem.queries.data, problem.documents.data
    tracked = torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad)
    if tracked or _has_tangent(queries) or _has_tangent(documents):  # forward mode is refused there
        return cast(Tensor, _MaxSim.apply(queries, documents, problem, backend))
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


def gradients(
    problem: Problem, winners: Tensor, grad: Tensor, backend: str | None, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The backend's backward, outside autocast; without winners the gradients asked for are zero."""
    if winners.numel() == 0:
        need_queries, need_documents = needed
        return (
            torch.zeros_like(problem.queries.data) if need_queries else None,
            torch.zeros_like(problem.documents.data) if need_documents else None,
        )
    with _no_autocast(problem.device.type):
        return select(problem, backend).backward(problem, winners, grad, *needed)


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _places(problem: Problem) -> list[Tensor]:
    """The tensors of a problem that say where tokens lie and which take part."""
    q, d = problem.queries, problem.documents
    return [each for each in (q.starts, q.ends, d.starts, d.ends, problem.pairs) if each is not None]


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, documents: Tensor, problem: Problem, backend: str | None) -> Tensor:
        result = run(problem, backend, winners=True)
        # save_for_backward notices in-place edits, of what says where tokens lie too
        ctx.save_for_backward(queries, documents, result.winners, *_places(problem))
        ctx.problem = problem.with_data(queries.new_empty(0), documents.new_empty(0))
        ctx.backend = backend
        return result.scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        queries, documents, winners, *_ = ctx.saved_tensors
        grads = _Gradients.apply(queries, documents, winners, grad, ctx.problem, ctx.backend, ctx.needs_input_grad[:2])
        return *grads, None, None


class _Gradients(torch.autograd.Function):
    """The gradients as a function of tokens and upstream gradient, so that a second derivative, which there is none of,
    raises instead of being lost."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        winners: Tensor,
        grad: Tensor,
        problem: Problem,
        backend: str | None,
        needed: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        return gradients(problem.with_data(queries, documents), winners, grad, backend, needed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("maxsim has no second derivative: the gradient of a score cannot be differentiated again")
