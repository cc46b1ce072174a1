"""`pq` documents on Hopper have the bits of what they are decoded to, on every layout the backend serves."""

from __future__ import annotations

import pytest
import torch
from lanes import CUDA

import maxsim
from maxsim import UnsupportedError
from maxsim.quantized.codes import Codes
from maxsim.quantized.container import Quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
]
HALVES = (torch.float16, torch.bfloat16)


def tokens(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def codes(*shape: int, words: int = 256) -> tuple[torch.Tensor, Codes]:
    """Random ones of 16 parts of 8 dimensions."""
    generator = torch.Generator("cuda").manual_seed(1)
    found = torch.randint(0, words, (*shape, 16), generator=generator, dtype=torch.uint8, device="cuda")
    return found, Codes("pq", 128, books=tokens(16, words, 8, dtype=torch.float32, seed=2))


def padded(count: int, length: int, words: int = 256) -> Quantized:
    return Quantized(*codes(count, length, words=words), length)


def packed(lengths: list[int]) -> Quantized:
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return Quantized(*codes(sum(lengths)), max(lengths), offsets[:-1], offsets[1:], True)


def some_lengths(count: int, most: int) -> list[int]:
    generator = torch.Generator().manual_seed(most)
    found = torch.randint(0, most + 1, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.2, found * 0, found).tolist()


def same(q: torch.Tensor, d: Quantized, **options) -> torch.Tensor:
    plain = d.dequantize(q.dtype)
    got, want = (maxsim.score(q, x, backend=b, **options) for x, b in ((d, "hopper"), (plain, "triton")))
    assert torch.equal(got, want)
    got, want = (maxsim.matches(q, x, backend=b, **options) for x, b in ((d, "hopper"), (plain, "triton")))
    assert torch.equal(got.index, want.index)
    assert torch.equal(got.similarity, want.similarity)
    return got


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("NQ", "LQ"), [(1, 32), (1, 5), (2, 32), (1, 64), (5, 32), (1, 128), (1, 1024), (3, 130)])
def test_queries(NQ, LQ, dtype):
    same(tokens(NQ, LQ, 128, dtype=dtype), padded(700, 300))
    same(tokens(NQ, LQ, 128, dtype=dtype), padded(3, 1))


@pytest.mark.parametrize("NQ", [1, 9])
@pytest.mark.parametrize("most", [3, 130, 700])
def test_ragged(most, NQ):
    same(tokens(NQ, 32, 128), packed(some_lengths(1500, most)))


@pytest.mark.parametrize("NQ", [1, 5])
def test_views(NQ):
    starts = torch.tensor([50, 3, 3, 90, 0] * 40, device="cuda")
    ends = starts + torch.tensor([20, 33, 0, 10, 1] * 40, device="cuda")
    same(tokens(NQ, 32, 128), Quantized(*codes(120), 33, starts, ends))


@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("NQ", [1, 5])
def test_masks(NQ, masked):
    generator = torch.Generator().manual_seed(NQ)
    document_mask = torch.rand(300, 150, generator=generator) < 0.3
    document_mask[1] = False
    document_mask[2, :140] = False
    query_mask = torch.rand(NQ, 32, generator=generator) < 0.6
    options = {"document_mask": document_mask.cuda(), "query_mask": query_mask.cuda(), "masked": masked}
    q, d = tokens(NQ, 32, 128), padded(300, 150)
    plain = maxsim.score(q, d.dequantize(q.dtype), backend="triton", **options)
    assert torch.equal(maxsim.score(q, d, backend="hopper", **options), plain)
    assert torch.equal(maxsim.score(q, d, backend="triton", **options), plain)


@pytest.mark.parametrize("LQ", [7, 32])
def test_candidates(LQ):
    table = torch.randint(0, 300, (6, 11), generator=torch.Generator().manual_seed(0)).cuda()
    q, d = tokens(6, LQ, 128), padded(300, 77)
    whole = maxsim.score(q, d.dequantize(q.dtype), backend="triton")
    assert torch.equal(maxsim.score(q, d[table], backend="hopper"), whole.gather(1, table))


@pytest.mark.parametrize("words", [1, 7, 200])
def test_few_codewords(words):
    for NQ in (1, 4):
        same(tokens(NQ, 32, 128), padded(60, 77, words))


@pytest.mark.parametrize("NQ", [1, 4])
def test_gradients(NQ):
    q, d = tokens(NQ, 32, 128).requires_grad_(), padded(300, 77)
    found = []
    for documents, backend in ((d, "hopper"), (d, "triton"), (d.dequantize(q.dtype), "triton")):
        scores = maxsim.score(q, documents, backend=backend)
        upstream = tokens(*scores.shape, seed=9).float() / 64  # of float16 gradients none is infinite
        scores.backward(upstream)
        found.append(q.grad.clone())
        q.grad = None
    assert torch.equal(found[0], found[1])
    # sums of as many terms in another order: a program has fewer rows of codewords than of tokens
    torch.testing.assert_close(found[0], found[2], rtol=2.0**-9, atol=2.0**-9)


def test_the_same_bits_run_after_run():
    """Wherever the table lies in shared memory, and whatever lay there before."""
    q, d = tokens(1, 32, 128), padded(3000, 77)
    first = maxsim.score(q, d, backend="hopper")
    for n in range(20):
        maxsim.score(tokens(n % 3 + 1, 32, 128), tokens(200, 100 + n, 128), backend="hopper")
        assert torch.equal(maxsim.score(q, d, backend="hopper"), first)


def test_what_it_does_not_serve():
    with pytest.raises(UnsupportedError, match="16 parts of 8 dimensions, not 8 of 8"):
        maxsim.score(tokens(1, 32, 64), maxsim.quantize(tokens(20, 30, 64), "pq", parts=8), backend="hopper")
    with pytest.raises(UnsupportedError, match="not float32"):
        maxsim.score(tokens(1, 32, 128).float(), padded(300, 77), backend="hopper")
