"""Training through quantised documents: their gradients at the winners of the codes, as if they were floats."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from codes import CODECS, SCALED, SCALES, needs_codec, served
from forms import CANDIDATES, DOCUMENT_FORMS, NUMPY, build, expected_grads, make_side
from lanes import integers, interpreter_when, random

import maxsim
from maxsim import Packed, Quantized, quantize

OPTIONS = [{"codec": codec, "scale": scale} for codec in SCALED for scale in SCALES]
OPTIONS += [{"codec": "residual", "bits": 2, "centroids": 4}, {"codec": "pq", "parts": 4}]
NAMES = ["-".join(map(str, options.values())) for options in OPTIONS]


def straight(documents, mask=None, **options) -> Quantized:
    return quantize(documents, document_mask=mask, straight_through=True, **options)


def of_float_backward(q, d, winners, upstream):
    """Σ upstream · q at the winners `[NQ, ND, LQ]`, for documents `[ND, LD, D]`, float64."""
    grads = torch.zeros_like(d, dtype=torch.float64)
    for n in range(len(d)):
        for a in range(len(q)):
            grads[n].index_add_(0, winners[a, n], upstream[a, n] * q[a].double())
    return grads


@interpreter_when(lambda options, normalize, **_: options["codec"] == "int8" and not normalize)
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.dtypes(torch.float16, torch.bfloat16, torch.float32)
def test_gradients_at_the_winners_of_the_codes(lane, dtype, options, normalize):
    needs_codec(lane, options["codec"])
    q = random(1, 3, 5, 16, dtype=dtype, device=lane.device).requires_grad_()
    d = random(2, 4, 40, 16, dtype=dtype, device=lane.device).requires_grad_()
    made = straight(d, normalize=normalize, **options)
    scores = lane.score(q, made, normalize=normalize)
    upstream = random(3, 3, 4, device=lane.device)
    scores.backward(upstream)
    fixed = quantize(d.detach(), normalize=normalize, **options)
    alone = q.detach().clone().requires_grad_()
    found = lane.score(alone, fixed, normalize=normalize)
    found.backward(upstream)
    assert torch.equal(scores, found)
    assert torch.equal(q.grad, alone.grad)
    winners = lane.matches(alone.detach(), fixed, normalize=normalize).index
    if options["codec"] == "residual":
        assert not torch.equal(winners, lane.matches(q.detach(), d.detach(), normalize=normalize).index)
    leaf = d.detach().double().requires_grad_()
    unit = torch.nn.functional.normalize(leaf, dim=-1) if normalize else leaf
    asked = torch.nn.functional.normalize(q.detach().double(), dim=-1) if normalize else q.detach()
    unit.backward(of_float_backward(asked, leaf.detach(), winners, upstream.double()))
    rounding = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}[dtype]
    assert (d.grad.double() - leaf.grad).abs().max() <= rounding * leaf.grad.abs().max()
    assert d.grad.dtype == dtype


@pytest.mark.parametrize("form", [form for form in DOCUMENT_FORMS if form not in NUMPY])
@pytest.mark.parametrize("masks", ["none", "holes"])
def test_any_form(lane, form, masks):
    """Integers, whose codes are none: gradients are exact. Rows outside the mask and in gaps get none."""
    for codec in served(lane):
        options = {"parts": 1} if codec == "pq" else {}
        side = make_side(3, [7, 0, 3, 17, 1, 4], 19, masks)
        built = build(form, side, torch.float32, lane.device, copies=2)
        for leaf in built.leaves:
            leaf.requires_grad_()
        made = straight(built.value(), built.mask, codec=codec, **options)
        q = integers(4, 2, 5, 19, device=lane.device)
        queries = make_side(0, [5, 5], 19)
        queries.items = list(q.double().cpu().numpy())
        upstream = np.array([[1, -1, 2, 1, 0, 1], [0, 1, 1, -2, 1, 1]], np.float64)
        index = lane.matches(q, made).index.cpu().numpy()
        _, wanted = expected_grads(queries, built.seen, index, upstream)
        scores = lane.score(q, made)
        scores.backward(torch.tensor(upstream).to(scores))
        for leaf, grad in zip(built.leaves, built.spread(wanted), strict=True):
            assert np.array_equal(leaf.grad.double().cpu().numpy(), grad)
        if form in CANDIDATES:
            continue
        before = [leaf.grad.clone() for leaf in built.leaves]
        for leaf in built.leaves:
            leaf.grad = None
        pairs = torch.cartesian_prod(torch.arange(2), torch.arange(6))
        some = lane.score_pairs(q, straight(built.value(), built.mask, codec=codec, **options), pairs)
        some.backward(torch.tensor(upstream).view(-1).to(some))
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(built.leaves, before, strict=True))


def test_selected_documents(lane):
    """Gradients go to those that were selected, added up where one was twice."""
    padded = random(5, 6, 4, 8, device=lane.device)
    q = random(6, 2, 3, 8, device=lane.device)
    for shape in ("padded", "list"):
        for index in (slice(1, 4), slice(None, None, 2), [5, 0, 5], torch.arange(6) > 2, [[0, 1], [3, 3]], 2):
            grads = []
            for selected_first in (False, True):
                d = padded.clone().requires_grad_()
                made = straight(d if shape == "padded" else list(d))
                chosen = torch.arange(6)[torch.tensor(index) if isinstance(index, list) else index]
                if selected_first:
                    some = made[index] if isinstance(index, int) or len(chosen.shape) == 2 else made[index].compact()
                    scores = lane.score(q, some)
                else:
                    scores = lane.score(q, made)
                    chosen = chosen.to(lane.device)
                    scores = scores.gather(1, chosen) if chosen.ndim == 2 else scores[:, chosen.view(-1)]
                scores.pow(2).sum().backward()
                grads.append(d.grad)
            assert torch.allclose(*grads, rtol=1e-5, atol=1e-5)
            assert grads[0].any()


def test_only_where_asked(tmp_path):
    d, q = random(7, 3, 4, 8).requires_grad_(), random(8, 2, 3, 8)
    assert not maxsim.score(q, quantize(d)).requires_grad
    made = straight(d)
    assert maxsim.score(q, made).requires_grad
    assert made.floats is d
    assert made.nbytes == quantize(d).nbytes
    assert straight(d.detach()).floats is None
    with torch.no_grad():
        assert straight(d).floats is None
        assert not maxsim.score(q, made).requires_grad
    assert maxsim.topk(q, made, 2).indices.shape == (2, 2)
    assert maxsim.certified_topk(q, made, d, 2).indices.equal(maxsim.topk(q, d, 2).indices)
    assert made.to("cpu").floats is d
    made.save(tmp_path / "d")
    assert Quantized.load(tmp_path / "d").floats is None
    again = copy.deepcopy(made)
    maxsim.score(q, again).sum().backward()
    assert d.grad is None
    assert again.floats.grad.any()


def test_refused():
    d, q = random(9, 3, 4, 8).requires_grad_(), random(10, 2, 3, 8)
    with pytest.raises(TypeError, match=r"queries are torch.float16 .* torch.float32: cast"):
        maxsim.score(q.half(), straight(d))
    with pytest.raises(TypeError, match="straight_through takes documents of float16"):
        straight(d.double())
    with pytest.raises(TypeError, match="straight_through must be True or False, got int"):
        quantize(d, straight_through=1)
    made = straight(d)
    scores = maxsim.score(q, made)
    with torch.no_grad():
        d.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()
    scores = maxsim.score(q, straight(d))
    made.codes.zero_()
    (grad,) = torch.autograd.grad(scores.sum(), d, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    scores = maxsim.score(q, made)
    made.codes.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


def test_nothing_to_score(lane):
    q = random(11, 2, 3, 8, device=lane.device).requires_grad_()
    for shape in ((0, 4, 8), (3, 0, 8)):
        d = torch.empty(shape, device=lane.device, requires_grad=True)
        scores = lane.score(q, straight(d))
        torch.where(scores.isfinite(), scores, 0).sum().backward()
        assert d.grad.shape == shape
    d = random(12, 3, 4, 8, device=lane.device).requires_grad_()
    lane.score(q[:0], straight(d)).sum().backward()
    assert d.grad.shape == d.shape
    assert not d.grad.any()


@pytest.mark.parametrize("codec", CODECS)
def test_compiled(lane, codec):
    needs_codec(lane, codec)
    torch.compiler.reset()
    q = random(13, 2, 3, 8, device=lane.device)
    for shape in ((4, 5, 8), (20, 8)):  # leaves, whose gradient dynamo asks for without a warning
        grads = []
        for compiled in (False, True):
            asked = q.clone().requires_grad_()
            d = random(14, *shape, device=lane.device).requires_grad_()
            documents = d if d.ndim == 3 else Packed(d, torch.tensor([0, 3, 3, 11, 20]))
            made = straight(documents, codec=codec, **({"parts": 4} if codec == "pq" else {}))

            def loss(asked, made=made):
                scores = lane.score(asked, made)
                return torch.where(scores.isfinite(), scores, 0).pow(2).sum()

            (torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss)(asked).backward()
            grads.append((asked.grad, d.grad))
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
        assert grads[0][1].any()


@pytest.mark.parametrize("codec", CODECS)
def test_documents_learn(lane, codec):
    """Each query finds its own document among codes of few values, which the first codes do not allow."""
    needs_codec(lane, codec)
    q = random(15, 8, 4, 16, device=lane.device)
    d = (random(16, 8, 6, 16, device=lane.device) / 4).requires_grad_()
    options = {"residual": {"bits": 1, "centroids": 8}, "pq": {"parts": 4}}.get(codec, {})
    optimizer, labels, losses = torch.optim.Adam([d], lr=0.05), torch.arange(8, device=lane.device), []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(lane.score(q, straight(d, codec=codec, **options)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
