"""Codes that kernels decode tile by tile: what they find is what they find of the decoded documents, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lanes import CUDA, INTERPRETED, TRITON, random

import maxsim
from maxsim import Packed, Quantized, UnsupportedError, quantize

pytestmark = [
    pytest.mark.needs_triton,
    pytest.mark.skipif(not TRITON or not (CUDA or INTERPRETED), reason="needs Triton and a GPU, or its interpreter"),
]
DEVICE = "cuda" if CUDA else "cpu"
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def tokens(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return random(seed, *shape, dtype=dtype, device=DEVICE)


def packed(seed: int, count: int, most: int, D: int) -> Packed:
    sizes = torch.randint(0, most + 1, (count,), generator=torch.Generator().manual_seed(seed))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return Packed(tokens(seed, int(offsets[-1]), D), offsets.to(DEVICE), max_length=most)


def single(made: Quantized) -> Quantized:
    """With centroids and weights in float32."""
    p = made.parameters
    assert p.centroids is not None
    assert p.weights is not None
    p = dataclasses.replace(p, centroids=p.centroids.float() * 1.0001, weights=p.weights.float() * 1.0001)
    return made._with(parameters=p)


def plain(made: Quantized, dtype: torch.dtype) -> tuple[torch.Tensor | Packed, torch.Tensor | None]:
    """Decoded documents, and their mask."""
    return made.dequantize(dtype), made.compact().mask


def agree(q: torch.Tensor, made: Quantized, backend: str, **options) -> None:
    documents, mask = plain(made, q.dtype)
    if made.per_query:
        K, count = made.per_query, len(made) // made.per_query
        assert isinstance(documents, Packed)
        rows = documents.tokens.split(documents.offsets.diff().tolist())
        documents = [list(rows[n * K : n * K + K]) for n in range(count)]
    want = maxsim.matches(q, documents, None, mask, backend="triton", **options)
    found = maxsim.matches(q, made, backend=backend, **options)
    assert torch.equal(found.index, want.index)
    assert torch.equal(found.similarity, want.similarity)
    if not made.per_query:
        pairs = torch.tensor([[0, len(made) - 1], [len(q) - 1, 0]])
        some = (
            maxsim.score_pairs(q, x, pairs, None, m, backend="triton") for x, m in ((made, None), (documents, mask))
        )
        assert torch.equal(*some)
    score = maxsim.score(q, made, backend=backend, **options)
    assert torch.equal(score, maxsim.score(q, documents, None, mask, backend="triton", **options))


@pytest.mark.interpreter
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_portable(bits):
    """Every number of bits, of halves and floats, with a norm and without, of widths that fill no tile."""
    few = 3 if INTERPRETED else 40
    for D, dtype, renormalize in ((13, torch.float32, True), (32, torch.float16, False), (300, torch.float16, True)):
        made = quantize(tokens(1, few, 9, D), "residual", bits=bits, renormalize=renormalize, centroids=7)
        agree(tokens(2, 2, 5, D, dtype=dtype), made, "triton")
    agree(tokens(2, 2, 5, D), single(made)[1:], "triton")


@pytest.mark.interpreter
@pytest.mark.parametrize(("D", "parts"), [(13, 13), (30, 2), (32, 4), (128, 16), (140, 28), (300, 15), (48, 1)])
def test_portable_product(D, parts):
    """Codewords whose sizes are powers of two, multiples of some, and odd."""
    few = 3 if INTERPRETED else 40
    made = quantize(tokens(1, few, 9, D), "pq", parts=parts)
    for dtype in (torch.float32, torch.float16):
        agree(tokens(2, 2, 5, D, dtype=dtype), made, "triton")


@pytest.mark.interpreter
@pytest.mark.parametrize("parts", [3, 8])
def test_gradients_of_queries_of_product_codes(parts):
    made = quantize(tokens(1, 5, 9, 24), "pq", parts=parts)
    grads = []
    for documents in (made, made.dequantize(torch.float16)):
        leaf = tokens(2, 3, 5, 24).requires_grad_()
        maxsim.score(leaf, documents, backend="triton").sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.interpreter
def test_gradients_of_queries():
    made = quantize(tokens(1, 5, 9, 24), "residual", renormalize=True, centroids=7)
    grads = []
    for documents in (made, made.dequantize(torch.float16)):
        leaf = tokens(2, 3, 5, 24).requires_grad_()
        maxsim.score(leaf, documents, backend="triton").sum().backward()
        grads.append(leaf.grad)
    assert torch.allclose(*grads, rtol=1e-3, atol=1e-3)


@needs_hopper
@pytest.mark.parametrize(
    ("NQ", "LQ", "D", "bits", "renormalize"),
    [
        (1, 20, 128, 2, False), (1, 20, 128, 2, True), (1, 64, 64, 4, True), (4, 16, 128, 1, False),
        (5, 32, 128, 1, False), (1, 128, 128, 8, True), (2, 300, 128, 2, False), (2, 300, 256, 4, False),
    ],
)  # fmt: skip
def test_hopper(NQ, LQ, D, bits, renormalize):
    q = tokens(1, NQ, LQ, D, dtype=torch.bfloat16 if bits == 4 else torch.float16)
    mask = (torch.rand(141, 77, generator=torch.Generator().manual_seed(0)) < 0.6).to(DEVICE)
    made = quantize(tokens(2, 141, 77, D), "residual", bits=bits, renormalize=renormalize)
    assert made.parameters.centroids is not None
    assert made.parameters.centroids.dtype == torch.float16
    agree(q, made, "hopper")
    agree(q, made[3:90], "hopper")  # whose numbers of centroids begin anywhere
    agree(q, single(made), "hopper")
    agree(q, quantize(tokens(2, 141, 77, D), document_mask=mask, like=made), "hopper")
    made = quantize(packed(3, 150, 200, D), like=made)
    agree(q, made, "hopper")
    agree(q, made[torch.arange(0, 150, 7)], "hopper")
    agree(q, made[torch.arange(NQ * 9).view(NQ, 9)], "hopper")


@needs_hopper
def test_hopper_shares_documents():
    """Of long queries and few long documents programs share documents too."""
    made = quantize(tokens(1, 141, 600, 128), "residual", renormalize=True)
    agree(tokens(2, 1, 700, 128), made, "hopper")
    agree(tokens(2, 1, 300, 128), quantize(packed(3, 141, 1500, 128), like=made), "hopper")


@needs_hopper
def test_what_hopper_refuses():
    def refused(made: Quantized, q: torch.Tensor, reason: str, **options) -> None:
        with pytest.raises(UnsupportedError, match=reason):
            maxsim.score(q, made, backend="hopper", **options)
        assert maxsim.score(q, made, **options).isfinite().all()

    d = tokens(1, 9, 20, 128)
    made = quantize(d, "residual", normalize=True)
    refused(made, tokens(2, 1, 20, 128, dtype=torch.float32), "float16 and bfloat16, not")
    refused(made, tokens(2, 1, 20, 128), "does not normalise", normalize=True)
    refused(quantize(d[..., :100], "residual"), tokens(2, 1, 20, 100), "widths that 8 divides")
    refused(quantize(tokens(1, 9, 20, 320), "residual"), tokens(2, 1, 20, 320), "widths")
    refused(quantize(tokens(1, 9, 20, 96), "residual"), tokens(2, 1, 20, 96), "multiples of 16 bytes")
