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
        text=True,
        encoding="utf-8",
        **options,
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


@pytest.mark.skipif(os.name == "nt", reason="needs pseudo-terminals")
def test_bar_on_a_terminal(tmp_path, environment):
    import pty

    (tmp_path / "texts").write_text("one\ntwo")
    environment.update(PYTHONPATH=os.pathsep.join(sys.path), TERM="xterm", COLUMNS="80")
    controller, terminal = pty.openpty()
    script = [sys.executable, Path(__file__).parent / "fakes.py", "0", "index", tmp_path / "texts", tmp_path / "store"]
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
    assert b"2/2" in seen
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
