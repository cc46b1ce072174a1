"""The CPU backend: PyTorch only, blocked so that similarities stay in cache, the same bits for any number of threads.

Layouts become runs of token rows here, kept query tokens dense rows. A job is a range of documents (or of pairs,
sorted by query) scored whole by one thread; what it computes does not depend on what else is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu_jobs import job_tokens, ranges, whole_rows
from ..kernels.cpu_maxima import Run, block_tokens, maxima
from ..kernels.cpu_rows import Rows, consecutive
from ..kernels.cpu_runs import Documents, Kept, kept
from ..kernels.cpu_sums import Sums
from ..kernels.cpu_threads import Scratch, run
from ..kernels.cpu_tree import Tree
from ..layout import Problem, Tokens
from ..quantized.scaled import encode_queries
from ..result import Scored

NAME = "cpu"

GROUP = 1 << 20  # elements of the query rows scored together
TABLE = 1 << 18  # maxima of one job
ENTRIES = 1 << 18  # winners of one backward step
EXACT_WIDTH = (1 << 24) // 127**2  # of int8 codes whose products float32 adds up exactly, in any order


def unsupported(problem: Problem) -> Sequence[str]:
    """Every reason why this backend cannot serve the problem."""
    device = problem.device
    return [] if device.type == "cpu" else [f"the tokens are on {device}, the cpu backend needs them on the CPU"]


def preferred(problem: Problem) -> bool:
    return True


def forward(problem: Problem, winners: bool, maxima: bool) -> Scored:
    """Scores, and where asked winners and maxima, as `Backend.forward` says."""
    out = Scored(
        torch.empty(problem.shape, dtype=problem.result_dtype, device="cpu"),
        torch.full(problem.winners_shape, -1, dtype=problem.winners_dtype, device="cpu") if winners else None,
        torch.zeros(problem.winners_shape, dtype=problem.result_dtype, device="cpu") if maxima else None,
    )
    with torch.inference_mode():
        (_grid if problem.grid else _pairs)(problem, out)
    return out


class _Side:
    """One side of a problem as runs of token rows: item n is `length[n]` rows from `start[n]` on, of which `mask`
    keeps some."""

    def __init__(self, tokens: Tokens, problem: Problem, winners: bool = False):
        self.arithmetic = _arithmetic(problem, winners)
        self.count, self.width = tokens.count, tokens.width
        if tokens.codes is None:
            self.rows = Rows(tokens.data, problem.result_dtype, problem.normalize)
        else:
            self.rows = _decoded(tokens, problem, self.arithmetic)
        slots = np.arange(tokens.count, dtype=np.int64) * tokens.max_length
        if tokens.starts is not None and tokens.ends is not None:
            self.start = tokens.starts.numpy().astype(np.int64)
            self.length = tokens.ends.numpy().astype(np.int64) - self.start
        else:
            self.start, self.length = slots, np.full(tokens.count, tokens.max_length, dtype=np.int64)
        self.column = self.start if tokens.consecutive else slots  # of an item's first token in a grid's winners table
        self.mask = None if tokens.mask is None else tokens.mask.reshape(-1).numpy()
        self.document_scale = None if tokens.codes is None else tokens.codes.scale

    def queries(self, rows: Tensor, problem: Problem) -> tuple[Tensor, Tensor | None]:
        """Rows of query tokens as documents' rows multiply them, and, where both are scaled codes, their scales."""
        codes = problem.documents.codes
        if codes is None or not codes.scaled:
            return rows, None
        values, scale = encode_queries(rows, codes.codec)
        return values.to(self.arithmetic), scale

    def kept(self, items: np.ndarray | slice) -> Kept:
        return kept(self.start[items], self.length[items], self.mask)

    def scale(self, items: np.ndarray | slice) -> Tensor | None:
        """Of documents `[n, 1]`, None where they have none."""
        if self.document_scale is None:
            return None
        return self.document_scale[items if isinstance(items, slice) else torch.from_numpy(items), None]

    def documents(self, items: np.ndarray | slice, problem: Problem, query_rows: int) -> Documents:
        limit = block_tokens(query_rows, self.width)
        return Documents(self.start[items], self.length[items], self.mask, problem.masked_zero, limit, query_rows)


def _arithmetic(problem: Problem, winners: bool) -> torch.dtype:
    """Of similarities. Those of int8 codes are whole numbers: exact, but for their factors in float32, which rounds
    them to what the largest is rounded to in the end, and winners need to be told apart before."""
    codes = problem.documents.codes
    if (
        codes is not None
        and codes.codec == "int8"
        and (codes.width > EXACT_WIDTH or (winners and codes.factor is not None))
    ):
        return torch.float64
    return problem.result_dtype


def _decoded(tokens: Tokens, problem: Problem, dtype: torch.dtype) -> Rows:
    """Rows of quantised documents: their tokens, or codes as numbers, whose factors are the rows' weights."""
    codes = tokens.codes
    assert codes is not None
    flat = tokens.data.reshape(-1, tokens.data.shape[-1])
    read = codes.reader(flat)
    if not codes.scaled and problem.dtype != torch.float32:
        exact = read  # documents of the queries' dtype, as if they had been dequantised to it

        def read(rows: Tensor | slice) -> Tensor:
            return exact(rows).to(problem.dtype)

    return Rows.decoded(len(flat), codes.width, read, dtype, None if codes.factor is None else codes.factor.reshape(-1))


def _scaled(value: Tensor, documents: Tensor | None, queries: Tensor | None) -> Tensor:
    """Largest products of codes `[N, R]` → similarities, float32: by the scales of documents `[N, 1]`, then by those of
    query tokens (`[R]` or `[N, R]`)."""
    if documents is None or queries is None:
        return value
    return value.float() * documents * queries


def _grid(problem: Problem, out: Scored) -> None:
    winners = out.winners is not None
    q, d = _Side(problem.queries, problem, winners), _Side(problem.documents, problem, winners)
    for low, high in ranges(q.length, GROUP // q.width, q.count):
        _grid_rows(problem, q, d, slice(low, high), out)


def _grid_rows(problem: Problem, q: _Side, d: _Side, group: slice, out: Scored) -> None:
    """All documents with a group of queries, whose rows stay in cache."""
    threads = torch.get_num_threads()
    asked = q.kept(group)
    R = len(asked.row)
    queries, scale = q.queries(q.rows.block(consecutive(asked.row), Scratch(), whole_rows(R)), problem)
    columns = consecutive(q.column[group][asked.item] + asked.position)
    at = columns if isinstance(columns, slice) else torch.from_numpy(columns)
    tree = Tree(asked.counts)

    def work(job: tuple[int, int], scratch: Scratch) -> None:
        mine = slice(*job)
        documents = d.documents(mine, problem, len(queries))
        value, place = _tables(documents, len(queries), d.arithmetic, out, scratch)
        maxima(d.rows, documents.pieces, [Run(0, len(value), queries)], value, place, scratch)
        value, place = documents.gather(value[:, :R], None if place is None else place[:, :R])
        value = _scaled(value, d.scale(mine), None if scale is None else scale[:R])
        total = tree.sums(value.T.contiguous())
        out.scores[group, mine] = _without_empty(total, documents)
        if out.winners is not None and place is not None:
            out.winners[mine, at] = place.to(out.winners.dtype)
        if out.maxima is not None:
            out.maxima[mine, at] = value

    tokens = job_tokens(len(queries), d.width, d.length, threads)
    run(ranges(d.length, tokens, max(1, TABLE // max(1, R))), work, threads)


def _pairs(problem: Problem, out: Scored) -> None:
    winners = out.winners is not None
    q, d = _Side(problem.queries, problem, winners), _Side(problem.documents, problem, winners)
    threads = torch.get_num_threads()
    if problem.pairs is None:
        of_document = np.arange(problem.shape[0])
        of_query = of_document // problem.per_query
    else:
        of_query, of_document = problem.pairs.numpy().T
    order = np.argsort(of_query, kind="stable")

    def work(job: tuple[int, int], scratch: Scratch) -> None:
        chosen = order[job[0] : job[1]]
        heads = np.flatnonzero(np.diff(of_query[chosen], prepend=-1))  # where another query begins
        tails = np.append(heads[1:], len(chosen))
        asked = q.kept(of_query[chosen[heads]])
        C = whole_rows(int(asked.counts.max()))
        begin = asked.counts.cumsum() - asked.counts
        queries = scratch.take("queries", (len(heads), C, q.width), q.arithmetic).zero_()
        at_row = torch.from_numpy(asked.item * C + np.arange(len(asked.row)) - begin[asked.item])
        asked_rows = q.rows.block(consecutive(asked.row), scratch, 2)[: len(at_row)]
        asked_rows, scale = q.queries(asked_rows, problem)
        queries.view(-1, q.width)[at_row] = asked_rows
        scales = None
        if scale is not None:
            scales = scale.new_ones(len(heads) * C).index_copy_(0, at_row, scale).view(len(heads), C)

        documents = d.documents(of_document[chosen], problem, C)
        value, place = _tables(documents, C, d.arithmetic, out, scratch)
        edges = pairwise([*np.searchsorted(documents.owner, heads).tolist(), len(value)])
        runs = [Run(a, b, queries[n, : whole_rows(int(asked.counts[n]))]) for n, (a, b) in enumerate(edges)]
        maxima(d.rows, documents.pieces, runs, value, place, scratch)
        value, place = documents.gather(value, place)
        if scales is not None:
            scales = scales[torch.from_numpy(np.repeat(np.arange(len(heads)), tails - heads))]
        value = _scaled(value, d.scale(of_document[chosen]), scales)

        count, start = (torch.from_numpy(np.repeat(x, tails - heads))[:, None] for x in (asked.counts, begin))
        inside = torch.arange(C, device="cpu") < count
        value = value.masked_fill(~inside, 0)
        total = Tree(np.array([C])).sums(value.T.contiguous())
        target = torch.from_numpy(chosen)
        out.scores[target] = _without_empty(total, documents)[0]
        if place is not None or out.maxima is not None:
            pair, column = inside.nonzero(as_tuple=True)
            at = (target[pair], torch.from_numpy(asked.position)[start[pair, 0] + column])
            if out.winners is not None and place is not None:
                out.winners[at] = place[pair, column].to(out.winners.dtype)
            if out.maxima is not None:
                out.maxima[at] = value[pair, column]

    R = whole_rows(int(q.length.max()))
    length = d.length[of_document[order]]
    tokens = job_tokens(R, d.width, length, threads)
    run(ranges(length, tokens, max(1, min(TABLE, GROUP // q.width) // max(1, R))), work, threads)


def _tables(
    documents: Documents, columns: int, dtype: torch.dtype, out: Scored, scratch: Scratch
) -> tuple[Tensor, Tensor | None]:
    """Room for the maxima of pieces and, where asked, their places."""
    shape = (len(documents.owner), columns)
    value = scratch.take("value", shape, dtype)
    return value, None if out.winners is None else scratch.take("place", shape, torch.int64)


def _without_empty(total: Tensor, documents: Documents) -> Tensor:
    """`[N, documents]`, −inf where a document has nothing to match, an empty query's too."""
    return total.masked_fill_(documents.empty, -torch.inf) if documents.some_empty else total


def backward(
    problem: Problem, winners: Tensor, grad: Tensor, need_queries: bool, need_documents: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients as `Backend.backward` says, from the winners in chunks whose size depends on their shape alone."""
    with torch.no_grad():
        q, d = _Side(problem.queries, problem), _Side(problem.documents, problem)
        if problem.documents.codes is not None:
            d.rows = _decoded(problem.documents, problem, problem.result_dtype)
        # where items cannot overlap, each document is in one row of winners, unless pairs repeat it
        separate = not problem.documents.ragged or problem.documents.consecutive
        sums_q = Sums(q.rows, dtype, once=False) if need_queries else None
        sums_d = Sums(d.rows, dtype, once=problem.pairs is None and separate) if need_documents else None
        step = max(1, ENTRIES // max(1, winners.shape[1]))
        for low in range(0, len(winners), step):
            part = winners[low : low + step].numpy()
            if part.dtype == np.int16:
                part = part.view(np.uint16)
            none = part.dtype.type(65535 if part.dtype == np.uint16 else -1)
            if sums_q is not None:
                column, p = np.not_equal(part.T, none).nonzero()
                entry = _entry(problem, q, d, p + low, column, part[p, column], grad)
                table, which = d.rows.table(entry.document_row)
                rising = problem.grid and (problem.queries.consecutive or not problem.queries.ragged)
                sums_q.add(entry.query_row, entry.weight, table, which, rising)
            if sums_d is not None:
                column = np.argsort(part, axis=1, kind="stable")  # of two bytes: a radix sort
                p = np.arange(len(part)).repeat(part.shape[1])
                column = column.ravel()
                place = part[p, column]
                won = place != none
                entry = _entry(problem, q, d, p[won] + low, column[won], place[won], grad)
                table, which = q.rows.table(entry.query_row)
                sums_d.add(entry.document_row, entry.weight, table, which, rising=sums_d.once)
        return (
            None if sums_q is None else sums_q.result().view(problem.queries.data.shape),
            None if sums_d is None else sums_d.result().view(problem.documents.data.shape),
        )


class _Entries(NamedTuple):
    """Winners: the token rows they join, int64 `[E]`, and the gradient of their score."""

    query_row: np.ndarray
    document_row: np.ndarray
    weight: Tensor


def _entry(
    problem: Problem, q: _Side, d: _Side, p: np.ndarray, column: np.ndarray, place: np.ndarray, grad: Tensor
) -> _Entries:
    """Winners `place` in row p and `column` of their table."""
    document = p
    if problem.grid:
        if problem.queries.consecutive:
            query = np.searchsorted(q.start + q.length, column, side="right")
            row = column
        else:
            query, position = np.divmod(column, problem.queries.max_length)
            row = q.start[query] + position
        weight = grad[torch.from_numpy(query), torch.from_numpy(document)]
    else:
        if problem.pairs is None:
            query = p // problem.per_query
        else:
            query, document = problem.pairs.numpy()[p].T
        row = q.start[query] + column
        weight = grad[torch.from_numpy(p)]
    document_row = d.start[document] + place.astype(np.int64)
    for scale in (d.scale(document), d.rows.weights(document_row)):
        if scale is not None:
            weight = weight * scale[:, 0]
    return _Entries(row, document_row, weight)
