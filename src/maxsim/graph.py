"""Scores as `torch.compile` sees them: operators with known results and a gradient, and nothing inside them.

Outside a function that is being compiled this is `autograd`, unchanged. A graph holds tensors and numbers only, so a
`Problem` is taken apart before an operator and put together in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import autograd
from .layout import Problem, Tokens
from .quantized import Codes
from .result import Scored


def differentiable_scores(problem: Problem, backend: str | None) -> Tensor:
    """As in `autograd`."""
    if not torch.compiler.is_compiling():
        return autograd.differentiable_scores(problem, backend)
    q, d = problem.queries.leaf, problem.documents.leaf
    winners = torch.is_grad_enabled() and (q.requires_grad or d.requires_grad)
    scores: Tensor = _scores(*_tensors(problem), *_codes(problem), _sizes(problem), backend, winners, False)[0]
    return scores


def run(problem: Problem, backend: str | None, winners: bool = False, maxima: bool = False) -> Scored:
    """As in `autograd`."""
    if not torch.compiler.is_compiling():
        return autograd.run(problem, backend, winners, maxima)
    found = _scores(*_tensors(problem), *_codes(problem), _sizes(problem), backend, winners, maxima)
    return Scored(found[0], found[1] if winners else None, found[2] if maxima else None)


def _tensors(problem: Problem) -> tuple[Tensor | None, ...]:
    q, d = problem.queries, problem.documents
    return q.data, d.data, d.floats, q.starts, q.ends, q.mask, d.starts, d.ends, d.mask, problem.pairs


def _codes(problem: Problem) -> tuple[list[Tensor], str]:
    """What quantised documents' codes stand for: tensors, and in words the rest."""
    codes = problem.documents.codes
    if codes is None:
        return [], ""
    tensors = codes.tensors()
    flags = f"{codes.width} {int(codes.normalized)} {int(codes.renormalize)}"
    return list(tensors.values()), " ".join((codes.codec, flags, *tensors))


def _codes_of(tensors: Sequence[Tensor], words: str) -> Codes | None:
    if not words:
        return None
    codec, width, normalized, renormalize, *names = words.split()
    named: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return Codes(codec, int(width), normalized=bool(int(normalized)), renormalize=bool(int(renormalize)), **named)


def _sizes(problem: Problem) -> list[int]:
    q, d = problem.queries, problem.documents
    sides = [q.count, q.max_length, int(q.consecutive), d.count, d.max_length, int(d.consecutive)]
    return [*sides, problem.per_query, int(problem.masked_zero), int(problem.normalize)]


def _problem(tensors: tuple[Tensor | None, ...], codes: Sequence[Tensor], words: str, sizes: list[int]) -> Problem:
    queries, documents, floats, q_starts, q_ends, q_mask, d_starts, d_ends, d_mask, pairs = tensors
    q_count, q_length, q_consecutive, d_count, d_length, d_consecutive, per_query, masked_zero, normalize = sizes
    assert queries is not None
    assert documents is not None
    return Problem(
        Tokens(queries, q_count, q_length, q_starts, q_ends, bool(q_consecutive), q_mask),
        Tokens(
            documents, d_count, d_length, d_starts, d_ends, bool(d_consecutive), d_mask, _codes_of(codes, words), floats
        ),
        pairs,
        per_query,
        bool(masked_zero),
        bool(normalize),
    )


@torch.library.custom_op("maxsim::scores", mutates_args=())
def _scores(
    queries: Tensor, documents: Tensor, floats: Tensor | None,
    q_starts: Tensor | None, q_ends: Tensor | None, q_mask: Tensor | None,
    d_starts: Tensor | None, d_ends: Tensor | None, d_mask: Tensor | None, pairs: Tensor | None,
    codes: Sequence[Tensor], words: str, sizes: list[int], backend: str | None, winners: bool, maxima: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Scores, winners and maxima; those not asked for are empty."""
    tensors = (queries, documents, floats, q_starts, q_ends, q_mask, d_starts, d_ends, d_mask, pairs)
    problem = _problem(tensors, codes, words, sizes)
    found = autograd.run(problem, backend, winners, maxima)
    index, similarity = found.winners if winners else None, found.maxima if maxima else None
    return (
        found.scores,
        documents.new_empty(0, dtype=torch.int16) if index is None else index,
        documents.new_empty(0, dtype=problem.result_dtype) if similarity is None else similarity,
    )


@_scores.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, codes, words, sizes, _, winners, maxima = arguments
    problem = _problem(tuple(tensors), codes, words, sizes)
    documents, table = problem.documents.data, problem.winners_shape
    return (
        documents.new_empty(problem.shape, dtype=problem.result_dtype),
        # which dtype depends on the length: asked without need it would bound a dynamic one
        documents.new_empty(table if winners else (0,), dtype=problem.winners_dtype if winners else torch.int16),
        documents.new_empty(table if maxima else (0,), dtype=problem.result_dtype),
    )


@torch.library.custom_op("maxsim::gradients", mutates_args=())
def _gradients(
    queries: Tensor, documents: Tensor, floats: Tensor | None,
    q_starts: Tensor | None, q_ends: Tensor | None, q_mask: Tensor | None,
    d_starts: Tensor | None, d_ends: Tensor | None, d_mask: Tensor | None, pairs: Tensor | None,
    codes: Sequence[Tensor], words: str, sizes: list[int], backend: str | None, winners: Tensor, grad: Tensor,
    need_queries: bool, need_documents: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of both sides; one that is not asked for is empty."""
    tensors = (queries, documents, floats, q_starts, q_ends, q_mask, d_starts, d_ends, d_mask, pairs)
    problem = _problem(tensors, codes, words, sizes)
    found = autograd.gradients(problem, winners, grad, backend, (need_queries, need_documents))
    return (
        queries.new_empty(0) if found[0] is None else found[0],
        problem.documents.leaf.new_empty(0) if found[1] is None else found[1],
    )


@_gradients.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    queries, documents, floats, *_, need_queries, need_documents = arguments
    leaf = documents if floats is None else floats
    return (
        queries.new_empty(queries.shape if need_queries else 0),  # contiguous, whatever the strides of queries
        leaf.new_empty(leaf.shape if need_documents else 0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, codes, ctx.words, ctx.sizes, ctx.backend, _, _ = inputs
    ctx.save_for_backward(*tensors, output[1], *codes)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    tensors, winners, codes = ctx.saved_tensors[:10], ctx.saved_tensors[10], ctx.saved_tensors[11:]
    queries, documents, floats = ctx.needs_input_grad[:3]
    needed = (queries, documents or floats)
    of = _gradients(*tensors, list(codes), ctx.words, ctx.sizes, ctx.backend, winners, grad, *needed)
    found = (of[0] if queries else None, of[1] if documents else None, of[1] if floats else None)
    return (*found, *[None] * 7, [None] * len(codes), *[None] * 5)


_scores.register_autograd(_backward, setup_context=_keep)
