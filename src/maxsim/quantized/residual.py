"""Codes of residuals, as ColBERTv2 and PLAID have them (Santhanam et al., arXiv 2112.01488, 2205.09707): the nearest
centroid, and of each dimension's distance from it the number of a bucket, in 1, 2, 4 or 8 bits.

Bits of a byte, as those libraries write them: the first dimension of a byte is in its highest bits, and a bucket's
number stands there with its lowest bit first. So their codes are read unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .gathering import gathered
from .kmeans import assign, kmeans

BITS = (1, 2, 4, 8)
ITERATIONS = 4  # as those libraries: buckets take what a better centroid would
POINTS = 64  # trained on, a centroid
HELD_OUT = 50_000  # tokens whose residuals make the buckets


def count_centroids(tokens: int) -> int:
    """As PLAID has them: 16 √tokens, down to a power of two."""
    return 1 << int(math.log2(16 * math.sqrt(max(tokens, 1))))


def bytes_a_row(width: int, bits: int) -> int:
    return -(-width * bits // 8)


def train(sample: Tensor, count: int, bits: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 `[n, D]` → centroids `[C, D]`, and of the residuals cutoffs `[2^bits - 1]` and weights `[2^bits]`:
    buckets that are equally full, each standing for its median. Centroids and weights are float16 where next to
    residuals that changes nothing, as in those libraries: reading centroids is what decoding takes on a GPU."""
    generator = torch.Generator().manual_seed(seed + 1)
    shuffled = sample[torch.randperm(len(sample), generator=generator, device="cpu").to(sample.device)]
    centroids = kmeans(shuffled[: POINTS * count], count, ITERATIONS, seed)
    held = shuffled[-HELD_OUT:]
    residuals = held - centroids[assign(held, centroids)[0]]
    halves = centroids.half()
    moved = (halves.float() - centroids).abs().amax()
    if moved <= residuals.abs().mean() / 64 and moved.isfinite() and residuals.abs().amax() < 2**15:
        centroids = halves
        residuals = held - centroids[assign(held, centroids.float())[0]]
    step = 1 / (1 << bits)
    share = torch.arange(1 << bits, dtype=torch.float64, device="cpu") * step
    weights = quantiles(residuals, share + step / 2)
    return centroids, quantiles(residuals, share[1:]), weights.to(centroids.dtype)


def quantiles(values: Tensor, shares: Tensor) -> Tensor:
    """Of any number of values (PyTorch's own takes 2^24), between neighbours linearly; 0 of none."""
    ordered = values.reshape(-1).sort().values
    if not len(ordered):
        return ordered.new_zeros(len(shares))
    place = shares.to(ordered.device) * (len(ordered) - 1)
    low = place.long()
    high = (low + 1).clamp_max(len(ordered) - 1)
    below, above = ordered[low].double(), ordered[high].double()
    return (below + (above - below) * (place - low)).float()


def encode(tokens: Tensor, centroids: Tensor, cutoffs: Tensor) -> tuple[Tensor, Tensor]:
    """float32 `[m, D]` → bytes, uint8 `[m, W]`, and centroids, int32 `[m]`."""
    nearest, _ = assign(tokens, centroids.float())
    return buckets(tokens, nearest, centroids, cutoffs), nearest.int()


def buckets(tokens: Tensor, centroid: Tensor, centroids: Tensor, cutoffs: Tensor) -> Tensor:
    """float32 `[m, D]` with the numbers of their centroids, `[m]` → bytes, uint8 `[m, W]`."""
    found = torch.bucketize(tokens - centroids[centroid], cutoffs)
    return pack(found, (len(cutoffs) + 1).bit_length() - 1)


def pack(buckets: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits `[m, D]` → uint8 `[m, W]`; what is missing of the last byte is 0."""
    m, D = buckets.shape
    each = 8 // bits
    whole = buckets.new_zeros(m, bytes_a_row(D, bits) * each, dtype=torch.int32)
    whole[:, :D] = _reversed(torch.arange(1 << bits, dtype=torch.int32, device=buckets.device), bits)[buckets]
    shift = torch.arange(8 - bits, -1, -bits, dtype=torch.int32, device=buckets.device)
    return (whole.view(m, -1, each) << shift).sum(2).to(torch.uint8)


def unpacked(bits: int, device: torch.device) -> Tensor:
    """The numbers in each of the 256 bytes, int64 `[256, 8 / bits]`."""
    shift = torch.arange(8 - bits, -1, -bits, dtype=torch.int32, device=device)
    every = torch.arange(256, dtype=torch.int32, device=device)
    return _reversed((every[:, None] >> shift) & ((1 << bits) - 1), bits).long()


def _reversed(numbers: Tensor, bits: int) -> Tensor:
    out = torch.zeros_like(numbers)
    for bit in range(bits):
        out |= ((numbers >> bit) & 1) << (bits - 1 - bit)
    return out


def inverses(tokens: Tensor) -> Tensor:
    """float32 `[m, D]` → 1 / their norms, float32 `[m]`. They are kept, so that what is decoded has the same bits
    wherever it is: sums have as many as there are orders to add in."""
    norms: Tensor = torch.linalg.vector_norm(tokens, dim=1, dtype=torch.float64)
    return norms.clamp_min_(1e-12).reciprocal_().float()


def decode(codes: Tensor, centroid: Tensor, centroids: Tensor, table: Tensor, inverse: Tensor | None) -> Tensor:
    """uint8 `[m, W]`, int32 `[m]`, perhaps float32 `[m]` → float32 `[m, D]`. `table`: the weights in each byte,
    `[256, 8 / bits]`."""
    tokens = centroids.index_select(0, centroid).float()
    weights = gathered(table, codes.reshape(-1).int()).view(len(codes), codes.shape[1] * table.shape[1])
    tokens += weights[:, : tokens.shape[1]]
    if inverse is not None:
        tokens *= inverse[:, None]
    return tokens
