"""Corpora that are swapped or damaged under an open handle, and what would not come back as it was given."""

from __future__ import annotations

import enum
import shutil
import sqlite3

import numpy as np
import pytest
import torch

from maxsim.corpus import CorpusError
from maxsim.search import Corpus

Q = torch.ones(1, 1, 1)


def one(path, id: str, value: float) -> Corpus:
    corpus = Corpus.create(path, 1)
    corpus.add([id], value * torch.ones(1, 1, 1))
    return corpus


@pytest.mark.parametrize("more", [0, 1, 3])
def test_another_corpus_in_its_place_is_an_error(tmp_path, more):
    live = one(tmp_path / "live", "old", 1)
    assert [hit.id for hit in live.search(Q, 1)[0]] == ["old"]
    other = one(tmp_path / "next", "new", 9)
    for n in range(more):
        other.add([n], torch.ones(1, 1, 1))
    live.path.rename(tmp_path / "gone")
    other.path.rename(live.path)
    for call in (lambda: live.search(Q, 1), lambda: live.get("new"), lambda: live.rerank(Q, ["new"]), live.compact):
        with pytest.raises(CorpusError, match="has taken its place since it was opened: open it again"):
            call()
    assert [(hit.id, hit.score) for hit in Corpus.open(live.path).search(Q, 1)[0]] == [("new", 9.0)]


def test_an_earlier_state_in_its_place_is_an_error(tmp_path):
    live = one(tmp_path / "live", "a", 1)
    shutil.copytree(live.path, tmp_path / "copy")
    live.add(["b"], 2 * torch.ones(1, 1, 1))
    assert len(live.search(Q, 9)[0]) == 2
    shutil.rmtree(live.path)
    (tmp_path / "copy").rename(live.path)
    with pytest.raises(CorpusError, match="open it again"):
        live.search(Q, 9)
    Corpus.open(live.path).add(["c"], 3 * torch.ones(1, 1, 1))  # as many changes as there were
    with pytest.raises(CorpusError, match="open it again"):
        live.search(Q, 9)
    assert [hit.id for hit in Corpus.open(live.path).search(Q, 9)[0]] == ["c", "a"]


def test_a_document_without_a_row_is_an_error(tmp_path):
    corpus = one(tmp_path / "c", "x", 1)
    corpus.add(["y"], torch.ones(1, 1, 1))
    db = sqlite3.connect(tmp_path / "c" / "catalogue.sqlite")
    db.execute("DELETE FROM documents WHERE id = 'y'")
    db.commit()
    db.close()
    assert Corpus.open(corpus.path).check()
    with pytest.raises(CorpusError, match="lacks documents that its segments have"):
        Corpus.open(corpus.path).search(Q, 2)


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"f": "a\0b"}, ValueError, "the character 0"),
        ({"k\0x": 1}, ValueError, "the character 0"),
        ({"f": [{"g": "\0"}]}, ValueError, "the character 0"),
        ({1: "int", "1": "str"}, TypeError, "a key that is no str: 1"),
    ],
)
def test_metadata_that_would_not_be_read_again(tmp_path, metadata, error, message):
    corpus = one(tmp_path / "c", "x", 1)
    with pytest.raises(error, match=message):
        corpus.add(["y"], torch.ones(1, 1, 1), metadata=[metadata])
    assert corpus.ids() == ["x"]


def test_metadata_nested_too_deep(tmp_path):
    corpus, deep = one(tmp_path / "c", "x", 1), {}
    for _ in range(5000):
        deep = {"d": deep}
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        corpus.update(["x"], metadata=[deep])


def test_values_of_other_kinds_are_those_they_equal(tmp_path):
    class Name(str, enum.Enum):
        A = "a"

    corpus = Corpus.create(tmp_path / "c", 8, "residual", bits=np.int64(2), centroids=np.int32(2))
    corpus.add([Name.A], torch.randn(1, 9, 8), metadata=[{"n": 1}])
    assert corpus.ids() == ["a"]
    assert Name.A in corpus
    assert len(corpus.search(torch.ones(1, 1, 8), 1, filter={"n": np.int64(1)})[0]) == 1


@pytest.mark.parametrize("lengths", [[1, 5], [2, 2, 1], [1, 2, 2, 2]])
def test_lengths_that_are_not_those_of_padded_documents(tmp_path, lengths):
    np.savez(tmp_path / "x.npz", embeddings=np.ones((2, 2, 1), "f4"), lengths=lengths)
    corpus = Corpus.create(tmp_path / "c", 1)
    with pytest.raises(ValueError, match=r"document 1 has length 5, of 2 tokens|lengths, 2 documents"):
        corpus.add_file(tmp_path / "x.npz")
    assert len(corpus) == 0


def test_files_of_empty_documents_and_of_ids_in_a_list(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=np.ones((3, 0, 2), "f4"))
    torch.save({"tokens": torch.ones(3, 2), "offsets": torch.tensor([0, 1, 3]), "ids": ["a", "b"]}, tmp_path / "x.pt")
    corpus = Corpus.create(tmp_path / "c", 2)
    assert corpus.add_file(tmp_path / "x.npz") == 3
    assert corpus.add_file(tmp_path / "x.pt") == 2
    assert corpus.ids()[3:] == ["a", "b"]
