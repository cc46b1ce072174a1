"""sentence-transformers 6 with scoring of ours: its own functions are the truth. Skipped where it is not installed."""

from __future__ import annotations

import functools
import itertools
import logging
import pickle

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # what the host and its dependencies warn of is not ours
]
host = pytest.importorskip("sentence_transformers", minversion="6", reason="sentence-transformers 6 is not installed")

from sentence_transformers.multi_vector_encoder import losses, scoring  # noqa: E402
from sentence_transformers.util import similarity  # noqa: E402

from maxsim.integrations import IntegrationError, calls, calls_left, reset_calls  # noqa: E402
from maxsim.integrations import sentence_transformers as fast  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAIRS = [
    (fast.colbert_scores, scoring.colbert_scores, "grid"),
    (fast.kd_scores, scoring.colbert_kd_scores, "kd"),
    (fast.pairwise_scores, scoring.colbert_scores_pairwise, "pairs"),
]


@pytest.fixture(autouse=True)
def _fresh():
    fast.disable()
    reset_calls()
    yield
    fast.disable()


def tokens(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1).to(dtype)


def case(form, LQ, LD, masks, dtype=torch.float32, empty=True):
    """queries, documents and masks: none, bits with holes, or padding on the left (zeros behind it)."""
    q = tokens(5, LQ, 16, dtype=dtype)
    d = tokens(*{"grid": (3, 4), "kd": (5, 4), "pairs": (5,)}[form], LD, 16, seed=1, dtype=dtype)
    if masks == "none":
        return q, d, None, None
    generator = torch.Generator().manual_seed(2)
    if masks == "holes":
        q_mask = torch.rand(q.shape[:-1], generator=generator) > 0.3
        d_mask = torch.rand(d.shape[:-1], generator=generator) > 0.4
    else:
        first = torch.randint(0, LD, d.shape[:-2], generator=generator)
        d_mask = torch.arange(LD) >= first[..., None]
        q_mask = torch.arange(LQ) >= torch.randint(0, LQ, (5,), generator=generator)[:, None]
        d = d * d_mask[..., None]
        q = q * q_mask[..., None]
    d_mask[..., 0] |= ~d_mask.any(-1)
    if empty:
        d_mask[0] = False
        q_mask[1] = False
    return q, d, q_mask, d_mask


def both(ours, theirs, q, d, **options):
    """Scores and gradients of both, for an upstream gradient that is no constant."""
    results = []
    for function in (ours, theirs):
        a, b = q.clone().requires_grad_(), d.clone().requires_grad_()
        scores = function(a, b, **options)
        weight = torch.linspace(-1, 2, scores.numel(), device=scores.device).view(scores.shape)
        (scores * weight).masked_fill(scores < -1e6, 0).sum().backward()
        results.append((scores.detach(), a.grad, b.grad))
    return results


def assert_same(ours, theirs, tolerance=1e-5):
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype and mine.shape == its.shape
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("ours", "theirs", "form"), PAIRS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("masks", ["none", "holes", "left"])
@pytest.mark.parametrize(("LQ", "LD"), [(1, 1), (7, 2), (5, 8), (32, 70)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_scores_and_gradients(ours, theirs, form, masks, LQ, LD, normalize, device):
    q, d, q_mask, d_mask = (each if each is None else each.to(device) for each in case(form, LQ, LD, masks))
    options = {"queries_mask": q_mask, "documents_mask": d_mask, "length_normalize": normalize}
    tolerance = 1e-5 if device == "cpu" else 1e-4  # float32 products are near an IEEE one's error on a GPU
    assert_same(*both(ours, theirs, q, d, **options), tolerance)
    name = f"sentence_transformers.{ours.__name__}"
    assert calls() == {name: 1} and not calls_left()
    assert_same(*both(functools.partial(ours, chunk_elements=64), theirs, q, d, **options), tolerance)


@pytest.mark.parametrize(("ours", "theirs", "form"), PAIRS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(ours, theirs, form, dtype):
    """The host rounds similarities to half precision, ours do not: compared with the host in float32."""
    q, d, q_mask, d_mask = case(form, 9, 20, "holes", dtype)
    scores = ours(q, d, q_mask, d_mask)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, theirs(q.float(), d.float(), q_mask, d_mask), rtol=1e-5, atol=1e-5)


def test_negative_maxima_are_kept():
    """A masked token never wins, however far below 0 the others are."""
    q, d = torch.ones(1, 2, 4), -torch.ones(1, 1, 3, 4)
    d[..., 1:, :] = 5
    mask = torch.tensor([[[True, False, False]]])
    assert fast.colbert_scores(q, d, documents_mask=mask).tolist() == [[-8.0]]
    zeros = d.clone()
    zeros[..., 1:, :] = 0  # padding without a mask
    assert fast.colbert_scores(q, zeros).tolist() == scoring.colbert_scores(q, zeros).tolist() == [[-8.0]]


def test_empty_documents():
    q, d = tokens(2, 3, 8), tokens(2, 2, 4, 8)
    mask = torch.ones(2, 2, 4, dtype=torch.bool)
    mask[1, 0] = False
    for normalize in (False, True):
        options = {"documents_mask": mask, "length_normalize": normalize}
        ours, theirs = both(fast.colbert_scores, scoring.colbert_scores, q, d, **options)
        assert_same(ours, theirs)
        assert torch.equal(ours[0][:, 2], theirs[0][:, 2]) and ours[0][:, 2].max() < -1e8
    d[0, 1] = 0  # by zeros, without a mask
    assert_same(*both(fast.colbert_scores, scoring.colbert_scores, q, d))
    nothing = torch.zeros(2, 2, 0, 8)
    for ours, theirs in ((fast.colbert_scores, scoring.colbert_scores), (fast.kd_scores, scoring.colbert_kd_scores)):
        assert torch.equal(ours(q, nothing), theirs(q, nothing))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_empty_document_leaves_training_finite(dtype):
    q, d = tokens(2, 3, 8, dtype=dtype).requires_grad_(), tokens(3, 1, 4, 8, dtype=dtype).requires_grad_()
    mask = torch.ones(3, 1, 4, dtype=torch.bool)
    mask[1] = False
    scores = fast.colbert_scores(q, d, documents_mask=mask)
    others = fast.colbert_scores(q, d[[0, 2]], documents_mask=mask[[0, 2]])
    assert torch.equal(scores[:, [0, 2]], others)
    torch.nn.functional.cross_entropy(scores / 0.02, torch.tensor([0, 2])).backward()
    assert q.grad.isfinite().all() and d.grad.isfinite().all() and d.grad[1].eq(0).all()


FORMS = {
    "tensor": lambda items: torch.nn.utils.rnn.pad_sequence(items, batch_first=True),
    "list": lambda items: items,
    "arrays": lambda items: [item.numpy() for item in items],
    "array": lambda items: torch.nn.utils.rnn.pad_sequence(items, batch_first=True).numpy(),
    "one": lambda items: items[0],
    "one array": lambda items: items[0].numpy(),
    "integers": lambda items: [(item * 100).to(torch.int8) for item in items],
    "nothing": lambda items: [],
}


@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise"])
@pytest.mark.parametrize(("a", "b"), list(itertools.product(FORMS, FORMS)), ids=str)
def test_forms(name, a, b):
    q = [tokens(n, 8, seed=n) for n in (3, 1, 7)]
    d = [tokens(n, 8, seed=n + 20) for n in (2, 9, 0)]
    q, d = FORMS[a](q), FORMS[b](d)
    ours, theirs = getattr(fast, name), getattr(similarity, name)
    if name == "maxsim_pairwise" and len(similarity._batch_singular_input(q, None)[0]) != len(
        similarity._batch_singular_input(d, None)[0]
    ):
        with pytest.raises(ValueError, match="same number of items"):
            ours(q, d)
        return
    for normalize in (False, True):
        scores, expected = ours(q, d, length_normalize=normalize), theirs(q, d, length_normalize=normalize)
        assert scores.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-3 if "integers" in (a, b) else 1e-5)
    assert not calls_left()


@pytest.mark.parametrize("kind", ["tensor", "rows", "array", "ones", "weights", "long"])
def test_masks_of_lists_and_weights(kind):
    """A mask of a list may keep what padding adds: zeros then compete, as in the host."""
    q = [tokens(n, 8, seed=n) for n in (3, 1, 4)]
    d = [tokens(n, 8, seed=n + 20) for n in (2, 9, 1)]
    a = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 1]])
    b = torch.arange(9) < torch.tensor([2, 7, 1])[:, None]
    b[1, 3] = False
    masks = {
        "tensor": (a.bool(), b),
        "rows": (
            [row[:n] for row, n in zip(a.bool(), (3, 1, 4), strict=True)],
            [row[:n] for row, n in zip(b, (2, 9, 1), strict=True)],
        ),
        "array": (a.bool().numpy(), b.numpy()),
        "ones": (None, torch.ones(3, 9, dtype=torch.bool)),
        "weights": (a * torch.tensor([0.5, 2, 1, 0.25]), b.float()),
        "long": (a, b.long()),
    }[kind]
    for name in ("maxsim", "maxsim_pairwise"):
        scores = getattr(fast, name)(q, d, *masks, length_normalize=True)
        expected = getattr(similarity, name)(q, d, *masks, length_normalize=True)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    assert not calls_left()


def test_one_row_of_mask_for_all():
    q, d, mask = tokens(3, 4, 8), tokens(3, 6, 8, seed=1), torch.tensor([[True, False, True, True, False, True]])
    for name in ("maxsim", "maxsim_pairwise"):
        torch.testing.assert_close(
            getattr(fast, name)(q, d, b_mask=mask), getattr(similarity, name)(q, d, b_mask=mask), rtol=1e-5, atol=1e-5
        )


def test_what_cannot_be_served_is_the_hosts(caplog):
    q, d = tokens(2, 3, 8), tokens(4, 5, 8)
    for _ in range(2):
        with pytest.raises(RuntimeError):  # the host's own words
            fast.maxsim(q, d.double())
    negative = torch.tensor([[1.0, -1, 1], [1, 1, 1]])
    torch.testing.assert_close(fast.maxsim(q, d, a_mask=negative), similarity.maxsim(q, d, a_mask=negative))
    assert not calls() and sum(calls_left().values()) == 3
    assert len([line for line in caplog.messages if "served by the host" in line]) == 1
    with pytest.raises(ValueError, match="covers 4 tokens"):
        fast.maxsim(q, d, b_mask=torch.ones(4, 4, dtype=torch.bool))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise"])
@pytest.mark.parametrize("where", [("cpu", "cuda", None), ("cuda", "cpu", None), ("cpu", "cpu", "cuda")], ids=str)
def test_devices(name, where):
    """Scores are on the documents' device, wherever they are scored."""
    a, b, device = where
    q = [tokens(n, 16, seed=n).to(a) for n in (3, 1, 7)]
    d = [tokens(n, 16, seed=n + 20).to(b) for n in (2, 9, 0)]
    scores = getattr(fast, name)(q, d, device=device)
    expected = getattr(similarity, name)(q, d, device=device)
    assert scores.device == expected.device
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert not calls_left()


def test_what_does_not_fit_together_is_refused_in_the_hosts_words():
    with pytest.raises(ValueError, match="same number of items"):
        fast.kd_scores(tokens(2, 3, 8), tokens(3, 2, 4, 8))
    with pytest.raises(ValueError, match="same number of items"):
        fast.pairwise_scores(tokens(2, 3, 8), tokens(3, 4, 8))
    with pytest.raises(ValueError, match="not enough values"):
        fast.colbert_scores(tokens(2, 3, 8), tokens(3, 4, 8))
    with pytest.raises(RuntimeError):
        fast.maxsim(tokens(2, 3, 8), tokens(3, 4, 16))
    odd = tokens(3, 8), tokens(6, 1, 8)  # to the host one document of six tokens
    assert torch.equal(fast.kd_scores(*odd), scoring.colbert_kd_scores(*odd))


def assert_same_compiled(loss, q, d):
    """The host's losses and gradients, by ours in one graph."""
    expected = both(loss, loss, q, d)[0]
    with fast.enable():
        torch._dynamo.reset()
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        assert_same(both(compiled, compiled, q, d)[0], expected, 1e-4)
    assert not calls_left()


@pytest.mark.parametrize("kind", ["bool", "weights", "long"])
@pytest.mark.parametrize("captured", [False, True])
def test_compiled(kind, captured):
    """In one graph, as the host's own scoring is, whatever the masks hold. A function `captured` before comes to ours
    chunk by chunk."""
    q, d, q_mask, d_mask = case("pairs", 5, 6, "holes")
    generator = torch.Generator().manual_seed(3)
    q_mask = {"bool": q_mask, "long": q_mask.long(), "weights": q_mask * torch.rand(5, 5, generator=generator)}[kind]
    function = similarity.maxsim if captured else None

    def loss(q, d):
        scored = function or similarity.maxsim
        return scored(q, d, q_mask, d_mask).clamp(min=-5).square()

    assert_same_compiled(loss, q, d)


def test_compiled_losses_scores():
    q, d, q_mask, d_mask = case("grid", 5, 6, "holes")

    def loss(q, d):
        return scoring.colbert_scores(q, d, q_mask, d_mask).clamp(min=-5).square()

    assert_same_compiled(loss, q, d)


def test_compiled_weights_below_0_are_told():
    q, d = tokens(2, 3, 8), tokens(4, 5, 8)
    with fast.enable():
        torch._dynamo.reset()
        compiled = torch.compile(lambda mask: similarity.maxsim(q, d, a_mask=mask), backend="aot_eager", fullgraph=True)
        compiled(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="weights below 0"):
            compiled(-torch.ones(2, 3))


def test_documents_come_in_parts_from_another_device(monkeypatch):
    from maxsim.integrations import _tokens

    monkeypatch.setattr(_tokens, "MOVED_ELEMENTS", 100)
    d = [tokens(n, 8, seed=n) for n in (2, 9, 0, 30, 1, 1)]
    q = [tokens(n, 8, seed=n) for n in (3, 1)]
    got = list(_tokens.ranges([len(item) for item in d], 8, True))
    assert got == [(0, 3), (3, 4), (4, 6)] and list(_tokens.ranges([1, 2], 8, False)) == [(0, 2)]
    whole = fast.maxsim(q, d)
    monkeypatch.setattr(_tokens.Side, "ranges", lambda self, moved: iter(got))
    assert torch.equal(fast.maxsim(q, d), whole)


# Everything served: enable()


def seams():
    return {str(seam): seam for seam in fast._SWITCH.seams}


def values():
    import importlib

    found = {}
    for name, seam in seams().items():
        found[name] = getattr(importlib.import_module(seam.module), seam.name)
    return found


def test_enable_and_disable(caplog):
    before = values()
    with caplog.at_level(logging.INFO, "maxsim.integrations"), fast.enable():
        during = values()
        assert all(during[name] is not before[name] for name in before)
        assert during["sentence_transformers.util.maxsim"].__name__ == "maxsim"
        for function in during.values():
            if not function.__name__.startswith("_"):
                assert pickle.loads(pickle.dumps(function)) is function
        fast.enable()
    assert values() == during, "one enable() is still outstanding"
    fast.disable()
    assert values() == before
    assert [line for line in caplog.messages if line.startswith("replaced in sentence-transformers 6")]


def test_a_missing_seam_is_refused(monkeypatch):
    before = values()
    monkeypatch.delattr(similarity, "_maxsim_score_pairs")
    with pytest.raises(
        IntegrationError, match=rf"sentence-transformers {host.__version__} .*nothing was replaced"
    ) as error:
        fast.enable()
    assert "_maxsim_score_pairs" in str(error.value)
    monkeypatch.undo()
    assert values() == before
    monkeypatch.setattr(similarity, "maxsim", lambda a, b: None)
    with pytest.raises(IntegrationError, match=r"takes \(a, b\), expected \(a, b, a_mask"):
        fast.enable()
    monkeypatch.undo()
    assert values() == before


def test_every_road_of_the_host_is_served():
    q, d = tokens(3, 4, 8), tokens(3, 2, 6, 8, seed=1)
    kept = similarity.maxsim, similarity.mean_maxsim_pairwise, scoring.colbert_scores, scoring.mean_colbert_kd_scores
    args = [(q, d[:, 0]), (q, d[:, 0]), (q, d), (q, d)]
    expected = [function(*each) for function, each in zip(kept, args, strict=True)]
    with fast.enable():
        for function, each, right in zip(kept, args, expected, strict=True):
            reset_calls()
            torch.testing.assert_close(function(*each), right, rtol=1e-5, atol=1e-5)
            assert sum(calls().values()) and not calls_left()
        for name in ("colbert_scores", "colbert_scores_pairwise", "colbert_kd_scores"):
            for kind in (name, f"mean_{name}"):
                reset_calls()
                getattr(scoring, kind)(q, d[:, 0] if "pairwise" in kind else d)
                short = {"colbert_scores_pairwise": "pairwise_scores", "colbert_kd_scores": "kd_scores"}.get(name, name)
                assert calls() == {f"sentence_transformers.{short}": 1}, kind
    reset_calls()
    host.util.maxsim(q, d[:, 0])
    assert not calls()


def test_public_functions_where_it_is_enabled():
    """A call that ours cannot serve still ends, at the host's own."""
    q, d = tokens(2, 3, 8), tokens(4, 5, 8)
    negative = torch.tensor([[1.0, -1, 1], [1, 1, 1]])
    expected = similarity.maxsim(q, d, a_mask=negative)
    with fast.enable():
        torch.testing.assert_close(fast.maxsim(q, d, a_mask=negative), expected)
    assert not calls()


# A model of two layers, made here


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    encoder = host.MultiVectorEncoder(str(folder), device="cpu")
    encoder.eval()
    return encoder


WORDS = (
    "red",
    "green",
    "blue",
    "cat",
    "dog",
    "bird",
    "sees",
    "eats",
    "likes",
    "the",
    "a",
    "big",
    "small",
    "house",
    "tree",
)


def texts(count, words, seed):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, words + 1, count)
    return [" ".join(generator.choice(WORDS, n)) + generator.choice([".", ",", ""]) for n in lengths]


LOSSES = {
    "ranking": (losses.MultiVectorMultipleNegativesRankingLoss, {}, fast.colbert_scores, 3),
    "ranking, one document": (losses.MultiVectorMultipleNegativesRankingLoss, {}, fast.colbert_scores, 1),
    "ranking in parts": (
        losses.MultiVectorMultipleNegativesRankingLoss,
        {"score_mini_batch_size": 3},
        fast.colbert_scores,
        2,
    ),
    "cached": (
        losses.CachedMultiVectorMultipleNegativesRankingLoss,
        {"mini_batch_size": 3, "score_mini_batch_size": 4},
        fast.colbert_scores,
        2,
    ),
    "distillation": (losses.MultiVectorDistillKLDivLoss, {}, fast.kd_scores, 4),
    "margins": (losses.MultiVectorMarginMSELoss, {}, fast.pairwise_scores, 3),
}


def step(model, loss, columns, labels):
    """The loss and all gradients of a step."""
    model.zero_grad()
    kinds = ["query"] + ["document"] * (len(columns) - 1)
    features = [
        dict(model.preprocess(column, task=kind), task=kind) for column, kind in zip(columns, kinds, strict=True)
    ]
    value = loss(features, labels)
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("way", ["hook", "hook, normalized", "enable", "enabled after"])
def test_losses(model, name, way):
    """Plain scoring and ours, by the public hook and by `enable()`: the same loss and gradients."""
    kind, options, ours, documents = LOSSES[name]
    columns = [texts(7, 6, 0)] + [texts(7, 4 + 9 * i, i + 1) for i in range(documents)]
    labels = torch.rand(7, documents, generator=torch.Generator().manual_seed(3)) if documents > 2 else None
    plain = {fast.colbert_scores: scoring.mean_colbert_scores, fast.kd_scores: scoring.mean_colbert_kd_scores}
    if way == "hook, normalized":
        right = kind(model, similarity_fct=plain.get(ours, scoring.mean_colbert_scores_pairwise), **options)
        loss = kind(model, similarity_fct=functools.partial(ours, length_normalize=True), **options)
        assert loss.get_config_dict()["similarity_fct"] == f"{ours.__name__}(length_normalize=True)"
    else:
        right = kind(model, **options)
        loss = kind(model, similarity_fct=ours, **options) if way == "hook" else right
    expected, gradients = step(model, right, columns, labels)
    assert not calls()
    if way.startswith("enable"):
        with fast.enable():
            if way == "enable":
                loss = kind(model, **options)
            value, found = step(model, loss, columns, labels)
    else:
        value, found = step(model, loss, columns, labels)
    assert not calls_left() and sum(calls().values()) >= 1
    if way != "enabled after":
        parts = {"ranking in parts": 3, "cached": 2, "margins": 3}.get(name, 1)
        assert calls() == {f"sentence_transformers.{ours.__name__}": parts}
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    assert found.keys() == gradients.keys()
    for each, gradient in gradients.items():
        scale = gradient.norm()
        assert (found[each] - gradient).norm() <= 1e-4 * scale + 1e-7, each


def test_similarity_of_a_model(model):
    queries, documents = model.encode(texts(4, 6, 0)), model.encode(texts(9, 20, 1))
    expected = model.similarity(queries, documents)
    pairs = model.similarity_pairwise(queries, documents[:4])
    with fast.enable():
        torch.testing.assert_close(model.similarity(queries, documents), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.similarity_pairwise(queries, documents[:4]), pairs, rtol=1e-5, atol=1e-5)
        assert sum(calls().values()) == 2, calls()
        model.similarity_fn_name = "meanmaxsim"
        reset_calls()
        assert model.similarity(queries, documents).max() < 1.01
        assert calls() == {"sentence_transformers.maxsim": 1} and not calls_left()
    model.similarity_fn_name = "maxsim"


def evaluators():
    """Each evaluator: how to make it, its hook for a function, and that function."""
    from sentence_transformers.multi_vector_encoder import evaluation

    queries, corpus = texts(5, 6, 0), texts(30, 20, 1)
    search = functools.partial(
        evaluation.MultiVectorInformationRetrievalEvaluator,
        {str(i): text for i, text in enumerate(queries)},
        {str(i): text for i, text in enumerate(corpus)},
        {str(i): {str(i), "7"} for i in range(5)},
        write_csv=False,
    )
    samples = [{"query": query, "positive": corpus[:2], "negative": corpus[2:9]} for query in queries]
    ways, scores = [corpus[i : i + 4] for i in range(5)], [[0.3, 0.1, 0.9, 0.5]] * 5
    return {
        "search": (search, {"score_functions": {"maxsim": fast.maxsim}}, "maxsim"),
        "reranking": (
            functools.partial(evaluation.MultiVectorRerankingEvaluator, samples, write_csv=False),
            {"similarity_fct": fast.maxsim},
            "maxsim",
        ),
        "reranking one by one": (
            functools.partial(
                evaluation.MultiVectorRerankingEvaluator, samples, write_csv=False, use_batched_encoding=False
            ),
            {"similarity_fct": fast.maxsim},
            "maxsim",
        ),
        "triplets": (
            functools.partial(
                evaluation.MultiVectorTripletEvaluator, queries, corpus[:5], corpus[5:10], write_csv=False
            ),
            None,
            "maxsim_pairwise",
        ),
        "distillation": (
            functools.partial(evaluation.MultiVectorDistillationEvaluator, queries, ways, scores, write_csv=False),
            {"similarity_fct": fast.pairwise_scores},
            "maxsim_pairwise",
        ),
    }


@pytest.mark.parametrize("name", ["search", "reranking", "reranking one by one", "triplets", "distillation"])
def test_evaluators(model, name):
    make, hook, function = evaluators()[name]
    expected = make()(model)
    assert not calls()
    if hook is not None:
        assert make(**hook)(model) == pytest.approx(expected, rel=1e-4)
        served = {"maxsim_pairwise": "pairwise_scores"}.get(function, function)
        assert set(calls()) == {f"sentence_transformers.{served}"} and not calls_left()
        reset_calls()
    with fast.enable():
        assert make()(model) == pytest.approx(expected, rel=1e-4)
    assert set(calls()) <= {f"sentence_transformers.{each}" for each in (function, "chunk", "chunk_pairwise")}
    assert sum(calls().values()) and not calls_left()


def test_training(model, tmp_path):
    """The trainer, with scoring of ours by `enable()`: it ends with the weights of plain scoring."""
    import copy

    from datasets import Dataset

    columns = {"query": texts(8, 6, 0), "positive": texts(8, 12, 1), "negative": texts(8, 12, 2)}

    def trained():
        pupil = copy.deepcopy(model)
        arguments = host.MultiVectorEncoderTrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=4,
            learning_rate=1e-3,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        loss = losses.MultiVectorMultipleNegativesRankingLoss(pupil)
        host.MultiVectorEncoderTrainer(
            model=pupil, args=arguments, train_dataset=Dataset.from_dict(columns), loss=loss
        ).train()
        return pupil.state_dict()

    before, expected = model.state_dict(), trained()
    assert not calls()
    with fast.enable():
        found = trained()
    assert calls() == {"sentence_transformers.colbert_scores": 4} and not calls_left()
    assert any(not torch.equal(before[name], expected[name]) for name in before)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4)
