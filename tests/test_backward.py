"""The GPU backward's own parts: lists of what each document token won, long rows in pieces, chunks of documents."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lanes import CUDA, INTERPRETED, TRITON, integers, interpreter_when

import maxsim

pytestmark = pytest.mark.skipif(not TRITON or not (CUDA or INTERPRETED), reason="needs Triton and a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"


PARTS = 5000 if INTERPRETED else 140000  # entries of more than one list


@pytest.fixture
def short_lists(monkeypatch):
    """The interpreter is slow: lists that end sooner. (What is compiled cannot change.)"""
    if INTERPRETED:
        import triton.language as tl

        from maxsim.kernels import gradient_rows, gradients, lists

        for module in (gradient_rows, gradients, lists):
            monkeypatch.setattr(module, "SIZE", tl.constexpr(2048))


def side_of(tokens):
    from maxsim.gpu import side
    from maxsim.layout import make_problem

    return side(make_problem(tokens, tokens).documents)


def table(documents, columns, lengths, seed=0):
    """Random winners, of some entries none."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(documents, columns, generator=generator)
    return ((draw * (torch.tensor(lengths)[:, None] + 1)).floor() - 1).to(torch.int16).to(DEVICE)


@pytest.mark.interpreter
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("columns", "length"), [(50, 7), (3000, 90), (PARTS, 5)], ids=["whole", "chunks", "parts"])
def test_lists_are_a_stable_sort(columns, length, ragged, short_lists):
    from maxsim.kernels.launches import Slot, Steps
    from maxsim.kernels.lists import SIZE, lists

    lengths = [length, 0, length - 2] if ragged else [length] * 3
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.zeros(int(offsets[-1]), 16, device=DEVICE)
    if ragged:
        documents = maxsim.Packed(tokens, offsets, max_length=length)
    else:
        documents = tokens.view(3, length, 16)
    winners = table(3, columns, lengths)
    side = side_of(documents)
    steps = Steps(3, [])
    noted = side._replace(starts=Slot(1), ends=Slot(2)) if ragged else side
    found = lists(steps, Slot(0), noted, 0, 3, 3, columns, None)
    rooms = [torch.empty(count, dtype=dtype, device=DEVICE) for _, dtype, count in steps.rooms]
    made = [winners, side.starts, side.ends, *rooms]
    for step in steps.steps:
        step.compile(made)
    order = made[found.order].long().view(3, columns) & 0xFFFF
    counters, (log2, rows, spare) = made[found.counters], found.shape
    size = SIZE.value
    for document, part in ((d, p) for d in range(3) for p in range(-(-columns // size))):
        of_list = slice(part * size, min((part + 1) * size, columns))
        won = winners[document, of_list].long()
        wanted = won.argsort(stable=True)[int((won < 0).sum()) :]
        assert torch.equal(order[document, of_list][: len(wanted)], wanted)
        counts = torch.bincount(won[won >= 0], minlength=lengths[document])
        last = (of_list.stop - 1) >> log2
        at = int(offsets[document]) + last * rows
        if last and spare:
            at = rows + ((document * columns >> log2) + last - 1) * spare
        assert torch.equal(counters[at : at + lengths[document]].long(), counts.cumsum(0))


def plain(q, d, winners, grad):
    """Gradients of padded tokens, in float64."""
    _, LQ, D = q.shape
    of_q, of_d = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(d.shape, dtype=torch.float64)
    tokens, weights = q.double().reshape(-1, D).cpu(), grad.double().cpu().repeat_interleave(LQ, 0)
    for n, won in enumerate(winners.long().cpu() & 0xFFFF):
        live = won != 0xFFFF
        of_d[n].index_add_(0, won[live], (tokens * weights[:, n, None])[live])
        of_q.view(-1, D)[live] += d[n].double().cpu()[won[live]] * weights[live, n, None]
    return of_q, of_d


@interpreter_when(lambda columns: columns == 300)
@pytest.mark.parametrize("columns", [300, 2200 if INTERPRETED else PARTS])
def test_long_rows_in_pieces(columns, monkeypatch, short_lists):
    """Rows that won nearly everything, first, in the middle and last of a list; and chunks of documents."""
    from maxsim.kernels import gradients

    config = gradients.gradient_config
    if columns == 300:
        monkeypatch.setattr(gradients, "gradient_config", lambda *sizes: dataclasses.replace(config(*sizes), PIECE=32))
        gradients._plans.clear()
    monkeypatch.setattr(gradients, "CHUNK_BYTES", 4 * columns * 2)  # two documents at a time
    q = integers(1, 1, columns, 16, bound=1, device=DEVICE)
    d = integers(2, 3, 9, 16, bound=1, device=DEVICE)
    winners = table(3, columns, [9] * 3, seed=3)
    for document, token in enumerate((0, 4, 8)):
        winners[document, columns // 20 :] = token
    winners[1, columns // 2] = -1
    grad = integers(4, 1, 3, bound=1, device=DEVICE)
    found = gradients.gradients(side_of(q), side_of(d), winners, grad, None, 0, False, True, True, q.dtype)
    gradients._plans.clear()
    for one, wanted in zip(found, plain(q, d, winners, grad), strict=True):
        assert torch.equal(one.double().cpu(), wanted)


@interpreter_when(lambda LQ, longest, ragged: longest and LQ == 7)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("longest", [False, True], ids=["spread", "one"])
@pytest.mark.parametrize("LQ", [3, 7])
def test_pairs_of_one_document(LQ, longest, ragged, monkeypatch, short_lists):
    """Documents in hardly any pair, in many, and one in all: lists of several chunks, several lists, long rows."""
    from maxsim.kernels import gradients

    config = gradients.gradient_config
    monkeypatch.setattr(gradients, "gradient_config", lambda *sizes: dataclasses.replace(config(*sizes), PIECE=128))
    gradients._plans.clear()
    count = (PARTS if longest or not INTERPRETED else 900) // LQ
    generator = torch.Generator().manual_seed(LQ)
    lengths = [9, 2, 9, 7]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    d = integers(2, 27, 16, bound=1, device=DEVICE)
    q = integers(1, 5, LQ, 16, bound=1, device=DEVICE)
    documents = maxsim.Packed(d, offsets) if ragged else d.view(3, 9, 16)
    if not ragged:
        offsets, lengths = torch.tensor([0, 9, 18, 27]), [9] * 3
    pairs = torch.randint(0, 5, (count, 2), generator=generator)
    pairs[:, 1] %= len(lengths)
    if longest:
        pairs[:, 1] = 2
    winners = torch.rand(count, LQ, generator=generator) * (torch.tensor(lengths)[pairs[:, 1]][:, None] + 1)
    winners = (winners.floor() - 1).to(torch.int16)
    winners[: count // 2] = winners[: count // 2].clamp(max=0)
    grad = integers(4, count, bound=1)
    of_q, of_d = torch.zeros(5, LQ, 16, dtype=torch.float64), torch.zeros(27, 16, dtype=torch.float64)
    row = offsets[pairs[:, 1]][:, None] + winners
    for i in range(LQ):
        live = winners[:, i] >= 0
        term = grad[live, None].double()
        of_d.index_add_(0, row[live, i], q.double().cpu()[pairs[live, 0], i] * term)
        of_q[:, i].index_add_(0, pairs[live, 0], d.double().cpu()[row[live, i]] * term)
    arguments = winners.to(DEVICE), grad.to(DEVICE), pairs.to(DEVICE), 0, False, True, True, q.dtype
    found = gradients.gradients(side_of(q), side_of(documents), *arguments)
    again = gradients.gradients(side_of(q), side_of(documents), *arguments)
    gradients._plans.clear()
    for one, other, wanted in zip(found, again, (of_q, of_d), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.double().cpu().view_as(wanted), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_rounding_and_the_same_bits(dtype):
    """Against float64 from the same winners; twice, and alone."""
    from maxsim.kernels import gradients

    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(70, 1024, 128, generator=generator, device="cuda").to(dtype)
    d = torch.randn(3, 1000, 128, generator=generator, device="cuda").to(dtype)
    winners = table(3, 70 * 1024, [1000] * 3)
    grad = torch.randn(70, 3, generator=generator, device="cuda")
    found = gradients.gradients(side_of(q), side_of(d), winners, grad, None, 0, False, True, True, q.dtype)
    again = gradients.gradients(side_of(q), side_of(d), winners, grad, None, 0, False, True, True, q.dtype)
    rounding = torch.finfo(dtype).eps / 2
    for one, other, wanted in zip(found, again, plain(q, d, winners, grad), strict=True):
        assert torch.equal(one, other)
        error = (one.double().cpu() - wanted).abs()
        assert bool((error <= rounding * wanted.abs() + 3e-5 * wanted.abs().max()).all())
    alone = gradients.gradients(
        side_of(q), side_of(d[1:2]), winners[1:2], grad[:, 1:2], None, 0, False, False, True, d.dtype
    )
    assert torch.equal(alone[1], found[1][1:2])


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["padded", "packed", "unknown", "candidates", "spread", "few"])
def test_workspace(form):
    """At most 4 bytes a winner, beside 4 a token row (packed ones: and 4 for their owners), in chunks of 256 MiB: what
    a backward sets aside follows from sizes alone. (What sorts pairs comes to that.)"""
    from maxsim.gpu import side
    from maxsim.kernels import gradients
    from maxsim.layout import make_problem

    ND, LD, LQ, longest = 4096, 100, 1024, 3000
    q = torch.empty(1 if form == "few" else 256, LQ, 128, dtype=torch.float16, device="meta")
    d = torch.empty(ND * LD, 128, dtype=torch.float16, device="meta")
    ends = torch.arange(ND) * LD + LD
    ends[3] = ends[2] + longest  # where one is long, others are shorter
    ends[4:] = (ends[3] + (torch.arange(ND - 4) + 1) * (ND * LD - int(ends[3])) // (ND - 4)).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    if form in ("packed", "unknown"):
        documents = maxsim.Packed(d, offsets)
        assert documents.max_length == longest
        documents.max_length = documents.max_length if form == "packed" else ND * LD
    else:
        documents = d.view(256, 16, LD, 128) if form == "candidates" else d.view(ND, LD, 128)
    problem = make_problem(q, documents)
    rows, columns = problem.winners_shape
    pairs = None
    if form == "spread":
        rows, columns = 300000, LQ
        pairs = torch.empty(rows, 2, dtype=torch.int64, device="meta")
    table, grad = (torch.empty(rows, n, dtype=torch.int16, device="meta") for n in (columns, ND))
    sides = side(problem.queries), side(problem.documents)
    tensors = [pairs, *(each for x in sides for each in (x.data, x.starts, x.ends))]
    given = gradients._Inputs(table, grad, *tensors, None, None, pairs, pairs)
    steps = gradients._Backward(*sides, given, problem.per_query, False, (True, True), sides[0].data.dtype).steps
    allowed = 4 * rows * columns if pairs is not None else min(4 * rows * columns, gradients.CHUNK_BYTES)
    tokens = 4 * ND * LD * (2 if form in ("packed", "unknown") else 1)
    assert steps.bytes <= allowed + tokens + (1 << 16)
    if form in ("padded", "packed"):
        assert len(steps.steps) > 10  # in many chunks
        assert steps.bytes > allowed // 2


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True])
def test_many_query_tokens_and_packed_documents(normalize):
    """Long rows of ragged documents, which are a kernel of their own."""
    found = []
    for packed in (False, True):
        q = integers(1, 1, 1100, 16, bound=1, dtype=torch.float16, device="cuda").requires_grad_()
        d = integers(2, 4, 3, 16, bound=1, dtype=torch.float16, device="cuda").requires_grad_()
        documents = maxsim.Packed(d.flatten(0, 1), [0, 3, 6, 9, 12]) if packed else d
        scores = maxsim.score(q, documents, normalize=normalize, backend="triton")
        found.append(torch.autograd.grad(scores @ torch.arange(1.0, 5.0, device="cuda"), (q, d)))
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [False, True])
def test_documents_longer_than_max_length_are_cut(pairs):
    """Offsets on the card are not checked: what lies beyond `max_length` has no gradient, whatever memory held."""
    offsets = torch.tensor([0, 30, 65, 80], device="cuda")
    q = integers(1, 5, 33, 16, dtype=torch.float16, device="cuda")
    d = integers(2, 80, 16, dtype=torch.float16, device="cuda").requires_grad_()
    cut = maxsim.Views(d, offsets[:-1].cpu(), (offsets[1:] - offsets[:-1]).clamp(max=20).cpu())
    some = torch.tensor([[0, 0], [4, 1], [4, 2], [4, 1]], device="cuda")
    found = []
    for documents in (cut, maxsim.Packed(d, offsets, max_length=20)):
        held = [torch.full((1 << 16,), -7, dtype=torch.int32, device="cuda") for _ in range(20)]
        del held
        scores = maxsim.score_pairs(q, documents, some) if pairs else maxsim.score(q, documents)
        found += torch.autograd.grad(scores.sum(), d)
    assert torch.equal(*found)
    assert not found[1][20:30].any()
