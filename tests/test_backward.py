"""The GPU backward's own parts: lists of what each document token won, long rows in pieces, chunks of documents."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lanes import CUDA, INTERPRETED, TRITON, integers, interpreter_when, random

import maxsim

pytestmark = pytest.mark.skipif(not TRITON or not (CUDA or INTERPRETED), reason="needs Triton and a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"


PARTS = 5000 if INTERPRETED else 140000  # entries of more than one list


@pytest.fixture
def short_lists(monkeypatch):
    """The interpreter is slow: lists that end sooner. (What is compiled cannot change.)"""
    if INTERPRETED:
        import triton.language as tl

        from maxsim.kernels import gradient_pieces, gradient_rows, gradients, list_places, lists

        for module in (gradient_pieces, gradient_rows, gradients, list_places, lists):
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
    from maxsim.kernels.list_places import SIZE
    from maxsim.kernels.lists import lists

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
    found = lists(steps, Slot(0), noted, 0, 3, columns, None, None)
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


OVERLAPPING = [3, 30, 0, 12, 12, 39, 5], [10, 9, 7, 0, 20, 1, 30]  # starts and lengths in 40 rows
PLACES = [0, 7, 7, 20, 29, 40]


@pytest.fixture
def short_pieces(monkeypatch):
    """Rows of more than 32 terms are long."""
    from maxsim.kernels import gradients

    config = gradients.gradient_config
    monkeypatch.setattr(gradients, "gradient_config", lambda *sizes: dataclasses.replace(config(*sizes), PIECE=32))
    gradients._plans.clear()
    yield
    gradients._plans.clear()


def form_of(name, d):
    if name == "padded":
        return d.view(5, 8, 16)
    return maxsim.Packed(d, PLACES) if name == "packed" else maxsim.Views(d, *OVERLAPPING)


def rows_of(name):
    """Where documents begin, and how many tokens they have."""
    starts = {"padded": range(0, 40, 8), "packed": PLACES[:-1], "views": OVERLAPPING[0]}[name]
    lengths = {"padded": [8] * 5, "packed": torch.tensor(PLACES).diff().tolist(), "views": OVERLAPPING[1]}[name]
    return torch.tensor(list(starts)), torch.tensor(lengths)


@interpreter_when(lambda paired, name, normalize: name == "views" and normalize != paired)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["padded", "packed", "views"])
@pytest.mark.parametrize("paired", [False, True], ids=["grid", "pairs"])
def test_chunks(paired, name, normalize, monkeypatch, short_pieces):
    """A row with entries in several chunks: the terms of all, once each. Of pairs none are of one document, many of
    another; without pairs the number of chunks changes no bit."""
    from maxsim.kernels import gradients

    starts, lengths = rows_of(name)
    make = random if normalize else integers
    q, d = make(1, 5, 9, 16, device=DEVICE), make(2, 40, 16, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    pairs, rows = None, len(lengths)
    document = torch.arange(rows)
    if paired:
        rows = 60
        pairs = torch.randint(0, 5, (rows, 2), generator=generator)
        pairs[:20, 1], pairs[pairs[:, 1] == 2, 1] = 4, 1
        document = pairs[:, 1]
    columns = 9 if paired else 45
    winners = torch.rand(rows, columns, generator=generator) * (lengths[document][:, None] + 1)
    winners = (winners.floor() - 1).to(torch.int16)
    if not paired and lengths[4] > 0:
        winners[4, 3:] = 2  # a long row
    grad = make(4, *((rows,) if paired else (5, rows)))
    wanted = torch.zeros(40, 16, dtype=torch.float64)
    unit = torch.nn.functional.normalize if normalize else lambda x, dim: x
    tokens, x = unit(q.double().cpu(), dim=-1), d.double().cpu().requires_grad_()
    p, column = (winners >= 0).nonzero().T
    query = pairs[p, 0] if paired else column // 9
    terms = tokens[query, column % 9] * (grad[p] if paired else grad[query, p]).double()[:, None]
    row = starts[document[p]] + winners[p, column]
    (wanted,) = torch.autograd.grad((unit(x, dim=-1)[row] * terms).sum(), x)
    found = []
    sizes = [1 << 28, 4 * 9 * 17] if paired else [1 << 28, 8 * (45 + 30)]
    if not INTERPRETED:  # which is slow
        sizes += [*sizes, 1]
    for size in sizes:
        monkeypatch.setattr(gradients, "CHUNK_BYTES", size)
        arguments = side_of(q), side_of(form_of(name, d)), winners.to(DEVICE), grad.to(DEVICE)
        given = None if pairs is None else pairs.to(DEVICE)
        of = gradients.gradients(*arguments, given, 0, normalize, False, True, q.dtype)[1]
        found.append(of.cpu().view(40, 16))
        if normalize:
            torch.testing.assert_close(found[-1].double(), wanted, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found[-1].double(), wanted)
        assert paired or torch.equal(found[-1], found[0])
    if not INTERPRETED:
        assert torch.equal(found[3], found[1])


@pytest.mark.interpreter
def test_views_have_the_bits_of_packed_documents(short_pieces):
    """Each where they do not overlap, and where ranks give both the same as one after the other."""
    from maxsim.distributed.blocks import Block, merged
    from maxsim.distributed.shares import Shares
    from maxsim.layout import make_problem

    q, d = random(1, 5, 9, 16, device=DEVICE), random(2, 40, 16, device=DEVICE)
    d[25] += q.mean((0, 1)) * 100  # wins much
    grad = random(3, 5, 12, device=DEVICE)
    starts, lengths = rows_of("packed")
    shares = Shares(make_problem(q, d[:1]), "triton")

    def block(start, length, consecutive):
        ends = start + length
        return Block(len(start), 40, 16, -1, int(length.max()), consecutive, start.to(DEVICE), ends.to(DEVICE))

    def gradient(block, rows, grad):
        winners = shares.scored(q, block, rows.reshape(-1), True).winners
        return shares.gradients(q, block, rows.reshape(-1), winners, grad, (False, True))[1]

    packed, views, over = block(starts, lengths, True), block(starts, lengths, False), block(*rows_of("views"), False)
    alone = gradient(packed, d, grad[:, :5]), gradient(over, 2 * d, grad[:, 5:])
    assert torch.equal(gradient(views, d, grad[:, :5]), alone[0])
    both = gradient(merged([packed, over], d.device), torch.cat([d, 2 * d]), grad)
    assert torch.equal(both, torch.cat(alone))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "form", ["padded", "packed", "unknown", "candidates", "spread", "few", "views", "short", "own"]
)
def test_workspace(form):
    """At most 4 bytes a winner, in chunks of 256 MiB, beside 4 a token row (packed ones 8, of Views 12), and what rows
    of one document leave to the next chunk: what a backward sets aside follows from sizes alone. (Sorted pairs come to
    that, and documents that may overlap.) Few query tokens take 4 bytes a winner and no more."""
    from maxsim.gpu import side
    from maxsim.kernels import gradients
    from maxsim.layout import make_problem

    short = form in ("short", "own")
    ND, LD, LQ, longest = 4096, 100, 190 if short else 1024, 3000
    q = torch.empty({"few": 1, "short": 1}.get(form, 256), LQ, 128, dtype=torch.float16, device="meta")
    d = torch.empty(ND * LD, 128, dtype=torch.float16, device="meta")
    ends = torch.arange(ND) * LD + LD
    ends[3] = ends[2] + longest  # where one is long, others are shorter
    ends[4:] = (ends[3] + (torch.arange(ND - 4) + 1) * (ND * LD - int(ends[3])) // (ND - 4)).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    if form in ("packed", "unknown"):
        documents = maxsim.Packed(d, offsets)
        assert documents.max_length == longest
        documents.max_length = documents.max_length if form == "packed" else ND * LD
    elif form == "views":
        documents = maxsim.Views(d, offsets[:-1], offsets.diff())
    else:
        documents = d.view(256, 16, LD, 128) if form in ("candidates", "own") else d.view(ND, LD, 128)
    problem = make_problem(q, documents)
    rows, columns = problem.winners_shape
    pairs = places = marks = None
    if form == "spread":
        rows, columns, marks = 300000, LQ, offsets
        pairs = torch.empty(rows, 2, dtype=torch.int64, device="meta")
    if form == "views":
        places = marks = offsets
    table, grad = (torch.empty(rows, n, dtype=torch.int16, device="meta") for n in (columns, ND))
    sides = side(problem.queries), side(problem.documents)
    tensors = [pairs, *(each for x in sides for each in (x.data, x.starts, x.ends))]
    given = gradients._Inputs(
        table, grad, *tensors, q_pairs=pairs, d_pairs=pairs, d_pair_offsets=pairs, d_marks=marks, d_held=places,
        d_held_starts=places, d_reach=places,
    )  # fmt: skip
    steps = gradients._Backward(*sides, given, problem.per_query, False, (True, True), sides[0].data.dtype).steps
    allowed = min(4 * rows * columns, gradients.CHUNK_BYTES)
    tokens = 0 if short else 4 * ND * LD * {"packed": 2, "unknown": 2, "views": 3}.get(form, 1)
    carried = 2 * 4 * 129 * {"spread": LD, "views": longest}.get(form, 0)
    assert steps.bytes <= allowed + tokens + carried + (1 << 16)
    if form in ("padded", "packed", "spread", "views"):
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
