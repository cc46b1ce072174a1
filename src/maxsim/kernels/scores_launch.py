"""Launches of the portable forward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .codes import after_encoding, encoded
from .configs import Config
from .decoding import NOTHING
from .launches import InParts, Launch, Repeatable, without
from .lost import LOST_DOCUMENTS
from .queries import kept_rows, sum_parts, tiled
from .scores import _scores_kernel
from .sides import Side


class Outputs(NamedTuple):
    scores: Tensor  # [NQ, ND] or [P], float32
    winners: Tensor | None  # filled with −1 where no kept token writes
    maxima: Tensor | None  # filled with 0 there


MAX_PROGRAMS = 2**31 - 1
PARTS_BYTES = 16 << 20  # sums of the blocks of long queries, held at once


def scores(
    q: Side, d: Side, out: Outputs, pairs: Tensor | None, per_query: int, masked_zero: bool, normalize: bool,
    precision: str, config: Config,
) -> Repeatable | None:  # fmt: skip
    """Writes `out` for every query and document (`pairs` None and `per_query` 0), or for pairs.

    precision: as in `similarities`; "native" for all dtypes but float32. normalize: of documents that are codes, those
    are of unit vectors already. Returns what was launched where it was for all at once, to be repeated on other tensors
    of the same shapes, strides and alignment.
    """
    grid = pairs is None and not per_query
    rows, kept = kept_rows(q)
    encode = None
    if d.scales is not None:
        (q, encode), normalize = encoded(q, d.data.dtype, normalize), False
    items = d.count if pairs is None else pairs.shape[0]
    queries = q.count if grid else 1
    block, parts, tiles = tiled(q.length, queries, config.BLOCK_LQ)
    step = min(items, MAX_PROGRAMS // tiles)
    if parts > 1:
        step = max(1, min(step, PARTS_BYTES // (4 * queries * parts)))
    docs = config.documents if grid else 1
    sums = out.scores if parts == 1 else out.scores.new_empty(queries * step * parts)
    for first in range(0, items, step):
        columns = min(step, items - first)
        target = sums if parts > 1 else out.scores if first == 0 else out.scores[..., first:]
        launched = launch(
            q, d, out, target, rows, kept, first, columns, columns if parts > 1 else items, docs,
            tiles, parts, block, precision, config, pairs, per_query, masked_zero, normalize,
        )  # fmt: skip
        if parts > 1:
            total = sum_parts(sums, out.scores, first, columns, items, queries * columns, parts)
    if step < items:
        return None
    return after_encoding(InParts(launched, sums.numel(), total) if parts > 1 else launched, q, encode)


def launch(
    q: Side, d: Side, out: Outputs, target: Tensor, rows: Tensor | None, kept: Tensor | None, first: int, columns: int,
    items: int, docs: int, tiles: int, parts: int, block: int, precision: str, config: Config,
    pairs: Tensor | None = None, per_query: int = 0, masked_zero: bool = False, normalize: bool = False,
    lost: bool = False,
) -> Launch:  # fmt: skip
    """Scores `columns` documents or pairs from `first` on into `target`, whose rows are `items` long, `docs` a program.

    lost: only those again whose score there, made elsewhere, is lost, by as many programs as there are pairs of a query
    tile with one of `docs` documents.
    """
    D = q.data.shape[-1]
    grid = pairs is None and not per_query
    narrow = config.BLOCK_LD * d.row + D * d.col < 2**31  # offsets inside a tile fit 32 bits
    arguments = (
        out.winners, out.maxima, q.starts, q.ends, rows, kept, d.starts, d.ends, d.mask, q.scales, d.scales, d.factors,
        pairs, first, columns, docs, q.count, d.count, items, q.length, d.length, q.rows, d.rows,
        D, max(per_query, 1), tiles, parts, block.bit_length() - 1,
        q.item, q.row, q.col, d.per_group, d.group, d.item, d.row, d.col, d.mask_group, d.mask_item, d.mask_row,
        0 if out.winners is None else out.winners.shape[1],
        q.consecutive, grid, masked_zero, normalize, precision, config.BLOCK_LQ, config.BLOCK_LD, config.BLOCK_D,
        D % config.BLOCK_D == 0, D <= config.BLOCK_D, narrow, config.stages,
        config.BLOCK_LQ.bit_length() - 1, lost or docs > 1, LOST_DOCUMENTS if lost else 0,
        *(NOTHING if d.decoder is None else d.decoder.arguments),
    )  # fmt: skip
    blocks = (tiles * (docs if lost else -(-columns // docs)), 1, 1)
    kernel = _scores_kernel[blocks](q.data, d.data, target, *arguments, num_warps=config.num_warps)
    return Launch(kernel, blocks, without(arguments[1:], q.scales))
