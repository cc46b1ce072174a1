"""Launches of the Hopper forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .configs import HopperConfig, forward_config, power_of_two, splits_documents
from .gluon_names import TensorDescriptor, gl
from .hopper_float32 import _hopper_float32_kernel
from .hopper_scores import _hopper_scores_kernel
from .launches import InParts, Launch, Repeatable
from .lost import LOST_DOCUMENTS
from .queries import kept_rows, sum_parts, sum_pieces
from .scores import PARTS_BYTES, Outputs, launch
from .sides import Side
from .spans import kept_bits, kept_spans

GLUON = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class HopperLaunch(NamedTuple):
    """One launch, compiled: `repeat` it for tensors like those it was made for."""

    kernel: Any  # triton's CompiledKernel
    programs: tuple[int, int, int]
    describe: tuple[Any, ...]  # shape, strides, block and layout of the documents' descriptor
    arguments: tuple[Any, ...]
    lost: Launch | None = None  # float32: what is scored again

    def repeat(self, queries: Tensor, documents: Tensor, target: Tensor) -> None:
        self.kernel[self.programs](TensorDescriptor(documents, *self.describe), queries, target, *self.arguments)
        if self.lost is not None:
            self.lost.repeat(queries, documents, target)


def hopper_scores(
    q: Side, d: Side, out: Outputs, d_rows: int, d_item: int, processors: int, precision: str, config: HopperConfig
) -> Repeatable | None:
    """Writes `out` for every query and document.

    Documents are rows of a `[d_rows, D]` matrix whose row stride is `d.row`; padded ones begin every `d_item` rows; a
    mask has an entry a row. Returns what was launched where it was for all at once, to be repeated on other tensors of
    the same shapes, strides and alignment.
    """
    D = q.data.shape[-1]
    q_rows, q_kept = (None, None) if q.mask is None else kept_rows(q)
    block = min(128, max(16, power_of_two(q.length)))
    parts = max(1, -(-q.length // 128))
    tiles = parts * q.count if parts > 1 else -(-q.count * block // 128)
    paired = tiles > 1
    step = d.count
    if parts > 1:
        step = max(1, min(step, PARTS_BYTES // (4 * q.count * parts)))
    native = precision == "native"
    q_tiles = -(-tiles // 2) if paired else tiles
    split = parts > 1 and step == d.count and native and d.mask is None and out.winners is None
    split &= (d.starts is None or d.consecutive) and splits_documents(
        q_tiles * d.count, d_rows // d.count if d.consecutive else d.length, processors, config
    )
    sums = out.scores
    if split:
        sums = torch.empty((q_tiles * d.count + processors) * 256, dtype=torch.float32, device=d.data.device)
    elif parts > 1:
        sums = torch.empty(q.count * step * parts, dtype=torch.float32, device=d.data.device)
    box = [config.BLOCK_LD if native else config.BLOCK_RAW, config.BLOCK_D]
    layout = gl.NVMMASharedLayout.get_default_for(box, GLUON[d.data.dtype])
    stages: tuple[int | bool, ...] = (config.stages if paired else config.unpaired_stages,)
    if native:
        stages += (split, q.aligned)
    else:
        stages += (config.raw_stages if paired else config.unpaired_raw_stages, precision == "f16x3")
    programs = (processors, 1, 1)
    for first in range(0, d.count, step):
        part = _documents(d, first, min(step, d.count - first))
        starts, ends, bits = part.starts, part.ends, None
        if part.mask is not None:
            starts, ends = kept_spans(part, d_item)
            bits = kept_bits(part.mask)
        count = d_rows - first * d_item
        describe = ([count, D], [d.row, 1], box, layout)
        arguments = (
            _from(out.winners, first), _from(out.maxima, first),
            q.starts, q.ends, q_rows, q_kept, starts, ends, None if bits is None else part.starts, bits,
            q_tiles, q.count, part.count, q.length,
            min(d.length, d_rows),  # 32 bits
            q.rows, count, D, parts, block.bit_length() - 1, q.item, q.row, q.col, d_item,
            0 if out.winners is None else out.winners.shape[1],
            q.consecutive, d.consecutive and step == d.count, paired,
            config.BLOCK_LD, config.BLOCK_D, *stages,
        )  # fmt: skip
        kernel = (_hopper_scores_kernel if native else _hopper_float32_kernel)[programs](
            TensorDescriptor(part.data, *describe), q.data, sums, *arguments, num_warps=4
        )
        lost = None
        if not native:
            # tiles of 128 query rows, as here
            tiles_again = forward_config(4, D, 128, 128, d.length, d.count, out.winners is not None, (9, 0))
            lost = launch(
                q, d, out, sums, q_rows, q_kept, first, part.count, part.count, LOST_DOCUMENTS, tiles, parts, block,
                precision, tiles_again, lost=True,
            )  # fmt: skip
        if split:
            total = sum_pieces(
                sums, out.scores, starts, q.count, d.count, min(d.length, d_rows), count, q_tiles, parts, processors,
                config.BLOCK_LD,
            )  # fmt: skip
        elif parts > 1:
            total = sum_parts(sums, out.scores, first, part.count, d.count, q.count * part.count, parts)
    if step < d.count or q.mask is not None or d.mask is not None or out.winners is not None:
        return None
    launched = HopperLaunch(kernel, programs, describe, arguments, lost)
    return InParts(launched, sums.numel(), total) if parts > 1 else launched


def _documents(d: Side, first: int, count: int) -> Side:
    """Some of the documents, padded ones with rows and mask counted from the first of them."""
    if d.starts is not None and d.ends is not None:
        return d._replace(count=count, starts=d.starts[first : first + count], ends=d.ends[first : first + count])
    mask = None if d.mask is None else d.mask[first : first + count]
    return d._replace(count=count, data=d.data[first : first + count], mask=mask)


def _from(table: Tensor | None, first: int) -> Tensor | None:
    """The rows of a table from one on."""
    return None if table is None else table[first:]
