"""Random shapes, masks, layouts, dtypes and call forms against the oracle; the inputs are integers, so that
equality is exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis")

from forms import CANDIDATES, DOCUMENT_FORMS, NUMPY, QUERY_FORMS, build, expected, expected_grads, make_side
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_exact import same

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def profile(examples):
    """The same examples every time: a failure is a failure for everyone."""
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip


@st.composite
def problems(draw, lane):
    dtype = draw(st.sampled_from(lane.dtypes))
    q_form, d_form = draw(st.sampled_from(QUERY_FORMS)), draw(st.sampled_from(DOCUMENT_FORMS))
    assume(not (dtype == torch.bfloat16 and {q_form, d_form} & set(NUMPY)))
    assume(not (lane.device == "cuda" and d_form in NUMPY))
    D, seed = draw(st.integers(1, 140)), draw(st.integers(0, 2**16))
    masks = (
        draw(st.sampled_from(("none", "prefix", "left", "holes"))),
        draw(st.sampled_from(("none", "prefix", "left", "holes"))),
    )
    q_lengths, d_lengths = draw(LENGTHS), draw(LENGTHS)
    q = build(q_form, make_side(seed, q_lengths, D, masks[0]), dtype, lane.device)
    d = build(d_form, make_side(seed + 1, d_lengths, D, masks[1]), dtype, lane.device, copies=len(q_lengths))
    for leaf in (*q.leaves, *d.leaves):
        leaf.requires_grad_()
    return q, d, dtype, d_form, draw(st.sampled_from(("exclude", "zero")))


def check(lane, data):
    q, d, dtype, d_form, masked = data.draw(problems(lane))
    result = torch.float64 if dtype == torch.float64 else torch.float32
    scores, index, value = expected(q.seen, d.seen, masked)
    found = lane.score(q.value(), d.value(), q.mask, d.mask, masked)
    assert same(found.detach(), scores, result)
    matched = lane.matches(q.value(), d.value(), q.mask, d.mask, masked)
    LQ = index.shape[2]
    assert same(matched.index[..., :LQ], index, torch.int64)
    assert same(matched.similarity[..., :LQ], value, result)
    upstream = np.random.default_rng(0).integers(-1, 2, scores.shape).astype(np.float64)
    if found.requires_grad:  # numpy on both sides has no gradient
        found.backward(torch.tensor(upstream).to(found))
    for built, wanted in zip((q, d), expected_grads(q.seen, d.seen, index, upstream), strict=True):
        for leaf, grad in zip(built.leaves, built.spread(wanted), strict=True):
            assert same(leaf.grad, grad, dtype)
    if d_form in CANDIDATES:
        return
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, scores.shape[0] - 1), st.integers(0, scores.shape[1] - 1)), max_size=6)
    )
    chosen = np.array(pairs, np.int64).reshape(-1, 2)
    some = lane.score_pairs(q.value(), d.value(), chosen, q.mask, d.mask, masked)
    assert same(some.detach(), scores[chosen[:, 0], chosen[:, 1]], result)
    k = data.draw(st.integers(0, scores.shape[1] + 2))
    best = lane.topk(q.value(), d.value(), k, q.mask, d.mask, masked)
    for row, hits in enumerate(best.indices.tolist()):
        kept = q.seen.masks[row].any() if q.seen.masks is not None else len(q.seen.items[row]) > 0
        order = (
            [n for n in sorted(range(scores.shape[1]), key=lambda n: -scores[row, n]) if scores[row, n] > -np.inf]
            if kept
            else []
        )
        assert hits == (order + [-1] * scores.shape[1])[: min(k, scores.shape[1])]


@profile(100)
@given(data=st.data())
def test_any_problem(lane, data):
    check(lane, data)


@pytest.mark.slow
@profile(1500)
@given(data=st.data())
def test_any_problem_at_length(lane, data):
    check(lane, data)
