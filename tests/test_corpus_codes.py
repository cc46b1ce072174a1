"""A corpus of codes: what is kept, searched and certified, and the tables that codes are decoded by."""

from __future__ import annotations

import pathlib
import zipfile

import numpy as np
import pytest
import torch
from stores import document, fill, ranking

import maxsim
from maxsim.corpus import CorpusError, segments
from maxsim.corpus.segments import CODEBOOK
from maxsim.search import Corpus

DIM = 16
LENGTHS = [3, 0, 1, 17, 2, 40, 0, 7, 1, 4] * 3
CODECS = {
    "int8": {},
    "int8 a token": {"scale": "token"},
    "int8 one scale": {"scale": 0.05},
    "fp8": {},
    "residual": {"bits": 4, "centroids": 8},
    "residual renormalized": {"bits": 2, "renormalize": True},
    "pq": {"parts": 4, "seed": 3},
}
cases = pytest.mark.parametrize("case", CODECS)


def made(path, case, **more):
    return Corpus.create(path, DIM, case.split()[0], **CODECS[case], **more)


def data(seed, lengths=LENGTHS, width=DIM):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, width, generator=generator) for length in lengths]


def found(corpus, queries, k=100):
    return [[(hit.id, hit.score) for hit in hits] for hits in corpus.search(queries, k)]


def expected(queries, documents, k=100):
    best = maxsim.topk(queries, documents, k)
    rows = zip(best.indices.tolist(), best.scores.tolist(), strict=True)
    return [[(i, score) for i, score in zip(*row, strict=True) if i >= 0] for row in rows]


@cases
def test_hits_are_those_of_the_codes(tmp_path, case):
    corpus, documents, queries = made(tmp_path / "store", case), data(1), data(2, [5, 1, 9])
    corpus.add(range(len(documents)), documents)
    coded = maxsim.quantize(documents, case.split()[0], **CODECS[case])
    assert found(corpus, queries) == expected(queries, coded)
    assert found(Corpus.open(corpus.path), queries, 3) == expected(queries, coded, 3)
    got = corpus.get(5).embeddings
    assert torch.equal(got, coded[5].dequantize().tokens)
    assert corpus.get(1).embeddings.shape == (0, DIM)
    assert corpus.dtype == got.dtype == torch.float32
    assert corpus.info().options == CODECS[case]
    assert corpus.check() == []


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_codes_of_a_document(tmp_path, dtype):
    """Ids are those of `get`: what is none is refused alike."""
    corpus, documents = Corpus.create(tmp_path / "store", DIM, dtype), data(1, [3, 0, 2])
    corpus.add([1, "1", 2], documents)
    coded = maxsim.quantize(documents, "int8")
    for id, n in ((1, 0), (np.int64(1), 0), ("1", 1), (2, 2)):
        codes, got = corpus.codes(id), corpus.get(id).embeddings
        assert codes is None if dtype == "float16" else torch.equal(codes.dequantize().tokens, got)
        assert codes is None or torch.equal(codes.codes, coded[n : n + 1].compact().codes)
    for id, error in ((True, TypeError), (1.0, TypeError), ((1,), TypeError), (2**63, ValueError), ("x", KeyError)):
        for ask in (corpus.codes, corpus.get):
            with pytest.raises(error):
                ask(id)


@cases
@pytest.mark.parametrize("exact", ["float16", "float32"])
def test_with_a_float_copy_hits_are_exact(tmp_path, monkeypatch, case, exact):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1500)
    corpus, documents, queries = made(tmp_path / "store", case, exact=exact), data(3), data(4, [6, 2, 0, 1])
    plain = Corpus.create(tmp_path / "plain", DIM, exact)
    for each in (corpus, plain):
        each.add(range(len(documents)), documents)
        assert each.info().segments > 2
        each.delete([3, 29])
    for k in (0, 1, 5, 23, 1000):
        assert found(corpus, queries, k) == found(plain, queries, k)
    assert torch.equal(corpus.get(5).embeddings, documents[5].to(getattr(torch, exact)))
    subset = [0, 2, 4, 5, 15]
    assert corpus.search(queries, 4, subset) == plain.search(queries, 4, subset)
    assert corpus.check() == []


def test_equal_scores_keep_the_order_of_adding(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 300)
    corpus = Corpus.create(tmp_path / "store", 8, "int8", exact="float32")
    documents = fill(corpus, [1 + i % 3 for i in range(60)])
    for query in (document(5, 3), document(6, 1)):
        for k in (1, 7, 60):
            assert corpus.search(query, k) == [ranking(query, documents)[:k]]


def test_few_documents_are_read_exactly(tmp_path, monkeypatch):
    from maxsim.search import scan

    corpus, documents = Corpus.create(tmp_path / "store", 64, "int8", exact="float16"), data(5, [20] * 300, 64)
    corpus.add(range(300), documents)
    read, real = [], scan.pair_scores
    monkeypatch.setattr(scan, "pair_scores", lambda a, pairs, *rest: read.append(len(pairs)) or real(a, pairs, *rest))
    corpus.search(data(6, [8], 64), 3)
    assert 3 <= sum(read) < 60


def test_queries_that_are_too_many_together_go_by_halves(tmp_path, monkeypatch):
    from maxsim import certified

    corpus, documents, queries = made(tmp_path / "store", "pq", exact="float32"), data(7), data(8, [2, 3, 1, 4])
    corpus.add(range(len(documents)), documents)
    whole = found(corpus, queries, 4)
    monkeypatch.setattr(certified, "CANDIDATES", 20)
    assert found(corpus, queries, 4) == whole
    exact = list(documents)
    once = maxsim.certified_topk(queries, maxsim.quantize(documents, "pq", parts=4), exact, 4)
    assert torch.equal(once.indices, maxsim.topk(queries, documents, 4).indices)


@pytest.mark.parametrize("case", ["residual", "pq"])
def test_tables_are_trained_once_and_kept(tmp_path, monkeypatch, case):
    corpus, documents, queries = made(tmp_path / "store", case), data(9), data(10, [5, 3])
    corpus.add(range(20), documents[:20])
    other = Corpus.open(corpus.path)
    tables = maxsim.quantize(documents[:20], case, **CODECS[case])
    other.add(range(20, 30), documents[20:])
    whole = maxsim.quantize(documents, like=tables)
    assert found(corpus, queries) == found(other, queries) == expected(queries, whole)
    names = {path.name for path in (corpus.path / "segments").iterdir()}
    assert names == {CODEBOOK, "00000001.safetensors", "00000002.safetensors"}
    given = Corpus.create(tmp_path / "given", DIM, case, like=tables)
    given.add(range(30), documents)
    assert found(given, queries) == expected(queries, whole)


@pytest.mark.parametrize("case", ["residual", "pq"])
def test_faults_of_tables_are_told(tmp_path, case):
    corpus = made(tmp_path / "store", case)
    with pytest.raises(ValueError, match="NaN"):
        corpus.add([1, 2], [torch.ones(2, DIM), torch.full((1, DIM), float("nan"))])
    with pytest.raises(ValueError, match="have no tokens"):
        corpus.add([1], [torch.empty(0, DIM)])
    assert list((corpus.path / "segments").iterdir()) == []
    corpus.add(range(30), data(11))
    path = corpus.path / "segments" / CODEBOOK
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + b"\x01\x01")
    assert any("checksum" in each and CODEBOOK in each for each in corpus.check())
    path.write_bytes(whole[:-7])
    with pytest.raises(CorpusError, match=f"{CODEBOOK}: .* bytes, expected"):
        Corpus.open(corpus.path)
    path.unlink()
    with pytest.raises(CorpusError, match=f"{CODEBOOK}: missing"):
        Corpus.open(corpus.path)
    assert "missing" in corpus.check()[0]
    maxsim.quantize(data(12, [40], 8), case, **({"parts": 4} if case == "pq" else {})).save(path)
    with pytest.raises(CorpusError, match=f"{CODEBOOK}"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize(
    ("dtype", "options", "error", "message"),
    [
        ("float16", {"exact": "float16"}, ValueError, "exact is for codes, and dtype float16 keeps floats"),
        ("float32", {"bits": 2}, ValueError, "bits is for codes"),
        ("int8", {"bits": 2}, ValueError, "bits"),
        ("int8", {"scale": "row"}, ValueError, "scale must be"),
        ("int8", {"exact": "int8"}, ValueError, "exact must be one of float16, bfloat16, float32, got int8"),
        ("residual", {"bits": 3}, ValueError, "bits must be one of"),
        ("pq", {"parts": 5}, ValueError, "width 16 cannot be cut in 5"),
        ("float8", {}, ValueError, "dtype must be one of .*fp8"),
        ("pq", {"like": "x"}, TypeError, "like must be Quantized, got str"),
        ("pq", {"like": maxsim.quantize(torch.ones(1, 3, 8), "pq", parts=4)}, ValueError, "width 8, the corpus pq"),
        ("int8", {"like": maxsim.quantize(torch.ones(1, 3, 16))}, ValueError, "int8 has none"),
    ],
)
def test_options_that_fit_nothing_are_refused(tmp_path, dtype, options, error, message):
    with pytest.raises(error, match=message):
        Corpus.create(tmp_path / "store", DIM, dtype, **options)
    assert not (tmp_path / "store").exists()


def test_torch_dtypes_name_codes(tmp_path):
    assert Corpus.create(tmp_path / "a", DIM, torch.int8).info().dtype == "int8"
    assert Corpus.create(tmp_path / "b", DIM, torch.float8_e4m3fn, exact=torch.bfloat16).info().exact == "bfloat16"


def test_positions_of_what_is_not_finite(tmp_path):
    corpus = Corpus.create(tmp_path / "store", DIM, "int8", exact="float16")
    wrong = torch.zeros(3, DIM)
    wrong[2, 5] = 1e6
    with pytest.raises(ValueError, match=r"'b' holds NaN or infinity in float16, at token 2, column 5; nothing"):
        corpus.add(["a", "b"], [torch.ones(2, DIM), wrong])


def old(tmp_path):
    with zipfile.ZipFile(pathlib.Path(__file__).parent / "corpus_format_1.zip") as file:
        file.extractall(tmp_path)
    return Corpus.open(tmp_path / "store")


def test_a_corpus_of_format_1_opens_and_changes(tmp_path):
    corpus = old(tmp_path)
    documents = {"a": document(1, 3), 3: document(3, 2), "empty": document(4, 0), 4: document(5, 2)}
    query = document(9, 2)
    assert corpus.search(query, 9) == [ranking(query, documents)]
    assert corpus.ids() == list(documents)
    assert corpus.info().format == 1
    assert corpus.info().cut == 1
    assert corpus.check() == []
    reader = old(tmp_path)
    corpus.add(["new"], [document(6, 5)])
    documents["new"] = document(6, 5)
    assert corpus.search(query, 9) == reader.search(query, 9) == [ranking(query, documents)]
    assert corpus.info().format == 3
    assert corpus.check() == []
    assert corpus.get("a").metadata == {"n": 1}
