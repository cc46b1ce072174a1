"""Tile choice as data: pure functions of dtype, width, lengths and shared memory. Measured on an H200 with
Triton 3.6."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Config:
    """Tiles of the portable forward."""

    BLOCK_LQ: int  # query rows of one product
    BLOCK_LD: int  # document rows
    BLOCK_D: int  # columns
    num_warps: int
    stages: int  # of the pipeline of loads
    documents: int = 1  # that a program takes in turn


@dataclass(frozen=True)
class HopperConfig:
    """Tiles of the Hopper forward for many query rows, 128 of which are a warpgroup's.

    Stages are tiles of documents on their way. Of tokens wider than BLOCK_D they are slices of as many columns, and
    slices of the queries come with them unless all of these, `resident`, stay in shared memory.
    """

    BLOCK_LD: int  # document rows of one product
    BLOCK_D: int  # columns
    stages: int  # to two warpgroups that share them
    unpaired_stages: int = 0  # to each of two that do not; of float32 to the only one
    own_stages: int = 0  # likewise where each query has documents of its own, so that query tiles differ
    BLOCK_RAW: int = 0  # rows of float32 documents that are converted at once
    raw_stages: int = 0  # to what converts or decodes, where two warpgroups share the result
    unpaired_raw_stages: int = 0  # and where they do not
    resident: int = 0  # slices of the queries


@dataclass(frozen=True)
class FewConfig:
    """Tiles of the Hopper forward for few query rows."""

    BLOCK_LQ: int  # query rows of one product
    BLOCK_LD: int  # document rows
    BLOCK_D: int  # columns
    stages: int  # tiles of documents on their way to a program
    programs: int  # that share a multiprocessor
    registers: int  # a thread, which let them
    decoder_registers: int = 0  # of the warpgroup that decodes


@dataclass(frozen=True)
class GradientConfig:
    """Tiles of the backward."""

    ROWS: int  # that a program owns
    ENTRIES: int  # terms of each row that are read at once
    BLOCK_D: int  # columns
    num_warps: int
    PIECE: int  # terms of a row after which it goes on in another program


# Columns of a slice of float32 tokens wider than 128, which decide their bits. `highest`, 1x1024 vs 500x1024 of width
# 256, with 64 and 32: Hopper's kernel 168 and 152 TFLOP/s, the portable one 45 and 37; 1x32 vs 3000x300 at `high` by
# the portable one 36 and 42.
WIDE_FLOAT32 = 64


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that one program may use on a card of this compute capability."""
    return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99) * 1024


def forward_config(
    itemsize: int, D: int, LQ: int, NQ: int, LD: int, ND: int, winners: bool, capability: tuple[int, int]
) -> Config:
    """The tiles for tokens of `itemsize` bytes and width D, when ND documents of about LD tokens meet NQ queries of up
    to LQ at once.

    The width of a product decides its bits, so it may depend on itemsize, D and precision alone; nothing else here
    changes a bit.
    """
    rows = NQ * max(16, power_of_two(LQ))
    BLOCK_LQ = 32 if rows <= 32 else 64 if rows <= 64 else 128
    BLOCK_D = max(32 if itemsize == 1 else 16, power_of_two(D))
    if itemsize == 4:
        if D > 128:
            stages = 3 if BLOCK_LQ < 128 or shared_bytes(capability) > 160 << 10 else 2
            return Config(BLOCK_LQ, 64, WIDE_FLOAT32, 8 if BLOCK_LQ == 128 else 4, stages)
        # float16 products of scaled halves, 1x1024 vs 500x1024: 131 TFLOP/s with 4 warps, 66 with 8; IEEE products 13.
        # On other cards than Hopper 4 warps spill (compiled, not run).
        warps = 8 if BLOCK_LQ == 128 and capability[0] != 9 else 4
        return Config(BLOCK_LQ, 64, BLOCK_D, warps, 3 if BLOCK_LQ == 32 and shared_bytes(capability) > 160 << 10 else 1)
    if D * itemsize > 256:
        return Config(BLOCK_LQ, 64, 128 // itemsize, 4, 4 if BLOCK_LQ == 32 else 3)
    if BLOCK_LQ == 128:
        # a program that takes several short documents loads its query tile once: 313 → 383 TFLOP/s at 128x32 vs
        # 2000x300
        documents = 1 if winners else _documents(LD, ND * -(-rows // 128), 2400)
        return Config(128, 64, BLOCK_D, 4, 3 if winners else 4, documents)
    documents = 1 if winners else _documents(LD, ND, 400)
    return Config(BLOCK_LQ, 64, BLOCK_D, 4, 2 if LD <= 128 else 3 if ND < 2048 else 4, documents)


def hopper_config(D: int) -> HopperConfig:
    """The tiles for float16 and bfloat16 tokens of width D."""
    # 128 document tokens, or the two operands cannot be read from shared memory as fast as they multiply
    if D <= 64:
        return HopperConfig(128, 64, 8, 5, 5)
    if D <= 128:
        return HopperConfig(128, 128, 4, 3, 2)
    if D <= 256:
        return HopperConfig(64, 256, 3, 2, 1)
    return HopperConfig(128, 64, 4, resident=5 if D <= 320 else 0)


def hopper_codes_config(D: int) -> HopperConfig:
    """`hopper_config` for codes of 8 bits."""
    if D <= 64:
        return HopperConfig(128, 64, 8, 8, 8)
    if D <= 128:
        return HopperConfig(128, 128, 8, 6, 5)
    if D <= 256:
        return HopperConfig(128, 256, 4, 2, 2)
    return HopperConfig(128, 128, 4, resident=-(-D // 128) if D <= 640 else 0)


def splits_documents(units: int, tokens: int, processors: int, config: HopperConfig) -> bool:
    """Whether programs share documents, not only deal them: where of `units`, pairs of query tiles with a document of
    about so many tokens, the last round leaves programs idle for longer than a second launch takes."""
    # 1x1024 vs 100x1024: 57 us, 61 dealt; vs 20x1024 29, 25 dealt; vs 198x1024, where no round is left, 93, 89 dealt
    return units > processors and (-units % processors) * tokens >= 4 * config.BLOCK_LD * processors


def few_config(D: int, rows: int, winners: bool) -> FewConfig | None:
    """The tiles for float16 and bfloat16 tokens of width D when all queries have `rows` rows together; None where the
    tiles of many rows serve."""
    if not 64 < D <= 128 or rows > (32 if winners else 64):
        return None
    if winners or rows > 32:  # with the registers of four programs a multiprocessor: 228 us for 147, 1x64 vs ragged
        return FewConfig(64 if rows > 32 else 32, 64, 128, 3, 3, 80)
    # more programs beat longer rings, 1x32 vs 20000 ragged documents of about 97 tokens: 119 us, 123 with 3 programs of
    # 4 tiles, 125 with 2 of 6
    return FewConfig(32, 64, 128, 2, 4, 64)


def few_codes_config(D: int, rows: int, winners: bool) -> FewConfig | None:
    """`few_config` for codes of 8 bits."""
    if not 64 < D <= 256 or rows > 64:
        return None
    BLOCK_D = 128 if D <= 128 else 256
    if winners or rows > 32:
        return FewConfig(64 if rows > 32 else 32, 64, BLOCK_D, 4, 3, 80)
    # 1x32 vs 10000x300: 91.4 us, 92.1 with 4 tiles of 64 rows, 94.2 to 96.6 with four programs, 95.4 with two
    return FewConfig(32, 128 if BLOCK_D == 128 else 64, BLOCK_D, 3, 3, 80)


def few_product_config(rows: int, winners: bool) -> FewConfig | None:
    """`few_config` for `pq` codes of 16 parts of 8 dimensions; the registers are the kernel's affair."""
    if rows > (32 if winners else 64):
        return None
    return FewConfig(32 if rows <= 32 else 64, 64, 128, 4, 1, 0)


def hopper_product_config() -> HopperConfig:
    """`hopper_config` for such codes, which are rows of `raw_stages` tiles."""
    return HopperConfig(128, 128, 3, raw_stages=1)


def few_decoded_config(D: int, bits: int, rows: int, winners: bool) -> FewConfig | None:
    """`few_config` for codes of so many bits a dimension that are decoded."""
    if D > 128 or rows > (32 if winners else 64):
        return None
    BLOCK_LQ, BLOCK_D = 32 if rows <= 32 else 64, 64 if D <= 64 else 128
    stages, programs, registers = (3, 3, 80) if winners or rows > 32 else (2, 4, 64)
    shared = 2 * BLOCK_D * (BLOCK_LQ + 64 * stages) + 128 * (BLOCK_D * bits // 8 + 8) + 1024
    programs = min(programs, (226 << 10) // shared)
    return FewConfig(BLOCK_LQ, 64, BLOCK_D, stages, programs, registers, 72 if registers == 80 else 64)


def hopper_decoded_config(D: int, bits: int) -> HopperConfig | None:
    """`hopper_config` for codes of so many bits a dimension, of which four tiles are on their way; None where they do
    not fit."""
    if D > 256:
        return None
    LD, BLOCK_D = (128, 64 if D <= 64 else 128) if D <= 128 else (64, 256)
    tile, query = 2 * LD * BLOCK_D, 256 * BLOCK_D
    room = (226 << 10) - 4 * LD * (BLOCK_D * bits // 8 + 8)
    paired, unpaired, own = (room - 2 * query) // tile, (room - query) // (2 * tile), (room - 2 * query) // (2 * tile)
    return HopperConfig(LD, BLOCK_D, min(paired, 8), min(unpaired, 5), min(own, 5)) if own > 0 else None


def few_float32_config(D: int, rows: int) -> FewConfig | None:
    """`few_config` for float32 tokens, with winners or without."""
    if not 64 < D <= 128 or rows > 64:
        return None
    # 1x32 vs 5000x300 at `highest`: 186 us, 187 with 3 tiles, 191 with one program of 5
    return FewConfig(32 if rows <= 32 else 64, 64, 128, 2, 2, 128)


def hopper_float32_config(D: int, precision: str, winners: bool) -> HopperConfig:
    """The tiles for float32 tokens of width D at a precision of `similarities`."""
    if D > 128:  # as measured, all rings of 2 or 3 raw tiles and of 2 to 4 stages take the same
        return HopperConfig(64, WIDE_FLOAT32, 2 if precision == "f16x3" else 4, BLOCK_RAW=64, raw_stages=3)
    BLOCK_D = 64 if D <= 64 else 128
    if precision == "f16x3":
        return HopperConfig(64, BLOCK_D, 4, 4, 4, 32, 1, 2)
    if winners:  # those of 128 columns do not fit the registers
        return HopperConfig(64, BLOCK_D, 4, 4, 4, 64, 2, 2)
    return HopperConfig(128, BLOCK_D, 3, 2, 2, 64, 1, 2)


def gradient_config(D: int, codec: int = 0) -> GradientConfig:
    """The tiles of the backward for tokens of width D. codec: of those decoded where they are read (`decoding.codec`),
    whose addresses take registers."""
    BLOCK_D = max(16, power_of_two(D))
    warps = 1 if BLOCK_D <= 256 else 4
    # us of queries and documents: 128x1024 vs 128x1024 588 and 1244 with 4 rows of 8 terms, 515 and 1188 with 2 of 16,
    # 754 and 1798 with 1 of 16; 64x32 vs 64x1030 13 and 47, 11 and 59, 12 and 95. Several warps wait for one another
    # (4 warps, 4 rows of 16: 5000 and 7850).
    terms = 32 if BLOCK_D <= 128 else max(1, 2048 * warps // BLOCK_D)
    # a piece's sum takes less than its entries do
    rows = 1 if codec < 0 else terms // (16 if codec else 8)
    return GradientConfig(max(1, rows), min(terms, 8), BLOCK_D, warps, max(1024, 8 * BLOCK_D))


def few_won_configs(D: int) -> tuple[GradientConfig, GradientConfig]:
    """`gradient_config` of queries, and of documents of which few tokens win, where one launch makes both: programs
    with few registers, so that many share a multiprocessor and wait at once."""
    # us of both, 32x32 vs 32x300 of each query's own: 52 in two launches with 4 rows of 8 terms, 42 in one, 33 with 1
    # of 8, 34 as here; 2x32 vs 1000x300: 143 with 1 of 8, 97 as here
    each = gradient_config(D)
    one = replace(each, ROWS=1)
    return one, replace(one, ROWS=2, ENTRIES=4) if each.BLOCK_D <= 128 else one


def _documents(LD: int, programs: int, tokens: int) -> int:
    """How many documents make about `tokens` tokens, at most 8, while `programs` of one document each still fill the
    card."""
    documents = 1
    while documents < 8 and LD * 2 * documents <= tokens and programs // (2 * documents) >= 2048:
        documents *= 2
    return documents
