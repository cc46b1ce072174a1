"""vLLM: the plugin does nothing unless asked for, and then serves the runner's scores. On a stand-in of its package,
made on disk: a runner with the reference scoring of vLLM's workers, and the version that pip would report."""

from __future__ import annotations

import importlib
import logging
import pathlib
import sys
from importlib import metadata

import pytest
import torch

import maxsim
from maxsim.integrations import IntegrationError, calls, calls_left, reset_calls, vllm

RUNNER = '''
import torch


class LateInteractionRunner:
    def __init__(self):
        self.served = 0

    def finish(self, queries, docs):
        return [float(each) for each in self._score(queries, docs)]

    def _score(self, queries, docs):
        """Float32, padded, masked with -inf, as `compute_maxsim_score_batched`."""
        self.served += 1
        made = []
        for query, doc in zip(queries, docs, strict=True):
            grid = query.float() @ doc.float().T
            best = grid.amax(-1) if len(doc) else grid.new_full((len(query),), float("-inf"))
            made.append(best.sum())
        return made
'''
LENGTHS = [180, 37, 512, 1, 300, 64, 1030, 256]


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """→ the runner's class, imported from the stand-in."""

    def make(version="0.33.0", runner=RUNNER):
        pool = tmp_path / "vllm" / "v1" / "pool"
        pool.mkdir(parents=True)
        for folder in (pool, pool.parent, pool.parent.parent):
            (folder / "__init__.py").touch()
        (pool / "late_interaction_runner.py").write_text(runner)
        info = tmp_path / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module("vllm.v1.pool.late_interaction_runner").LateInteractionRunner

    monkeypatch.delenv("MAXSIM_VLLM", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    reset_calls()
    yield make
    vllm.disable()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def documents(dtype=torch.float32, width=128, device="cpu"):
    made = torch.Generator().manual_seed(0)
    tokens = [torch.randn(length, width, generator=made) for length in LENGTHS]
    return [torch.nn.functional.normalize(each, dim=-1).to(device, dtype) for each in tokens]


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"MAXSIM_VLLM": "0"}, False),
        ({"VLLM_PLUGINS": "lora,other"}, False),
        ({"MAXSIM_VLLM": "1"}, True),
        ({"VLLM_PLUGINS": "lora,maxsim"}, True),
    ],
)
def test_off_unless_asked_for(stub, monkeypatch, environment, on):
    runner = stub()
    plain = runner._score
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    vllm.register()
    vllm.register()  # in every process, and twice does no harm
    assert (runner._score is not plain) == on
    vllm.disable()
    assert runner._score is plain


def test_not_asked_for_it_does_not_even_import_vllm(monkeypatch):
    monkeypatch.delenv("MAXSIM_VLLM", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    vllm.register()
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_shared_query_is_one_launch_of_packed_documents(stub, monkeypatch, dtype, device):
    runner = stub()()
    docs = documents(dtype, device=device)
    drawn = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    query = torch.nn.functional.normalize(drawn, dim=-1).to(device, dtype)
    plain = runner.finish([query] * 8, docs)
    launches = []
    monkeypatch.setattr(vllm, "score", lambda *args: launches.append(args) or maxsim.score(*args))
    with vllm.enable():
        ours = runner.finish([query] * 8, docs)
        made = runner._score([query] * 8, docs)
    assert ours == pytest.approx(plain, rel=1e-5)
    assert calls() == {"vllm.scores": 2}
    assert runner.served == 1
    assert len(launches) == 2
    assert isinstance(launches[0][1], maxsim.Packed)
    assert {(each.dtype, each.shape) for each in made} == {(torch.float32, torch.Size([]))}


@pytest.mark.parametrize("device", DEVICES)
def test_several_queries_and_mixed_dtypes(stub, device):
    runner = stub()()
    docs = documents(device=device)
    made = torch.Generator().manual_seed(2)
    first, second, third = (torch.randn(length, 128, generator=made).to(device) for length in (5, 31, 1))
    queries = [first, second, first, first, third, second, second, first]
    plain = runner.finish(queries, docs), runner.finish([each.bfloat16() for each in queries], docs)
    shared = first.half()
    plain += (runner.finish([shared] * 8, docs),)
    with vllm.enable():
        ours = runner.finish(queries, docs), runner.finish([each.bfloat16() for each in queries], docs)
        ours += (runner.finish([shared] * 8, docs),)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert calls() == {"vllm.scores": 3}
    assert calls_left() == {}


def test_no_documents_and_empty_ones(stub):
    runner = stub()()
    some, none = torch.randn(3, 8), torch.randn(0, 8)
    with vllm.enable():
        assert runner._score([], []) == []
        assert runner.finish([some] * 2, [none, some])[0] == float("-inf")
        assert runner.finish([none] * 2, [some, some]) == [0, 0]
    assert calls() == {"vllm.scores": 3}


def test_requests_are_answered_whatever_happens(stub, monkeypatch, caplog):
    runner = stub()()
    docs = documents()
    plain = runner.finish([docs[3]] * 8, docs)

    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(vllm, "score", fail)
    with caplog.at_level(logging.WARNING, "maxsim.integrations"), vllm.enable():
        assert [runner.finish([docs[3]] * 8, docs) for _ in range(3)] == [plain] * 3
    assert calls() == {}
    assert calls_left() == {"vllm.scores: of RuntimeError": 3}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("fault", ["version", "seam", "none"])
def test_what_is_not_as_expected_is_refused_and_a_server_starts(stub, monkeypatch, caplog, fault):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    if fault == "version":
        runner = stub("0.34.1")
        message = "0.34.1"
    elif fault == "seam":
        runner = stub(runner=RUNNER.replace("def _score(self, queries, docs)", "def _score(self, pairs)"))
        message = "_score"
    else:
        runner, message = None, "vllm is not installed"
        monkeypatch.setattr(metadata, "version", missing)
    plain = runner and runner._score
    with pytest.raises(IntegrationError, match=message):
        vllm.enable()
    monkeypatch.setenv("MAXSIM_VLLM", "1")
    with caplog.at_level(logging.ERROR, "maxsim.integrations"):
        vllm.register()
    assert "vLLM keeps its own scoring" in caplog.text
    assert plain is (runner and runner._score)


def test_the_entry_point_names_it():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["maxsim"].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm.register
