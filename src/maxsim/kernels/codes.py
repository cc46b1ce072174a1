"""Queries as codes of 8 bits, as documents are that they meet: a scale a token, of which a code is about the
quotient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arithmetic import INTERPRETED
from .configs import power_of_two
from .launches import Launch, OfCodes, Repeatable
from .sides import ONE_GROUP, Side, base, span


@triton.jit
def _encode(x, scale, kind: tl.constexpr):
    """Quotients rounded to the nearest code, ties to even; the compiler fuses none with the sum."""
    y = tl.div_rn(x, scale[:, None])
    if kind == tl.int8:
        code = (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # an integer, in the lowest bits of the sum
    else:
        if INTERPRETED:  # which does not round
            step = tl.maximum((y.to(tl.int32, bitcast=True) >> 23) & 255, 121)  # of numbers below 2^-6 that of 2^-6
            magic = ((step + 20 << 23) | (1 << 22)).to(tl.float32, bitcast=True)
            y = (y + magic) - magic
        code = y.to(kind)
    return code


@triton.jit(do_not_specialize=("LQ", "TQ", "slots", "D", "q_item", "q_row"),
            do_not_specialize_on_alignment=("starts", "ends"))  # fmt: skip
def _encode_kernel(
    q_ptr, codes_ptr, scales_ptr, starts, ends, new_starts, new_ends, LQ, TQ, slots, D, q_item, q_row, q_col, pitch,
    LARGEST: tl.constexpr, CONSECUTIVE: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program ROWS slots. A token with NaN or inf has codes of 0 and the scale NaN."""
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if CONSECUTIVE:
        there = slot < slots
        q_at = q_ptr + slot * q_row
    else:
        n = tl.minimum(slot, slots - 1) // LQ
        i = slot - n * LQ
        start, length = span(n, starts, ends, LQ, TQ)
        there = i < length
        q_at = q_ptr + base(n, start, starts, ONE_GROUP, 0, q_item, q_row) + i * q_row
        if starts is not None:
            tl.store(new_starts + n, slot, mask=i == 0)
            tl.store(new_ends + n, slot + length, mask=i == 0)
    d = tl.arange(0, BLOCK_D)
    bits = tl.zeros([ROWS], tl.int32)
    squares = tl.zeros([ROWS], tl.float32)
    for c in range(0, D, BLOCK_D):
        at = q_at[:, None] + (c + d).to(tl.int64)[None, :] * q_col
        x = tl.load(at, mask=there[:, None] & (c + d < D)[None, :], other=0.0).to(tl.float32)
        magnitude = tl.abs(x).to(tl.int32, bitcast=True)  # bits, in the order of values, NaN above all
        bits = tl.maximum(bits, tl.max(magnitude, 1))
        if NORMALIZE:
            squares += tl.sum(x * x, 1)
    finite = bits < 0x7F800000
    largest = bits.to(tl.float32, bitcast=True)
    norm = tl.maximum(tl.sqrt_rn(squares), 1e-12)
    if NORMALIZE:
        largest = tl.div_rn(largest, norm)
    scale = tl.maximum(tl.div_rn(largest, LARGEST), 1.1754943508222875e-38)  # 2^-126
    tl.store(scales_ptr + slot, tl.where(finite, scale, float("nan")), mask=there)
    for c in range(0, D, BLOCK_D):
        at = q_at[:, None] + (c + d).to(tl.int64)[None, :] * q_col
        mask = there[:, None] & (c + d < D)[None, :]
        x = tl.where(finite[:, None], tl.load(at, mask=mask, other=0.0).to(tl.float32), 0.0)
        if NORMALIZE:
            x = tl.div_rn(x, norm[:, None])
        code = _encode(x, scale, codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + slot[:, None] * pitch + (c + d)[None, :], code, mask=mask)


def encoded(q: Side, code: torch.dtype, normalize: bool = False) -> tuple[Side, Launch | None]:
    """Queries, or their unit vectors, as codes, laid out by slots of a table of winners, and a scale for each; masks
    stay where they are, for positions in a query. And the launch that made them, if there are any."""
    D = q.data.shape[-1]
    slots = q.rows if q.consecutive else q.count * q.length
    pitch = -(-D // 16) * 16
    codes = torch.empty(max(slots, 1), pitch, dtype=code, device=q.data.device)[:, :D]
    scales = torch.empty(max(slots, 1), dtype=torch.float32, device=q.data.device)
    starts, ends, rows = q.starts, q.ends, q.rows
    if starts is not None and not q.consecutive:
        starts, ends, rows = torch.empty_like(starts), torch.empty_like(starts), slots  # every one is written
    launch = None
    if slots:
        blocks = (-(-slots // 4), 1, 1)
        arguments = (
            q.starts, q.ends, starts, ends, q.length, q.rows, slots, D, q.item, q.row, q.col,
            pitch, 127.0 if code == torch.int8 else 448.0, q.consecutive, normalize, 4, min(256, power_of_two(D)),
        )  # fmt: skip
        launch = Launch(_encode_kernel[blocks](q.data, codes, scales, *arguments, num_warps=1), blocks, arguments)
    side = q._replace(
        data=codes, rows=rows, item=q.length * pitch, row=pitch, col=1, starts=starts, ends=ends, scales=scales
    )
    return side, launch


def after_encoding(forward: Repeatable | None, q: Side, encode: Launch | None) -> Repeatable | None:
    """A forward, and before it, where queries are codes, what made them so."""
    if forward is None or q.scales is None:
        return forward
    return None if encode is None else OfCodes(encode, q.data.shape[0], q.row, forward)
