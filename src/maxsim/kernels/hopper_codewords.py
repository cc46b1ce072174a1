"""Codewords of `pq` documents, eight dimensions each, straight into the registers that multiply them.

A row of an 8x8 matrix, as the tensor cores take it, is 16 bytes, and a warp may read it from any address in shared
memory (`ldmatrix`): so it may be a codeword. Eight codewords that are read at once should lie in different banks; of
eight tokens, whose codes are anything, they do where each token is read in an order of its own, since the codewords of
a part lie in banks of its own. What a thread has read is then put into the tokens' order by selections.
"""

from __future__ import annotations

from .gluon_names import gl, gluon, thread_barrier

WORDS = gl.constexpr(256)
WIDTH = gl.constexpr(128)  # of tokens: 16 parts
PATTERN = gl.constexpr(0x5BD1)
# [64, 2]: which thread reads the odd or even parts of which token
READERS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [0, 1]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 2],
    )
)
# [64, 4]: the codes of that token
CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [0, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)


@gluon.constexpr_function
def _read():
    """32 registers of codewords, of each of eight pairs of parts what is beside: tokens 0 to 7, 8 to 15, twice.

    $32, $34: two words of codes in the order they are read in; $36: where the part read first lies in a row of the
    table; $38: where that begins; $40: which token's row of a matrix this thread multiplies; $41: 1.
    """
    lines = [".reg .b32 t;", ".reg .pred p<3>;", ".reg .b32 x<32>, y<32>;"]
    for j in range(8):
        lines += [
            f"xor.b32 t, $36, {j << 4};",
            f"prmt.b32 t, ${32 + j // 4 * 2}, t, {0x5504 | (j % 4) << 4};",  # the code times 256, plus that place
            "add.u32 t, t, $38;",
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {" + ", ".join(f"x{4 * j + i}" for i in range(4)) + "}, [t];",
        ]
    have, free = [f"x{n}" for n in range(32)], [f"y{n}" for n in range(32)]
    for bit in range(3):
        lines += [f"and.b32 t, $40, {1 << bit};", f"setp.ne.u32 p{bit}, t, 0;"]
        for n in range(32):
            if n & 4 << bit:
                continue
            other = n | 4 << bit
            lines.append(f"selp.b32 {free[n]}, {have[other]}, {have[n]}, p{bit};")
            # a product in place of a selection, which the units for sums take: 103 us with selections alone, 92 so
            lines.append(f"@p{bit} mad.lo.u32 {have[other]}, {have[n]}, $41, 0;")
            have[n], free[n] = free[n], have[n]
    lines += [f"mov.b32 ${n}, {have[n]};" for n in range(32)]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _each(dtype, count):
    return (dtype,) * count


READ = gl.constexpr(",".join(["=r"] * 32 + ["r"] * 10))


@gluon.jit
def _picked(a, b, bytes):
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, bytes], gl.int32, True, 1)


@gluon.jit
def _twice(x):
    return gl.join(x, x)


@gluon.jit
def _halved(x, n: gl.constexpr):
    """A tuple of n tensors as half as many, each with one dimension more."""
    out = ()
    for k in gl.static_range(n // 2):
        out = out + (gl.join(x[2 * k], x[2 * k + 1]),)  # type: ignore[assignment]
    return out


@gluon.jit
def tokens_of(codes, address, one, layout: gl.constexpr, dtype: gl.constexpr):
    """Tokens [64, 128] as an operand in registers, from a tile of codes in shared memory, int32 [64, 4], and where the
    table lies. one: the number 1, of which the compiler must not know that it is."""
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    low, high = gl.split(gl.permute(gl.reshape(codes.load(CODES), [64, 2, 2]), (0, 2, 1)))
    word0, word1 = gl.split(low)
    word2, word3 = gl.split(high)
    by_token: gl.constexpr = gl.SliceLayout(1, READERS)
    odd = gl.arange(0, 2, layout=gl.SliceLayout(0, READERS))[None, :]
    token = gl.arange(0, 64, layout=by_token)[:, None]
    turn = token & 7
    none = (token + odd) * 0
    every_other = gl.where(odd != 0, 0x7531, 0x6420) + none
    word0 = gl.convert_layout(word0, by_token, assert_trivial=True)[:, None] + none
    word1 = gl.convert_layout(word1, by_token, assert_trivial=True)[:, None] + none
    word2 = gl.convert_layout(word2, by_token, assert_trivial=True)[:, None] + none
    word3 = gl.convert_layout(word3, by_token, assert_trivial=True)[:, None] + none
    first = _picked(word0, word1, every_other)
    last = _picked(word2, word3, every_other)
    order = turn + ((turn ^ 1) << 4) + ((turn ^ 2) << 8) + ((turn ^ 3) << 12) + none
    # row 4 l + k of a matrix is in lanes of number l
    multiplied = ((token & 12) >> 2) + 4 * odd
    x = gl.inline_asm_elementwise(
        _read(), READ,
        [
            _twice(_picked(first, last, order)), _twice(_picked(first, last, order ^ 0x4444)),
            _twice((turn << 4) + (odd << 7)), _twice(none + address), gl.join(multiplied, none + one),
        ],
        _each(dtype, 32), False, 2,
    )  # fmt: skip
    x = _halved(_halved(_halved(_halved(x, 32), 16), 8), 4)
    x = gl.join(x[0], x[1])
    # warp, row of a lane 1, 2 and pair of columns, row 4; then of a register: column, row 8, column 8, part 2, 4, 8
    x = gl.reshape(x, [4, 4, 4, 2, 2, 2, 2, 2, 2, 2])
    x = gl.permute(x, (0, 5, 3, 1, 9, 8, 7, 6, 2, 4))
    return gl.convert_layout(gl.reshape(x, [64, 128]), operand, assert_trivial=True)


@gluon.jit
def _four_words(address):
    """Of 16 bytes of shared memory, the words."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address], _each(gl.int32, 4), False, 1
    )


@gluon.jit
def _own(name: gl.constexpr, like):
    return gl.inline_asm_elementwise("mov.u32 $0, " + name + ";", "=r,r", [like], gl.int32, True, 1)


@gluon.jit
def gathered(codes, address, dtype: gl.constexpr):
    """Tokens [rows, 128], from a tile of codes in shared memory, uint8 [rows, 16], and where the table lies."""
    by_part: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 16, 1], [4, 1, 1], [2, 1, 0])
    code = codes.load(gl.SliceLayout(2, by_part)).to(gl.int32)
    part = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_part)))
    at = ((code << 8) + (part << 4)[None, :] + address)[:, :, None] + gl.zeros([1, 1, 8], gl.int32, by_part)
    x = gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r" + ",r" * 8, [at], _each(dtype, 1), False, 8
    )
    return gl.reshape(x[0], [codes.shape[0], WIDTH])


@gluon.jit
def keep_table(table_ptr, words, table, APART: gl.constexpr):
    """Codewords into shared memory, [256, 128]: in a row those of a code, APART of even parts before odd ones. Returns
    where they begin, which no name in the language says: it is found by what was written there."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, by_row))
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, by_row))
    pattern = (PATTERN + d)[None, :] + row[:, None] * 0
    table.slice(0, 16, 0).store(pattern.to(gl.int16).to(table.dtype, bitcast=True))
    thread_barrier()
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    start = _own("global_smem", thread)
    size = _own("%dynamic_smem_size", thread)
    most = gl.max(size, 0) - WORDS * WIDTH * 2
    found = thread * 0 + 0x7FFFFFFF
    for at in range(0, most + 1, 16 * 128):
        there = at + thread * 16 <= most
        address = start + gl.where(there, at + thread * 16, 0)
        same = there
        w0, w1, w2, w3 = _four_words(address)
        same &= (w0 == _pair(0)) & (w1 == _pair(2)) & (w2 == _pair(4)) & (w3 == _pair(6))
        found = gl.minimum(found, gl.where(same, address, 0x7FFFFFFF))
    found = gl.min(found, 0)
    thread_barrier()
    place = d // 8
    part = (place & 7) * 2 + (place >> 3) if APART else place
    for first in gl.static_range(0, WORDS, 64):
        code = first + gl.arange(0, 64, layout=gl.SliceLayout(1, by_row))
        at = ((part * words)[None, :] + gl.minimum(code, words - 1)[:, None]) * 8 + (d % 8)[None, :]
        table.slice(first, 64, 0).store(gl.load(table_ptr + at).to(table.dtype))
    return found


@gluon.constexpr_function
def _pair(n):
    return PATTERN.value + n | (PATTERN.value + n + 1) << 16
