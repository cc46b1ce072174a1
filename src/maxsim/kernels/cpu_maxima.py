"""The largest similarity of each query token in each document, and its place.

Owns: a list of document pieces (runs of token rows) against the rows of some queries. The similarities of a block of
pieces with a block of query rows are made by one matrix product and reduced at once, while they are in cache.
Reads: every document token once a call, query rows once a block of tokens. Bound by the matrix product: the reduction
costs 3 to 5 % of it, winners 10 % more. Pieces of similar length share a block: the shorter ones repeat their own
last token, which changes no maximum and, since the lowest index wins, no winner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cpu_product import LEAST, ROWS, WIDEST, Multiply, product
from .cpu_rows import Rows
from .cpu_threads import Scratch

# AMD EPYC (Zen 3, 2 cores, 512 KiB of L2 each, 32 MiB of L3), PyTorch 2.13, 2026-11-29: in cache one thread runs 4096
# tokens x 32 query rows at 80 GFLOP/s, 1024 x 256 at 94, 256 x 32 at 70. From memory, 32 query rows with 204800 tokens
# on two threads take 25 ms in blocks of 1024 tokens, 21 of 2048, 19 of 4096, 17.6 of 10240 (one product of all: 16.9).
BLOCK = 1 << 18  # similarities of a block
MIN_TOKENS = 1024  # of it, with up to WIDEST query rows
TOKENS = 1 << 20  # elements of a block's token rows
SLACK = 1024  # similarities that padding may waste a piece before another block is cheaper


class Pieces(NamedTuple):
    """Runs of token rows, `first` and `length` (> 0) int64 `[P]`: row numbers, or places in `rows`, which holds row
    numbers. gone: rising, of all rows of pieces of one length, those whose similarities are −inf."""

    first: np.ndarray
    length: np.ndarray
    rows: np.ndarray | None
    gone: np.ndarray | None = None


def block_tokens(query_rows: int, width: int) -> int:
    """Document tokens of a block: never more for more query rows."""
    return max(256, min(max(BLOCK // max(query_rows, ROWS), MIN_TOKENS), TOKENS // width))


class Run(NamedTuple):
    """Pieces `low` to `high` with query rows `queries` `[R, D]`, contiguous, R a multiple of ROWS."""

    low: int
    high: int
    queries: Tensor


def maxima(
    documents: Rows, pieces: Pieces, runs: Sequence[Run], out: Tensor, places: Tensor | None, scratch: Scratch
) -> None:
    """For each run writes the largest similarities `out[low:high, :R]` and, where asked, the index in the piece
    `places[low:high, :R]`, int64: the lowest of equals, the first NaN. No piece is longer than `block_tokens(R, D)`.
    Where rows have weights, each similarity is multiplied by its row's."""
    most = max(run.queries.shape[0] for run in runs)
    limit = max(block_tokens(run.queries.shape[0], documents.width) for run in runs)
    space = scratch.take("similarities", (max(limit, LEAST) * min(most, WIDEST),), documents.dtype)
    multiply = product(documents.dtype, documents.width)
    ranks = None if places is None else torch.arange(limit, 0, -1, dtype=documents.dtype, device="cpu")[:, None]
    for run in runs:
        _maxima(documents, pieces, run, out, places, scratch, multiply, space, ranks)


def _maxima(
    documents: Rows,
    pieces: Pieces,
    run: Run,
    out: Tensor,
    places: Tensor | None,
    scratch: Scratch,
    multiply: Multiply,
    space: Tensor,
    ranks: Tensor | None,
) -> None:
    R = run.queries.shape[0]
    if not R or run.low == run.high:
        return
    first, length = pieces.first[run.low : run.high], pieces.length[run.low : run.high]
    out = out[run.low : run.high]
    if places is not None:
        places = places[run.low : run.high]
    parts = [(low, min(R, low + WIDEST), run.queries[low : low + WIDEST].T) for low in range(0, R, WIDEST)]
    whole = _in_place(documents, first, length, pieces.rows)
    for chosen, width in _blocks(length, block_tokens(R, documents.width), SLACK // R):
        if whole is not None and isinstance(chosen, slice) and (chosen.stop - chosen.start) * width >= LEAST:
            n, weight = chosen.stop - chosen.start, None
            tokens = whole[chosen.start * width : chosen.stop * width]
        else:
            rows = _rows(first[chosen], length[chosen], width, pieces.rows)
            n = len(first[chosen])
            tokens, weight = documents.block(rows, scratch), documents.weights(rows)
        m = tokens.shape[0]
        target = chosen if isinstance(chosen, slice) else torch.from_numpy(chosen)
        gone = None
        if pieces.gone is not None and isinstance(chosen, slice):
            begin = (run.low + chosen.start) * width
            some = slice(*np.searchsorted(pieces.gone, (begin, begin + n * width)).tolist())
            gone = torch.from_numpy(pieces.gone[some] - begin)
        for low, high, part in parts:
            block = space[: m * (high - low)].view(m, high - low)
            _similarities(multiply, tokens, part, block, weight, gone)
            similarity = block[: n * width].view(n, width, high - low)
            if ranks is None and isinstance(target, slice):
                torch.amax(similarity, 1, out=out[target, low:high])
                continue
            largest = similarity.amax(1)
            out[target, low:high] = largest
            if ranks is not None and places is not None:
                # 1 where a token is the largest, times its rank from the end: a fifth of the time of an argmax
                place = width - similarity.eq_(largest[:, None]).mul_(ranks[-width:]).amax(1)
                if bool((place == width).any()):  # a NaN equals nothing
                    _similarities(multiply, tokens, part, block, weight, gone)
                    place = similarity.max(1).indices
                places[target, low:high] = place.to(places.dtype)


def _similarities(
    multiply: Multiply, tokens: Tensor, part: Tensor, block: Tensor, weight: Tensor | None, gone: Tensor | None
) -> None:
    """Of tokens with query rows, into `block`; those of rows that are `gone` −inf."""
    multiply(tokens, part, block)
    if weight is not None:
        block[: len(weight)] *= weight
    if gone is not None:
        block.index_fill_(0, gone, -torch.inf)


def _blocks(length: np.ndarray, limit: int, slack: int) -> list[tuple[slice | np.ndarray, int]]:
    """Which pieces share a block, and the length they are brought to."""
    P = len(length)
    if P == 1 or length.min() == length.max():
        step = max(1, limit // int(length[0]))
        return [(slice(low, min(P, low + step)), int(length[0])) for low in range(0, P, step)]
    order = np.argsort(length, kind="stable")
    ordered = length[order]
    blocks: list[tuple[slice | np.ndarray, int]] = []
    low = 0
    while low < P:
        least = int(ordered[low])
        similar = int(np.searchsorted(ordered, least + least // 16 + slack, side="right"))
        high = min(similar, low + max(1, limit // least))
        high = min(high, low + max(1, limit // int(ordered[high - 1])))
        blocks.append((order[low:high], int(ordered[high - 1])))
        low = high
    return blocks


def _in_place(documents: Rows, first: np.ndarray, length: np.ndarray, rows: np.ndarray | None) -> Tensor | None:
    """All rows as a view, where pieces of one length follow one another and rows can be read as they are."""
    if rows is not None or not documents.in_place or documents.flat is None:
        return None
    found = _slice(first, length, int(length[0]))
    return None if found is None else documents.flat[found]


def _slice(first: np.ndarray, length: np.ndarray, width: int) -> slice | None:
    """The rows of pieces of length `width` that follow one another, else None."""
    start, count = int(first[0]), len(first)
    if int(length[0]) != width or int(first[-1]) != start + (count - 1) * width:
        return None
    if count > 1 and bool((length != width).any() or (np.diff(first) != width).any()):
        return None
    return slice(start, start + count * width)


def _rows(first: np.ndarray, length: np.ndarray, width: int, rows: np.ndarray | None) -> slice | np.ndarray:
    """Row numbers of pieces brought to `width` by repeating their last row."""
    if rows is None and (found := _slice(first, length, width)) is not None:
        return found
    index: np.ndarray = np.minimum(first[:, None] + np.arange(width), (first + length - 1)[:, None]).ravel()
    return index if rows is None else np.asarray(rows[index])
