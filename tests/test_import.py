"""`import maxsim` needs neither Triton nor a GPU nor any optional package, touches no CUDA, and survives a fork."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch

import maxsim

SOURCES = pathlib.Path(maxsim.__file__).parents[1]
HEAVY = (
    "typer",
    "rich",
    "transformers",
    "sentence_transformers",
    "sqlite3",
    "triton",
    "matplotlib",
    "safetensors",
    "pylate",
    "mteb",
    "colpali_engine",
    "vllm",
)
BLOCK = """
import sys
sys.modules.update(dict.fromkeys({names!r}))  # None: as if it were not installed
"""
USE = """
import torch, maxsim
q, d = torch.ones(2, 3, 8, requires_grad=True), torch.ones(4, 5, 8)
scores = maxsim.score(q, d)
scores.sum().backward()
assert scores.tolist() == [[24] * 4] * 2 and q.grad.eq(4).all()
assert maxsim.topk(q, d, 1).indices.tolist() == [[0], [0]] and maxsim.matches(q, d).index.eq(0).all()
assert maxsim.backend_for(q, d) == "cpu"
"""


def run(script: str, environment: dict[str, str], *flags: str) -> str:
    path = f"{SOURCES}:{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", script],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_torch_is_imported_at_the_first_use(environment):
    script = """
import sys, maxsim
assert set(maxsim.__all__) <= set(dir(maxsim))
assert "torch" not in sys.modules
import maxsim.search
assert maxsim.Corpus is maxsim.search.Corpus and callable(maxsim.topk)
assert "torch" in sys.modules
"""
    run(script, environment)


def test_nothing_heavy_is_imported(environment):
    """Beyond what torch itself loads. Scoring on the CPU needs none of it either."""
    script = f"""
import sys, torch
before = set(sys.modules)
import maxsim
print(__import__("json").dumps(sorted({{name.split(".")[0] for name in set(sys.modules) - before}})))
{USE}
after = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(__import__("json").dumps(sorted(after & set({HEAVY!r}))))
"""
    imported, used = map(json.loads, run(script, environment).splitlines())
    assert not set(imported) & set(HEAVY), imported
    assert set(used) <= {"triton"}, used  # dispatch may look whether its backend serves the problem


def test_without_triton(environment):
    """Case 88: blocked, import and the CPU path work, and a forced backend says what is missing."""
    script = (
        BLOCK.format(names=["triton"])
        + USE
        + """
try:
    maxsim.score(q, d, backend="triton")
except maxsim.UnsupportedError as error:
    assert "triton" in str(error), error
else:
    raise AssertionError("no error")
"""
    )
    run(script, environment)


def test_without_optional_packages(environment):
    """Case 89."""
    names = [name for name in HEAVY if name not in ("sqlite3", "triton")]
    run(BLOCK.format(names=names) + USE, environment)


def test_without_a_gpu(environment):
    """Case 88: also where the only sign of a card is hidden."""
    run(USE, environment | {"CUDA_VISIBLE_DEVICES": ""})


def test_no_cuda_is_touched(environment):
    """Case 90."""
    run(
        "import torch, maxsim\nassert not torch.cuda.is_initialized()\n"
        "maxsim.score(torch.ones(1, 2), torch.ones(1, 2))\nassert not torch.cuda.is_initialized()",
        environment,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_fork_after_import(environment):
    """Case 90: a child scores, and on a machine with a card uses CUDA."""
    script = f"""
import os, warnings
import torch, maxsim
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child == 0:
    {USE.replace(chr(10), chr(10) + "    ")}
    if torch.cuda.is_available():
        assert float(maxsim.score(q.detach().cuda(), d.cuda())[0, 0]) == 24
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    run(script, environment)


class Scored(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return maxsim.score(torch.full((2, 8), float(index)), torch.ones(3, 8))[0, 0]


def test_in_data_loader_workers(environment):
    """Case 90."""
    script = f"""
import sys, warnings
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
warnings.simplefilter("ignore")
import torch
from test_import import Scored
loader = torch.utils.data.DataLoader(Scored(), batch_size=2, num_workers=2)
assert torch.cat(list(loader)).tolist() == [0, 16, 32, 48]
"""
    run(script, environment)


def test_after_the_main_thread_has_ended(environment, tmp_path):
    """Python then starts no more work in its pools of threads; other threads, and what runs at exit, still score."""
    script = f"""
import atexit, threading, torch, maxsim
from maxsim.search.streaming import Streamed
torch.set_num_threads(2)
queries, documents = torch.randn(4, 8, 16), torch.randn(300, 40, 16)
expected = maxsim.score(queries, documents)
corpus = maxsim.Corpus.create({str(tmp_path / "store")!r}, 16, "float32")
corpus.add(range(300), documents)
corpus.place = Streamed(torch.device("cpu"), (0, 1), False)
hits = corpus.search(queries, 3)

def late():
    threading.main_thread().join()
    q = queries.clone().requires_grad_()
    scores = maxsim.score(q, documents)
    scores.sum().backward()
    print(torch.equal(scores, expected), corpus.search(queries, 3) == hits, torch.get_num_threads())

atexit.register(lambda: print(torch.equal(maxsim.score(queries, documents), expected)))
threading.Thread(target=late).start()
"""
    assert run(script, environment).split() == ["True", "True", "2", "True"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX paths")
def test_no_compiler_and_no_writable_home(environment, tmp_path):
    """Case 91: nothing is built at import or at the first score on a CPU."""
    bare = {name: value for name, value in environment.items() if name not in ("CC", "CXX")}
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o500)
    run(USE, bare | {"PATH": "", "HOME": str(home), "CC": "/nonexistent"})
    assert {path.name for path in home.iterdir()} <= {".nv"}  # the CUDA driver's own cache


def test_environment_variables_change_no_result(environment):
    """Nothing of ours is read from the environment."""
    words = [
        (path.name, line)
        for path in (SOURCES / "maxsim").rglob("*.py")
        if path.parent.name in ("maxsim", "kernels", "backends") and path.name not in ("cli.py", "encode.py")
        for line in path.read_text().splitlines()
        if "os.environ" in line or "getenv" in line
    ]
    assert words == []
