"""The best documents: score, then order; the same hits for any chunk, k and batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lanes import integers, random

import maxsim
from maxsim import best

INF = float("inf")


def full_sort(scores: torch.Tensor, k: int) -> tuple[list[list[float]], list[list[int]]]:
    """Python's stable sort: falling scores, equal ones in order; −inf is no hit."""
    values, indices = [], []
    for row in scores.tolist():
        order = sorted(range(len(row)), key=lambda n: -row[n])[:k]
        values.append([row[n] for n in order])
        indices.append([n if row[n] != -INF else -1 for n in order])
    return values, indices


@pytest.fixture
def chunks_of(monkeypatch):
    """Documents a chunk, for two queries."""
    return lambda size: monkeypatch.setattr(best, "CHUNK_BYTES", 12 * 2 * size)


@pytest.mark.parametrize("k", [1, 127, 128, 129, 200, 500, 800, 1000])
def test_equal_to_a_full_sort(lane, dtype, k):
    """Cases 73 and 74: exactly min(k, 800) hits, all different; integers make hundreds of ties."""
    q, d = (
        integers(1, 2, 1, 4, dtype=dtype, device=lane.device),
        integers(2, 800, 1, 4, dtype=dtype, device=lane.device),
    )
    found = lane.topk(q, d, k)
    assert found.scores.shape == found.indices.shape == (2, min(k, 800))
    assert found.indices.dtype == torch.int64
    assert (found.scores.tolist(), found.indices.tolist()) == full_sort(lane.score(q, d), k)
    assert all(len(set(row)) == min(k, 800) for row in found.indices.tolist())


@pytest.mark.parametrize("size", [1, 2, 7, 59, 60, 61])
def test_chunks_change_nothing(lane, dtype, size, chunks_of):
    """Ties across chunks, empty documents at chunk ends, k beyond a chunk."""
    q = random(3, 2, 5, 16, dtype=dtype, device=lane.device)
    items = [random(100 + n % 20, (n % 5) * 3, 16, dtype=dtype, device=lane.device) for n in range(60)]
    whole = {k: lane.topk(q, items, k) for k in (0, 1, 5, 60)}
    scores = lane.score(q, items)
    chunks_of(size)
    for k, wanted in whole.items():
        found = lane.topk(q, items, k)
        assert torch.equal(found.scores, wanted.scores)
        assert torch.equal(found.indices, wanted.indices)
        assert (found.scores.tolist(), found.indices.tolist()) == full_sort(scores, k)


@pytest.mark.interpreter
def test_k(lane):
    """Case 72: a corpus smaller than k, and none at all."""
    q, d = integers(4, 2, 3, 8, device=lane.device), integers(5, 3, 3, 8, device=lane.device)
    assert lane.topk(q, d, 0).indices.shape == (2, 0)
    assert sorted(lane.topk(q, d, 5).indices[0].tolist()) == [0, 1, 2]
    assert lane.topk(q, [], 5).indices.shape == (2, 0)
    assert lane.topk([], d, 5).indices.shape == (0, 3)
    assert lane.topk(q[0], d[0], 5).indices.tolist() == [[0]]
    with pytest.raises(ValueError, match="-1"):
        lane.topk(q, d, -1)


@pytest.mark.interpreter
def test_empty_documents_are_no_hits(lane):
    """Cases 21 and 51: nothing with −inf or a sentinel for a score is a hit."""
    q, one = lane.tensor([[1.0, 0]]), lane.tensor([[-1.0, 0]])
    found = lane.topk(q, [one, one[:0], one * 2, one[:0]], 4)
    assert found.indices.tolist() == [[0, 2, -1, -1]]
    assert found.scores.tolist() == [[-1, -2, -INF, -INF]]
    mask = torch.tensor([[True], [False], [True], [False]])
    assert lane.topk(q, torch.stack([one] * 4), 4, None, mask).indices.tolist() == [[0, 2, -1, -1]]
    assert lane.topk(q, torch.stack([one] * 4), 4, None, mask, masked="zero").indices.tolist() == [[1, 3, 0, 2]]


@pytest.mark.interpreter
def test_a_document_that_scores_minus_infinity_is_a_hit(lane, chunks_of):
    """Only documents without kept tokens are none, and those come last."""
    q, one = lane.tensor([[1.0]]), lane.tensor([[1.0]])
    items = [one[:0], one * -INF, one, one[:0], one * -INF]
    for size in (1, 2, 100):
        chunks_of(size)
        found = lane.topk(q, items, 5)
        assert found.indices.tolist() == [[2, 1, 4, -1, -1]]
        assert found.scores.tolist() == [[1, -INF, -INF, -INF, -INF]]
        assert lane.topk(q, items, 2).indices.tolist() == [[2, 1]]


def test_one_empty_document_among_many(lane):
    """Case 21."""
    q = integers(6, 3, 8, device=lane.device)
    items = [integers(n, 1 + n % 3, 8, device=lane.device) for n in range(1115)] + [q[:0]]
    found = lane.topk(q, items, 2000)
    assert found.indices.shape == (1, 1116)
    assert int(found.indices[0, -1]) == -1
    assert sorted(found.indices[0, :-1].tolist()) == list(range(1115))


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["packed", "padded", "padded without tokens"])
def test_empty_queries_have_no_hits(lane, form):
    """Case 22: queries of 4, 0 and 0 tokens."""
    q, d = integers(7, 4, 8, device=lane.device), integers(8, 12, 3, 8, device=lane.device)
    if form == "packed":
        found = lane.topk([q, q[:0], q[:0]], d, 10)
    elif form == "padded":
        mask = torch.zeros(3, 4, dtype=torch.bool)
        mask[0] = True
        found = lane.topk(q.expand(3, 4, 8), d, 10, mask)
    else:
        found = lane.topk(q.new_empty(3, 0, 8), d, 10)
        assert found.indices.tolist() == [[-1] * 10] * 3
        return
    assert found.indices[1:].tolist() == [[-1] * 10] * 2
    assert found.scores[1:].tolist() == [[-INF] * 10] * 2
    assert torch.equal(found.indices[:1], lane.topk(q, d, 10).indices)


@pytest.mark.interpreter
def test_ties_in_order(lane, chunks_of):
    q, d = lane.tensor([[1.0]]), lane.tensor([1.0, 2, 1, 2, 2, 0, 1]).view(7, 1, 1)
    for size in (1, 3, 100):
        chunks_of(size)
        assert lane.topk(q.expand(2, 1, 1), d, 5).indices.tolist() == [[1, 3, 4, 0, 2]] * 2


def test_two_tokens_beat_one(lane):
    """Case 76: the document with both tokens is strictly first among 300 with one."""
    e = torch.eye(16, device=lane.device)
    items = [e[[axis % 4]] for axis in range(300)]
    items[150:150] = [e[[2, 3]], e[[0, 1]]]
    found = lane.topk(e[[0, 1]], items, 3)
    assert found.indices.tolist() == [[151, 0, 1]]
    assert found.scores.tolist() == [[2, 1, 1]]


def test_nan_is_seen(lane):
    """A document whose score is NaN comes first, as PyTorch sorts, in any chunk: it is not lost among the others."""
    q, d = lane.tensor([[1.0]]), lane.tensor([1.0, float("nan"), 3]).view(3, 1, 1)
    assert lane.topk(q, d, 2).indices.tolist() == [[1, 2]]


@pytest.mark.interpreter
def test_forms_and_masks(lane):
    q, d = integers(9, 2, 3, 8, device=lane.device), integers(10, 9, 5, 8, device=lane.device)
    mask = np.random.default_rng(0).random((9, 5)) < 0.5
    scores = lane.score(q, d, None, mask)
    packed, flat = maxsim.Packed.from_list(list(d)), mask.reshape(-1)
    for documents, given in (
        (d, mask),
        (list(d), mask),
        (packed, flat),
        (d.transpose(0, 1).contiguous().transpose(0, 1), mask),
    ):
        found = lane.topk(q, documents, 9, None, given)
        assert (found.scores.tolist(), found.indices.tolist()) == full_sort(scores, 9)


def test_needs_no_gradient(lane):
    q, d = integers(11, 2, 3, 8, device=lane.device).requires_grad_(), integers(12, 9, 5, 8, device=lane.device)
    assert not lane.topk(q, d, 3).scores.requires_grad


def test_normalize_and_float64(lane):
    q, d = random(13, 2, 3, 8, device=lane.device), random(14, 9, 5, 8, device=lane.device)
    found = lane.topk(q, d, 9, normalize=True)
    assert torch.equal(found.scores, lane.score(q, d, normalize=True).gather(1, found.indices))
    if torch.float64 in lane.dtypes:
        assert lane.topk(q.double(), d.double(), 1).scores.dtype == torch.float64
