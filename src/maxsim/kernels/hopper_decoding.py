"""Tiles of codes that are no numbers, decoded by Hopper warpgroups on their way to the ring that another multiplies."""

from __future__ import annotations

from . import decoding
from .gluon_names import fence_async_shared, gl, gluon, mbarrier, thread_barrier, tma_load
from .hopper_stream import each_tile

RAW = gl.constexpr(2)  # tiles of codes on their way to a warpgroup

reversed_bits = gluon.jit(decoding.reversed_bits.fn)


@gluon.constexpr_function
def _rows(columns):
    """A thread's share of a tile of tokens: eight columns of a row at once, which several neighbours have together."""
    across = 32 if columns >= 256 else columns // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.constexpr_function
def _bytes(columns, bits):
    """The same where bytes [rows, columns · bits / 8] turn into columns."""
    across = 32 if columns >= 256 else columns // 8
    return gl.BlockedLayout([1, bits, 8 // bits], [32 // across, across, 1], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _piece(rows, columns, halves):
    """Rows decoded at once, for which registers suffice."""
    most = (8192 if halves and rows == 64 else 4096) // columns
    return rows if most > rows else most


@gluon.constexpr_function
def _weights_text(bits, add):
    """Assembly for the weights of eight columns' buckets, or (add) eight float16 numbers plus those. Operands: results
    two by two; where they are added to anything numbers; codes, a byte a column; for each column low bytes of the
    weights, and high bytes, in the order of buckets with reversed bits, of which `prmt` picks four at once."""
    codes = 8 if add else 4
    text = "{ .reg .b32 u, l, h;"
    for four in range(2):
        if bits == 2:  # nibbles: the buckets of columns 2, 0, 3, 1
            text += f" mul.lo.u32 u, ${codes + 4 * four}, 1025; shr.u32 u, u, 2; and.b32 u, u, 0x3333;"
            picks = (0x7351, 0x6240)
        else:  # of columns 0 to 3
            text += f" {'and.b32' if four else 'shr.u32'} u, ${codes}, {15 if four else 4};"
            text += " mul.lo.u32 u, u, 0x10842; shr.u32 u, u, 4; and.b32 u, u, 0x1111;"
            picks = (0x5140, 0x7362)
        text += f" prmt.b32 l, ${codes + 8}, 0, u; prmt.b32 h, ${codes + 16}, 0, u;"
        for pair in range(2):
            place = 2 * four + pair
            text += f" prmt.b32 {'u' if add else f'${place}'}, l, h, {picks[pair]};"
            if add:
                text += f" add.rn.f16x2 ${place}, ${4 + place}, u;"
    return text + " }"


@gluon.jit
def _spread(raw, COLUMNS: gl.constexpr):
    """Bytes [rows, columns · bits / 8] → of each column its byte."""
    BITS: gl.constexpr = raw.shape[1] * 8 // COLUMNS
    by_byte: gl.constexpr = _bytes(COLUMNS, BITS)
    code = raw.load(gl.SliceLayout(2, by_byte)).to(gl.int32)
    return code[:, :, None] + gl.zeros([1, 1, 8 // BITS], gl.int32, by_byte)


@gluon.jit
def _together(x, COLUMNS: gl.constexpr):
    return gl.convert_layout(gl.reshape(x, [x.shape[0], COLUMNS]), _rows(COLUMNS), assert_trivial=True)


@gluon.jit
def _weights(raw, weights, COLUMNS: gl.constexpr):
    """The weights of the buckets that a tile of bytes names."""
    BITS: gl.constexpr = raw.shape[1] * 8 // COLUMNS
    code = _spread(raw, COLUMNS)
    by_byte: gl.constexpr = code.type.layout
    place = gl.arange(0, 8 // BITS, layout=gl.SliceLayout(0, gl.SliceLayout(1, by_byte)))[None, None, :] * BITS
    if BITS <= 2:  # a bucket's lowest bit comes first
        low = ((code >> (7 - place)) & 1) != 0
        weight = gl.where(low, gl.load(weights + 1), gl.load(weights))
        if BITS == 2:
            high = ((code >> (6 - place)) & 1) != 0
            weight = gl.where(high, gl.where(low, gl.load(weights + 3), gl.load(weights + 2)), weight)
    else:
        weight = gl.load(weights + ((reversed_bits(code) >> place) & ((1 << BITS) - 1)))
    return _together(weight, COLUMNS)


@gluon.jit
def _residual(raw, ids, inverses, table, weights, t0, t1, D, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile of tokens: centroids plus the weights of buckets, times a number a row where there is one. D: how many
    columns there are, None where all."""
    BITS: gl.constexpr = raw.shape[1] * 8 // COLUMNS
    layout: gl.constexpr = _rows(COLUMNS)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    if D is None:
        x = gl.load(table + (ids.load(by_row) * COLUMNS)[:, None] + d[None, :])
    else:
        there = (d // 8 < D // 8)[None, :]
        x = gl.load(table + (ids.load(by_row) * (D // 8) * 8)[:, None] + d[None, :], mask=there, other=0.0)
    if t0 is not None:
        code = _together(_spread(raw, COLUMNS), COLUMNS)
        if inverses is None and dtype == gl.float16:  # whose sum rounds as float32's, rounded to it, does
            x = gl.inline_asm_elementwise(
                _weights_text(BITS, True), "=&r,=&r,=&r,=&r" + ",r" * 28, [x, code, t0, t1], gl.float16, True, 8
            )  # fmt: skip
        else:
            weight = gl.inline_asm_elementwise(
                _weights_text(BITS, False), "=&r,=&r,=&r,=&r" + ",r" * 24, [code, t0, t1], gl.float16, True, 8
            )  # fmt: skip
            x = x.to(gl.float32) + weight.to(gl.float32)
    else:
        x = x.to(gl.float32) + _weights(raw, weights, COLUMNS)
    if inverses is not None:
        x *= inverses.load(by_row)[:, None]
    if D is not None:
        x = gl.where(there, x, 0.0)
    return x.to(dtype)


@gluon.jit
def _decode(
    step, row, TURNS: gl.constexpr, mine, slot, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, d_smem, full,
    empty, table, weights, t0, t1, D, first, STAGES: gl.constexpr, MORE: gl.constexpr = True,
):  # fmt: skip
    """Decodes the tile that was asked for RAW steps ago, and if there are MORE asks for another in its place. TURNS
    warpgroups take turns, of which this is `mine`: steps are its own."""
    COLUMNS: gl.constexpr = d_smem.shape[2]
    HALVES: gl.constexpr = t0 is not None and inverses is None and d_smem.dtype == gl.float16
    PIECE: gl.constexpr = _piece(raw.shape[1], COLUMNS, HALVES)
    before = step - RAW
    whole = before * TURNS + mine
    stage = first + whole % STAGES
    place = slot * RAW + step % RAW
    if before >= 0:
        mbarrier.wait(raw_full.index(place), (before // RAW) & 1)
        for j in gl.static_range(raw.shape[1] // PIECE):
            own = None
            if inverses is not None:
                own = inverses.index(place).slice(j * PIECE, PIECE, 0)
            x = _residual(
                raw.index(place).slice(j * PIECE, PIECE, 0), ids.index(place).slice(j * PIECE, PIECE, 0), own, table,
                weights, t0, t1, D, d_smem.dtype, COLUMNS,
            )  # fmt: skip
            if j == 0:
                mbarrier.wait(empty.index(stage), ((whole // STAGES) & 1) ^ 1)
            d_smem.index(stage).slice(j * PIECE, PIECE, 0).store(x)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
    if MORE:
        BYTES: gl.constexpr = c_desc.block_type.nbytes + i_desc.block_type.nbytes
        mbarrier.expect(raw_full.index(place), BYTES + (0 if v_desc is None else v_desc.block_type.nbytes))
        tma_load(c_desc, [row, 0], raw_full.index(place), raw.index(place))
        tma_load(i_desc, [row], raw_full.index(place), ids.index(place))
        if v_desc is not None:
            tma_load(v_desc, [row], raw_full.index(place), inverses.index(place))


@gluon.jit
def _in_turn(
    step, row, tile, TURNS: gl.constexpr, mine, slot, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, d_smem,
    full, empty, table, weights, t0, t1, D, first, STAGES: gl.constexpr,
):  # fmt: skip
    if step % TURNS == mine:
        _decode(
            step // TURNS, row, TURNS, mine, slot, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, d_smem, full,
            empty, table, weights, t0, t1, D, first, STAGES,
        )  # fmt: skip


@gluon.jit
def _byte_table(weights, BITS: gl.constexpr):
    """Low and high bytes of float16 weights, in the order of buckets whose bits are reversed."""
    low = 0
    high = 0
    for n in gl.static_range(1 << BITS):
        bits = (
            gl.load(weights + (n if BITS == 1 else (n >> 1) | ((n & 1) << 1))).to(gl.int16, bitcast=True).to(gl.int32)
        )
        low |= (bits & 255) << (8 * n)
        high |= ((bits >> 8) & 255) << (8 * n)
    return low, high


@gluon.jit
def decode_partition(
    stream, streams, q_tiles, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, starts, ends, d_bits, d_smem,
    full, empty, table, weights, ND, LD, TD, D, d_item, BY_TOKENS: gl.constexpr, BLOCK_LD: gl.constexpr, K,
    EVEN_D: gl.constexpr, TURNS: gl.constexpr, MINE: gl.constexpr, SLOT: gl.constexpr, FIRST: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr = False,
):  # fmt: skip
    """A warpgroup: brings every TURNS-th of a stream's tiles of codes and puts what they stand for into its ring, which
    begins at FIRST."""
    BITS: gl.constexpr = raw.shape[2] * 8 // d_smem.shape[2]
    HALVES: gl.constexpr = (
        BITS <= 2
        and inverses is None
        and weights.dtype.element_ty == gl.float16
        and table.dtype.element_ty == gl.float16
        and d_smem.dtype == gl.float16
    )
    if HALVES:
        t0, t1 = _byte_table(weights, BITS)
    else:
        t0: gl.constexpr = None  # type: ignore[no-redef]
        t1: gl.constexpr = None  # type: ignore[no-redef]
    turn = stream * 0 + MINE
    if EVEN_D:
        columns: gl.constexpr = None
    else:
        columns = D
    places = (
        TURNS, turn, stream * 0 + SLOT, c_desc, i_desc, v_desc, raw, ids, inverses, raw_full, d_smem,
        full, empty, table, weights, t0, t1, columns, stream * 0 + FIRST, STAGES,
    )  # fmt: skip
    step = each_tile(
        stream, streams, q_tiles, starts, ends, d_bits, ND, LD, TD, d_item, BY_TOKENS, BLOCK_LD, 4,
        _in_turn, places, SPLIT, K, True,
    )  # fmt: skip
    mine = (step - turn + TURNS - 1) // TURNS
    for i in range(RAW):
        _decode(mine + i, 0, *places, MORE=False)
