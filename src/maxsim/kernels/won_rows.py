"""Gradients of documents of which few tokens win, where lists are short. Programs own entries of a list, one a winner,
instead of rows, and the first entry of a row makes its sum; others fill the rows that won nothing with zeros meanwhile.
A list is sorted by comparing all its winners with each other, and takes 4 bytes a winner, nothing a row: from the
lowest bit on where the winner stands in the table (9 bits), where the entries of its row end if it is their first,
else 0 (10), and the token (13; of longer documents the table has it). Distillation of 32 queries of 32 tokens with 32
documents of 300 each: 9 rows of 10 win nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launches import Slot, Steps
from .list_places import won_by
from .lists import COMMON
from .sides import Side, span

MOST = 512  # entries of a list: comparisons are as many squared
PLACE = tl.constexpr(511)  # of what a list holds these bits
END = tl.constexpr(9)  # where those bits begin
ENDS = tl.constexpr(1023)
TOKEN = tl.constexpr(19)
TOKENS = tl.constexpr(8191)
FILL = tl.constexpr(32)  # rows that a program fills: the bits of a number
BLOCK = tl.constexpr(32)  # winners compared at once with as many
LAST = tl.constexpr(2147483647)  # in place of no winner: beyond every token


@triton.jit
def _winners_of(winners, at, columns):
    won = won_by(winners, at, at < columns)
    return tl.where(won < 0, LAST, won)


@triton.jit(do_not_specialize=COMMON)
def _rank_kernel(order, winners, first, columns, chunks):
    """One program BLOCK entries of a document: its list is sorted by the token that won, and then as they stand."""
    pid = tl.program_id(0)
    pos = (pid // chunks).to(tl.int64)
    own = (pid % chunks) * BLOCK + tl.arange(0, BLOCK)
    winners += (first + pos) * columns
    won = _winners_of(winners, own, columns)
    less = tl.zeros([BLOCK], tl.int32)  # entries of tokens before
    same = tl.zeros([BLOCK], tl.int32)
    earlier = tl.zeros([BLOCK], tl.int32)  # those of the same that come before
    for low in range(0, columns, BLOCK):
        at = low + tl.arange(0, BLOCK)
        other = _winners_of(winners, at, columns)
        equal = (other[None, :] == won[:, None]) & (at < columns)[None, :]
        less += tl.sum((other[None, :] < won[:, None]).to(tl.int32), 1)
        same += tl.sum(equal.to(tl.int32), 1)
        earlier += tl.sum((equal & (at[None, :] < own[:, None])).to(tl.int32), 1)
    place = pos * columns + less + earlier
    end = tl.where((earlier == 0) & (won < LAST), less + same, 0)
    token = won & TOKENS
    tl.store(order + place, own | (end << END) | (token << TOKEN), mask=own < columns)


def ranked(steps: Steps, winners: Slot, first: int, some: int, columns: int) -> Slot:
    """The lists of some documents, of winners `[.., columns]`, int32 `[some, columns]`."""
    order = steps.room(torch.int32, some * columns)
    chunks = triton.cdiv(columns, BLOCK.value)
    steps.launch(_rank_kernel, some * chunks, order, winners, first, columns, chunks, num_warps=1)
    return order


@triton.jit
def entry_of(entry, entries, first, columns, order, winners, starts, ends, LD, TD):
    """The document of an entry, the token that won it, that token's row, and where its entries begin and end: nowhere
    where the entry is not their first."""
    live = entry < entries
    doc = tl.where(live, first + entry // columns, first)
    low = tl.where(live, entry % columns, 0).to(tl.int32)
    found = tl.load(order + entry, mask=live, other=0)
    end = (found >> END) & ENDS
    token = (found >> TOKEN) & TOKENS
    if LD > TOKENS:
        token = tl.maximum(won_by(winners, doc * columns + (found & PLACE), end > 0), 0)
    if starts is None:
        start = (doc - first) * LD
    else:
        start = span(doc, starts, ends, LD, TD)[0]
    return doc, token.to(tl.int64), start + token, low, tl.where(end > 0, end, low)


@triton.jit
def fill_others(
    block, out, first_row, rows, first, some, winners, columns, starts, ends, ND, LD, TD, D, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Zeros in the rows of a block that won nothing: of documents of this chunk, and of none before the next one."""
    row = block * FILL + tl.arange(0, FILL)
    past = tl.minimum((block + 1) * FILL, rows)
    mine = row < rows
    if starts is None:
        doc = first + block * FILL // LD
        start = (doc - first) * LD
    else:
        # the first document that ends beyond the block's beginning
        doc = block * 0
        high = doc + ND
        while doc < high:
            middle = (doc + high) // 2
            if tl.load(ends + middle).to(tl.int64) > block * FILL:
                high = middle
            else:
                doc = middle + 1
        start = span(tl.minimum(doc, ND - 1), starts, ends, LD, TD)[0]
        if first > 0:
            mine = mine & (row >= span(first, starts, ends, LD, TD)[0])
        if first + some < ND:
            mine = mine & (row < span(first + some, starts, ends, LD, TD)[0])
    won = (block * 0).to(tl.int32)  # a bit a row
    while (doc < first + some) & (start < past):
        for low in range(0, columns, BLOCK):
            at = low + tl.arange(0, BLOCK)
            token = won_by(winners, doc * columns + at, at < columns)
            bit = (start - block * FILL).to(tl.int32) + token
            here = (token >= 0) & (bit >= 0) & (bit < FILL)
            won |= tl.reduce_or(tl.where(here, 1 << tl.where(here, bit, 0), 0), 0)
        doc += 1
        if starts is None:
            start += LD
        else:
            start = span(tl.minimum(doc, ND - 1), starts, ends, LD, TD)[0]
    d = tl.arange(0, BLOCK_D)
    zeros = tl.zeros([FILL, BLOCK_D], out.dtype.element_ty)
    mine = mine & ((won >> tl.arange(0, FILL)) & 1 == 0)
    tl.store(out + (first_row + row)[:, None] * D + d[None, :], zeros, mask=mine[:, None] & (d < D)[None, :])


def few_win(columns: int, d: Side) -> bool:
    """Whether these kernels serve: where lists are short, and with counters would take more than 4 bytes a winner."""
    return 0 < columns <= MOST and columns < 2 * (d.rows // d.count if d.rows else d.length)
