"""A matrix product whose bits do not depend on its shape.

Owns: similarities of a block of document tokens with a block of query tokens, `[m, D] x [D, n] -> [m, n]`, float32 or
float64.
Exactness: each similarity is accumulated over D in the order the BLAS takes for that shape and that place in it.
Whether shapes get one order is asked once per dtype and width, by comparing bits, never times: first any shape used
here (`plain`: float32 in MKL), else multiples of whole register tiles (`padded`: float64 in MKL), else one shape for
everything (`tiled`). Call it where PyTorch runs one thread: a threaded product is cut in shapes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

LEAST = 64  # tokens of the smallest product: below, libraries turn to matrix-vector code with another order
ROWS = 32  # query tokens come in multiples of this
WIDEST = 256  # query tokens of the largest product
TILE = 192, 48  # tokens, query tokens: multiples of every register tile in use (4, 6, 8, 12, 16, 24, 48 rows)

# tokens, query tokens and where each begins: both ends of what is asked for here and odd sizes between
_SHAPES = (
    (64, 32, 3, 5),
    (64, 256, 77, 32),
    (65, 32, 0, 3),
    (97, 96, 501, 160),
    (128, 64, 33, 0),
    (301, 224, 3, 37),
    (906, 32, 117, 101),
    (1023, 256, 0, 0),
    (1024, 64, 128, 224),
)
_TILE_SHAPES = ((192, 48, 3, 5), (192, 240, 77, 32), (384, 48, 5, 100), (768, 96, 301, 37), (1152, 240, 0, 48))

Multiply = Callable[[Tensor, Tensor, Tensor], None]


def product(dtype: torch.dtype, width: int) -> Multiply:
    """→ multiply(tokens, queries, out): `tokens` `[m, width]`, m >= LEAST; `queries` `[width, n]`, the transpose of
    contiguous rows, n a multiple of ROWS up to WIDEST; `out` `[m, n]`."""
    return _product(dtype, width, torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


def plain(tokens: Tensor, queries: Tensor, out: Tensor) -> None:
    torch.mm(tokens, queries, out=out)


def padded(tokens: Tensor, queries: Tensor, out: Tensor) -> None:
    """In a shape of whole tiles, zeros beyond."""
    (m, D), n = tokens.shape, queries.shape[1]
    M, N = (-(-size // tile) * tile for size, tile in zip((m, n), TILE, strict=True))
    if m < M:
        tokens = torch.cat([tokens, tokens.new_zeros(M - m, D)])
    if n < N:
        queries = torch.cat([queries.T, queries.new_zeros(N - n, D)]).T
    out.copy_(torch.mm(tokens, queries)[:m, :n])


def tiled(tokens: Tensor, queries: Tensor, out: Tensor) -> None:
    """Tile by tile."""
    height, width = TILE
    for row in range(0, tokens.shape[0], height):
        for column in range(0, queries.shape[1], width):
            part = tokens[row : row + height], queries[:, column : column + width]
            padded(*part, out[row : row + height, column : column + width])


@cache
def _product(dtype: torch.dtype, width: int, precision: str) -> Multiply:
    # any numbers with all their bits, but not random ones: torch.func.vmap, in which this may run, forbids those
    numbers = torch.arange(1, (1152 + 288) * width + 1, dtype=torch.float64, device="cpu") * 0.6180339887498949
    tokens, queries = (numbers.frac() - 0.5).to(dtype).view(-1, width).split([1152, 288])
    whole = torch.mm(tokens, queries.T)

    def same(shapes: Iterable[tuple[int, int, int, int]]) -> bool:
        """Whether `m` tokens from `t` on with `n` query tokens from `q` on give what all together give."""
        return all(
            torch.equal(torch.mm(tokens[t : t + m], queries[q : q + n].T), whole[t : t + m, q : q + n])
            for m, n, t, q in shapes
        )

    if same(_SHAPES):
        return plain
    return padded if same(_TILE_SHAPES) else tiled
