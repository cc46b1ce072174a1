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
    found = lists(winners, side, 0, 3, None, None)
    order = found.order.long().view(3, columns) & 0xFFFF
    rows = side.rows or 3 * length
    ends = found.counters.view(found.parts, found.chunks, rows)[:, -1]
    for document, part in ((d, p) for d in range(3) for p in range(found.parts)):
        of_list = slice(part * SIZE.value, min((part + 1) * SIZE.value, columns))
        won = winners[document, of_list].long()
        wanted = won.argsort(stable=True)[int((won < 0).sum()) :]
        assert torch.equal(order[document, of_list][: len(wanted)], wanted)
        counts = torch.bincount(won[won >= 0], minlength=lengths[document])
        assert torch.equal(ends[part, int(offsets[document]) : int(offsets[document + 1])].long(), counts.cumsum(0))


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
    monkeypatch.setattr(gradients, "CHUNK_BYTES", 4 * columns * 2)  # two documents at a time
    q = integers(1, 1, columns, 16, bound=1, device=DEVICE)
    d = integers(2, 3, 9, 16, bound=1, device=DEVICE)
    winners = table(3, columns, [9] * 3, seed=3)
    for document, token in enumerate((0, 4, 8)):
        winners[document, columns // 20 :] = token
    winners[1, columns // 2] = -1
    grad = integers(4, 1, 3, bound=1, device=DEVICE)
    found = gradients.gradients(side_of(q), side_of(d), winners, grad, None, 0, False, True, True)
    for one, wanted in zip(found, plain(q, d, winners, grad), strict=True):
        assert torch.equal(one.double().cpu(), wanted)


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
    found = gradients.gradients(side_of(q), side_of(d), winners, grad, None, 0, False, True, True)
    again = gradients.gradients(side_of(q), side_of(d), winners, grad, None, 0, False, True, True)
    rounding = torch.finfo(dtype).eps / 2
    for one, other, wanted in zip(found, again, plain(q, d, winners, grad), strict=True):
        assert torch.equal(one, other)
        error = (one.double().cpu() - wanted).abs()
        assert bool((error <= rounding * wanted.abs() + 3e-5 * wanted.abs().max()).all())
    alone = gradients.gradients(side_of(q), side_of(d[1:2]), winners[1:2], grad[:, 1:2], None, 0, False, False, True)
    assert torch.equal(alone[1], found[1][1:2])


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
