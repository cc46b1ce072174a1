"""Gradients of documents of which few tokens win anything: those of programs that own every row."""

from __future__ import annotations

import pytest
import torch
from lanes import CUDA, INTERPRETED, TRITON, integers, interpreter_when, random

import maxsim

pytestmark = pytest.mark.skipif(not TRITON or not (CUDA or INTERPRETED), reason="needs Triton and a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"
PLACES = torch.tensor([0, 61, 61, 125, 200])  # one document is empty
ROWS = 200 if INTERPRETED else 206  # on a GPU, where offsets are not checked, rows of none


def documents_of(form, tokens):
    """Four documents; of those cut, three are longer than `max_length`; the roomy ones might have more tokens than a
    list's entry has bits for."""
    if form == "padded":
        return tokens[:200].view(4, 50, 20)
    if form == "candidates":
        return tokens[:200].view(2, 2, 50, 20)
    return maxsim.Packed(tokens, PLACES.to(DEVICE), max_length={"cut": 50, "roomy": 9000}.get(form, 80))


@interpreter_when(lambda form, normalize, values: form in ("padded", "packed", "roomy") and not normalize)
@pytest.mark.parametrize("values", [random, integers])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("form", ["padded", "candidates", "packed", "cut", "roomy"])
def test_as_of_all_rows(form, normalize, values, monkeypatch):
    """In chunks and of one side alone the same bits. Where programs own every row the order of a sum is another: the
    same where sums are exact."""
    from maxsim.kernels import gradients

    exact = values is integers and not normalize
    q, tokens = values(1, 2, 5, 20, device=DEVICE), values(2, ROWS, 20, device=DEVICE)
    tokens[[3, 7, 127]] += 9 * q.sum((0, 1)).sign()  # some that win often, twice, and once
    documents = documents_of(form, tokens.requires_grad_())
    q.requires_grad_()
    scores = maxsim.score(q, documents, normalize=normalize, backend="triton")
    upstream = values(3, *scores.shape, device=DEVICE)
    found, asked, few_win = [], [], gradients.few_win
    monkeypatch.setattr(gradients, "few_win", lambda *sizes: asked.append(few_win(*sizes)) or asked[-1])
    for size in (1 << 28, 90):
        monkeypatch.setattr(gradients, "CHUNK_BYTES", size)
        gradients._plans.clear()
        found.append(torch.autograd.grad(scores, (q, tokens), upstream, retain_graph=True))
    alone = maxsim.score(q.detach(), documents, normalize=normalize, backend="triton")
    found.append((None, *torch.autograd.grad(alone, tokens, upstream)))
    monkeypatch.setattr(gradients, "few_win", lambda *sizes: False)
    gradients._plans.clear()
    of_queries, every_row = torch.autograd.grad(scores, (q, tokens), upstream)
    gradients._plans.clear()
    assert len(asked) == 3
    assert all(asked)
    for of_q, of_d in found:
        assert torch.equal(of_d, found[0][1])
        assert of_q is None or torch.equal(of_q, found[0][0])
    for one, other in ((found[0][0], of_queries), (found[0][1], every_row)):
        assert torch.equal(one, other) or (not exact and torch.allclose(one, other, rtol=1e-5, atol=1e-5))
    assert int(every_row.any(1).sum()) > 3
    assert not every_row[200:].any()


@pytest.mark.interpreter
@pytest.mark.parametrize(("columns", "tokens"), [(1, 3), (45, 4), (512, 65_535), (100, 70_000)])
def test_entries_are_in_the_order_of_tokens(columns, tokens):
    from maxsim.kernels.won_rows import BLOCK, END, ENDS, PLACE, TOKEN, TOKENS, _rank_kernel

    generator = torch.Generator().manual_seed(columns)
    winners = torch.randint(-1, tokens, (3, columns), generator=generator)
    winners[2] = -1
    winners[1, ::3] = tokens - 1
    wide = tokens > 65_535
    if not wide:  # 16 bits, as forward has them
        winners = torch.where(winners > 32_767, winners - 65_536, winners)
    winners = winners.to(torch.int32 if wide else torch.int16)
    order = torch.full((2, columns), 99, dtype=torch.int32, device=DEVICE)
    blocks = -(-columns // BLOCK.value)
    _rank_kernel[(2 * blocks,)](order, winners.to(DEVICE), 1, columns, blocks, num_warps=1)  # from the second on
    tokens_won = torch.where(winners == -1, -1, winners.int() & (-1 if wide else 0xFFFF))[1:].tolist()
    for won, found in zip(tokens_won, order.tolist(), strict=True):
        wanted = sorted(range(columns), key=lambda at: (won[at] < 0, won[at], at))
        assert [each & PLACE.value for each in found] == wanted
        for place, (at, each) in enumerate(zip(wanted, found, strict=True)):
            first = won[at] >= 0 and won.index(won[at]) == at
            assert each >> END.value & ENDS.value == (place + won.count(won[at]) if first else 0)
            if first:
                assert each >> TOKEN.value & TOKENS.value == won[at] % 8192
