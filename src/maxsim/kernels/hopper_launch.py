"""Launches of the Hopper forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .codes import after_encoding, encoded
from .configs import HopperConfig, forward_config, splits_documents
from .gluon_names import TensorDescriptor, gl
from .hopper_decoded import _hopper_decoded_kernel, decoded_tiles
from .hopper_float32 import _hopper_float32_kernel
from .hopper_scores import _hopper_scores_kernel
from .hopper_slices import _query_halves_kernel, _query_tiles_kernel
from .hopper_wide import _hopper_wide_kernel
from .hopper_wide_float32 import _hopper_wide_float32_kernel
from .launches import InParts, Launch, Repeatable, filled, without
from .queries import kept_rows, sum_parts, sum_pieces, tiled
from .scores_launch import PARTS_BYTES, Outputs, launch
from .sides import Side
from .spans import kept_bits, places

TILES_BYTES = 16 << 20  # of queries laid out anew, held at once
PIECE = 16  # rows of them that a program takes of float32 ones
GLUON = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
}


class QueryTiles(NamedTuple):
    """Queries too wide to stay in shared memory, laid out as the copy engine is to bring them."""

    arguments: tuple[Any, ...]
    tiles: int
    slices: int
    box: list[int]
    layout: Any
    halves: int = 0  # of float32 tokens, whose scales come too

    def laid_out(self, queries: Tensor) -> tuple[TensorDescriptor | Tensor, ...]:
        """Their descriptor, and what else a kernel takes in place of queries."""
        box = self.box
        shape = [self.tiles * box[0], self.slices * box[1] * max(self.halves, 1)]
        dtype = torch.float16 if self.halves else queries.dtype
        rows = torch.empty(shape, dtype=dtype, device=queries.device)
        scales: tuple[Tensor, ...] = ()
        if self.halves:
            scales = (torch.empty(shape[0], dtype=torch.float32, device=queries.device),)
            blocks = (self.tiles, box[0] // PIECE)
            _query_halves_kernel[blocks](
                queries, rows, *scales, *self.arguments, self.halves, PIECE, self.slices, num_warps=4
            )
        else:
            _query_tiles_kernel[(self.tiles, self.slices)](queries, rows, *self.arguments, num_warps=4)
        return TensorDescriptor(rows, shape, [shape[1], 1], box, self.layout), *scales


class HopperLaunch(NamedTuple):
    """One launch, compiled: `repeat` it for tensors like those it was made for."""

    kernel: Any  # triton's CompiledKernel
    programs: tuple[int, int, int]
    describe: tuple[Any, ...]  # shape, strides, block and layout of the documents' descriptor
    arguments: tuple[Any, ...]  # but for those of `repeat`
    lost: Launch | None = None  # float32: what is scored again
    tiles: QueryTiles | None = None  # wide tokens: the queries laid out anew

    def repeat(
        self, queries: Tensor, documents: Tensor, target: Tensor, winners: Tensor | None, scales: Tensor | None = None
    ) -> None:
        q = (queries,) if self.tiles is None else self.tiles.laid_out(queries)
        arguments = filled(self.arguments, scales)
        self.kernel[self.programs](TensorDescriptor(documents, *self.describe), *q, target, winners, *arguments)
        if self.lost is not None:
            self.lost.repeat(queries, documents, target, winners)


def hopper_scores(
    q: Side, d: Side, out: Outputs, d_rows: int, d_item: int, processors: int, precision: str, masked_zero: bool,
    config: HopperConfig, per_query: int = 0,
) -> Repeatable | None:  # fmt: skip
    """Writes `out` for every query and document, or for each query and `per_query` documents of its own.

    Documents are rows of a `[d_rows, D]` matrix whose row stride is `d.row`; padded ones begin every `d_item` rows; a
    mask has an entry a row. Returns what was launched where it was for all at once, to be repeated on other tensors of
    the same shapes, strides and alignment.
    """
    D = q.data.shape[-1]
    q_rows, q_kept = kept_rows(q)
    encode = None
    if d.scales is not None:
        q, encode = encoded(q, d.data.dtype)
    queries = 1 if per_query else q.count  # at a time
    block, parts, tiles = tiled(q.length, queries, 128)
    if per_query:
        block = 128
        parts += parts % 2 if parts > 1 else 0  # both tiles of a pair are its query's
        tiles = parts
    native, wide = precision == "native", config.BLOCK_D < D
    paired = tiles > 1 or wide
    q_tiles = -(-tiles // 2) if paired else tiles
    step = d.count  # documents of a launch
    if parts > 1 and not per_query:
        step = max(1, min(step, PARTS_BYTES // (4 * queries * parts)))
        if d.factors is not None or d.decoder is not None:  # those of a part begin at a multiple of 16 bytes
            step = min(d.count, -(-step // 8) * 8)
    slices = -(-D // config.BLOCK_D)
    some = q_tiles  # query tiles, or pairs of them, of a launch
    if wide and not config.resident:
        some = min(q_tiles, max(1, TILES_BYTES // (256 * slices * config.BLOCK_D * q.data.element_size())))
    whole = step == d.count and some == q_tiles  # one launch
    split = whole and parts > 1 and native and not per_query and d.mask is None and out.winners is None
    split &= (q_tiles * d.count + processors) * 1024 <= PARTS_BYTES
    split &= (d.starts is None or d.consecutive) and splits_documents(
        q_tiles * d.count, d_rows // d.count if d.consecutive else d.length, processors, config
    )
    sums = out.scores
    if split:
        sums = torch.empty((q_tiles * d.count + processors) * 256, dtype=torch.float32, device=d.data.device)
    elif parts > 1:
        sums = torch.empty(queries * step * parts, dtype=torch.float32, device=d.data.device)
    box = [config.BLOCK_LD if native else config.BLOCK_RAW, config.BLOCK_D]
    layout = None if d.decoder is not None else gl.NVMMASharedLayout.get_default_for(box, GLUON[d.data.dtype])
    unpaired = config.own_stages if per_query else config.unpaired_stages
    stages: tuple[int | bool, ...] = (config.stages if paired else unpaired,)
    if native:
        stages += (split, q.aligned)
        run = _hopper_wide_kernel if wide else _hopper_scores_kernel
        if d.decoder is not None:
            run = _hopper_decoded_kernel
    else:
        stages += (config.raw_stages if paired else config.unpaired_raw_stages, precision == "f16x3")
        run = _hopper_wide_float32_kernel if wide else _hopper_float32_kernel
    programs = (processors, 1, 1)
    bits = None if d.mask is None or d.starts is None else kept_bits(d.mask)  # of ragged documents all at once
    for first in range(0, d.count, step):
        part = documents_from(d, first, min(step, d.count - first))
        lie = places(part, d_item, masked_zero, bits)
        count = d_rows - first * d_item
        describe = ([count, D], [d.row, 1], box, layout)
        if d.decoder is None:
            described, decoding = TensorDescriptor(part.data, *describe), []
        else:
            described, *decoding = decoded_tiles(part, count, box)
        for tile in range(0, q_tiles, some):
            here = min(some, q_tiles - tile)
            arguments = (
                rows_from(out.winners, first), rows_from(out.maxima, first),
                q.starts, q.ends, q_rows, q_kept, *lie, here, q.count, part.count, q.length,
                min(d.length, d_rows),  # 32 bits
                q.rows, count, D, parts, block.bit_length() - 1, q.item, q.row, q.col, d_item,
                0 if out.winners is None else out.winners.shape[1],
                q.consecutive, d.consecutive and step == d.count, paired,
                config.BLOCK_LD, config.BLOCK_D, *stages,
            )  # fmt: skip
            moved = None
            if wide:
                first_tile, there = 2 * tile, min(2 * here, tiles - 2 * tile)
                arguments += (*((config.resident,) if native else ()), slices, first_tile, there)
                if not config.resident:
                    moved = _query_tiles(
                        q, q_rows, q_kept, first_tile, there, parts, block, slices, config.BLOCK_D, precision
                    )
            else:
                arguments += (per_query or None,)
            if d.decoder is not None:
                arguments += tuple(decoding)
            elif native:
                arguments += (q.scales, part.scales)
                if not wide:
                    arguments += (factors_of(part, count, config.BLOCK_LD),)
            of_queries = (q.data,) if moved is None else moved.laid_out(q.data)
            kernel = run[programs](described, *of_queries, sums, *arguments, num_warps=4)
        lost = None
        if not native:
            lost = score_lost(
                q, d, out, sums, q_rows, q_kept, first, part.count, 128, parts, precision, masked_zero, processors,
                per_query,
            )  # fmt: skip
        if split:
            total = sum_pieces(
                sums, out.scores, lie.starts, q.count, d.count, min(d.length, d_rows), count, q_tiles, parts,
                processors, config.BLOCK_LD,
            )  # fmt: skip
        elif parts > 1:
            total = sum_parts(sums, out.scores, first, part.count, d.count, queries * part.count, parts)
    if not whole or q.mask is not None or d.mask is not None or d.decoder is not None:
        return None
    launched = HopperLaunch(kernel, programs, describe, without(arguments[1:], q.scales), lost, moved)
    return after_encoding(InParts(launched, sums.numel(), total) if parts > 1 else launched, q, encode)


def _query_tiles(
    q: Side, q_rows: Tensor | None, q_kept: Tensor | None, first_tile: int, tiles: int, parts: int, block: int,
    slices: int, BLOCK_D: int, precision: str,
) -> QueryTiles:  # fmt: skip
    """`tiles` query tiles from one on, to be laid out by slices of BLOCK_D columns."""
    halves = {"native": 0, "f16": 1, "f16x3": 2}[precision]
    arguments = (
        q.starts, q.ends, q_rows, q_kept, first_tile, q.count, q.length, q.rows, q.data.shape[-1], parts,
        block.bit_length() - 1, q.item, q.row, q.col, q.consecutive, BLOCK_D,
    )  # fmt: skip
    box, kind = [128, BLOCK_D], gl.float16 if halves else GLUON[q.data.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(box, kind)
    return QueryTiles(arguments, tiles, slices, box, layout, halves)


def score_lost(
    q: Side, d: Side, out: Outputs, target: Tensor, rows: Tensor | None, kept: Tensor | None, first: int, columns: int,
    BLOCK_LQ: int, parts: int, precision: str, masked_zero: bool, processors: int, per_query: int,
) -> Launch:  # fmt: skip
    """Scores again what is lost of `columns` documents' scores in `target`, made by tiles of BLOCK_LQ query rows,
    `parts` of a query; ends at once where nothing is."""
    config = forward_config(4, q.data.shape[-1], BLOCK_LQ, 1, d.length, d.count, out.winners is not None, (9, 0))
    block, _, tiles = tiled(q.length, q.count, BLOCK_LQ)
    # what is lost may be everything: enough programs to keep the card busy
    lanes = max(1, min(columns, -(-4 * processors // tiles)))
    if per_query:  # a program has one query
        block, tiles, lanes = BLOCK_LQ, parts, columns
    return launch(
        q, d, out, target, rows, kept, first, columns, columns, lanes, tiles, parts, block, precision, config,
        per_query=per_query, masked_zero=masked_zero, lost=True,
    )  # fmt: skip


def factors_of(d: Side, rows: int, BLOCK_LD: int) -> TensorDescriptor | None:
    """The factors of documents' tokens as the copy engine brings them beside a tile."""
    if d.factors is None:
        return None
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK_LD], gl.int16)
    return TensorDescriptor(d.factors, [rows], [1], [BLOCK_LD], layout)


def documents_from(d: Side, first: int, count: int) -> Side:
    """Some of the documents, padded ones with rows and mask counted from the first of them."""
    d = d._replace(count=count, scales=rows_from(d.scales, first))
    if d.starts is not None and d.ends is not None:
        return d._replace(starts=d.starts[first : first + count], ends=d.ends[first : first + count])
    mask = None if d.mask is None else d.mask[first : first + count]
    row = first * (d.item // d.row)
    decoder = None if d.decoder is None else d.decoder.begin(row)
    return d._replace(data=d.data[first : first + count], mask=mask, factors=rows_from(d.factors, row), decoder=decoder)


def rows_from(table: Tensor | None, first: int) -> Tensor | None:
    """The rows of a table from one on."""
    return None if table is None else table[first:]
