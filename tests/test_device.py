"""Devices, streams, threads and processes, host synchronisation, CUDA graphs and how often kernels are compiled."""

from __future__ import annotations

import gc
import os
import pathlib
import random as python_random
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
from codes import CODECS, needs_codec
from gpus import in_turn
from lanes import Lane, integers, random

import maxsim
from maxsim import Packed, Views, plans

GPU = Lane("triton", "cuda")


def in_threads(count: int, work) -> None:
    errors = []

    def run(n):
        try:
            work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def kernels():
    """The jit functions of the library."""
    from triton.runtime.jit import JITFunction

    from maxsim.kernels import gradients, lists, scores

    found = {
        id(f): f
        for module in (scores, gradients, lists)
        for name, f in vars(module).items()
        if name.endswith("_kernel")
    }
    assert found
    assert all(isinstance(f, JITFunction) for f in found.values())
    return list(found.values())


def forget_compiled() -> None:
    for kernel in kernels():
        kernel.device_caches.clear()


def variants() -> int:
    return sum(len(cache[0]) for kernel in kernels() for cache in kernel.device_caches.values())


def test_threads(lane):
    """Case 93: eight threads, each with shapes of its own, on kernels that no one has compiled yet."""
    if lane.device == "cuda":
        forget_compiled()
    inputs = [
        (integers(n, 3, 4 + n, 32, device=lane.device), integers(n, 5, 9 + n, 32, device=lane.device)) for n in range(8)
    ]
    found: dict[int, tuple[torch.Tensor, ...]] = {}

    def work(n):
        for _ in range(3):
            q, d = (x.clone().requires_grad_() for x in inputs[n])
            scores = lane.score(q, d)
            found[n] = (scores, *torch.autograd.grad(scores.sum(), (q, d)))

    in_threads(8, work)
    for n, (q, d) in enumerate(inputs):
        q, d = q.clone().requires_grad_(), d.clone().requires_grad_()
        scores = lane.score(q, d)
        wanted = (scores, *torch.autograd.grad(scores.sum(), (q, d)))
        assert all(torch.equal(x, y) for x, y in zip(found[n], wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["padded", "packed", "views", "masked", "pairs", "candidates"])
def test_no_synchronisation(form):
    """Case 70: nothing is read back, forward, backward and top-k."""
    q, d = (
        random(1, 3, 8, 64, dtype=torch.float16, device="cuda"),
        random(2, 6, 20, 64, dtype=torch.float16, device="cuda"),
    )
    q.requires_grad_(), d.requires_grad_()
    mask = random(3, 6, 20, device="cuda") > 0
    pairs = torch.tensor([[0, 1], [2, 5]], device="cuda")
    flat = d.detach().flatten(0, 1).requires_grad_()
    packed, views = Packed(flat, range(0, 121, 20)), Views(flat, [0, 50], [20, 31])

    def call():
        if form == "pairs":
            return maxsim.score_pairs(q, d, pairs)
        if form == "candidates":
            return maxsim.score(q, d.expand(3, -1, -1, -1))
        documents = {"padded": d, "masked": d, "packed": packed, "views": views}[form]
        given = mask if form == "masked" else None
        maxsim.matches(q, documents, None, given)
        maxsim.topk(q, documents, 2, None, given)
        return maxsim.score(q, documents, None, given)

    call().sum().backward()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own: the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        call().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("form", ["padded", "masked", "packed"])
def test_captured_in_a_graph(form, training):
    """Case 70: a replay on new values gives what a call gives."""
    q, d = (
        random(4, 3, 8, 64, dtype=torch.float16, device="cuda"),
        random(5, 6, 20, 64, dtype=torch.float16, device="cuda"),
    )
    mask = random(6, 6, 20, device="cuda") > 0
    if training:
        q.requires_grad_(), d.requires_grad_()
    offsets = torch.arange(0, 121, 20)

    def call():
        documents = Packed(d.flatten(0, 1), packed_offsets, max_length=20) if form == "packed" else d
        scores = GPU.score(q, documents, None, mask if form == "masked" else None)
        return (scores, *torch.autograd.grad(scores.sum(), (q, d))) if training else (scores,)

    packed_offsets = offsets.cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        q.copy_(random(7, 3, 8, 64)), d.copy_(random(8, 6, 20, 64))
    graph.replay()
    wanted = call()
    assert all(torch.equal(x, y) for x, y in zip(captured, wanted, strict=True))


def test_plans_go_with_the_places_of_ragged_documents():
    documents = Packed(torch.zeros(9, 4), [0, 4, 9])
    plans.remember(("a call",), documents, lambda queries, tokens: tokens)
    assert plans.recall(("a call",), None, documents) is documents.tokens
    for name in ("starts", "ends", "max_length"):
        for _ in range(3):
            plans.remember(("a call",), documents, lambda queries, tokens: tokens)
            setattr(documents, name, getattr(documents, name) + 0 if name != "max_length" else documents.max_length - 1)
            assert plans.recall(("a call",), None, documents) is None


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["packed", "views"])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_ragged_documents_keep_their_plans(form, backend, monkeypatch):
    """A second call goes straight to its launch, reads what is there by then, and the plan lives as long as they do."""
    lane = Lane(backend, "cuda")
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    flat = integers(1, 120, 64, device="cuda").half()
    documents = Packed(flat, range(0, 121, 20)) if form == "packed" else Views(flat, [0, 50, 7], [20, 31, 0])
    first, second = (integers(n, 3, 8, 64, device="cuda").half() for n in (2, 3))
    lane.score(first, documents)
    flat.copy_(integers(4, 120, 64))
    with monkeypatch.context() as context:
        context.setattr(maxsim.ops, "make_problem", None)
        found = lane.score(second, documents)
    assert torch.equal(found, lane.score(second, documents, document_mask=torch.ones(120, dtype=torch.bool)))
    for _ in range(3):  # other places, and maybe at the addresses of earlier ones: other plans
        documents.starts = documents.starts + 1
        moved = Views(flat, documents.starts, documents.ends - documents.starts)
        assert torch.equal(lane.score(second, documents), lane.score(second, moved))
    kept = weakref.ref(documents)
    del documents
    gc.collect()
    assert kept() is None


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("LQ", [8, 300])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_quantised_documents_keep_their_plans(codec, LQ, backend, monkeypatch):
    lane = Lane(backend, "cuda")
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    needs_codec(lane, codec)
    if backend == "hopper" and codec in ("pq", "residual"):
        pytest.skip("keeps no plans of codes that are decoded")
    tokens = random(1, 300, 64, device="cuda")
    options = {"parts": 16} if codec == "pq" else {"centroids": 16} if codec == "residual" else {"scale": "token"}
    if backend == "hopper" and codec == "fp8":
        options = {}
    for form in (Packed(tokens, range(0, 301, 20)), tokens.view(15, 20, 64)):
        documents = maxsim.quantize(form, codec, **options)
        first, second = (random(n, 3, LQ, 64, device="cuda").half() for n in (2, 3))
        lane.score(first, documents)
        with monkeypatch.context() as context:
            context.setattr(maxsim.ops, "make_problem", None)
            found = lane.score(second, documents)
        mask = torch.ones(documents.codes.shape[:-1], dtype=torch.bool)
        assert torch.equal(found, lane.score(second, documents, document_mask=mask))
        kept = weakref.ref(documents)
        del documents
        gc.collect()
        assert kept() is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_long_queries_keep_their_plans(backend, dtype, monkeypatch):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    lane = Lane(backend, "cuda")
    d = integers(1, 7, 20, 64, device="cuda").to(dtype)
    first, second = (integers(n, 3, 300, 64, device="cuda").to(dtype) for n in (2, 3))
    lane.score(first, d)
    with monkeypatch.context() as context:
        context.setattr(maxsim.ops, "make_problem", None)
        found = lane.score(second, d)
    assert torch.equal(found, lane.score(second, d, document_mask=torch.ones(7, 20, dtype=torch.bool)))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["padded", "long", "candidates", "packed", "views"])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_training_calls_keep_their_plans(form, backend, monkeypatch):
    """A second call with gradients goes straight to its launches, and so does its backward, whichever it is of."""
    if backend == "hopper" and (torch.cuda.get_device_capability() != (9, 0) or form == "candidates"):
        pytest.skip("needs a Hopper GPU, and no candidates")
    lane, LQ = Lane(backend, "cuda"), 300 if form == "long" else 8
    shape = {"padded": (6, 20, 64), "long": (6, 20, 64), "candidates": (3, 2, 20, 64)}.get(form, (120, 64))
    places = {"packed": lambda x: Packed(x, range(0, 121, 20)), "views": lambda x: Views(x, [0, 50, 7], [20, 31, 0])}
    tokens = torch.zeros(*shape, device="cuda", dtype=torch.float16)
    documents = places.get(form, lambda x: x)(tokens)
    every = torch.ones(shape[:-1], dtype=torch.bool)

    def step(seed, needed, *mask):
        q = integers(seed, 3, LQ, 64, bound=1, device="cuda").half()
        with torch.no_grad():
            tokens.copy_(integers(seed + 1, *shape, bound=1))
        leaves = [x for x, need in zip((q, tokens), needed, strict=True) if x.requires_grad_(need).requires_grad]
        scores = lane.score(q, documents, None, *mask)
        upstream = integers(seed + 2, *scores.T.shape, bound=1, device="cuda").float().T
        return [scores.detach(), *(torch.autograd.grad(scores, leaves, upstream) if leaves else ())]

    step(1, (True, True)), step(1, (False, False))
    for needed in ((True, True), (True, False), (False, True), (False, False)):
        step(4, needed)
        with monkeypatch.context() as context:
            context.setattr(maxsim.ops, "make_problem", None)
            found = step(7, needed)
        assert all(map(torch.equal, found, step(7, needed, every)))


@pytest.mark.gpu
def test_the_current_stream():
    """Work goes where the caller's is, and waits for what was put there before it."""
    q, d = integers(9, 2, 8, 64, device="cuda").half(), integers(10, 5, 20, 64, device="cuda").half()
    wanted = GPU.score(q, d)
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = torch.zeros_like(d)
            torch.cuda._sleep(20_000_000)
            late.copy_(d)
            found = GPU.score(q, late)
        stream.synchronize()
        assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_each_thread_its_stream():
    inputs = [
        (integers(n, 2, 8, 64, device="cuda").half(), integers(n + 9, 5, 20, 64, device="cuda").half())
        for n in range(8)
    ]
    wanted = [GPU.score(q, d) for q, d in inputs]
    torch.cuda.synchronize()

    def work(n):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                found = GPU.score(*inputs[n])
            torch.cuda.current_stream().synchronize()
        assert torch.equal(found, wanted[n])

    in_threads(8, work)


@pytest.mark.gpu
def test_queries_move_documents_stay():
    """Cases 84 and 105: the result is where the documents are; a corpus never travels."""
    q, d = random(11, 2, 8, 64), random(12, 5, 20, 64)
    on_card = GPU.score(q.cuda(), d.cuda())
    before = torch.cuda.memory_allocated()
    for queries in (q, q.numpy(), list(q), [each.numpy() for each in q]):
        found = maxsim.score(queries, d.cuda())
        assert found.device.type == "cuda"
        assert torch.equal(found, on_card)
        assert torch.equal(maxsim.topk(queries, d.cuda(), 2).indices, maxsim.topk(q.cuda(), d.cuda(), 2).indices)
    on_host = maxsim.score(q, d)
    del found
    for documents in (d, d.numpy(), list(d), Packed.from_list(list(d))):
        found = maxsim.score(q.cuda(), documents)
        assert found.device.type == "cpu"
        assert torch.equal(found, on_host)
    assert torch.cuda.memory_allocated() <= before
    mask = torch.ones(5, 20, dtype=torch.bool)
    assert torch.equal(GPU.score(q.cuda(), d.cuda(), None, mask), on_card)
    assert torch.equal(maxsim.score(q.cuda(), d, None, mask.cuda()), on_host)


@pytest.mark.gpu
def test_gradients_return_to_where_the_queries_are():
    q, d = random(13, 2, 8, 64).requires_grad_(), random(14, 5, 20, 64, device="cuda").requires_grad_()
    maxsim.score(q, d).sum().backward()
    a = q.detach().cuda().requires_grad_()
    GPU.score(a, d).sum().backward()
    assert q.grad.device.type == "cpu"
    assert torch.equal(q.grad, a.grad.cpu())


@pytest.mark.gpu
def test_scoring_on_the_host_allocates_nothing_on_the_card():
    """Case 84."""
    before = torch.cuda.memory_allocated()
    maxsim.score(random(15, 2, 8, 64), random(16, 5, 20, 64))
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(maxsim.UnsupportedError, match="cpu"):
        maxsim.score(torch.ones(1, 2, device="cuda"), torch.ones(1, 2, device="cuda"), backend="cpu")
    with pytest.raises(maxsim.UnsupportedError, match="float64"):
        maxsim.score(*[torch.ones(1, 2, device="cuda", dtype=torch.float64)] * 2)


@pytest.mark.gpu
def test_offsets_on_the_card_are_clamped_or_checked():
    """Case 85: with `validate` an error, without it no read outside the buffer."""
    tokens = torch.ones(9, 16, device="cuda")
    bad = torch.tensor([0, 3, 2, 9999], device="cuda")
    with pytest.raises(ValueError, match="fall"):
        Packed(tokens, bad, validate=True)
    with pytest.raises(ValueError, match=r"0\.\.9"):
        Views(tokens, torch.tensor([-5], device="cuda"), torch.tensor([2], device="cuda"), validate=True)
    q = torch.ones(2, 16, device="cuda")
    for value in (
        Packed(tokens, bad),
        Views(
            tokens, torch.tensor([2**40, -(2**40), 5], device="cuda"), torch.tensor([3, 2**50, 2**33], device="cuda")
        ),
    ):
        found = GPU.score(q, value)
        torch.cuda.synchronize()
        assert bool(((found == 32) | (found == -float("inf"))).all())
    pairs = torch.tensor([[0, 10**12], [-(10**12), 0]], device="cuda")
    assert GPU.score_pairs(q[None], tokens[None], pairs).tolist() == [32, 32]


def test_workers_of_these_tests_take_gpus_in_turn():
    assert [in_turn(worker, "4,7,9") for worker in ("", "gw0", "gw1", "gw5")] == ["4,7,9", "4,7,9", "7,9,4", "9,4,7"]


@pytest.mark.gpus
def test_another_card_than_the_current():
    """Case 87: forward and backward on cuda:1 while cuda:0 is current, which it stays."""
    q, d = (random(n, 3, 9, 64, device="cuda:1").requires_grad_() for n in (17, 18))
    assert torch.cuda.current_device() == 0
    scores = maxsim.score(q, d)
    scores.sum().backward()
    assert scores.device == q.grad.device == d.grad.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    a, b = (x.detach().to("cuda:0").requires_grad_() for x in (q, d))
    maxsim.score(a, b).sum().backward()
    assert torch.equal(q.grad.cpu(), a.grad.cpu())
    assert torch.equal(d.grad.cpu(), b.grad.cpu())
    assert torch.equal(maxsim.score(a, d), scores)
    assert torch.equal(maxsim.score(q.cpu(), d), scores)
    for each in ("cuda:0", "cuda:1", "cuda:0"):  # the same shapes on one card and the other
        assert torch.equal(maxsim.score(q.detach().to(each), d.detach().to(each)).cpu(), scores.detach().cpu())


@pytest.mark.gpus
def test_a_thread_a_card():
    def work(n):
        device = f"cuda:{n % torch.cuda.device_count()}"
        q, d = integers(n, 3, 9, 64, device=device), integers(n + 1, 5, 30, 64, device=device)
        for _ in range(20):
            assert torch.equal(maxsim.score(q, d).cpu(), maxsim.score(q.cpu(), d.cpu()))

    in_threads(8, work)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("training", [False, True])
def test_compiled_variants_are_bounded(layout, training):
    """Case 95: 200 calls of random numbers and lengths compile a few kernels, not one a length."""
    forget_compiled()
    pick = python_random.Random(0)
    for _ in range(200):
        NQ, ND, LQ, LD = pick.randint(1, 40), pick.randint(1, 60), pick.randint(1, 300), pick.randint(1, 400)
        q = torch.zeros(NQ, LQ, 128, dtype=torch.float16, device="cuda", requires_grad=training)
        if layout == "packed":
            d = Packed(torch.zeros(ND * LD, 128, dtype=torch.float16, device="cuda"), range(0, ND * LD + 1, LD))
        else:
            d = torch.zeros(ND, LD, 128, dtype=torch.float16, device="cuda", requires_grad=training)
        scores = GPU.score(q, d)
        if training:
            scores.sum().backward()
    assert 0 < variants() <= (24 if training else 12)


PROCESS = """
import torch, maxsim
q = torch.ones(2, 8, 64, dtype=torch.float16, device="cuda")
d = torch.ones(3, 20, 64, dtype=torch.float16, device="cuda")
assert maxsim.score(q, d, backend="triton").tolist() == [[512] * 3] * 2
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_processes_sharing_a_cache(tmp_path):
    """Case 94: eight processes, one fresh cache directory, the same first call; a few rounds."""
    path = f"{pathlib.Path(maxsim.__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    for turn in range(4):
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / str(turn)), "PYTHONPATH": path}
        running = [
            subprocess.Popen([sys.executable, "-c", PROCESS], env=environment, stderr=subprocess.PIPE, text=True)
            for _ in range(8)
        ]
        for process in running:
            _, errors = process.communicate()
            assert process.returncode == 0, errors[-2000:]


@pytest.mark.gpu
def test_pairs_take_no_launch_each(monkeypatch):
    """Case 100: as many launches for 64 distinct pairs as for 4."""
    from triton.runtime.jit import JITFunction

    run, launches = JITFunction.run, []
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: (launches.append(1), run(*args, **options))[1])
    q, d = integers(22, 64, 8, 64, device="cuda"), integers(23, 64, 20, 64, device="cuda")
    counts = []
    for P in (4, 64):
        launches.clear()
        GPU.score_pairs(q[:P], d[:P])
        GPU.score_pairs(q, d, torch.arange(P).repeat(2, 1).T)
        counts.append(len(launches))
    assert counts[0] == counts[1] > 0


@pytest.mark.gpu
def test_fastest_that_serves():
    q, d = torch.ones(2, 3, 8, device="cuda"), torch.ones(4, 5, 8, device="cuda")
    assert maxsim.backend_for(q, d) == "triton"
    assert maxsim.backend_for(q.cpu(), d.cpu()) == "cpu"
    assert maxsim.backend_for(q, d.cpu()) == "cpu"
    assert maxsim.backend_for(q.cpu(), d) == "triton"


@pytest.mark.gpu
def test_repeated_calls_see_new_values_and_settings():
    """A call like an earlier one may skip the checks, but not what they look at."""
    q, d = random(19, 2, 33, 64, device="cuda"), random(20, 5, 40, 64, device="cuda")
    for _ in range(3):
        first = maxsim.score(q, d)
    other = random(21, 5, 40, 64, device="cuda")
    assert torch.equal(maxsim.score(q, other), maxsim.score(q, [*other]))
    assert torch.equal(maxsim.score(q, d), first)
    misaligned = torch.zeros(q.numel() + 1, device="cuda")[1:].view_as(q).copy_(q)
    assert torch.equal(maxsim.score(misaligned, d), first)
    wide = torch.zeros(5, 40, 96, device="cuda")[..., :64].copy_(d)
    assert torch.equal(maxsim.score(q, wide), first)
    mask = torch.ones(5, 40, dtype=torch.bool, device="cuda")
    mask[0] = False
    assert float(maxsim.score(q, d, None, mask)[0, 0]) == -float("inf")
    assert torch.equal(maxsim.score(q, d), first)
    torch.set_float32_matmul_precision("medium")
    coarse = maxsim.score(q, d)
    torch.set_float32_matmul_precision("highest")
    assert not torch.equal(coarse, first)
    assert torch.equal(maxsim.score(q, d), first)
    leaf = q.clone().requires_grad_()
    assert maxsim.score(leaf, d).requires_grad
    assert not maxsim.score(q, d).requires_grad
    with pytest.raises(TypeError):
        maxsim.score(q, d.half())
