"""Sizes: nothing, one, odd widths, both sides of every tile's edge, and winners in the first of many tiles."""

from __future__ import annotations

import pytest
import torch
from budget import true_scores
from lanes import integers, interpreter_when

import maxsim
from maxsim import Packed, Views

INF = float("inf")
WIDTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 48, 64, 65, 96, 100, 128, 129, 160, 192, 257, 320, 768, 1024, 4096]
EDGES = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257, 643]


def half(lane, dtype, **others):
    return dtype == torch.float16


def truth(q, d):
    ones = [torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) for x in (q, d)]
    return true_scores(q, d, *ones)


@interpreter_when(lambda lane, dtype, D: half(lane, dtype) and D in (1, 3, 17, 64, 96, 129, 320, 4096))
@pytest.mark.parametrize("D", WIDTHS)
def test_last_column_decides(lane, dtype, D):
    """Case 45: all tokens of a document are alike but for their last column."""
    q, d = integers(1, 2, 5, D, dtype=dtype, device=lane.device), integers(2, 3, 1, D, dtype=dtype, device=lane.device)
    d = d.repeat(1, 6, 1)
    q[..., -1] = lane.tensor([1, -1, 2, -2, 1], dtype)
    d[..., -1] = lane.tensor([0, 3, -1, -4, 2, 1], dtype)
    found = lane.matches(q, d)
    assert found.index.tolist() == [[[1, 3, 1, 3, 1]] * 3] * 2
    a, b = q.clone().requires_grad_(), d.clone().requires_grad_()
    scores = lane.score(a, b)
    assert torch.equal(scores.detach().double(), truth(q, d))
    scores.sum().backward()
    assert torch.equal(a.grad, d.sum(0)[[1, 3, 1, 3, 1]].expand(2, -1, -1).to(dtype))
    of_documents = torch.zeros_like(d[0])
    of_documents[1], of_documents[3] = q[:, [0, 2, 4]].sum((0, 1)), q[:, [1, 3]].sum((0, 1))
    assert torch.equal(b.grad, of_documents.expand(3, -1, -1))


@pytest.mark.parametrize("D", range(1, 141))
def test_every_small_width(lane, dtype, D):
    """Case 44."""
    q, d = (
        integers(D, 1, 3, D, dtype=dtype, device=lane.device),
        integers(D + 1, 1, 4, D, dtype=dtype, device=lane.device),
    )
    assert torch.equal(lane.score(q, d).double(), truth(q, d))


@interpreter_when(half)
def test_five_columns(lane, dtype):
    """Case 44: 46."""
    q, d = lane.tensor([[1, 2, 3, 1, 2]], dtype), lane.tensor([[4, 5, 6, 4, 5]], dtype)
    assert lane.score(q, d).tolist() == [[46]]


@interpreter_when(lambda lane, dtype, LD: half(lane, dtype) and LD in (1, 17, 64, 129))
@pytest.mark.parametrize("LD", EDGES)
def test_document_lengths_at_edges(lane, dtype, LD):
    """Padded and packed, the packed ones with short neighbours."""
    q, d = (
        integers(3, 2, 9, 24, dtype=dtype, device=lane.device),
        integers(4, 2, LD, 24, dtype=dtype, device=lane.device),
    )
    wanted = truth(q, d)
    assert torch.equal(lane.score(q, d).double(), wanted)
    one = integers(5, 1, 24, dtype=dtype, device=lane.device)
    assert torch.equal(lane.score(q, [one, d[0], one, d[1]])[:, 1::2].double(), wanted)


@interpreter_when(lambda lane, dtype, LQ: half(lane, dtype) and LQ in (1, 17, 64, 129))
@pytest.mark.parametrize("LQ", EDGES)
def test_query_lengths_at_edges(lane, dtype, LQ):
    q, d = (
        integers(6, 2, LQ, 24, dtype=dtype, device=lane.device),
        integers(7, 2, 9, 24, dtype=dtype, device=lane.device),
    )
    wanted = truth(q, d)
    assert torch.equal(lane.score(q, d).double(), wanted)
    one = integers(8, 1, 24, dtype=dtype, device=lane.device)
    assert torch.equal(lane.score([one, q[0], one, q[1]], d)[1::2].double(), wanted)


@interpreter_when(half)
@pytest.mark.parametrize("LQ", [1, 4])
@pytest.mark.parametrize("LD", [1, 4])
def test_one_wide_tiles(lane, dtype, LQ, LD):
    """Case 52: the maximum over one element, and of one row."""
    q, d = (
        -integers(9, 3, LQ, 16, dtype=dtype, device=lane.device).abs(),
        integers(10, 5, LD, 16, dtype=dtype, device=lane.device).abs(),
    )
    assert torch.equal(lane.score(q, d).double(), truth(q, d))


@interpreter_when(lambda lane, dtype, LD: half(lane, dtype) and LD < 1000)
@pytest.mark.parametrize("LD", [163, 643, 2000])
def test_winner_in_the_first_tile(lane, dtype, LD):
    """Case 77: similarities fall along a document of many tiles."""
    falling = torch.arange(LD, 0, -1, device=lane.device).clamp(max=250).to(dtype)
    d = torch.zeros(2, LD, 16, dtype=dtype, device=lane.device)
    d[:, :, 0] = falling - 100
    q = torch.zeros(1, 3, 16, dtype=dtype, device=lane.device)
    q[:, :, 0] = 1
    top = float(falling[0]) - 100
    assert lane.score(q, d).tolist() == [[3 * top] * 2]
    assert lane.score(q, [d[0], d[1]]).tolist() == [[3 * top] * 2]
    found = lane.matches(q, d)
    assert found.index.tolist() == [[[0] * 3] * 2]
    assert found.similarity.tolist() == [[[top] * 3] * 2]


@interpreter_when(half)
def test_half_precision_collects_in_float32(lane, dtype):
    """Case 36: a dot of 65,536, and 4,096 query tokens of 1; float16 holds neither sum."""
    wide = torch.full((1, 16), 64, dtype=dtype, device=lane.device)
    assert lane.score(wide, wide).tolist() == [[65536]]
    q = torch.zeros(4096, 16, dtype=dtype, device=lane.device)
    q[:, 3] = 1
    assert lane.score(q, q[:2]).tolist() == [[4096]]


@pytest.mark.interpreter
def test_no_items_and_no_tokens(lane):
    """Case 24: shapes, and no launch with an empty grid."""
    one = lane.tensor([[1.0, 2.0]])
    assert lane.score(one.new_empty(0, 3, 2), one).shape == (0, 1)
    assert lane.score([], one).shape == (0, 1)
    assert lane.score(one, []).shape == (1, 0)
    assert maxsim.score([], []).shape == (0, 0)  # of no device
    assert lane.score(one, one.new_empty(0, 3, 2)).shape == (1, 0)
    assert lane.score(one, one.new_empty(4, 0, 2)).tolist() == [[-INF] * 4]
    assert lane.score(one.new_empty(2, 0, 2), one).tolist() == [[0], [0]]
    assert lane.score(one.new_empty(2, 0, 2), one.new_empty(1, 0, 2)).tolist() == [[-INF], [-INF]]
    assert lane.score(one, Packed(one.new_empty(0, 2), [0, 0, 0])).tolist() == [[-INF] * 2]
    assert lane.score(one, Views(one, [0, 1], [1, 0])).tolist() == [[5, -INF]]
    assert lane.score(one, [one.new_empty(0, 2), one]).tolist() == [[-INF, 5]]
    assert lane.score([one.new_empty(0, 2), one], one).tolist() == [[0], [5]]
    assert lane.score(one, one.new_empty(1, 0, 3, 2)).shape == (1, 0)
    assert lane.score(one[None], [[]]).shape == (1, 0)
    assert lane.score_pairs(one, one, torch.empty(0, 2, dtype=torch.int64)).shape == (0,)
    assert maxsim.score_pairs([], []).shape == (0,)
    found = lane.matches(one.new_empty(2, 0, 2), one)
    assert found.index.shape == found.similarity.shape == (2, 1, 0)
    assert lane.matches(one, one.new_empty(4, 0, 2)).index.tolist() == [[[-1]] * 4]


@pytest.mark.interpreter
def test_empty_sides_have_gradients(lane):
    one = lane.tensor([[1.0, 2.0]])
    for q, d in (((2, 0, 2), (1, 3, 2)), ((2, 3, 2), (3, 0, 2)), ((0, 3, 2), (1, 3, 2)), ((2, 3, 2), (0, 3, 2))):
        a, b = one.new_ones(q).requires_grad_(), one.new_ones(d).requires_grad_()
        lane.score(a, b).sum().backward()
        assert torch.equal(a.grad, torch.zeros_like(a))
        assert torch.equal(b.grad, torch.zeros_like(b))


@interpreter_when(half)
def test_packed_with_a_bound_of_one(lane, dtype):
    """Case 17: lengths 0, 1, 0, 1."""
    tokens, q = (
        integers(11, 2, 16, dtype=dtype, device=lane.device),
        integers(12, 3, 16, dtype=dtype, device=lane.device),
    )
    found = lane.score(q, Packed(tokens, torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32), max_length=1))
    assert found[0, [0, 2]].tolist() == [-INF] * 2
    assert torch.equal(found[:, [1, 3]].double(), truth(q[None], tokens[:, None]))


@pytest.mark.interpreter
def test_empty_documents_leave_their_neighbours_alone(lane):
    items = [integers(n, n % 4, 16, device=lane.device) for n in range(9)]
    q = integers(13, 3, 16, device=lane.device)
    kept = [n for n, item in enumerate(items) if len(item)]
    found = lane.score(q, items)
    assert torch.equal(found[:, kept], lane.score(q, [items[n] for n in kept]))
    assert found[0, 0::4].tolist() == [-INF] * 3


@pytest.mark.parametrize("LD", [65534, 65535, 65536, 70001])
def test_winners_beyond_two_bytes(lane, LD):
    """Two bytes hold a winner up to 65,535 tokens a document, one of them standing for none."""
    q, d = torch.ones(2, 1, device=lane.device), torch.zeros(1, LD, 1, device=lane.device)
    for at in {0, 32767, 32768, LD - 1}:
        d.zero_()
        d[0, at] = 1
        assert lane.matches(q, d).index.unique().tolist() == [at]
        leaf = d.clone().requires_grad_()
        lane.score(q, leaf).sum().backward()
        assert leaf.grad.nonzero().tolist() == [[0, at, 0]]
        assert float(leaf.grad.sum()) == 2


@pytest.mark.interpreter
def test_strides_of_every_dimension(lane):
    """Case 55: items, rows and candidates permuted or spread; the same bits as from a contiguous copy."""
    base = integers(14, 6, 5, 4, 32, device=lane.device)
    q = integers(15, 2, 3, 32, device=lane.device)
    for d in (
        base[0].transpose(0, 1),
        base[::2, 1],
        base[:, ::2, 3],
        base[:, 0, 1:, :],
        base.permute(2, 0, 1, 3)[0],
        base[..., 1:30:2][0],
    ):
        query = q[..., : d.shape[-1]]
        wanted = lane.score(query.contiguous(), d.contiguous())
        assert torch.equal(lane.score(query, d), wanted)
        a, b = query.clone().requires_grad_(), d.clone().requires_grad_()
        base_leaf = d.detach().requires_grad_()
        lane.score(a, base_leaf).sum().backward()
        lane.score(query.clone(), b).sum().backward()
        assert torch.equal(base_leaf.grad, b.grad)
    own = base.permute(2, 0, 1, 3)[:2]  # [2, 6, 5, 32] candidates, nothing contiguous but the rows
    assert torch.equal(lane.score(q, own), lane.score(q, own.contiguous()))
    rows = base[0, :, 1]
    assert torch.equal(lane.score(q, Packed(rows, [0, 2, 5])), lane.score(q, Packed(rows.contiguous(), [0, 2, 5])))


def test_bigger_than_a_block(lane, dtype):
    """Many queries and documents, ragged both: several chunks of whatever a backend cuts into."""
    lengths = [(n * 29) % 60 for n in range(140)]
    documents = [integers(n, length, 24, dtype=dtype, device=lane.device) for n, length in enumerate(lengths)]
    queries = [integers(1000 + n, 1 + n % 40, 24, dtype=dtype, device=lane.device) for n in range(24)]
    found = lane.score(queries, documents)
    for a, b in ((0, 0), (23, 139), (11, 70), (23, 1), (1, 139), (20, 33)):
        wanted = truth(queries[a][None], documents[b][None]) if lengths[b] else torch.tensor([[-INF]])
        assert float(found[a, b]) == float(wanted), (a, b)
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=float("nan"))
    mask = torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]
    assert torch.equal(lane.score(queries, padded, None, mask), found)


def test_module_functions_take_no_backend_too(lane):
    q, d = integers(16, 2, 3, 8, device=lane.device), integers(17, 4, 5, 8, device=lane.device)
    assert maxsim.backend_for(q, d) in ("cpu", "triton")
    assert torch.equal(maxsim.score(q, d).cpu(), lane.score(q, d).cpu())
    assert torch.equal(maxsim.topk(q, d, 2).indices.cpu(), lane.topk(q, d, 2).indices.cpu())
