"""PyLate: its scores, gradients and losses with scoring of ours, by its hooks and switched over. Against its torch path
written out here, and against the real package where it is installed (`make ci` installs it)."""

from __future__ import annotations

import importlib.util
import logging
import pathlib
import re
import warnings
from importlib import metadata

import numpy as np
import pytest
import tiny_bert
import torch

import maxsim
from maxsim.integrations import IntegrationError, calls, calls_left, pylate, reset_calls
from maxsim.integrations.pylate import ContrastiveScores, colbert_scores, kd_scores, pairwise_scores

pytestmark = pytest.mark.filterwarnings("default")  # of theirs

real = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pylate") is None, reason="PyLate is not installed"),
]


def their_scores(q, d, q_mask=None, d_mask=None):
    """PyLate's torch path, in letters of its own."""
    grid = torch.einsum("ash,bth->abst", q, d) if d.ndim == 3 else torch.einsum("ash,abth->abst", q, d)
    if q_mask is not None:
        grid = grid * q_mask[:, None, :, None]
    if d_mask is not None:
        grid = grid * (d_mask[None, :, None] if d.ndim == 3 else d_mask[:, :, None])
    return grid.max(-1).values.sum(-1)


def problem(T, *sizes, device="cpu", **options):
    return [None if each is None else each.to(device) for each in made_problem(T, *sizes, **options)]


def made_problem(T, seed=0, A=4, B=3, N=2, S=6, H=16, kind="holes", dtype=torch.float32):
    """Queries [A, S, H], documents [B, N, T, H] of unit tokens, and masks of a kind."""
    made = torch.Generator().manual_seed(seed)
    q = torch.nn.functional.normalize(torch.randn(A, S, H, generator=made, dtype=torch.float64), dim=-1).to(dtype)
    d = torch.nn.functional.normalize(torch.randn(B, N, T, H, generator=made, dtype=torch.float64), dim=-1).to(dtype)
    q_mask, d_mask = torch.rand(A, S, generator=made) > 0.4, torch.rand(B, N, T, generator=made) > 0.4
    lengths = torch.randint(1, T + 1, (B, N, 1), generator=made)
    if kind == "none":
        return q, d, None, None
    if kind == "left":
        d_mask = torch.arange(T) >= T - lengths
    elif kind == "empty":
        d_mask[1] = False
        q_mask[0] = False
    elif kind == "floats":
        q_mask, d_mask = q_mask.to(dtype), d_mask.to(dtype)
    elif kind == "weights":
        q_mask, d_mask = torch.rand(A, S, generator=made).to(dtype), torch.rand(B, N, T, generator=made).to(dtype) - 0.2
    elif kind == "integers":
        q_mask, d_mask = q_mask.long(), d_mask.int()
    return q, d, q_mask, d_mask


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = ["none", "holes", "left", "empty", "floats", "weights", "integers"]


def with_gradients(function, q, d, *masks):
    q, d = q.clone().requires_grad_(), d.clone().requires_grad_()
    scores = function(q, d, *masks)
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype, device=scores.device).view(scores.shape)
    (scores * weights).sum().backward()
    return scores.detach(), q.grad, d.grad


def same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        tolerance = 1e-5 if mine.is_cuda else 2e-6
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 3, 8, 70])
def test_scores_and_gradients_are_those_of_the_torch_path(kind, T, device):
    """Short documents above all, where a masked token's zero often wins."""
    q, d, q_mask, d_mask = problem(T, kind=kind, device=device)
    column = (d[:, 0], q_mask, None if d_mask is None else d_mask[:, 0])
    same(with_gradients(colbert_scores, q, *column), with_gradients(their_scores, q, *column))
    flat = None if d_mask is None else d_mask.flatten(0, 1)
    same(
        with_gradients(ContrastiveScores(), q, d, q_mask, d_mask),
        with_gradients(lambda q, d, *masks: their_scores(q, d.flatten(0, 1), *masks), q, d, q_mask, flat),
    )
    q, d, q_mask, d_mask = problem(T, kind=kind, A=3, B=3, device=device)
    same(with_gradients(kd_scores, q, d, q_mask, d_mask), with_gradients(their_scores, q, d, q_mask, d_mask))


def test_zeros_win_where_documents_are_short():
    q, d, q_mask, d_mask = problem(3)
    excluded = ContrastiveScores(masked="exclude")(q, d, q_mask, d_mask)
    assert (excluded != ContrastiveScores()(q, d, q_mask, d_mask)).any()
    assert torch.equal(excluded, maxsim.score(q, d.flatten(0, 1), q_mask, d_mask.flatten(0, 1)))
    assert torch.equal(excluded, ContrastiveScores(masked="exclude")(q, d, q_mask.float(), d_mask.float()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    q, d, *_ = problem(20, S=40, dtype=dtype)
    scores = colbert_scores(q, d[:, 0])
    exact = their_scores(q.double(), d[:, 0].double())
    assert scores.dtype == torch.float32
    assert (scores - exact).abs().max() < 1e-5
    assert (their_scores(q, d[:, 0]).float() - exact).abs().max() > 1e-3


def test_masks_are_broadcast_as_there():
    q, d, q_mask, d_mask = problem(8)
    column = (d[:, 0], q_mask[:1], d_mask[:1, 0])
    torch.testing.assert_close(colbert_scores(q, *column), their_scores(q, *column))
    whole = d_mask[:1].expand(d_mask.shape)
    assert torch.equal(ContrastiveScores()(q, d, q_mask, d_mask[:1]), ContrastiveScores()(q, d, q_mask, whole))


def test_pairs():
    q, d, *_ = problem(8, A=3, B=5)
    pairs = [their_scores(q[i : i + 1], d[i : i + 1, 0])[0, 0] for i in range(3)]
    torch.testing.assert_close(pairwise_scores(q, d[:, 0]), torch.stack(pairs))
    ragged = ([q[0], q[1, :2], q[2, :0]], [d[0, 0, :5], d[1, 0], d[2, 0, :1], d[3, 0]])
    expected = torch.stack(
        [pairs[0] * 0 + their_scores(ragged[0][i][None], ragged[1][i][None])[0, 0] for i in range(3)]
    )
    torch.testing.assert_close(pairwise_scores(*ragged), expected)
    torch.testing.assert_close(pairwise_scores(*([each.numpy() for each in side] for side in ragged)), expected)


def test_documents_of_another_form_are_refused():
    """A grid is not scores of each query's own documents, nor the other way round."""
    with pytest.raises(ValueError, match=r"\[A, B, T, H\], got \[2, 3, 4\]"):
        kd_scores(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"\[B, T, H\], got \[2, 1, 3, 4\]"):
        colbert_scores(torch.ones(2, 3, 4), torch.ones(2, 1, 3, 4))


def test_the_metric_says_what_it_is():
    assert repr(ContrastiveScores()) == "ContrastiveScores(masked='zero')"
    with pytest.raises(ValueError, match="'exclude' or 'zero'"):
        ContrastiveScores(masked="ignore")
    with pytest.raises(ValueError, match=r"\[D, N, T, H\]"):
        ContrastiveScores()(torch.ones(2, 3, 4), torch.ones(2, 3, 4))


def test_without_pylate_enable_says_so(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(IntegrationError, match="pylate is not installed"):
        pylate.enable()


# With the real package.


@pytest.fixture
def host(monkeypatch):
    """`pylate.scores`, switched over by nobody yet, and its names as other modules hold them."""
    monkeypatch.delenv("PYLATE_SCORES_BACKEND", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pylate.evaluation
        import pylate.losses
        import pylate.models
        import pylate.rank
        import pylate.retrieve
        import pylate.scores
        import pylate.utils
    reset_calls()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny
    yield pylate
    torch.set_num_threads(threads)
    maxsim.integrations.pylate.disable()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_bert.make(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def model(host, folder):
    torch.manual_seed(1)
    return host.models.ColBERT(folder, embedding_size=32, document_length=24, query_length=12, device="cpu")


class TestReal:
    pytestmark = real

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("T", [1, 3, 40])
    def test_functions_switched_over(self, host, kind, T, device, monkeypatch):
        scores = host.scores
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")  # on a GPU theirs may be others, whose scores are others
        q, d, q_mask, d_mask = problem(T, kind=kind, A=3, B=3, device=device)
        column = (d[:, 0], q_mask, None if d_mask is None else d_mask[:, 0])
        theirs = [
            with_gradients(scores.colbert_scores, q, *column),
            with_gradients(scores.colbert_kd_scores, q, d, q_mask, d_mask),
            with_gradients(scores.ColBERTScores(), q, d, q_mask, d_mask),
            with_gradients(scores.colbert_scores_pairwise, q, d[:, 0]),
        ]
        monkeypatch.delenv("PYLATE_SCORES_BACKEND")
        assert calls() == {}
        with maxsim.integrations.pylate.enable():
            same(with_gradients(scores.colbert_scores, q, *column), theirs[0])
            same(with_gradients(scores.colbert_kd_scores, q, d, q_mask, d_mask), theirs[1])
            same(with_gradients(scores.ColBERTScores(), q, d, q_mask, d_mask), theirs[2])
            same(with_gradients(scores.colbert_scores_pairwise, q, d[:, 0]), theirs[3])
        assert calls() == {
            "pylate.colbert_scores": 1,
            "pylate.kd_scores": 1,
            "pylate.ContrastiveScores": 1,
            "pylate.pairwise_scores": 1,
        }
        assert calls_left() == {}

    def test_what_users_and_pylate_captured_is_reached(self, host, model):
        from pylate.rank import rerank
        from pylate.scores import colbert_scores_pairwise

        assert not hasattr(rerank, "__wrapped__")
        made = model.encode(tiny_bert.QUERIES, is_query=True)
        documents = [model.encode(texts, is_query=False) for texts in (tiny_bert.POSITIVES, tiny_bert.NEGATIVES)]
        assert len({len(each) for each in documents[0]}) > 1
        lists = {
            "numpy": (made, documents[0]),
            "torch": ([torch.from_numpy(q) for q in made], [torch.from_numpy(d) for d in documents[0]]),
        }
        ids = [["a", "b", "c", "d"]] * 4

        class Index:
            is_end_to_end_index = False

            def __call__(self, queries_embeddings, k):
                return {"documents_ids": [[["0", "1"], ["1", "2"]]] * len(queries_embeddings)}

            def get_documents_embeddings(self, documents_ids):
                return [[documents[0][int(name)] for name in names] for names in documents_ids]

        def everything():
            return (
                [rank(ids, side[0], [side[1]] * 4) for side in lists.values() for rank in (rerank, host.rank.rerank)],
                [colbert_scores_pairwise(*side) for side in lists.values()],
                host.retrieve.ColBERT(Index()).retrieve(list(made), k=3),
                model.similarity(torch.tensor(np.stack(made)), torch.tensor(np.stack([documents[0][0]] * 2))),
                model.similarity_pairwise(torch.tensor(np.stack(made)), torch.tensor(np.stack(made))),
            )

        plain = everything()
        maxsim.integrations.pylate.enable()
        counted = {}
        for name, function in (
            ("captured", lambda: rerank(ids, made, [documents[0]] * 4)),
            ("looked up", lambda: host.rank.rerank(ids, made, [documents[0]] * 4)),
            ("all", everything),
        ):
            reset_calls()
            ours = function()
            counted[name] = calls()
        assert counted["captured"] == {"pylate.colbert_scores": 4}  # one for each query, over padded candidates
        assert counted["looked up"] == {"pylate.rerank": 1}
        assert counted["all"] == {"pylate.colbert_scores": 8 + 1, "pylate.pairwise_scores": 2 + 1, "pylate.rerank": 3}
        assert calls_left() == {}
        for mine, theirs in zip((*ours[0], ours[2]), (*plain[0], plain[2]), strict=True):
            for ranked, expected in zip(mine, theirs, strict=True):
                assert [hit["id"] for hit in ranked] == [hit["id"] for hit in expected]
                assert [hit["score"] for hit in ranked] == pytest.approx([hit["score"] for hit in expected], rel=1e-5)
        for mine, theirs in zip((*ours[1], *ours[3:]), (*plain[1], *plain[3:]), strict=True):
            torch.testing.assert_close(mine, theirs)

    @pytest.mark.parametrize("form", ["tensors", "arrays", "numbers", "one query"])
    def test_rerank_with_padding_that_wins(self, host, form):
        """Candidates of few tokens, among them an empty one: the zeros that PyLate pads with are often the best."""
        q, d, *_ = problem(4, A=3, B=3, N=5)
        queries = list(q)
        candidates = [[each[: (i + j) % 5] for j, each in enumerate(own)] for i, own in enumerate(d)]
        if form == "arrays":
            queries, candidates = [each.numpy() for each in q], [[each.numpy() for each in own] for own in candidates]
        elif form == "numbers":
            queries = [each.tolist() for each in q]
            candidates = [[each.tolist() for each in own if len(each)] for own in candidates]
        elif form == "one query":
            queries, candidates = q[0], d[0, :, :3][None]
        ids = [list("abcde")[: len(own)] for own in candidates]
        plain = host.rank.rerank(ids, queries, candidates)
        with maxsim.integrations.pylate.enable():
            ours = host.rank.rerank(ids, queries, candidates, device="cpu")
        assert calls() == {"pylate.rerank": 1}
        for mine, theirs in zip(ours, plain, strict=True):
            assert {hit["id"]: pytest.approx(hit["score"], rel=1e-5, abs=1e-6) for hit in theirs} == {
                hit["id"]: hit["score"] for hit in mine
            }
            assert [hit["score"] for hit in mine] == sorted((hit["score"] for hit in mine), reverse=True)

    def test_rerank_that_pylate_refuses(self, host):
        q, d, *_ = problem(4)
        with maxsim.integrations.pylate.enable():
            for wrong in ([], [d[0, 0, :0]], [d[0, 0].double()]):
                with pytest.raises((RuntimeError, IndexError, ValueError)) as ours:
                    host.rank.rerank([["a"]], [q[0]], [wrong])
                with pytest.raises(type(ours.value)) as theirs:
                    host.rank.rank.rerank.__wrapped__([["a"]], [q[0]], [wrong])
                assert str(ours.value) == str(theirs.value)
        assert calls() == {}

    def test_evaluators(self, host, model):
        triplets = host.evaluation.ColBERTTripletEvaluator(tiny_bert.QUERIES, tiny_bert.POSITIVES, tiny_bert.NEGATIVES)
        distillation = host.evaluation.ColBERTDistillationEvaluator(
            queries=tiny_bert.QUERIES[:2],
            documents=[tiny_bert.POSITIVES[:2], tiny_bert.NEGATIVES[:2]],
            scores=[[0.9, 0.1], [0.3, 0.6]],
        )
        plain = triplets(model), distillation(model)
        assert calls() == {}
        with maxsim.integrations.pylate.enable():
            ours = triplets(model), distillation(model)
        assert calls() == {"pylate.pairwise_scores": 2, "pylate.kd_scores": 1}
        assert calls_left() == {}
        for mine, theirs in zip(ours, plain, strict=True):
            assert mine.keys() == theirs.keys()
            assert list(mine.values()) == pytest.approx(list(theirs.values()), rel=1e-5)

    # name: (how the loss is made, with a metric or PyLate's default; the counter that it must move; how often a step)
    LOSSES = {  # noqa: RUF012
        "contrastive": (lambda host, *_, **metric: host.losses.Contrastive(*_, **metric), "ContrastiveScores", 1),
        "in chunks": (
            lambda host, *_, **metric: host.losses.Contrastive(*_, score_mini_batch_size=3, temperature=0.5, **metric),
            "ContrastiveScores",
            2,
        ),
        "cached": (
            lambda host, *_, **metric: host.losses.CachedContrastive(*_, mini_batch_size=2, **metric),
            "ContrastiveScores",
            2,
        ),
        "distillation": (lambda host, *_, **metric: host.losses.Distillation(*_, **metric), "kd_scores", 1),
        "distillation of raw scores": (
            lambda host, *_, **metric: host.losses.Distillation(*_, normalize_scores=False, **metric),
            "kd_scores",
            1,
        ),
    }

    @pytest.mark.parametrize("expansion", [True, False])
    @pytest.mark.parametrize("loss", LOSSES)
    def test_every_loss_trains_the_same(self, host, folder, loss, expansion):
        make, counter, count = self.LOSSES[loss]
        plain = steps(host, folder, make, expansion)
        assert calls() == {}
        metric = kd_scores if counter == "kd_scores" else ContrastiveScores()
        hooked = steps(host, folder, make, expansion, score_metric=metric)
        assert calls() == {f"pylate.{counter}": 3 * count}
        reset_calls()
        with maxsim.integrations.pylate.enable():
            switched = steps(host, folder, make, expansion)
        assert calls() == {f"pylate.{counter}": 3 * count}
        assert calls_left() == {}
        for ours in (hooked, switched):
            for (loss_of_ours, gradients), (loss_of_theirs, expected) in zip(ours, plain, strict=True):
                assert loss_of_ours == pytest.approx(loss_of_theirs, rel=1e-9)
                assert gradients.keys() == expected.keys()
                norm = torch.stack([each.norm() for each in expected.values()]).norm()
                for name, gradient in gradients.items():
                    assert (gradient - expected[name]).norm() <= 1e-9 * norm, name

    def test_a_trainer_as_users_run_it(self, host, folder, tmp_path):
        """Two epochs of two steps, defaults everywhere, and the same losses as without us."""
        from datasets import Dataset
        from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

        texts = {"query": tiny_bert.QUERIES, "positive": tiny_bert.POSITIVES, "negative": tiny_bert.NEGATIVES}

        def train(output):
            torch.manual_seed(1)
            model = host.models.ColBERT(
                folder, embedding_size=32, document_length=24, query_length=12, do_query_expansion=False, device="cpu"
            )
            arguments = SentenceTransformerTrainingArguments(
                str(output), num_train_epochs=2, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-4,
                report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=3,
            )  # fmt: skip
            trainer = SentenceTransformerTrainer(
                model=model, args=arguments, train_dataset=Dataset.from_dict(texts),
                loss=host.losses.Contrastive(model), data_collator=host.utils.ColBERTCollator(model.tokenize),
            )  # fmt: skip
            trainer.train()
            return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

        plain = train(tmp_path / "plain")
        assert calls() == {}
        with maxsim.integrations.pylate.enable():
            ours = train(tmp_path / "ours")
        assert calls() == {"pylate.ContrastiveScores": 4}
        assert calls_left() == {}
        assert len(plain) == 4
        assert ours == pytest.approx(plain, rel=1e-3)

    def test_named_backends_are_obeyed(self, host, monkeypatch):
        q, d, *_ = problem(8)
        with maxsim.integrations.pylate.enable():
            host.scores.colbert_scores(q, d[:, 0], backend="torch")
            host.scores.ColBERTScores()(q, d, backend="torch")
            for name in ("lik", "flash"):
                with pytest.raises(RuntimeError, match="requires CUDA"):
                    host.scores.colbert_scores(q, d[:, 0], backend=name)
            with pytest.raises(ValueError, match="backend must be one of"):
                host.scores.colbert_scores(q, d[:, 0], backend="none such")
            monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
            host.scores.colbert_scores(q, d[:, 0])
            host.scores.ColBERTScores()(q, d)
        assert calls() == {}

    def test_lik_by_name_is_not_ours(self, host, monkeypatch):
        """As on a GPU with late-interaction-kernels there: a name is obeyed also right after a call of ours."""
        from pylate.scores import _lik_backend, colbert

        monkeypatch.setattr(colbert, "_try_lik", lambda backend, *tensors: backend == "lik")

        def fake(queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None):
            return "theirs"

        monkeypatch.setattr(_lik_backend, "colbert_scores_lik", fake)
        q, d, *_ = problem(8)
        with maxsim.integrations.pylate.enable():
            assert isinstance(colbert.colbert_scores(q, d[:, 0]), torch.Tensor)
            assert colbert.colbert_scores(q, d[:, 0], backend="lik") == "theirs"
            assert _lik_backend.colbert_scores_lik(q, d[:, 0]) == "theirs"
        assert calls() == {"pylate.colbert_scores": 1}

    def test_what_is_not_served_goes_the_host_s_own_way_and_is_logged_once(self, host, caplog):
        q, d, *_ = problem(8)
        whole = (torch.ones(1, 2, 3, dtype=torch.int64), torch.ones(2, 2, 3, dtype=torch.int64))
        with caplog.at_level(logging.WARNING, "maxsim.integrations"), maxsim.integrations.pylate.enable():
            for _ in range(2):
                assert host.scores.colbert_scores(*whole).tolist() == [[6, 6]]
            with pytest.raises(IndexError):  # their words
                host.scores.colbert_scores(q, d[:, 0, :0])
            with pytest.raises(RuntimeError):
                host.scores.colbert_scores(q, d[:, 0].double())
        assert calls() == {}
        assert calls_left() == {
            "pylate.scores: embeddings are of dtype int64": 2,
            "pylate.scores: a document has no tokens": 1,
            "pylate.scores: embeddings are of dtype float32, float64": 1,
        }
        assert len([record for record in caplog.records if "int64" in record.getMessage()]) == 1

    def test_sizes_of_1_are_broadcast_as_there(self, host):
        q, d = torch.randn(3, 4, 8), torch.randn(3, 2, 5, 8)
        for some, others in ((q, d[:1]), (q[:1], d)):
            expected = host.scores.colbert_kd_scores(some, others)
            with maxsim.integrations.pylate.enable():
                assert torch.equal(host.scores.colbert_kd_scores(some, others), expected)
                with pytest.raises(RuntimeError):  # their words
                    host.scores.colbert_kd_scores(some, others[:, 0])
                with pytest.raises(RuntimeError):
                    host.scores.colbert_scores(some, others)
        assert calls() == {}
        assert sum(calls_left().values()) == 6

    def test_a_backend_that_cannot_leaves_it_to_the_torch_path(self, host, monkeypatch):
        def refuse(*args, **kwargs):
            raise maxsim.UnsupportedError({"triton": ["no such card"]})

        q, d, q_mask, d_mask = problem(8)
        plain = host.scores.colbert_scores(q, d[:, 0], q_mask), host.scores.ColBERTScores()(q, d, q_mask, d_mask)
        monkeypatch.setattr(maxsim.integrations.pylate, "score", refuse)
        with maxsim.integrations.pylate.enable():
            assert torch.equal(host.scores.colbert_scores(q, d[:, 0], q_mask), plain[0])
            assert torch.equal(host.scores.ColBERTScores()(q, d, q_mask, d_mask), plain[1])
        assert calls() == {}
        assert sum(calls_left().values()) == 1 + (1 + 2)  # the metric, and theirs, which calls for each column

    def test_round_trip(self, host):
        from pylate.scores import _flash_backend, _lik_backend, colbert

        def state():
            return [dict(vars(each)) for each in (colbert, _lik_backend, _flash_backend, colbert.ColBERTScores)]

        before = state()
        first = maxsim.integrations.pylate.enable()
        with maxsim.integrations.pylate.enable(), first:
            assert state() != before
        assert state() == before
        maxsim.integrations.pylate.enable()
        maxsim.integrations.pylate.disable()
        assert state() == before

    @pytest.mark.parametrize("fault", ["missing", "signature", "version"])
    def test_a_seam_that_is_not_there_is_refused_whole(self, host, monkeypatch, fault):
        from pylate.scores import _lik_backend, colbert

        if fault == "missing":
            monkeypatch.delattr(_lik_backend, "colbert_kd_scores_lik")
            message = "colbert_kd_scores_lik"
        elif fault == "signature":
            monkeypatch.setattr(colbert, "_try_lik", lambda backend, queries, documents: False)
            message = "_try_lik"
        else:
            monkeypatch.setattr(metadata, "version", lambda name: "1.4.0")
            message = "1.4.0"
        before = dict(vars(colbert)), dict(vars(_lik_backend))
        with pytest.raises(IntegrationError, match=message):
            maxsim.integrations.pylate.enable()
        assert (dict(vars(colbert)), dict(vars(_lik_backend))) == before

    def test_the_page_works_as_written(self, host, model):
        page = pathlib.Path(__file__).parent.parent / "docs" / "pylate.md"
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
        names = {"model": model}
        for block in blocks:
            exec(block, names)
        assert len(blocks) == 2
        assert isinstance(names["loss"].score_metric, ContrastiveScores)
        host.scores.colbert_scores(torch.ones(1, 2, 4), torch.ones(1, 3, 4))
        assert calls() == {"pylate.colbert_scores": 1}

    def test_flash_reads_a_mask_with_holes_as_a_length(self, host, model, monkeypatch):
        """PyLate's adapter of flash-maxsim keeps the first `mask.sum()` tokens: of its own masks, which leave
        punctuation out, those are others than the kept ones, and loss and gradients are others. Ours are those of its
        torch path. (The kernel itself needs a GPU; what is shown is what PyLate hands to it.)"""
        from pylate.losses.contrastive import extract_skiplist_mask
        from pylate.scores._flash_backend import _mask_to_lengths

        features = model.tokenize(tiny_bert.POSITIVES, is_query=False)
        mask = extract_skiplist_mask([features, features], model.skiplist)[1]
        lengths = _mask_to_lengths(mask)
        prefix = torch.arange(mask.shape[1]) < lengths[:, None]
        assert lengths.tolist() == mask.sum(-1).tolist()
        assert (prefix != mask).any(-1).sum() >= 3  # most of these documents
        with torch.no_grad():
            q = torch.nn.functional.normalize(
                model(model.tokenize(tiny_bert.QUERIES, is_query=True))["token_embeddings"], dim=-1
            )
            d = torch.nn.functional.normalize(model(features)["token_embeddings"], dim=-1)

        def loss(scores):
            return torch.nn.functional.cross_entropy(scores, torch.arange(4))

        plain = with_gradients(lambda q, d: loss(host.scores.colbert_scores(q, d, None, mask, backend="torch")), q, d)
        ours = with_gradients(lambda q, d: loss(colbert_scores(q, d, None, mask)), q, d)
        flash = with_gradients(lambda q, d: loss(host.scores.colbert_scores(q, d, None, prefix, backend="torch")), q, d)
        same(ours, plain)
        assert abs(flash[0] - plain[0]) > 1e-3
        assert (flash[2] - plain[2]).norm() > 0.1 * plain[2].norm()

    def test_auto_never_takes_flash_while_enabled(self, host, monkeypatch):
        from pylate.scores import _flash_backend, colbert

        def flash(*args, **kwargs):
            raise AssertionError("flash was taken")

        monkeypatch.setattr(colbert, "_try_flash", lambda backend, *tensors: backend in ("auto", "flash"))
        monkeypatch.setattr(_flash_backend, "colbert_scores_flash", flash)
        q, d, q_mask, d_mask = problem(8)
        with maxsim.integrations.pylate.enable():
            colbert.colbert_scores(q, d[:, 0], q_mask, d_mask[:, 0])
            with pytest.raises(AssertionError, match="flash was taken"):
                colbert.colbert_scores(q, d[:, 0], backend="flash")
        with pytest.raises(AssertionError, match="flash was taken"):
            colbert.colbert_scores(q, d[:, 0])
        assert calls() == {"pylate.colbert_scores": 1}

    def test_encoders_know_which_tokens_are_kept(self, host, folder):
        from maxsim import encode

        encoder = encode.load(f"pylate:{folder}", "cpu")
        for text, kept in ((" The dog; runs ", "[CLS] [D] The dog runs [SEP]"), ("!", "[CLS] [D] [SEP]")):
            whole, places = encoder.document_spans(text)
            assert " ".join(place if isinstance(place, str) else whole[slice(*place)] for place in places) == kept
            assert len(places) == len(encoder.documents([text])[0])
        _, places = encoder.query_spans("the dog")
        assert places[:5] == ["[CLS]", "[Q]", (0, 3), (4, 7), "[SEP]"]
        assert set(places[5:]) == {"[MASK]"}
        assert len(places) == len(encoder.queries(["the dog"])[0])
        long, encoder._model.document_length = "the cat " * 40, 20
        assert len(encoder.document_spans(long)[1]) == len(encoder.documents([long])[0])


def steps(host, folder, make, expansion, **metric):
    """Three steps of a model from the same seed: [(loss, gradients by name)]."""
    torch.manual_seed(1)
    model = host.models.ColBERT(
        folder, embedding_size=32, document_length=24, query_length=12, do_query_expansion=expansion, device="cpu"
    ).double()  # in float32 rounding decides between expansion tokens that are nearly alike, and so where gradients go
    loss_of = make(host, model, **metric)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    queries = model.tokenize(tiny_bert.QUERIES, is_query=True)
    documents = model.tokenize([*tiny_bert.POSITIVES, *tiny_bert.NEGATIVES], is_query=False)
    parts = [{key: value[low : low + 4] for key, value in documents.items()} for low in (0, 4)]
    teacher = torch.tensor([[0.9, 0.2], [0.4, 0.5], [0.7, 0.1], [0.8, 0.0]]).double()
    made = []
    for _ in range(3):
        optimizer.zero_grad()
        if isinstance(loss_of, host.losses.Distillation):
            loss = loss_of([dict(queries), dict(documents)], teacher)
        else:
            loss = loss_of([dict(queries), *(dict(part) for part in parts)], None)
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        assert gradients
        made.append((loss.item(), gradients))
        optimizer.step()
    return made
