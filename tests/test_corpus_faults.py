"""The store under faults: damaged files, crashes at every step, kill -9, and a random life against a dictionary."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from stores import document, fill, ranking

from maxsim.corpus import CorpusError, catalogue, rows, segments
from maxsim.search import Corpus

DIM = 8


@pytest.fixture
def corpus(tmp_path):
    corpus = Corpus.create(tmp_path / "store", DIM)
    fill(corpus, [2, 3], "a")
    fill(corpus, [1, 4], "b")
    return corpus


def last_segment(corpus):
    return max((corpus.path / "segments").iterdir())


def statement(corpus, sql):
    with sqlite3.connect(corpus.path / catalogue.FILE) as db:
        db.execute(sql)
    db.close()


def rewrite(corpus, **changes):
    """Another segment of the same size in the place of the last one."""
    path = last_segment(corpus)
    save_file({**load_file(path), **changes}, path)


def cut(path, by):
    with open(path, "rb+") as file:
        file.truncate(path.stat().st_size - by)


def overwrite(path, at, data):
    with open(path, "rb+") as file:
        file.seek(at)
        file.write(data)


FAULTS = {
    "segment cut": (lambda c: cut(last_segment(c), 7), r"00000002.*\d+ bytes, expected \d+"),
    "segment longer": (lambda c: overwrite(last_segment(c), 5000, b"x"), r"00000002.*5001 bytes, expected"),
    "segment empty": (lambda c: cut(last_segment(c), last_segment(c).stat().st_size), "00000002.* 0 bytes, expected"),
    "segment missing": (lambda c: last_segment(c).unlink(), r"00000002.*missing, expected \d+ bytes"),
    "segment header": (lambda c: overwrite(last_segment(c), 0, b"\xff" * 8), "00000002.*safetensors"),
    "segment is no safetensors": (lambda c: overwrite(last_segment(c), 8, b"junk"), "00000002.*safetensors"),
    "offsets fall": (lambda c: rewrite(c, offsets=torch.tensor([0, 6, 5])), "00000002.*fall from 6 to 5 at document 1"),
    "offsets end late": (
        lambda c: rewrite(c, offsets=torch.tensor([0, 1, 9])),
        "00000002.*from 0 to 9, expected 0 to 5",
    ),
    "offsets start late": (lambda c: rewrite(c, offsets=torch.tensor([1, 2, 5])), "00000002.*from 1 to 5"),
    "dtype": (lambda c: rewrite(c, tokens=torch.ones(5, DIM).bfloat16()), "00000002.*expects torch.float16"),
    "width": (lambda c: rewrite(c, tokens=torch.ones(DIM, 5).half()), r"00000002.*\[8, 5\], the catalogue expects"),
    "names": (lambda c: rewrite(c, offsetz=torch.tensor([0])), r"00000002"),
    "catalogue cut": (lambda c: cut(c.path / catalogue.FILE, 7), r"catalogue\.sqlite: \d+ bytes, expected \d+"),
    "catalogue halved": (lambda c: cut(c.path / catalogue.FILE, 8192), r"catalogue\.sqlite: \d+ bytes: "),
    "catalogue is no SQLite": (lambda c: overwrite(c.path / catalogue.FILE, 0, b"x" * 100), "not a database"),
    "catalogue of another program": (
        lambda c: statement(c, "PRAGMA application_id = 7"),
        "not the catalogue of a corpus",
    ),
    "newer format": (lambda c: statement(c, "PRAGMA user_version = 99"), "format 99.*reads up to 3; upgrade"),
    "settings": (
        lambda c: statement(c, "UPDATE corpus SET dtype = 'int3'"),
        "its settings or its list of segments have",
    ),
    "settings gone": (lambda c: statement(c, "DELETE FROM corpus"), "its settings or its list of segments have"),
    "segments changed": (
        lambda c: statement(c, "UPDATE segments SET first = first + 1"),
        "list of segments have changed",
    ),
    "tables changed": (lambda c: statement(c, "DROP TABLE cut"), "list of segments have changed"),
    "older format": (
        lambda c: statement(c, "PRAGMA user_version = 2"),
        "says that it has format 2, and has the tables",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_told_before_any_scoring(corpus, fault):
    damage, message = FAULTS[fault]
    damage(corpus)
    with pytest.raises(CorpusError, match=message):
        Corpus.open(corpus.path)


def test_missing_corpus(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a corpus"):
        Corpus.open(tmp_path / "none")


def test_check_finds_a_changed_byte(corpus):
    assert corpus.check() == []
    path = last_segment(corpus)
    overwrite(path, path.stat().st_size - 3, b"\x11")
    assert "checksum" in Corpus.open(corpus.path).check()[0]
    path.unlink()
    assert "missing" in corpus.check()[0]


NO_SPACE = OSError(28, "No space left on device")
STEPS = {  # where it fails, and what is raised there when the disk is full
    "save": (segments, "save_file", SafetensorError("No space left on device")),
    "fsync": (os, "fsync", NO_SPACE),
    "rename": (os, "replace", NO_SPACE),
    "hash": (segments, "sha256", NO_SPACE),
    "folder": (segments, "sync_folder", NO_SPACE),
    "document row": (rows, "insert_document", sqlite3.OperationalError("database or disk is full")),
    "segment row": (rows, "insert_segment", sqlite3.OperationalError("database or disk is full")),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("full", [True, False], ids=["full", "ctrl-c"])
def test_failure_at_any_step_changes_nothing(corpus, monkeypatch, step, count, full):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 16)
    owner, name, error = STEPS[step]
    real, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            raise error if full else KeyboardInterrupt
        return real(*args, **kwargs)

    before = corpus.ids()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(CorpusError if full else KeyboardInterrupt, match="full|No space" if full else None):
            corpus.add([1, "a0", 3], [document(i, 2) for i in range(3)], replace=True)
    assert Corpus.open(corpus.path).ids() == before
    assert Corpus.open(corpus.path).texts(["a0"]) == {"a0": "text of a0"}
    assert len(list((corpus.path / "segments").iterdir())) == 2
    assert Corpus.open(corpus.path).check() == []
    corpus.add([1, 2, 3], [document(i, 2) for i in range(3)])
    assert corpus.ids() == [*before, 1, 2, 3]
    assert len(list((corpus.path / "segments").iterdir())) == 5


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX limits")
def test_full_disk(corpus, environment):
    code = (
        "import resource, sys, torch, maxsim.corpus, maxsim.search as s\n"
        "c = s.Corpus.open(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))\n"
        "try: c.add([1], [torch.ones(1 << 18, 8)])\n"
        "except maxsim.corpus.CorpusError as e: print(e)"
    )
    command = [sys.executable, "-c", code, corpus.path]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "00000003.safetensors.tmp: cannot be written: " in result.stdout, result.stderr
    assert len(list((corpus.path / "segments").iterdir())) == 2
    assert Corpus.open(corpus.path).check() == []


def test_interrupt_after_the_commit_keeps_the_files(corpus, monkeypatch):
    real = catalogue.Catalogue.writing

    class Late:
        def __init__(self, inner):
            self.inner = inner

        def __enter__(self):
            return self.inner.__enter__()

        def __exit__(self, *error):
            self.inner.__exit__(*error)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(catalogue.Catalogue, "writing", lambda self: Late(real(self)))
        with pytest.raises(KeyboardInterrupt):
            corpus.add(["late"], [document(1, 2)])
    assert "late" in Corpus.open(corpus.path).ids()


# Each line on its standard input starts a writer that numbers its batches from there; says the writer's process id.
WRITERS = """
import os, sys, torch
from maxsim.corpus import segments
from maxsim.search import Corpus
torch.set_num_threads(1)
segments.SEGMENT_BYTES = 2000
corpus, pid = Corpus.open(sys.argv[1]), 0
for line in sys.stdin:
    if pid:
        os.waitpid(pid, 0)
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    i = int(line)
    while True:
        vectors = [torch.full((j % 5, 8), float(j % 7)) for j in range(50)]
        corpus.add([f"{i}.{j}" for j in range(50)], vectors, texts=["x" * 500] * 50)
        if i % 3 == 0:
            corpus.delete([f"{i}.{j}" for j in range(0, 50, 2)])
        if i % 4 == 0:
            corpus.compact()
        i += 1
"""


def kill_rounds(path, environment, rounds, seed):
    """A writer killed at random moments; a reader lives through all of it. Every change is whole or absent."""
    corpus, rng = Corpus.create(path, DIM), random.Random(seed)
    command = [sys.executable, "-c", WRITERS, path]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        for number in range(rounds):
            nursery.stdin.write(f"{number * 100000}\n")
            nursery.stdin.flush()
            writer = int(nursery.stdout.readline())
            end = time.monotonic() + rng.uniform(0, 0.2)
            while time.monotonic() < end:
                corpus.search(document(1, 2), 5)
            os.kill(writer, signal.SIGKILL)
            corpus.search(document(1, 2), 5)
            again = Corpus.open(path)
            assert again.check() == []
            batches = Counter(int(id.split(".")[0]) for id in again.ids())
            assert all(count == 50 or (count == 25 and batch % 3 == 0) for batch, count in batches.items())
        nursery.stdin.close()
    corpus.add(["last"], [document(1, 2)])
    assert len(list((corpus.path / "segments").iterdir())) == corpus.info().segments
    return len(corpus)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_kill_9_at_any_moment(tmp_path, environment):
    assert kill_rounds(tmp_path / "store", environment, 10, seed=1) > 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_kill_9_fifty_times(tmp_path, environment):
    assert kill_rounds(tmp_path / "store", environment, 50, seed=2) > 1


class Life(RuleBasedStateMachine):
    """Any order of adding, changing, deleting, compacting, reopening and searching, against a dictionary."""

    @initialize(size=st.sampled_from([16, 100, 1 << 20]), codec=st.sampled_from([None, "int8", "fp8"]))
    def begin(self, size, codec):
        self.folder = tempfile.mkdtemp()
        segments.SEGMENT_BYTES = size
        kept = {} if codec is None else {"dtype": codec, "exact": "float16"}
        self.corpus = Corpus.create(os.path.join(self.folder, "store"), DIM, **kept)
        self.other = Corpus.open(self.corpus.path)
        self.model = {}
        self.seed = 0

    @rule(ids=st.lists(st.integers(0, 12) | st.sampled_from("abü"), max_size=5, unique=True), data=st.data())
    def add(self, ids, data):
        new = {}
        for id in ids:
            self.seed += 1
            new[id] = document(self.seed, data.draw(st.integers(0, 4)))
        replace = data.draw(st.booleans())
        if new.keys() & self.model.keys() and not replace:
            with pytest.raises(ValueError, match="already"):
                self.corpus.add(list(new), list(new.values()))
        else:
            self.corpus.add(list(new), list(new.values()), replace=replace)
            self.model = {id: tokens for id, tokens in self.model.items() if id not in new} | new

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data):
        ids = data.draw(st.lists(st.sampled_from(list(self.model)), max_size=3, unique=True))
        self.other.delete(ids)
        for id in ids:
            del self.model[id]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), embeddings=st.booleans())
    def update(self, data, embeddings):
        id = data.draw(st.sampled_from(list(self.model)))
        self.seed += 1
        if embeddings:
            del self.model[id]
            self.model[id] = document(self.seed, data.draw(st.integers(0, 4)))
        self.other.update([id], [self.model[id]] if embeddings else None, texts=[f"text {self.seed}"])
        assert self.corpus.get(id).text == f"text {self.seed}"

    @rule()
    def compact(self):
        self.corpus.compact()
        assert self.other.info().deleted == 0

    @rule()
    def reopen(self):
        self.corpus = Corpus.open(self.corpus.path)

    @rule(seed=st.integers(0, 99), k=st.integers(0, 20), length=st.integers(0, 3), data=st.data())
    def search(self, seed, k, length, data):
        query, documents, subset = document(seed, length), self.model, None
        if self.model and data.draw(st.booleans()):
            subset = data.draw(st.lists(st.sampled_from(list(self.model)), max_size=6))
            documents = {id: tokens for id, tokens in self.model.items() if id in subset}
        for corpus in (self.corpus, self.other):
            assert corpus.search([query], k, subset) == [ranking(query, documents)[:k]]
            if subset is not None:
                assert corpus.rerank([query], subset) == [ranking(query, documents)]

    @invariant()
    def same(self):
        if hasattr(self, "model"):
            assert self.corpus.ids() == self.other.ids() == list(self.model)
            for id in list(self.model)[:2]:
                assert torch.equal(self.corpus.get(id).embeddings, self.model[id].half())

    def teardown(self):
        if hasattr(self, "folder"):
            assert self.corpus.check() == []
            shutil.rmtree(self.folder)


@pytest.fixture(autouse=True)
def _segment_bytes_restored():
    size = segments.SEGMENT_BYTES
    yield
    segments.SEGMENT_BYTES = size


class TestLife(Life.TestCase):
    settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestLongLife(Life.TestCase):
    settings = settings(max_examples=5, stateful_step_count=200, deadline=None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_maps_the_files(tmp_path, environment):
    corpus = Corpus.create(tmp_path / "store", 128)
    corpus.add(range(512), torch.zeros(512, 512, 128, dtype=torch.float16))  # 64 MB
    code = (
        "import sys, torch, maxsim.search as s\n"
        "def memory(): return {l[:7]: int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('Rss')}\n"
        "before = memory(); c = s.Corpus.open(sys.argv[1]); after = memory()\n"
        "assert all(after[kind] - before[kind] < 8000 for kind in before), (before, after)\n"
        "torch.set_num_threads(1); c.search(torch.ones(2, 128), 3); after = memory()\n"
        "assert after['RssAnon'] - before['RssAnon'] < 48000, (before, after)\n"  # the scores' blocks, never a copy
    )
    subprocess.run([sys.executable, "-c", code, corpus.path], env=environment, check=True)
