"""`python -m benchmarks.step`: its two steps give the same gradients, and who runs out of memory is told."""

from __future__ import annotations

import importlib
import pathlib

import pytest
import torch

from maxsim.bench.records import read

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = ["6x10", "--device", "cpu", "--least", "4", "--most", "8", "--layers", "1", "--width", "64", "--count", "1"]
TINY += ["--longest", "3600"]  # on a busy machine too


@pytest.fixture(name="step")
def _step(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.step")


def gradients(step, run, score, chunk):
    torch.manual_seed(0)
    encoder = step.Encoder(1, 64, 10)
    sides = [torch.randint(step.WORDS, (5, length)) for length in (6, 10)]
    loss = run(encoder, score, *sides, chunk)
    return loss, [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]


def test_steps_agree(step):
    """Whole or in chunks, with our scores or naive ones: one loss and one gradient, to the rounding of bfloat16."""
    loss, wanted = gradients(step, step.plain_step, step.naive, 2)
    for run in step.STEPS.values():
        for score in step.SCORES.values():
            found_loss, found = gradients(step, run, score, 2)
            torch.testing.assert_close(found_loss, loss, rtol=1e-2, atol=1e-2)
            assert len(found) == len(wanted)
            for one, other in zip(found, wanted, strict=True):
                assert (one - other).norm() <= 0.1 * other.norm() + 1e-6


def test_its_record(step, tmp_path, monkeypatch, capsys):
    def out_of_memory(queries, documents):
        if queries.shape[0] > 4:
            raise torch.OutOfMemoryError
        return step.naive(queries, documents)

    monkeypatch.setitem(step.SCORES, "naive", out_of_memory)
    step.main([*TINY, "--out", str(tmp_path), "--commit", "abc"])
    (path,) = tmp_path.iterdir()
    rows = {(row.case.split("-")[0], row.contender): row.median_ms for row in read(path)}
    assert rows.keys() == {
        (size, f"{name}-{kind}") for size in ("4x6", "8x6") for name in step.SCORES for kind in step.STEPS
    }
    assert {key for key, ms in rows.items() if ms is None} == {("8x6", f"naive-{kind}") for kind in step.STEPS}
    assert "out of memory" in capsys.readouterr().out
