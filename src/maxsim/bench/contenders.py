"""Who is measured: ours, and what people write in PyTorch. `peers` holds the other libraries.

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
from .timer import Call, first_call


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


# Ours


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


# What people write


def _no_codes(inputs: Inputs) -> None:
    if inputs.case.codec:
        raise Unavailable("for documents as they are")


def padded(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """All documents padded, with a mask where lengths differ; not for gradients, which would have another layout."""
    _no_codes(inputs)
    if inputs.starts is None:
        return inputs.documents, inputs.document_mask
    if inputs.case.train:
        raise Unavailable("padded gradients would have another layout")
    return inputs.block(slice(None))


def masked_similarities(queries: Tensor, documents: Tensor, mask: Tensor | None, case: Case) -> Tensor:
    """`[NQ, ND, LQ, LD]` at the input's dtype, in the usual einsum; pairs `[P, LQ, LD]`."""
    equation = "pid,pjd->pij" if case.pairs else "qid,qnjd->qnij" if case.candidates else "qid,njd->qnij"
    table = torch.einsum(equation, queries, documents)
    if mask is None:
        return table
    dropped = ~mask[..., None, :]
    if torch.compiler.is_compiling():  # a compiler needs no help with memory, and this one fails on a permuted view
        return table.masked_fill(dropped, -torch.inf)
    return table.masked_fill_(dropped, -torch.inf)


def naive(queries: Tensor, documents: Tensor, query_mask: Tensor | None, mask: Tensor | None, case: Case) -> Tensor:
    """The usual four lines: einsum, mask, max, float32 sum."""
    best = masked_similarities(queries, documents, mask, case).amax(-1)
    if query_mask is not None:
        best = best * (query_mask if case.pairs else query_mask[:, None])
    return best.sum(-1, dtype=torch.float32)


def naive_winners(queries: Tensor, documents: Tensor, mask: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    best = masked_similarities(queries, documents, mask, case).max(-1)
    return best.indices, best.values


def prepare_naive(inputs: Inputs, function: Callable[..., Tensor] = naive, dtype: torch.dtype | None = None) -> Call:
    case = inputs.case
    documents, mask = padded(inputs)
    queries, documents = inputs.queries.to(dtype or inputs.queries.dtype), documents.to(dtype or documents.dtype)
    if case.winners:
        return lambda: naive_winners(queries, documents, mask, case)

    def score(q: Tensor, d: Tensor) -> Tensor:
        return function(q, d, inputs.query_mask, mask, case)

    if not case.train:
        return lambda: score(queries, documents)
    # The gradients of what the caller holds, so the cast of `matched` is part of a training step.
    return gradients_of(lambda q, d: score(q.to(queries.dtype), d.to(documents.dtype)), inputs)


def prepare_matched(inputs: Inputs) -> Call:
    """einsum with float32 accumulation: TF32 products, exact for float16 and bfloat16 values. The cast is not timed."""
    if inputs.device.type != "cuda":
        raise Unavailable("TF32 is a GPU's")
    return at_precision("high", prepare_naive(inputs, dtype=torch.float32))


def prepare_compiled(inputs: Inputs) -> Call:
    if inputs.case.winners:
        raise Unavailable("measured on scores and gradients only")
    torch.compiler.reset()  # each case is compiled for its own shape, the fastest that there is
    return prepare_naive(inputs, torch.compile(naive, dynamic=False))


def prepare_chunked(inputs: Inputs) -> Call:
    """naive over parts of the documents whose similarities stay below 128 MiB."""
    case = inputs.case
    if case.pairs or case.candidates or case.winners or case.train:
        raise Unavailable("written for scores of all documents")
    documents, mask = padded(inputs)
    per_document = case.NQ * case.LQ * documents.shape[1] * documents.element_size()
    parts = list(blocks(case.ND, max(1, 2**27 // per_document)))

    def run() -> Tensor:
        scores = torch.empty(case.NQ, case.ND, device=documents.device)
        for part in parts:
            own = None if mask is None else mask[part]
            scores[:, part] = naive(inputs.queries, documents[part], inputs.query_mask, own, case)
        return scores

    return run


def prepare_loop(inputs: Inputs) -> Call:
    """One query token after another: what a plain vector search engine does."""
    case = inputs.case
    if case.pairs or case.candidates or case.winners or case.train:
        raise Unavailable("written for scores of all documents")
    documents, mask = padded(inputs)
    if case.NQ * case.LQ * documents.numel() > 2**40:
        raise Unavailable("would read the documents for seconds a call")

    def run() -> Tensor:
        scores = torch.zeros(case.NQ, case.ND, device=documents.device)
        for query in range(case.NQ):
            for token in range(case.LQ):
                best = documents @ inputs.queries[query, token]
                if mask is not None:
                    best.masked_fill_(~mask, -torch.inf)
                value = best.amax(-1)
                if inputs.query_mask is not None:
                    value = value * inputs.query_mask[query, token]
                scores[query] += value
        return scores

    return run


def prepare_three_calls(inputs: Inputs) -> Call:
    """matmul, amax, sum: the shortest path of the host."""
    _no_codes(inputs)
    case = inputs.case
    if case.NQ != 1 or not case.plain or case.masked or case.winners or case.train:
        raise Unavailable("written for one query and padded documents")
    query, documents = inputs.queries[0].T, inputs.documents
    return lambda: torch.matmul(documents, query).amax(1).sum(1, dtype=torch.float32)[None]


def prepare_matmul(inputs: Inputs) -> Call:
    """The matrix product alone, in the faster of its two orientations: a ceiling, not an answer."""
    _no_codes(inputs)
    case = inputs.case
    if case.pairs or case.candidates or case.views or case.train:
        raise Unavailable("the product of all tokens is another problem")
    queries, documents = inputs.queries.flatten(0, 1), inputs.documents.view(-1, case.D)
    product = queries.new_empty(queries.shape[0] * documents.shape[0])
    wide, tall = product.view(queries.shape[0], -1), product.view(-1, queries.shape[0])
    ways: list[Call] = [
        lambda: torch.mm(queries, documents.T, out=wide),
        lambda: torch.mm(documents, queries.T, out=tall),
    ]
    for way in ways:
        way()
    return min(ways, key=lambda way: min(first_call(way, inputs.device)[1] for _ in range(3)))


def prepare_blocks(inputs: Inputs, size: int) -> Call:
    """matmul in blocks of documents small enough for the cache, on a CPU."""
    _no_codes(inputs)
    case = inputs.case
    if case.pairs or case.candidates or case.winners or case.train or case.masked:
        raise Unavailable("written for scores of all documents")
    queries, offsets = inputs.queries.flatten(0, 1), None
    if case.ragged:
        offsets = inputs.offsets.tolist()
    elif case.views:
        raise Unavailable("written for documents in order")

    def best(part: slice) -> Tensor:
        if offsets is None:
            documents = inputs.documents[part]
            return (queries @ documents.flatten(0, 1).T).view(len(queries), len(documents), -1).amax(-1)
        table = queries @ inputs.documents[offsets[part.start] : offsets[part.stop]].T
        lengths = [offsets[n + 1] - offsets[n] for n in range(part.start, part.stop)]
        return torch.stack([piece.amax(-1) for piece in torch.split(table, lengths, 1)], 1)

    def run() -> Tensor:
        scores = torch.empty(case.NQ, case.ND, device=inputs.device)
        for part in blocks(case.ND, size):
            scores[:, part] = best(part).view(case.NQ, case.LQ, -1).sum(1, dtype=torch.float32)
        return scores

    return run


def prepare_at(inputs: Inputs, precision: str, prepare: Callable[[Inputs], Call]) -> Call:
    """A contender under PyTorch's switch for float32 products, where it makes a difference."""
    if inputs.case.dtype != "float32":
        raise Unavailable("differs for float32 only")
    return at_precision(precision, prepare(inputs))


def _ours_at(precision: str) -> Contender:
    prepare = partial(prepare_at, precision=precision, prepare=prepare_maxsim)
    wrong = partial(wrong_gradients, precision=precision)
    return Contender(f"maxsim-{precision}", prepare, DTYPES, tf32=True, wrong=wrong)


def _naive_at(precision: str, exact: tuple[str, ...]) -> Contender:
    prepare = partial(prepare_at, precision=precision, prepare=prepare_naive)
    return Contender(f"naive-{precision}", prepare, exact, tf32=True)


OURS = (
    Contender("maxsim", prepare_maxsim, DTYPES, wrong=wrong_gradients),
    _ours_at("high"),
    _ours_at("medium"),
    Contender("maxsim-saving", prepare_saving, DTYPES),
    Contender("maxsim-float", prepare_float, scored=False),
)
PLAIN = (
    Contender("naive", prepare_naive, ("float32",)),
    _naive_at("high", ("float32",)),
    _naive_at("medium", ()),  # bfloat16 products where PyTorch has them
    Contender("matched", prepare_matched, ("float16", "bfloat16", "float32"), tf32=True),
    Contender("compiled", prepare_compiled, ()),
    Contender("chunked", prepare_chunked, ("float32",)),
    Contender("loop", prepare_loop, ("float32",)),
    Contender("matmul-amax-sum", prepare_three_calls, ("float32",)),
    Contender("matmul", prepare_matmul, scored=False),
    Contender("blocks16", partial(prepare_blocks, size=16), ("float32",)),
    Contender("blocks4", partial(prepare_blocks, size=4), ("float32",)),
)
