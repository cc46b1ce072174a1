"""Scores of residual and product codes are those of what they are decoded to, bit for bit, in every layout."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("hypothesis")

from codes import needs_codec, served, unit
from forms import CANDIDATES, DOCUMENT_FORMS, NUMPY, QUERY_FORMS, build, make_side
from hypothesis import assume, given
from hypothesis import strategies as st
from lanes import random
from test_properties import LENGTHS, profile

from maxsim import Packed, quantize

INF = float("inf")
CODECS = ("residual", "pq")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def options(codec: str, D: int, seed: int) -> dict:
    if codec == "pq":
        return {"codec": codec, "parts": max(n for n in range(1, min(D, 8) + 1) if D % n == 0)}
    return {"codec": codec, "bits": (1, 2, 4, 8)[seed % 4], "renormalize": seed % 3 == 0}


@st.composite
def problems(draw, lane):
    codecs = served(lane)
    dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype in lane.dtypes]))
    q_form, d_form = draw(st.sampled_from(QUERY_FORMS)), draw(st.sampled_from(DOCUMENT_FORMS))
    assume(not (dtype == torch.bfloat16 and {q_form, d_form} & set(NUMPY)))
    assume(not (lane.device == "cuda" and d_form in NUMPY))
    widths = st.sampled_from((24, 128)) if lane.device == "cuda" else st.integers(1, 140)  # each is compiled
    D, seed = draw(widths), draw(st.integers(0, 2**16))
    kinds = st.sampled_from(("none", "prefix", "left", "holes"))
    q_lengths, d_lengths = draw(LENGTHS), draw(LENGTHS)
    q = build(q_form, make_side(seed, q_lengths, D, draw(kinds)), dtype, lane.device)
    side = make_side(seed + 1, d_lengths, D, draw(kinds), bound=50)
    d = build(d_form, side, dtype, lane.device, copies=len(q_lengths))
    codec = draw(st.sampled_from([codec for codec in CODECS if codec in codecs]))
    made = quantize(d.value(), document_mask=d.mask, **options(codec, D, seed))
    return q, made, dtype, draw(st.sampled_from(("exclude", "zero"))), d_form in CANDIDATES


def check(lane, data):
    q, made, dtype, masked, candidates = data.draw(problems(lane))
    plain, mask = made.dequantize(dtype), made.mask
    if candidates:  # of which every query has the same
        K = made.per_query
        made = made.compact()
        mask = made.mask
        plain = made.dequantize(dtype)
        offsets = plain.offsets.tolist()
        rows = [plain.tokens[a:b] for a, b in pairwise(offsets)]
        plain = [rows[n : n + K] for n in range(0, len(rows), K)]
        if mask is not None:
            masks = [mask[a:b] for a, b in pairwise(offsets)]
            mask = [masks[n : n + K] for n in range(0, len(masks), K)]
    wanted = lane.score(q.value(), plain, q.mask, mask, masked)
    for leaf in q.leaves:
        leaf.requires_grad_()
    found = lane.score(q.value(), made, q.mask, None, masked)
    assert torch.equal(found.detach(), wanted)
    for a, b in zip(
        lane.matches(q.value(), made, q.mask, None, masked), lane.matches(q.value(), plain, q.mask, mask, masked),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b)
    if found.requires_grad and found.numel():
        upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(0)).to(found.device)
        found.backward(upstream)
        grads = [leaf.grad.clone() for leaf in q.leaves]
        for leaf in q.leaves:
            leaf.grad = None
        lane.score(q.value(), plain, q.mask, mask, masked).backward(upstream)
        for leaf, grad in zip(q.leaves, grads, strict=True):
            # on a GPU the order of a sum follows from how a compiler lays tiles out
            assert (
                torch.equal(leaf.grad, grad) if lane.backend == "cpu" else torch.allclose(leaf.grad, grad, 1e-3, 1e-3)
            )
            leaf.requires_grad_(False)
    if candidates:
        return
    k = data.draw(st.integers(0, len(made) + 2))
    hits, plain_hits = lane.topk(q.value(), made, k, q.mask, None, masked), lane.topk(
        q.value(), plain, k, q.mask, mask, masked
    )  # fmt: skip
    assert torch.equal(hits.indices, plain_hits.indices)
    assert torch.equal(hits.scores, plain_hits.scores)
    pairs = torch.cartesian_prod(torch.arange(wanted.shape[0]), torch.arange(wanted.shape[1])).view(-1, 2)
    assert torch.equal(lane.score_pairs(q.value(), made, pairs, q.mask, None, masked), wanted.reshape(-1))


@profile(60)
@given(data=st.data())
def test_any_problem(lane, data):
    if lane.device == "cuda":
        pytest.skip("compiles hundreds of kernels: at length")
    check(lane, data)


@pytest.mark.slow
@profile(1000)
@given(data=st.data())
def test_any_problem_at_length(lane, data):
    check(lane, data)


@pytest.mark.parametrize("codec", CODECS)
def test_same_bits_in_any_batch(lane, codec):
    needs_codec(lane, codec)
    if lane.interpreted:
        pytest.skip("NumPy's products have other bits in other tiles")
    q, d = unit(5, 4, 7, 48).to(lane.device), [unit(100 + n, 1 + 7 * n % 40, 48) for n in range(40)]
    made = quantize(d, codec).to(lane.device)
    found = lane.score(q, made)
    for n in (0, 17, 39):
        assert torch.equal(lane.score(q[2], made[n]), found[2:3, n : n + 1])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(lane.score(q, made[order]), found[:, order])
    if not lane.interpreted:  # whose products, NumPy's, have bits that depend on the tile
        table = order.view(4, 10)
        assert torch.equal(lane.score(q, made[table]), found.gather(1, table.to(lane.device)))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(lane.score(q, made), found)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("normalize", [False, True])
def test_normalized(lane, codec, normalize):
    needs_codec(lane, codec)
    q, d = (random(1 + n, *shape, 32, device=lane.device) for n, shape in enumerate(((3, 6), (50, 7))))
    made = quantize(d, codec, normalize=True)
    found = lane.score(q, made, normalize=normalize)
    unit_q = torch.nn.functional.normalize(q, dim=-1) if normalize else q
    assert torch.allclose(found, lane.score(unit_q, made.dequantize()), atol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_queries_that_are_not_finite(lane, codec):
    """As of plain documents."""
    needs_codec(lane, codec)
    q, d = (random(3 + n, *shape, 16, device=lane.device) for n, shape in enumerate(((3, 4), (5, 6))))
    made = quantize(d, codec)
    q[1, 2, 0], q[2, 0, 1] = float("nan"), INF
    found, wanted = lane.score(q, made), lane.score(q, made.dequantize())
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found.isnan(), wanted.isnan())


def test_blocks_are_decoded_on_the_way(lane):
    """Never the whole corpus: what is decoded at once does not grow with it."""
    if lane.backend != "cpu":
        pytest.skip("kernels decode a tile at a time, in registers")
    made = quantize(Packed(unit(1, 6000, 32), torch.arange(0, 6001, 60)), "residual", centroids=16)
    largest = []
    read = type(made.parameters).reader

    def watched(self, codes):
        inner = read(self, codes)

        def decode(rows):
            found = inner(rows)
            largest.append(len(found))
            return found

        return decode

    many = made[torch.arange(100).repeat(40)].compact()  # 240,000 tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(made.parameters), "reader", watched)
        lane.score(unit(2, 1, 32, 32), many)
    assert max(largest) <= 1 << 15
    assert sum(largest) >= 240_000
