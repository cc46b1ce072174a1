"""The same bits alone, in any batch, order, padding, layout and chunk, and again: real-valued inputs, where any
other sum shows."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from lanes import NAMES, integers, interpreter_when, random

import maxsim
from maxsim import Packed, Views

D = 128


def half(lane, dtype, **others):
    """One dtype is enough under the interpreter: the order of sums is the same code."""
    return dtype == torch.float16


def queries_of(lane, dtype, seed: int, *shape: int) -> torch.Tensor:
    """Normal values. The interpreter's product of tiles is numpy's, whose bits depend on the tile: there similarities
    are exact, and of such unlike sizes that only one order of the sum over tokens gives its bits."""
    if not lane.interpreted:
        return random(seed, *shape, dtype=dtype, device=lane.device)
    scale = 2.0 ** ((torch.arange(shape[-2]) * 7) % 25 - 12)
    return (integers(seed, *shape) * scale[:, None]).to(dtype)


def documents_of(lane, dtype, seed: int, *shape: int) -> torch.Tensor:
    return (integers if lane.interpreted else random)(seed, *shape, dtype=dtype, device=lane.device)


def padded_to(item: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One item with NaN rows after it, and its mask."""
    whole = item.new_full((length, item.shape[1]), float("nan"))
    whole[: len(item)] = item
    return whole, torch.arange(length, device=item.device) < len(item)


def several(make, lane, dtype, seed: int, lengths: list[int]) -> list[torch.Tensor]:
    return [make(lane, dtype, seed + n, length, D) for n, length in enumerate(lengths)]


@interpreter_when(half)
def test_padding_of_one(lane, dtype):
    """Case 4: a query of 5 and a document of 7 tokens, all similarities negative, in twelve paddings."""
    query = queries_of(lane, dtype, 0, 5, D).abs()
    document = -documents_of(lane, dtype, 1, 7, D).abs()
    alone = lane.score(query, document)
    assert float(alone) < 0
    for LQ in (8, 32, 33, 128):
        for LD in (8, 64, 1030):
            q, q_mask = padded_to(query, LQ)
            d, d_mask = padded_to(document, LD)
            assert torch.equal(lane.score(q, d, q_mask, d_mask), alone), (LQ, LD)


@interpreter_when(lambda lane, dtype, LQ: half(lane, dtype) and LQ == 100)
@pytest.mark.parametrize("LQ", [1, 3, 17, 32, 100])
def test_padding_of_a_batch(lane, dtype, LQ):
    """Holes and left padding too: the sum follows the kept tokens' order, wherever they stand."""
    query = queries_of(lane, dtype, 2, LQ, D)
    documents = several(documents_of, lane, dtype, 3, [5, 70, 1])
    alone = lane.score(query, documents)
    for length in (LQ + 1, 2 * LQ + 3, 160):
        for kind in ("right", "left", "spread"):
            at = torch.arange(length)
            kept = {
                "right": at[:LQ],
                "left": at[-LQ:],
                "spread": at[torch.randperm(length, generator=torch.Generator().manual_seed(0))[:LQ].sort().values],
            }[kind]
            q = torch.full((2, length, D), float("nan"), dtype=dtype, device=lane.device)
            q[:, kept] = query
            mask = torch.zeros(2, length, dtype=torch.bool, device=lane.device)
            mask[:, kept] = True
            assert torch.equal(lane.score(q, documents, mask), alone.expand(2, -1)), (length, kind)


def test_alone_or_among_others(lane, dtype):
    """Case 9: a document alone, and at 0, 17 and 63 of a batch of other lengths, in each layout."""
    query, document = (
        queries_of(lane, dtype, 4, 12, D),
        documents_of(lane, dtype, 5, 47, D),
    )
    alone = lane.score(query, document)[0, 0]
    lengths = [1 + (n * 37) % 90 for n in range(64)]
    for at in (0, 17, 63):
        documents = several(documents_of, lane, dtype, 100, lengths)
        documents[at] = document
        assert lane.score(query, documents)[0, at] == alone
    whole, masks = zip(*[padded_to(each, 96) for each in documents], strict=True)
    assert lane.score(query, torch.stack(whole), None, torch.stack(masks))[0, 63] == alone


@interpreter_when(half)
def test_every_way_to_ask(lane, dtype):
    """Grid, pairs, candidates, packed, views, permuted, sliced and top-k: one set of bits."""
    queries = several(queries_of, lane, dtype, 6, [9, 32, 5])
    documents = several(documents_of, lane, dtype, 20, [40, 3, 129, 64, 1, 77])
    scores = lane.score(queries, documents)
    for a, query in enumerate(queries):
        for b, document in enumerate(documents):
            assert torch.equal(lane.score(query, document), scores[a : a + 1, b : b + 1]), (a, b)
    for low in range(0, 6, 2):
        assert torch.equal(lane.score(queries, documents[low : low + 2]), scores[:, low : low + 2])
    order = [4, 2, 0, 5, 1, 3]
    assert torch.equal(lane.score(queries[::-1], [documents[n] for n in order]), scores.flip(0)[:, order])
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(6)).flip(0)
    assert torch.equal(lane.score_pairs(queries, documents, pairs), scores[pairs[:, 0], pairs[:, 1]])
    assert torch.equal(lane.score(queries, [documents] * 3), scores)
    packed = Packed.from_list(documents)
    assert torch.equal(lane.score(Packed.from_list(queries), packed), scores)
    lengths = torch.tensor([len(each) for each in documents])
    starts = lengths.cumsum(0) - lengths
    assert torch.equal(lane.score(queries, Views(packed.tokens, starts[order], lengths[order])), scores[:, order])
    found = lane.topk(queries, documents, 6)
    assert torch.equal(scores.gather(1, found.indices), found.scores)


@interpreter_when(half)
def test_winners_cost_no_bits(lane, dtype):
    """A score that also keeps winners, for a gradient or for `matches`, is the same score."""
    q, d = queries_of(lane, dtype, 7, 3, 33, D), documents_of(lane, dtype, 8, 5, 70, D)
    scores = lane.score(q, d)
    assert torch.equal(lane.score(q.clone().requires_grad_(), d).detach(), scores)


@pytest.mark.parametrize("masked", ["exclude", "zero"])
def test_again(lane, dtype, masked):
    """Case 67: forward and backward, twenty times, with deterministic algorithms asked for."""
    runs = 20
    q, d = queries_of(lane, dtype, 9, 4, 33, D), documents_of(lane, dtype, 10, 9, 70, D)
    mask = random(11, 9, 70, device=lane.device) > 0
    upstream = random(12, 4, 9, device=lane.device)
    torch.use_deterministic_algorithms(True)
    try:
        for run in range(runs):
            a, b = q.clone().requires_grad_(), d.clone().requires_grad_()
            scores = lane.score(a, b, None, mask, masked)
            scores.backward(upstream.to(scores))
            found = (scores.detach(), a.grad, b.grad)
            if run == 0:
                first = found
            assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True)), run
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(lane, dtype, threads):
    q, d = queries_of(lane, dtype, 13, 5, 40, D), documents_of(lane, dtype, 14, 30, 90, D)
    wanted, a, b = lane.score(q, d), q.clone().requires_grad_(), d.clone().requires_grad_()
    lane.score(a, b).sum().backward()
    torch.set_num_threads(threads)
    assert torch.equal(lane.score(q, d), wanted)
    a2, b2 = q.clone().requires_grad_(), d.clone().requires_grad_()
    lane.score(a2, b2).sum().backward()
    assert torch.equal(a.grad, a2.grad)
    assert torch.equal(b.grad, b2.grad)


PROCESS = """
import sys, torch, maxsim
from lanes import random
backend, device, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(threads)
total = []
for dtype in (torch.float16, torch.float32):
    q = random(1, 3, 20, 96, dtype=dtype, device=device).requires_grad_()
    d = random(2, 7, 65, 96, dtype=dtype, device=device).requires_grad_()
    scores = maxsim.score(q, d, backend=backend)
    scores.square().sum().backward()
    total += [x.detach().cpu().numpy().tobytes().hex() for x in (scores, q.grad, d.grad)]
import hashlib
print(hashlib.sha256("".join(total).encode()).hexdigest())
"""


def test_in_three_processes(lane, tmp_path):
    """Case 67: and with other numbers of threads."""
    script = tmp_path / "bits.py"
    script.write_text(PROCESS)
    path = [maxsim.__path__[0].rsplit("/", 1)[0], __file__.rsplit("/", 1)[0]]
    import os

    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    found = [
        subprocess.run(
            [sys.executable, str(script), lane.backend, lane.device, threads],
            env=environment,
            capture_output=True,
            text=True,
        )
        for threads in ("1", "2", "2")
    ]
    assert all(done.returncode == 0 for done in found), found[0].stderr
    assert len({done.stdout for done in found}) == 1
    assert found[0].stdout.strip()


@interpreter_when(half)
def test_size_one_everything(lane, dtype):
    """Case 8: sixteen combinations, always [NQ, ND], always the same (0, 0)."""
    q, d = queries_of(lane, dtype, 15, 2, 3, D), documents_of(lane, dtype, 16, 2, 4, D)
    for LQ in (1, 3):
        for LD in (1, 4):
            wanted = lane.score(q[0, :LQ], d[0, :LD])
            assert wanted.shape == (1, 1)
            for NQ in (1, 2):
                for ND in (1, 2):
                    found = lane.score(q[:NQ, :LQ], d[:ND, :LD])
                    assert found.shape == (NQ, ND) and torch.equal(found[:1, :1], wanted), NAMES[dtype]


@interpreter_when(half)
def test_a_longest_query_that_is_only_guessed(lane, dtype):
    """Packed queries whose offsets are on a card: they might all be as long as all their tokens."""
    from maxsim.autograd import run
    from maxsim.layout import make_problem

    items = [queries_of(lane, dtype, n, n, 64) for n in (3, 0, 40)]
    d = [documents_of(lane, dtype, 9, 20, 64), documents_of(lane, dtype, 8, 5, 64)]
    want = lane.score(items, d)
    problem = make_problem(items, d)
    guessed = dataclasses.replace(problem.queries, max_length=700)
    got = run(dataclasses.replace(problem, queries=guessed), lane.backend).scores
    assert torch.equal(got, want)
