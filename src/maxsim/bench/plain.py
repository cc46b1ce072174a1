"""What people write in PyTorch: einsum, maximum and sum, whole, in parts or compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .cases import Case
from .contenders import Contender, Unavailable, at_precision, gradients_of, prepare_at
from .inputs import Inputs, blocks
from .timer import Call, first_call


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


def _naive_at(precision: str, exact: tuple[str, ...]) -> Contender:
    prepare = partial(prepare_at, precision=precision, prepare=prepare_naive)
    return Contender(f"naive-{precision}", prepare, exact, tf32=True)


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
