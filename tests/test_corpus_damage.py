"""Bits flipped anywhere in a corpus: the right results, or CorpusError, or results whose damage `check` tells; and
faults that no reader of bytes would find."""

from __future__ import annotations

import contextlib
import random
import sqlite3

import pytest
import torch
from safetensors.torch import load_file, save_file
from stores import fill

from maxsim.corpus import CorpusError, catalogue, problems_of, segments, sums
from maxsim.search import Corpus

DIM = 16
KEPT = {
    "float16": {},
    "int8": {"dtype": "int8", "exact": "float16"},
    "residual": {"dtype": "residual", "bits": 2, "centroids": 16},
    "pq": {"dtype": "pq", "parts": 4},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 3000)


def made(path, kept):
    """Segments with and without gaps, deleted documents, texts and metadata."""
    generator = torch.Generator().manual_seed(3)

    def documents(count):
        return [torch.randn(n % 7, DIM, generator=generator) for n in range(count)]

    corpus = Corpus.create(path, DIM, **KEPT[kept])
    texts, metadata = [f"text {i} é" for i in range(20)], [{"n": i % 3, "s": "x" * i} for i in range(20)]
    corpus.add([f"a{i}" for i in range(20)], documents(20), texts, metadata, cut=[i % 5 == 0 for i in range(20)])
    corpus.delete(["a3", "a9"])
    corpus.compact()
    corpus.add(["ü", "z"], documents(2), ["t", None])
    corpus.delete(["z"])
    return corpus


QUERIES = [torch.randn(n, DIM, generator=torch.Generator().manual_seed(n)) for n in (3, 1)]
IDS = [*(f"a{i}" for i in range(20) if i not in (3, 9)), "ü"]


def asked(path):
    """Everything that can be asked; "nothing" where an id is not found."""
    corpus = Corpus.open(path)
    told = [len(corpus), corpus.ids(), corpus.info(), corpus.texts(IDS), corpus.metadata(IDS), "a3" in corpus]
    for ask in (
        lambda: [corpus.get(id) for id in IDS[::3]],
        lambda: corpus.search(QUERIES, 7),
        lambda: corpus.search(QUERIES, 99, IDS[::3]),
        lambda: corpus.search(QUERIES, 9, filter={"n": [1, 2]}),
        lambda: corpus.rerank(QUERIES, IDS[::4]),
    ):
        try:
            told.append(ask())
        except KeyError:
            told.append("nothing")
    return repr(told)


def rounds(folder, kept, count, seed):
    corpus, rng = made(folder / kept, kept), random.Random(seed)
    truth, wrong = asked(corpus.path), []
    assert corpus.check() == []
    paths = sorted(path for path in corpus.path.rglob("*") if path.is_file())
    paths += [corpus.path / catalogue.FILE] * len(paths)  # as often as all others
    for number in range(count):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 6])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        found = None
        with contextlib.suppress(CorpusError):
            found = asked(corpus.path)
        if found != truth and not problems_of(corpus.path):
            wrong.append([path.name, *(at for at, (a, b) in enumerate(zip(whole, data, strict=True)) if a != b)])
        path.write_bytes(whole)
        for extra in corpus.path.glob(f"{catalogue.FILE}-*"):
            extra.unlink()
    assert not wrong
    assert asked(corpus.path) == truth


@pytest.mark.parametrize("kept", KEPT)
def test_flipped_bits(tmp_path, kept):
    rounds(tmp_path, kept, 8, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_many_flipped_bits(tmp_path, kept):
    rounds(tmp_path, kept, 120, seed=2)


def sql(corpus, *statements, seal=False):
    with contextlib.closing(sqlite3.connect(corpus.path / catalogue.FILE)) as db:
        for statement in statements:
            db.execute(statement)
        if seal:  # as if it had been written so
            sums.seal(db)
        db.commit()


ROWS = {
    "id": "UPDATE documents SET id = 'a8' WHERE id = 'a7'",
    "text": "UPDATE documents SET text = 'other' WHERE id = 'a2'",
    "metadata": "UPDATE documents SET metadata = '{' WHERE id = 'a2'",
    "type": "UPDATE documents SET metadata = 7 WHERE id = 'a2'",
    "no sum": "UPDATE documents SET sum = NULL WHERE id = 'a2'",
    "cut": "DELETE FROM cut WHERE position = 10",
    "cut more": "INSERT INTO cut VALUES (1)",
}


@pytest.mark.parametrize("fault", ROWS)
def test_changed_rows_are_told(tmp_path, fault):
    corpus = made(tmp_path / "store", "float16")
    sql(corpus, *(["DELETE FROM documents WHERE id = 'a8'"] if fault == "id" else []), ROWS[fault])
    assert any("has changed since it was written" in each for each in corpus.check())
    if fault in ("text", "metadata", "type", "no sum"):
        for ask in (corpus.get, lambda id: corpus.texts([id]), lambda id: corpus.metadata([id])):
            with pytest.raises(
                CorpusError, match=r"catalogue\.sqlite: the row of the document at position 2 has changed"
            ):
                ask("a2")


CHANGES = {
    "texts": lambda c: c.update(["a1", "a2"], texts=["x", "y"]),
    "metadata": lambda c: c.update(["a1", "a2"], metadata=[{"n": 1}, None]),
    "embeddings": lambda c: c.update(["a1", "a2"], embeddings=QUERIES),
    "delete": lambda c: c.delete(["a1", "a2"]),
    "replace": lambda c: c.add(["a1", "a2"], QUERIES, replace=True),
    "export": lambda c: c.export(c.path.parent / "x.npz"),
}


def test_a_damaged_row_gets_no_new_checksum(tmp_path):
    """Nor is it written elsewhere."""
    corpus = made(tmp_path / "store", "float16")
    sql(corpus, ROWS["text"])
    told = corpus.check()
    for change in CHANGES.values():
        with pytest.raises(CorpusError, match=r"catalogue\.sqlite: the row of the document at position 2 has changed"):
            change(corpus)
    assert (corpus.check(), corpus.texts(["a1"])) == (told, {"a1": "text 1 é"})
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    corpus = made(tmp_path / "other", "float16")
    sql(corpus, "UPDATE documents SET deleted = 1 - deleted WHERE id IN ('ü', 'z')")
    told = corpus.check()
    with pytest.raises(CorpusError, match="has changed since it was written"):
        corpus.compact()
    assert corpus.check() == told != []


def test_rows_of_earlier_formats_have_no_checksum(tmp_path):
    corpus = made(tmp_path / "store", "float16")
    down = ["ALTER TABLE corpus DROP COLUMN sum", "ALTER TABLE corpus DROP COLUMN summed"]
    sql(corpus, *down, "ALTER TABLE documents DROP COLUMN sum", "PRAGMA user_version = 2")
    again, before = Corpus.open(corpus.path), asked(corpus.path)
    assert (again.info().format, again.check()) == (2, [])
    again.add(["new"], [QUERIES[0]])
    again.update(["a2"], texts=["other"])
    again.delete(["new"])
    assert (again.info().format, again.check(), again.texts(["a2"])) == (3, [], {"a2": "other"})
    again.update(["a2"], texts=["text 2 é"])
    assert asked(corpus.path).split("Info(")[0] == before.split("Info(")[0]
    sql(corpus, "UPDATE documents SET metadata = '{' WHERE id = 'a2'")
    assert again.check()
    sql(corpus, "UPDATE documents SET metadata = '{' WHERE id = 'a4'")
    with pytest.raises(CorpusError, match="the metadata of the document at position 4 are no JSON"):
        again.get("a4")


def test_checksums_do_not_depend_on_the_version_of_python():
    """Of characters newer than its Unicode, which repr would escape."""
    assert sums.row_sum(3, "ü", "\U0001fae8 \U000323b0", '{"n": 1.5}', 0, 1) == 1724928292
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for table, columns in (("corpus", f"{sums.SETTINGS}, sum"), ("segments", sums.SEGMENTS)):
            db.execute(f"CREATE TABLE {table} ({columns})")
        db.execute("CREATE TABLE codebook (file, bytes, sha256)")
        db.execute("INSERT INTO corpus (dim, encoder) VALUES (8, '\U0001fae8 \U000323b0')")
        assert sums.state_sum(db) == "393bbe63b1ba62429c75ce283633c734"


def test_the_state_is_looked_at_once(tmp_path, monkeypatch):
    corpus, looked, real = made(tmp_path / "store", "float16"), [], sums.broken
    monkeypatch.setattr(sums, "broken", lambda db: looked.append(db) or real(db))
    again = Corpus.open(corpus.path)
    assert len(looked) == 1
    assert again.search(QUERIES, 3) and len(looked) == 1
    corpus.delete(["a1"])
    looked.clear()
    assert again.search(QUERIES, 3) and len(looked) == 1


def test_a_damaged_catalogue_gets_no_new_checksum(tmp_path):
    corpus = made(tmp_path / "store", "float16")
    sql(corpus, "UPDATE segments SET documents = documents + 1")
    for change in (lambda: corpus.delete(["a1"]), lambda: corpus.add(["new"], [QUERIES[0]]), corpus.compact):
        with pytest.raises(CorpusError, match="list of segments have changed"):
            change()
    assert "list of segments have changed" in corpus.check()[0]


def test_positions_that_no_segment_has(tmp_path):
    for number, position in enumerate((3, 999)):  # one that a compaction dropped, one behind all segments
        corpus = made(tmp_path / f"store{number}", "float16")
        sql(corpus, f"UPDATE documents SET position = {position} WHERE id = 'a4'")
        assert corpus.check()
        for ask in (
            lambda c: c.search(QUERIES, 3, ["a4", "a5"]),
            lambda c: c.rerank(QUERIES, ["a4", "a5"]),
            lambda c: c.search(QUERIES, 3, filter={"n": 1}),
        ):
            with pytest.raises(
                CorpusError, match=f"at position {position}, which|position {position}, which no segment"
            ):
                ask(Corpus.open(corpus.path))


def changed(corpus, name, index, value):
    """A value of the first segment that is written so: the file's own checksum agrees."""
    record = corpus.select().snapshot.segments[0].record
    path = corpus.path / "segments" / record.file
    tensors = {each: tensor.clone() for each, tensor in load_file(path).items()}
    tensors[name][index] = value
    path.unlink()
    save_file(tensors, path)
    size, digest = path.stat().st_size, segments.sha256(path)
    sql(corpus, f"UPDATE segments SET bytes = {size}, sha256 = '{digest}' WHERE number = {record.number}", seal=True)


@pytest.mark.parametrize("value", [16, -1, 2**31 - 1])
@pytest.mark.parametrize("home", [None, "device"])
def test_centroids_beyond_their_table_reach_no_kernel(tmp_path, value, home):
    corpus = made(tmp_path / "store", "residual")
    changed(corpus, "centroid", 5, value)
    message = rf"\d+\.safetensors: token 5 names centroid {value}, they are numbered 0 to 15"
    if home:
        with pytest.raises(CorpusError, match=message):
            Corpus.open(corpus.path, home=home)
    again = Corpus.open(corpus.path)
    for ask in (
        lambda: again.search(QUERIES, 3),
        lambda: again.rerank(QUERIES, ["a1"]),
        lambda: again.get("a1"),
        lambda: again.export(tmp_path / "x.npz"),
        lambda: again.add(["more"], [QUERIES[0]]) and again.delete(["a1"]) and again.compact(),
    ):
        with pytest.raises(CorpusError, match=message):
            ask()
    assert [message for message in again.check() if "names centroid" in message]


def test_codes_that_are_not_of_the_floats_beside_them(tmp_path):
    corpus = made(tmp_path / "store", "int8")
    changed(corpus, "exact", slice(None), 100.0)
    with pytest.raises(CorpusError, match=r"codes are not of the floats beside them: .*; see `check`"):
        Corpus.open(corpus.path).search(QUERIES, 3)


def test_meta_tensors_are_refused(tmp_path):
    corpus = Corpus.create(tmp_path / "store", DIM)
    fill(corpus, [3, 2])
    meta = torch.ones(2, 3, DIM, device="meta")
    for ask in (
        lambda: corpus.search(meta, 1),
        lambda: corpus.search([meta[0]], 1),
        lambda: corpus.rerank(meta, ["d0"]),
        lambda: corpus.add(["x", "y"], meta),
        lambda: corpus.search(QUERIES, 1, torch.ones(2, dtype=torch.int64, device="meta")),
        lambda: corpus.delete(torch.ones(2, dtype=torch.int64, device="meta")),
        lambda: corpus.rerank(QUERIES, torch.ones(2, 2, dtype=torch.int64, device="meta")),
    ):
        with pytest.raises(ValueError, match="must hold values, got a meta tensor"):
            ask()
    assert len(corpus) == 2
