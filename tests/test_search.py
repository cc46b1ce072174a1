"""Exact search over a store: every hit, order and score against the definition."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from stores import document, fill, ranking

import maxsim
from maxsim import Packed, Views
from maxsim.corpus import segments
from maxsim.search import Corpus, Hit

DIM = 8
LENGTHS = [3, 0, 1, 5, 2, 2, 0, 7, 1, 4] * 4


@pytest.fixture
def corpus(tmp_path):
    return Corpus.create(tmp_path / "store", DIM, "float32")


@pytest.mark.parametrize("segment_bytes", [32, 400, 1 << 20])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_same_hits_for_every_segment_size_and_k(tmp_path, monkeypatch, segment_bytes, dtype):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", segment_bytes)
    corpus = Corpus.create(tmp_path / "store", DIM, dtype)
    documents = fill(corpus, LENGTHS)
    queries = [document(i, 1 + i % 4) for i in range(6)]
    expected = [ranking(query, documents) for query in queries]
    assert len(expected[0]) == sum(length > 0 for length in LENGTHS)
    for k in (0, 1, 2, 5, 31, 32, 33, 40, 10**9):
        assert corpus.search(queries, k) == [hits[:k] for hits in expected]
    corpus.delete(["d0", "d7", "d39"])
    assert corpus.search(queries, 40) == [[h for h in hits if h[0] not in ("d0", "d7", "d39")] for hits in expected]


def test_scores_are_those_of_score(tmp_path):
    corpus = Corpus.create(tmp_path / "store", 32, "float16")
    documents = [torch.randn(n, 32).half() for n in (3, 17, 1, 40)]
    corpus.add(range(4), documents)
    query = torch.randn(5, 32).half()
    scores = maxsim.score([query], documents)[0]
    assert {hit.id: hit.score for hit in corpus.search([query], 4)[0]} == dict(enumerate(scores.tolist()))


def test_hit_is_plain_python(corpus):
    fill(corpus, [1])
    hit = corpus.search(document(1, 1), 1)[0][0]
    assert isinstance(hit, Hit)
    assert (type(hit.id), type(hit.score)) == (str, float)


def test_equal_scores_keep_the_order_of_adding(corpus, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    ids = [f"{(i * 7) % 20}" for i in range(20)]
    corpus.add(ids, [torch.ones(1, DIM)] * 20)
    for k in (1, 7, 20):
        assert [hit.id for hit in corpus.search(torch.ones(1, DIM), k)[0]] == ids[:k]


@pytest.mark.parametrize(("count", "ks"), [(3, [5]), (0, [5]), (128, [1000]), (800, [1, 127, 128, 129, 200, 500, 800])])
def test_exactly_k_unique_hits_or_all(corpus, count, ks):
    fill(corpus, [1 + i % 3 for i in range(count)])
    full = corpus.search(document(5, 3), 10**6)[0]
    for k in ks:
        hits = corpus.search(document(5, 3), k)[0]
        assert hits == full[:k]
        assert len({hit.id for hit in hits}) == min(k, count)
        assert all(math.isfinite(hit.score) for hit in hits)


def test_one_empty_document_among_many(corpus):
    documents = fill(corpus, [1] * 1115 + [0])
    assert corpus.search(document(1, 2), 2000)[0] == ranking(document(1, 2), documents)


def test_documents_deleted_and_never_filled(corpus):
    fill(corpus, [1, 1, 0, 1, 1])
    corpus.delete(["d3"])
    assert {hit.id for hit in corpus.search(document(1, 1), 5)[0]} == {"d0", "d1", "d4"}


def test_every_document_of_a_segment_deleted(corpus):
    fill(corpus, [2, 1])
    documents = fill(corpus, [3, 0], "e")
    corpus.delete(["d0", "d1"])
    assert corpus.search(document(1, 2), 9) == [ranking(document(1, 2), documents)]
    corpus.delete(["e0", "e1"])
    assert corpus.search(document(1, 2), 9) == [[]]


def test_subset(corpus, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    documents = fill(corpus, [2] * 10)
    query = document(3, 2)
    assert corpus.search(query, 9, ["d5", "d5", "d2"])[0] == ranking(query, {id: documents[id] for id in ("d2", "d5")})
    assert corpus.search(query, 9, subset=[]) == [[]]
    assert corpus.search(query, 1, subset=(f"d{i}" for i in range(10))) == corpus.search(query, 1)
    for unknown in (["d5", "d900"], [-1], ["d5", 5]):
        with pytest.raises(KeyError, match=str(unknown[-1])):
            corpus.search(query, 9, unknown)
    corpus.delete(["d5"])
    with pytest.raises(KeyError, match="d5"):
        corpus.search(query, 9, ["d5"])
    with pytest.raises(TypeError, match="ids"):
        corpus.search(query, 9, "d2")


def test_empty_queries_have_no_hits(corpus):
    documents = fill(corpus, [2, 3])
    queries = [document(1, 4), torch.empty(0, DIM), torch.empty(0, DIM)]
    assert corpus.search(queries, 10) == [ranking(queries[0], documents), [], []]
    assert corpus.search(torch.empty(2, 0, DIM), 10) == [[], []]
    assert corpus.search([], 10) == []
    assert corpus.search(torch.empty(0, 3, DIM), 10) == []


def test_empty_store(corpus):
    assert corpus.search([document(1, 2), document(2, 2)], 3) == [[], []]
    with pytest.raises(ValueError, match="width 8"):
        corpus.search(torch.ones(1, 9), 3)


A, B = document(1, 3), document(2, 3)
FORMS = {
    "padded": lambda: torch.stack([A, B]),
    "list": lambda: [A, B],
    "mixed list": lambda: [A.half(), B.double().numpy()],
    "generator": lambda: (q for q in (A, B)),
    "packed": lambda: Packed(torch.cat([A, B]), [0, 3, 6]),
    "views": lambda: Views(torch.cat([B, A]), [3, 0], [3, 3]),
    "numpy": lambda: np.stack([A.numpy(), B.numpy()]),
    "numpy float64": lambda: np.stack([A.numpy(), B.numpy()]).astype(np.float64),
    "object": lambda: np.array([A.numpy(), B.numpy(), None], dtype=object)[:2],
    "object block": lambda: np.array([A.numpy(), B.numpy()], dtype=object),
    "bfloat16": lambda: torch.stack([A, B]).bfloat16(),
    "requires_grad": lambda: torch.stack([A, B]).requires_grad_(),
    "nested": lambda: torch.nested.nested_tensor([A, B], layout=torch.jagged),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_form_and_dtype_of_queries(tmp_path, form, dtype):
    corpus = Corpus.create(tmp_path / "store", DIM, dtype)
    documents = fill(corpus, [3, 4, 1])
    assert corpus.search(FORMS[form](), 9) == [ranking(A, documents), ranking(B, documents)]


def test_one_query(corpus):
    documents = fill(corpus, [3, 4, 1])
    assert corpus.search(A, 2) == corpus.search(A.numpy(), 2) == [ranking(A, documents)[:2]]


@pytest.mark.parametrize(
    ("queries", "k", "error", "message"),
    [
        (A, -1, ValueError, "negative"),
        (A, 1.5, TypeError, "^k must be a whole number, got float: 1.5"),
        (A.to("meta"), 1, ValueError, "meta tensor"),
        (A[:, :7], 1, ValueError, "width 8"),
        ([A, A[:, :7]], 1, ValueError, r"queries\[1\].*width 8"),
        (A[0], 1, ValueError, r"\[LQ, D\]"),
        ([A[0]], 1, ValueError, r"\[L, D\]"),
        (A[None, None], 1, ValueError, r"\[LQ, D\]"),
        ([[A]], 1, TypeError, "tensor"),
        (A.int(), 1, TypeError, "floats"),
        ("text", 1, TypeError, "str"),
        (None, 1, TypeError, "NoneType"),
        (A * float("nan"), 1, ValueError, "NaN"),
        (A * 1e6, 1, ValueError, "infinity in the corpus' dtype"),
    ],
    ids=str,
)
def test_bad_queries(tmp_path, queries, k, error, message):
    corpus = Corpus.create(tmp_path / "store", DIM)
    fill(corpus, [2])
    with pytest.raises(error, match=message):
        corpus.search(queries, k)


@pytest.mark.gpu
def test_gpu_store_gives_the_hits_of_the_cpu(corpus):
    documents = fill(corpus, LENGTHS)
    corpus.delete(["d3"])
    del documents["d3"]
    resident = Corpus.open(corpus.path, device="cuda")
    for queries in (A, A.cuda()):
        assert resident.search(queries, 40) == corpus.search(queries, 40) == [ranking(A, documents)]
        assert resident.search(queries, 40, ["d0", "d9"]) == corpus.search(queries, 40, ["d0", "d9"])
    before = torch.cuda.memory_allocated()
    Corpus.open(corpus.path, device="cpu").search(A, 3)
    assert torch.cuda.memory_allocated() == before
    resident.add(["from the GPU"], [A.cuda()])
    assert resident.search(A, 50) == corpus.search(A, 50)
    assert resident.get("from the GPU").embeddings.device.type == "cuda"


def test_copies_are_handles_of_their_own(corpus, tmp_path, monkeypatch):
    fill(corpus, LENGTHS)
    query = document(1, 4)
    monkeypatch.chdir(tmp_path)
    sharded = Corpus.open("store", home="device", shard=(1, 2))
    pickled = pickle.dumps(sharded)
    monkeypatch.chdir(tmp_path.parent)
    for copied in (copy.deepcopy(corpus), pickle.loads(pickled)):
        assert copied.path.samefile(corpus.path)
        corpus.add([f"of {id(copied)}"], [document(2, 3)])
        assert copied.ids() == corpus.ids()
    assert copied.search(query, 9) == sharded.search(query, 9)  # the folder of both, wherever the process is
    assert (copied.home, copied.shard) == ("device", (1, 2))
