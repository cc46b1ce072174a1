"""Sources added in parts: interrupted anywhere the same call goes on, what is there is passed over, what differs is
told before anything is changed."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stores import document, stopped_at
from test_residual import write_index

import maxsim
from maxsim.corpus import FileError, opened, segments
from maxsim.search import Corpus

LENGTHS = [3, 0, 2, 5, 1, 4, 0, 6, 2, 2]
IDS = [f"d{n}" for n in range(len(LENGTHS))]
KEPT = {
    "float16": {"dtype": "float16"},
    "exact": {"dtype": "int8", "exact": "float16"},
    "int8": {"dtype": "int8"},
    "tokens": {"dtype": "int8", "scale": "token"},
    "fp8": {"dtype": "fp8"},
    "residual": {"dtype": "residual", "centroids": 4},
    "renormalised": {"dtype": "residual", "centroids": 4, "bits": 4, "renormalize": True},
    "pq": {"dtype": "pq", "parts": 4},
}


def tokens_of(seed=0):
    return torch.randn(sum(LENGTHS), 16, generator=torch.Generator().manual_seed(seed)).numpy()


def write(path, ids=IDS, lengths=LENGTHS, tokens=None, texts=True, **fields):
    tokens = tokens_of() if tokens is None else tokens
    np.savez(path, tokens=tokens, lengths=np.array(lengths), ids=np.array(ids))
    if texts:
        lines = [{"id": id, "text": f"text of {id}", "n": n, **fields} for n, id in enumerate(ids)]
        path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 250)


def add(corpus, path, replace=False):
    lacking = corpus.lacking(opened(path), replace)
    done = []
    corpus.add_lacking(lacking, done.append)
    assert sum(done) == lacking.added + lacking.replaced
    return lacking.added, lacking.replaced, lacking.skipped


def state(corpus):
    """Everything that a corpus holds, its files too; of tables, whose metadata come in any order, what they hold."""
    assert corpus.check() == []
    paths = list((corpus.path / "segments").iterdir())
    files = {path.name: path.read_bytes() for path in paths if path.name != segments.CODEBOOK}
    files |= {path.name: repr(sorted(load_file(path).items())) for path in paths if path.name == segments.CODEBOOK}
    return corpus.ids(), corpus.texts(corpus.ids()), corpus.metadata(corpus.ids()), files


SOURCES = [*KEPT, "index", "codes", "decoded"]


def source_of(folder, kind):
    """What is to be added, and how the corpus keeps it."""
    if kind in KEPT:
        return write(folder / "x.npz"), KEPT[kind]
    write_index(folder / "index", "npy", 2, [[3, 0, 5], [7, 1], [2]])
    if kind == "index":
        return folder / "index", {"dtype": "residual"}
    if kind == "decoded":
        return folder / "index", {"dtype": "float16"}
    packed = maxsim.Packed(torch.from_numpy(tokens_of()), [0, *np.cumsum(LENGTHS).tolist()])
    maxsim.quantize(packed, "int8").save(folder / "codes.safetensors")
    return folder / "codes.safetensors", {"dtype": "int8"}


@pytest.mark.parametrize("kind", SOURCES)
def test_interrupted_and_on_again(tmp_path, monkeypatch, kind):
    """At every segment in turn: the end is that of a call that was left alone, to the byte."""
    path, kept = source_of(tmp_path, kind)
    alone = Corpus.create(tmp_path / "alone", 16, **kept)
    assert alone.add_file(path) == len(alone) > 3
    parts, count = alone.info().segments, len(alone)
    assert parts > 2
    corpus = Corpus.create(tmp_path / "store", 16, **kept)
    before = 0
    for _ in range(parts):
        with monkeypatch.context() as patch:
            stopped_at(patch, 2, KeyboardInterrupt())  # one more segment each time; of codes in a file all at once
            with suppress(KeyboardInterrupt):
                assert add(corpus, path) == (count - before, 0, before)
        before = len(corpus)
        assert state(Corpus.open(corpus.path))[0] == alone.ids()[:before]
    if kind == "codes":
        assert before == 0  # a file of codes is a part of its own
    assert add(corpus, path) == (count - before, 0, before)
    assert state(corpus) == state(alone)
    generation = corpus.select().snapshot.generation
    assert add(corpus, path) == (0, 0, count)
    assert corpus.select().snapshot.generation == generation
    assert corpus.search(torch.ones(1, 2, 16), 99) == alone.search(torch.ones(1, 2, 16), 99)


@pytest.mark.parametrize("kind", KEPT)
def test_other_embeddings(tmp_path, kind):
    """Of one token in the middle of a document, and of one token fewer."""
    path = write(tmp_path / "x.npz")
    corpus = Corpus.create(tmp_path / "store", 16, **KEPT[kind])
    add(corpus, path)
    before = state(corpus)
    tokens = tokens_of()
    tokens[7] = tokens_of(1)[7]  # of d3
    write(path, tokens=tokens)
    with pytest.raises(FileError, match=r"x\.npz: the corpus holds other embeddings under the id 'd3'; nothing was"):
        corpus.lacking(opened(path))
    assert state(corpus) == before
    assert add(corpus, path, replace=True) == (0, 1, 9)
    assert corpus.ids() == [*(id for id in IDS if id != "d3"), "d3"]
    assert add(corpus, path) == (0, 0, 10)
    shorter = [*LENGTHS[:-1], 1]
    write(path, lengths=shorter, tokens=tokens[:-1])
    with pytest.raises(FileError, match="other embeddings under the id 'd9'"):
        corpus.lacking(opened(path))


def test_other_codes(tmp_path):
    path, kept = source_of(tmp_path, "index")
    corpus = Corpus.create(tmp_path / "store", 16, **kept)
    add(corpus, path)
    for what, change in (("codes", lambda each: (each + 1) % 9), ("residuals", lambda each: each ^ 1)):
        file = path / f"1.{what}.npy"
        before = np.load(file)
        changed = before.copy()
        changed[-1] = change(changed[-1])
        np.save(file, changed)
        with pytest.raises(FileError, match="index: the corpus holds other embeddings under the id 4; nothing"):
            corpus.lacking(opened(path))
        np.save(file, before)
    assert add(corpus, path) == (0, 0, 6)
    # what codes decode to has other codes here, since it is divided by its norm
    np.savez(tmp_path / "x.npz", tokens=corpus.get(0).embeddings.numpy(), lengths=np.array([3]), ids=np.array([0]))
    with pytest.raises(FileError, match="other embeddings under the id 0"):
        corpus.lacking(opened(tmp_path / "x.npz"))


def test_other_texts_and_metadata(tmp_path):
    path = write(tmp_path / "x.npz")
    corpus = Corpus.create(tmp_path / "store", 16)
    add(corpus, path)
    before = state(corpus)
    write(path, lang="de")
    with pytest.raises(FileError, match="other metadata under the id 'd0'"):
        corpus.lacking(opened(path))
    path.with_suffix(".jsonl").unlink()
    with pytest.raises(FileError, match="another text under the id 'd0'"):
        corpus.lacking(opened(path))
    assert state(corpus) == before
    corpus.update(["d1"], metadata=[{"n": True}])  # Python has it equal to 1
    with pytest.raises(FileError, match="other metadata under the id 'd1'"):
        corpus.lacking(opened(write(path)))
    corpus.update(["d1"], metadata=[{"n": 1}])
    corpus.update(["d4"], metadata=[{"n": 4, "more": 1}])
    write(path)
    assert add(corpus, path, replace=True) == (0, 1, 9)
    corpus.update(["d4"], metadata=[{}])
    path.with_suffix(".jsonl").unlink()
    corpus.update(IDS, texts=[None] * 10, metadata=[None, {}] * 5)
    assert add(corpus, path) == (0, 0, 10)


def test_a_source_that_grows_and_shrinks(tmp_path):
    few = write(tmp_path / "x.npz", IDS[:4], LENGTHS[:4], tokens_of()[:10])
    corpus = Corpus.create(tmp_path / "store", 16)
    assert add(corpus, few) == (4, 0, 0)
    assert add(corpus, write(few)) == (6, 0, 4)
    assert corpus.ids() == IDS
    corpus.delete(["d2", "d7"])
    assert add(corpus, few) == (2, 0, 8)
    assert corpus.ids()[-2:] == ["d2", "d7"]
    index = tmp_path / "index"
    write_index(index, "npy", 2, [[3, 0, 5], [7, 1], [2]])
    codes = Corpus.create(tmp_path / "codes", 16, "residual")
    add(codes, index)
    wanted = codes.get(1).embeddings, codes.get(4).embeddings
    codes.delete([1, 4])
    assert add(codes, index) == (2, 0, 4)
    assert codes.ids() == [0, 2, 3, 5, 1, 4]
    assert all(torch.equal(codes.get(id).embeddings, each) for id, each in zip((1, 4), wanted, strict=True))
    assert codes.check() == []


FAULTS = {
    "twice": (lambda tokens: {"ids": [*IDS[:9], "d0"]}, r"x\.npz: id 'd0' comes twice"),
    "infinite": (lambda tokens: {"tokens": np.where(np.arange(25)[:, None] == 24, 1e6, tokens)}, "'d9' holds NaN or"),
    "narrow": (lambda tokens: {"tokens": tokens[:, :8]}, "has width 8, the corpus has 16"),
    "cut": (lambda tokens: {"lengths": [*LENGTHS[:9], 3]}, "tokens end before the documents do"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("replace", [False, True])
def test_faults_are_found_before_anything_is_added(tmp_path, fault, replace):
    made, message = FAULTS[fault]
    path = write(tmp_path / "x.npz", texts=False, **made(tokens_of()))
    corpus = Corpus.create(tmp_path / "store", 16)
    with pytest.raises(ValueError, match=message):
        add(corpus, path, replace)
    assert len(corpus) == 0 and corpus.info().segments == 0


def test_what_changes_between_looking_and_adding(tmp_path):
    path = write(tmp_path / "x.npz")
    corpus = Corpus.create(tmp_path / "store", 16)
    lacking = corpus.lacking(opened(path))
    corpus.add(["d7"], [document(1, 2, 16)])
    with pytest.raises(FileError, match=r"x\.npz: this, or the corpus, has changed .*: id 'd7' is already in .*; the"):
        corpus.add_lacking(lacking)
    corpus.delete(["d7"])
    assert add(corpus, path)[1:] == (0, 7)  # what was added before
    changes = [
        lambda: write(path, IDS[:4], LENGTHS[:4], tokens_of()[:10]),
        lambda: write(path, [*IDS, "d10"], [*LENGTHS, 2], np.concatenate([tokens_of(), tokens_of(1)[:2]])),
        lambda: path.write_bytes(b"PK"),
    ]
    for change in changes:
        other = Corpus.create(tmp_path / f"other{len(list(tmp_path.iterdir()))}", 16)
        lacking = other.lacking(opened(write(path)))
        change()
        with pytest.raises(FileError, match=r"x\.npz: this, or the corpus, has changed since it was looked at: "):
            other.add_lacking(lacking)
        assert other.check() == [] and "d10" not in other


def test_discard(tmp_path):
    """What holds nothing goes, unless another writer is just adding."""
    for keep in (False, True):
        corpus = Corpus.create(tmp_path / "store", 16)
        corpus.discard(keep)
        assert (tmp_path / "store").exists() == keep
        with pytest.raises(FileNotFoundError, match="is not a corpus"):
            corpus.add([1], [document(1, 2, 16)])
    corpus = Corpus.create(tmp_path / "store", 16)
    began = threading.Event()

    def embeddings():
        began.set()
        time.sleep(0.1)
        yield document(1, 2, 16)

    other = threading.Thread(target=lambda: Corpus.open(corpus.path).add([1], embeddings()))
    other.start()
    began.wait()
    corpus.discard(keep=False)
    other.join()
    assert corpus.ids() == [1] and corpus.check() == []


def test_no_tokens_to_train_on(tmp_path):
    path = write(tmp_path / "x.npz", ["a", "b"], [0, 0], np.zeros((0, 16), np.float32), texts=False)
    corpus = Corpus.create(tmp_path / "store", 16, "pq", parts=4)
    with pytest.raises(ValueError, match="the first documents are what pq codes are trained on"):
        corpus.lacking(opened(path))
    corpus.add(["c"], [document(1, 9, 16)])
    assert add(corpus, path) == (2, 0, 0)


def test_looking_keeps_no_writer_waiting(tmp_path, monkeypatch):
    """The catalogue is read for a segment's documents at a time."""
    path = write(tmp_path / "x.npz")
    corpus = Corpus.create(tmp_path / "store", 16)
    monkeypatch.setattr("maxsim.corpus.catalogue.WAIT_SECONDS", 0.1)
    told = []

    def progress(count):
        told.append(count)
        Corpus.open(corpus.path).add([len(told)], [document(1, 1, 16)])

    lacking = corpus.lacking(opened(path), progress=progress)
    assert sum(told) == lacking.added == 10 and len(told) > 2
