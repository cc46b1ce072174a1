"""`torch.compile(fullgraph=True)`: every public function is traced without a break, and gives eager's bits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lanes import integers

import maxsim
from maxsim import Packed, Views, graph, quantize
from maxsim.layout import make_problem

INF = float("inf")
# Dynamo's own, when it looks at what a function holds
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()


def traced(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def inputs(lane):
    return integers(1, 3, 8, 16, device=lane.device), integers(2, 5, 20, 16, device=lane.device)


@pytest.mark.parametrize("form", ["padded", "packed", "packed inside", "views", "list", "candidates", "masked", "one"])
def test_score(lane, form):
    q, d = inputs(lane)
    tokens = d.reshape(-1, 16)
    mask = integers(3, 5, 20, device=lane.device) > 0
    documents = {
        "packed": lambda: Packed(tokens, [0, 30, 30, 100]),
        "views": lambda: Views(tokens, torch.tensor([70, 0, 3]), torch.tensor([30, 0, 5])),
        "list": lambda: [d[0], d[1, :0], d[2, :7]],
        "candidates": lambda: d[:3, None].expand(3, 4, 20, 16),
        "one": lambda: d[0],
    }
    if form == "packed inside":
        got = traced(lambda q, tokens: lane.score(q, Packed(tokens, [0, 30, 30, 100])))(q, tokens)
        want = lane.score(q, Packed(tokens, [0, 30, 30, 100]))
    elif form == "masked":
        got = traced(lambda q, d, m: lane.score(q, d, document_mask=m, masked="zero", normalize=True))(q, d, mask)
        want = lane.score(q, d, document_mask=mask, masked="zero", normalize=True)
    else:
        given = documents[form]() if form in documents else d
        got, want = traced(lane.score)(q, given), lane.score(q, given)
    assert torch.equal(got, want)


def test_pairs_matches_and_topk(lane):
    q, d = inputs(lane)
    pairs = torch.tensor([[0, 4], [2, 1], [2, 1]])
    assert torch.equal(traced(lane.score_pairs)(q, d, pairs), lane.score_pairs(q, d, pairs))
    for got, want in (
        (traced(lane.matches)(q, d), lane.matches(q, d)),
        (traced(lane.topk)(q, d, 3), lane.topk(q, d, 3)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_pairs_out_of_range_are_clamped(lane):
    q, d = inputs(lane)
    wild, tame = torch.tensor([[0, -1], [9, 99], [-5, 2]]), torch.tensor([[0, 0], [2, 4], [0, 2]])
    assert torch.equal(traced(lane.score_pairs)(q, d, wild), lane.score_pairs(q, d, tame))


@pytest.mark.parametrize("dynamic", [None, True])
def test_gradients_over_shapes(lane, dynamic):
    """Cases 68 and 69: with work around the call and a scale that does not turn into float64."""
    loss = traced(lambda q, d, scale: lane.score(q * 1, d) * scale, dynamic=dynamic)
    for n in (3, 5, 6):
        q = integers(n, n, 7 + n, 16, device=lane.device).requires_grad_()
        d = integers(n + 1, n + 2, 20 + n, 16, device=lane.device).requires_grad_()
        found = loss(q, d, 2.0)
        assert found.dtype == torch.float32
        assert torch.equal(found, 2 * lane.score(q, d))
        grads = torch.autograd.grad(found.sum(), (q, d))
        wanted = torch.autograd.grad(2 * lane.score(q, d).sum(), (q, d))
        assert all(torch.equal(x, y) for x, y in zip(grads, wanted, strict=True))


class Scorer(torch.nn.Module):
    def forward(self, queries, documents):
        return maxsim.score(queries, documents)


def test_export_for_any_length():
    """A scorer is exported for documents of any number and length: neither is bounded by what winners would take."""
    shapes = {"queries": None, "documents": {0: torch.export.Dim("count"), 1: torch.export.Dim("length")}}
    exported = torch.export.export(Scorer(), (integers(0, 2, 3, 8), integers(1, 4, 5, 8)), dynamic_shapes=shapes)
    q, d = integers(2, 2, 3, 8), integers(3, 2, 65_537, 8)
    assert torch.equal(exported.module()(q, d), maxsim.score(q, d))


@pytest.mark.parametrize("side", [0, 1])
def test_gradient_of_one_side(lane, side):
    leaves = list(inputs(lane))
    leaves[side].requires_grad_()
    found = torch.autograd.grad(traced(lane.score)(*leaves).sum(), leaves[side])
    assert torch.equal(found[0], torch.autograd.grad(lane.score(*leaves).sum(), leaves[side])[0])


def test_empty_documents(lane):
    q, d = inputs(lane)
    q = q.requires_grad_()
    nothing = d[:, :0]
    scores = traced(lane.score)(q, nothing)
    assert scores.tolist() == [[-INF] * 5] * 3
    assert not torch.autograd.grad(scores.sum(), q)[0].any()


def test_operators(lane):
    """What PyTorch itself checks of an operator: its schema, its result without values, its gradient."""
    q, d = inputs(lane)
    for needs in (False, True):
        forms = [d.clone().requires_grad_(needs)]
        if lane.backend == "cpu":
            forms.append(quantize(d, scale="token"))
        for documents in forms:
            problem = make_problem(q.clone().requires_grad_(needs), documents)
            given = (*graph._tensors(problem), *graph._codes(problem), graph._sizes(problem))
            torch.library.opcheck(graph._scores, (*given, lane.backend, needs, False))


def test_gradients_of_permuted_tokens(lane):
    """Gradients are contiguous, whatever the strides of tokens: in the compiler's eyes too."""
    q, d = (x.transpose(0, 1).clone().transpose(0, 1).requires_grad_() for x in inputs(lane))
    problem = make_problem(q, d)
    result = graph.run(problem, lane.backend, winners=True)
    given = (*graph._tensors(problem), *graph._codes(problem), graph._sizes(problem), lane.backend, result.winners)
    given = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in given)
    for needed in ((True, True), (True, False), (False, True)):
        arguments = (*given, torch.ones_like(result.scores).detach(), *needed)
        torch.library.opcheck(graph._gradients, arguments, test_utils=("test_schema", "test_faketensor"))


FIRST_USE = """
import torch, maxsim
f = torch.compile(lambda q, d: maxsim.score(q, d), fullgraph=True, backend="aot_eager")
print(f(torch.ones(2, 3, 4), torch.ones(5, 6, 4)).tolist() == [[12] * 5] * 2)
"""


def test_first_use_inside_a_compiled_function(environment):
    done = subprocess.run([sys.executable, "-c", FIRST_USE], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_is_told_what_to_take_instead():
    q, d = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    for call in (maxsim.score, maxsim.score_pairs, lambda a, b: maxsim.topk(a, b, 2).scores):
        with pytest.raises(NotImplementedError, match=r"traced by torch\.jit, .* use torch\.compile"):
            torch.jit.trace(call, (q, d))
