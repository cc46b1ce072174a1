"""What only the CPU backend has: threads, blocks, the shapes of its matrix products, and the memory it takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import maxsim
from maxsim import Packed
from maxsim.kernels import cpu_maxima, cpu_product, cpu_runs, cpu_threads
from maxsim.kernels.cpu_tree import Tree

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def ragged(counts: list[int], width: int, dtype: torch.dtype, seed: int) -> Packed:
    tokens = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Packed(tokens, np.concatenate([[0], np.cumsum(counts)]))


def items(packed: Packed) -> list[Tensor]:
    return [packed.tokens[a:b] for a, b in zip(packed.starts.tolist(), packed.ends.tolist(), strict=True)]


def at(threads: int, function: Any, *args: Any, **kwargs: Any) -> Any:
    torch.set_num_threads(threads)
    return function(*args, backend="cpu", **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [False, True])
def test_threads_change_no_bit(dtype: torch.dtype, normalize: bool) -> None:
    # enough documents for several jobs a thread, of every length
    counts = np.random.default_rng(0).integers(0, 400, 300).tolist()
    queries, documents = ragged([1, 32, 0, 70], 128, dtype, 1), ragged(counts, 128, dtype, 2)
    pairs = torch.randint(0, 300, (900, 2), generator=torch.Generator().manual_seed(3)) % torch.tensor([4, 300])
    for function, more in ((maxsim.score, ()), (maxsim.score_pairs, (pairs,)), (maxsim.matches, ())):
        results = [at(n, function, queries, documents, *more, normalize=normalize) for n in (1, 2, 3)]
        for other in results[1:]:
            if isinstance(other, Tensor):
                assert torch.equal(other, results[0])
            else:
                assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("normalize", [False, True])
def test_threads_change_no_bit_of_a_gradient(dtype: torch.dtype, normalize: bool) -> None:
    queries, documents = ragged([40] * 20, 64, dtype, 1), ragged([50, 0, 90, 7] * 20, 64, dtype, 2)
    upstream = torch.randn(20, 80, generator=torch.Generator().manual_seed(3))
    found = []
    for threads in (1, 2):
        q, d = queries.tokens.clone().requires_grad_(), documents.tokens.clone().requires_grad_()
        scores = at(
            threads, maxsim.score, Packed(q, queries.offsets), Packed(d, documents.offsets), normalize=normalize
        )
        found.append(torch.autograd.grad(scores, (q, d), upstream))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_product_multiplies(dtype: torch.dtype) -> None:
    # small integers: every order of the sums gives the same
    tokens, queries = (torch.randint(-4, 5, (rows, 37), dtype=torch.int64).to(dtype) for rows in (451, 96))
    for multiply in (cpu_product.plain, cpu_product.padded, cpu_product.tiled):
        out = torch.full((451, 96), torch.nan, dtype=dtype)
        multiply(tokens, queries.T, out)
        assert torch.equal(out, tokens @ queries.T)


@pytest.mark.parametrize("multiply", [cpu_product.padded, cpu_product.tiled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_libraries_get_the_same_bits_everywhere(
    monkeypatch: pytest.MonkeyPatch, multiply: cpu_product.Multiply, dtype: torch.dtype
) -> None:
    """Where the order of a sum depends on the shape of the product, scores still depend on nothing beside them."""
    monkeypatch.setattr(cpu_maxima, "product", lambda dtype, width: multiply)
    q, d = items(ragged([5, 33, 64, 300], 48, dtype, 1)), items(ragged([3, 61, 200, 900, 64, 65], 48, dtype, 2))
    together = maxsim.score(q, d, backend="cpu")
    alone = torch.cat([torch.cat([maxsim.score(a, b, backend="cpu") for b in d], 1) for a in q])
    assert torch.equal(together, alone)
    backwards = maxsim.score(q[::-1], d[::-1], backend="cpu")
    assert torch.equal(together, backwards.flip(0, 1))


@pytest.mark.parametrize("rows", [1, 32, 33, 256, 257, 300])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("form", ["padded", "packed", "masked"])
def test_block_borders(rows: int, beyond: int, form: str) -> None:
    """Documents of about one block and of about two, which are cut: exact in small integers, the first equal wins."""
    limit = cpu_maxima.block_tokens(-(-rows // cpu_product.ROWS) * cpu_product.ROWS, 8)
    generator = torch.Generator().manual_seed(rows + beyond)
    for length in (limit + beyond, 2 * limit + beyond):
        query = torch.randint(-3, 4, (rows, 8), generator=generator).float()
        documents = torch.randint(-3, 4, (3, length, 8), generator=generator).float()
        mask = torch.rand(3, length, generator=generator) < 0.9 if form == "masked" else None
        given: Any = list(documents) if form == "packed" else documents
        found = maxsim.matches(query, given, document_mask=mask, backend="cpu")
        similarity = torch.einsum("qd,nld->nql", query, documents)
        if mask is not None:
            similarity = similarity.masked_fill(~mask[:, None], -torch.inf)
        best = similarity.max(2)
        assert torch.equal(found.similarity[0], best.values)
        assert torch.equal(found.index[0], (similarity == best.values[..., None]).int().argmax(2))
        scores = maxsim.score(query, given, document_mask=mask, backend="cpu")
        assert torch.equal(scores[0], best.values.sum(1))


@pytest.mark.parametrize("where", [0, 8191, 8192, 8999])
def test_nan_wins_in_every_piece(where: int) -> None:
    documents = torch.ones(2, 9000, 8)
    documents[1, where, 3] = torch.nan
    found = maxsim.matches(torch.ones(3, 8), documents, backend="cpu")
    assert found.index[0, 0].tolist() == [0] * 3
    assert found.index[0, 1].tolist() == [where] * 3
    assert found.similarity[0, 1].isnan().all()
    scores = maxsim.score(torch.ones(3, 8), documents, backend="cpu")
    assert scores[0, 0] == 24
    assert scores[0, 1].isnan()


def test_infinite_similarities_keep_the_first_token() -> None:
    documents = torch.full((1, 5, 2), -torch.inf)
    mask = torch.tensor([[False, True, True, False, True]])
    found = maxsim.matches(torch.ones(1, 2), documents, document_mask=mask, backend="cpu")
    assert found.index.item() == 1
    assert found.similarity.item() == -torch.inf


def pairwise(values: Tensor) -> Tensor:
    values = torch.cat([values, values.new_zeros((1 << max(0, len(values) - 1).bit_length()) - len(values))])
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def test_tree_of_a_query_is_its_own() -> None:
    counts = [1, 0, 32, 31, 7, 100, 1, 64]
    values = torch.randn(sum(counts), 5, generator=torch.Generator().manual_seed(0))
    together = Tree(np.array(counts)).sums(values)
    for n, part in enumerate(values.split(counts)):
        alone = Tree(np.array(counts[n : n + 1])).sums(part)
        assert torch.equal(alone[0], together[n])
        if len(part):
            assert torch.equal(together[n], torch.stack([pairwise(column) for column in part.T]))


class Allocations(TorchDispatchMode):
    """The largest storage that an operator made, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if torch.is_tensor(t)
        }
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["padded", "packed", "strided", "masked"])
def test_inference_holds_blocks_only(dtype: torch.dtype, form: str) -> None:
    torch.set_num_threads(1)  # the mode sees the operators of this thread alone
    queries = torch.randn(64, 32, 128).to(dtype)
    documents = torch.randn(60, 300, 128).to(dtype)
    mask = torch.rand(60, 300) < 0.7 if form == "masked" else None
    given: Any = documents
    if form == "packed":
        given = ragged(np.random.default_rng(0).integers(1, 600, 60).tolist(), 128, dtype, 0)
    elif form == "strided":
        given = documents.transpose(0, 1).contiguous().transpose(0, 1)
    with Allocations() as seen:
        scores = maxsim.score(queries, given, document_mask=mask, backend="cpu")
    similarities = 64 * 32 * 60 * 300 * 4
    assert scores.shape == (64, 60)
    assert seen.largest <= 4 << 20
    assert seen.largest * 30 < similarities


def test_threads_of_the_caller_stay_as_they_are() -> None:
    torch.set_num_threads(2)
    queries, documents = torch.randn(2, 8, 16), torch.randn(40, 500, 16)
    maxsim.score(queries, documents, backend="cpu")
    seen = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert [torch.get_num_threads(), *seen] == [2, 2, 2]


def test_several_callers_at_once() -> None:
    queries, documents = torch.randn(4, 32, 64), torch.randn(100, 200, 64)
    expected = maxsim.score(queries, documents, backend="cpu")
    found: list[Tensor | None] = [None] * 4

    def call(n: int) -> None:
        with torch.inference_mode(n % 2 == 0):
            found[n] = maxsim.score(queries, documents, backend="cpu")

    callers = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(scores is not None and torch.equal(scores, expected) for scores in found)


def test_an_error_in_a_job_comes_out_and_stops_the_others() -> None:
    done = []

    def work(job: int, scratch: cpu_threads.Scratch) -> None:
        if job == 0:
            raise ZeroDivisionError
        done.append(job)

    with pytest.raises(ZeroDivisionError):
        cpu_threads.run(range(100_000), work, 2)
    assert len(done) < 100_000
    cpu_threads.run(range(5), lambda job, scratch: done.append(-job), 2)
    assert sorted(done)[:5] == [-4, -3, -2, -1, 0]


@pytest.mark.parametrize("most", [0, 2])
def test_where_no_thread_can_be_started(monkeypatch, most) -> None:
    queries, documents = torch.randn(4, 32, 64), torch.randn(100, 200, 64)
    expected = at(1, maxsim.score, queries, documents)
    cpu_threads._forget()
    start, started = threading.Thread.start, list[threading.Thread]()

    def refuse(thread: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert torch.equal(at(4, maxsim.score, queries, documents), expected)
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()
    assert torch.equal(at(4, maxsim.score, queries, documents), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn of every fork beside threads
def test_a_forked_child_starts_its_own_threads() -> None:
    torch.set_num_threads(2)
    queries, documents = torch.randn(2, 8, 16), torch.randn(40, 500, 16)
    expected = maxsim.score(queries, documents, backend="cpu")
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(maxsim.score(queries, documents, backend="cpu"), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("form", ["grid", "candidates", "packed"])
def test_masked_rows_in_place_or_left_out(form, masked, codec, monkeypatch):
    """Few masked rows are multiplied, whatever they hold, and many left out: the same bits and winners."""
    generator = torch.Generator().manual_seed(7)
    q, d = torch.randn(4, 5, 24, generator=generator), torch.randn(12, 40, 24, generator=generator)
    keep = torch.rand(12, 40, generator=generator) < 0.7
    keep[3], keep[5, :9], keep[6] = False, False, True
    if codec is None:
        q[..., 0] = q[..., 0].abs()
        d[7], d[7, :, 0] = 0, -torch.inf  # the lowest of what is kept wins
        d[~keep] = torch.nan
    documents: Any = {
        "grid": d,
        "candidates": d.view(4, 3, 40, 24),
        "packed": Packed(d.view(-1, 24), range(0, 481, 40)),
    }[form]
    mask = keep.view(4, 3, 40) if form == "candidates" else keep.flatten() if form == "packed" else keep
    if codec is not None:
        documents, mask = maxsim.quantize(documents, codec, mask, scale="token"), None
    found = []
    for rows in (1e9, 0):
        monkeypatch.setattr(cpu_runs, "GATHER", rows)
        found.append(
            (*maxsim.matches(q, documents, None, mask, masked), maxsim.score(q, documents, None, mask, masked))
        )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    if form == "grid" and codec is None and masked == "exclude":
        assert set(found[0][0][1, 7].tolist()) == {int(keep[7].int().argmax())}
