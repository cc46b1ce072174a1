"""Who is measured: what a contender is, and ours. `plain` holds what people write in PyTorch, `peers` other libraries.

A contender prepares a case's tensors the way it wants them, untimed, and returns the call that is timed. The call gives
scores (`[NQ, ND]`; pairs `[P]`), winners `(index, similarity)` of `[NQ, ND, LQ]`, or in a training case both gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .cases import DTYPES, Case
from .inputs import Inputs, blocks
from .timer import Call


class Unavailable(Exception):
    """Why a contender cannot take part in a case; shown in the table."""


@dataclass(frozen=True)
class Contender:
    """exact: the dtypes for which it keeps float32 similarities. tf32: it multiplies float32 inputs as TF32 numbers.

    scored: its result is the answer, and is checked. isolated: for (case, device type), whether it is known to take the
    whole process down and must run in one of its own. wrong: what is wrong with a result, or with the call that gave
    it, beyond its distance from the truth; None where nothing is.
    """

    name: str
    prepare: Callable[[Inputs], Call]
    exact: tuple[str, ...] = ()
    tf32: bool = False
    scored: bool = True
    isolated: Callable[[Case, str], bool] = lambda case, device: False
    wrong: Callable[[Inputs, Any, Call], str | None] = lambda inputs, result, call: None


def at_precision(precision: str, call: Call) -> Call:
    """A call under PyTorch's own switch for float32 products."""

    def run() -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return call()
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def gradients_of(score: Callable[[Tensor, Tensor], Tensor], inputs: Inputs, documents: Tensor | None = None) -> Call:
    """The training call of a differentiable `score(queries, documents)`: forward, and the gradients of both sides."""
    queries = inputs.queries.detach().requires_grad_()
    documents = (inputs.documents if documents is None else documents).detach().requires_grad_()

    def run() -> Any:
        with torch.enable_grad():
            scores = score(queries, documents)
            assert inputs.upstream is not None
            return torch.autograd.grad(scores, (queries, documents), inputs.upstream.to(scores.dtype))

    return run


def prepare_maxsim(inputs: Inputs, backend: str | None = None, coded: bool = True) -> Call:
    import maxsim

    case = inputs.case
    options: dict[str, Any] = {"backend": backend}
    if case.masked:
        options |= {"query_mask": inputs.query_mask, "document_mask": inputs.document_mask}

    function: Any = maxsim.score_pairs if case.pairs else maxsim.matches if case.winners else maxsim.score
    if case.winners and case.pairs:
        raise Unavailable("no winners of pairs")
    if case.train:
        return gradients_of(lambda queries, documents: function(queries, inputs.form(documents), **options), inputs)
    documents = inputs.codes if case.codec and coded else inputs.form(inputs.documents)
    return lambda: function(inputs.queries, documents, **options)


def prepare_float(inputs: Inputs) -> Call:
    """Ours on the documents as they were before they became codes."""
    if not inputs.case.codec:
        raise Unavailable("differs for documents as codes only")
    return prepare_maxsim(inputs, coded=False)


def prepare_saving(inputs: Inputs) -> Call:
    """The forward of a training step: it keeps the winners, in 16 bits where documents are short."""
    case = inputs.case
    if case.winners or case.train or case.codec:
        raise Unavailable("differs where scores have a gradient")
    call = prepare_maxsim(replace(inputs, queries=inputs.queries.detach().requires_grad_()))

    def run() -> Any:
        with torch.enable_grad():
            return call().detach()

    return run


# Largest ‖grad − right‖ / ‖right‖ of ours beside float64 gradients of the same winners: what rounding the result takes.
SAME_WINNERS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-16}


def wrong_gradients(inputs: Inputs, result: Any, call: Call, precision: str = "highest") -> str | None:
    """Gradients of ours that change from run to run, or are not those of the winners that `matches` tells."""
    if not inputs.case.train:
        return None
    if not all(torch.equal(one, other) for one, other in zip(result, call(), strict=True)):
        return "wrong: another run gave other bits"
    if inputs.case.pairs or inputs.case.ragged or inputs.case.views:
        return None  # `matches` tells no winners of pairs; padded documents are enough for the others
    right = at_precision(precision, lambda: gradients_of_winners(inputs))()
    for side, got, gradient in zip(("queries", "documents"), result, right, strict=True):
        error, most = float((got.double() - gradient).norm() / gradient.norm()), SAME_WINNERS[inputs.case.dtype]
        if not error <= most:
            return f"wrong: {side}' gradient is off by {error:.1e} given its winners, allowed {most:.1e}"
    return None


def gradients_of_winners(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """float64 gradients of both sides from the winners of ours, some documents at a time."""
    import maxsim

    case, upstream = inputs.case, inputs.upstream
    assert upstream is not None
    queries = inputs.queries.double()
    grad_queries = torch.zeros_like(queries)
    grad_documents = torch.zeros_like(inputs.documents, dtype=torch.float64)
    for part in blocks(case.ND, max(1, 2**26 // (case.NQ * case.LQ * case.D))):
        columns = (slice(None), part) if case.candidates else part  # candidates: [NQ, K, LD, D]
        documents, given = inputs.documents[columns], inputs.document_mask
        mask = None if given is None else given[columns]
        index = maxsim.matches(inputs.queries, documents, inputs.query_mask, mask).index  # [NQ, n, LQ]
        weight = upstream[:, part, None].double() * (index >= 0)
        row = index.clamp(min=0) + case.LD * torch.arange(index.shape[1], device=index.device)[:, None]
        if case.candidates:
            row = row + case.LD * index.shape[1] * torch.arange(case.NQ, device=index.device)[:, None, None]
        tokens = documents.reshape(-1, case.D).double()
        grad_queries += (weight[..., None] * tokens[row]).sum(1)
        flat = torch.zeros_like(tokens).index_add_(
            0, row.flatten(), (weight[..., None] * queries[:, None]).flatten(0, 2)
        )
        grad_documents[columns] = flat.view(documents.shape)
    return grad_queries, grad_documents


def prepare_at(inputs: Inputs, precision: str, prepare: Callable[[Inputs], Call]) -> Call:
    """A contender under PyTorch's switch for float32 products, where it makes a difference."""
    if inputs.case.dtype != "float32":
        raise Unavailable("differs for float32 only")
    return at_precision(precision, prepare(inputs))


def _ours_at(precision: str) -> Contender:
    prepare = partial(prepare_at, precision=precision, prepare=prepare_maxsim)
    wrong = partial(wrong_gradients, precision=precision)
    return Contender(f"maxsim-{precision}", prepare, DTYPES, tf32=True, wrong=wrong)


OURS = (
    Contender("maxsim", prepare_maxsim, DTYPES, wrong=wrong_gradients),
    _ours_at("high"),
    _ours_at("medium"),
    Contender("maxsim-saving", prepare_saving, DTYPES),
    Contender("maxsim-float", prepare_float, scored=False),
)
