"""The bound holds, and what it certifies is the exact result, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis")

from codes import SCALED, SCALES, unit
from forms import build, make_side
from hypothesis import given
from hypothesis import strategies as st
from lanes import random
from test_properties import profile

import maxsim
from maxsim import Packed, Views, best, certified, certified_topk, error_bound, quantize, reference
from maxsim.bounds import bound, query_sizes
from maxsim.layout import make_problem

INF = float("inf")
CODECS = ("int8", "fp8", "residual", "pq")


def items(seed: int, lengths: list[int], D: int, spread: float) -> list[torch.Tensor]:
    """Documents whose sizes differ by `spread`."""
    return [random(seed + n, length, D) * spread**n for n, length in enumerate(lengths)]


def same(found, wanted) -> bool:
    return torch.equal(found.scores, wanted.scores) and torch.equal(found.indices, wanted.indices)


@st.composite
def problems(draw):
    lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)
    D, seed = draw(st.integers(1, 70)), draw(st.integers(0, 2**16))
    dtype = draw(st.sampled_from((torch.float16, torch.bfloat16, torch.float32)))
    spread = draw(st.sampled_from((1.0, 0.3, 4.0)))
    q = [x.to(dtype) for x in items(seed, draw(lengths), D, 1.0)]
    d = [x.to(dtype) for x in items(seed + 100, draw(lengths), D, spread)]
    masks = None
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(seed)
        masks = [torch.rand(len(x), generator=generator) < 0.7 for x in d]
    codec = draw(st.sampled_from(CODECS))
    options = {"codec": codec}
    if codec in SCALED:
        options["scale"] = draw(st.sampled_from((*SCALES, 0.01)))
    elif codec == "residual":
        options |= {"bits": draw(st.sampled_from((1, 2, 4, 8))), "renormalize": draw(st.booleans())}
        options["centroids"] = draw(st.integers(1, 40))
    else:
        options["parts"] = draw(st.sampled_from([n for n in range(1, D + 1) if D % n == 0]))
    return q, d, masks, options, draw(st.sampled_from(("exclude", "zero"))), draw(st.booleans())


def check_bound(problem) -> None:
    q, d, masks, options, masked, normalize = problem
    made = quantize(d, document_mask=masks, normalize=normalize, **options)
    most = error_bound(q, made, masked=masked, normalize=normalize)
    assert most.dtype == torch.float64
    assert most.shape == (len(q), len(d))
    found = maxsim.score(q, made, masked=masked, normalize=normalize).double()
    exact = maxsim.score(q, d, None, masks, masked, normalize).double()
    for a, query in enumerate(q):
        for b, document in enumerate(d):
            mask = None if masks is None else masks[b].numpy()
            truth = reference.score(query.double().numpy(), document.double().numpy(), None, mask, masked, normalize)
            for other in (truth, float(exact[a, b])):
                if np.isfinite(truth):
                    assert abs(float(found[a, b]) - other) <= float(most[a, b])
                else:
                    assert truth == float(found[a, b]) == float(exact[a, b])


@profile(100)
@given(problem=problems())
def test_the_bound_holds(problem):
    """In float64, for what the oracle makes of the documents; saturated codes too."""
    check_bound(problem)


def check_certified(problem, k: int) -> None:
    q, d, masks, options, masked, normalize = problem
    made = quantize(d, document_mask=masks, normalize=normalize, **options)
    found = certified_topk(q, made, Packed.from_list(d), k, None, masked, normalize)
    assert same(found, maxsim.topk(q, d, k, None, masks, masked, normalize))
    assert found.rescored.shape == (len(q),)
    assert bool((found.rescored >= (found.indices >= 0).sum(1)).all())
    assert bool((found.rescored <= len(d)).all())


@profile(100)
@given(problem=problems(), k=st.integers(0, 8))
def test_certified_is_exact(problem, k):
    check_certified(problem, k)


@pytest.mark.slow
@profile(1000)
@given(problem=problems(), k=st.integers(0, 8))
def test_any_problem_at_length(problem, k):
    check_bound(problem)
    check_certified(problem, k)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_few_are_rescored(codec, dtype):
    """Where some documents stand out, others are never read."""
    q, d = unit(1, 3, 8, 64, dtype=dtype), unit(2, 500, 12, 64, dtype=dtype)
    for n in range(3):
        d[100 * n : 100 * n + 10, :8] = q[n]
    made = quantize(d, codec)
    for k in (1, 10):
        found = certified_topk(q, made, d, k)
        assert same(found, maxsim.topk(q, d, k))
        assert bool((found.rescored == 10).all())


def test_ties_keep_their_order(monkeypatch):
    """Equal documents, in any chunk: the lowest index wins, as in `topk`."""
    q, d = random(3, 2, 4, 8), random(4, 5, 6, 8)[torch.arange(60) % 5]
    made = quantize(d)
    for size in (1, 7, 1000):
        monkeypatch.setattr(best, "CHUNK_BYTES", 48 * 2 * size)
        for k in (1, 3, 12, 13, 59, 60, 100):
            assert same(certified_topk(q, made, d, k), maxsim.topk(q, d, k))


def test_queries_in_groups(monkeypatch):
    q, d = [unit(n, 1 + n % 5, 16) for n in range(9)], unit(20, 50, 6, 16)
    made, wanted = quantize(d), maxsim.topk(q, d, 4)
    whole = certified_topk(q, made, d, 4)
    for size in (1, 2, 5):
        monkeypatch.setattr(certified, "CANDIDATES", 50 * size)
        found = certified_topk(q, made, d, 4)
        assert same(found, wanted)
        assert torch.equal(found.rescored, whole.rescored)


@pytest.mark.parametrize("form", ["padded", "strided", "list", "packed32", "views", "jagged-holes", "numpy"])
@pytest.mark.parametrize("masks", ["none", "holes"])
def test_any_form_of_the_exact_documents(form, masks):
    side = make_side(5, [7, 1, 3, 17, 1, 4], 19, masks, bound=50)
    built = build(form, side, torch.float32, "cpu")
    q = random(6, 3, 4, 19)
    made = quantize(built.value(), "int8", built.mask)
    assert same(certified_topk(q, made, built.value(), 4), maxsim.topk(q, built.value(), 4, None, built.mask))


def test_a_mapped_file(tmp_path):
    q, d = unit(7, 2, 5, 32), unit(8, 300, 6, 32)
    d.numpy().tofile(tmp_path / "d")
    mapped = np.memmap(tmp_path / "d", np.float32, "c", shape=(300, 6, 32))
    ragged = Views(mapped.reshape(-1, 32), np.arange(300) * 6, np.full(300, 6))
    made = quantize(mapped)
    for exact in (mapped, ragged):
        assert same(certified_topk(q, made, exact, 5), maxsim.topk(q, d, 5))


def test_queries_that_are_not_finite():
    q, d = random(9, 3, 4, 8), random(10, 20, 5, 8)
    q[1, 2, 0], q[2, 0, 1] = float("nan"), INF
    found, wanted = certified_topk(q, quantize(d), d, 3), maxsim.topk(q, d, 3)
    assert torch.equal(found.indices, wanted.indices)
    assert torch.equal(found.scores.nan_to_num(nan=7), wanted.scores.nan_to_num(nan=7))
    assert error_bound(q, quantize(d))[1:].isinf().all()


def test_selected_documents_and_candidates():
    q, d = random(11, 2, 4, 8), random(12, 20, 5, 8)
    made = quantize(d)
    assert same(certified_topk(q, made[5:15], d[5:15], 3), maxsim.topk(q, d[5:15], 3))
    table = torch.tensor([[3, 1], [7, 7]])
    assert torch.equal(error_bound(q, made[table]), error_bound(q, made).gather(1, table))


def test_empty():
    q, d = random(13, 2, 4, 8), random(14, 5, 3, 8)
    assert certified_topk(q, quantize(d[:0]), d[:0], 3).rescored.tolist() == [0, 0]
    assert certified_topk(q[:0], quantize(d), d, 3).indices.shape == (0, 3)
    assert certified_topk([], quantize(d), d, 3).indices.shape == (0, 3)
    found = certified_topk([q[0], q[0][:0]], quantize([d[0], d[0][:0]]), [d[0], d[0][:0]], 5)
    assert found.indices.tolist() == [[0, -1], [-1, -1]]
    assert found.rescored.tolist() == [1, 0]


def test_refused():
    q, d = random(15, 2, 4, 8), random(16, 5, 3, 8)
    made = quantize(d)
    with pytest.raises(ValueError, match="exact document 4 is not what was quantised: query 0 scores"):
        certified_topk(q, made, torch.cat([d[:4], d[4:] + 5]), 5)
    for exact, error, message in (
        (d[:4], ValueError, "5 documents were quantised, exact holds 4"),
        (d[:, :2], ValueError, "document 0 had 3 tokens when it was quantised, in exact 2"),
        (d.half(), TypeError, "float16"),
        (d[..., :7], ValueError, "width"),
        (made, TypeError, "got Quantized"),
        (d[None].expand(2, 5, 3, 8), ValueError, "candidates"),
    ):
        with pytest.raises(error, match=message):
            certified_topk(q.half() if exact is d.half() else q, made, exact, 2)
    with pytest.raises(TypeError, match=r"quantised are torch\.float32, exact torch\.float16"):
        certified_topk(q.half(), made, d.half(), 2)
    with pytest.raises(TypeError, match="must be Quantized"):
        certified_topk(q, d, d, 2)
    with pytest.raises(TypeError, match="must be Quantized"):
        error_bound(q, d)
    with pytest.raises(ValueError, match="-1"):
        certified_topk(q, made, d, -1)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_scores_beyond_float32(codec):
    """A sum that leaves float32's range on the way has no bound, so that the exact score decides."""
    signs = torch.ones(16)
    signs[8:] = -1
    d = torch.stack([torch.full((1, 16), 1e36), (signs * 4e37)[None]])
    q = torch.full((1, 1, 16), 8.0)
    wanted = maxsim.topk(q, d, 1)
    found = maxsim.certified_topk(q, maxsim.quantize(d, codec), d, 1)
    assert torch.equal(found.indices, wanted.indices)
    assert torch.equal(found.scores, wanted.scores)


@pytest.mark.parametrize("codec", ["int8", "fp8", "pq"])
@pytest.mark.parametrize("size", [1e20, 1e-30])
def test_norms_that_float32_does_not_hold(codec, size):
    """Codes are of the unit vectors that scores are of, though these be no unit vectors where squares overflow."""
    x, q = torch.randn(6, 5, 16) * size, torch.randn(1, 3, 16)
    made = quantize(x, codec, normalize=True)
    apart = (maxsim.score(q, made, normalize=True) - maxsim.score(q, x, normalize=True)).abs()
    assert bool((apart <= error_bound(q, made, normalize=True)).all())
    wanted = maxsim.topk(q, x, 2, normalize=True)
    found = certified_topk(q, made, x, 2, normalize=True)
    assert torch.equal(found.indices, wanted.indices)
    assert torch.equal(found.scores, wanted.scores)


def test_fp8_has_no_bound_on_a_gpu():
    """Nor on any device but the CPU."""
    made = quantize(random(1, 3, 4, 32), "fp8")
    problem = make_problem(random(2, 1, 3, 32).to("meta"), made.to("meta"))
    with pytest.raises(ValueError, match="no proven bound on a GPU"):
        bound(query_sizes(make_problem(random(2, 1, 3, 32), made)), problem)


@pytest.mark.gpu
def test_scans_on_a_gpu():
    d = unit(1, 500, 20, 64).cuda()
    q = d[:3, :5] + 0.02 * unit(2, 3, 5, 64).cuda()
    wanted = maxsim.topk(q, d, 5)
    for scale in SCALES:
        assert same(certified_topk(q, quantize(d, "int8", scale=scale), d, 5), wanted)
    with pytest.raises(ValueError, match="no proven bound on a GPU"):
        certified_topk(q, quantize(d, "fp8"), d, 5)


@pytest.mark.parametrize("index", [slice(None, None, 2), slice(None, None, -1), [5, 0, 5], slice(1, 4)], ids=str)
def test_selected_documents_with_a_mask(index):
    """The mask that was given to `quantize` is that of the documents selected."""
    d, q = random(1, 6, 4, 8), random(2, 2, 3, 8)
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.7
    chosen = torch.tensor(range(6)[index]) if isinstance(index, slice) else torch.tensor(index)
    exact, kept = d[chosen], mask[chosen]
    wanted = maxsim.topk(q, exact, 2, None, kept)
    for made in (quantize(d, "int8", mask), quantize(list(d), "int8", list(mask))):
        for form in (exact, list(exact)):
            found = maxsim.certified_topk(q, made[index], form, 2)
            assert torch.equal(found.scores, wanted.scores)
            assert torch.equal(found.indices, wanted.indices)
