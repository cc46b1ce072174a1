"""Chosen pairs as pairs of one query with one document: where the tokens of each are, in the buffers as they lie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sides import Side


@triton.jit
def _place(places, pairs, p, count, starts, ends, N, item, L, SIDE: tl.constexpr):
    there = p < count
    n = tl.load(pairs + p * 2 + SIDE, mask=there, other=0)
    n = tl.minimum(tl.maximum(n, 0), N - 1)
    if starts is None:
        start = n * item
        end = start + L
    else:
        start = tl.load(starts + n, mask=there, other=0).to(tl.int64)
        end = tl.load(ends + n, mask=there, other=0).to(tl.int64)
    tl.store(places + p, start, mask=there)
    tl.store(places + count + p, end, mask=there)


@triton.jit(
    do_not_specialize=("count", "NQ", "ND", "q_item", "d_item", "LQ", "LD"),
    do_not_specialize_on_alignment=("q_places", "d_places", "pairs", "q_starts", "q_ends", "d_starts", "d_ends"),
)
def _chosen_kernel(
    q_places, d_places, pairs, q_starts, q_ends, d_starts, d_ends, count, NQ, ND, q_item, d_item, LQ, LD,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows that the query and the document of each pair begin and end with. Out of range they are clamped."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _place(q_places, pairs, p, count, q_starts, q_ends, NQ, q_item, LQ, 0)
    _place(d_places, pairs, p, count, d_starts, d_ends, ND, d_item, LD, 1)


def chosen(q: Side, d: Side, pairs: Tensor, q_rows: tuple[int, int], d_rows: tuple[int, int]) -> tuple[Side, Side]:
    """A query and a document for each of the pairs `[P, 2]`, ragged, that may overlap. q_rows, d_rows: of each side's
    matrix how many rows there are, and after how many the next padded item begins; a mask has an entry a row."""
    count = pairs.shape[0]
    q_places, d_places = torch.empty((2, 2, count), dtype=torch.int64, device=pairs.device)
    _chosen_kernel[(triton.cdiv(count, 256),)](
        q_places, d_places, pairs, q.starts, q.ends, d.starts, d.ends, count, q.count, d.count, q_rows[1], d_rows[1],
        q.length, d.length, 256,
    )  # fmt: skip
    return _ragged(q, q_places, q_rows[0]), _ragged(d, d_places, d_rows[0])


def _ragged(side: Side, places: Tensor, rows: int) -> Side:
    return side._replace(
        count=places.shape[1], rows=rows, per_group=places.shape[1], group=0, item=0, starts=places[0], ends=places[1],
        consecutive=False, mask=None if side.mask is None else side.mask.reshape(-1), mask_group=0, mask_item=0,
        mask_row=1,
    )  # fmt: skip
