"""colpali-engine: its scores, gradients and losses with scoring of ours. Against its formula written out here, and
against the real package where it is installed (`make ci` installs it)."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import warnings
from importlib import metadata

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import maxsim
from maxsim.integrations import IntegrationError, _tokens, calls, calls_left, colpali, reset_calls
from maxsim.integrations.colpali import maxsim_inbatch, maxsim_kd, score_multi_vector

pytestmark = pytest.mark.filterwarnings("default")  # of theirs

real = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("colpali_engine") is None, reason="colpali-engine is not installed"),
]
WIDTH = 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def their_grid(q, d):
    """colpali-engine's formula: padding is zeros, and zeros count."""
    spec = "bnd,csd->bcns" if d.ndim == 3 else "bnd,bksd->bkns"
    return torch.einsum(spec, q, d).amax(3).sum(2)


def their_multi_vector(qs, ps, batch_size=128):
    """And its tiles: what a passage is padded to is the longest of its batch."""
    rows = []
    for i in range(0, len(qs), batch_size):
        queries = pad_sequence(list(qs[i : i + batch_size]), batch_first=True)
        batches = [pad_sequence(list(ps[j : j + batch_size]), batch_first=True) for j in range(0, len(ps), batch_size)]
        rows.append(torch.cat([their_grid(queries, batch) for batch in batches], 1))
    return torch.cat(rows)


def ragged(count, longest, seed=0, dtype=torch.float32, shortest=1):
    """Unit tokens of which most similarities are negative where there are few."""
    made = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=made).tolist()
    items = [torch.randn(n, WIDTH, generator=made, dtype=torch.float64) for n in lengths]
    return [torch.nn.functional.normalize(item, dim=-1).to(dtype) for item in items]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_size", [1, 2, 5, 7, 128])
@pytest.mark.parametrize("longest", [1, 3, 9])
def test_multi_vector_for_every_batch_size(batch_size, longest, device):
    """Which zeros compete depends on the batch, and so, for short passages, do scores."""
    qs, ps = ragged(6, 5), ragged(17, longest, seed=1, shortest=0)
    ps[::5] = [each if len(each) else torch.ones(1, WIDTH) for each in ps[::5]]
    for j in range(0, len(ps), batch_size):  # a batch in which nothing has a token is refused by theirs
        if not any(len(each) for each in ps[j : j + batch_size]):
            ps[j] = -torch.ones(1, WIDTH)
    scores = score_multi_vector(qs, ps, batch_size, device)
    assert (scores.dtype, scores.device.type) == (torch.float32, "cpu")
    torch.testing.assert_close(scores, their_multi_vector(qs, ps, batch_size))


def test_multi_vector_depends_on_the_batch_as_theirs_does():
    qs, ps = ragged(4, 5), ragged(16, 3, seed=1)
    alone, together = score_multi_vector(qs, ps, 1, device="cpu"), score_multi_vector(qs, ps, 16, device="cpu")
    assert (together >= alone).all()
    assert (together > alone).any()
    assert torch.equal(alone, maxsim.score(qs, ps))  # no padding at all


@pytest.mark.parametrize("group", [1, 1000, 2**28])
@pytest.mark.parametrize("form", ["lists", "tensors", "mixed"])
def test_multi_vector_of_tensors_and_in_groups(monkeypatch, group, form):
    monkeypatch.setattr(_tokens, "MOVED_ELEMENTS", group)
    qs, ps = ragged(5, 5), ragged(13, 4, seed=1)
    expected = their_multi_vector(qs, ps, 3)
    if form != "lists":
        ps = pad_sequence(ps, batch_first=True, padding_side="left")
        expected = their_multi_vector(qs, ps, 3)
    if form == "tensors":
        qs = pad_sequence(qs, batch_first=True)
    torch.testing.assert_close(score_multi_vector(qs, ps, 3, device="cpu"), expected)


def test_multi_vector_of_tensors_elsewhere_comes_in_groups(monkeypatch):
    monkeypatch.setattr(_tokens, "MOVED_ELEMENTS", 1)
    groups = list(colpali._passages(torch.ones(5, 3, 4), 128, torch.device("meta")))
    assert [len(group) for group in groups] == [1] * 5
    assert groups[0].is_meta


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_multi_vector_sums_half_precision_in_float32(dtype):
    qs, ps = ragged(3, 40, dtype=dtype, shortest=30), ragged(9, 20, seed=1, dtype=dtype)
    scores = score_multi_vector(qs, ps, 4, device="cpu")
    exact = their_multi_vector([q.double() for q in qs], [p.double() for p in ps], 4)
    assert (scores - exact).abs().max() < 1e-5
    torch.testing.assert_close(scores, their_multi_vector(qs, ps, 4).float(), rtol=2e-2, atol=2e-2)


def test_multi_vector_refuses_nothing_to_score():
    some = ragged(2, 3)
    with pytest.raises(ValueError, match="No queries provided"):
        score_multi_vector([], some)
    with pytest.raises(ValueError, match="No passages provided"):
        score_multi_vector(some, [])
    with pytest.raises(ValueError, match="batch_size"):
        score_multi_vector(some, some, 0)
    with pytest.raises(ValueError, match=r"\[B, N, L, D\]"):
        maxsim_kd(torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    with pytest.raises(ValueError, match=r"\[NP, L, D\] with tokens, got \[3, 4\]"):
        score_multi_vector(some, torch.ones(3, 4))
    with pytest.raises(ValueError, match="with tokens"):
        score_multi_vector(some, torch.ones(3, 0, WIDTH))
    with pytest.raises(ValueError, match=r"\[L, D\]"):
        score_multi_vector(some, [torch.ones(1, 2, WIDTH)])
    nothing = torch.ones(0, WIDTH)
    with pytest.raises(ValueError, match="no tokens"):  # beside one in another batch as well
        score_multi_vector(some, [*some, nothing], 2)
    assert score_multi_vector(some, [*some, nothing])[:, 2].tolist() == [0, 0]


def test_multi_vector_of_arrays():
    qs, ps = ragged(3, 5), ragged(5, 4, seed=1)
    arrays = score_multi_vector([q.numpy() for q in qs], [p.numpy() for p in ps], 2, "cpu")
    assert torch.equal(arrays, score_multi_vector(qs, ps, 2, "cpu"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("longest", [2, 30])
def test_grids_and_gradients(side, longest, device):
    q = pad_sequence(ragged(4, 6), batch_first=True, padding_side=side).to(device)
    d = pad_sequence(ragged(12, longest, seed=1), batch_first=True, padding_side=side).to(device)
    for ours, documents in ((maxsim_inbatch, d), (maxsim_kd, d.view(4, 3, *d.shape[1:]))):
        made = [with_gradients(function, q, documents) for function in (ours, their_grid)]
        for mine, theirs in zip(*made, strict=True):
            torch.testing.assert_close(mine, theirs)


def with_gradients(function, q, d):
    """Scores and the gradients of real rows: colpali-engine's models multiply those of padding by 0."""
    q, d = q.clone().requires_grad_(), d.clone().requires_grad_()
    scores = function(q, d)
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype, device=scores.device)
    (scores * weights.view(scores.shape)).sum().backward()
    return scores.detach(), q.grad * (q != 0), d.grad * (d != 0)


def test_without_colpali_enable_says_so(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(IntegrationError, match="colpali-engine is not installed"):
        colpali.enable()


# With the real package.


@pytest.fixture
def host(monkeypatch):
    monkeypatch.delenv("COLPALI_SCORES_BACKEND", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import colpali_engine.loss
        import colpali_engine.utils.maxsim
        import colpali_engine.utils.processing_utils
    reset_calls()
    yield colpali_engine
    colpali.disable()


# name: (class, whether it takes negatives, what a call of it counts)
IN_BATCH, OWN = "colpali.maxsim_inbatch", "colpali.maxsim_kd"
LOSSES = {
    "ColbertLoss": (False, {IN_BATCH: 1}),
    "ColbertPairwiseCELoss": (False, {IN_BATCH: 1}),
    "ColbertSigmoidLoss": (False, {IN_BATCH: 1}),
    "ColbertNegativeCELoss": (True, {IN_BATCH: 1, OWN: 1}),
    "ColbertPairwiseNegativeCELoss": (True, {IN_BATCH: 1, OWN: 1}),
}


class TestReal:
    pytestmark = real

    @pytest.mark.parametrize("filtering", [False, True])
    @pytest.mark.parametrize("normalized", [False, True])
    @pytest.mark.parametrize("name", LOSSES)
    def test_every_loss_trains_the_same(self, host, name, normalized, filtering):
        """Linear heads over fixed tokens, trained for three steps, in float64; padding on the left, as the processors
        pad. Where scores are not normalised, filtering writes into the tensor that we returned."""
        negatives, counts = LOSSES[name]
        settings = {"normalize_scores": normalized, "pos_aware_negative_filtering": filtering, "temperature": 0.5}
        plain = steps(host, name, negatives, settings)
        assert calls() == {}
        with colpali.enable():
            ours = steps(host, name, negatives, settings)
        assert calls() == {key: 3 * count for key, count in counts.items()}
        assert calls_left() == {}
        for (loss, gradients), (expected, their_gradients) in zip(ours, plain, strict=True):
            assert loss == pytest.approx(expected, rel=1e-9)
            for mine, theirs in zip(gradients, their_gradients, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)

    def test_smooth_max_is_not_ours(self, host):
        with colpali.enable():
            steps(host, "ColbertLoss", False, {"use_smooth_max": True})
        assert calls() == {}

    @pytest.mark.parametrize("batch_size", [2, 3, 128])
    def test_processors(self, host, batch_size):
        class Processor(host.utils.processing_utils.BaseVisualRetrieverProcessor):
            process_images = process_texts = get_n_patches = None

            def score(self, qs, ps, device=None, **kwargs):
                return self.score_multi_vector(qs, ps, device=device, **kwargs)

        Processor.__abstractmethods__ = frozenset()
        qs, ps = ragged(7, 5), ragged(11, 4, seed=1)
        padded = pad_sequence(qs, batch_first=True), pad_sequence(ps, batch_first=True, padding_side="left")

        def everything():
            return (
                Processor().score(qs, ps, device="cpu", batch_size=batch_size),
                Processor.score_multi_vector(*padded, batch_size, "cpu"),
                Processor.score_multi_vector(qs, ps),
            )

        plain = everything()
        assert calls() == {}
        with colpali.enable():
            ours = everything()
            with pytest.raises(ValueError, match="No queries"):
                Processor.score_multi_vector([], ps)
        assert calls() == {"colpali.score_multi_vector": 3}
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(plain[0], their_multi_vector(qs, ps, batch_size))  # the formula above is theirs

    def test_the_page_works_as_written(self, host):
        page = pathlib.Path(__file__).parent.parent / "docs" / "colpali.md"
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
        names: dict[str, object] = {}
        for block in blocks:
            exec(block, names)
        assert len(blocks) == 2
        assert names["scores"].shape == (2, 2)
        host.utils.maxsim.maxsim_inbatch(torch.ones(1, 2, 4), torch.ones(1, 3, 4))
        assert calls() == {"colpali.score_multi_vector": 1, IN_BATCH: 1}

    def test_named_backends_are_obeyed(self, host, monkeypatch):
        q, d = torch.randn(3, 4, WIDTH), torch.randn(5, 6, WIDTH)
        score = host.utils.processing_utils.BaseVisualRetrieverProcessor.score_multi_vector
        with colpali.enable():
            monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
            host.utils.maxsim.maxsim_inbatch(q, d)
            score(list(q), list(d))
            monkeypatch.setenv("COLPALI_SCORES_BACKEND", "lik")
            with pytest.raises(host.utils._lik_backend.LIKUnsupportedError):
                host.utils.maxsim.maxsim_inbatch(q, d)
            assert calls() == {}
            monkeypatch.setenv("COLPALI_SCORES_BACKEND", "auto")
            host.utils.maxsim.maxsim_inbatch(q, d)
        assert calls() == {IN_BATCH: 1}

    def test_what_is_not_served_is_left_to_the_host(self, host, monkeypatch):
        q, d = torch.randn(3, 4, WIDTH), torch.randn(5, 6, WIDTH)

        def refuse(*args, **kwargs):
            raise maxsim.UnsupportedError({"triton": ["no such card"]})

        with colpali.enable():
            assert host.utils.maxsim.maxsim_inbatch(q.bfloat16(), d.bfloat16()).dtype == torch.bfloat16
            with pytest.raises(RuntimeError):
                host.utils.maxsim.maxsim_inbatch(q, d.double())
            with pytest.raises((RuntimeError, IndexError)):
                host.utils.maxsim.maxsim_inbatch(q, d[:, :0])
            monkeypatch.setattr(colpali, "score", refuse)
            assert torch.equal(host.utils.maxsim.maxsim_inbatch(q, d), their_grid(q, d))
        assert calls() == {}
        assert len(calls_left()) == 4

    def test_what_our_scoring_refuses_is_the_hosts(self, host):
        """Whole numbers and sizes of 1 that its einsum broadcasts; errors are in its words."""
        whole = [torch.tensor([[3, -2], [0, 1]]), torch.tensor([[1, 1]])]
        q, d = torch.randn(3, 4, WIDTH), torch.randn(3, 2, 6, WIDTH)
        with colpali.enable():
            score = host.utils.processing_utils.BaseVisualRetrieverProcessor.score_multi_vector
            assert score(whole, whole, device="cpu").tolist() == [[14, 2], [1, 2]]
            for some, others in ((q, d[:1]), (q[:1], d), (q[..., :1], d)):
                expected = torch.einsum("bnd,bksd->bkns", some, others).amax(3).sum(2)
                assert torch.equal(host.utils.maxsim.maxsim_kd(some, others), expected)
            with pytest.raises(RuntimeError):
                score(list(q), list(d[0].half()), device="cpu")
            with pytest.raises(TypeError, match="expected Tensor"):
                host.utils.maxsim.maxsim_inbatch(q, list(d))
            with pytest.raises(ValueError, match="No passages provided"):
                score(list(q), [])
        assert calls() == {}
        assert sum(calls_left().values()) == 2 + 3 + 2 + 1 + 1  # what `score` leaves comes to the grid

    def test_round_trip(self, host):
        from colpali_engine.utils import _lik_backend
        from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor

        def state():
            return dict(vars(_lik_backend)), dict(vars(BaseVisualRetrieverProcessor))

        before = state()
        colpali.enable()
        with colpali.enable():
            assert all(now != was for now, was in zip(state(), before, strict=True))
        assert state() != before
        colpali.disable()
        assert state() == before

    @pytest.mark.parametrize("fault", ["missing", "signature", "version"])
    def test_a_seam_that_is_not_there_is_refused_whole(self, host, monkeypatch, fault):
        from colpali_engine.utils import _lik_backend
        from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor

        if fault == "missing":
            monkeypatch.delattr(_lik_backend, "maxsim_kd_lik")
            message = "maxsim_kd_lik"
        elif fault == "signature":
            monkeypatch.setattr(BaseVisualRetrieverProcessor, "score_multi_vector", staticmethod(lambda qs, ps: None))
            message = "score_multi_vector"
        else:
            monkeypatch.setattr(metadata, "version", lambda name: "0.3.16")
            message = "0.3.16"
        before = dict(vars(_lik_backend)), dict(vars(BaseVisualRetrieverProcessor))
        with pytest.raises(IntegrationError, match=message):
            colpali.enable()
        assert (dict(vars(_lik_backend)), dict(vars(BaseVisualRetrieverProcessor))) == before


def steps(host, name, negatives, settings):
    """Three steps of two linear heads from the same seed: [(loss, gradients)]."""
    torch.manual_seed(0)
    heads = [torch.nn.Linear(WIDTH, 8, bias=False, dtype=torch.float64) for _ in range(2)]
    loss_of = getattr(host.loss, name)(**settings)
    optimizer = torch.optim.SGD([head.weight for head in heads], lr=0.5)

    def embed(head, items):
        rows = pad_sequence(items, batch_first=True, padding_side="left")
        kept = (rows != 0).any(-1, keepdim=True)  # a model multiplies its output by its attention mask
        return torch.nn.functional.normalize(head(rows), dim=-1) * kept

    queries, documents = ragged(4, 5, 1, torch.float64), ragged(4, 9, 2, torch.float64)
    more = ragged(12, 9, 3, torch.float64)
    made = []
    for _ in range(3):
        optimizer.zero_grad()
        embedded = [embed(heads[0], queries), embed(heads[1], documents)]
        if negatives:
            own = embed(heads[1], more)
            embedded.append(own.view(4, 3, *own.shape[1:]))
        loss = loss_of(*embedded)
        loss.backward()
        made.append((loss.item(), [head.weight.grad.clone() for head in heads]))
        optimizer.step()
    return made
