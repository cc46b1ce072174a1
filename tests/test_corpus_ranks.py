"""One search by several processes: the hits of one process, and failures that reach every rank. Functions named `on_*`
run on the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from stores import document, fill, ranking

from maxsim.corpus import segments
from maxsim.search import Corpus, ranks, together

DIM = 8


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    group = Ranks(4)
    yield group
    group.close()


@pytest.fixture(params=[{}, {"dtype": "int8", "exact": "float32"}, {"dtype": "int8"}], ids=["float16", "exact", "int8"])
def corpus(request, tmp_path, monkeypatch):
    """Many segments; equal scores on both ranks."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 200)
    corpus = Corpus.create(tmp_path / "store", DIM, **request.param)
    fill(corpus, [3, 1, 9, 4, 0, 7] * 8)
    corpus.delete(["d3", "d11"])
    corpus.update(["d5", "d6"], metadata=[{"lang": "de"}, {"lang": "en"}])
    return corpus


def shard(path, **more):
    return Corpus.open(path, shard=(dist.get_rank(), dist.get_world_size()), **more)


def on_search(path, queries, k, more, home):
    """Hits, and how long it took."""
    start = time.monotonic()
    try:
        hits = [[tuple(hit) for hit in hits] for hits in together(shard(path, home=home), queries, k, **more)]
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return hits, time.monotonic() - start


QUERIES = [document(1, 3), document(2, 1), torch.empty(0, DIM), document(3, 5)]


@pytest.mark.parametrize("home", [None, "device"])
def test_the_hits_of_one_process(four, corpus, home):
    cases = [(QUERIES, k, {}) for k in (0, 1, 7, 10**9)]
    cases += [(QUERIES, 5, {"subset": ["d1", "d5", "d20", "d47"]}), (QUERIES, 5, {"filter": {"lang": ["de", "en"]}})]
    cases += [([], 3, {}), (QUERIES, 3, {"subset": []})]
    for queries, k, more in cases:
        alone = [[tuple(hit) for hit in hits] for hits in corpus.search(queries, k, **more)]
        for hits, _ in four.run(on_search, corpus.path, queries, k, more, home):
            assert hits == alone


@pytest.mark.parametrize("kept", [{}, {"dtype": "int8", "exact": "float16"}], ids=["floats", "codes"])
def test_one_segment_and_none(four, tmp_path, kept):
    corpus = Corpus.create(tmp_path / "store", DIM, **kept)
    assert [hits for hits, _ in four.run(on_search, corpus.path, QUERIES, 5, {}, None)] == [[[], [], [], []]] * 4
    documents = fill(corpus, [2, 3])
    wanted = [[tuple(hit) for hit in ranking(query, documents)[:5]] for query in QUERIES]
    assert [hits for hits, _ in four.run(on_search, corpus.path, QUERIES, 5, {}, None)] == [wanted] * 4


def on_fault(path, fault):
    """Rank 1 meets a fault that rank 0 does not."""
    if dist.get_rank() == 1 and fault == "scoring":
        real = ranks.winners

        def failing(*args):
            raise MemoryError("no room on rank 1")

        ranks.winners = failing
        try:
            return on_search(path, QUERIES, 3, {}, None)
        finally:
            ranks.winners = real
    queries, k, more = QUERIES, 3, {}
    if dist.get_rank() == 1:
        queries = [QUERIES[0] * float("nan")] if fault == "NaN" else queries
        queries = QUERIES[::-1] if fault == "other queries" else queries
        k = 4 if fault == "k" else k
        more = {"subset": ["nobody"]} if fault == "subset" else more
        more = {"subset": ["d1"]} if fault == "other subset" else more
    return on_search(path, queries, k, more, None)


FAULTS = {
    "scoring": "MemoryError: no room on rank 1",
    "NaN": "ValueError: queries hold NaN",
    "subset": "nobody",
    "k": "ranks do not ask the same",
    "other queries": "ranks do not ask the same",
    "other subset": "ranks search other documents, numbers by rank",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_reaches_every_rank_within_seconds(four, corpus, fault):
    found = four.run(on_fault, corpus.path, fault)
    for message, seconds in found:
        assert FAULTS[fault] in message
        assert seconds < 10
    if fault in ("scoring", "NaN", "subset"):
        assert found[0][0].startswith("RankError: maxsim.distributed: rank 1 of 4 failed: ")
    assert four.run(on_search, corpus.path, QUERIES, 3, {}, None)[0][0] == [
        [tuple(hit) for hit in hits] for hits in corpus.search(QUERIES, 3)
    ]


def on_wrong_shard(path):
    try:
        together(Corpus.open(path), QUERIES, 1)
    except Exception as error:
        return str(error)
    return "nothing"


def test_a_corpus_without_its_shard_is_refused(four, corpus):
    for message in four.run(on_wrong_shard, corpus.path):
        assert "corpus has the shard (0, 1), expected (" in message and ", 4) on this rank" in message


def on_change(path):
    """Rank 0 compacts and deletes after rank 1 has chosen what to search."""
    corpus = shard(path)
    real = Corpus.ids_at
    calls = []

    def late(self, positions):
        calls.append(1)
        if dist.get_rank() == 0 and len(calls) == 1:
            other = Corpus.open(path)
            other.delete(["d0", "d2"])
            other.compact()
        dist.barrier()
        return real(self, positions)

    Corpus.ids_at = late
    try:
        return [[hit.id for hit in hits] for hits in together(corpus, QUERIES, 99)], len(calls)
    finally:
        Corpus.ids_at = real


def test_a_corpus_that_changes_meanwhile_is_searched_again(four, corpus):
    found = four.run(on_change, corpus.path)
    after = [[hit.id for hit in hits] for hits in corpus.search(QUERIES, 99)]
    assert [hits for hits, _ in found] == [after] * 4
    assert [calls for _, calls in found] == [2] * 4
    assert "d0" not in after[0]


def on_death(path, midway):
    """Rank 1 dies before the search, or while it scores."""
    corpus = shard(path)
    if dist.get_rank() == 1 and not midway:
        os._exit(1)
    if dist.get_rank() == 1:
        ranks.winners = lambda *_: os._exit(1)
    start = time.monotonic()
    try:
        together(corpus, QUERIES, 3)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return None


@pytest.mark.slow
@pytest.mark.parametrize("midway", [False, True])
def test_a_rank_that_dies_is_noticed_within_seconds(tmp_path, midway):
    corpus = Corpus.create(tmp_path / "store", DIM)
    fill(corpus, [2, 3])
    group = Ranks(4)
    try:
        found = group.run(on_death, corpus.path, midway, dead=(1,))
        for message, seconds in (found[0], found[2], found[3]):
            assert seconds < 10
            assert message.startswith("RankError: maxsim.distributed: another rank has ended, or cannot be reached: ")
    finally:
        group.close()


def torchrun(*arguments, environment, program=("fakes.py", "0"), size=4):
    name, *more = program
    what = [str(Path(__file__).parent / name)] if name.endswith(".py") else ["-m", name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *what]
    command += [*more, *map(str, arguments)]
    return subprocess.run(command, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A corpus of five texts in many segments."""
    from fakes import DIM, WordEncoder

    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64)
    texts = ["the cat sat", "a dog ran far", "red green blue", "the dog sat", "sat"]
    corpus = Corpus.create(tmp_path / "store", DIM, encoder="minilm")
    corpus.add(range(5), WordEncoder().documents(texts), texts=texts)
    assert corpus.info().segments > 3
    return corpus, texts


def test_torchrun(words, environment):
    from fakes import WordEncoder

    corpus, texts = words
    (alone,) = corpus.search(WordEncoder().queries(["dog sat"]), 3)
    done = torchrun("search", corpus.path, "dog sat", "-k", "3", "--json", "--device", "cpu", environment=environment)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)  # one rank's
    assert [(hit["id"], hit["score"], hit["text"]) for hit in found["hits"]] == [
        (hit.id, hit.score, texts[hit.id]) for hit in alone
    ]


@pytest.mark.slow
def test_torchrun_ends_with_the_reason(tmp_path, environment):
    start = time.monotonic()
    arguments = ["search", tmp_path / "none", "dog", "--device", "cpu"]
    done = torchrun(*arguments, program=("maxsim",), environment=environment)
    assert (done.returncode, done.stdout) == (1, "")
    report = done.stderr[done.stderr.index("Root Cause") :]  # of the rank that was first
    assert "none is not a corpus: there is no such folder" in report
    assert "traceback : maxsim: " in report
    assert time.monotonic() - start < 60


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_torchrun_of_which_a_process_is_killed(words, environment, tmp_path):
    corpus, _ = words
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from fakes import WordEncoder\n"
        "from maxsim import cli, encode\n"
        "from maxsim.search import ranks\n"
        "encode.load = lambda name='minilm', device=None: WordEncoder(name)\n"
        "if os.environ['RANK'] == '2': ranks.winners = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cli.main()\n"
    )
    start = time.monotonic()
    arguments = ["search", corpus.path, "dog", "--device", "cpu"]
    done = torchrun(*arguments, program=(str(script),), environment=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "SIGKILL" in done.stderr[done.stderr.index("Root Cause") :]
    assert time.monotonic() - start < 60


def on_iterators(path):
    corpus = shard(path)
    return [[hit.id for hit in hits] for hits in together(corpus, iter(QUERIES), 9, (id for id in ["d1", "d5"]))]


def test_iterators_are_read_once(four, corpus):
    wanted = [[hit.id for hit in hits] for hits in corpus.search(QUERIES, 9, ["d1", "d5"])]
    assert four.run(on_iterators, corpus.path) == [wanted] * 4


def opened_by(action):
    """The names of the segments that are opened meanwhile, and what `action` gives."""
    names, real = [], segments.safe_open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "safe_open", lambda path, **more: names.append(path.name) or real(path, **more))
        return names, action()


def own(corpus, rank, size=4):
    """The names of a rank's segments."""
    numbers = [segment.record.number for segment in corpus.select().snapshot.segments]
    return sorted(f"{number:08d}.safetensors" for number in numbers if number % size == rank)


def on_opened(path, home, more):
    def action():
        corpus = shard(path, home=home)
        together(corpus, QUERIES, 10**9)
        for each in more:
            together(corpus, QUERIES, 5, **each)
        if dist.get_rank() == 0:
            corpus.add(["new0", "new1", "new2", "new3", "new4"], [document(n, 40) for n in range(5)])
        dist.barrier()
        together(corpus, QUERIES, 3)

    return opened_by(action)[0]


@pytest.mark.parametrize("home", ["mapped", "device"])
def test_a_rank_opens_its_own_segments_alone(four, corpus, home, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 500)
    corpus.compact()
    corpus.delete(["d12", "d30"])
    assert any(segment.positions is not None for segment in corpus.select().snapshot.segments)  # some have gaps
    more = [{"subset": ["d1", "d5", "d20", "d47"]}, {"filter": {"lang": ["de", "en"]}}]
    for rank, names in enumerate(four.run(on_opened, corpus.path, home, more)):
        assert sorted(names) == own(corpus, rank) and names


def test_segments_of_others_are_opened_where_their_documents_are_asked_for(corpus):
    names, rank = opened_by(lambda: Corpus.open(corpus.path, shard=(1, 4)))
    assert sorted(names) == own(corpus, 1)
    first = {corpus.locate([id])[0].parts[0][0].record.file: id for id in reversed(corpus.ids())}
    others = [name for name in first if name not in names][:3]
    ids = [first[name] for name in others]
    names, kept = opened_by(lambda: rank.get(ids[0]))
    assert names == others[:1] and torch.equal(kept.embeddings, corpus.get(ids[0]).embeddings)
    names, hits = opened_by(lambda: rank.rerank(QUERIES, ids[:2]))
    assert names == others[1:2] and hits == corpus.rerank(QUERIES, ids[:2])
    names, _ = opened_by(lambda: (rank.info(), rank.ids(), rank.delete([ids[2]]), len(rank)))
    assert names == []
    names, _ = opened_by(lambda: rank.export(corpus.path.parent / "out.npz"))
    assert len(names) == corpus.info().segments - len(own(corpus, 1)) - 2
    assert Corpus.open(corpus.path).check() == []
