"""The warp of a Hopper kernel that brings tiles of document tokens, by the copy engine, into a ring in shared memory,
for the warpgroups that multiply."""

from __future__ import annotations

from .gluon_names import gl, gluon, mbarrier, tma_load
from .hopper_stream import cut, each_tile, tile_from


@gluon.jit
def _begins_early(streams, starts, d_bits, ND):
    """Whether `begin` asks for the first tiles: where they are known at once, and every stream has one."""
    if starts is None and d_bits is None:
        return streams <= ND
    else:
        return False


@gluon.jit
def _ask(row, d_desc, d_smem, f_desc, f_smem, full, stage):
    """Asks for a tile, and the factors of its tokens where there are any."""
    mbarrier.expect(full.index(stage), d_desc.block_type.nbytes + (0 if f_desc is None else f_desc.block_type.nbytes))
    tma_load(d_desc, [row, 0], full.index(stage), d_smem.index(stage))
    if f_desc is not None:
        tma_load(f_desc, [row], full.index(stage), f_smem.index(stage))


@gluon.jit
def begin(
    stream, streams, d_desc, d_smem, f_desc, f_smem, full, starts, d_bits, ND, TD, d_item, FIRST: gl.constexpr = 0
):  # fmt: skip
    """Asks for the first tile of a stream of one query tile, before there are partitions, which take a microsecond."""
    if _begins_early(streams, starts, d_bits, ND):
        doc = cut(stream, streams, 1, ND, TD, starts, False, 4).to(gl.int32)
        _ask(tile_from(doc * d_item, f_desc is not None), d_desc, d_smem, f_desc, f_smem, full, FIRST)


@gluon.jit
def _bring(
    step, row, tile, d_desc, d_smem, f_desc, f_smem, full, empty, begun, FIRST: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Asks for tile number `step` of a stream as soon as its place, in the ring that begins at FIRST, is free. begun:
    `begin` has asked for tile 0."""
    stage = FIRST + step % STAGES
    if (step > 0) | (not begun):
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        _ask(row, d_desc, d_smem, f_desc, f_smem, full, stage)


@gluon.jit
def load_partition(
    stream, given, RING: gl.constexpr, BY_TOKENS: gl.constexpr, PAIRED: gl.constexpr, BLOCK_LD: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr = False, EARLY: gl.constexpr = False,
):  # fmt: skip
    """One warp: brings the tiles of a stream into its ring. PAIRED: two streams' warps have one ring, which the first
    fills. EARLY: `begin` was called."""
    streams, q_tiles, d_desc, starts, ends, d_bits, d_smem, full, empty, ND, LD, TD, d_item, K, f_desc, f_smem = given
    if PAIRED and RING == 1:
        return
    begun = False
    if EARLY:
        begun = _begins_early(streams, starts, d_bits, ND)
    each_tile(
        stream, streams, q_tiles, starts, ends, d_bits, ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, 1,
        _bring, (d_desc, d_smem, f_desc, f_smem, full, empty, begun, RING * STAGES, STAGES), SPLIT, K,
        f_desc is not None,
    )  # fmt: skip
