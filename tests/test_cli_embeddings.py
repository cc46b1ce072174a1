"""The command with embeddings that are there already: index, add, export; and what it says of fields and settings."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import DIM
from stores import stopped_at
from test_cli import one_line, run  # noqa: F401
from test_residual import write_index

from maxsim import Packed, progress, quantize
from maxsim.corpus import CorpusError, segments
from maxsim.quantized import Quantized, plaid
from maxsim.search import Corpus


def arrays(name, first=0, dim=DIM):
    np.savez(name, tokens=np.ones((5, dim)), lengths=np.array([2, 3]), ids=np.array([first, first + 1]))


def test_index_of_embeddings(run):  # noqa: F811
    arrays("a.npz")
    assert run("index", "a.npz", "store").stdout == "added 2 documents (0 were there already); store holds 2\n"
    info = Corpus.open("store").info()
    assert (info.dim, info.dtype, info.encoder) == (DIM, "float16", None)
    assert "does not say which model" in one_line(run("search", "store", "x", code=1))
    assert run("index", "a.npz", "store").stdout == "added 0 documents (2 were there already); store holds 2\n"
    arrays("a.npz", 1)
    assert one_line(run("index", "a.npz", "store", code=1)) == (
        "maxsim: a.npz: the corpus holds other embeddings under the id 1; nothing was changed: --replace puts changed "
        "documents in the place of the old ones\n"
    )
    told = run("index", "a.npz", "store", "--replace").stdout
    assert told == "added 1 document, replaced 1 (0 were there already); store holds 3\n"
    made = json.loads(run("index", "a.npz", "other", "--dtype", "int8", "--exact", "float32", "--json").stdout)
    assert (made["added"], made["replaced"], made["skipped"], made["documents"]) == (2, 0, 0, 2)
    assert "other was made with exact float32, not float16" in one_line(
        run("index", "a.npz", "other", "--exact", "float16", code=1)
    )
    run("index", "a.npz", "named", "--model", "words")
    assert Corpus.open("named").encoder == "words"
    assert "was made with model words, not others" in one_line(
        run("index", "a.npz", "named", "--model", "others", code=1)
    )
    np.savez("none.npz", tokens=np.ones((0, 8)), lengths=np.zeros(0, int))
    assert "none.npz: holds no documents" in one_line(run("index", "none.npz", "nothing", code=1))
    assert not Path("nothing").exists()
    np.savez("blank.npz", tokens=np.ones((0, 8)), lengths=np.zeros(2, int))
    assert "blank.npz: holds no tokens, which say how wide" in one_line(run("index", "blank.npz", "nothing", code=1))
    torch.save([torch.ones(0, 0), torch.ones(2, 4)], "blank.pt")  # the first says nothing of it
    run("index", "blank.pt", "blank")
    assert Corpus.open("blank").dim == 4
    Path("cut.npz").write_bytes(Path("a.npz").read_bytes()[:-9])
    assert "cut.npz: " in one_line(run("index", "cut.npz", "nothing", code=1))


def test_a_failed_index_leaves_nothing(run, monkeypatch):  # noqa: F811
    np.savez("bad.npz", a=np.ones((2, DIM)), b=np.ones((2, DIM + 1)))
    Path("empty").mkdir()
    for store in ("store", "empty"):
        assert f"has width {DIM + 1}" in one_line(run("index", "bad.npz", store, code=1))
    assert [path.name for path in Path().iterdir() if path.is_dir()] == ["empty"] and not list(Path("empty").iterdir())
    np.savez("good.npz", a=np.ones((2, DIM)))
    run("index", "good.npz", "store", "--dtype", "float32")
    one_line(run("index", "bad.npz", "store", code=1))
    assert Corpus.open("store").ids() == ["a"]  # which was there
    add_lacking = Corpus.add_lacking

    def beside_another(corpus, lacking, progress):
        add_lacking(corpus, lacking)
        add_lacking(corpus, lacking, progress)

    monkeypatch.setattr(Corpus, "add_lacking", beside_another)
    error = one_line(run("index", "good.npz", "other", code=1))
    assert error.startswith(
        "maxsim: good.npz: this, or the corpus, has changed since it was looked at: id 'a' is already"
    )
    assert error.endswith("; the same command adds what is left\n")
    assert Corpus.open("other").ids() == ["a"]


def test_progress_of_embeddings(run, monkeypatch):  # noqa: F811
    """On the standard error: how many were looked at, of a number that is not known, and how many of those that the
    corpus lacks were added."""
    monkeypatch.setattr(progress.track, "EVERY_SECONDS", 0)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64)
    arrays("a.npz")
    result = run("index", "a.npz", "store", "--json")
    assert json.loads(result.stdout)["added"] == 2
    lines = [line.partition(", ")[0] for line in result.stderr.splitlines()]
    assert lines == ["looking: 1", "looking: 2", "adding: 1 of 2", "adding: 2 of 2"]
    result = run("add", "store", "a.npz", "--json")
    assert json.loads(result.stdout)["skipped"] == 2
    assert [line.partition(", ")[0] for line in result.stderr.splitlines()] == ["looking: 1", "looking: 2"]


def test_index_of_an_index(run):  # noqa: F811
    Path("pylate").mkdir()
    write_index(Path("pylate", "fast_plaid_index"), "npy", 4, [[3, 0], [2]])
    pickled = Path("pylate", "plaid_ids_to_documents_ids.pkl")
    pickled.write_bytes(pickle.dumps({0: "a", 1: "b", 2: "c"}))
    assert "if you trust it, export it: python -c" in one_line(run("index", "pylate", "store", code=1))
    pickled.with_suffix(".json").write_text('{"0": "a", "1": "b", "2": "c"}')
    assert (
        run("index", "pylate", "store", "--model", "words").stdout
        == "added 3 documents (0 were there already); store holds 3\n"
    )
    info = Corpus.open("store").info()
    assert (info.dtype, info.dim, info.encoder, Corpus.open("store").ids()) == (
        "residual",
        16,
        "words",
        ["a", "b", "c"],
    )
    run("index", "pylate", "floats", "--dtype", "float32")
    assert Corpus.open("floats").info().dtype == "float32"
    for store in ("floats", "store"):
        assert run("add", store, "pylate").stdout == f"added 0 documents (3 were there already); {store} holds 3\n"


def test_codes_are_opened_once(run, monkeypatch):  # noqa: F811
    write_index(Path("index"), "npy", 4, [[3, 0], [2]])
    opened, index, load = [], plaid.Index, Quantized.load
    monkeypatch.setattr(plaid, "Index", lambda path: opened.append(path) or index(path))
    monkeypatch.setattr(Quantized, "load", lambda path: opened.append(path) or load(path))
    run("index", "index", "store")
    run("export", "store", "codes.safetensors")
    run("index", "codes.safetensors", "again")
    assert [path for path in opened if len(path.parts) == 1] == [Path("index"), Path("codes.safetensors")]
    infos = [Corpus.open(store).info() for store in ("store", "again")]
    assert [(info.documents, info.dtype, info.options) for info in infos] == [(3, "residual", infos[0].options)] * 2


def test_parquet_without_its_package(run, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    Path("x.parquet").touch()
    arrays("a.npz")
    run("index", "a.npz", "store")
    for words in (["index", "x.parquet", "other"], ["add", "store", "x.parquet"], ["export", "store", "y.parquet"]):
        error = one_line(run(*words, code=1))
        file = next(word for word in words if word.endswith(".parquet"))
        assert error == f"maxsim: {file}: Parquet files need pyarrow: pip install 'maxsim[parquet]'\n"
    assert sorted(path.name for path in Path().iterdir()) == ["a.npz", "store", "texts", "x.parquet"]


def test_added_files_are_told_where_another_fails(run):  # noqa: F811
    arrays("a.npz")
    arrays("b.npz", 5)
    run("index", "a.npz", "store")
    run("delete", "store", "0", "1")
    Path("c.npz").write_bytes(b"PK")
    result = run("add", "store", "a.npz", "b.npz", "c.npz", code=1)
    *bars, first, last = result.stderr.splitlines()
    assert [line.partition(", ")[0] for line in bars] == ["adding: 2 of 2"] * 2
    assert first == "maxsim: added 2 documents of a.npz, 2 documents of b.npz; c.npz is what failed:"
    assert last.startswith("maxsim: c.npz: 2 bytes, damaged: ")
    assert Corpus.open("store").ids() == [0, 1, 5, 6]
    one_line(run("add", "store", "c.npz", "a.npz", code=1))
    np.savez("i.npz", a=np.ones((2, DIM), int))
    for words in (["add", "store", "i.npz"], ["index", "i.npz", "new"]):
        error = one_line(run(*words, code=1))
        assert error == "maxsim: i.npz: embeddings[a] must hold floats, got torch.int64\n"
    assert "none.npz" in run("add", "store", "none.npz", code=1).stderr


def test_what_was_added_before_a_fault_is_told(run, monkeypatch):  # noqa: F811
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64)
    arrays("a.npz")
    arrays("b.npz", 5)
    with monkeypatch.context() as patch:
        stopped_at(patch, 2, CorpusError("disk full"))
        lines = run("index", "a.npz", "store", code=1).stderr.splitlines()
    assert lines[-2:] == ["maxsim: added 1 document of a.npz; a.npz is what failed:", "maxsim: disk full"]
    with monkeypatch.context() as patch:
        stopped_at(patch, 3, CorpusError("disk full"))
        lines = run("add", "store", "a.npz", "b.npz", code=1).stderr.splitlines()
    assert lines[-2] == "maxsim: added 1 document of a.npz, 1 document of b.npz; b.npz is what failed:"
    with monkeypatch.context() as patch:
        run("delete", "store", "0", "5")
        stopped_at(patch, 2, KeyboardInterrupt())
        lines = run("add", "store", "a.npz", "b.npz", code=130).stderr.splitlines()
    assert lines[-1] == "maxsim: stopped; store holds 2 documents, run the same command to go on"
    assert not any("failed" in line for line in lines)
    assert json.loads(run("add", "store", "a.npz", "b.npz", "--json").stdout)["corpus"] == "store"
    assert Corpus.open("store").ids() == [1, 0, 5, 6]


def test_another_process_makes_the_corpus_meanwhile(run, monkeypatch):  # noqa: F811
    arrays("a.npz")
    create = Corpus.create
    monkeypatch.setattr(Corpus, "create", lambda *args, **kwargs: [create(*args, **kwargs) for _ in range(2)])
    assert "another process has just made a corpus in store; give" in one_line(run("index", "a.npz", "store", code=1))
    assert Corpus.open("store").ids() == []


@pytest.mark.parametrize("kind", ["safetensors", "npz", "parquet"])
def test_export(run, kind):  # noqa: F811
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    lines = [{"id": n, "text": text, "lang": "en"} for n, text in enumerate(["red fox", "blue", "red sea"])]
    Path("some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run("index", "some.jsonl", "store")
    told = run("export", "store", f"out.{kind}").stdout
    assert told == f"wrote 3 documents to out.{kind} and out.jsonl\n"
    assert "is there already" in one_line(run("export", "store", f"out.{kind}", code=1))
    run("index", f"out.{kind}", "again", "--model", "minilm")
    hits = [run("search", store, "red sea", "--filter", "lang=en", "--json").stdout for store in ("store", "again")]
    assert hits[0] == hits[1] and json.loads(hits[0])[0]["hits"][0]["text"] == "red sea"
    assert json.loads(run("export", "again", "texts.jsonl", "--json").stdout)["files"] == ["texts.jsonl"]
    assert Path("texts.jsonl").read_text() == Path("out.jsonl").read_text()
    run("index", "texts.jsonl", "anew")
    assert Corpus.open("anew").ids() == [0, 1, 2]
    assert "expected one of .safetensors" in one_line(run("export", "store", "out.csv", code=1))


def test_metadata_that_no_corpus_takes(run):  # noqa: F811
    """Of texts, and of embeddings: one line that names the document."""
    arrays("a.npz")
    quantize(Packed(torch.ones(2, DIM), [0, 2]), "int8").save("codes.safetensors")
    for value, message in (("1e999", "is not JSON, at 'n'"), ("[" * 101 + "]" * 101, "nested more than 100 deep")):
        line = f'{{"id": 0, "text": "red", "n": {value}}}\n'
        Path("codes.jsonl").write_text(line)
        Path("texts.jsonl").write_text(line)
        Path("a.jsonl").write_text(line + '{"id": 1}\n')
        for source in ("codes.safetensors", "a.npz", "texts.jsonl"):
            error = run("index", source, "store", code=1).stderr.splitlines()[-1]
            assert error.startswith("maxsim: the metadata of document 0 ") and message in error


def test_a_folder_of_embeddings(run):  # noqa: F811
    Path("many").mkdir()
    for name in "ab":
        np.save(f"many/{name}.npy", np.ones((2, DIM), np.float32))
    run("index", "many", "store")
    assert Corpus.open("store").ids() == ["a", "b"]
    Path("exported").mkdir()
    run("export", "store", "exported/all.npz")  # and all.jsonl, of its documents
    assert "added 2 documents" in run("index", "exported", "again").stdout
    assert Corpus.open("again").ids() == ["a", "b"]
    for name in ("x.txt", "b.ndjson", "more.JSONL"):
        Path("many", name).write_text("a text")
        error = one_line(run("index", "many", "of_both", code=1))
        assert error.startswith("maxsim: many: holds embeddings (many/a.npy) and texts (many/")
        assert name in error and not Path("of_both").exists()
        Path("many", name).unlink()


@pytest.mark.parametrize("kept", ["float16", "int8"])
def test_a_corpus_is_not_a_folder_of_embeddings(run, kept):  # noqa: F811
    """Its segments have no ids, and still hold what was deleted."""
    arrays("more.npz")
    run("index", "more.npz", "store", "--dtype", kept)
    run("delete", "store", "0")
    Path("above").mkdir()
    Path("store").rename("above/store")
    told = "above/store is a corpus: export it, and give the file that was written"
    for source in ("above/store", "above"):
        assert told in one_line(run("index", source, "again", code=1))
        assert not Path("again").exists()
    arrays("others.npz", 5)
    run("index", "others.npz", "target", "--dtype", kept)
    assert told in one_line(run("add", "target", "above/store", code=1))
    assert Corpus.open("target").ids() == [5, 6]
    run("export", "above/store", "written.safetensors")
    run("add", "target", "written.safetensors")
    assert Corpus.open("target").ids() == [5, 6, 1]


@pytest.mark.parametrize("what", ["a.npy", "a.txt"])
def test_a_corpus_in_the_folder_that_it_is_made_of(run, what):  # noqa: F811
    """The same command again adds what is new."""
    Path("many").mkdir()
    for number, name in enumerate((what, what.replace("a", "b")), 1):
        if name.endswith(".txt"):
            Path("many", name).write_text("a text")
        else:
            np.save(Path("many", name), np.ones((2, DIM), np.float32))
        run("index", "many", "many/store")
        assert len(Corpus.open("many/store").ids()) == number


def test_a_field_that_no_document_has(run):  # noqa: F811
    lines = [{"id": n, "text": "red fox", "lang": "en"} for n in range(2)]
    Path("some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run("index", "some.jsonl", "store")
    result = run("search", "store", "red", "--filter", "langs=en", "--filter", "lang=en")
    assert result.stdout == "no hits\n"
    assert result.stderr == "maxsim: warning: no document has a field 'langs' in its metadata\n"
    assert run("search", "store", "red", "--filter", "lang=de").stderr == ""
    assert run("search", "store", "red", "--filter", "langs=null").stderr == ""
    assert Corpus.open("store").fields_without_documents(["lang", "x", "y"]) == ["x", "y"]


def test_settings_that_are_not_there(run):  # noqa: F811
    run("index", "texts", "store")
    told = dict(line.split(None, 1) for line in run("info", "store").stdout.splitlines())
    assert (told["exact"], told["options"], told["encoder"], told["cut"]) == ("none", "none", "minilm", "0")
    Corpus.create("codes", DIM, "residual", bits=4, centroids=8, exact="float16")
    told = dict(line.split(None, 1) for line in run("info", "codes").stdout.splitlines())
    assert (told["exact"], told["options"], told["encoder"]) == ("float16", "bits 4, centroids 8", "none")
