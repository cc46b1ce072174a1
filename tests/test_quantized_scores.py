"""Scores of int8 and fp8 documents: exact where they can be, within the budget of the oracle elsewhere, the same bits
in every layout and batch, gradients for queries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis")

import budget
from codes import SCALED, SCALES, exact_side, needs_codec, quantised_queries, quantised_tokens, served
from forms import CANDIDATES, DOCUMENT_FORMS, NUMPY, QUERY_FORMS, build, expected, expected_grads
from hypothesis import assume, given
from hypothesis import strategies as st
from lanes import integers, random
from test_exact import same
from test_properties import LENGTHS, profile

import maxsim
from maxsim import Packed, Quantized, quantize, reference

INF = float("inf")


@st.composite
def problems(draw, lane):
    """Queries and documents that the codec holds exactly, in any form."""
    dtype = draw(st.sampled_from([each for each in lane.dtypes if each != torch.float64]))
    q_form, d_form = draw(st.sampled_from(QUERY_FORMS)), draw(st.sampled_from(DOCUMENT_FORMS))
    assume(not (dtype == torch.bfloat16 and {q_form, d_form} & set(NUMPY)))
    assume(not (lane.device == "cuda" and d_form in NUMPY))
    # tensor cores keep fewer bits of a sum than float32 has, so that no sum of e4m3 need be exact there
    exact = [each for each in served(lane) if each in SCALED and (each == "int8" or lane.device == "cpu")]
    codec = draw(st.sampled_from(exact))
    scale = draw(st.sampled_from(SCALES))
    D, seed = draw(st.integers(1, 140)), draw(st.integers(0, 2**16))
    kinds = st.sampled_from(("none", "prefix", "left", "holes"))
    q_lengths, d_lengths = draw(LENGTHS), draw(LENGTHS)
    q = build(q_form, exact_side(seed, q_lengths, D, draw(kinds), codec), dtype, lane.device)
    side = exact_side(seed + 1, d_lengths, D, draw(kinds), codec)
    d = build(d_form, side, dtype, lane.device, copies=len(q_lengths))
    for leaf in q.leaves:
        leaf.requires_grad_()
    return q, d, codec, scale, draw(st.sampled_from(("exclude", "zero"))), d_form in CANDIDATES


def check(lane, data):
    q, d, codec, scale, masked, candidates = data.draw(problems(lane))
    made = quantize(d.value(), codec, d.mask, scale=scale)
    index_of = data.draw(st.sampled_from(("as it is", "saved", "selected")))
    if index_of == "selected" and not candidates:
        made = made[torch.arange(len(made))]
    values, index, similarity = expected(q.seen, d.seen, masked)
    if candidates:
        assert made.per_query == len(d.seen.items)
    found = lane.score(q.value(), made, q.mask, None, masked)
    assert same(found.detach(), values, torch.float32)
    matched = lane.matches(q.value(), made, q.mask, None, masked)
    LQ = index.shape[2]
    assert same(matched.index[..., :LQ], index, torch.int64)
    assert same(matched.similarity[..., :LQ], similarity, torch.float32)
    if found.requires_grad:
        upstream = np.random.default_rng(0).integers(-1, 2, values.shape).astype(np.float64)
        found.backward(torch.tensor(upstream).to(found))
        wanted, _ = expected_grads(q.seen, d.seen, index, upstream)
        for leaf, grad in zip(q.leaves, q.spread(wanted), strict=True):
            assert same(leaf.grad, grad, leaf.dtype)
    if candidates:
        return
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, values.shape[0] - 1), st.integers(0, values.shape[1] - 1)), max_size=6)
    )
    chosen = np.array(pairs, np.int64).reshape(-1, 2)
    some = lane.score_pairs(q.value(), made, chosen, q.mask, None, masked)
    assert same(some.detach(), values[chosen[:, 0], chosen[:, 1]], torch.float32)
    k = data.draw(st.integers(0, values.shape[1] + 2))
    best = lane.topk(q.value(), made, k, q.mask, None, masked)
    for row, hits in enumerate(best.indices.tolist()):
        kept = q.seen.masks[row].any() if q.seen.masks is not None else len(q.seen.items[row]) > 0
        order = sorted(range(values.shape[1]), key=lambda n: -values[row, n])
        order = [n for n in order if values[row, n] > -INF] if kept else []
        assert hits == (order + [-1] * values.shape[1])[: min(k, values.shape[1])]


@profile(150)
@given(data=st.data())
def test_any_problem(lane, data):
    check(lane, data)


@pytest.mark.slow
@profile(1500)
@given(data=st.data())
def test_any_problem_at_length(lane, data):
    check(lane, data)


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.dtypes(torch.float16, torch.bfloat16, torch.float32)
def test_within_the_budget_of_the_oracle(lane, dtype, codec, scale):
    """The oracle quantises both sides itself, and multiplies in float64."""
    needs_codec(lane, codec)
    q, d = random(1, 3, 6, 40, dtype=dtype), random(2, 9, 11, 40, dtype=dtype)
    d = d * torch.logspace(-3, 3, 9)[:, None, None].to(dtype)
    made = quantize(d.to(lane.device), codec, scale=scale)
    exact_q = quantised_queries(q, codec)
    exact_d = torch.tensor(np.array([quantised_tokens(x, codec, scale) for x in d.double().numpy()]))
    q_mask, d_mask = torch.ones(3, 6, dtype=torch.bool), torch.ones(9, 11, dtype=torch.bool)
    truth = budget.true_scores(exact_q, exact_d, q_mask, d_mask)
    plain = budget.plain_scores(exact_q.float(), exact_d.float(), q_mask, d_mask)
    size = budget.scores_scale(exact_q, exact_d, q_mask, d_mask)
    if codec == "fp8" and lane.device == "cuda":  # tensor cores keep fewer bits of a sum than float32 has
        plain = truth + 2.0**-12 * size
    q = q.to(lane.device)
    found = lane.score(q, made)
    budget.check(f"{codec} {scale}", found, truth, plain, size)
    assert abs(float(truth[0, 0]) - reference.score(exact_q[0].numpy(), exact_d[0].numpy())) < 1e-9
    assert torch.equal(found, lane.matches(q, made).similarity.double().sum(-1).float()) or torch.allclose(
        found, lane.matches(q, made).similarity.sum(-1), rtol=1e-5
    )


@pytest.mark.parametrize("width", [1, 2, 3, 5, 127, 129, 1040, 1041, 2052, 4096])
def test_products_of_int8_are_exact(lane, width):
    """Case 39: codes of 127, whose products pass 2^24, and one that is 126."""
    q, d = (torch.full((count, 1, width), 127.0, device=lane.device) for count in (1, 2))
    d[1, 0, -1] = 126
    made = quantize(d, scale=1.0)
    found = lane.score(q, made)[0]
    assert found.tolist() == [float(np.float32(127 * 127 * width)), float(np.float32(127 * 127 * width - 127))]
    assert found[0] > found[1]
    assert lane.matches(q, quantize(d.view(1, 2, width), scale=1.0)).index.tolist() == [[[0]]]


def test_products_with_factors_are_told_apart(lane):
    """Of two integers that are one float32 number the larger wins, and equal ones go to the first token."""

    def codes(product: int) -> list[int]:
        """Of a token whose product with (127, …, 127, 1) that is."""
        rest = (product + 63) % 127 - 63
        whole = (product - rest) // 127
        return [whole // 127 + (n < whole % 127) for n in range(127)] + [rest]

    tokens = [(20_000, 1024), (246_747, 83), (20_000, 1024)]  # 20,480,000, one more, and the first again
    values = [product * factor for product, factor in tokens]
    assert np.float32(values[0]) == np.float32(values[1])
    made = quantize(torch.ones(1, 3, 128), scale="token")
    parameters = dataclasses.replace(
        made.parameters, factor=torch.tensor([[f for _, f in tokens]], dtype=torch.int16), scale=torch.ones(1)
    )
    made = Quantized(torch.tensor([[codes(m) for m, _ in tokens]], dtype=torch.int8), parameters, 3).to(lane.device)
    q = torch.full((1, 1, 128), 127.0, device=lane.device)
    q[..., -1] = 1
    found = lane.matches(q, made)
    assert found.index.tolist() == [[[1]]]
    assert found.similarity.tolist() == lane.score(q, made)[..., None].tolist() == [[[float(values[0])]]]
    assert lane.matches(q, made, None, torch.tensor([[True, False, True]])).index.tolist() == [[[0]]]


@pytest.mark.interpreter
@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.dtypes(torch.float16, torch.float32)
def test_backends_agree(lane, dtype, codec, scale):
    """On every bit, where products are integers."""
    needs_codec(lane, codec)
    q, d = random(50, 3, 21, 100, dtype=dtype), [random(60 + n, 9 * n, 100, dtype=dtype) for n in range(7)]
    made = quantize(d, codec, scale=scale)
    wanted = maxsim.matches(q, made, backend="cpu")
    found = lane.matches(q.to(lane.device), made.to(lane.device))
    scores = lane.score(q.to(lane.device), made.to(lane.device)).cpu()
    if codec == "int8":
        assert torch.equal(found.index.cpu(), wanted.index)
        assert torch.equal(found.similarity.cpu(), wanted.similarity)
        assert torch.equal(scores, maxsim.score(q, made, backend="cpu"))
    else:
        torch.testing.assert_close(found.similarity.cpu(), wanted.similarity, rtol=2.0**-10, atol=2.0**-10)
        torch.testing.assert_close(scores, maxsim.score(q, made, backend="cpu"), rtol=2.0**-10, atol=2.0**-10)


@pytest.mark.parametrize("scale", SCALES)
def test_wide_codes_in_any_batch(lane, scale):
    q, d = (random(3 + n, *shape, 1500, device=lane.device) for n, shape in enumerate(((3, 5), (30, 9))))
    made = quantize(d, scale=scale)
    found = lane.score(q, made)
    back = (quantised_queries(q).to(lane.device), made.dequantize(torch.float64))
    truth = torch.einsum("qid,njd->qnij", *back).amax(-1).sum(-1)
    assert (found - truth).abs().max() / truth.abs().max() < 3e-7
    assert torch.equal(found[1:2, 7:9], lane.score(q[1], made[7:9]))


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("scale", SCALES)
def test_same_bits_in_any_batch_and_layout(lane, codec, scale, monkeypatch):
    needs_codec(lane, codec)
    q = random(5, 4, 7, 48, device=lane.device)
    d = [random(100 + n, 1 + 7 * n % 40, 48, device=lane.device) for n in range(40)]
    made = quantize(d, codec, scale=scale)
    found = lane.score(q, made)
    for n in (0, 17, 39):
        assert torch.equal(lane.score(q[2], made[n]), found[2:3, n : n + 1])
        assert torch.equal(lane.score(q[2], quantize(d[n], codec, scale=scale)), found[2:3, n : n + 1])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(lane.score(q, made[order]), found[:, order])
    padded, mask = lane.tensor(torch.full((40, 45, 48), float("nan"))), torch.zeros(40, 45, dtype=torch.bool)
    for n, item in enumerate(d):
        padded[n, : len(item)], mask[n, : len(item)] = item, True
    assert torch.equal(lane.score(q, quantize(padded, codec, mask, scale=scale)), found)
    more = torch.cat([q, torch.zeros_like(q[:, :3])], 1)
    kept = torch.arange(10) < 7
    assert torch.equal(lane.score(more, made, kept.expand(4, 10)), found)
    every = torch.cartesian_prod(torch.arange(4), torch.arange(40))
    assert torch.equal(lane.score_pairs(q, made, every), found.reshape(-1))
    hits = lane.topk(q, made, 40)
    assert torch.equal(hits.scores, found.gather(1, hits.indices))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(lane.score(q, made), found)


def test_a_document_mask_leaves_out_more(lane):
    q, d = (integers(6 + n, *shape, 8, bound=9, device=lane.device) for n, shape in enumerate(((2, 3), (4, 6))))
    first, second = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.7, torch.arange(6) % 3 != 1
    second = second.expand(4, 6)
    made = quantize(d, "int8", first)
    both = quantize(d, "int8", first).dequantize()
    assert torch.equal(lane.score(q, made, None, second), lane.score(q, made, None, first & second))
    assert lane.matches(q, made, None, second).index.equal(
        lane.matches(quantised_queries(q).float().to(lane.device), both, None, first & second).index
    )
    items = quantize([x[: n + 1] for n, x in enumerate(d)])
    masks = [row[: n + 1] for n, row in enumerate(second)]
    assert torch.equal(lane.score(q, items, None, masks), lane.score(q, items, None, torch.cat(masks)))
    for wrong in (second[:, :5], second[0], list(second)):
        with pytest.raises((ValueError, TypeError), match="mask"):
            lane.score(q, made if isinstance(wrong, torch.Tensor) else items, None, wrong)


@pytest.mark.parametrize("codec", SCALED)
def test_nothing_to_score(lane, codec):
    needs_codec(lane, codec)
    q, some = random(8, 2, 3, 8, device=lane.device), random(9, 3, 2, 8, device=lane.device)
    assert lane.score(q, quantize(some[:0], codec)).shape == (2, 0)
    assert lane.score(q, quantize(some[:, :0], codec)).tolist() == [[-INF] * 3] * 2
    assert lane.score(q[:0], quantize(some, codec)).shape == (0, 3)
    assert lane.score([], quantize(some, codec)).shape == (0, 3)
    assert lane.score(q[:, :0], quantize(some, codec)).tolist() == [[0] * 3] * 2
    for scale in SCALES:
        made = quantize([q[0], q[0][:0], q[0][:0]], codec, scale=scale)
        assert lane.score(q, made)[:, 1:].tolist() == [[-INF] * 2] * 2
        assert lane.topk(q, made, 3).indices.tolist() == [[0, -1, -1]] * 2
        none = quantize([q[0][:0]], codec, scale=scale)
        assert lane.score(q, none).tolist() == [[-INF]] * 2
        assert len(none.dequantize()) == 1


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_queries_that_are_not_finite(lane, codec, value):
    """The scores that the token takes part in are NaN, and no others."""
    needs_codec(lane, codec)
    q, d = random(10, 3, 4, 8, device=lane.device), [random(11 + n, 5 - 5 * n, 8, device=lane.device) for n in (0, 1)]
    made = quantize(d, codec)
    clean = lane.score(q, made)
    q[1, 2, 3] = value
    found = lane.score(q, made)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert bool(found[1, 0].isnan())
    assert found[1, 1] == -INF
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2] = False
    assert bool(lane.score(q, made, mask)[1, 0].isfinite())


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.dtypes(torch.float16, torch.float32)
def test_gradients_of_queries(lane, dtype, codec, scale, normalize):
    """Those of the dequantised documents at the winners of the codes, in any form of call."""
    needs_codec(lane, codec)
    d = [random(20 + n, 3 + n, 24, dtype=dtype, device=lane.device) for n in range(5)]
    made = quantize(d, codec, normalize=normalize, scale=scale)
    q = random(13, 3, 6, 24, dtype=dtype, device=lane.device).requires_grad_()
    lane.score(q, made, normalize=normalize).pow(2).sum().backward()
    winners = lane.matches(q, made, normalize=normalize).index
    exact = made.dequantize(torch.float64)
    wide = q.detach().double().requires_grad_()
    unit = torch.nn.functional.normalize(wide, dim=-1) if normalize else wide
    total = []
    for n in range(5):
        tokens = exact.tokens[exact.offsets[n] : exact.offsets[n + 1]]
        total.append((unit * tokens[winners[:, n]]).sum(-1).sum(-1))
    upstream = 2 * lane.score(q, made, normalize=normalize).detach().double()
    torch.stack(total, 1).backward(upstream)
    assert (q.grad.double() - wide.grad).abs().max() <= 2e-3 * wide.grad.abs().max() * (dtype == torch.float16) + (
        1e-6 * wide.grad.abs().max()
    )
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(5))
    again = q.detach().clone().requires_grad_()
    lane.score_pairs(again, made, pairs, normalize=normalize).pow(2).sum().backward()
    assert (again.grad - q.grad).abs().max() <= 2e-3 * q.grad.abs().max()
    candidates = q.detach().clone().requires_grad_()
    lane.score(candidates, made[torch.arange(5).expand(3, 5)], normalize=normalize).pow(2).sum().backward()
    assert (candidates.grad - q.grad).abs().max() <= 2e-3 * q.grad.abs().max()


def test_refused_calls(lane, monkeypatch):
    q, d = random(14, 2, 3, 8, device=lane.device), random(15, 4, 5, 8, device=lane.device)
    made = quantize(d)
    with pytest.raises(TypeError, match="queries must be tokens, got Quantized"):
        maxsim.score(made, d)
    with pytest.raises(TypeError, match=r"queries\.float"):
        maxsim.score(q.double(), made)
    with pytest.raises(ValueError, match=r"normalize=True takes .* quantize\(documents, normalize=True\)"):
        maxsim.score(q, made, normalize=True)
    with pytest.raises(ValueError, match="width 9 and documents 8"):
        maxsim.score(random(1, 2, 3, 9), made)
    with pytest.raises(ValueError, match="candidates"):
        maxsim.topk(q, made[torch.zeros(2, 1, dtype=torch.long)], 1)
    with pytest.raises(ValueError, match="one list of documents for each of 2"):
        maxsim.score(q, made[torch.zeros(3, 1, dtype=torch.long)])
    assert maxsim.backend_for(q, made) == lane.backend


@pytest.mark.parametrize("options", [{}, {"scale": "token"}, {"codec": "residual"}, {"codec": "pq", "parts": 4}])
def test_compiled(lane, options):
    """Without a break, gradients too."""
    needs_codec(lane, options.get("codec", "int8"))
    torch.compiler.reset()
    offsets = torch.tensor([0, 3, 3, 20], device=lane.device)
    for d in (random(2, 4, 5, 8, device=lane.device), Packed(random(2, 20, 8, device=lane.device), offsets)):
        made = quantize(d, **options)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(q, made=made):
            return lane.score(q, made) * 2, lane.matches(q, made).index, lane.topk(q, made, 2).scores

        q = random(1, 2, 3, 8, device=lane.device).requires_grad_()
        found = compiled(q)
        found[0].sum().backward()
        plain = q.detach().clone().requires_grad_()
        scores = lane.score(plain, made)
        (scores * 2).sum().backward()
        assert torch.equal(found[0], scores * 2)
        assert torch.equal(found[1], lane.matches(q, made).index)
        assert torch.equal(found[2], lane.topk(q, made, 2).scores)
        assert torch.equal(q.grad, plain.grad)


def test_documents_stay_as_they_are():
    d = random(16, 4, 5, 8)
    before = d.clone()
    made = quantize(Packed(d.view(-1, 8), torch.arange(5) * 5), normalize=True)
    maxsim.score(random(1, 2, 3, 8), made, normalize=True)
    assert torch.equal(d, before)
