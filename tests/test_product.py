"""Product codes: cuts, codewords, what is far away and near to each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codes import same_documents, unit
from lanes import random

import maxsim
from maxsim import quantize, reference
from maxsim.quantized import kmeans, product
from maxsim.quantized.gathering import gathered


@pytest.mark.parametrize(("width", "parts"), [(16, 16), (16, 4), (15, 5), (7, 1)])
def test_what_is_decoded(width, parts):
    """Each part is the nearest of its codewords."""
    d = random(1, 40, 10, width)
    made = quantize(d, "pq", parts=parts)
    books = made.parameters.books
    assert made.codes.shape == (40, 10, parts)
    assert made.codes.dtype == torch.uint8
    assert books.shape == (parts, 256, width // parts)
    assert made.bytes_a_token == parts
    cut = d.view(-1, parts, width // parts)
    back = made.dequantize().view(-1, parts, width // parts)
    oracle = reference.product_token(made.codes[3, 4].numpy(), books.numpy())
    assert np.array_equal(made.dequantize(torch.float64)[3, 4].numpy(), oracle)
    for m in range(parts):
        assert torch.equal(back[:, m], books[m][made.codes.view(-1, parts)[:, m].long()])
        least = torch.cdist(cut[:, m].double(), books[m].double()).amin(1)
        assert bool(((cut[:, m] - back[:, m]).double().norm(dim=1) <= least + 1e-5).all())


def test_more_parts_are_nearer():
    d = unit(2, 30, 10, 32)
    errors = [float((quantize(d, "pq", parts=parts).dequantize() - d).norm()) for parts in (2, 4, 8, 16, 32)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("parts", [2.0, True])
def test_parts_that_are_no_number(parts):
    with pytest.raises(ValueError, match="parts must be a whole number"):
        quantize(torch.ones(2, 3, 16), "pq", parts=parts)


@pytest.mark.parametrize("parts", [3, 0, -1, 32])
def test_parts_that_do_not_divide(parts):
    with pytest.raises(ValueError, match=r"width 16 cannot be cut in .* equal parts: take one of 1, 2, 4, 8, 16"):
        quantize(random(1, 2, 3, 16), "pq", parts=parts)
    with pytest.raises(ValueError, match="of width 100 cannot be cut in 16"):
        quantize(random(1, 2, 3, 100), "pq")


@pytest.mark.parametrize("count", [1, 11, 255])
def test_fewer_vectors_than_codewords(count):
    """Case 83."""
    d = random(3, 1, count, 16)
    made = quantize(d, "pq", parts=4)
    assert made.parameters.books.shape == (4, count, 4)
    assert torch.equal(made.dequantize(), d)


def test_identical_vectors_decode_exactly():
    d = random(4, 1, 1, 16).expand(100, 10, 16)
    made = quantize(d, "pq", parts=4)
    assert bool(made.parameters.books.isfinite().all())
    assert torch.equal(made.dequantize(), d)


def test_far_from_the_origin():
    """Case 47: distances of vectors far away, and near to each other."""
    centroids = torch.tensor([[4096.0, 0], [4096.5, 0]])
    assert kmeans.assign(torch.tensor([[4096.5, 0]]), centroids)[0].tolist() == [1]
    assert product.encode(torch.tensor([[4096.5, 0], [4096.0, 0]]), centroids[None]).tolist() == [[1], [0]]


def test_two_tokens_beat_one():
    """Case 76: the document with both tokens comes first among those with one."""
    e = torch.eye(16)
    items = [e[[2, 3]], e[[0, 1]], *[e[[axis % 4]] for axis in range(300)]]
    for parts in (1, 2, 16):
        found = maxsim.topk(e[[0, 1]], quantize(items, "pq", parts=parts), 3)
        assert found.indices[0, 0] == 1
        assert found.scores[0].tolist() == [2, 1, 1]


def test_same_result_on_every_run():
    d = unit(5, 50, 12, 24)
    assert same_documents(quantize(d, "pq", parts=4), quantize(d, "pq", parts=4))
    first = quantize(d, "pq", parts=4, seed=1)
    assert not same_documents(first, quantize(d, "pq", parts=4))
    assert torch.equal(quantize(d[5:9], like=first).codes, first.codes[5:9])


def test_without_tokens():
    for d in (torch.empty(0, 4, 8), torch.empty(3, 0, 8), [torch.empty(0, 8)]):
        made = quantize(d, "pq", parts=2)
        assert maxsim.score(random(1, 2, 3, 8), made).shape == (2, len(made))


def test_kmeans_leaves_no_centroid_empty():
    points = torch.cat([torch.zeros(500, 2), torch.tensor([[1.0, 0], [0, 1], [5, 5]])])
    found = kmeans.kmeans(points, 4, 12, seed=0)
    assert sorted(found.tolist()) == sorted([[0, 0], [1, 0], [0, 1], [5, 5]])


def test_samples():
    for rows, most in ((10, 10), (10, 7), (100, 7), (5, 9)):
        found = kmeans.sample_rows(rows, most, 0)
        assert len(found) == min(rows, most)
        assert bool((found.diff() >= 0).all())
        assert 0 <= int(found.min()) <= int(found.max()) < rows
        assert torch.equal(found, kmeans.sample_rows(rows, most, 0))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_tables_may_lie_anywhere(width):
    """A mapped file has them at multiples of 8 bytes or less, and processors fault on wider elements there."""
    rows = torch.arange(63, -1, -1, dtype=torch.int32)
    for offset in range(4):
        table = random(1, 64 * width + offset)[offset:].view(64, width)
        assert torch.equal(gathered(table, rows), table.flip(0))
