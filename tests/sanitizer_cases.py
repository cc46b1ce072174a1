"""Small problems for every kernel, for `scripts/sanitize` to run under compute-sanitizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

import maxsim
from maxsim.kernels import hopper_launch

CODES = (
    ("int8", {}),
    ("int8", {"scale": "token"}),
    ("fp8", {}),
    ("residual", {"centroids": 8, "bits": 2}),
    ("residual", {"centroids": 8, "bits": 4, "renormalize": True}),
    ("pq", {}),
)


def tokens(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def ragged(sizes: torch.Tensor, dtype: torch.dtype = torch.float16) -> maxsim.Packed:
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return maxsim.Packed(tokens(int(offsets[-1]), 128, dtype=dtype), offsets)


def cases() -> Iterator[Callable[[], object]]:
    torch.manual_seed(0)
    single = torch.float32
    packed, packed32 = ragged(torch.randint(0, 90, (23,))), ragged(torch.randint(0, 90, (9,)), single)
    kept = torch.rand(packed.tokens.shape[0], device="cuda") < 0.5
    problems = [
        (tokens(9, 40, 128), packed, None),
        (tokens(9, 40, 128), packed, kept),
        (tokens(3, 300, 128), tokens(7, 130, 128), None),
        (tokens(1, 100, 128), packed, None),
        (tokens(2, 40, 256), tokens(3, 70, 256), None),
        (tokens(9, 40, 320), tokens(3, 70, 320), None),
        (tokens(2, 140, 1024), tokens(3, 70, 1024), None),
        (tokens(1, 20, 128), packed, None),
        (tokens(1, 20, 128), packed, kept),
        (tokens(3, 100, 128, dtype=single), packed32, None),
        (tokens(1, 20, 128, dtype=single), packed32, None),
        (tokens(3, 140, 200, dtype=single), tokens(3, 70, 200, dtype=single), None),
        (tokens(3, 20, 128), tokens(3, 4, 70, 128), None),
        (tokens(3, 100, 128), tokens(3, 4, 70, 128), torch.rand(3, 4, 70, device="cuda") < 0.5),
        (tokens(3, 300, 128), [[tokens(40, 128), tokens(0, 128), tokens(90, 128)]] * 3, None),
        (tokens(3, 100, 128, dtype=single), tokens(3, 4, 70, 128, dtype=single), None),
    ]
    backends = ["triton", "hopper"] if torch.cuda.get_device_capability() == (9, 0) else ["triton"]
    for backend in backends:
        for queries, documents, mask in problems:
            for call in (maxsim.score, maxsim.matches):
                for masked in ("exclude", "zero") if mask is not None else ("exclude",):
                    yield partial(call, queries, documents, None, mask, masked, backend=backend)
        for codec, options in CODES:
            for floats in (tokens(9, 70, 128), packed):
                codes = maxsim.quantize(floats, codec, **options)
                for queries in (tokens(1, 20, 128), tokens(9, 40, 128), tokens(1, 300, 128)):
                    yield partial(maxsim.score, queries, codes, backend=backend)
                    yield partial(maxsim.matches, queries, codes, backend=backend)
                yield partial(train, maxsim.score, tokens(9, 40, 128).requires_grad_(), codes)
    queries, leaf = tokens(40, 64, 128).requires_grad_(), packed.tokens.clone().requires_grad_()
    starts = packed.offsets[:-1]
    for documents in (tokens(7, 90, 128).requires_grad_(), maxsim.Packed(leaf, packed.offsets)):
        yield partial(train, maxsim.score, queries, documents)
        yield partial(train, maxsim.score_pairs, queries, documents, torch.tensor([[0, 0], [39, 6], [3, 6], [0, 0]]))
    yield partial(train, maxsim.score, queries, maxsim.Views(leaf, starts, packed.offsets[1:] - starts))
    yield partial(train, maxsim.score, queries[:2], documents)
    few = tokens(3, 4, 90, 128).requires_grad_()  # of which few tokens win anything
    yield partial(train, maxsim.score, tokens(3, 20, 128).requires_grad_(), few)
    yield partial(train, maxsim.score, tokens(1, 9, 128).requires_grad_(), maxsim.Packed(leaf, packed.offsets))
    hopper_launch.splits_documents = lambda *sizes: True
    yield partial(maxsim.score, tokens(1, 300, 128), tokens(3, 600, 128), backend=backends[-1])


def train(call: Callable[..., torch.Tensor], *arguments: object) -> None:
    call(*arguments).sum().backward()


def main(part: int = 0, parts: int = 1) -> None:
    """Runs every case, or of so many parts one: kernels are compiled sooner by several processes."""
    for i, case in enumerate(cases()):
        if i % parts == part:
            case()
    torch.cuda.synchronize()
    print("all cases ran")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
