"""Launch of the Hopper forward for few query rows."""

from __future__ import annotations

from .codes import after_encoding, encoded
from .configs import FewConfig, power_of_two
from .gluon_names import TensorDescriptor, gl
from .hopper_decoded import _hopper_few_decoded_kernel, decoded_tiles
from .hopper_few import _hopper_few_kernel
from .hopper_launch import GLUON, HopperLaunch, factors_of, score_lost
from .launches import Repeatable, without
from .queries import kept_rows
from .scores_launch import Outputs
from .sides import Side
from .spans import places


def hopper_few(
    q: Side, d: Side, out: Outputs, d_rows: int, d_item: int, processors: int, precision: str, masked_zero: bool,
    config: FewConfig, per_query: int = 0,
) -> Repeatable | None:  # fmt: skip
    """As `hopper_scores`, for queries that together make one tile of `config.BLOCK_LQ` rows, or with documents of its
    own each one."""
    D = q.data.shape[-1]
    q_rows, q_kept = kept_rows(q)
    encode = None
    if d.scales is not None:
        q, encode = encoded(q, d.data.dtype)
    block = config.BLOCK_LQ if per_query else max(16, power_of_two(q.length))
    box = [config.BLOCK_LD, config.BLOCK_D]
    programs = (min(processors * config.programs, d.count), 1, 1)
    sides = (
        out.winners, out.maxima, q.starts, q.ends, q_rows, q_kept, *places(d, d_item, masked_zero),
        q.count, d.count, q.length,
        min(d.length, d_rows),  # 32 bits
        q.rows, d_rows, D, block.bit_length() - 1, q.item, q.row, q.col, d_item,
        0 if out.winners is None else out.winners.shape[1],
        q.consecutive, q.aligned, d.consecutive,
    )  # fmt: skip
    tiles = (config.BLOCK_LQ, *box, config.stages, per_query or None)
    options = {"num_warps": 4, "maxnreg": config.registers}
    if d.decoder is not None:
        codes, *beside = decoded_tiles(d, d_rows, box)
        _hopper_few_decoded_kernel[programs](
            codes, q.data, out.scores, *sides, *tiles, config.decoder_registers, *beside, **options
        )
        return None
    layout = gl.NVMMASharedLayout.get_default_for(box, GLUON[d.data.dtype])
    describe = ([d_rows, D], [d.row, 1], box, layout)
    arguments = (
        *sides, 2 if precision == "f16x3" else 1, *tiles, q.scales, d.scales,
        factors_of(d, d_rows, config.BLOCK_LD),
    )  # fmt: skip
    kernel = _hopper_few_kernel[programs](
        TensorDescriptor(d.data, *describe), q.data, out.scores, *arguments, **options
    )
    lost = None
    if precision != "native":
        lost = score_lost(
            q, d, out, out.scores, q_rows, q_kept, 0, d.count, config.BLOCK_LQ, 1, precision, masked_zero, processors,
            per_query,
        )  # fmt: skip
    if q.mask is not None or d.mask is not None:
        return None
    return after_encoding(HopperLaunch(kernel, programs, describe, without(arguments[1:], q.scales), lost), q, encode)
