"""`python -m benchmarks.quality`: its table and record on tiny collections, and what is made of packages' texts."""

from __future__ import annotations

import importlib
import json
import pathlib
from dataclasses import fields

import pytest
import torch
from lanes import random

import maxsim

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(name="quality")
def _quality(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.quality")


class Words:
    """A vector for each word."""

    def __init__(self):
        self.calls = 0

    def documents(self, texts, progress=None):
        self.calls += 1
        words = [text.split() for text in texts]
        return [torch.nn.functional.normalize(random(7, 64, 16)[[hash_of(x) for x in row]], dim=-1) for row in words]

    queries = documents


def hash_of(word: str) -> int:
    return sum(map(ord, word)) % 64


def tiny(quality):
    """Queries are words of their documents."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    documents = [" ".join(letters[(n * k) % 26] * (1 + n % 3) for k in range(1, 4 + n % 5)) for n in range(30)]
    return quality.judged.Texts(documents, [" ".join(d.split()[:2]) for d in documents], [{n} for n in range(30)])


def test_its_table_and_record(quality, tmp_path, monkeypatch, capsys):
    encoder, made = Words(), quality.random_collection
    monkeypatch.setattr(quality.judged.encode, "load", lambda: encoder)
    monkeypatch.setitem(quality.judged.COLLECTIONS, "tiny", lambda: tiny(quality))
    monkeypatch.setattr(quality, "random_collection", lambda width: made(width, 25, 3))

    def missing():
        raise SystemExit("needs the package none")

    monkeypatch.setitem(quality.judged.COLLECTIONS, "none", missing)
    options = ["--queries", "12", "--certified", "4", "--centroids", "8", "--commit", "abc"]
    quality.main(["random-8", "--codecs", "int8", *options, "--out", str(tmp_path / "other")])
    assert len(next((tmp_path / "other").iterdir()).read_text().splitlines()) == 2
    options += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    quality.main(["tiny", "none", "random-8", *options])
    assert encoder.calls == 2  # documents and queries, once
    (path,) = (tmp_path / "out").iterdir()
    assert path.name.endswith("-quality.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(list(row) == [field.name for field in fields(quality.Quality)] for row in rows)
    shown = capsys.readouterr().out
    assert "none: left out: needs the package none" in shown
    for name, width in (("tiny", 16), ("random", 8)):
        some = {row["contender"]: row for row in rows if row["collection"] == name}
        assert set(some) == {"float32", *quality.codecs(width, 8)}
        exact = some["float32"]
        assert (exact["mean_error"], exact["max_error"], exact["same_of_20"]) == (0, 0, 20)
        for contender, row in some.items():
            assert f"\n{contender} " in shown
            assert (row["width"], row["commit"]) == (width, "abc")
            assert (row["ndcg"] is None) == (name == "random")
            assert (row["rescored"] is None) == (contender.startswith(("float", "bfloat", "int8-group")))
            assert row["rescored"] is None or 0 < row["rescored"] <= 1
            assert 0 <= row["mean_error"] <= row["max_error"] < row["best"]
        assert [some[each]["bytes_a_token"] for each in ("float32", "float16", "int8", "int8-token", "residual-1")] == [
            4 * width, 2 * width, width, width + 2, width // 8 + 8
        ]  # fmt: skip
        assert some["float16"]["max_error"] < some["int8"]["max_error"] < some["residual-1"]["max_error"]


def test_figures_by_hand(quality):
    scores = torch.tensor([[3.0, 1.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    assert quality.best_of(scores, 3).tolist() == [[0, 2, 3], [3, 2, 1]]
    assert quality.ndcg(scores, [{0}, {3}]) == 1
    assert quality.ndcg(scores, [{2}, {3}]) == pytest.approx((0.6309 + 1) / 2, abs=1e-4)
    assert quality.ndcg(scores, []) is None


def test_groups_of_dimensions(quality):
    """Each has its own scale, as if it were alone."""
    d = random(1, 20, 12)
    d[:, 4:8] *= 100
    side = maxsim.Packed(d, torch.tensor([0, 5, 20]))
    queries, documents = quality.grouped(4)(side, side)
    for low in range(0, 12, 4):
        for n, (a, b) in enumerate(((0, 5), (5, 20))):
            step = d[a:b, low : low + 4].abs().max() / 127
            away = (documents.tokens[a:b, low : low + 4] - d[a:b, low : low + 4]).abs().max()
            assert away <= step * 0.501, (low, n)
        step = d[:, low : low + 4].abs().amax(1, keepdim=True) / 127
        assert bool(((queries.tokens - d)[:, low : low + 4].abs() <= 0.501 * step).all())


def test_directions(quality):
    """Of data of less directions nothing is lost, and scores of unit vectors stay."""
    d = torch.nn.functional.normalize(random(2, 40, 3) @ random(3, 3, 12), dim=-1)
    side = maxsim.Packed(d, torch.tensor([0, 10, 40]))
    found = quality.judged.narrowed(quality.judged.Judged("some", side, side, []), 3)
    assert found.name == "some-3"
    assert torch.allclose(maxsim.score(found.queries, found.documents), maxsim.score(side, side), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fitz-gov", "attack", "faq", "wiki"])
def test_texts_of_packages(quality, name):
    try:
        texts = quality.judged.COLLECTIONS[name]()
    except SystemExit as error:
        pytest.skip(str(error))
    sizes = {"fitz-gov": (4346, 2361), "attack": (691, 15000), "faq": (503, 503), "wiki": (10033, 4714)}[name]
    assert len(texts.documents) == sizes[0]
    assert len(texts.queries) == len(texts.relevant) >= sizes[1]
    assert all(texts.documents)
    assert all(each and max(each) < len(texts.documents) for each in texts.relevant)
