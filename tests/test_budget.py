"""Real-valued inputs against float64: the error stays within `budget.BUDGET` of what plain float32 PyTorch makes of
the same inputs."""

from __future__ import annotations

import pytest
import torch
from budget import BUDGET, STEP, TINY, WORST, check, plain_scores, rounded, scores_scale, true_scores
from lanes import NAMES, interpreter_when, random

from maxsim import reference

# (NQ, LQ, ND, LD, D): text, a page, one token, odd everything, wide
SHAPES = [(2, 32, 5, 180, 128), (1, 130, 2, 300, 64), (3, 1, 4, 1, 48), (2, 7, 3, 33, 77), (1, 9, 2, 40, 1030)]
SMALL = (SHAPES[2], SHAPES[3])


def small(lane, dtype, shape=SMALL[1], **others):
    return shape in SMALL and others.get("precision", "highest") in ("highest", "high")


def inputs(shape, dtype, device, seed=0):
    NQ, LQ, ND, LD, D = shape
    q, d = random(seed, NQ, LQ, D, dtype=dtype, device=device), random(seed + 1, ND, LD, D, dtype=dtype, device=device)
    q_mask, d_mask = random(seed + 2, NQ, LQ, device=device) > -1, random(seed + 3, ND, LD, device=device) > -0.5
    q_mask[:, 0] = d_mask[:, 0] = True
    return q, d, q_mask, d_mask


def test_vectorised_truth_is_the_oracle():
    q, d, q_mask, d_mask = inputs((2, 3, 4, 5, 6), torch.float32, "cpu")
    for masked in ("exclude", "zero"):
        found = true_scores(q, d, q_mask, d_mask, masked)
        for a in range(2):
            for b in range(4):
                wanted = reference.score(q[a].numpy(), d[b].numpy(), q_mask[a].numpy(), d_mask[b].numpy(), masked)
                assert abs(float(found[a, b]) - wanted) < 1e-13


def test_rounding_helper():
    value = torch.tensor([1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-7, 1 + 2.0**-8])
    assert rounded(value, "high").tolist() == [1 + 2.0**-10, 1, 1 + 2.0**-9, -1 - 2.0**-7, 1 + 2.0**-8]
    assert torch.equal(rounded(value, "medium"), value.bfloat16().float())


@interpreter_when(small)
@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores(lane, dtype, shape, masked):
    args = inputs(shape, dtype, lane.device)
    q, d, q_mask, d_mask = args
    found = lane.score(q, d, q_mask, d_mask, masked)
    plain = true_scores(*args, masked) if dtype == torch.float64 else plain_scores(*args, masked=masked)
    # float64 may use the float32 rounding too: what it is asked for is checked below, against the same sum in float64
    check(f"scores {lane} {NAMES[dtype]}", found, true_scores(*args, masked), plain, scores_scale(*args))


def test_float64_is_float64(lane):
    if torch.float64 not in lane.dtypes:
        pytest.skip("no float64 in this lane")
    args = inputs(SHAPES[0], torch.float64, lane.device)
    # the budget's rounding, of float64 instead of float32
    error = (lane.score(*args[:2], *args[2:]) - true_scores(*args)).abs() / scores_scale(*args)
    assert float(error.max()) < 2.0**-50


@interpreter_when(small)
@pytest.mark.dtypes(torch.float32)
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_precisions(lane, dtype, shape, precision):
    """As PyTorch's own switch says: each setting may err as much as a matrix product at that precision."""
    args = inputs(shape, dtype, lane.device, seed=7)
    torch.set_float32_matmul_precision(precision)
    found = lane.score(*args)
    check(
        f"scores {lane} f32 {precision}", found, true_scores(*args), plain_scores(*args, precision), scores_scale(*args)
    )


@interpreter_when(small)
@pytest.mark.dtypes(torch.float32)
@pytest.mark.parametrize("power", [-60, -20, 20, 60])
def test_float32_highest_at_any_magnitude(lane, dtype, power):
    """Splitting into halves must scale: tokens of one document differ by 2^20 besides."""
    q, d, q_mask, d_mask = inputs(SHAPES[3], dtype, lane.device, seed=9)
    q, d = q * 2.0**power, d * 2.0 ** (-power / 2)
    d[:, ::3] *= 2.0**20
    args = (q, d, q_mask, d_mask)
    torch.set_float32_matmul_precision("highest")
    check(f"scores {lane} f32 far", lane.score(*args), true_scores(*args), plain_scores(*args), scores_scale(*args))


@interpreter_when(small)
@pytest.mark.dtypes(torch.float32)
def test_float32_slices_of_different_size(lane, dtype):
    """Wide tokens are split by slices."""
    q, d, q_mask, d_mask = inputs((2, 7, 3, 33, 150), dtype, lane.device, seed=9)
    d[:, ::3, :64] *= 2.0**20
    d[:, 1::3, 128:] *= 2.0**20
    args = (q * 2.0**40, d * 2.0**-60, q_mask, d_mask)
    torch.set_float32_matmul_precision("highest")
    check(f"scores {lane} f32 slices", lane.score(*args), true_scores(*args), plain_scores(*args), scores_scale(*args))


@interpreter_when(small)
@pytest.mark.dtypes(torch.float32)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_slices_that_leave_its_range(lane, dtype, precision):
    """Scaled sums that are −inf after a slice, and would have returned after others, are not taken for small."""
    large = 2.0**128 / (64 * 2.0**13)
    q = torch.full((1, 2, 192), 2.0**-100, device=lane.device)
    d = torch.full((1, 3, 192), 1e-3 * large, device=lane.device)
    d[:, 0] = 0.9 * large
    d[:, 0, :64] = -1.2 * large
    args = (q, d, torch.ones(1, 2, device=lane.device) > 0, torch.ones(1, 3, device=lane.device) > 0)
    torch.set_float32_matmul_precision(precision)
    torch.testing.assert_close(lane.score(*args).double(), true_scores(*args), rtol=2e-3, atol=0)


@interpreter_when(small)
def test_cancelling_scores(lane, dtype):
    """Case 48: scores near 0 are held to the size of what cancels."""
    q, d, q_mask, d_mask = inputs(SHAPES[3], dtype, lane.device, seed=13)
    q, q_mask = torch.cat([q, -q], 1), torch.cat([q_mask, q_mask], 1)
    args = (q, d[:, :1], q_mask, d_mask[:, :1])
    found = lane.score(*args)
    assert bool((true_scores(*args).abs() <= 1e-3 * scores_scale(*args)).all())
    check(f"scores {lane} {NAMES[dtype]}", found, true_scores(*args), plain_scores(*args), scores_scale(*args))


def test_a_breach_names_the_worst_element():
    truth = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    found = truth.double().clone()
    found[1, 0] += 30 * BUDGET * 2.0**-24 * 1.01
    with pytest.raises(AssertionError, match=r"\(1, 0\): found 30\.00000.*truth 30.*allowed.*plain float32 30"):
        check("planted", found, truth, truth, truth)
    found[1, 0] = 30 + 30 * BUDGET * 2.0**-24 * 0.99
    check("planted", found, truth, truth, truth)
    WORST.pop("planted")
    found[0, 0] = float("nan")
    with pytest.raises(AssertionError, match="not finite"):
        check("planted", found, truth, truth, truth)


def unit(x):
    return x.double() / x.double().norm(dim=-1, keepdim=True).clamp_min(1e-12)


@interpreter_when(small)
def test_normalize(lane, dtype):
    args = inputs(SHAPES[3], dtype, lane.device, seed=17)
    q, d, q_mask, d_mask = args
    found = lane.score(*args, normalize=True)
    exact, norm = (unit(q), unit(d), q_mask, d_mask), torch.nn.functional.normalize
    plain = (norm(q.float(), dim=-1), norm(d.float(), dim=-1), q_mask, d_mask)
    check(f"normalize {lane} {NAMES[dtype]}", found, true_scores(*exact), plain_scores(*plain), scores_scale(*exact))


def grads_of(q, d, index, upstream, normalize, dtype):
    """Plain PyTorch in `dtype`, given the winners: gather, multiply, sum."""
    q, d = q.detach().to(dtype).requires_grad_(), d.detach().to(dtype).requires_grad_()
    a, b = (torch.nn.functional.normalize(x, dim=-1, eps=1e-12) if normalize else x for x in (q, d))
    _NQ, ND, _LQ = index.shape
    rows = b[torch.arange(ND, device=d.device)[None, :, None].expand_as(index), index.clamp_min(0)]
    terms = (a[:, None] * rows).sum(-1) * (index >= 0)
    return torch.autograd.grad((terms.sum(-1) * upstream.to(dtype)).sum(), (q, d))


@interpreter_when(lambda shape, **others: shape == SHAPES[3])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(lane, dtype, shape, normalize):
    """Given the winners, against float64; float32 accumulation, then one rounding to the input's dtype."""
    q, d, q_mask, d_mask = inputs(shape, dtype, lane.device, seed=21)
    q.requires_grad_(), d.requires_grad_()
    upstream = random(5, shape[0], shape[2], device=lane.device)
    scores = lane.score(q, d, q_mask, d_mask, normalize=normalize)
    scores.backward(upstream.to(scores))
    index = lane.matches(q, d, q_mask, d_mask, normalize=normalize).index
    truth = grads_of(q, d, index, upstream, normalize, torch.float64)
    plain = truth if dtype == torch.float64 else grads_of(q, d, index, upstream, normalize, torch.float32)
    # what is added up, in size: |upstream|·‖row‖ (over the own norm where normalised)
    norms = [x.detach().double().norm(dim=-1) for x in (q, d)]
    size_q, size_d = (torch.ones_like(n) if normalize else n for n in norms)
    _NQ, ND, _LQ = index.shape
    won = index >= 0
    rows = size_d[torch.arange(ND, device=d.device)[None, :, None].expand_as(index), index.clamp_min(0)] * won
    weight = upstream.abs().double()
    scale_q = torch.einsum("qni,qn->qi", rows, weight)
    terms = size_q[:, None] * weight[:, :, None] * won
    scale_d = torch.zeros_like(size_d)
    documents = torch.arange(ND, device=d.device)[None, :, None].expand_as(index)
    scale_d.index_put_((documents[won], index[won]), terms[won], accumulate=True)
    if normalize:
        scale_q, scale_d = 2 * scale_q / norms[0], 2 * scale_d / norms[1]
    for name, found, want, near, scale in zip(
        ("queries", "documents"), (q.grad, d.grad), truth, plain, (scale_q, scale_d), strict=True
    ):
        assert found.dtype == dtype
        whole = scale[..., None].expand_as(found)
        check(f"grad {name} {lane} {NAMES[dtype]}", found, want, near, whole, STEP[dtype], TINY[dtype])


@interpreter_when(small)
def test_similarities_add_up_to_the_score(lane, dtype):
    """The similarities of `matches` are the very terms of the score: added as a tree of adjacent pairs, its bits."""
    q, d, q_mask, d_mask = inputs(SHAPES[3], dtype, lane.device, seed=33)
    scores, found = lane.score(q, d, q_mask, d_mask), lane.matches(q, d, q_mask, d_mask)
    for a in range(q.shape[0]):
        terms = found.similarity[a][:, q_mask[a]]
        while terms.shape[1] > 1:
            terms = torch.nn.functional.pad(terms, (0, terms.shape[1] % 2))
            terms = terms[:, 0::2] + terms[:, 1::2]
        assert torch.equal(terms[:, 0], scores[a])
