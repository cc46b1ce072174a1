"""Small integers make every product and sum exact: scores, winners, similarities and gradients equal the oracle's bits.

The grid: every query form with packed documents, every document form with padded queries, each with every dtype, mask
pattern and meaning of masked tokens, at an odd width, and at an even one where rows are aligned. Not the product of
query and document forms: the two sides become `Tokens` apart from each other, and a kernel sees no more of a form than
padded or ragged, of which all four pairs are here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from forms import (
    DOCUMENT_FORMS,
    MASKS,
    NUMPY,
    QUERY_FORMS,
    Built,
    build,
    expected,
    expected_grads,
    make_side,
)
from lanes import interpreter_when

QUERY_LENGTHS = [5, 1, 3, 2]
DOCUMENT_LENGTHS = [7, 0, 3, 17, 1, 4]
PAIRS = [(form, "packed32") for form in QUERY_FORMS] + [("packed32", "padded")]
PAIRS += [("padded", form) for form in DOCUMENT_FORMS if form != "packed32"]

LAID_OUT = [(q, d) for q in ("padded", "packed32") for d in ("padded", "packed32")]


def named(value: object) -> str:
    return "/".join(value) if isinstance(value, tuple) else str(value)


def same(found: torch.Tensor, wanted: np.ndarray, dtype: torch.dtype) -> bool:
    return found.dtype == dtype and torch.equal(found.cpu(), torch.tensor(wanted).to(dtype))


def upstream_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).integers(-2, 3, shape).astype(np.float64)


def check_gradients(scores: torch.Tensor, q: Built, d: Built, index: np.ndarray, order=None) -> None:
    """`order`: the pairs that `scores` holds, a row each."""
    upstream = upstream_of((len(q.seen.items), len(d.seen.items)))
    wanted_q, wanted_d = expected_grads(q.seen, d.seen, index, upstream)
    given = torch.tensor(upstream if order is None else upstream[order[:, 0], order[:, 1]])
    scores.backward(given.to(scores))
    for built, wanted in ((q, wanted_q), (d, wanted_d)):
        for leaf, grad in zip(built.leaves, built.spread(wanted), strict=True):
            assert same(leaf.grad, grad, leaf.dtype)


def built_pair(lane, dtype, q_form, d_form, masks, D=19):
    if torch.bfloat16 == dtype and (q_form in NUMPY or d_form in NUMPY):
        pytest.skip("numpy has no bfloat16")
    if lane.device == "cuda" and d_form in NUMPY:
        pytest.skip("arrays lie on the CPU, and documents never move")
    q = build(q_form, make_side(11, QUERY_LENGTHS, D, masks), dtype, lane.device)
    d = build(d_form, make_side(22, DOCUMENT_LENGTHS, D, masks), dtype, lane.device, copies=len(QUERY_LENGTHS))
    for leaf in (*q.leaves, *d.leaves):
        leaf.requires_grad_()
    return q, d


SEEN = [*LAID_OUT, ("strided", "packed32"), ("views", "packed32")]  # what differs to a kernel
SEEN += [("padded", form) for form in ("strided", "transposed", "views", "candidates")]


def quick(lane, dtype, forms, masks, masked, D=19):
    """Under the interpreter, a second a test: each layout once, the plain ones in float32 and with masked zeros too."""
    if masks != "holes" or D != 19:
        return False
    if forms in LAID_OUT and (dtype, masked) in ((torch.float32, "exclude"), (torch.float16, "zero")):
        return True
    return dtype == torch.float16 and masked == "exclude" and forms in SEEN


@interpreter_when(quick)
@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(("forms", "D"), [(pair, 19) for pair in PAIRS] + [(pair, 64) for pair in LAID_OUT], ids=named)
def test_forms(lane, dtype, forms, D, masks, masked):
    q, d = built_pair(lane, dtype, *forms, masks, D)
    scores, index, value = expected(q.seen, d.seen, masked)
    result = torch.float64 if dtype == torch.float64 else torch.float32
    found = lane.score(q.value(), d.value(), q.mask, d.mask, masked)
    assert same(found.detach(), scores, result)
    matched = lane.matches(q.value(), d.value(), q.mask, d.mask, masked)
    shorter = matched.index.shape[-1] - index.shape[-1]  # items whose lengths lie on a GPU are bounded by T
    fill = [(0, 0), (0, 0), (0, shorter)]
    assert same(matched.index, np.pad(index, fill, constant_values=-1), torch.int64)
    assert same(matched.similarity, np.pad(value, fill), result)
    check_gradients(found, q, d, index)


@interpreter_when(quick)
@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    "forms", [*LAID_OUT, ("padded", "views"), ("views", "packed32"), ("padded", "strided")], ids="/".join
)
def test_pairs(lane, dtype, forms, masks, masked):
    """Every pair, in another order: the same numbers as the grid's."""
    q, d = built_pair(lane, dtype, *forms, masks)
    scores, index, _ = expected(q.seen, d.seen, masked)
    order = np.random.default_rng(3).permutation(np.array(list(np.ndindex(scores.shape))))
    found = lane.score_pairs(q.value(), d.value(), order, q.mask, d.mask, masked)
    assert same(
        found.detach(), scores[order[:, 0], order[:, 1]], torch.float64 if dtype == torch.float64 else torch.float32
    )
    check_gradients(found, q, d, index, order)


@interpreter_when(lambda lane, dtype: dtype == torch.float16)
def test_pairs_one_to_one_repeated_and_int32(lane, dtype):
    q, d = built_pair(lane, dtype, "padded", "packed32", "holes")
    scores, _, _ = expected(q.seen, d.seen)
    result = torch.float64 if dtype == torch.float64 else torch.float32
    first = build("packed64", make_side(22, DOCUMENT_LENGTHS[:4], 19), dtype, lane.device)
    own, _, _ = expected(q.seen, first.seen)
    assert same(lane.score_pairs(q.value(), first.value(), None, q.mask).detach(), own.diagonal().copy(), result)
    pairs = torch.tensor([[3, 0], [3, 0], [0, 5], [2, 3]], dtype=torch.int32)
    found = lane.score_pairs(q.value(), d.value(), pairs, q.mask, d.mask)
    assert same(found.detach(), scores[[3, 3, 0, 2], [0, 0, 5, 3]], result)


@interpreter_when(lambda lane, dtype: dtype == torch.float16)
def test_candidates_of_their_own(lane, dtype):
    """Other documents for each query, as a 4-D tensor, a list of lists, and a list of 3-D tensors."""
    NQ, K, D = 3, 4, 19
    q = build("padded", make_side(5, [4] * NQ, D), dtype, lane.device)
    sides = [make_side(50 + n, [6] * K, D, "holes") for n in range(NQ)]
    per_query = [build("padded", side, dtype, lane.device) for side in sides]
    wanted = np.stack([expected(q.seen, side)[0][n] for n, side in enumerate(sides)])
    index = np.stack([expected(q.seen, side)[1][n] for n, side in enumerate(sides)])
    result = torch.float64 if dtype == torch.float64 else torch.float32
    documents, masks = torch.stack([b.value() for b in per_query]), torch.stack([b.mask for b in per_query])
    assert same(lane.score(q.value(), documents, None, masks), wanted, result)
    assert same(lane.matches(q.value(), documents, None, masks).index, index, torch.int64)
    lists, list_masks = [list(each) for each in documents], [list(each) for each in masks]
    assert same(lane.score(q.value(), lists, None, list_masks), wanted, result)
    assert same(lane.score(q.value(), list(documents), None, list_masks), wanted, result)


@interpreter_when(lambda lane, dtype: dtype == torch.float16)
def test_expanded_and_shared(lane, dtype):
    """Case 55: stride 0 over the items, and gradients that add up in the one item behind them."""
    one_q, one_d = make_side(1, [4], 16), make_side(2, [9], 16)
    q, d = build("padded", one_q, dtype, lane.device), build("padded", one_d, dtype, lane.device)
    query, document = q.leaves[0].requires_grad_(), d.leaves[0].requires_grad_()
    found = lane.score(query.expand(3, -1, -1), document.expand(5, -1, -1))
    scores, index, _ = expected(one_q, one_d)
    assert same(found.detach(), np.broadcast_to(scores, (3, 5)).copy(), found.dtype)
    found.sum().backward()
    (of_query,), (of_document,) = expected_grads(one_q, one_d, index, np.full((1, 1), 15.0))
    assert same(query.grad[0], of_query, dtype)
    assert same(document.grad[0], of_document, dtype)


def test_read_in_place(lane, dtype):
    """Padded, strided, packed and viewed tokens reach the backend as they lie: no copy."""
    from maxsim.layout import make_problem

    for form in ("padded", "strided", "packed32", "packed64", "views", "jagged", "jagged-holes", "candidates"):
        d = build(form, make_side(2, DOCUMENT_LENGTHS, 16, "holes"), dtype, lane.device, copies=2)
        q = build("padded", make_side(1, [3, 3], 16), dtype, lane.device)
        data = make_problem(q.value(), d.value(), None, d.mask).documents.data
        assert data.untyped_storage().data_ptr() == d.leaves[0].untyped_storage().data_ptr(), form
