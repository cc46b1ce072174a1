"""Contrastive training across processes: local queries against the documents of every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..dispatch import select
from ..graph import differentiable_scores
from ..layout import FLOATS, MaskLike, Problem, TokensLike, make_problem
from .blocks import facts_of
from .function import differentiable
from .gather import Gather
from .ring import Ring
from .shares import Shares
from .talk import Step, Talk

__all__ = ["mean", "offset", "score"]

_T = TypeVar("_T")
_P = ParamSpec("_P")

_METHODS: dict[str, type[Gather] | type[Ring]] = {"gather": Gather, "ring": Ring}


def _untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A call that `torch.compile` leaves as it is: talk between ranks is nothing for a graph."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            # at import this would load half of PyTorch
            untraced: Callable[_P, _T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return untraced(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@_untraced
def score(
    queries: TokensLike,
    documents: TokensLike,
    query_mask: MaskLike = None,
    document_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
    backend: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    method: str = "gather",
) -> Tensor:
    """Scores of this rank's queries with the documents of every rank of a process group. Differentiable in both: the
    gradients of documents, summed over all ranks, return to the rank that owns them.

    Every rank makes the call, each with its own queries and documents, and then runs the backward: both talk to the
    other ranks, so all must make the same calls and run their backwards equally often in the same order. Numbers,
    lengths and forms may differ from rank to rank, and a rank may have no queries or no documents (`[0, L, D]`);
    widths, dtypes, `masked`, `normalize` and `method` must agree. If an input of any rank asks for a gradient, the
    scores of all do.

        scores = maxsim.distributed.score(queries, documents)
        labels = maxsim.distributed.offset(len(documents)) + torch.arange(len(queries), device=scores.device)
        losses = torch.nn.functional.cross_entropy(scores / 0.05, labels, reduction="none")
        maxsim.distributed.mean(losses).backward()  # with an encoder in DDP or FSDP

    The loss: DDP and FSDP average gradients over the ranks, and the backward here has already brought each document the
    gradients of all ranks' losses. The average is then the gradient of (1/W) Σ_r L_r, for W ranks with losses L_r, the
    same as in one process. So each rank's loss is its plain mean over its own queries where all ranks have equally
    many, and `mean` where they have not. A further factor of W would be wrong.

    Args:
        queries: as for `maxsim.score`.
        documents: as for `maxsim.score`, without candidates. Of `Views` the whole buffer is sent.
        query_mask: as for `maxsim.score`.
        document_mask: as for `maxsim.score`.
        masked: as for `maxsim.score`.
        normalize: as for `maxsim.score`.
        backend: as for `maxsim.score`.
        group: a group of `torch.distributed` whose backend serves the documents' device (gloo on a CPU, NCCL on
            GPUs); None is the default group. Without an initialised one, and in a group of one, this is
            `maxsim.score`.
        method: "gather": each rank holds the documents of all from the forward to the backward, scores them in one
            launch, and adds up gradients in one exchange (the documents of all and, in the backward, twice their
            float32 gradients). "ring": documents are passed from rank to rank while others are scored, and
            again in the backward, followed by their gradients: a rank never holds more than its own documents and two
            ranks' more (in the backward also three float32 gradients of a rank's documents), and keeps only the
            winners, 2 bytes a query token and document.

    Returns:
        float32 (float64 for float64 inputs) `[local queries, documents of all ranks]`, columns in rank order
        (`offset` says where a rank's begin). May be overwritten in place.

    Exactness: scores have the bits of `maxsim.score` in one process with all documents, by either method. Gradients
    of documents are the float32 sums of ranks' parts, each as if alone, from the owner's on in rank order, whatever
    the transport: the same bits in every run and by either method (on a GPU, where a rank has at most 512 query tokens,
    to the order of float32 additions). They are rounded to the inputs' dtype once, and so
    are gradients of queries, which "ring" adds up a rank's documents at a time, own first. Beside one process only the
    order of float32 additions differs.

    Failures: wrong arguments, and whatever else is raised on one rank inside of the call or its backward (memory that
    runs out, say), are raised on that rank, and on all others as a RuntimeError that names it and its message. A rank
    that dies, or never calls, is noticed by `torch.distributed` as in any collective: the others raise when the
    connection breaks (gloo) or after the group's timeout (`init_process_group(timeout=)`, 10 minutes with NCCL).

    Host: sizes and failures are told in small exchanges, three in a forward and two or three in a backward. They
    wait for the GPU unless the group also has a backend for the CPU, which `init_process_group("cpu:gloo,cuda:nccl")`
    gives it. With NCCL each rank must have called `torch.cuda.set_device`. `torch.compile` does not trace this call.

    Raises:
        TypeError: as `maxsim.score`.
        ValueError: as `maxsim.score`, and ranks that do not agree, candidates, quantised documents, an unknown method,
            documents on a device that the group does not serve.
        UnsupportedError: as `maxsim.score`.
        RuntimeError: another rank failed, or is at another step.
    """
    problem: Problem | None = None
    failure: Exception | None = None
    try:
        if not isinstance(method, str) or method not in _METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, _METHODS))}, got {method!r}")
        problem = make_problem(queries, documents, query_mask, document_mask, masked, normalize)
        if problem.per_query:
            raise ValueError(
                "maxsim.distributed.score takes documents [ND, LD, D], Packed, Views or a list, not candidates"
            )
        if problem.documents.codes is not None:
            raise ValueError("maxsim.distributed.score takes documents as tokens, not quantised ones")
        select(problem, backend)
    except Exception as error:
        failure = error
    talk = _talk(group, problem)
    if talk is None and failure is not None:
        raise failure
    if talk is None:
        assert problem is not None
        return differentiable_scores(problem, backend)
    tracked, facts = _arguments(talk, problem, method, failure)
    assert problem is not None
    q, d = problem.queries.data, problem.documents.data
    shares = Shares(problem.with_leaves(q.new_empty(0), d.new_empty(0, d.shape[-1])), backend)
    transport = _METHODS[method](talk, shares, facts)
    if not tracked:
        return transport.forward(q, d, False)[0]
    sides = (problem.queries, problem.documents)
    places = [place for side in sides for place in (side.starts, side.ends) if place is not None]
    return differentiable(q, d, transport, places)


@_untraced
def mean(losses: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The loss of this rank whose gradient, averaged over ranks as DDP and FSDP do, is that of the mean over the
    queries of all ranks, however many each has: `losses.mean() · n W / N` for W ranks with N queries in all, n of them
    here.

    Args:
        losses: one a local query, floats of any shape; may be empty.
        group: as for `score`. Without an initialised one, and in a group of one, this is `losses.mean()`.

    Returns:
        A scalar. Its average over ranks is the mean over all queries. Where all ranks have equally many queries it has
        the bits of `losses.mean()`. Without a query here it is 0, which DDP and FSDP need a backward of; without one on
        any rank NaN, as the mean of nothing is in one process.

    Raises:
        TypeError: losses that are no tensor of floats.
        RuntimeError: another rank failed, or is at another step.
    """
    right = isinstance(losses, Tensor) and losses.is_floating_point()
    failure = None if right else TypeError(f"losses must be a tensor of floats, got {_kind(losses)}")
    talk = _talk(group, losses if right and losses.device.type != "cpu" else None)
    if talk is None:
        if failure is not None:
            raise failure
        return losses.mean()
    counts = [count for count, *_ in talk.agree(Step.MEAN, [losses.numel()] if right else [], failure)]
    if not losses.numel() and any(counts):
        return losses.sum()
    share = losses.numel() * len(counts) / (sum(counts) or 1)
    return losses.mean() * share


@_untraced
def offset(count: int, group: dist.ProcessGroup | None = None) -> int:
    """Where the columns of this rank's documents begin in the result of `score`: the documents of the ranks before it.

    Args:
        count: this rank's number of documents.
        group: as for `score`. Without an initialised one the answer is 0.

    Returns:
        The first of this rank's columns.

    Raises:
        ValueError: a count that is no integer of at least 0.
        RuntimeError: another rank failed, or is at another step.
    """
    right = isinstance(count, int) and not isinstance(count, bool) and count >= 0
    failure = None if right else ValueError(f"count must be an integer of at least 0, got {count!r}")
    talk = _talk(group, None)
    if talk is not None:
        return sum(before for before, *_ in talk.agree(Step.OFFSET, [count] if right else [], failure)[: talk.rank])
    if failure is not None:
        raise failure
    return 0


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _talk(group: dist.ProcessGroup | None, on: Problem | Tensor | None) -> Talk | None:
    """None where there is nobody to talk to."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    talk = Talk(group, None if on is None else on.device)
    return None if talk.size == 1 else talk


def _arguments(
    talk: Talk, problem: Problem | None, method: str, failure: Exception | None
) -> tuple[bool, list[list[int]]]:
    """Whether any rank asks for a gradient, and what each tells of its documents, once all agree."""
    row: list[int] = []
    if problem is not None and failure is None:
        device = problem.device.type
        if device in talk.devices:
            row = [list(_METHODS).index(method), talk.devices.index(device), *_facts(problem)]
        else:
            failure = ValueError(f"documents are on {device}, the process group serves {', '.join(talk.devices)}")
    table = talk.agree(Step.ARGUMENTS, row, failure)
    compared: dict[str, list[object]] = {
        "method": [list(_METHODS)[row[0]] for row in table],
        "devices": [talk.devices[row[1]] for row in table],
        "dtypes": [str(FLOATS[row[2]]) for row in table],
        "widths": [row[3] for row in table],
        "masked": ["zero" if row[4] else "exclude" for row in table],
        "normalize": [bool(row[5]) for row in table],
    }
    for what, values in compared.items():
        if len(set(values)) > 1:
            raise ValueError(f"maxsim.distributed: ranks do not agree, {what} by rank: {values}")
    tracked = any(recorded and asks for recorded, asks in (row[6:8] for row in table))
    if tracked and not all(row[6] for row in table):
        raise ValueError("maxsim.distributed: some ranks record gradients and others are in no_grad or inference mode")
    return tracked, [row[8:] for row in table]


def _facts(problem: Problem) -> list[int]:
    asks = problem.queries.data.requires_grad or problem.documents.data.requires_grad
    return [
        FLOATS.index(problem.dtype),
        problem.documents.width,
        int(problem.masked_zero),
        int(problem.normalize),
        int(torch.is_grad_enabled()),
        int(asks),
        *facts_of(problem),
    ]
