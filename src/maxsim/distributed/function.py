"""Scores across ranks as autograd sees them; the only room here that knows `ctx`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .gather import Gather
from .ring import Ring
from .talk import Step


def differentiable(queries: Tensor, documents: Tensor, transport: Gather | Ring, places: list[Tensor]) -> Tensor:
    """Scores whose backward is run by all ranks, also by one whose own tokens need no gradient.

    places: tensors that say where the local tokens lie, which must stay as they are until then.
    """
    anchor = torch.empty(0, dtype=torch.float32, requires_grad=True, device="cpu")
    return cast(Tensor, _Scores.apply(queries, documents, anchor, transport, places))


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Tensor, anchor: Tensor, transport: Gather | Ring, places: list[Tensor]
    ) -> Tensor:
        scores, kept = transport.forward(queries, documents, True)
        ctx.save_for_backward(queries, documents, *kept, *places)
        ctx.transport, ctx.kept = transport, len(kept)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        try:
            queries, documents, *others = ctx.saved_tensors
        except Exception as error:  # freed, or modified in place: told to the others, which wait
            ctx.transport.talk.agree(Step.BACKWARD, error=error)
            raise
        with torch.no_grad():
            of_queries, of_rows = ctx.transport.backward(
                queries, documents, others[: ctx.kept], grad, ctx.needs_input_grad[:2]
            )
            of_documents = None if of_rows is None else of_rows.view(documents.shape)
        if torch.is_grad_enabled():
            of_queries, of_documents = _Once.apply(queries, documents, grad, of_queries, of_documents)
        return of_queries, of_documents, None, None, None


class _Once(torch.autograd.Function):
    """Gradients as a function of tokens and upstream gradient, so that a second derivative, which there is none of,
    raises instead of being lost."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Tensor, grad: Tensor, *found: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else each.view_as(each) for each in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("maxsim has no second derivative: the gradient of a score cannot be differentiated again")
