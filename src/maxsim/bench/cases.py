"""What is measured: named problems and the suites they form. A name holds everything a record needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

DTYPES = ("float16", "bfloat16", "float32")

# Suffixes of a name, in the order in which they are written; a name with another order is understood too.
FLAGS = ("ragged", "masked", "winners", "pairs", "candidates", "views", "train")
CODECS = ("int8", "fp8", "residual2", "pq16")

_NAME = re.compile(r"(\d+)x(\d+)-(\d+)x(\d+)-d(\d+)-([a-z0-9]+)((?:-[a-z0-9]+)*)")


@dataclass(frozen=True)
class Case:
    """One problem: NQ queries of LQ tokens against ND documents of LD tokens, D wide.

    ragged: documents of lognormal lengths with mean LD, packed.
    masked: padded queries and documents with prefix masks; a length is uniform in 0.4..1 of LQ, 0.3..1 of LD.
    winners: which document token won for every query token, not only the scores.
    pairs: query i with document i only (NQ = ND).
    candidates: every query has its own ND documents.
    views: documents at random places of a resident buffer twice their size.
    train: scores, then the gradients of both sides for a given gradient of the scores.
    codec: how documents are stored ("int8", …; "residual2": 2 bits a dimension, "pq16": 16 bytes a token); None: as
        they are.
    """

    NQ: int
    LQ: int
    ND: int
    LD: int
    D: int
    dtype: str
    ragged: bool = False
    masked: bool = False
    winners: bool = False
    pairs: bool = False
    candidates: bool = False
    views: bool = False
    train: bool = False
    codec: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.codec is not None and self.codec not in CODECS:
            raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {self.codec!r}")
        if min(self.NQ, self.LQ, self.ND, self.LD, self.D) < 1:
            raise ValueError(f"every size must be at least 1, got {self.name}")
        if self.pairs and self.NQ != self.ND:
            raise ValueError(f"pairs need as many queries as documents, got {self.NQ} and {self.ND}")
        if self.ragged + self.pairs + self.candidates + self.views > 1:
            raise ValueError(f"only one of ragged, pairs, candidates and views can hold, got {self.name}")
        if self.masked and (self.ragged or self.views):
            raise ValueError(f"masked documents are padded, not ragged or views, got {self.name}")
        if self.codec and (self.candidates or self.views or self.train):
            raise ValueError(f"codes are measured on padded and ragged documents, and not trained, got {self.name}")
        if self.winners and self.train:
            raise ValueError(f"winners and train are measured apart, got {self.name}")

    @property
    def name(self) -> str:
        suffixes = [flag for flag in FLAGS if getattr(self, flag)] + [self.codec or ""]
        shape = f"{self.NQ}x{self.LQ}-{self.ND}x{self.LD}-d{self.D}-{self.dtype}"
        return "-".join([shape, *filter(None, suffixes)])

    @property
    def flop(self) -> float:
        """Floating-point operations of a forward, padding included."""
        return 2.0 * self.D * self.NQ * self.LQ * self.LD * (1 if self.pairs else self.ND)

    @property
    def plain(self) -> bool:
        """Padded documents that every query is scored with."""
        return not (self.ragged or self.pairs or self.candidates or self.views)


def parse(name: str) -> Case:
    """`Case` of a name such as `1x1024-5000x1024-d128-float16-winners`. ValueError for anything else."""
    found = _NAME.fullmatch(name)
    if not found:
        raise ValueError(f"a case is named NQxLQ-NDxLD-dD-dtype, then suffixes, got {name!r}")
    *sizes, dtype, rest = found.groups()
    suffixes = rest.split("-")[1:]
    flags = {suffix for suffix in suffixes if suffix in FLAGS}
    codecs = [suffix for suffix in suffixes if suffix in CODECS]
    unknown = [suffix for suffix in suffixes if suffix not in FLAGS and suffix not in CODECS]
    if unknown or len(suffixes) != len(flags) + len(codecs) or len(codecs) > 1:
        raise ValueError(f"suffixes are {', '.join(FLAGS + CODECS)}, each once and one codec at most, got {name!r}")
    NQ, LQ, ND, LD, D = map(int, sizes)
    present = {flag: flag in flags for flag in FLAGS}
    return Case(NQ, LQ, ND, LD, D, dtype, codec=codecs[0] if codecs else None, **present)


def described(queries: str, documents: str, width: int = 128, dtype: str = "float16", **flags: bool) -> Case:
    """`Case` of what a user has: `described("128x32", "10000x300", dtype="int8")`. A codec as dtype: documents as its
    codes, queries in float16. ValueError for sizes that are none, and as `Case`."""
    sizes: list[int] = []
    for name, given in (("queries", queries), ("documents", documents)):
        found = re.fullmatch(r"(\d+)x(\d+)", given)
        if not found:
            raise ValueError(f"{name} are given as COUNTxTOKENS, such as 128x32, got {given!r}")
        sizes += map(int, found.groups())
    if dtype not in DTYPES + CODECS:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES + CODECS)}, got {dtype!r}")
    codec = dtype if dtype in CODECS else None
    NQ, LQ, ND, LD = sizes
    return Case(NQ, LQ, ND, LD, width, "float16" if codec else dtype, codec=codec, **flags)


def _cases(names: str) -> tuple[Case, ...]:
    return tuple(parse(name) for name in names.split())


SUITES: dict[str, tuple[Case, ...]] = {
    # Every float row of the forward table; the shapes of Flash-MaxSim's paper first.
    "forward": _cases(
        """
        1x1024-5000x1024-d128-float16
        1x512-1000x1024-d128-float16
        1x128-1000x1024-d128-float16
        1x32-10000x300-d128-float16
        1x32-5000x1024-d128-float16
        1x32-1000x300-d128-float16
        1x32-100x300-d128-float16
        128x32-10000x300-d128-float16
        128x32-1000x300-d128-float16
        128x32-20000x97-d128-float16-ragged
        1x32-20000x97-d128-float16-ragged
        1x1024-20000x1024-d128-float16
        1x1024-500x1024-d128-float32
        1x32-5000x300-d128-float32
        1x1024-5000x1024-d128-float16-winners
        """
    ),
    # Shapes of users' own configurations.
    "users": _cases(
        """
        16x32-32x300-d128-bfloat16-candidates
        256x128-256x8192-d128-bfloat16
        128x256-1024x2048-d48-bfloat16
        1x32-16384x187-d128-float16-views
        128x50-128x1030-d128-bfloat16-masked
        128x50-128x1024-d320-bfloat16-masked
        128x50-128x1024-d128-bfloat16-masked
        128x50-128x1030-d320-bfloat16-masked
        128x32-128x662-d128-bfloat16-ragged
        128x32-128x662-d320-bfloat16-ragged
        64x768-64x30-d128-bfloat16-train
        1x4096-1000x1024-d128-float16
        1x32-1000x300-d640-float16
        1x32-1000x300-d1024-float16
        1x32-1000x300-d2560-float16
        64x32-64x300-d128-float16-pairs
        """
    ),
    "train": _cases(
        """
        128x32-256x300-d128-bfloat16-train
        64x32-64x1030-d128-bfloat16-train
        32x1024-32x1024-d128-bfloat16-train
        64x1024-64x1024-d128-bfloat16-train
        128x1024-128x1024-d128-bfloat16-train
        32x32-32x300-d128-bfloat16-candidates-train
        """
    ),
    "train-float32": _cases(
        """
        128x32-256x300-d128-float32-train
        64x32-64x1030-d128-float32-train
        32x1024-32x1024-d128-float32-train
        64x1024-64x1024-d128-float32-train
        128x1024-128x1024-d128-float32-train
        32x32-32x300-d128-float32-candidates-train
        """
    ),
    # Documents as codes, at both ends, and wide tokens as they are and as codes.
    "codes": _cases(
        """
        1x32-10000x300-d128-float16-int8
        1x1024-5000x1024-d128-float16-int8
        1x32-10000x300-d128-float16-fp8
        1x1024-5000x1024-d128-float16-fp8
        1x32-10000x300-d128-float16-residual2
        1x1024-5000x1024-d128-float16-residual2
        1x32-10000x300-d128-float16-pq16
        1x1024-5000x1024-d128-float16-pq16
        128x32-10000x300-d128-float16-int8
        1x32-20000x97-d128-float16-ragged-int8
        """
    ),
    "wide": _cases(
        """
        1x32-5000x300-d256-float16
        1x32-4000x300-d320-float16
        1x32-4000x300-d384-float16
        1x32-4000x300-d768-float16
        1x32-2000x300-d1024-float16
        1x32-1000x300-d2560-float16
        1x32-500x300-d4096-float16
        1x32-8000x300-d320-float16-int8
        1x32-4000x300-d768-float16-int8
        1x32-4000x300-d1024-float16-int8
        1x32-2000x300-d2560-float16-int8
        1x32-1000x300-d4096-float16-int8
        """
    ),
    # The smallest real call, and its steps: the host's path is the product there.
    "host": _cases("1x32-100x300-d128-float16 1x32-1000x300-d128-float16"),
    "cpu": _cases(
        """
        1x32-1000x300-d128-float32
        1x1024-100x1024-d128-float32
        1x32-200x1024-d128-float32
        1x32-3000x97-d128-float32-ragged
        """
    ),
}

# Every row of the training table, in bfloat16 and, as trainers pass them, in float32.
SUITES["training"] = (*SUITES["train"], *SUITES["train-float32"])
