"""What kernels read instead of a mask: where the kept tokens of a document begin and end, and a bit a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sides import Side, span

NO_GAP = tl.constexpr(2147483647)  # no row of a document


@triton.jit
def kept_span(mask, stride, length):
    """First and one past the last kept token of a document, both 0 where there is none."""
    position = tl.arange(0, 1024)
    first = length
    last = length * 0
    for low in range(0, length, 1024):
        at = low + position
        keep = tl.load(mask + at.to(tl.int64) * stride, mask=at < length, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(keep, at, length), 0))
        last = tl.maximum(last, tl.max(tl.where(keep, at + 1, 0), 0))
    return tl.minimum(first, last), last


@triton.jit
def first_masked(mask, stride, length):
    """The first token that is not kept, `length` where all are."""
    position = tl.arange(0, 1024)
    first = length
    for low in range(0, length, 1024):
        at = low + position
        keep = tl.load(mask + at.to(tl.int64) * stride, mask=at < length, other=1) != 0
        first = tl.minimum(first, tl.min(tl.where(keep, length, at), 0))
    return first


@triton.jit(do_not_specialize=("LD", "TD", "d_item"), do_not_specialize_on_alignment=("mask_ptr", "starts", "ends"))
def _kept_spans_kernel(mask_ptr, starts, ends, firsts_ptr, lasts_ptr, gaps_ptr, LD, TD, d_item):
    """One program a document: the rows of its first kept token and of one past the last, both its own first row where
    there is none; where asked, the row of its first masked token, NO_GAP where there is none."""
    n = tl.program_id(0).to(tl.int64)
    start, length = span(n, starts, ends, LD, TD)
    if starts is None:
        start = n * d_item
    low, high = kept_span(mask_ptr + start, 1, length)
    tl.store(firsts_ptr + n, (start + low).to(tl.int32))
    tl.store(lasts_ptr + n, (start + high).to(tl.int32))
    if gaps_ptr is not None:
        gap = first_masked(mask_ptr + start, 1, length)
        tl.store(gaps_ptr + n, tl.where(gap < length, start + gap, NO_GAP).to(tl.int32))


def kept_spans(d: Side, d_item: int, masked_zero: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of the first kept token of each masked document and of one past the last, int32 `[ND]` twice; equal where
    there is none; with masked_zero of the first masked token too, NO_GAP where there is none. The mask has an entry a
    row; padded documents begin every `d_item` rows."""
    assert d.mask is not None
    firsts = torch.empty(d.count, dtype=torch.int32, device=d.data.device)
    lasts = torch.empty_like(firsts)
    gaps = torch.empty_like(firsts) if masked_zero else None
    _kept_spans_kernel[(d.count,)](d.mask, d.starts, d.ends, firsts, lasts, gaps, d.length, d.rows, d_item)
    return firsts, lasts, gaps


@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("mask_ptr",))
def _kept_bits_kernel(mask_ptr, bits_ptr, rows, BLOCK: tl.constexpr):
    """One program BLOCK words of 32 rows."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)
    row = word[:, None] * 32 + bit[None, :]
    keep = (tl.load(mask_ptr + row, mask=row < rows, other=0) != 0).to(tl.int32)
    tl.store(bits_ptr + word, tl.sum(keep << bit[None, :], 1), mask=word * 32 < rows + 512)


def kept_bits(mask: Tensor) -> Tensor:
    """A contiguous mask as bits, lowest first, int32; 512 rows beyond the end are there, and masked."""
    rows = mask.numel()
    bits = torch.empty(-(-(rows + 512) // 32), dtype=torch.int32, device=mask.device)
    _kept_bits_kernel[(-(-bits.numel() // 64),)](mask, bits, rows, BLOCK=64)
    return bits


class Places(NamedTuple):
    """Where documents lie, as Hopper kernels take it, in this order: rows that they begin and end with, of masked ones
    those of kept tokens (None: padded, all kept). Of masked ones else None: where ragged ones begin, a bit a row, and
    each one's first masked token, where such compete with 0."""

    starts: Tensor | None
    ends: Tensor | None
    bases: Tensor | None
    bits: Tensor | None
    gaps: Tensor | None


def places(d: Side, d_item: int, masked_zero: bool, bits: Tensor | None = None) -> Places:
    """Of documents whose mask, if any, has an entry a row; padded ones begin every `d_item` rows. bits: of the mask,
    where they are known."""
    if d.mask is None:
        return Places(d.starts, d.ends, None, None, None)
    starts, ends, gaps = kept_spans(d, d_item, masked_zero)
    return Places(starts, ends, d.starts, kept_bits(d.mask) if bits is None else bits, gaps)
