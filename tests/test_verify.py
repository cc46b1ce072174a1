"""`maxsim verify`: what is right passes, and what is a little wrong does not."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import maxsim
from maxsim import cli
from maxsim.bench import verify as module
from maxsim.bench.verify import DTYPES, LAYOUTS, table, verify

CPU = torch.device("cpu")


def small(monkeypatch, *layouts: str, dtypes=DTYPES[:1]) -> None:
    shapes = {"pairs": "4x5-4x9", "candidates": "2x5-4x9"}
    names = {name: LAYOUTS[name].partition("-d128")[2] for name in layouts}
    monkeypatch.setattr(
        module, "LAYOUTS", {name: f"{shapes.get(name, '2x5-40x9')}-d128{rest}" for name, rest in names.items()}
    )
    monkeypatch.setattr(module, "DTYPES", dtypes)


@pytest.mark.parametrize("dtypes", [DTYPES[:1], pytest.param(DTYPES, marks=pytest.mark.slow)], ids=["one", "all"])
def test_all_is_well(dtypes, monkeypatch):
    small(monkeypatch, *LAYOUTS, dtypes=dtypes)
    told: list[str] = []
    checks = list(verify(CPU, told.append))
    served = {check.backend for check in checks}
    assert "cpu" in served
    assert len(checks) == len(told) >= len(LAYOUTS) * len(dtypes)
    for check in checks:
        assert check.wrong == (), check
        assert check.same_bits
        assert check.any_batch
        assert 0 <= check.mean_error <= check.max_error <= check.allowed
        assert check.top20 is None or check.top20 > 0.9
        assert (check.gradient is None) == (check.layout not in module.TRAINED)
        assert check.as_json()["layout"] == check.layout
    lines = table(checks).splitlines()
    assert len(lines) == 1 + len(checks)
    assert "DIFFER" not in "".join(lines)


def test_plain_lines_in_half_precision_are_further_off(monkeypatch):
    small(monkeypatch, "padded", dtypes=(("bfloat16", "highest"),))
    (check, *_) = verify(CPU)
    assert check.plain_max > 100 * check.max_error


@pytest.mark.parametrize("layout", ["padded", "ragged", "pairs", "int8"])
def test_a_score_that_is_off_is_seen(monkeypatch, layout):
    small(monkeypatch, layout)
    for name in ("score", "score_pairs"):
        right = getattr(maxsim, name)
        monkeypatch.setattr(module, name, lambda *a, right=right, **k: right(*a, **k) * 1.001)
    checks = list(verify(CPU))
    assert all("a score is off by" in check.wrong[0] for check in checks)
    assert "WRONG: a score is off by" in table(checks)


def test_another_winner_another_gradient_and_other_bits_are_seen(monkeypatch):
    small(monkeypatch, "masked")
    right, calls = maxsim.score, []

    def unsteady(*arguments, **options):
        calls.append(None)
        return right(*arguments, **options) + 1e-6 * (len(calls) % 2)

    monkeypatch.setattr(module, "matches", lambda *a, **k: maxsim.Matches(maxsim.matches(*a, **k).index * 0, None))
    monkeypatch.setattr(module, "score", unsteady)
    monkeypatch.setattr(module, "_gradients", lambda inputs, backend: [inputs.queries * 0, inputs.documents * 0])
    for check in verify(CPU):
        said = " ".join(check.wrong)
        for reason in ("below the best", "of its length", "another run gave other bits"):
            assert reason in said
        assert not check.same_bits
        assert check.winners < 0.5
        assert check.gap > 0.01


def test_the_command(monkeypatch):
    small(monkeypatch, "padded")
    done = CliRunner().invoke(cli.app, ["verify", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "all right" in done.output
    monkeypatch.setattr(module, "score", lambda *a, **k: maxsim.score(*a, **k) + 1)
    done = CliRunner().invoke(cli.app, ["verify", "--device", "cpu", "--json"])
    assert done.exit_code == 1
    said = json.loads(done.stdout)
    assert said["sound"] is False
    assert "a score is off by" in said["checks"][0]["wrong"][0]
