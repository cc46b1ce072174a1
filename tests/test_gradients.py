"""Autograd: any upstream gradient, any subset of inputs, ties, reuse, autocast, chunked training; exact where
integers allow."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from forms import build, expected, expected_grads, make_side
from lanes import integers, interpreter_when, random
from test_exact import same
from torch.autograd import forward_ad

import maxsim
from maxsim import dispatch, plans
from maxsim.kernels import cpu_product

NQ, ND, LQ, LD, D = 4, 6, 3, 9, 16


def half(lane, dtype, **others):
    return dtype == torch.float16


def problem(lane, dtype, seed=0):
    q = integers(seed, NQ, LQ, D, dtype=dtype, device=lane.device)
    d = integers(seed + 1, ND, LD, D, dtype=dtype, device=lane.device)
    return q.requires_grad_(), d.requires_grad_()


def plain(q, d):
    """Autograd's own gradients, ties to the lowest index: `max` over one dimension picks one, here made sure to be
    the first."""
    similarity = torch.einsum("qid,njd->qnij", q.double(), d.double())
    first = (similarity == similarity.amax(-1, keepdim=True)).int().argmax(-1, keepdim=True)
    return similarity.gather(-1, first).sum((-1, -2))


UPSTREAMS = {
    "sum": lambda s: s.sum(),
    "transposed": lambda s: s.T[::2].sum(),
    "strided": lambda s: (s * torch.arange(-7, 5, device=s.device).repeat(4)[: 2 * s.numel()][::2].view_as(s)).sum(),
    "column": lambda s: s[:, 1].sum() * 2,
    "mean": lambda s: s.mean() * s.numel(),
    "diagonal": lambda s: s.diagonal().sum() - s.flip(1).diagonal().sum(),
}


@interpreter_when(lambda upstream, **others: half(**others) and upstream in ("sum", "transposed"))
@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_any_upstream(lane, dtype, upstream):
    """Case 54: stride 0, transposed, every other row."""
    q, d = problem(lane, dtype)
    a, b = (x.detach().clone().requires_grad_() for x in (q, d))
    UPSTREAMS[upstream](lane.score(q, d)).backward()
    UPSTREAMS[upstream](plain(a, b)).backward()
    assert torch.equal(q.grad, a.grad)
    assert torch.equal(d.grad, b.grad)


def test_upstream_tensors_as_they_lie(lane, dtype):
    """Expanded, strided and transposed gradients handed over directly."""
    q, d = problem(lane, dtype)
    wide = integers(5, NQ, 2 * ND, device=lane.device)
    for given in (
        wide[:, ::2],
        wide[:, 1:2].expand(NQ, ND),
        wide[:1, :ND].expand(NQ, ND),
        integers(6, ND, NQ, device=lane.device).T,
    ):
        scores = lane.score(q, d)
        found = torch.autograd.grad(scores, (q, d), given.to(scores))
        wanted = torch.autograd.grad(lane.score(q, d), (q, d), given.to(scores).contiguous())
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
        a, b = (x.detach().requires_grad_() for x in (q, d))
        exact = torch.autograd.grad(plain(a, b), (a, b), given.double())
        assert all(torch.equal(x, y) for x, y in zip(found, exact, strict=True))


@interpreter_when(half)
@pytest.mark.parametrize(("of_q", "of_d"), [*itertools.product([False, True], repeat=2)])
def test_only_what_is_needed(lane, dtype, of_q, of_d):
    """Case 56."""
    q, d = problem(lane, dtype)
    wanted = torch.autograd.grad(lane.score(q, d).sum(), (q, d))
    a, b = q.detach().requires_grad_(of_q), d.detach().requires_grad_(of_d)
    scores = lane.score(a, b)
    assert scores.requires_grad == (of_q or of_d)
    if scores.requires_grad:
        scores.sum().backward()
    assert torch.equal(a.grad, wanted[0]) if of_q else a.grad is None
    assert torch.equal(b.grad, wanted[1]) if of_d else b.grad is None


@pytest.mark.interpreter
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_winners_are_kept_only_for_a_gradient(lane, mode, monkeypatch):
    """Case 56: nothing saved where nobody will ask."""
    module, asked = dispatch._load(lane.backend), []
    forward = module.forward

    def spy(problem, winners, maxima):
        asked.append(winners)
        return forward(problem, winners, maxima)

    monkeypatch.setattr(module, "forward", spy)
    plans._plans.clear()
    q, d = problem(lane, torch.float32)
    with mode():
        scores = lane.score(q, d)
    assert not scores.requires_grad
    assert asked == [False]
    plans._plans.clear()
    lane.score(q.detach(), d.detach())
    assert asked == [False, False]
    lane.score(q, d)
    assert asked == [False, False, True]


def test_inference_tensors(lane, dtype):
    with torch.inference_mode():
        q, d = (x.detach() for x in problem(lane, dtype))
        found = lane.score(q * 1, d * 1)
    assert torch.equal(found, lane.score(q, d))


@pytest.mark.interpreter
def test_places_and_codes_made_in_inference_mode(lane):
    """Queries learn against documents that were packed, chosen or quantised where an encoder's inference mode was."""
    q, d = problem(lane, torch.float32)
    tokens, offsets = d.detach().flatten(0, 1), torch.arange(len(d) + 1) * d.shape[1]

    def made():
        codes = maxsim.quantize(d.detach())
        return maxsim.Packed(tokens, offsets), maxsim.Views(tokens, offsets[:-1], offsets.diff()), codes, codes[[2, 0]]

    wanted = made()
    with torch.inference_mode():
        found = made()
    for ours, theirs in zip(found, wanted, strict=True):
        for call in (lane.score, lambda a, b: lane.score_pairs(a, b, [[0, 1]])):
            grads = [torch.autograd.grad(call(q, each).sum(), q)[0] for each in (ours, theirs)]
            assert torch.equal(*grads)


@pytest.mark.interpreter
def test_lazily_negated_tensors(lane):
    """PyTorch negates some views by a flag, as `z.conj().imag`, and leaves memory as it is: kernels read that."""
    q, d = (x.detach() for x in problem(lane, torch.float32))
    negated = [torch.complex(torch.zeros_like(x), -x).conj().imag for x in (q, d)]
    assert all(x.is_neg() for x in negated)
    wanted = lane.score(q, d)
    assert torch.equal(lane.score(q, d), wanted)  # on a GPU by the launch that is kept
    for a, b in ((negated[0], d), (q, negated[1]), (q, list(negated[1]))):
        assert torch.equal(lane.score(a, b), wanted)
    upstream = -integers(7, *wanted.shape, device=lane.device)
    grads = []
    for grad in (upstream, torch.complex(torch.zeros_like(upstream), -upstream).conj().imag):
        leaves = [x.clone().requires_grad_() for x in (q, d)]
        grads.append(torch.autograd.grad(lane.score(*leaves), leaves, grad))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


@interpreter_when(half)
@pytest.mark.parametrize("LD", [2, 40, 300])
def test_ties_go_to_the_first(lane, dtype, LD):
    """Case 60: within a tile and across tiles; the whole gradient, once."""
    q = torch.zeros(1, 2, 16, dtype=dtype, device=lane.device)
    q[0, :, 0] = 1
    d = torch.zeros(2, LD, 16, dtype=dtype, device=lane.device)
    d[0, [0, LD - 1], 0] = 1
    d[1, [LD // 2, LD - 1], 0] = 1
    d.requires_grad_()
    lane.score(q, d).sum().backward()
    wanted = torch.zeros_like(d)
    wanted[0, 0, 0] = wanted[1, LD // 2, 0] = 2
    assert torch.equal(d.grad, wanted)


@interpreter_when(half)
@pytest.mark.parametrize(("LQ", "LD"), [(1, 1), (76, 1), (1, 76)])
def test_short_sides(lane, dtype, LQ, LD):
    """Case 19."""
    q, d = (
        integers(1, 1, LQ, D, dtype=dtype, device=lane.device),
        integers(2, 1, LD, D, dtype=dtype, device=lane.device),
    )
    q.requires_grad_(), d.requires_grad_()
    lane.score(q, d).backward()
    if LD == 1:
        assert torch.equal(q.grad, d.detach().expand_as(q))
        assert torch.equal(d.grad, q.detach().sum(1, keepdim=True))
    else:
        best = int((d.double() @ q.double()[0, 0])[0].argmax())
        assert torch.equal(q.grad[0, 0], d[0, best])
        assert int(d.grad.ne(0).any(-1).sum()) == 1


@interpreter_when(half)
def test_shared_upstream_is_left_alone(lane, dtype):
    """Case 63."""
    q, d = problem(lane, dtype)
    g = integers(9, NQ, ND, device=lane.device).to(torch.float64 if dtype == torch.float64 else torch.float32)
    kept = g.clone()
    first, second = lane.score(q, d), lane.score(q, d)
    one = torch.autograd.grad(first, (q, d), g)
    two = torch.autograd.grad(second, (q, d), g)
    assert torch.equal(g, kept)
    for x, y in zip(one, two, strict=True):
        assert torch.equal(x, y)
        assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
        assert x.untyped_storage().data_ptr() != g.untyped_storage().data_ptr()


def test_two_backwards(lane, dtype):
    q, d = problem(lane, dtype)
    scores = lane.score(q, d)
    scores.sum().backward(retain_graph=True)
    once = q.grad.clone(), d.grad.clone()
    scores.sum().backward()
    assert torch.equal(q.grad, 2 * once[0])
    assert torch.equal(d.grad, 2 * once[1])
    with pytest.raises(RuntimeError, match="second time"):
        scores.sum().backward()


def test_scores_may_be_overwritten(lane, dtype):
    q, d = problem(lane, dtype)
    wanted = torch.autograd.grad(lane.score(q, d).mul(2).sum(), (q, d))
    scores = lane.score(q, d)
    scores.mul_(2)
    loss = scores.sum()
    found = torch.autograd.grad(loss, (q, d))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    scores = lane.score(q, d)
    loss = scores.sum()
    with torch.no_grad():
        scores.fill_(float("nan"))
    found = torch.autograd.grad(loss, (q, d))
    assert all(torch.equal(2 * x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("which", [0, 1])
def test_overwritten_tokens_are_noticed(lane, which):
    leaves = problem(lane, torch.float32)
    inputs = [x * 1 for x in leaves]
    scores = lane.score(*inputs)
    inputs[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


@pytest.mark.parametrize("kind", ["grid", "candidates", "packed"])
def test_a_call_like_an_earlier_one(kind, monkeypatch):
    """What a backend makes again has its gradients, of whichever side asks for them, and notices what was edited."""
    from maxsim.autograd import planned_scores
    from maxsim.backends import cpu
    from maxsim.layout import make_problem

    def documents(seed):
        d = integers(seed, *{"grid": (ND, LD), "candidates": (NQ, 2, LD), "packed": (ND * LD,)}[kind], D)
        return d.requires_grad_(), maxsim.Packed(d, offsets) if kind == "packed" else d

    forward, offsets = cpu.forward, torch.arange(0, ND * LD + 1, LD)

    def repeatable(problem, winners, maxima):
        def again(queries, documents):
            found = forward(problem.with_leaves(queries, documents), winners, maxima)
            return found.scores.view(NQ, -1), found.winners

        return forward(problem, winners, maxima)._replace(again=again)

    monkeypatch.setattr(cpu, "forward", repeatable)
    _, plan = planned_scores(make_problem(integers(1, NQ, LQ, D).requires_grad_(), documents(2)[1]), None)
    for of_q, of_d in ((True, True), (False, True), (True, False)):
        q, (d, form) = integers(3, NQ, LQ, D).requires_grad_(of_q), documents(4)
        d.requires_grad_(of_d)
        scores, wanted = plan(q, d), maxsim.score(q, form)
        assert torch.equal(scores, wanted)
        leaves = [x for x in (q, d) if x.requires_grad]
        upstream = integers(5, *scores.T.shape).T
        found = torch.autograd.grad(scores, leaves, upstream, retain_graph=True)
        assert all(map(torch.equal, found, torch.autograd.grad(wanted, leaves, upstream)))
        with torch.no_grad():
            (offsets if kind == "packed" else leaves[0]).add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            scores.sum().backward()


@pytest.mark.interpreter
@pytest.mark.parametrize("with_more", [False, True])
@pytest.mark.parametrize("upstream_too", [False, True])
def test_second_derivative_raises(lane, with_more, upstream_too):
    """Right or an error: a gradient penalty must not silently lose its own gradient, beside another loss or alone."""
    q, d = problem(lane, torch.float32)
    scores = lane.score(q, d)
    given = torch.ones_like(scores).requires_grad_(upstream_too)
    (grad,) = torch.autograd.grad(scores, q, given, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        (grad.square().sum() + (q.sum() if with_more else 0)).backward()


@interpreter_when(half)
@pytest.mark.dtypes(torch.float16, torch.bfloat16, torch.float32)
def test_autocast_changes_nothing(lane, dtype):
    """Cases 64 and 65: an upstream gradient of 1e5 stays finite; dtypes stay the inputs'."""
    amp = torch.float16 if lane.device == "cpu" and dtype == torch.float16 else torch.bfloat16
    q, d = random(3, 2, 5, 32, dtype=dtype, device=lane.device), random(4, 3, 8, 32, dtype=dtype, device=lane.device)
    q, d = (q * 2.0**-10).requires_grad_(), (d * 2.0**-10).requires_grad_()
    upstream = torch.full((2, 3), 1e5, device=lane.device)
    scores = lane.score(q, d)
    wanted = torch.autograd.grad(scores, (q, d), upstream)
    with torch.autocast(lane.device, amp):
        inside = lane.score(q, d)
        found = torch.autograd.grad(inside, (q, d), upstream)
    late = torch.autograd.grad(lane.score(q, d), (q, d), upstream)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, scores)
    for x, y, z in zip(found, wanted, late, strict=True):
        assert x.dtype == dtype
        assert torch.isfinite(x).all()
        assert torch.equal(x, y)
        assert torch.equal(x, z)


@pytest.mark.interpreter
def test_mixed_dtypes_raise_under_autocast_too(lane):
    """Case 65: one rule everywhere, an error that names both and the cast."""
    q, d = problem(lane, torch.float32)
    for a, b in ((q, d.detach().half()), (q.detach().half(), d)):
        for enabled in (False, True):
            with (
                torch.autocast(lane.device, torch.bfloat16, enabled=enabled),
                pytest.raises(TypeError, match=r"\.to\("),
            ):
                lane.score(a, b)


@interpreter_when(half)
@pytest.mark.dtypes(torch.float16, torch.bfloat16)
def test_masked_document_in_a_loss(lane, dtype):
    """Case 15: loss and gradients finite, the masked document's exactly 0, its neighbours' bits as without it."""
    q = (random(5, 2, 4, 32, device=lane.device) / 64).to(dtype).requires_grad_()
    d = random(6, 3, 7, 32, dtype=dtype, device=lane.device).requires_grad_()
    mask = torch.ones(3, 7, dtype=torch.bool, device=lane.device)
    mask[1] = False
    scores = lane.score(q, d, None, mask)
    assert torch.equal(scores[:, [0, 2]], lane.score(q, d[[0, 2]]))
    loss = torch.nn.functional.cross_entropy(scores / 0.02, torch.tensor([0, 2], device=lane.device))
    loss.backward()
    assert all(torch.isfinite(x).all() for x in (loss, q.grad, d.grad))
    assert torch.equal(d.grad[1], torch.zeros_like(d.grad[1]))
    assert d.grad[[0, 2]].any()


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_cached_gradients_in_chunks(lane, dtype, chunk):
    """Case 59: a batch in chunks, all forwards before all backwards, gives the gradients of the whole."""
    q, d = (
        integers(7, 8, 3, 16, dtype=dtype, device=lane.device),
        integers(8, 8, 5, 16, dtype=dtype, device=lane.device),
    )
    upstream = integers(9, 8, 8, device=lane.device)
    a, b = q.clone().requires_grad_(), d.clone().requires_grad_()
    whole = lane.score(a, b)
    whole.backward(upstream.to(whole))
    x, y = q.clone().requires_grad_(), d.clone().requires_grad_()
    parts = [(lane.score(x[low : low + chunk], y), upstream[low : low + chunk]) for low in range(0, 8, chunk)]
    assert torch.equal(torch.cat([scores for scores, _ in parts]).detach(), whole.detach())
    for scores, given in parts:
        scores.backward(given.to(scores))
    assert torch.equal(x.grad, a.grad)
    assert torch.equal(y.grad, b.grad)


@interpreter_when(half)
def test_given_the_winners_the_oracle(lane, dtype):
    """Ragged and masked, with an upstream gradient on empty documents too: those give exactly 0."""
    q = build("packed32", make_side(1, [3, 0, 5], D, "holes"), dtype, lane.device)
    d = build("packed64", make_side(2, [4, 0, 9, 1], D, "holes"), dtype, lane.device)
    upstream = np.arange(12.0).reshape(3, 4) - 5
    for leaf in (*q.leaves, *d.leaves):
        leaf.requires_grad_()
    scores = lane.score(q.value(), d.value(), q.mask, d.mask)
    scores.backward(torch.tensor(upstream).to(scores))
    _, index, _ = expected(q.seen, d.seen)
    of_q, of_d = expected_grads(q.seen, d.seen, index, upstream)
    assert same(q.leaves[0].grad, q.spread(of_q)[0], dtype)
    assert same(d.leaves[0].grad, d.spread(of_d)[0], dtype)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["grid", "pairs", "candidates"])
def test_gradcheck(lane, kind, normalize):
    """float64, where there is one: PyTorch's own check, at inputs without near ties."""
    if torch.float64 not in lane.dtypes:
        pytest.skip("no float64 in this lane")
    q, d = (
        random(10, 2, 3, 5, dtype=torch.float64).requires_grad_(),
        random(11, 3, 4, 5, dtype=torch.float64).requires_grad_(),
    )
    calls = {
        "grid": lambda q, d: lane.score(q, d, normalize=normalize),
        "pairs": lambda q, d: lane.score_pairs(q, d, np.array([[0, 2], [1, 1], [0, 2]]), normalize=normalize),
        "candidates": lambda q, d: lane.score(q, d.expand(2, 3, 4, 5), normalize=normalize),
    }
    assert torch.autograd.gradcheck(calls[kind], (q, d))


def test_pairs_and_candidates_are_the_grid(lane, dtype):
    q, d = problem(lane, dtype)
    upstream = integers(12, NQ, ND, device=lane.device)
    grid = lane.score(q, d)
    wanted = torch.autograd.grad(grid, (q, d), upstream.to(grid))
    pairs = torch.cartesian_prod(torch.arange(NQ), torch.arange(ND))
    found = torch.autograd.grad(lane.score_pairs(q, d, pairs), (q, d), upstream.flatten().to(grid))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    found = torch.autograd.grad(lane.score(q, d.expand(NQ, -1, -1, -1)), (q, d), upstream.to(grid))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    found = torch.autograd.grad(lane.score(q, [list(d)] * NQ), (q, d), upstream.to(grid))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_graph_dropped_without_backward_frees_its_memory(lane):
    """Case 98."""
    import gc
    import weakref

    q, d = problem(lane, torch.float32)
    scores = lane.score(q * 1, d)
    function = weakref.ref(scores.grad_fn)
    del scores
    gc.collect()
    assert function() is None


def test_moved_pairs_and_offsets_are_noticed(lane):
    """What says where tokens lie must not change between forward and backward."""
    q = torch.tensor([[[1.0, 0]], [[0, 1.0]]], device=lane.device, requires_grad=True)
    tokens = torch.eye(2, device=lane.device)
    pairs = torch.tensor([[0, 0]], device=lane.device)
    offsets, starts = torch.tensor([0, 1, 2], device=lane.device), torch.tensor([0, 1], device=lane.device)
    packed, views = maxsim.Packed(tokens, offsets), maxsim.Views(tokens, starts, torch.ones_like(starts))
    for scores, moved in (
        (lane.score_pairs(q, tokens[:, None], pairs), pairs),
        (lane.score(q, packed), packed.offsets),
        (lane.score(q, views), views.starts),
    ):
        moved.fill_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            scores.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_refused(lane):
    q, d = torch.ones(2, 3, 4, device=lane.device), torch.ones(1, 5, 4, device=lane.device)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*there is no forward mode"):
        torch.func.jvp(lambda x: lane.score(x, d), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="queries have a forward-mode tangent"):
        lane.score(forward_ad.make_dual(q, q), d)


@pytest.mark.parametrize("side", ["queries", "documents"])
def test_transforms_of_torch_func_are_refused(lane, side):
    """With what to use instead, and not PyTorch's own words on the inside of a transform."""
    q, d = torch.ones(2, 3, 4, device=lane.device), torch.ones(2, 5, 4, device=lane.device)

    def scores(x):
        return lane.score(x, d) if side == "queries" else lane.score(q, x)

    x = q if side == "queries" else d
    for call in (
        lambda: torch.func.grad(lambda x: scores(x).sum())(x),
        lambda: torch.func.vjp(scores, x),
        lambda: torch.func.jacrev(scores)(x),
        lambda: torch.func.vmap(scores)(x[:, None]),
        lambda: torch.func.grad(lambda x: scores(list(x)).sum())(x),
        lambda: torch.func.vmap(lambda x: lane.score_pairs(q, x))(torch.stack([d, d])),
        lambda: torch.func.vmap(lambda x: maxsim.topk(q, x, 1).scores)(torch.stack([d, d])),
        lambda: torch.func.grad(lambda x: lane.score(q, maxsim.Packed(x.flatten(0, 1), [0, 3, 6])).sum())(q),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.func.*torch\.autograd\.grad.*instead of vmap"):
            call()
    cpu_product._product.cache_clear()  # a first score inside of vmap
    assert torch.func.vmap(lambda x: x * lane.score(q, d).sum())(torch.ones(2, device=lane.device)).shape == (2,)


@pytest.mark.parametrize("create_graph", [False, True])
def test_batches_of_gradients_are_refused(lane, create_graph):
    """Before anything is launched, and not in PyTorch's own words on vmap; without them a Jacobian is right."""
    q, d = problem(lane, torch.float32)
    scores = lane.score(q, d)
    each = torch.eye(scores.numel(), device=lane.device).view(-1, *scores.shape)
    for call in (
        lambda: torch.autograd.grad(scores, q, each, is_grads_batched=True, create_graph=create_graph),
        lambda: torch.func.vmap(lambda one: torch.autograd.grad(scores, q, one, create_graph=create_graph)[0])(each),
        lambda: torch.autograd.functional.jacobian(lambda x: lane.score(x, d), q, create_graph, vectorize=True),
        lambda: torch.autograd.functional.jacobian(lambda x: lane.score_pairs(x, d[:4]), q, vectorize=True),
    ):
        with pytest.raises(NotImplementedError, match=r"is_grads_batched.*torch\.autograd\.grad once for each"):
            call()
    found = torch.autograd.functional.jacobian(lambda x: lane.score(x, d), q)
    wanted = [torch.autograd.grad(scores, q, one, retain_graph=True)[0] for one in each]
    assert torch.equal(found.flatten(0, 1), torch.stack(wanted))


@pytest.mark.interpreter
def test_normalized_rows_that_won_nothing(lane):
    """A masked NaN, and a NaN that meets empty documents alone, get a gradient of exactly 0."""
    q = torch.tensor([[[1.0, 2.0], [float("nan"), 1.0]]], device=lane.device).requires_grad_()
    d = torch.tensor([[[1.0, -1.0], [0.5, 2.0]]], device=lane.device).requires_grad_()
    mask = torch.tensor([[True, False]], device=lane.device)
    lane.score(q, d, mask, normalize=True).sum().backward()
    assert q.grad[0, 1].tolist() == [0, 0]
    assert bool(q.grad.isfinite().all())
    assert bool(d.grad.isfinite().all())
    nothing = torch.zeros(1, 2, dtype=torch.bool, device=lane.device)
    (grad,) = torch.autograd.grad(lane.score(q, d, None, nothing, normalize=True).sum(), q)
    assert not grad.any()
