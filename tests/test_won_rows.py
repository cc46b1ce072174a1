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
