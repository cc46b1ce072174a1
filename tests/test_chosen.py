"""Pairs chosen by index as pairs of one query with one document: what the Hopper kernels are given."""

from __future__ import annotations

import pytest
import torch
from lanes import CUDA, INTERPRETED, TRITON, integers, interpreter_when

import maxsim

pytestmark = pytest.mark.skipif(not TRITON or not (CUDA or INTERPRETED), reason="needs Triton and a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"


def tokens_of(form, seed, lengths):
    """Items as rows of a matrix, and their mask: padded with a row between them, packed, or packed and masked."""
    count, longest = len(lengths), max(lengths)
    if form == "padded":
        return integers(seed, count, longest + 1, 16, device=DEVICE)[:, :longest], None
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packed = maxsim.Packed(integers(seed, int(offsets[-1]), 16, device=DEVICE), offsets)
    mask = torch.rand(int(offsets[-1]), generator=torch.Generator().manual_seed(seed)) < 0.6
    return packed, mask.to(DEVICE) if form == "masked" else None


@interpreter_when(lambda q_form, d_form: (q_form, d_form) in (("padded", "masked"), ("masked", "padded")))
@pytest.mark.parametrize("d_form", ["padded", "packed", "masked"])
@pytest.mark.parametrize("q_form", ["padded", "packed", "masked"])
def test_scores_of_pairs(q_form, d_form):
    """The portable kernels give the same for what stands in the pairs' place."""
    from maxsim.backends.hopper import _rows
    from maxsim.gpu import outputs, side
    from maxsim.kernels.chosen import chosen
    from maxsim.kernels.configs import forward_config
    from maxsim.kernels.scores_launch import scores
    from maxsim.layout import make_problem

    q, q_mask = tokens_of(q_form, 1, [3, 7, 1])
    d, d_mask = tokens_of(d_form, 2, [9, 0, 20, 4])
    pairs = torch.tensor([[0, 3], [2, 2], [1, 0], [1, 1], [0, 3], [2, 0], [1, 2]], device=DEVICE)
    want = maxsim.score_pairs(q, d, pairs, q_mask, d_mask, backend="triton")
    problem = make_problem(q, d, q_mask, d_mask, pairs=pairs, pairwise=True)
    places = _rows(problem.queries), _rows(problem.documents)
    of_queries, of_documents = chosen(side(problem.queries), side(problem.documents), pairs, *places)
    out = outputs(problem, False, False)
    config = forward_config(4, 16, 7, 1, 20, 7, False, (8, 0))
    scores(of_queries, of_documents, out, None, 1, False, False, "f16x3", config)
    assert torch.equal(out.scores, want)
