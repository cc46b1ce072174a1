"""MTEB with scoring of ours: its own functions are the truth. Skipped where it is not installed."""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # what the host and its dependencies warn of is not ours
]
host = pytest.importorskip("mteb.similarity_functions", reason="mteb is not installed", exc_type=ImportError)

from maxsim.integrations import IntegrationError, calls, calls_left, reset_calls  # noqa: E402
from maxsim.integrations import mteb as fast  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh():
    fast.disable()
    reset_calls()
    yield
    fast.disable()


def items(lengths, seed=0, dtype=torch.float32, width=8):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.functional.normalize(torch.randn(n, width, generator=generator), dim=-1).to(dtype) for n in lengths
    ]


LENGTHS = {
    "alike": ([5, 4, 5], [3, 2, 3, 1, 3]),  # padded to the longest: 0 competes where a document is shorter
    "long among short": ([5, 4, 40], [1, 2, 1, 3, 200, 1, 2]),  # padded in groups
    "short": ([9, 9], [1, 1, 2, 1]),
    "with an empty one": ([5, 5], [3, 0, 3]),
    "equal": ([6, 6], [2, 2, 2]),
    "one": ([7], [1]),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("form", ["tensors", "arrays", "mixed"])
def test_lists(lengths, form):
    a, b = items(lengths[0]), items(lengths[1], seed=1)
    if form == "arrays":
        a, b = [item.numpy() for item in a], [item.numpy().astype(np.float16) for item in b]
    if form == "mixed":
        b = torch.stack([torch.nn.functional.pad(item, (0, 0, 0, max(lengths[1]) - len(item))) for item in b])
    scores, expected = fast.max_sim(a, b), host.max_sim(a, b)
    assert scores.dtype == expected.dtype
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    assert calls() == {"mteb.max_sim": 1} and not calls_left()


def test_groups_decide_whether_zero_competes(monkeypatch):
    """The host's groups are of 10,000 padded tokens; with smaller ones, set on both sides, all boundaries are met."""
    defaults = host._max_sim_ragged_core.__defaults__
    generator = np.random.default_rng(0)
    wrong = 0
    for budget, seed in itertools.product((3, 7, 20, 64), range(6)):
        lengths = [*generator.integers(1, 9, 15).tolist(), 60]
        a, b = items([2, 3, 30], seed=seed), items(lengths, seed=seed + 50)
        monkeypatch.setattr(fast, "CHUNK_TOKENS", budget)
        monkeypatch.setattr(host._token_budget_chunks, "__defaults__", (budget,))
        monkeypatch.setattr(host._max_sim_ragged_core, "__defaults__", (budget,))
        expected = host.max_sim(a, b)
        torch.testing.assert_close(fast.max_sim(a, b), expected, rtol=1e-5, atol=1e-5)
        monkeypatch.setattr(host._max_sim_ragged_core, "__defaults__", defaults)
        wrong += not torch.allclose(host.max_sim(a, b), expected)
    assert wrong, "no case in which the groups matter"
    assert not calls_left()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("other", [torch.float16, torch.float32], ids=str)
def test_padded(dtype, other):
    a = torch.stack(items([4, 4, 4], dtype=dtype))
    b = torch.stack(items([3] * 5, seed=1, dtype=other))
    b[1, 1:] = 0  # zeros of a padded tensor are tokens
    for left, right in ((a, b), (a[0], b), (a, b[0]), (a.float().numpy(), b.float().numpy())):
        if dtype == torch.float64 and isinstance(left, torch.Tensor):
            if other == torch.float64:
                torch.testing.assert_close(fast.max_sim(left, right), host.max_sim(left, right))
            continue
        scores, expected = fast.max_sim(left, right, batch_size=2), host.max_sim(left, right)
        assert scores.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    assert not calls_left()
    double = a.double()
    assert fast.max_sim(double, double).dtype == host.max_sim(double, double).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_devices(devices, lengths):
    """Scored on the GPU, wherever tokens are; scores are where the queries are."""
    a = [item.to(devices[0]) for item in items(lengths[0])]
    b = [item.to(devices[1]) for item in items(lengths[1], seed=1)]
    scores, expected = fast.max_sim(a, b), host.max_sim(a, b)
    assert scores.device == expected.device
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert not calls_left()


def test_pairs():
    for a, b in ((items([3, 1, 5]), items([2, 7, 1], seed=1)), (torch.stack(items([3, 3])), items([4, 1], seed=1))):
        torch.testing.assert_close(fast.pairwise_max_sim(a, b), host.pairwise_max_sim(a, b), rtol=1e-5, atol=1e-5)
    assert calls() == {"mteb.pairwise_max_sim": 2} and not calls_left()


def test_what_cannot_be_served_is_the_hosts():
    for a, b in ((items([3]), items([0])), (torch.stack(items([2])), torch.stack(items([2])).double())):
        with pytest.raises((IndexError, RuntimeError)):
            fast.max_sim(a, b)
    with pytest.raises(IndexError):  # padded
        fast.max_sim(torch.ones(2, 3, 4), torch.ones(2, 0, 4))
    with pytest.raises((IndexError, RuntimeError)):
        fast.pairwise_max_sim(items([3]), items([0]))
    whole = torch.ones(2, 3, 4, dtype=torch.int64)
    assert torch.equal(fast.max_sim(whole, whole), host.max_sim(whole, whole))
    assert not calls() and sum(calls_left().values()) == 5


def test_parts_of_documents_from_another_device(monkeypatch):
    from maxsim.integrations import _tokens

    a, b = items([3, 4, 3]), items([2, 9, 1, 4, 4, 9], seed=1)
    whole = fast.max_sim(a, b)
    monkeypatch.setattr(_tokens, "MOVED_ELEMENTS", 80)
    monkeypatch.setattr(fast, "ranges", lambda lengths, width, moved: _tokens.ranges(lengths, width, True))
    assert torch.equal(fast.max_sim(a, b), whole)


def test_out_of_memory_is_the_hosts(monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fast, "score", fails)
    a = torch.stack(items([2, 2]))
    assert torch.equal(fast.max_sim(a, a), host.max_sim(a, a))
    assert calls_left() == {"mteb.max_sim: the GPU has too little memory left": 1}


def values():
    return [getattr(importlib.import_module(seam.module), seam.name) for seam in fast._SWITCH.seams]


def test_enable_and_disable(monkeypatch):
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.model_meta import ScoringFunction

    class Encoder(AbsEncoder):
        mteb_model_meta = type("Meta", (), {"similarity_fn_name": ScoringFunction.MAX_SIM})()

        def __init__(self):
            pass

        def encode(self, inputs, **options):
            raise NotImplementedError

    a, b = items([3, 2]), items([5, 1], seed=1)
    model = Encoder()
    before, expected, pairs = values(), model.similarity(a, b), model.similarity_pairwise(a, b)
    assert not calls()
    with fast.enable():
        torch.testing.assert_close(model.similarity(a, b), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.similarity_pairwise(a, b), pairs, rtol=1e-5, atol=1e-5)
        assert calls() == {"mteb.max_sim": 1, "mteb.pairwise_max_sim": 1} and not calls_left()
    assert values() == before
    monkeypatch.setattr("mteb.models.abs_encoder.max_sim", lambda a, b: None)
    with pytest.raises(IntegrationError, match=r"mteb 2\..* is not as expected"):
        fast.enable()
    monkeypatch.undo()
    assert values() == before


def test_a_model_of_sentence_transformers_by_way_of_mteb():
    """MTEB scores such models by their own `similarity`: that library's switch is the one to throw."""
    from mteb.models.sentence_transformer_wrapper import MultiVectorWrapper
    from sentence_transformers.util import similarity

    from maxsim.integrations import sentence_transformers

    wrapper = object.__new__(MultiVectorWrapper)
    wrapper.model = type("Model", (), {"device": torch.device("cpu"), "similarity": staticmethod(similarity.maxsim)})()
    a, b = items([3, 2]), items([5, 1, 8], seed=1)
    expected = wrapper.similarity(a, b)
    with sentence_transformers.enable():
        torch.testing.assert_close(wrapper.similarity(a, b), expected, rtol=1e-5, atol=1e-5)
    assert sum(calls().values()) >= 1 and not calls_left()
