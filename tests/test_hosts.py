"""`python -m benchmarks.hosts`: ours and theirs agree on every case, and what is missing is named.

`make ci` installs the frameworks.
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
from importlib import metadata

import pytest
import torch

from maxsim import integrations
from maxsim.bench.records import read
from maxsim.integrations import _switch

ROOT = pathlib.Path(__file__).resolve().parents[1]
CASES = {"sentence_transformers": 5, "pylate": 4, "colpali": 3, "mteb": 1}  # on a CPU

pytestmark = pytest.mark.filterwarnings("default")  # of theirs


@pytest.fixture(name="hosts")
def _hosts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.hosts")


def available(name):
    try:
        with getattr(integrations, name).enable():
            return True
    except integrations.IntegrationError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_case_agrees(hosts, name, tmp_path):
    if not available(name):
        pytest.skip(f"{name} is not installed")
    hosts.main([name, "--small", "--device", "cpu", "--seconds", "0.05", "--out", str(tmp_path), "--commit", "abc"])
    rows = read(next(tmp_path.iterdir()))
    cases = {row.case for row in rows}
    assert len(cases) == CASES[name]
    for case in cases:
        contenders = {row.contender: row for row in rows if row.case == case}
        assert len(contenders) == 2 and "maxsim" in contenders
        assert all(row.median_ms > 0 and row.max_error < 0.1 for row in contenders.values())


def test_what_is_missing_is_named(hosts, monkeypatch, tmp_path, capsys):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SystemExit, match="nothing to measure"):
        hosts.main(["--device", "cpu", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert all(f"{name}: skipped" in told for name in CASES)
    assert list(tmp_path.iterdir()) == []


def test_a_case_that_fails_does_not_end_the_run(hosts, monkeypatch, tmp_path, capsys):
    def cases(made):
        right = torch.ones(3)
        for name, ours, counted in (("good", right, True), ("wrong", 2 * right, True), ("missed", right, False)):

            def call(ours=ours, counted=counted):
                if counted:
                    _switch.served("pylate.rerank")
                return [ours]

            theirs = {"torch": lambda: [torch.ones(3)], "broken": lambda: 1 / 0, "off": lambda: [torch.zeros(3)]}
            yield hosts.Case(name, {"maxsim": call, **theirs}, theirs["torch"], "pylate.rerank")

    monkeypatch.setattr(hosts, "HOSTS", {"pylate": ("pytest", cases)})
    monkeypatch.setattr(integrations.pylate, "enable", contextlib.nullcontext)
    with pytest.raises(SystemExit, match=r"(?s)wrong: errors of 1.0e\+00.*missed: not ours"):
        hosts.main(["--device", "cpu", "--seconds", "0", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert "ZeroDivisionError: division by zero" in told
    rows = {row.contender.rsplit("-", 1)[-1]: row for row in read(next(tmp_path.iterdir()))}
    assert rows.keys() == {"maxsim", "torch", "broken", "off"}
    assert [rows[name].median_ms is None for name in ("maxsim", "torch", "broken", "off")] == [False, False, True, True]
    assert rows["off"].max_error == 1
    assert rows["broken"].max_error is None


def test_errors_and_what_is_allowed(hosts):
    right = [torch.tensor([3.0, 4.0]), torch.ones(2)]
    assert hosts.errors(right, right) == [0, 0]
    assert hosts.errors([torch.tensor([3.0, 4.5])], right[:1]) == [pytest.approx(0.1)]
    assert hosts.within([0.1], 0.2, 0, 0) and not hosts.within([0.1], 0.05, 1, 1)
    assert hosts.within([0.1, 0.3], 0, 0.2, 0.4) and not hosts.within([0.1, 0.3, 0.5], 0, 0.2, 0.4)
    assert not hosts.within([float("nan")], 1, 1, 1)
