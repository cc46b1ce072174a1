"""One autograd Function for all backends; the only room that knows `ctx`."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from .devices import no_autocast
from .dispatch import Backend, select
from .layout import Problem
from .packed import refuse_batches
from .plans import Plan
from .result import Again, Scored


def differentiable_scores(problem: Problem, backend: str | None) -> Tensor:
    """The scores of a problem, `Problem.shape`, with gradients for the tokens that ask for them."""
    return planned_scores(problem, backend)[0]


def planned_scores(problem: Problem, backend: str | None) -> tuple[Tensor, Plan | None]:
    """`differentiable_scores`, and what makes those of another call like this one: of the same shapes, strides, dtypes,
    alignment and places, that asks for gradients or does not as this one does."""
    queries, documents = problem.queries.leaf, problem.documents.leaf
    if torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad):
        call = _Call(problem, select(problem, backend))
        scores = cast(Tensor, _MaxSim.apply(queries, documents, call, problem))
        return scores, None if call.again is None else call
    result = run(problem, backend)
    again = result.again
    return result.scores, None if again is None else lambda queries, documents: again(queries, documents)[0]


def run(problem: Problem, backend: str | None, winners: bool = False, maxima: bool = False) -> Scored:
    """The backend's forward, outside autograd and autocast; an empty problem never reaches a kernel."""
    return _run(problem, select(problem, backend), winners, maxima)


def _run(problem: Problem, module: Backend, winners: bool, maxima: bool) -> Scored:
    with no_autocast(problem.device.type):
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
    problem: Problem, winners: Tensor, grad: Tensor, backend: str | None, needed: tuple[bool, bool],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The backend's backward, outside autocast; without winners the gradients asked for are zero. dtype: None is that
    of the tokens; `Problem.result_dtype` leaves sums unrounded."""
    refuse_batches(grad)
    return _backward(problem, winners, grad, select(problem, backend), needed, dtype)


def _backward(
    problem: Problem, winners: Tensor, grad: Tensor, module: Backend, needed: tuple[bool, bool],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    if winners.numel() == 0:
        need_queries, need_documents = needed
        return (
            torch.zeros_like(problem.queries.data, dtype=dtype) if need_queries else None,
            torch.zeros_like(problem.documents.leaf, dtype=dtype) if need_documents else None,
        )
    dtype = dtype or problem.dtype
    grad = grad.resolve_neg()  # kernels read memory, and would not see that flag
    with no_autocast(problem.device.type):
        if problem.documents.floats is None or not needed[1]:
            return module.backward(problem, winners, grad, *needed, dtype)
        # straight through the codes: at their winners, but as if the documents had not been quantised
        of_queries = module.backward(problem, winners, grad, True, False, dtype)[0] if needed[0] else None
        floats = dataclasses.replace(problem, documents=problem.documents.unquantised())
        return of_queries, module.backward(floats, winners, grad, False, True, dtype)[1]


def _places(problem: Problem) -> list[Tensor]:
    """The tensors of a problem that say where tokens lie and which take part; codes where gradients are for others."""
    q, d = problem.queries, problem.documents
    codes = None if d.floats is None else d.data
    places = (q.starts, q.ends, d.starts, d.ends, problem.pairs, codes)
    # those made in inference mode have no version to notice an edit by, and are not saved
    return [each for each in places if each is not None and not each.is_inference()]


class _Call:
    """A differentiable call but for its tokens, so that it can be kept."""

    def __init__(self, problem: Problem, backend: Backend):
        empty = problem.documents.leaf.new_empty(0)
        self.problem = problem.with_leaves(empty, empty)
        self.backend = backend
        self.places = _places(problem)
        self.coded = problem.documents.codes is not None and problem.documents.floats is None
        self.again: Again | None = None

    def __call__(self, queries: Tensor, documents: Tensor) -> Tensor:
        return cast(Tensor, _MaxSim.apply(queries, documents, self, None))


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, documents: Tensor, call: _Call, problem: Problem | None) -> Tensor:
        if problem is None:
            assert call.again is not None
            scores, winners = call.again(queries, documents)
        else:
            result = _run(problem, call.backend, True, False)
            scores, winners, call.again = result.scores, result.winners, result.again
        # save_for_backward notices in-place edits, of what says where tokens lie too
        ctx.codes = documents if call.coded and documents.is_inference() else None
        ctx.save_for_backward(queries, documents if ctx.codes is None else None, winners, *call.places)
        ctx.call = call
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        queries, documents, winners, *_ = ctx.saved_tensors
        documents = documents if ctx.codes is None else ctx.codes
        refuse_batches(grad)
        given = queries, documents, winners, grad, ctx.call, ctx.needs_input_grad[:2]
        # a second derivative may be asked for
        grads = _Gradients.apply(*given) if torch.is_grad_enabled() else _gradients(*given)
        return *grads, None, None


def _gradients(
    queries: Tensor, documents: Tensor, winners: Tensor, grad: Tensor, call: _Call, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    problem = call.problem.with_leaves(queries, documents)
    return _backward(problem, winners, grad.reshape(problem.shape), call.backend, needed)


class _Gradients(torch.autograd.Function):
    """The gradients as a function of tokens and upstream gradient, so that a second derivative, which there is none of,
    raises instead of being lost."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor | None, Tensor | None]:
        return _gradients(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("maxsim has no second derivative: the gradient of a score cannot be differentiated again")
