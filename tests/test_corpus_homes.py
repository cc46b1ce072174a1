"""Where tokens live changes no hit: mapped, resident, streamed through two buffers; and memory stays bounded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from stores import document, fill, ranking
from test_corpus_codes import CODECS, DIM, data, found, made

from maxsim import Packed
from maxsim.corpus import gathering, segments
from maxsim.search import Corpus, homes, placing
from maxsim.search.streaming import Streamed

CPU = torch.device("cpu")


def placed(corpus, home):
    """The corpus with its tokens in another home, all of which run on the CPU."""
    again = Corpus.open(corpus.path, home="device" if home == "device" else None)
    if home in ("pinned", "streamed"):
        again.place = Streamed(CPU, (0, 1), home == "pinned")
    return again


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1500)
    monkeypatch.setattr(gathering, "GATHER_BYTES", 600)
    monkeypatch.setattr(homes, "GROUP_BYTES", 4000)


@pytest.mark.parametrize("home", ["device", "pinned", "streamed"])
@pytest.mark.parametrize("exact", [None, "float16"])
@pytest.mark.parametrize("case", ["float16", *CODECS])
def test_every_home_gives_the_same_hits(tmp_path, case, exact, home):
    if case == "float16":
        corpus = Corpus.create(tmp_path / "store", DIM)
    else:
        corpus = made(tmp_path / "store", case, exact=exact)
    documents, queries = data(1), data(2, [5, 1, 0, 9])
    corpus.add(range(len(documents)), documents)
    other = placed(corpus, home)
    ids = [4, 0, 17, 5, 1]

    def same():
        assert found(other, queries) == found(corpus, queries)
        assert found(other, queries, 2) == found(corpus, queries, 2)
        assert other.search(queries, 3, ids) == corpus.search(queries, 3, ids)
        assert other.rerank(queries, ids) == corpus.rerank(queries, ids)

    same()
    corpus.delete([3, 29, 8])
    same()
    corpus.add(["x", "y"], data(3, [4, 6]))
    same()
    corpus.compact()
    same()
    corpus.delete([2, 7])
    ids.remove(17)
    same()


@pytest.mark.parametrize("home", ["mapped", "device", "pinned", "streamed"])
@pytest.mark.parametrize("case", ["float16", "int8", "int8 a token", "residual renormalized"])
def test_whole_segments_are_consecutive_documents(tmp_path, case, home):
    """Which some kernels need; rows of a segment with deleted documents stand apart from its neighbours."""
    corpus = Corpus.create(tmp_path / "store", DIM) if case == "float16" else made(tmp_path / "store", case)
    documents, queries = data(1), data(2, [5, 1])
    corpus.add(range(len(documents)), documents)
    other = placed(corpus, home)

    def forms():
        blocks = list(other.place.blocks(other.select()))
        for block in blocks:
            beside = block.documents.parameters.tensors() if case != "float16" else {}
            assert all(each.data_ptr() % 16 == 0 for each in beside.values() if each.ndim == 1) or home == "mapped"
        kinds = [getattr(b.documents, "consecutive", isinstance(b.documents, Packed)) for b in blocks]
        assert torch.equal(torch.cat([block.positions for block in blocks]), torch.tensor(sorted(other.ids())))
        assert found(other, queries) == found(corpus, queries)
        return kinds

    assert corpus.info().segments > 3
    assert all(forms())
    inner = [segment.record for segment, _ in corpus.select().parts[1:-1]]
    middle = max(inner, key=lambda record: record.documents)
    corpus.delete([middle.first])
    split = forms()
    assert split.count(False) == 1 and split.count(True) >= 2
    assert forms() == split  # as they were kept
    corpus.delete(range(middle.first + 1, middle.last + 1))
    assert all(forms())
    corpus.delete([s.record.last for s, rows in corpus.select().parts if rows is None and s.record.documents > 1])
    assert True not in forms() or case != "float16"


def test_segments_that_stay_are_not_loaded_again(tmp_path):
    corpus = Corpus.create(tmp_path / "store", 8)
    fill(corpus, [9] * 60)
    other = Corpus.open(corpus.path, home="device")
    before = other.place.load(other.select())
    assert len(before) > 1
    documents = fill(corpus, [4, 4], "new")
    after = other.place.load(other.select())
    assert [a is b for a, b in zip(before, after, strict=False)] == [True] * len(before)
    assert len(after) == len(before) + 1
    corpus.delete(["new0", "d59"])
    assert [a is b for a, b in zip(after, other.place.load(other.select()), strict=True)] == [True] * len(after)
    assert {hit.id for hit in other.search(document(1, 1), 99)[0]} >= {"new1", "d58"} and documents


def test_shards_together_are_the_whole(tmp_path):
    corpus = Corpus.create(tmp_path / "store", 8)
    documents, query = fill(corpus, [3, 1, 9, 4, 0, 7] * 20), document(3, 2)
    corpus.delete(["d3"])
    del documents["d3"]
    for home in (None, "device"):
        shards = [Corpus.open(corpus.path, home=home, shard=(rank, 3)) for rank in range(3)]
        hits = [shard.search(query, 999)[0] for shard in shards]
        assert min(map(len, hits)) > 10
        assert {hit.id: hit.score for each in hits for hit in each} == dict(ranking(query, documents))
        assert sum(map(len, hits)) == len(ranking(query, documents))
        assert shards[1].rerank(query, list(documents)) == [ranking(query, documents)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"home": "attic"}, "home must be one of 'device', 'pinned', 'mapped', got 'attic'"),
        ({"home": "pinned"}, 'home "pinned" is for a GPU'),
        ({"shard": (2, 2)}, r"shard must be \(rank, size\) with 0 <= rank < size, got \(2, 2\)"),
        ({"shard": 1}, "shard must be"),
    ],
)
def test_homes_that_are_not_there(tmp_path, options, message):
    Corpus.create(tmp_path / "store", 8)
    with pytest.raises(ValueError, match=message):
        Corpus.open(tmp_path / "store", **options)


def test_a_home_is_chosen_by_size(tmp_path, monkeypatch):
    corpus = Corpus.create(tmp_path / "store", 8, "int8", exact="float16")
    fill(corpus, [10] * 100)
    snapshot = corpus.select().snapshot
    size = placing.bytes_of(snapshot, corpus.place)
    assert 8 * 1000 <= size <= 8 * 1000 + 100 * 40  # without the copy
    assert Corpus.open(corpus.path).home == "mapped"
    assert Corpus.open(corpus.path, home="device").home == "device"
    gpu = torch.device("cuda")
    for free, available, home in ((2 * size, 0, "device"), (size, 2 * size, "pinned"), (size, size, "mapped")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        monkeypatch.setattr(placing, "_available", lambda available=available: available)
        assert placing._first_with_room(gpu, (0, 1), snapshot) == home


def test_a_stream_that_is_left_early_ends(tmp_path):
    corpus = Corpus.create(tmp_path / "store", 8)
    fill(corpus, [9] * 60)
    for pinned in (False, True):
        blocks = Streamed(CPU, (0, 1), pinned).blocks(corpus.select())
        assert len(next(blocks).positions)
        blocks.close()


def test_what_is_dropped_gives_its_memory_back(tmp_path):
    corpus = made(tmp_path / "store", "int8")
    documents, queries = data(1), data(2, [5, 1])
    corpus.add(range(len(documents)), documents)
    there = placed(corpus, "device")
    corpus.delete([0])
    assert found(there, queries) == found(corpus, queries)
    assert there.place._runs
    corpus.compact()
    assert found(there, queries) == found(corpus, queries)
    present = {number for group in there.place._groups for number in group.firsts}
    assert {n for _, runs in there.place._runs.values() for run in runs for n in run.group.firsts} <= present


RSS = (
    "import sys, torch, maxsim\nfrom maxsim.search import Corpus\ntorch.set_num_threads(1)\n"
    "def anonymous(): return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kept", [{}, {"dtype": "int8", "exact": "float16"}], ids=["float16", "int8"])
def test_a_corpus_larger_than_memory(tmp_path, environment, monkeypatch, kept):
    """600 MB of files are searched, reranked and read with a fiftieth of that: the rest are pages of the files, which
    the system takes back as it likes."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 24 << 20)
    corpus = Corpus.create(tmp_path / "store", 128, **kept)
    generator = torch.Generator().manual_seed(1)
    block = torch.randn(500, 300, 128, generator=generator).half()
    for i in range(16 if not kept else 10):
        corpus.add(range(500 * i, 500 * i + 500), block)
    code = RSS + (
        "c = Corpus.open(sys.argv[1]); q = torch.randn(2, 8, 128)\n"
        "c.search(q, 3, [0]); before = anonymous(); peak = 0\n"
        "for _ in range(2):\n"
        "    c.search(q, 10); c.rerank(q, range(0, 4000, 7)); c.get(9); peak = max(peak, anonymous() - before)\n"
        "assert c.info().bytes > 550_000_000 and peak < 60_000, peak\n"
    )
    subprocess.run([sys.executable, "-c", code, corpus.path], env=environment, check=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_scores_are_never_held_whole(tmp_path, environment, monkeypatch):
    """512 queries with 200,000 documents: 410 MB of scores."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 20)
    corpus = Corpus.create(tmp_path / "store", 8)
    corpus.add(range(200_000), torch.ones(200_000, 1, 8, dtype=torch.float16))
    code = RSS + (
        "c = Corpus.open(sys.argv[1]); q = torch.randn(512, 1, 8)\n"
        "c.search(q, 3, [0]); before = anonymous()\n"
        "import threading, time; peak = 0\n"
        "def watch():\n"
        "    global peak\n"
        "    while watching: peak = max(peak, anonymous() - before); time.sleep(0.005)\n"
        "watching = True; thread = threading.Thread(target=watch); thread.start()\n"
        "hits = c.search(q, 5); watching = False; thread.join()\n"
        "assert [h.id for h in hits[7]] == [0, 1, 2, 3, 4] and peak < 150_000, peak\n"
    )
    subprocess.run([sys.executable, "-c", code, corpus.path], env=environment, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["device", "pinned", "mapped"])
@pytest.mark.parametrize("kept", [{}, {"dtype": "int8", "exact": "float16"}], ids=["float16", "int8"])
def test_homes_of_a_gpu(tmp_path, monkeypatch, kept, home):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 8_000)
    corpus = Corpus.create(tmp_path / "store", 8, **kept)
    documents = fill(corpus, [3, 0, 1, 50, 2, 20, 0, 7, 1, 40] * 40)
    there = Corpus.open(corpus.path, "cuda", home)
    assert (there.home, corpus.info().segments > 4) == (home, True)
    queries = [document(i, 1 + i % 40) for i in range(9)]
    for gone in ([], ["d0", "d7", "d399"]):
        corpus.delete(gone)
        documents = {id: tokens for id, tokens in documents.items() if id not in gone}
        wanted = [ranking(query, documents) for query in queries]
        for k in (1, 10, 1000):
            assert there.search(queries, k) == [hits[:k] for hits in wanted]
        ids = [id for id in documents if id.endswith("3")]
        some = [ranking(query, {id: documents[id] for id in ids}) for query in queries]
        assert there.rerank(queries, ids) == there.search(queries, 99, ids) == some
    documents |= fill(corpus, [5, 6], "new")
    corpus.compact()
    assert there.search(queries, 7) == [ranking(query, documents)[:7] for query in queries]
    assert there.home == home


@pytest.mark.gpu
def test_a_gpu_without_room_takes_another_home(tmp_path, monkeypatch):
    corpus = Corpus.create(tmp_path / "store", 8)
    fill(corpus, [5] * 50)
    assert Corpus.open(corpus.path, "cuda").home == "device"
    monkeypatch.setattr(placing, "OF_DEVICE", 0.0)
    assert Corpus.open(corpus.path, "cuda").home == "pinned"
    monkeypatch.setattr(placing, "OF_HOST", 0.0)
    assert Corpus.open(corpus.path, "cuda").home == "mapped"
