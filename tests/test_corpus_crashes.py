"""A process killed at every step of every change: the corpus opens as it was before or after, and goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from stores import document, fill

from maxsim.corpus import CorpusError, catalogue, rows, segments
from maxsim.search import Corpus

DIM = 8
CHANGES = {
    "add": lambda c: c.add([1, "a0", 3], [document(i, 2) for i in range(3)], replace=True),
    "update": lambda c: c.update(["a1", "b0"], [document(8, 3), document(9, 1)], texts=["x", "y"]),
    "texts": lambda c: c.update(["a1", "b0"], texts=["x", "y"]),
    "delete": lambda c: c.delete(["a0", "b1"]),
    "compact": lambda c: c.compact(),
}
CREATED = {"create": lambda path: Corpus.create(path, DIM), "tables": lambda path: Corpus.create(path, DIM, **tables())}


class Connection(sqlite3.Connection):
    """Whose commits can be patched."""

    def execute(self, statement, *args):
        execute = super().execute
        return commit(execute) if statement == "COMMIT" else execute(statement, *args)


def commit(execute):
    return execute("COMMIT")


STEPS = {
    "save": (segments, "save_file"),
    "fsync": (os, "fsync"),
    "rename": (os, "replace"),
    "hash": (segments, "sha256"),
    "folder": (segments, "sync_folder"),
    "document row": (rows, "insert_document"),
    "segment row": (rows, "insert_segment"),
    "tombstone": (rows, "tombstone"),
    "no more": (rows, "remove_segment"),
    "unlink": (Path, "unlink"),
    "commit": (sys.modules[__name__], "commit"),
}


def tables():
    import maxsim

    return {"dtype": "pq", "like": maxsim.quantize(torch.ones(1, 40, DIM), "pq", parts=4)}


def begin(path, coded=False):
    """Three segments, deleted documents among them."""
    segments.SEGMENT_BYTES = 40
    corpus = Corpus.create(path, DIM, **({"dtype": "int8", "exact": "float16"} if coded else {}))
    fill(corpus, [2, 3, 1], "a")
    fill(corpus, [1, 0, 4], "b")
    corpus.delete(["a2", "b2"])
    return corpus


def state(path):
    corpus = Corpus.open(path)
    assert corpus.check() == []
    ids = corpus.ids()
    hits = corpus.search([document(5, 3), document(6, 1)], 99)
    return repr((ids, [corpus.get(id) for id in ids], hits))


def killed_at(change, owner, name, count, after):
    """Whether a process that kills itself at that call (before or after it) came so far."""
    process = os.fork()
    if not process:
        try:
            real, calls = getattr(owner, name), []

            def patched(*args, **kwargs):
                calls.append(1)
                if len(calls) == count and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*args, **kwargs)
                if len(calls) == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            setattr(owner, name, patched)
            change()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


def opened(change, path):
    change(Corpus.open(path))


def live(folder, coded):
    """Every change, killed at every step; says how many were killed, and what has gone wrong."""
    torch.set_num_threads(1)
    catalogue.sqlite3 = Fakes()
    kills, wrong = dict.fromkeys((*CHANGES, *CREATED), 0), []
    start, here = folder / "start", folder / "here"
    begin(start, coded)
    before = state(start)
    for what, change in CHANGES.items():
        shutil.copytree(start, here)
        change(Corpus.open(here))
        done = state(here)
        shutil.rmtree(here)
        for place, (owner, name) in STEPS.items():
            for count, after in ((count, after) for count in range(1, 30) for after in (False, True)):
                shutil.copytree(start, here)
                if not killed_at(partial(opened, change, here), owner, name, count, after):
                    shutil.rmtree(here)
                    break
                kills[what] += 1
                if state(here) not in (before, done):
                    wrong.append(f"{what}: {place} {count} {after}")
                corpus = Corpus.open(here)
                corpus.add(["next"], [document(1, 1)])
                left = {path.name for path in (here / "segments").iterdir()}
                if corpus.check() or left != {segment.record.file for segment, _ in corpus.select().parts}:
                    wrong.append(f"{what}: {place} {count} {after}: {corpus.check()} {left}")
                shutil.rmtree(here)
    for what, create in CREATED.items():
        for place, (owner, name) in STEPS.items():
            for count, after in ((count, after) for count in range(1, 30) for after in (False, True)):
                if not killed_at(partial(create, here), owner, name, count, after):
                    shutil.rmtree(here)
                    break
                kills[what] += 1
                try:
                    corpus = Corpus.open(here)
                except FileNotFoundError:
                    corpus = create(here)
                fill(corpus, [1, 2])
                if corpus.check() or len(corpus.search(document(1, 1), 9)[0]) != 2:
                    wrong.append(f"{what}: {place} {count} {after}")
                shutil.rmtree(here)
    print(json.dumps([kills, wrong]))


class Fakes:
    """The module sqlite3 with commits that can be patched."""

    def __getattr__(self, name):
        return getattr(sqlite3, name)

    def connect(self, *args, **kwargs):
        return sqlite3.connect(*args, **kwargs, factory=Connection)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")
@pytest.mark.parametrize("coded", [False, True], ids=["floats", "codes"])
def test_killed_at_every_step(tmp_path, environment, coded):
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2])\n"
        "import test_corpus_crashes as t; t.live(pathlib.Path(sys.argv[1]), sys.argv[3] == 'True')"
    )
    command = [sys.executable, "-c", code, tmp_path, Path(__file__).parent, str(coded)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    kills, wrong = json.loads(result.stdout)
    assert wrong == []
    assert all(count > 1 for count in kills.values()), kills


FULL = {
    "save": SafetensorError("No space left on device"),
    "fsync": OSError(28, "No space left on device"),
    "rename": OSError(28, "No space left on device"),
    "segment row": sqlite3.OperationalError("database or disk is full"),
}


@pytest.mark.parametrize("what", ["update", "compact"])
@pytest.mark.parametrize("place", FULL)
def test_a_full_disk_changes_nothing(tmp_path, monkeypatch, what, place):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 40)
    corpus = begin(tmp_path / "store")
    before, files = state(corpus.path), sorted((corpus.path / "segments").iterdir())

    def full(*args, **kwargs):
        raise FULL[place]

    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[place], full)
        with pytest.raises(CorpusError, match=r"full|No space"):
            CHANGES[what](corpus)
    assert (state(corpus.path), sorted((corpus.path / "segments").iterdir())) == (before, files)
    CHANGES[what](corpus)
    assert state(corpus.path) != before or what == "compact"


def test_readers_while_a_writer_compacts(tmp_path, monkeypatch):
    """Each search sees one whole state."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64)
    corpus = Corpus.create(tmp_path / "store", DIM)
    corpus.add(["stays"], [torch.ones(1, DIM)])
    stop, wrong = threading.Event(), []

    def reading():
        reader = Corpus.open(corpus.path)
        while not stop.is_set():
            ids = {hit.id for hit in reader.search(torch.ones(1, DIM), 99)[0]}
            if ids not in ({"stays"}, {"stays", "x", "y"}) or reader.get("stays").embeddings.sum() != DIM:
                wrong.append(ids)

    threads = [threading.Thread(target=reading) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(12):
        corpus.add(["x", "y"], [torch.ones(3, DIM), torch.ones(2, DIM)])
        corpus.compact()
        corpus.delete(["x", "y"])
        corpus.compact()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert corpus.check() == []
