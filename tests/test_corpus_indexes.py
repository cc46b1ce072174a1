"""Indexes of PyLate, fast-plaid and ColBERT in a corpus: their codes as they are or decoded, their ids, and faults."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
from test_residual import write_index

import maxsim
from maxsim import Quantized
from maxsim.corpus import CorpusError, FileError, segments
from maxsim.search import Corpus

CHUNKS = [[3, 0, 5], [7, 1]]
QUERIES = torch.nn.functional.normalize(torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1)), dim=-1)


def merge(folder, chunks=CHUNKS):
    """As fast-plaid from 1.7 on leaves an index: one file of codes and one of residuals, padded at the end."""
    for what, padding in (("codes", 3), ("residuals", 3)):
        parts = [np.load(folder / f"{n}.{what}.npy") for n in range(len(chunks))]
        end = np.zeros((padding, *parts[0].shape[1:]), parts[0].dtype)
        np.save(folder / f"merged_{what}.npy", np.concatenate([*parts, end]))
        rows = {f"{n}.{what}.npy": {"rows": sum(each), "merged": True} for n, each in enumerate(chunks)}
        (folder / f"merged_{what}.manifest.json").write_text(json.dumps(rows))
        for n in range(len(chunks)):
            (folder / f"{n}.{what}.npy").unlink()


@pytest.mark.parametrize("left", ["as it was", "by 1.6", "no manifest"])
def test_merged_chunks(tmp_path, left):
    """Chunks without tokens, of which manifests do not know; an index that fast-plaid 1.6 has frozen, where no chunk
    says that it is merged; no manifest."""
    index, chunks = tmp_path / "index", [[3, 0, 5], [], [0], [7, 1]]
    write_index(index, "npy", 2, chunks)
    wanted = Quantized.from_index(index)
    merge(index, chunks)
    for path in index.glob("*.manifest.json"):
        rows = {name: {"rows": each["rows"]} for name, each in json.loads(path.read_text()).items() if each["rows"]}
        if left == "no manifest":
            path.unlink()
        elif left == "by 1.6":
            path.write_text(json.dumps(rows))
    found = Quantized.from_index(index)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.starts, wanted.starts)
    assert torch.equal(maxsim.score(QUERIES, found), maxsim.score(QUERIES, wanted))


def pylate(folder, ids, kind="npy"):
    """An index with PyLate's maps beside it."""
    folder.mkdir()
    write_index(folder / "fast_plaid_index", kind, 4, CHUNKS)
    (folder / "plaid_ids_to_documents_ids.pkl").write_bytes(pickle.dumps(dict(enumerate(ids))))
    return folder


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("kind", ["npy", "pt", "merged"])
def test_codes_are_kept_as_they_are(tmp_path, kind, small, monkeypatch):
    if small:
        monkeypatch.setattr(segments, "SEGMENT_BYTES", 300)
    tokens, _ = write_index(tmp_path / "index", "pt" if kind == "pt" else "npy", 4, CHUNKS)
    documents = Quantized.from_index(tmp_path / "index")
    if kind == "merged":
        merge(tmp_path / "index")
        assert torch.equal(Quantized.from_index(tmp_path / "index").codes, documents.codes)
    corpus = Corpus.create(tmp_path / "store", 16, "residual")
    assert corpus.add_file(tmp_path / "index") == 5
    assert corpus.info().segments == (4 if small else 2)
    assert corpus.ids() == [0, 1, 2, 3, 4]
    kept = [segment.tensors for segment, _ in Corpus.open(corpus.path).select().parts]
    assert torch.equal(torch.cat([each["codes"] for each in kept]), documents.codes)
    assert torch.equal(torch.cat([each["centroid"] for each in kept]), documents.parameters.centroid)
    from maxsim import score

    scores = score(QUERIES, documents)
    for hits, row in zip(corpus.search(QUERIES, 9), scores, strict=True):
        assert {hit.id: hit.score for hit in hits} == {n: float(row[n]) for n in (0, 2, 3, 4)}
    assert np.allclose(corpus.get(3).embeddings.numpy(), tokens[8:15], atol=1e-6)
    assert corpus.check() == []
    corpus.add(["more"], [QUERIES[0]])
    assert corpus.search(QUERIES[0], 1)[0][0].id == "more"
    write_index(tmp_path / "again", "pt", 4, CHUNKS)
    with pytest.raises(ValueError, match="id 0 is already in the corpus"):
        corpus.add_file(tmp_path / "index")
    assert corpus.add_file(tmp_path / "index", replace=True) == 5
    corpus.compact()
    assert (len(corpus), corpus.check()) == (6, [])


@pytest.mark.parametrize("kept", [{}, {"dtype": "int8", "exact": "float32"}, {"dtype": "residual", "exact": "float32"}])
def test_codes_are_decoded_for_another_corpus(tmp_path, kept):
    tokens, _ = write_index(tmp_path / "index", "npy", 2, CHUNKS)
    corpus = Corpus.create(tmp_path / "store", 16, **kept)
    corpus.add_file(tmp_path / "index")
    decoded = Quantized.from_index(tmp_path / "index").dequantize()
    assert torch.equal(corpus.get(3).embeddings, decoded.tokens[8:15].to(corpus.dtype))
    assert np.allclose(decoded.tokens.numpy(), tokens, atol=1e-6)


def test_tables_of_an_index_from_the_beginning(tmp_path):
    write_index(tmp_path / "index", "npy", 4, CHUNKS)
    corpus = Corpus.create(tmp_path / "store", 16, "residual", like=Quantized.from_index(tmp_path / "index"))
    corpus.add_file(tmp_path / "index")
    assert len(corpus) == 5


def test_indexes_that_do_not_fit(tmp_path):
    write_index(tmp_path / "index", "npy", 4, CHUNKS)
    write_index(tmp_path / "other", "npy", 2, CHUNKS)
    corpus = Corpus.create(tmp_path / "store", 16, "residual")
    corpus.add_file(tmp_path / "index")
    with pytest.raises(ValueError, match="residual codes by other tables than the corpus has: make another"):
        corpus.add_file(tmp_path / "other")
    with pytest.raises(ValueError, match="residual codes with bits 4, the corpus has 2"):
        Corpus.create(tmp_path / "bits", 16, "residual", bits=2).add_file(tmp_path / "index")
    with pytest.raises(ValueError, match="width 16, the corpus has 8"):
        Corpus.create(tmp_path / "width", 8).add_file(tmp_path / "index")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileError, match=r"nothing: holds no index of another program, and no .npz"):
        corpus.add_file(tmp_path / "nothing")
    assert (len(corpus), corpus.check()) == (5, [])


class Harmful:
    def __reduce__(self):
        return print, ("harm",)


def test_ids_of_pylate(tmp_path, capsys):
    index = pylate(tmp_path / "index", ["a", "b", "c", 7, "ü"])
    corpus = Corpus.create(tmp_path / "store", 16)
    with pytest.raises(
        FileError, match=r"is missing beside plaid_ids_to_documents_ids.pkl, a pickle, .* export it"
    ) as e:
        corpus.add_file(index)
    told = str(e.value).split('python -c "')[1].rstrip('"')
    subprocess.run([sys.executable, "-c", told], check=True)
    assert corpus.add_file(index) == 5
    assert corpus.ids() == ["a", "b", "c", 7, "ü"]
    made = index / "plaid_ids_to_documents_ids.json"
    (index / "plaid_ids_to_documents_ids.pkl").write_bytes(pickle.dumps(Harmful()))
    os.utime(made, (1, 1))
    with pytest.raises(FileError, match=r"json is older than plaid_ids_to_documents_ids.pkl"):
        corpus.add_file(index, replace=True)
    (index / "plaid_ids_to_documents_ids.pkl").unlink()
    for held, message in (
        ({"0": "a"}, "names 1 documents, the index holds 5"),
        ({str(n): n + 10 for n in range(6)}, "names 6 documents, the index holds 5"),
        ({"0": None}, "an id must be a str or an int"),
        ({"x": 1}, "invalid literal"),
        ([1], "expected an object of numbers and ids, got list"),
    ):
        made.write_text(json.dumps(held))
        with pytest.raises(FileError, match=message):
            corpus.add_file(index, replace=True)
    made.write_text(json.dumps({"9": "e", "0": "a", "3": "b", "4": "c", "11": "f"}))  # of an index with removed ones
    assert corpus.add_file(index, replace=True) == 5
    assert corpus.ids() == [7, "ü", "a", "b", "c", "e", "f"]
    assert "harm" not in capsys.readouterr().out


def test_ids_of_older_releases_of_pylate(tmp_path):
    """Which keep them by the package sqlitedict: keys as text, values pickled."""
    ids, index = ["a", "b", "c", 7, "ü"], pylate(tmp_path / "index", [])
    (index / "plaid_ids_to_documents_ids.pkl").unlink()
    with closing(sqlite3.connect(index / "plaid_ids_to_documents_ids.sqlite")) as db, db:
        db.execute("CREATE TABLE unnamed (key TEXT PRIMARY KEY, value BLOB)")
        db.executemany("REPLACE INTO unnamed VALUES (?, ?)", [(n, pickle.dumps(id)) for n, id in enumerate(ids)])
    corpus = Corpus.create(tmp_path / "store", 16)
    with pytest.raises(FileError, match=r"beside .*\.sqlite, SQLite with a pickle a document, .* export it") as e:
        corpus.add_file(index)
    assert len(corpus) == 0
    subprocess.run([sys.executable, "-c", str(e.value).split('python -c "')[1].rstrip('"')], check=True)
    assert corpus.add_file(index) == 5
    assert corpus.ids() == ids


def manifest(folder, **entries):
    path = folder / "merged_codes.manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {f"{n[1:]}.codes.npy": e for n, e in entries.items()}))


MERGED = {
    "not ended": lambda i: manifest(i, _0={"rows": 8, "merged": False}),
    "other rows": lambda i: manifest(i, _1={"rows": 7, "merged": True}),
    "no number": lambda i: manifest(i, _0={"rows": "8", "merged": True}),
    "no manifest": lambda i: (i / "merged_codes.manifest.json").write_text("[]"),
    "one number": lambda i: np.save(i / "merged_codes.npy", np.array(3)),
    "cut": lambda i: np.save(i / "merged_codes.npy", np.zeros(9, np.int64)),
}


@pytest.mark.parametrize("fault", MERGED)
def test_merged_files_that_are_not_whole(tmp_path, fault):
    write_index(tmp_path / "index", "npy", 4, CHUNKS)
    merge(tmp_path / "index")
    MERGED[fault](tmp_path / "index")
    corpus = Corpus.create(tmp_path / "store", 16, "residual")
    with pytest.raises(FileError, match=r"not a whole index of ColBERT or fast-plaid: (merged_codes|doclens.1)"):
        corpus.add_file(tmp_path / "index")
    assert (len(corpus), corpus.check()) == (0, [])
    assert list((corpus.path / "segments").iterdir()) == []


def test_a_damaged_chunk_changes_nothing(tmp_path, monkeypatch):
    write_index(tmp_path / "index", "npy", 4, CHUNKS)
    np.save(tmp_path / "index" / "1.codes.npy", np.full(8, 9))
    corpus = Corpus.create(tmp_path / "store", 16, "residual")
    with pytest.raises(FileError, match=r"1.codes.npy names centroid 9, they are numbered 0 to 8"):
        corpus.add_file(tmp_path / "index")
    assert list((corpus.path / "segments").iterdir()) == []
    corpus.add(["a"], [QUERIES[0]])
    assert corpus.check() == []

    def full(*arguments):
        raise CorpusError("disk full")

    (tmp_path / "index" / "1.codes.npy").unlink()
    np.save(tmp_path / "index" / "1.codes.npy", np.zeros(8, np.int64))
    other = Corpus.create(tmp_path / "other", 16, "residual")
    monkeypatch.setattr("maxsim.corpus.adding.write_segment", full)
    with pytest.raises(CorpusError, match="disk full"):
        other.add_file(tmp_path / "index")
    assert (len(other), list((other.path / "segments").iterdir())) == (0, [])


def test_a_folder_of_files(tmp_path):
    (tmp_path / "f" / "sub").mkdir(parents=True)
    np.save(tmp_path / "f" / "b.npy", np.ones((2, 16), np.float32))
    np.save(tmp_path / "f" / "sub" / "a.npy", np.zeros((2, 3, 16), np.float32))
    np.savez(tmp_path / "f" / "c.npz", tokens=np.ones((3, 16)), lengths=np.array([1, 2]))
    (tmp_path / "f" / "note.txt").write_text("not read")
    corpus = Corpus.create(tmp_path / "store", 16)
    assert corpus.add_file(tmp_path / "f") == 5
    assert corpus.ids() == ["b", "c.npz:1", "c.npz:2", "sub/a.npy:1", "sub/a.npy:2"]
    np.save(tmp_path / "f" / "z.npy", np.ones(3))
    with pytest.raises(FileError, match=r"z.npy: expected \[N, L, D\]"):
        corpus.add_file(tmp_path / "f", replace=True)
    assert len(corpus) == 5
