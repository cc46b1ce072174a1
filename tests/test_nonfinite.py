"""NaN and inf as IEEE and `torch.max` have them, and poison in every place that no result may depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from forms import DOCUMENT_FORMS, NUMPY, Side, build, expected, make_side, tensor
from lanes import integers, interpreter_when
from test_exact import DOCUMENT_LENGTHS, PAIRS, QUERY_LENGTHS, built_pair, check_gradients, same

INF, NAN = float("inf"), float("nan")


def half(lane, dtype, **others):
    return dtype == torch.float16


def equal(found, wanted):
    return torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.nan_to_num(7.25), wanted.nan_to_num(7.25))


@pytest.mark.interpreter
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_behind_the_mask(lane, dtype, poison):
    """Case 50: 0.5, and gradients free of NaN."""
    q, d = (
        lane.tensor([[1, 0], [0, 1]], dtype).requires_grad_(),
        lane.tensor([[0.5, 0], [poison, poison]], dtype).requires_grad_(),
    )
    mask = torch.tensor([True, False])
    found = lane.score(q, d, None, mask)
    assert found.tolist() == [[0.5]]
    found.backward()
    assert q.grad.tolist() == [[0.5, 0]] * 2
    assert d.grad.tolist() == [[1, 1], [0, 0]]
    a, b = d.detach().clone().requires_grad_(), q.detach().clone().requires_grad_()
    found = lane.score(a, b, mask)
    found.backward()
    assert found.tolist() == [[0.5]]
    assert a.grad.tolist() == [[1, 0], [0, 0]]
    assert b.grad.tolist() == [[0.5, 0], [0, 0]]
    assert lane.score(q, d, None, mask, normalize=True).tolist() == [[1]]


@interpreter_when(
    lambda form, value, masked, **others: (
        half(**others) and (form, str(value), masked) in (("padded", "nan", "exclude"), ("packed32", "inf", "zero"))
    )
)
@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("form", ["padded", "packed32"])
def test_in_kept_tokens(lane, dtype, form, value, masked):
    """One bad number in one token of two documents and of a query: the oracle's scores and winners, NaN for NaN."""
    D = 19
    q, d = make_side(31, QUERY_LENGTHS, D, "holes"), make_side(32, [*DOCUMENT_LENGTHS, 70, 6], D, "holes")
    d.items[3][5, 2] = d.items[6][66, 18] = value
    d.masks[3][5] = d.masks[6][66] = True
    for bad in (None, 0):
        if bad is not None:
            q.items[bad] = q.items[bad].copy()
            q.items[bad][1, 0], q.masks[bad][1] = value, True
        a, b = build(form, q, dtype, lane.device), build(form, d, dtype, lane.device)
        scores, index, similarity = (torch.tensor(x) for x in expected(a.seen, b.seen, masked))
        found = lane.score(a.value(), b.value(), a.mask, b.mask, masked)
        matched = lane.matches(a.value(), b.value(), a.mask, b.mask, masked)
        assert equal(found.cpu().double(), scores)
        assert equal(matched.similarity.cpu().double(), similarity)
        assert torch.equal(matched.index.cpu(), index)


@interpreter_when(half)
def test_nan_stays_in_its_document(lane, dtype):
    q, d = (
        integers(1, 2, 3, 16, dtype=dtype, device=lane.device),
        integers(2, 5, 40, 16, dtype=dtype, device=lane.device),
    )
    wanted = lane.score(q, d)
    d[2, 39, 7] = NAN
    found = lane.score(q, d)
    assert found[:, 2].isnan().all()
    assert torch.equal(found[:, [0, 1, 3, 4]], wanted[:, [0, 1, 3, 4]])
    packed = lane.score(q, list(d))
    assert packed[:, 2].isnan().all()
    assert torch.equal(packed[:, [0, 1, 3, 4]], wanted[:, [0, 1, 3, 4]])
    q[1, 0, 0] = NAN
    found = lane.score(q, d)
    assert found[1].isnan().all()
    assert not found[0, :2].isnan().any()


@interpreter_when(half)
def test_all_similarities_minus_infinite(lane, dtype):
    """Not the same as no token at all: the first one wins, and takes the gradient."""
    q, d = lane.tensor([[1, 0]], dtype), lane.tensor([[-INF, 0], [-INF, 0]], dtype).requires_grad_()
    assert lane.score(q, d).tolist() == [[-INF]]
    assert lane.matches(q, d).index.tolist() == [[[0]]]
    lane.score(q, d).backward()
    assert d.grad.tolist() == [[1, 0], [0, 0]]


@interpreter_when(lambda lane, dtype: True)
@pytest.mark.dtypes(torch.float32, torch.bfloat16)
def test_overflow_of_float32(lane, dtype):
    """A product beyond float32 is inf, as a float32 matmul has it, and no NaN out of a split into halves."""
    q, d = lane.tensor([[2.0**100, 1]], dtype), lane.tensor([[2.0**100, 1], [-(2.0**100), 5]], dtype)
    assert lane.score(q, d).tolist() == [[INF]]
    assert lane.score(-q, d).tolist() == [[INF]]
    assert lane.score(q, d[1:]).tolist() == [[-INF]]
    big = 1.5 * 2.0**127  # finite, and no more than three bits
    assert lane.score(lane.tensor([[1, 0]], dtype), lane.tensor([[big, 0]], dtype)).tolist() == [[big]]


@interpreter_when(lambda lane, dtype: True)
@pytest.mark.dtypes(torch.float16)
def test_subnormal_float16(lane, dtype):
    q, d = integers(3, 2, 3, 16, device=lane.device), integers(4, 3, 5, 16, device=lane.device)
    small = (d * 2.0**-24).to(dtype)
    assert torch.equal(lane.score(q.to(dtype), small), lane.score(q, d) * 2.0**-24)


@interpreter_when(
    lambda forms, masks, masked, **others: (
        half(**others) and masks == "holes" and masked == "exclude" and "views" in forms
    )
)
@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("masks", ["none", "holes"])
@pytest.mark.parametrize(
    "forms",
    [*PAIRS[:1], ("padded", "padded"), ("packed32", "packed32"), ("views", "views"), ("padded", "candidates")],
    ids="/".join,
)
def test_fresh_memory(lane, dtype, poisoned, forms, masks, masked):
    """Every byte of a result and of a gradient is written, with fresh and freed memory full of NaN."""
    q, d = built_pair(lane, dtype, *forms, masks)
    scores, index, _ = expected(q.seen, d.seen, masked)
    found = lane.score(q.value(), d.value(), q.mask, d.mask, masked)
    assert same(found.detach(), scores, torch.float64 if dtype == torch.float64 else torch.float32)
    matched = lane.matches(q.value(), d.value(), q.mask, d.mask, masked)
    assert same(matched.index[..., : index.shape[2]], index, torch.int64)
    check_gradients(found, q, d, index)


@interpreter_when(half)
def test_gradient_of_what_won_nothing_is_zero(lane, dtype, poisoned):
    """Rows without a win, masked rows, empty documents and gaps between views."""
    side = Side([np.eye(16)[:3] * 2, np.zeros((0, 16)), np.eye(16)[3:9]])
    q = tensor(np.eye(16)[[0, 5]], dtype, lane.device).requires_grad_()
    d = build("views", side, dtype, lane.device)
    leaf = d.leaves[0].requires_grad_()
    scores = lane.score(q, d.value())
    assert scores.tolist() == [[2, -INF, 1]]
    scores[:, [0, 2]].sum().backward()
    grads = [np.zeros(item.shape) for item in side.items]
    grads[0][0, 0] = grads[0][0, 5] = 1  # token 5 ties at 0 everywhere: the first
    grads[2][0, 0], grads[2][2, 5] = 1, 1
    assert same(leaf.grad, d.spread(grads)[0], dtype)


def test_poison_in_every_form(lane):
    """The forms' own NaN: padding, gaps and what surrounds a strided tensor."""
    poisoned_forms = []
    for form in DOCUMENT_FORMS:
        if form in NUMPY:
            continue
        leaf = build(form, make_side(1, [2, 4], 3), torch.float32, lane.device, 2).leaves[0]
        poisoned_forms += [form] if leaf.isnan().any() else []
    assert poisoned_forms == ["padded", "strided", "transposed", "views", "jagged-holes", "candidates"]
