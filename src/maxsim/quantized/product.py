"""Product codes (Jégou, Douze and Schmid, 2011): a token is cut in M equal parts, each one of at most 256 codewords of
its own, a byte a part. Queries stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from .gathering import gathered
from .kmeans import assign, kmeans

WORDS = 256
ITERATIONS = 12
POINTS = 256  # trained on, a codeword
NEAR = 2.0**-16  # of a part's norm: how much farther than the nearest a codeword may be that is as near


def check_parts(width: int, parts: int) -> int:
    """Raises ValueError where tokens cannot be cut so."""
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1 or width % parts:
        fit = [n for n in range(1, width + 1) if width % n == 0]
        shown = ", ".join(map(str, fit if len(fit) <= 16 else [*fit[:15], "..."]))
        raise ValueError(f"tokens of width {width} cannot be cut in {parts!r} equal parts: take one of {shown}")
    return parts


def train(sample: Tensor, parts: int, seed: int) -> Tensor:
    """float32 `[n, D]` → codewords `[M, K, D / M]`, K <= 256."""
    cut = sample[: POINTS * WORDS].view(-1, parts, sample.shape[1] // parts)
    return torch.stack([kmeans(cut[:, m].contiguous(), WORDS, ITERATIONS, seed + m) for m in range(parts)])


def encode(tokens: Tensor, books: Tensor) -> Tensor:
    """float32 `[m, D]` → uint8 `[m, M]`."""
    cut = tokens.view(len(tokens), len(books), -1)
    return torch.stack([assign(cut[:, m], book)[0].to(torch.uint8) for m, book in enumerate(books)], 1)


def agree(tokens: Tensor, codes: Tensor, books: Tensor) -> Tensor:
    """Whether codes are those of tokens, bool `[m]`: no codeword is nearer, but for float32's rounding."""
    same = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    parts = tokens.view(len(tokens), len(books), -1).unbind(1)
    for part, code, book in zip(parts, codes.unbind(1), books, strict=True):
        nearest, _ = assign(part, book)
        own, least = ((part - book[each.long()]).double().norm(dim=1) for each in (code, nearest))
        same &= own <= least + NEAR * part.double().norm(dim=1)
    return same


def decode(codes: Tensor, books: Tensor) -> Tensor:
    """uint8 `[m, M]` → float32 `[m, D]`."""
    M, K, d = books.shape
    word = codes.int() + torch.arange(0, M * K, K, dtype=torch.int32, device=codes.device)
    return gathered(books.view(M * K, d), word.view(-1)).view(len(codes), M * d)
