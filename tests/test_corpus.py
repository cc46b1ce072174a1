"""The store: what goes in comes out, what is wrong stays out, and one change is one transaction."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import document, fill

from maxsim import Packed, Views
from maxsim.corpus import CorpusError, catalogue, segments, sums
from maxsim.search import Corpus

DIM = 8


@pytest.fixture
def corpus(tmp_path):
    return Corpus.create(tmp_path / "store", DIM)


def files(corpus):
    return sorted(path.name for path in (corpus.path / "segments").iterdir())


def test_exported_as_maxsim_corpus():
    import maxsim

    assert maxsim.Corpus is Corpus


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", torch.bfloat16])
def test_round_trip(tmp_path, dtype):
    corpus = Corpus.create(tmp_path / "deep" / "store", DIM, dtype, encoder="some model")
    embeddings = [torch.randn(n, DIM) for n in (3, 1, 7)]
    assert corpus.add(["a", "b", 3], embeddings, ["x", None, ""], [{"n": [1, None]}, None, {}]) == 3
    again = Corpus.open(corpus.path)
    assert (len(again), again.dim, again.encoder, again.ids()) == (3, DIM, "some model", ["a", "b", 3])
    assert str(again.dtype).endswith(str(dtype).removeprefix("torch."))
    for id, expected in zip(["a", "b", 3], embeddings, strict=True):
        assert torch.equal(again.get(id).embeddings, expected.to(again.dtype))
    assert [again.get(id).text for id in again.ids()] == ["x", None, ""]
    assert [again.get(id).metadata for id in again.ids()] == [{"n": [1, None]}, None, {}]
    assert again.check() == []


def _read_only(array):
    array.flags.writeable = False
    return array


ONE, TWO = document(1, 3), document(2, 3)
FORMS = {
    "list": lambda: [ONE, TWO],
    "tuple": lambda: (ONE, TWO),
    "generator": lambda: (d for d in (ONE, TWO)),
    "padded": lambda: torch.stack([ONE, TWO]),
    "strided": lambda: torch.stack([ONE, TWO], 2).permute(2, 0, 1),
    "packed": lambda: Packed(torch.cat([ONE, TWO]), [0, 3, 6]),
    "views": lambda: Views(torch.cat([TWO, ONE]), [3, 0], [3, 3]),
    "nested": lambda: torch.nested.nested_tensor([ONE, TWO], layout=torch.jagged),
    "float16": lambda: [ONE.half(), TWO.half()],
    "bfloat16": lambda: [ONE.bfloat16(), TWO.bfloat16()],
    "float64": lambda: [ONE.double(), TWO.double()],
    "mixed": lambda: [ONE.half(), TWO.numpy()],
    "requires_grad": lambda: [ONE.clone().requires_grad_(), TWO.clone().requires_grad_()],
    "numpy": lambda: [ONE.numpy(), TWO.numpy().astype(np.float64)],
    "numpy padded": lambda: np.stack([ONE.numpy(), TWO.numpy()]).astype(np.float16),
    "numpy object": lambda: np.array([*[ONE.numpy(), TWO.numpy()], None], dtype=object)[:2],
    "numpy object block": lambda: np.array([ONE.numpy(), TWO.numpy()], dtype=object),
    "read-only": lambda: _read_only(np.stack([ONE.numpy(), TWO.numpy()])),
    "reversed": lambda: np.stack([TWO.numpy(), ONE.numpy()])[::-1],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_embeddings(corpus, form):
    corpus.add(["a", "b"], FORMS[form]())
    assert torch.equal(corpus.get("a").embeddings, ONE.half())
    assert torch.equal(corpus.get("b").embeddings, TWO.half())


def test_ids_come_back_unchanged(corpus):
    ids = [
        "1",
        1,
        "",
        "ü",
        "u\u0308",
        "日本",
        "👩‍👩‍👧",
        "a\x00b",
        "a\x00c",
        "' OR 1=1 --",
        2**31 + 1,
        -(2**63),
        2**63 - 1,
        "x" * 5000,
    ]
    corpus.add(ids, [document(i, 1) for i in range(len(ids))])
    assert Corpus.open(corpus.path).ids() == ids
    assert [type(corpus.get(id).id) for id in ids] == [type(id) for id in ids]
    corpus.add(np.array([7, 8]), [document(1, 1), document(2, 1)])
    corpus.add(torch.tensor([9]), [document(3, 1)])
    assert corpus.ids()[-3:] == [7, 8, 9]
    assert "1" in corpus
    assert "2" not in corpus


def test_empty_documents_keep_their_ids(corpus):
    added = dict(zip("abcde", [document(i, n) for i, n in enumerate([3, 0, 2, 0, 4])], strict=True))
    corpus.add(list(added), list(added.values()))
    assert corpus.search(10 * added["e"][:1], 1)[0][0].id == "e"
    assert len(corpus.get("c").embeddings) == 2
    assert corpus.get("b").embeddings.shape == (0, DIM)
    assert corpus.ids() == list("abcde")


def test_nothing_to_add(corpus):
    assert corpus.add([], []) == 0
    assert corpus.add([], torch.empty(0, 3, DIM)) == 0
    assert files(corpus) == []
    assert corpus.add(["only empty"], [torch.empty(0, DIM)]) == 1
    assert Corpus.open(corpus.path).get("only empty").embeddings.shape == (0, DIM)


GOOD = [document(1, 2), document(2, 2)]
NAN = torch.full((2, DIM), float("nan"))
BAD = {
    "duplicate in the call": (ValueError, "'x'", ["x", "x"], GOOD, {}),
    "duplicate among replacements": (ValueError, "'d0'", ["d0", "d0"], GOOD, {"replace": True}),
    "replacement of NaN": (ValueError, "'d1' holds NaN", ["d0", "d1"], [GOOD[0], NAN], {"replace": True}),
    "duplicate in the corpus": (ValueError, "'d0'", ["x", "d0"], GOOD, {}),
    "more ids": (ValueError, "3 ids, 2 embeddings", ["x", "y", "z"], GOOD, {}),
    "fewer ids": (ValueError, "1 ids", ["x"], GOOD, {}),
    "generator too long": (ValueError, "ids ended after 1", (i for i in ["x"]), (d for d in GOOD), {}),
    "generator too short": (ValueError, "embeddings ended after 1", ["x", "y"], (d for d in GOOD[:1]), {}),
    "texts": (ValueError, "1 texts", ["x", "y"], GOOD, {"texts": ["a"]}),
    "metadata count": (ValueError, "1 metadata", ["x", "y"], GOOD, {"metadata": [{}]}),
    "width": (ValueError, "width 9", ["x", "y"], [GOOD[0], torch.ones(2, 9)], {}),
    "NaN": (ValueError, "'y' holds NaN", ["x", "y"], [GOOD[0], NAN], {}),
    "inf": (ValueError, "'x' holds NaN or inf", ["x", "y"], [GOOD[0] / 0.0, GOOD[1]], {}),
    "inf after conversion": (ValueError, "float16", ["x", "y"], [GOOD[0], torch.full((2, DIM), 1e6)], {}),
    "one document": (ValueError, "list of", ["x"], GOOD[0], {}),
    "one dimension": (ValueError, r"\[L, D\]", ["x", "y"], [GOOD[0], torch.ones(DIM)], {}),
    "lists of lists": (TypeError, "tensor", ["x"], [[GOOD[0]]], {}),
    "integers": (TypeError, "floats", ["x", "y"], [GOOD[0], GOOD[1].int()], {}),
    "a string of ids": (TypeError, "ids", "xy", GOOD, {}),
    "bool id": (TypeError, "bool", ["x", True], GOOD, {}),
    "float id": (TypeError, "float", ["x", 1.0], GOOD, {}),
    "no id": (TypeError, "NoneType", ["x", None], GOOD, {}),
    "huge id": (ValueError, "64 bits", ["x", 2**63], GOOD, {}),
    "half a surrogate pair": (ValueError, "Unicode", ["x", "\ud800"], GOOD, {}),
    "text of bytes": (TypeError, "text", ["x", "y"], GOOD, {"texts": ["a", b"b"]}),
    "metadata that is no dict": (TypeError, "dict", ["x", "y"], GOOD, {"metadata": [{}, [1]]}),
    "metadata that is no JSON": (TypeError, "JSON", ["x", "y"], GOOD, {"metadata": [{}, {"a": {1}}]}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_whole(corpus, case, monkeypatch):
    monkeypatch.setattr(
        segments, "SEGMENT_BYTES", 40
    )  # the first document is already on the disk when the second fails
    fill(corpus, [2, 3])
    before = corpus.ids(), files(corpus)
    error, message, ids, embeddings, more = BAD[case]
    with pytest.raises(error, match=message):
        corpus.add(ids, embeddings, **more)
    assert (corpus.ids(), files(corpus)) == before
    assert corpus.check() == []
    corpus.add(["x", "y"], GOOD)
    assert Corpus.open(corpus.path).ids() == ["d0", "d1", "x", "y"]


def test_segments_are_bounded_and_a_stream_is_one_transaction(corpus, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 10 * DIM * 2)
    lengths = [4, 6, 1, 0, 25, 0, 3, 7, 1]
    documents = [document(i, n) for i, n in enumerate(lengths)]
    buffer = torch.empty(25, DIM)
    seen = []

    def stream():
        for tokens in documents:
            seen.append(len(Corpus.open(corpus.path)))  # readers are neither blocked nor shown half of it
            buffer[: len(tokens)] = tokens  # the producer may reuse its memory
            yield buffer[: len(tokens)]

    corpus.add(range(len(lengths)), stream())
    assert set(seen) == {0}
    assert [s.record.documents for s, _ in corpus.select().parts] == [2, 2, 1, 3, 1]
    assert all(torch.equal(corpus.get(i).embeddings, d.half()) for i, d in enumerate(documents))


def test_interrupted_stream_leaves_nothing(corpus, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 16)

    def stream():
        yield document(1, 2)
        yield document(2, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpus.add(range(9), stream())
    assert (len(corpus), files(corpus)) == (0, [])


def test_create_refuses_what_is_there(corpus, tmp_path):
    fill(corpus, [1])
    with pytest.raises(FileExistsError, match="already holds a corpus"):
        Corpus.create(corpus.path, DIM)
    assert len(corpus) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match=r"letter\.txt"):
        Corpus.create(tmp_path / "other", DIM)


def test_create_goes_on_after_an_interrupted_creation(tmp_path):
    (tmp_path / catalogue.FILE).touch()
    with pytest.raises(FileNotFoundError, match=r"not a corpus: its catalogue\.sqlite is empty"):
        Corpus.open(tmp_path)
    assert len(Corpus.create(tmp_path, DIM)) == 0


def test_create_killed_in_its_commit_counts_as_absent(tmp_path):
    (tmp_path / "live").mkdir()
    live = tmp_path / "live" / catalogue.FILE
    db = sqlite3.connect(live, isolation_level=None)
    for statement in ("PRAGMA cache_size = 1", "BEGIN", "CREATE TABLE t (x)", "INSERT INTO t VALUES (zeroblob(99999))"):
        db.execute(statement)
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    db.close()
    assert (tmp_path / "killed" / catalogue.FILE).stat().st_size > 0  # and a journal that undoes it
    with pytest.raises(FileNotFoundError, match="is empty"):
        Corpus.open(tmp_path / "killed")
    assert len(Corpus.create(tmp_path / "killed", DIM)) == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_create_refuses_segments_without_a_catalogue(tmp_path, interrupted):
    letter = tmp_path / "segments" / "letter.txt"
    letter.parent.mkdir()
    letter.write_text("dear")
    if interrupted:
        (tmp_path / catalogue.FILE).touch()
    with pytest.raises(FileExistsError, match=r"letter\.txt.*no catalogue"):
        Corpus.create(tmp_path, DIM)
    assert letter.read_text() == "dear"


@pytest.mark.parametrize(
    ("dim", "dtype"), [(0, "float16"), (-1, "float16"), (True, "float16"), (8, "float64"), (8, "int3")]
)
def test_create_refuses_bad_settings(tmp_path, dim, dtype):
    with pytest.raises(ValueError, match="must be"):
        Corpus.create(tmp_path / "s", dim, dtype)
    assert not (tmp_path / "s").exists()


def test_arguments_of_numpy(tmp_path):
    corpus = Corpus.create(tmp_path / "s", np.int64(8))
    assert corpus.dim == 8
    with pytest.raises(TypeError, match=r"embeddings must be floats .* got None"):
        corpus.add(["a"], None)
    assert len(Corpus.open(tmp_path / "s")) == 0


def test_delete(corpus):
    fill(corpus, [1, 2, 3, 4])
    assert corpus.delete(["d1", "d3", "d1"]) == 2
    assert corpus.ids() == ["d0", "d2"]
    with pytest.raises(KeyError, match="d1"):
        corpus.delete(["d0", "d1"])
    with pytest.raises(KeyError, match="d3"):
        corpus.get("d3")
    with pytest.raises(TypeError):
        corpus.delete("d0")
    assert corpus.texts(["d0", "d1", "new"]) == {"d0": "text of d0"}
    corpus.add(["d1"], [document(9, 5)])
    assert corpus.ids() == ["d0", "d2", "d1"]
    assert len(Corpus.open(corpus.path).get("d1").embeddings) == 5
    assert (corpus.info().documents, corpus.info().deleted) == (3, 2)


def test_replace(corpus):
    fill(corpus, [1, 2, 3])
    other = Corpus.open(corpus.path)
    other.search(document(0, 1), 9)
    assert corpus.add(["d1", "new"], [document(9, 5), document(8, 1)], texts=["y", None], replace=True) == 2
    assert other.ids() == ["d0", "d2", "d1", "new"]
    assert other.get("d1").text == "y"
    assert torch.equal(other.get("d1").embeddings, document(9, 5).half())
    assert sorted(hit.id for hit in other.search(document(0, 1), 9)[0]) == ["d0", "d1", "d2", "new"]
    assert (corpus.info().documents, corpus.info().deleted) == (4, 1)


def test_other_handles_and_processes_see_changes(corpus, environment):
    other = Corpus.open(corpus.path)
    for i in range(10):
        corpus.add([i], [document(i, 2)])
        assert {hit.id for hit in corpus.search(document(0, 1), 99)[0]} == set(range(i + 1))
        assert other.search(document(0, 1), 99) == corpus.search(document(0, 1), 99)
    code = "import sys, maxsim.search as s; print(s.Corpus.open(sys.argv[1]).ids())"
    result = subprocess.run([sys.executable, "-c", code, corpus.path], env=environment, capture_output=True, check=True)
    assert json.loads(result.stdout) == list(range(10))
    other.delete([4])
    assert 4 not in {hit.id for hit in corpus.search(document(0, 1), 99)[0]}


def test_second_writer_waits_or_is_told(corpus, monkeypatch):
    started, release = threading.Event(), threading.Event()

    def stream():
        yield document(1, 1)
        started.set()
        release.wait(30)

    writer = threading.Thread(target=corpus.add, args=(iter(["slow"]), stream()))
    writer.start()
    started.wait(30)
    monkeypatch.setattr(catalogue, "WAIT_SECONDS", 0.05)
    with pytest.raises(CorpusError, match="another process is writing"):
        corpus.add(["fast"], [document(2, 1)])
    monkeypatch.setattr(catalogue, "WAIT_SECONDS", 30)
    threading.Timer(0.2, release.set).start()
    corpus.add(["fast"], [document(2, 1)])
    writer.join()
    assert corpus.ids() == ["slow", "fast"]


def test_many_threads(corpus):
    def work(number):
        for i in range(5):
            corpus.add([f"{number}.{i}"], [document(number, 1 + i)])
            corpus.search(document(number, 2), 3)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(corpus) == 20
    assert corpus.check() == []


def test_moved(corpus, tmp_path):
    fill(corpus, [2, 3])
    moved = shutil.move(corpus.path, tmp_path / "a #name? with % signs ü")
    assert len(Corpus.open(moved).search(document(1, 2), 9)[0]) == 2


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs POSIX users")
def test_read_only_folder(environment):
    code = (
        "import os, sys, torch, maxsim.corpus, maxsim.search as s\n"
        "if os.getuid() == 0: os.setuid(65534)\n"  # root may write anywhere
        "c = s.Corpus.open(sys.argv[1]); print([h.id for h in c.search(torch.ones(1, 8), 9)[0]])\n"
        "try: c.add(['x'], [torch.ones(1, 8)])\n"
        "except maxsim.corpus.CorpusError as e: print(e)"
    )
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to other users
        os.chmod(place, 0o755)
        corpus = Corpus.create(Path(place, "store"), DIM)
        fill(corpus, [2, 3])
        for folder in (corpus.path / "segments", corpus.path):
            for path in folder.iterdir():
                os.chmod(path, 0o555)
            os.chmod(folder, 0o555)
        command = [sys.executable, "-c", code, corpus.path]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        os.chmod(corpus.path, 0o755)
        os.chmod(corpus.path / "segments", 0o755)
    assert "d0" in result.stdout, result.stderr
    assert "readonly" in result.stdout


def test_a_device_that_is_not_there_is_told(corpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, message in {
        "cuda": "cuda: PyTorch finds no CUDA GPU here",
        "cuda:3": "cuda:3: PyTorch finds no CUDA GPU here",
        "abacus": 'a device is "cpu", "cuda" or "cuda:N", got \'abacus\'',
        "meta": 'a device is "cpu", "cuda" or "cuda:N", got \'meta\'',
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            Corpus.open(corpus.path, device)


def test_cut_documents_are_counted_while_they_are_there(corpus):
    corpus.add(["a", "b", 3], [torch.ones(1, DIM)] * 3, cut=[True, False, True])
    assert corpus.info().cut == 2
    corpus.delete(["a"])
    assert corpus.info().cut == 1
    corpus.add([3, "a"], [torch.ones(1, DIM)] * 2, replace=True, cut=[False, True])
    assert corpus.info().cut == 1
    with pytest.raises(ValueError, match="1 cut; nothing was added"):
        corpus.add([4, 5], [torch.ones(1, DIM)] * 2, cut=[True])
    assert corpus.check() == []


def test_a_corpus_made_before_cut_documents_were_counted(corpus):
    with sqlite3.connect(corpus.path / catalogue.FILE) as db:
        db.execute("DROP TABLE cut")
        sums.seal(db)
    db.close()
    corpus.add(["a"], [torch.ones(1, DIM)], cut=[True])
    assert (corpus.info().cut, len(corpus)) == (None, 1)


def test_metadata_of_several(corpus):
    corpus.add([1, "1", "x"], [torch.ones(1, DIM)] * 3, metadata=[{"a": 1}, None, {}])
    assert corpus.metadata(["1", 1, "x", "gone"]) == {"1": None, 1: {"a": 1}, "x": {}}
