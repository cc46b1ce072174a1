"""k-means: seeded, and the same bits on every run. Distances are taken around the centroids' mean, so that vectors far
from the origin and near to each other stay apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

BLOCK = 1 << 22  # distances held at once


def kmeans(points: Tensor, count: int, iterations: int, seed: int) -> Tensor:
    """float32 `[n, d]` → at most `count` centroids `[k, d]`, float32: all points themselves where there are no more.
    Points that are equal have a centroid that equals them."""
    n = len(points)
    if n <= count:
        return points.clone()
    generator = torch.Generator().manual_seed(seed)
    centroids = points[torch.randperm(n, generator=generator, device="cpu")[:count].to(points.device)].clone()
    for _ in range(iterations):
        nearest, distance = assign(points, centroids, True)
        order = nearest.sort(stable=True).indices
        every = torch.arange(count, device=points.device)
        begin = torch.searchsorted(nearest[order], every)
        counts = torch.bincount(nearest, minlength=count)
        # the mean as a step away from the centroid: exactly none where all of its points are equal to it
        step = embedding_bag(order, points - centroids[nearest], begin, mode="sum")
        centroids = centroids + step / counts.clamp_min(1)[:, None]
        empty = (counts == 0).nonzero()[:, 0]
        if len(empty):  # to where the error is largest
            centroids[empty] = points[distance.sort(descending=True, stable=True).indices[: len(empty)]]
    return centroids


def assign(points: Tensor, centroids: Tensor, distances: bool = False) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each point, int64 `[n]`, the lowest of equals, and (else empty) the squared distance
    to it."""
    mean = centroids.mean(0)
    around = centroids - mean
    square = around.square().sum(1) / 2
    step = max(1, BLOCK // len(centroids))
    nearest = torch.empty(len(points), dtype=torch.int64, device=points.device)
    far = points.new_empty(len(points) if distances else 0)
    for low in range(0, len(points), step):
        part = points[low : low + step]
        best = torch.addmm(square, part - mean, around.T, alpha=-1).min(1)
        nearest[low : low + step] = best.indices
        if distances:
            far[low : low + step] = (part - centroids[best.indices]).square().sum(1)
    return nearest, far


def sample_rows(rows: int, most: int, seed: int) -> Tensor:
    """`most` of `rows` rows, int64, never falling; all where there are no more."""
    if rows <= most:
        return torch.arange(rows, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    if rows <= 4 * most:
        return torch.randperm(rows, generator=generator, device="cpu")[:most].sort().values
    return torch.randint(rows, (most,), generator=generator, device="cpu").sort().values
