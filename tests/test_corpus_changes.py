"""Updates, compaction, filters, reranking: what changes, what stays, and what is read."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from stores import document, fill, ranking
from test_corpus_codes import CODECS, DIM, LENGTHS, data, expected, found, made, old

import maxsim
from maxsim.corpus import checking, segments
from maxsim.search import Corpus

QUERY = document(77, 3)


@pytest.fixture
def corpus(tmp_path):
    return Corpus.create(tmp_path / "store", 8)


def test_update_of_embeddings_keeps_what_is_not_given(corpus):
    documents = fill(corpus, [1, 2, 3])
    corpus.update(["d1"], metadata=[{"n": 1}])
    other = Corpus.open(corpus.path)
    documents["d1"] = documents.pop("d1") + 1  # last in the order of adding
    assert corpus.update(["d1"], [documents["d1"]]) == 1
    assert other.get("d1").text == "text of d1"
    assert other.get("d1").metadata == {"n": 1}
    assert other.ids() == ["d0", "d2", "d1"]
    assert other.search(QUERY, 9) == [ranking(QUERY, documents)]
    assert (other.info().documents, other.info().deleted) == (3, 1)


def test_update_of_texts_alone_writes_no_segment(corpus):
    fill(corpus, [1, 2])
    before = corpus.info()
    assert corpus.update(["d0", "d1"], texts=["new", None], metadata=[None, {"a": [1]}]) == 2
    assert corpus.texts(["d0", "d1"]) == {"d0": "new", "d1": None}
    assert corpus.metadata(["d0", "d1"]) == {"d0": None, "d1": {"a": [1]}}
    assert corpus.info() == before


@pytest.mark.parametrize(
    ("ids", "more", "error", "message"),
    [
        (["d0", "gone"], {"texts": ["x", "y"]}, KeyError, "gone"),
        (["d0", "d0"], {"texts": ["x", "y"]}, ValueError, "'d0' comes twice"),
        (["d0", "d0"], {"embeddings": [torch.ones(1, 8)] * 2}, ValueError, "'d0' comes twice"),
        (["d0"], {}, ValueError, "give embeddings, texts or metadata"),
        (["d0", "d1"], {"texts": ["x"]}, ValueError, "2 ids, 1 texts"),
        (["d0", "d1"], {"embeddings": [torch.ones(1, 8), torch.ones(1, 9)]}, ValueError, "width 9"),
        (["d0"], {"embeddings": [torch.full((1, 8), float("inf"))]}, ValueError, "infinity"),
    ],
)
def test_update_is_all_or_nothing(corpus, ids, more, error, message):
    documents = fill(corpus, [1, 2])
    with pytest.raises(error, match=message):
        corpus.update(ids, **more)
    assert corpus.search(QUERY, 9) == [ranking(QUERY, documents)]
    assert corpus.texts(["d0"]) == {"d0": "text of d0"}
    assert corpus.check() == []


@pytest.mark.parametrize("segment_bytes", [64, 500, 1 << 20])
def test_compaction_changes_no_hit(corpus, monkeypatch, segment_bytes):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64)
    documents = fill(corpus, [3, 0, 1, 5, 2, 2, 0, 7, 1, 4] * 3)
    other = Corpus.open(corpus.path)
    gone = ["d0", "d7", "d8", "d9", "d10", "d29"]
    corpus.delete(gone)
    documents = {id: tokens for id, tokens in documents.items() if id not in gone}
    monkeypatch.setattr(segments, "SEGMENT_BYTES", segment_bytes)
    before, whole = corpus.info(), [ranking(QUERY, documents)]
    assert corpus.compact() == before.bytes - corpus.info().bytes > 0
    for each in (corpus, other, Corpus.open(corpus.path)):
        assert each.search(QUERY, 99) == whole
        assert each.ids() == list(documents)
        assert all(torch.equal(each.get(id).embeddings, tokens.half()) for id, tokens in documents.items())
        assert each.get("d3").text == "text of d3"
        assert each.search(QUERY, 5, ["d3", "d11", "d28"]) == [
            ranking(QUERY, {id: documents[id] for id in ("d3", "d11", "d28")})
        ]
    assert (corpus.info().deleted, corpus.info().segments <= before.segments) == (0, True)
    assert {path.name for path in (corpus.path / "segments").iterdir()} == {
        segment.record.file for segment, _ in corpus.select().parts
    }
    assert corpus.check() == []
    assert corpus.compact() == 0
    corpus.add(["d29", "new"], [document(1, 2), document(2, 2)])
    documents |= {"d29": document(1, 2), "new": document(2, 2)}
    assert corpus.search(QUERY, 99) == other.search(QUERY, 99) == [ranking(QUERY, documents)]
    corpus.delete(["d3", "d29"])
    corpus.compact()
    documents = {id: tokens for id, tokens in documents.items() if id not in ("d3", "d29")}
    assert corpus.search(QUERY, 99) == other.search(QUERY, 99) == [ranking(QUERY, documents)]
    assert corpus.check() == []


def test_a_corpus_emptied_and_compacted_begins_anew(corpus):
    fill(corpus, [1, 2])
    last = corpus.select().snapshot.segments[-1].record.last
    corpus.delete(["d0", "d1"])
    corpus.compact()
    assert corpus.search(QUERY, 3) == [[]]
    assert list((corpus.path / "segments").iterdir()) == []
    documents = fill(corpus, [2, 1])
    assert corpus.select().snapshot.segments[0].record.first == last + 1
    assert corpus.select().snapshot.segments[0].record.number == 2
    assert corpus.search(QUERY, 3) == [ranking(QUERY, documents)]


def test_compaction_of_format_1(tmp_path):
    corpus = old(tmp_path)
    before = corpus.search(QUERY, 9)
    corpus.compact()
    assert corpus.search(QUERY, 9) == Corpus.open(corpus.path).search(QUERY, 9) == before
    assert (corpus.info().format, corpus.info().segments, corpus.info().deleted, corpus.info().cut) == (3, 1, 0, 1)
    assert corpus.check() == []


@pytest.mark.parametrize("case", CODECS)
def test_compaction_copies_codes(tmp_path, monkeypatch, case):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1500)
    corpus, documents, queries = made(tmp_path / "store", case), data(1), data(2, [5, 1, 9])
    corpus.add(range(len(documents)), documents)
    corpus.delete([0, 5, 6, 29])
    before = found(corpus, queries)
    assert corpus.info().segments > 2
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 20)
    corpus.compact()
    assert found(corpus, queries) == found(Corpus.open(corpus.path), queries) == before
    assert corpus.info().segments == 1
    assert corpus.check() == []


def test_a_search_outlives_a_compaction(corpus, monkeypatch):
    """Its hits were deleted and dropped while it scored: it looks again."""
    documents = fill(corpus, [2, 3, 4])
    best = ranking(QUERY, documents)[0][0]
    reader, real, calls = Corpus.open(corpus.path), Corpus.ids_at, []

    def slow(self, positions):
        calls.append(1)
        if len(calls) == 1:
            corpus.delete([best])
            corpus.compact()
        return real(self, positions)

    monkeypatch.setattr(Corpus, "ids_at", slow)
    del documents[best]
    assert reader.search(QUERY, 9, filter={}) == [ranking(QUERY, documents)]
    assert len(calls) == 2
    calls.clear()
    (best, other) = (hit[0] for hit in ranking(QUERY, documents))
    with pytest.raises(KeyError, match=best):
        reader.search(QUERY, 9, iter([best, other]))  # an iterator is read once, and a subset must be there


def test_what_was_selected_can_be_read_after_a_compaction(corpus):
    fill(corpus, [2, 3, 4])
    before = corpus.select()
    tokens = [segment.tensors["tokens"].clone() for segment, _ in before.parts]
    corpus.delete(["d1"])
    corpus.compact()
    assert all(
        torch.equal(segment.tensors["tokens"], each) for (segment, _), each in zip(before.parts, tokens, strict=True)
    )


META = [
    {"lang": "de", "year": 2020, "ok": True},
    {"lang": "en", "year": 2020.0, "ok": False, "tags": ["a"]},
    {"lang": "de", "year": 1, "x.y": None},
    None,
    {"lang": 'a"b', "ü": "日本", "year": "2020", "ok": 1},
    {},
]
FILTERS = [
    ({"lang": "de"}, [0, 2]),
    ({"lang": ["de", "en"]}, [0, 1, 2]),
    ({"lang": ("de", 'a"b')}, [0, 2, 4]),
    ({"year": 2020}, [0, 1]),
    ({"year": 2020.0}, [0, 1]),
    ({"year": torch.tensor(2020)}, [0, 1]),
    ({"year": np.array([1, 2020])}, [0, 1, 2]),
    ({"year": "2020"}, [4]),
    ({"ok": True}, [0]),
    ({"ok": 1}, [4]),
    ({"ok": [False, 1]}, [1, 4]),
    ({"ok": None}, [2, 3, 5]),
    ({"x.y": None}, [0, 1, 2, 3, 4, 5]),
    ({"ü": {"日本"}}, [4]),
    ({"lang": "de", "year": [1, 2]}, [2]),
    ({"lang": []}, []),
    ({}, [0, 1, 2, 3, 4, 5]),
    ({"nothing": "x"}, []),
    ({"tags": "a"}, []),
]


@pytest.mark.parametrize(("filter", "wanted"), FILTERS, ids=str)
def test_filter(corpus, monkeypatch, filter, wanted):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64)
    corpus.add(range(6), [torch.ones(2, 8)] * 6, metadata=META)
    assert [hit.id for hit in corpus.search(torch.ones(1, 8), 9, filter=filter)[0]] == wanted
    assert [hit.id for hit in corpus.search(torch.ones(1, 8), 9, [4, 0, 5], filter)[0]] == [
        i for i in (0, 4, 5) if i in wanted
    ]
    corpus.delete([0])
    assert [hit.id for hit in corpus.search(torch.ones(1, 8), 9, filter=filter)[0]] == [i for i in wanted if i]


@pytest.mark.parametrize(
    ("filter", "error", "message"),
    [
        ("lang", TypeError, "filter must be a dict"),
        ({1: "x"}, TypeError, "field of a filter must be a str, got int"),
        ({"a": {"b": 1}}, TypeError, "'a': a value must be a str.* got dict"),
        ({"a": [b"x"]}, TypeError, "got bytes"),
        ({"a": float("nan")}, ValueError, "finite"),
        ({"a": 2**63}, ValueError, "64 bits"),
    ],
)
def test_filters_of_other_forms(corpus, filter, error, message):
    fill(corpus, [1])
    with pytest.raises(error, match=message):
        corpus.search(QUERY, 1, filter=filter)


def test_rerank_is_search_in_a_subset(corpus, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    fill(corpus, [3, 0, 1, 5, 2, 2, 0, 7, 1, 4] * 2)
    corpus.delete(["d3"])
    queries = [document(1, 2), torch.empty(0, 8), document(2, 4)]
    lists = [["d5", "d19", "d1", "d5", "d0"], ["d2"], []]
    wanted = [corpus.search([query], 99, ids)[0] for query, ids in zip(queries, lists, strict=True)]
    assert corpus.rerank(queries, lists) == wanted
    assert corpus.rerank(queries, lists, 2) == [hits[:2] for hits in wanted]
    assert corpus.rerank(queries[0], lists[0]) == [wanted[0]]
    assert corpus.rerank(queries, lists[0]) == corpus.search(queries, 99, lists[0])
    assert corpus.rerank(queries, []) == corpus.rerank(queries, [[], [], []]) == [[], [], []]
    assert corpus.rerank([], []) == []
    with pytest.raises(KeyError, match="d3"):
        corpus.rerank(queries[0], ["d0", "d3"])
    with pytest.raises(ValueError, match="one list of ids for each of 3 queries, got 2"):
        corpus.rerank(queries, lists[:2])
    with pytest.raises(TypeError, match="not both"):
        corpus.rerank(queries, ["d1", ["d2"], ["d3"]])
    with pytest.raises(TypeError, match="got str"):
        corpus.rerank(queries, "d1")


@pytest.mark.parametrize("exact", [None, "float16"])
@pytest.mark.parametrize("case", CODECS)
def test_rerank_of_codes(tmp_path, case, exact):
    corpus, documents, queries = made(tmp_path / "store", case, exact=exact), data(5), data(6, [3, 4])
    corpus.add(range(len(documents)), documents)
    ids = [4, 0, 17, 5]
    if exact is None:
        whole = expected(queries, maxsim.quantize(documents, case.split()[0], **CODECS[case]))
    else:
        whole = expected([q.half() for q in queries], [d.half() for d in documents])
    wanted = [[hit for hit in hits if hit[0] in ids] for hits in whole]
    assert [[(hit.id, hit.score) for hit in hits] for hits in corpus.rerank(queries, ids)] == wanted


def test_only_candidates_are_read(tmp_path, monkeypatch):
    from maxsim.search import scan

    corpus = Corpus.create(tmp_path / "store", DIM)
    corpus.add(range(len(LENGTHS)), data(3))
    seen, real = [], scan.run
    monkeypatch.setattr(scan, "run", lambda problem, backend: seen.append(problem) or real(problem, backend))
    corpus.rerank(data(4, [3]), [5, 0, 8])
    assert [problem.documents.count for problem in seen] == [3]
    base = corpus.select().snapshot.segments[0].tensors["tokens"]
    assert seen[0].documents.data.data_ptr() == base.data_ptr()  # in place


def test_check_while_another_process_compacts(corpus, monkeypatch):
    """Files that are no more are no fault; those that the catalogue still names are."""
    for name in "abc":
        fill(corpus, [1, 2], name)
    real = checking.open_segment

    def compacted(*args):
        monkeypatch.setattr(checking, "open_segment", real)
        Corpus.open(corpus.path).compact()
        return real(*args)

    monkeypatch.setattr(checking, "open_segment", compacted)
    assert corpus.check() == []
    assert corpus.info().segments == 1 and len(corpus) == 6


def test_check_tells_of_a_corpus_that_does_not_open(corpus, monkeypatch):
    from maxsim.corpus import problems_of

    fill(corpus, [1, 2])
    fill(corpus, [3], "e")
    files = sorted((corpus.path / "segments").iterdir())
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"\x77")
    told = problems_of(corpus.path)
    assert len(told) == 2
    assert "00000001.safetensors: missing" in told[0]
    assert "00000002.safetensors: its bytes have changed" in told[1]
    lost = Corpus.create(corpus.path.parent / "unread", 8)
    fill(lost, [1])
    with monkeypatch.context() as patch:
        patch.setattr(checking, "sha256", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        (error,) = problems_of(lost.path)
    assert error.endswith("00000001.safetensors: cannot be read: [Errno 5] Input/output error")
    (corpus.path / "catalogue.sqlite").write_bytes(b"nothing of the kind" * 99)
    assert "catalogue.sqlite" in problems_of(corpus.path)[0]
    shutil.rmtree(corpus.path)
    with pytest.raises(FileNotFoundError):
        problems_of(corpus.path)
