"""Out of a corpus and in again: the same hits and scores, bit for bit; and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stores import document
from test_corpus_codes import CODECS, DIM, data, made

from maxsim import Quantized
from maxsim.corpus import FileError, gathering, segments
from maxsim.search import Corpus

LENGTHS = [3, 0, 9, 4, 1, 7, 0, 2, 12, 5]
KINDS = ["safetensors", "npz", "parquet"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1500)
    monkeypatch.setattr(gathering, "GATHER_BYTES", 600)


def filled(corpus, ids=None):
    """Two adds, a deleted document and a replaced one."""
    ids = ids or ["a", "ü", 'c"', "d", "e", "7", "g", "h", "i", "j"]
    texts = [None if n % 3 == 0 else f"text {n}\nof é" for n in range(10)]
    metadata = [None if n % 4 == 0 else {"n": n, "x": [None, 1.5]} for n in range(10)]
    corpus.add(ids[:6], data(1, LENGTHS[:6]), texts[:6], metadata[:6])
    corpus.add(ids[6:], data(2, LENGTHS[6:]), texts[6:], metadata[6:])
    corpus.delete([ids[2]])
    corpus.update([ids[0]], data(3, [4]))
    return corpus


def same(one, other):
    assert other.ids() == one.ids()
    assert other.texts(one.ids()) == one.texts(one.ids())
    assert other.metadata(one.ids()) == one.metadata(one.ids())
    for queries in (data(5, [4]), data(6, [1, 0, 9])):
        assert other.search(queries, 99) == one.search(queries, 99)
        assert other.search(queries, 99, filter={"n": [5, 7, 3]}) == one.search(queries, 99, filter={"n": [5, 7, 3]})
    assert other.check() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "ids"), [("float16", "str"), ("bfloat16", "int"), ("float32", "mixed")])
def test_floats_come_back(tmp_path, kind, dtype, ids):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    names = {"str": None, "int": [*range(-5, 5)], "mixed": ["1", 1, "b", 3, 4, 5, 6, 7, 8, 9]}[ids]
    corpus = filled(Corpus.create(tmp_path / "store", DIM, dtype), names)
    assert corpus.export(tmp_path / f"x.{kind}").documents == 9
    again = Corpus.create(tmp_path / "again", DIM, dtype)
    assert again.add_file(tmp_path / f"x.{kind}") == 9
    same(corpus, again)
    for id in corpus.ids():
        assert torch.equal(again.get(id).embeddings, corpus.get(id).embeddings)
    if ids != "mixed" and kind != "safetensors":  # which has no texts
        (tmp_path / "x.jsonl").unlink()
        alone = Corpus.create(tmp_path / "alone", DIM, dtype)
        alone.add_file(tmp_path / f"x.{kind}")
        assert alone.ids() == corpus.ids()


@pytest.mark.parametrize("case", CODECS)
def test_codes_come_back(tmp_path, case):
    corpus = filled(made(tmp_path / "store", case))
    assert corpus.export(tmp_path / "x.safetensors").documents == 9
    codes = Quantized.load(tmp_path / "x.safetensors")
    assert (len(codes), codes.codec) == (9, corpus.info().dtype)
    again = made(tmp_path / "again", case)
    assert again.add_file(tmp_path / "x.safetensors") == 9
    same(corpus, again)
    floats = Corpus.create(tmp_path / "floats", DIM, "float32")
    floats.add_file(tmp_path / "x.safetensors")
    corpus.export(tmp_path / "y.npz")
    other = Corpus.create(tmp_path / "other", DIM, "float32")
    other.add_file(tmp_path / "y.npz")
    same(floats, other)
    if corpus.info().dtype in ("residual", "pq"):
        same(corpus, other)
    for id in corpus.ids():
        assert torch.equal(other.get(id).embeddings, corpus.get(id).embeddings)
    if corpus.info().dtype in ("int8", "fp8"):
        scale = None if corpus.info().options.get("scale") == "token" else "token"
        with pytest.raises(ValueError, match=f"{corpus.info().dtype} codes with scale"):
            Corpus.create(tmp_path / "scale", DIM, corpus.info().dtype, scale=scale).add_file(
                tmp_path / "x.safetensors"
            )
    else:
        different = Corpus.create(tmp_path / "different", DIM, corpus.info().dtype, **dict(corpus.info().options))
        different.add(["z"], data(77, [90]))
        with pytest.raises(ValueError, match="by other tables"):
            different.add_file(tmp_path / "x.safetensors")


@pytest.mark.parametrize("case", ["int8", "residual"])
def test_the_copy_beside_codes_comes_back(tmp_path, case):
    corpus = filled(made(tmp_path / "store", case, exact="float16"))
    corpus.export(tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["tokens"].dtype == torch.float16
    for again in (made(tmp_path / "again", case, exact="float16"), Corpus.create(tmp_path / "floats", DIM)):
        again.add_file(tmp_path / "x.safetensors")
        same(corpus, again)


def test_an_empty_corpus(tmp_path):
    for number, kept in enumerate(({}, {"dtype": "int8"}, {"dtype": "pq", "parts": 4})):
        corpus = Corpus.create(tmp_path / f"store{number}", DIM, **kept)
        if "pq" not in kept.values():
            assert corpus.export(tmp_path / f"x{number}.safetensors").documents == 0
            assert corpus.add_file(tmp_path / f"x{number}.safetensors") == 0
        assert corpus.export(tmp_path / f"y{number}.npz").documents == 0
        assert corpus.add_file(tmp_path / f"y{number}.npz") == 0


def test_lines_are_texts(tmp_path):
    corpus = filled(Corpus.create(tmp_path / "store", DIM))
    assert corpus.export(tmp_path / "x.jsonl").documents == 9
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text("utf-8").splitlines()]
    assert lines[0] == {"id": "ü", "text": "text 1\nof é", "n": 1, "x": [None, 1.5]}
    assert [line["id"] for line in lines] == corpus.ids()
    (tmp_path / "other").mkdir()
    assert corpus.export(tmp_path / "other" / "X.JSONL") == (9, (tmp_path / "other" / "X.JSONL",))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["X.JSONL"]
    assert corpus.export(tmp_path / "y.NPZ") == (9, (tmp_path / "y.NPZ", tmp_path / "y.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store", "x.jsonl", "y.NPZ", "y.jsonl"]


def test_what_is_refused(tmp_path, monkeypatch):
    corpus = filled(Corpus.create(tmp_path / "store", DIM))
    with pytest.raises(ValueError, match=r"expected one of \.safetensors"):
        corpus.export(tmp_path / "x.csv")
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(FileExistsError, match=r"x\.jsonl is there already"):
        corpus.export(tmp_path / "x.npz")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        corpus.export(tmp_path / "none" / "x.npz")
    corpus.update(["h"], metadata=[{"id": 3}])
    with pytest.raises(ValueError, match="metadata of document 'h' have a field 'id'"):
        corpus.export(tmp_path / "y.npz")
    corpus.update(["h"], metadata=[{}])

    def full(*arguments):
        raise OSError(28, "No space left on device")

    for step in ("_npz", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"maxsim.corpus.exporting.{step}", full)
            with pytest.raises(OSError, match="No space left"):
                corpus.export(tmp_path / "y.npz")

    placed, real = [], os.replace

    def second(temporary, target):
        if placed:
            full()
        placed.append(target)
        real(temporary, target)

    monkeypatch.setattr("maxsim.corpus.exporting.os.replace", second)
    with pytest.raises(OSError, match="No space left"):
        corpus.export(tmp_path / "y.npz")
    assert placed == [tmp_path / "y.npz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "x.jsonl"]


LINES = {
    "few": ('{"id": 1}\n', "1 lines, and more documents in the file"),
    "many": ('{"id": 1}\n{"id": 2}\n{"id": 3}\n', "more lines than the 2 documents"),
    "no JSON": ('{"id": 1}\n{"id": \n', "x.jsonl:2: "),
    "no id": ('{"id": 1}\n{"text": "x"}\n', 'x.jsonl:2: no "id"; the line has text'),
    "no object": ('{"id": 1}\n[2]\n', "x.jsonl:2: expected an object"),
    "no text": ('{"id": 1, "text": 3}\n{"id": 2}\n', "x.jsonl:1: the text of id 1 must be a string, got 3"),
    "no id of ours": ('{"id": 1.5}\n{"id": 2}\n', "x.jsonl:1: an id must be a string or a whole number, got 1.5"),
    "huge id": ('{"id": 9223372036854775808}\n{"id": 2}\n', "x.jsonl:1: an int id must fit in 64 bits"),
    "surrogate": ('{"id": 1, "text": "\\ud800"}\n{"id": 2}\n', "x.jsonl:1: the text of .* is not valid Unicode"),
    "NaN": ('{"id": 1, "n": NaN}\n{"id": 2}\n', "x.jsonl:1: not JSON: NaN is no JSON number"),
    "other ids": ('{"id": 1}\n{"id": 3}\n', "document 2 is 3, in the file beside it 2"),
}


@pytest.mark.parametrize("fault", LINES)
def test_lines_that_are_not_of_the_file(tmp_path, fault):
    text, message = LINES[fault]
    np.savez(tmp_path / "x.npz", tokens=np.ones((3, 8)), lengths=np.array([1, 2]), ids=np.array([1, 2]))
    (tmp_path / "x.jsonl").write_text(text)
    corpus = Corpus.create(tmp_path / "store", 8)
    with pytest.raises(FileError, match=message):
        corpus.add_file(tmp_path / "x.npz")
    assert len(corpus) == 0


def test_lines_of_public_collections(tmp_path):
    """As `maxsim index` reads them: with a byte order mark, and BEIR's "_id"."""
    np.savez(tmp_path / "x.npz", tokens=np.ones((3, 8)), lengths=np.array([1, 2]))
    (tmp_path / "x.jsonl").write_text('\ufeff{"_id": "a", "title": "t", "text": "x"}\n{"id": 2, "_id": 3}\n', "utf-8")
    corpus = Corpus.create(tmp_path / "store", 8)
    corpus.add_file(tmp_path / "x.npz")
    assert corpus.texts(["a", 2]) == {"a": "x", 2: None}
    assert corpus.metadata(["a", 2]) == {"a": {"title": "t"}, 2: {"_id": 3}}


def test_one_state_is_exported(tmp_path, monkeypatch):
    """What writers do meanwhile is not in it."""
    from maxsim.corpus import exporting

    corpus = filled(Corpus.create(tmp_path / "store", DIM))
    corpus.export(tmp_path / "before.npz")
    real = exporting._npz

    def late(*arguments):
        other = Corpus.open(corpus.path)
        other.delete(["d", "e"])
        other.add(["new"], [document(1, 3, DIM)])
        other.compact()
        real(*arguments)

    monkeypatch.setattr(exporting, "_npz", late)
    corpus.export(tmp_path / "while.npz")
    before, after = np.load(tmp_path / "before.npz"), np.load(tmp_path / "while.npz")
    with before, after:
        for name in ("tokens", "offsets", "ids"):
            assert np.array_equal(before[name], after[name])
    assert (tmp_path / "before.jsonl").read_bytes() == (tmp_path / "while.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bounded_memory(tmp_path, environment, monkeypatch):
    """160 MB of float16 tokens."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 24 << 20)
    corpus = Corpus.create(tmp_path / "store", 128)
    block = torch.ones(500, 256, 128, dtype=torch.float16)
    for i in range(5):
        corpus.add(range(500 * i, 500 * i + 500), block)
    code = (
        "import sys, torch; from maxsim.corpus import gathering; from maxsim.search import Corpus\n"
        "gathering.GATHER_BYTES = 8 << 20; torch.set_num_threads(1)\n"
        "def peak(): return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
        "c = Corpus.open(sys.argv[1]); before = peak(); most = 0\n"
        "import threading, time; on = True\n"
        "def watch():\n"
        "    global most\n"
        "    while on: most = max(most, peak() - before); time.sleep(0.01)\n"
        "t = threading.Thread(target=watch); t.start()\n"
        "for kind in ('safetensors', 'npz'): c.export(f'{sys.argv[2]}/{kind}.{kind}')\n"
        "on = False; t.join(); assert most < 70_000, most\n"
    )
    subprocess.run([sys.executable, "-c", code, corpus.path, tmp_path], env=environment, check=True)
    assert (tmp_path / "npz.npz").stat().st_size > 160_000_000
