"""The command as a program of its own: Ctrl-C, terminals, pipes, what is loaded, setting up."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import DIM

from maxsim import cli, encode
from maxsim.corpus.errors import CorpusError
from maxsim.search import Corpus


def program(*arguments, pause=None, **options):
    """`python -m maxsim`, or the command with the encoder of the tests."""
    start = ["-m", "maxsim"] if pause is None else [str(Path(__file__).parent / "fakes.py"), str(pause)]
    return subprocess.Popen(
        [sys.executable, *start, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **{"text": True, "encoding": "utf-8", **options},
    )


def test_python_m_maxsim(tmp_path, environment):
    Corpus.create(tmp_path / "store", DIM).add(["ü"], [torch.ones(1, DIM)])
    with program("info", tmp_path / "store", "--json", env=environment) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["documents"] == 1
    with program("search", tmp_path, "x", env=environment) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert err == f"maxsim: {tmp_path} is not a corpus: it has no catalogue.sqlite\n"


def test_an_output_that_lacks_characters(tmp_path, environment):
    """As pipes and older terminals of Windows are."""
    Corpus.create(tmp_path / "über 🙂", DIM).add([1], [torch.ones(1, DIM)])
    environment["PYTHONIOENCODING"] = "cp1252"
    told = []
    for arguments in (["check"], ["delete", "--json"]):
        ids = ["1"] if "delete" in arguments else []
        with program(*arguments, "über 🙂", *ids, env=environment, cwd=tmp_path, encoding="cp1252") as process:
            out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        told.append(out)
    assert told[0] == "über ? is sound\n"
    assert json.loads(told[1])["corpus"] == "über 🙂"


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_setup_takes_no_other_python_than_the_one_asked_for(tmp_path):
    root = Path(__file__).parents[1]
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup").write_bytes((root / "scripts" / "setup").read_bytes())
    (tmp_path / "pyproject.toml").touch()
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$@" >>"$0.used"\n[ "$1" != -m ]\n')
    other.chmod(0o755)
    environment = {"PATH": f"{other.parent}:/usr/bin:/bin", "PYTHON": "no-such-python"}
    result = subprocess.run(["bash", tmp_path / "scripts" / "setup"], env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "PYTHON=no-such-python is not" in result.stderr
    assert not Path(f"{other}.used").exists()


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_while_libraries_are_loaded(tmp_path, environment):
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)")
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    with program("info", tmp_path, env=environment) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "maxsim: stopped\n")


def test_help_and_wrong_usage_need_no_torch(tmp_path, environment):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    for arguments, code in (["--help"], 0), (["--version"], 0), (["index", "--help"], 0), (["search"], 2):
        with program(*arguments, env=environment) as process:
            _, err = process.communicate()
        assert process.returncode == code, err
    assert inspect.signature(cli.index).parameters["model"].default == encode.DEFAULT


def committed(store: Path) -> int:
    """Documents of a corpus that another process may be making."""
    with suppress(CorpusError, FileNotFoundError):
        return len(Corpus.open(store))
    return 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_killed_and_on_again(tmp_path, environment):
    """Killed twice while it indexes: the same command goes on, and the end is that of a run that was left alone."""
    (tmp_path / "texts").write_text("\n".join(f"text number {n}" for n in range(120)))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments, held = ["index", tmp_path / "texts", tmp_path / "store"], 0
    for _ in range(2):
        with program(*arguments, pause=0.05, env=environment) as process:
            deadline = time.monotonic() + 60
            while committed(tmp_path / "store") <= held:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.kill()
            process.communicate(timeout=60)
        held = len(Corpus.open(tmp_path / "store"))
        assert held % 8 == 0 and 0 < held < 120
        assert Corpus.open(tmp_path / "store").check() == []
    with program(*arguments, "--json", pause=0, env=environment) as process:
        out, _ = process.communicate(timeout=60)
    made = json.loads(out)
    assert (made["skipped"], made["added"]) == (held, 120 - held)
    with program("index", tmp_path / "texts", tmp_path / "alone", pause=0, env=environment) as process:
        process.communicate(timeout=60)
    store, alone = Corpus.open(tmp_path / "store"), Corpus.open(tmp_path / "alone")
    assert store.ids() == alone.ids() == [f"texts:{n}" for n in range(1, 121)]
    query = torch.tensor([[1.0] * DIM, [float(n % 3) for n in range(DIM)]])
    assert store.search(query, 120) == alone.search(query, 120)
    assert store.check() == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(environment, shell):
    def completed(words, word):
        asked = {
            "bash": {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - (word != ""))},
            "zsh": {"_TYPER_COMPLETE_ARGS": words},
            "fish": {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        }[shell]
        with program(env=environment | asked | {"_MAXSIM_COMPLETE": f"complete_{shell}"}) as process:
            out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, ""), err
        return out

    commands = completed("maxsim re", "re")
    assert "rerank" in commands and "search" not in commands
    assert "--replace" in completed("maxsim index --re", "--re")
    kinds = completed("maxsim index --dtype res", "res")
    assert "residual" in kinds and "int8" not in kinds


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_and_on_again(tmp_path, environment):
    (tmp_path / "texts").write_text("\n".join(f"text number {n}" for n in range(200)))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = ["index", tmp_path / "texts", tmp_path / "store"]
    with program(*arguments, pause=0.05, env=environment, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not committed(tmp_path / "store"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "run the same command to go on" in err
    held = len(Corpus.open(tmp_path / "store"))
    assert 8 <= held < 200
    with program(*arguments, "--json", pause=0, env=environment) as process:
        out, err = process.communicate(timeout=60)
    assert json.loads(out)["skipped"] == held
    assert Corpus.open(tmp_path / "store").ids() == [f"texts:{n}" for n in range(1, 201)]
    assert Corpus.open(tmp_path / "store").check() == []
    assert "encoding: " in err
    assert "\r" not in err
    assert "\x1b" not in err


def vectors(path: Path, count: int) -> Path:
    """A file of embeddings, of 8 documents a segment."""
    np.savez(path, tokens=np.arange(count * DIM).reshape(-1, DIM) % 7.0, lengths=np.ones(count, int))
    return path


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
@pytest.mark.parametrize("command", ["index", pytest.param("add", marks=pytest.mark.slow)])
def test_embeddings_killed_stopped_and_on_again(tmp_path, environment, command):
    """A kill, then Ctrl-C: the same command goes on, and the end is that of a run that was left alone."""
    source, store = vectors(tmp_path / "x.npz", 400), tmp_path / "store"
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments, held = ["index", source, store] if command == "index" else ["add", store, source], 0
    if command == "add":
        Corpus.create(store, DIM)
    for number in (signal.SIGKILL, signal.SIGINT):
        with program(*arguments, pause=0.2, env=environment, start_new_session=True) as process:
            deadline = time.monotonic() + 60
            while committed(store) <= held:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.killpg(process.pid, number)
            out, err = process.communicate(timeout=60)
        held = len(Corpus.open(store))
        assert held % 8 == 0 and 0 < held < 400
        assert Corpus.open(store).check() == []
    assert (process.returncode, out) == (130, "")
    assert err.endswith(f"maxsim: stopped; {store} holds {held} documents, run the same command to go on\n")
    with program(*arguments, "--json", pause=0, env=environment) as process:
        out, err = process.communicate(timeout=60)
    made = json.loads(out)
    assert (made["skipped"], made["added"]) == (held, 400 - held)
    assert f"adding: {400 - held} of {400 - held}, " in err
    alone = Corpus.create(tmp_path / "alone", DIM)
    assert alone.add_file(source) == 400
    assert Corpus.open(store).ids() == alone.ids()
    query = torch.tensor([[1.0] * DIM, [float(n % 3) for n in range(DIM)]])
    assert Corpus.open(store).search(query, 400) == alone.search(query, 400)


@pytest.mark.skipif(os.name == "nt", reason="needs pseudo-terminals")
@pytest.mark.parametrize("kind", ["texts", "embeddings"])
def test_bar_on_a_terminal(tmp_path, environment, kind):
    import pty

    source = tmp_path / "texts" if kind == "texts" else vectors(tmp_path / "x.npz", 2)
    if kind == "texts":
        source.write_text("one\ntwo")
    environment.update(PYTHONPATH=os.pathsep.join(sys.path), TERM="xterm", COLUMNS="80")
    controller, terminal = pty.openpty()
    script = [sys.executable, Path(__file__).parent / "fakes.py", "0", "index", source, tmp_path / "store"]
    with subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        seen = b""
        while True:
            try:
                piece = os.read(controller, 4096)
            except OSError:  # Linux ends a pseudo-terminal so
                break
            if not piece:
                break
            seen += piece
        assert process.wait() == 0
    os.close(controller)
    assert b"2/2" in seen and b"/s" in seen
    assert (b"looking" in seen, b"adding" in seen) == (kind != "texts",) * 2
    assert b"\x1b[?25h" in seen  # the cursor is shown again


def test_a_reader_that_leaves_early(tmp_path, environment):
    corpus = Corpus.create(tmp_path / "store", DIM)
    corpus.add(range(2000), [torch.ones(1, DIM)] * 2000, texts=["x" * 90] * 2000)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    with program("search", tmp_path / "store", "x", "-k", "2000", "--model", "m", pause=0, env=environment) as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert err == ""
