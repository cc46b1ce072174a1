"""The right answer of a case, in float64 from the rounded inputs, and how far a contender's answer is from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .inputs import Inputs, blocks

# Largest part of Σ‖q‖‖d‖ that a score may be off. Kept in float32, a similarity's error is a few 1e-8 of it; one missed
# token of 1,024 moves a score by 2e-5. A contender that rounds similarities or inputs gets one unit of that rounding.
EXACT, TF32 = 2.0**-18, 2.0**-13
ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-11}
# Of documents as codes the truth is the score of what codes stand for. Tensor cores drop bits of sums of e4m3; others
# quantise their own way.
SUMS_OF_E4M3, OWN_CODES = 2.0**-12, 2.0**-6

# Largest ‖grad − right‖ / ‖right‖. A rounded similarity changes winners: plain bfloat16 moves a third of the gradient.
# Unrelated gradients are off by 1 or more.
GRADIENT_EXACT, GRADIENT_TF32, GRADIENT_ROUNDED = 2.0**-5, 2.0**-2, 0.75


def allowed(case: Case, exact: bool, tf32: bool = False) -> float:
    """The largest `Truth.error` of a contender that keeps float32 similarities (`exact`), or rounds them."""
    if case.train:
        return GRADIENT_ROUNDED if not exact else GRADIENT_TF32 if tf32 else GRADIENT_EXACT
    if case.codec and not exact:
        return OWN_CODES * case.LQ
    if case.codec == "fp8":
        return SUMS_OF_E4M3 * (1 if case.winners else case.LQ)
    share = ROUNDED[case.dtype] if not exact else TF32 if tf32 else EXACT
    return share * (1 if case.winners else case.LQ)  # tokens are unit vectors: Σ‖q‖‖d‖ is LQ


@dataclass(frozen=True)
class Truth:
    """scores: float64; gradients: float64 of (queries, documents) for `inputs.upstream`, in a training case."""

    inputs: Inputs
    scores: Tensor
    gradients: tuple[Tensor, Tensor] | None = None

    def error(self, result: Any) -> float:
        """How wrong a result is; NaN or infinite where it is not a number at all.

        Scores: the largest absolute error. Winners `(index, similarity or None)`: the largest of what a chosen token
        falls short of the best and of a similarity's error. Gradients: the larger relative error of the two, in the
        2-norm.
        """
        if self.gradients is not None:
            pairs = zip(result, self.gradients, strict=True)
            return max(float((got.double() - right).norm() / right.norm()) for got, right in pairs)
        if self.inputs.case.winners:
            return _winners_error(self.inputs, *result)
        if result.shape != self.scores.shape:
            raise ValueError(f"scores have shape {list(result.shape)}, not {list(self.scores.shape)}")
        return float((result.double() - self.scores).abs().max())


def truth(inputs: Inputs) -> Truth:
    """Every score in float64, and the gradients: seconds, on a GPU or for the cases meant for a CPU."""
    inputs = inputs.decoded()
    if not inputs.case.train:
        with torch.no_grad():
            return Truth(inputs, _scores(inputs))
    assert inputs.upstream is not None
    queries = inputs.queries.double().requires_grad_()
    documents = inputs.documents.double().requires_grad_()
    scores = []
    with torch.enable_grad():
        leaves = replace(inputs, queries=queries, documents=documents)
        for part, similarities in pieces(leaves):
            piece = _reduce(similarities, inputs, part)
            upstream = inputs.upstream[part[0]] if inputs.case.pairs else inputs.upstream[part]
            torch.autograd.backward(piece, upstream.reshape(piece.shape).double())
            scores.append((part, piece.detach()))
    assert queries.grad is not None
    assert documents.grad is not None
    return Truth(inputs, _assemble(inputs, scores), (queries.grad, documents.grad))


def _scores(inputs: Inputs) -> Tensor:
    return _assemble(inputs, [(part, _reduce(piece, inputs, part)) for part, piece in pieces(inputs)])


def _assemble(inputs: Inputs, pieces: list[tuple[tuple[slice, slice], Tensor]]) -> Tensor:
    case = inputs.case
    scores = torch.full((case.NQ, 1 if case.pairs else case.ND), torch.nan, dtype=torch.float64, device=inputs.device)
    for part, piece in pieces:
        scores[part] = piece
    return scores[:, 0] if case.pairs else scores


def _reduce(similarities: Tensor, inputs: Inputs, part: tuple[slice, slice]) -> Tensor:
    best = similarities.max(-1).values  # [nq, LQ, n]; of equal ones the first takes the gradient
    if inputs.query_mask is not None:
        best = best.where(inputs.query_mask[part[0], :, None], 0)
    return best.sum(1)


def pieces(inputs: Inputs) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Parts of the result (rows, columns) with float64 similarities `[nq, LQ, n, L]`, −inf where masked; a GiB each."""
    case, cells = inputs.case, 2**27 if inputs.device.type == "cuda" else 2**24
    if case.pairs or case.candidates:
        columns = 1 if case.pairs else case.ND
        for rows in blocks(case.NQ, max(1, cells // (columns * case.LQ * case.LD))):
            documents, mask = inputs.documents[rows], inputs.document_mask
            mask = None if mask is None else mask[rows]
            if case.pairs:
                documents, mask = documents[:, None], None if mask is None else mask[:, None]
            queries = inputs.queries[rows].double()[:, None]
            similarities = queries @ documents.double().transpose(-1, -2)  # [nq, n, LQ, L]
            similarities = similarities.transpose(1, 2)
            if mask is not None:
                similarities = similarities.masked_fill(~mask[:, None], -torch.inf)
            yield (rows, slice(0, columns)), similarities
        return
    one = case.LQ * inputs.max_length
    for rows in blocks(case.NQ, max(1, min(case.NQ, cells // one))):
        queries = inputs.queries[rows].double()
        for columns_ in blocks(case.ND, max(1, cells // (one * queries.shape[0]))):
            documents, mask = inputs.block(columns_)
            similarities = queries.flatten(0, 1) @ documents.double().flatten(0, 1).T
            similarities = similarities.view(*queries.shape[:2], *documents.shape[:2])
            if mask is not None:
                similarities = similarities.masked_fill(~mask, -torch.inf)
            yield (rows, columns_), similarities


def _winners_error(inputs: Inputs, index: Tensor, similarity: Tensor | None) -> float:
    case, worst = inputs.case, torch.zeros((), dtype=torch.float64, device=inputs.device)
    index = index.reshape(case.NQ, case.ND, case.LQ)
    with torch.no_grad():
        for part, similarities in pieces(inputs):
            chosen = index[part].transpose(1, 2)  # [nq, LQ, n]
            inside = (chosen >= 0) & (chosen < similarities.shape[-1])
            found = similarities.gather(-1, chosen.where(inside, 0).long()[..., None])[..., 0]
            off = similarities.amax(-1) - found.where(inside, -torch.inf)
            if similarity is not None:
                off = off.maximum((similarity[part].transpose(1, 2) - found).abs())
            if inputs.query_mask is not None:
                off = off.where(inputs.query_mask[part[0], :, None], 0)
            worst = torch.maximum(worst, off.max())
    return float(worst)
