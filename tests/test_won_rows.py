"""Gradients of documents of which few tokens win anything: the bits of programs that own every row."""

from __future__ import annotations

import pytest
import torch
from lanes import CUDA, INTERPRETED, TRITON, interpreter_when, random

import maxsim

pytestmark = pytest.mark.skipif(not TRITON or not (CUDA or INTERPRETED), reason="needs Triton and a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"
PLACES = torch.tensor([0, 61, 61, 125, 200])  # one document is empty
ROWS = 200 if INTERPRETED else 206  # on a GPU, where offsets are not checked, rows of none


def documents_of(form, tokens):
    """Four documents; of those cut, three are longer than `max_length`."""
    if form == "padded":
        return tokens[:200].view(4, 50, 20)
    if form == "candidates":
        return tokens[:200].view(2, 2, 50, 20)
    return maxsim.Packed(tokens, PLACES.to(DEVICE), max_length=50 if form == "cut" else 80)


@interpreter_when(lambda form, normalize: form in ("padded", "packed") and not normalize)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("form", ["padded", "candidates", "packed", "cut"])
def test_bits_of_all_rows(form, normalize, monkeypatch):
    from maxsim.kernels import gradients

    q = random(1, 2, 5, 20, device=DEVICE)
    tokens = random(2, ROWS, 20, device=DEVICE)
    tokens[[3, 7, 127]] += 9 * q.mean((0, 1))  # one that wins often, twice, and once
    tokens.requires_grad_()
    documents = documents_of(form, tokens)
    scores = maxsim.score(q, documents, normalize=normalize, backend="triton")
    upstream = random(3, *scores.shape, device=DEVICE)
    found, asked, few_win = [], [], gradients.few_win
    monkeypatch.setattr(gradients, "few_win", lambda *sizes: asked.append(few_win(*sizes)) or asked[-1])
    for size in (1 << 28, 90):
        monkeypatch.setattr(gradients, "CHUNK_BYTES", size)
        gradients._plans.clear()
        found.append(torch.autograd.grad(scores, tokens, upstream, retain_graph=True)[0])
    monkeypatch.setattr(gradients, "few_win", lambda *sizes: False)
    gradients._plans.clear()
    (every_row,) = torch.autograd.grad(scores, tokens, upstream)
    gradients._plans.clear()
    assert len(asked) == 2
    assert all(asked)
    assert all(torch.equal(each, every_row) for each in found)
    assert int(every_row.any(1).sum()) > 3
    assert not every_row[200:].any()


@pytest.mark.interpreter
@pytest.mark.parametrize(("columns", "tokens"), [(1, 3), (45, 4), (100, 70_000)])
def test_entries_are_in_the_order_of_tokens(columns, tokens):
    from maxsim.kernels.won_rows import BLOCK, _rank_kernel

    generator = torch.Generator().manual_seed(columns)
    wide = torch.int32 if tokens > 65_535 else torch.int16
    winners = torch.randint(-1, tokens, (3, columns), generator=generator).to(wide)
    winners[2] = -1
    winners[1, ::3] = tokens - 1
    order, ends = torch.full((2, 2, columns), 99, dtype=torch.int16, device=DEVICE)
    blocks = -(-columns // BLOCK.value)
    _rank_kernel[(2 * blocks,)](order, ends, winners.to(DEVICE), 1, columns, blocks, num_warps=1)  # from the second on
    for won, found, until in zip(winners[1:].tolist(), order.tolist(), ends.tolist(), strict=True):
        wanted = sorted(range(columns), key=lambda at: (won[at] < 0, won[at], at))
        assert found == wanted
        for place, at in enumerate(wanted):
            first = won[at] >= 0 and won.index(won[at]) == at
            assert until[place] == (place + won.count(won[at]) if first else 0)
