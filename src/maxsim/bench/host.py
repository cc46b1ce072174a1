"""Where the host's time of a small call goes: its steps, each a contender beside the whole call.

`maxsim` itself is `maxsim:plan` and then `maxsim:launch`, in which `maxsim:output` is; a call without a plan is
`maxsim:unplanned`, in which `maxsim:checks` is. What `maxsim:operator` takes beyond that is the hop through
torch.library. `maxsim:autograd` has a plan too: beyond that it keeps winners and makes an autograd node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import autograd, graph, plans
from ..dispatch import select
from ..layout import Problem, make_problem
from .cases import DTYPES, Case
from .contenders import Contender, Unavailable
from .inputs import Inputs
from .timer import Call


def _plain(case: Case) -> None:
    if not case.plain or case.masked or case.winners or case.train or case.codec:
        raise Unavailable("a step of plain scores")


def _problem(inputs: Inputs) -> Problem:
    return make_problem(inputs.queries, inputs.documents)


def _plan(inputs: Inputs) -> plans.Plan:
    plan = autograd.planned_scores(_problem(inputs), None)[1]
    if plan is None:
        raise Unavailable("no plan is kept for this call")
    return plan


def prepare_plan(inputs: Inputs) -> Call:
    """What a call depends on, and the plan kept for it."""
    _plan(inputs)
    queries, documents = inputs.queries, inputs.documents
    return lambda: plans._kept(documents).get(plans.key(queries, documents, False, None))


def prepare_launch(inputs: Inputs) -> Call:
    """A plan carried out: its output made and its kernels launched."""
    plan = _plan(inputs)
    return lambda: plan(inputs.queries, inputs.documents)


def prepare_output(inputs: Inputs) -> Call:
    shape, device = (inputs.case.NQ, inputs.case.ND), inputs.device
    return lambda: torch.empty(shape, dtype=torch.float32, device=device)


def prepare_checks(inputs: Inputs) -> Call:
    """The arguments of a call without a plan checked, and its backend chosen."""
    return lambda: select(_problem(inputs))


def prepare_unplanned(inputs: Inputs) -> Call:
    return lambda: autograd.run(_problem(inputs), None).scores


def prepare_winners(inputs: Inputs) -> Call:
    """A call without a plan that keeps the winners, as one whose gradient will be asked for does."""
    return lambda: autograd.run(_problem(inputs), None, winners=True).scores


def prepare_operator(inputs: Inputs) -> Call:
    """A call without a plan through the operator that `torch.compile` sees."""

    def run() -> Any:
        problem = _problem(inputs)
        tensors, codes = graph._tensors(problem), graph._codes(problem)
        return graph._scores(*tensors, *codes, graph._sizes(problem), None, False, False)[0]

    return run


def prepare_compiled(inputs: Inputs) -> Call:
    """A compiled function of one score; `aot_eager` adds nothing of its own to the operator."""
    import maxsim

    torch.compiler.reset()
    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(maxsim.score, backend="aot_eager", fullgraph=True)
    return lambda: compiled(inputs.queries, inputs.documents)


def prepare_autograd(inputs: Inputs) -> Call:
    """A score whose gradients can be asked for."""
    import maxsim

    queries, documents = _leaves(inputs)
    return lambda: maxsim.score(queries, documents).detach()


def prepare_backward(inputs: Inputs) -> Call:
    """The gradients of both sides, of scores that are there."""
    import maxsim

    leaves = _leaves(inputs)
    scores = maxsim.score(*leaves)
    upstream = torch.ones_like(scores)
    return lambda: torch.autograd.grad(scores, leaves, upstream, retain_graph=True)


def _leaves(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return inputs.queries.detach().requires_grad_(), inputs.documents.detach().requires_grad_()


def _step(name: str, prepare: Callable[[Inputs], Call], scored: bool = True) -> Contender:
    def prepared(inputs: Inputs) -> Call:
        _plain(inputs.case)
        return prepare(inputs)

    return Contender(name, prepared, DTYPES, scored=scored)


STEPS = (
    _step("maxsim:plan", prepare_plan, scored=False),
    _step("maxsim:launch", prepare_launch),
    _step("maxsim:output", prepare_output, scored=False),
    _step("maxsim:unplanned", prepare_unplanned),
    _step("maxsim:checks", prepare_checks, scored=False),
    _step("maxsim:operator", prepare_operator),
    _step("maxsim:compiled", prepare_compiled),
    _step("maxsim:winners", prepare_winners),
    _step("maxsim:autograd", prepare_autograd),
    _step("maxsim:backward", prepare_backward, scored=False),
)
