"""`maxsim.distributed`: each rank's scores and gradients are those of one process, failures reach every rank, and the
loss is right under DDP. Functions named `on_*` run on the ranks; each makes all ranks' inputs, and so the truth."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from lanes import integers, random
from ranks import Ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import maxsim
from maxsim import Packed, Views, autograd
from maxsim.distributed import mean, offset, score
from maxsim.packed import as_tensor

METHODS = ("gather", "ring")
D = 16


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module", params=["cpu:gloo,cuda:nccl", "nccl"])
def gpus(request) -> Iterator[Ranks]:
    """With facts by the host, and by the GPUs."""
    ranks = Ranks(2, request.param)
    yield ranks
    ranks.close()


def here() -> str:
    """The device of a rank's tokens."""
    backend = dist.distributed_c10d.get_backend_config()
    return f"cuda:{dist.get_rank()}" if "nccl" in backend else "cpu"


# Inputs: items of every rank, and a rank's own in some form


def lengths_of(form: str, rank: int) -> list[int]:
    """Of the documents of a rank."""
    if form in ("none on 1", "packed, none on 1") and rank == 1:
        return []
    if form in ("padded", "masked", "none on 1", "no queries on 0"):
        return [9] * 3
    if form == "counts":
        return [9] * (1 + 2 * rank)
    if form == "lengths":
        return [4 + 3 * rank] * (2 + rank)
    return [5, 0, 9, 1][: 2 + (rank + 1) % 3]


def items_of(form: str, size: int, make=integers, dtype=torch.float32):
    """Queries and documents of each rank, lists of `[L, D]`, and masks of documents."""
    queries, documents, masks = [], [], []
    for rank in range(size):
        count = 0 if form == "no queries on 0" and rank == 0 else 2 + rank
        queries.append([make(100 * rank + n, 3 + n, D).to(here(), dtype) for n in range(count)])
        lengths = lengths_of(form, rank)
        documents.append([make(100 * rank + 50 + n, length, D).to(here(), dtype) for n, length in enumerate(lengths)])
        masks.append([integers(100 * rank + 70 + n, length, device=here()) > -1 for n, length in enumerate(lengths)])
    return queries, documents, masks


def built(form: str, rank: int, documents: list[torch.Tensor], masks: list[torch.Tensor], dtype: torch.dtype):
    """A leaf, its documents in a form, and their mask."""
    if form == "mixed":
        form = ("padded", "packed", "views", "list")[rank % 4]
    mask = None
    if form in ("masked", "packed masked") or (form == "masked on 0" and rank == 0):
        mask = torch.cat(masks)
    tokens = torch.cat(documents) if documents else torch.zeros(0, D, dtype=dtype, device=here())
    ends = torch.tensor([len(each) for each in documents]).cumsum(0)
    if form == "views":
        leaf = torch.cat([torch.full((3, D), float("nan"), dtype=dtype, device=here()), tokens]).requires_grad_()
        lengths = torch.tensor([len(each) for each in documents])
        return leaf, Views(leaf, ends - lengths + 3, lengths), None
    leaf = tokens.requires_grad_()
    if form in ("packed", "packed masked", "masked on 0", "packed, none on 1"):
        return leaf, Packed(leaf, [0, *ends.tolist()]), mask
    if form == "jagged":
        offsets = torch.cat([ends.new_zeros(1), ends]).to(here())
        return leaf, torch.nested.nested_tensor_from_jagged(leaf, offsets), None
    if form == "list" or len({len(each) for each in documents}) > 1:
        return leaf, list(leaf.split([len(each) for each in documents])), mask
    count = len(documents)
    padded = leaf.view(count, len(documents[0]) if count else 7, D)
    return leaf, padded, None if mask is None else mask.view(count, -1)


def one_process(items, with_masks: bool, upstream: torch.Tensor, **options):
    """Scores and the leaves' gradients of all ranks' items at once."""
    queries, documents, masks = items
    flat_q = [each.clone().requires_grad_() for rank in queries for each in rank]
    flat_d = [each.clone().requires_grad_() for rank in documents for each in rank]
    given = [mask for rank in masks for mask in rank] if with_masks else None
    scores = maxsim.score(flat_q, flat_d, None, given, **options)
    scores.backward(upstream.to(scores))
    return scores.detach(), [each.grad for each in flat_q], [each.grad for each in flat_d]


def own(values, parts: list[list[torch.Tensor]], rank: int):
    low = sum(len(each) for each in parts[:rank])
    return values[low : low + len(parts[rank])]


FORMS = (
    "padded", "masked", "counts", "lengths", "packed", "packed masked", "masked on 0", "views", "list", "jagged",
    "mixed", "none on 1", "packed, none on 1", "no queries on 0",
)  # fmt: skip


def compared(form: str, method: str, dtype: torch.dtype, make=integers, **options):
    """This rank's scores and gradients, and what one process finds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    items = items_of(form, size, make, dtype)
    queries, documents, masks = items
    if form == "masked on 0":
        masks = [masks[0], *([torch.ones_like(mask) for mask in each] for each in masks[1:])]
        items = (queries, documents, masks)
    shape = sum(len(each) for each in queries), sum(len(each) for each in documents)
    upstream = make(7, *shape)
    truth = one_process(items, "masked" in form, upstream, **options)
    leaf, given, mask = built(form, rank, documents[rank], masks[rank], dtype)
    mine = [each.clone().requires_grad_() for each in queries[rank]]
    asked = mine if mine else torch.zeros(0, 3, D, dtype=dtype, device=here())
    scores = score(asked, given, None, mask, method=method, **options)
    scores.backward(own(upstream, queries, rank).to(scores))
    of_leaf = leaf.grad[3:] if leaf.grad is not None and leaf.shape[0] > sum(map(len, documents[rank])) else leaf.grad
    found = scores.detach(), [each.grad for each in mine], of_leaf
    wanted_d = own(truth[2], documents, rank)
    wanted = own(truth[0], queries, rank), own(truth[1], queries, rank), torch.cat([leaf.new_zeros(0, D), *wanted_d])
    return found, wanted


def on_exact(form: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    for method in METHODS:
        found, wanted = compared(form, method, dtype, **options)
        assert found[0].dtype == wanted[0].dtype
        assert torch.equal(found[0], wanted[0]), (method, found[0], wanted[0])
        assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True)), method
        assert torch.equal(found[2], wanted[2]), (method, found[2], wanted[2])


@pytest.mark.parametrize("form", FORMS)
def test_as_one_process(two, form):
    """Integers: every sum is exact, so that scores and gradients are compared bit for bit; half precision shows that
    gradients are rounded once."""
    for dtype in (torch.float32, torch.bfloat16):
        two.run(on_exact, form, dtype, {})


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_as_one_process_by_four(four, form):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        four.run(on_exact, form, dtype, {})


@pytest.mark.parametrize("form", ["masked", "packed masked", "masked on 0"])
def test_masked_zero(two, form):
    two.run(on_exact, form, torch.float32, {"masked": "zero"})


def on_rounding(normalize: bool) -> None:
    results = {}
    for method in (*METHODS, *METHODS):
        found, wanted = compared("mixed", method, torch.float32, random, normalize=normalize)
        assert torch.equal(found[0], wanted[0])
        for a, b in zip([*found[1], found[2]], [*wanted[1], wanted[2]], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        before = results.setdefault(method, found)
        assert all(torch.equal(a, b) for a, b in zip(found[1], before[1], strict=True)), "another run, other bits"
        assert torch.equal(found[2], before[2])
    assert torch.equal(results["gather"][2], results["ring"][2]), "gradients of documents: the same by both"


@pytest.mark.parametrize("normalize", [False, True])
def test_rounding(two, normalize):
    """Scores have one process's bits, gradients differ by the order of additions, and not from run to run."""
    two.run(on_rounding, normalize)


@pytest.mark.slow
def test_rounding_by_four(four):
    four.run(on_rounding, False)


# Autograd


def plain(method: str, seed: int = 0):
    rank = dist.get_rank()
    q = integers(seed + rank, 2, 3, D, device=here()).requires_grad_()
    d = integers(seed + 10 + rank, 3 + rank, 5, D, device=here()).requires_grad_()
    return q, d, score(q, d, method=method)


def on_repeated_backwards(method: str) -> None:
    q, d, scores = plain(method)
    scores.sum().backward(retain_graph=True)
    once = q.grad.clone(), d.grad.clone()
    scores.mul_(2)  # the backward never reads them
    scores.sum().backward()
    assert torch.equal(q.grad, 3 * once[0])
    assert torch.equal(d.grad, 3 * once[1])
    with pytest.raises(RuntimeError, match="second time"):
        scores.sum().backward()
    first, second = plain(method, 1), plain(method, 2)  # two forwards, then both backwards, crossed
    first[2].sum().backward()
    second[2].sum().backward()
    for seed, (q, d, _) in ((1, first), (2, second)):
        a, b, again = plain(method, seed)
        again.sum().backward()
        assert torch.equal(q.grad, a.grad)
        assert torch.equal(d.grad, b.grad)


def on_second_derivative(method: str) -> None:
    q, d, scores = plain(method)
    (grad,) = torch.autograd.grad(scores.sum(), d, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        (grad.square().sum() + q.sum()).backward()


def on_modes(method: str) -> None:
    rank = dist.get_rank()
    q, d, scores = plain(method)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = score(q, d, method=method)
        assert not found.requires_grad
        assert torch.equal(found, scores)
    assert not score(q.detach(), d.detach(), method=method).requires_grad
    with torch.set_grad_enabled(rank == 0), pytest.raises(ValueError, match="no_grad"):
        score(q, d, method=method)
    with torch.autocast(here().split(":")[0], torch.bfloat16):
        assert torch.equal(score(q, d, method=method), scores)


def on_needs(method: str) -> None:
    """A rank whose inputs need nothing takes part in the backward, and gets nothing."""
    rank = dist.get_rank()
    q, d, scores = plain(method)
    scores.sum().backward()
    for of_q, of_d in ((rank == 0, False), (False, rank == 1), (rank == 0, rank == 1), (False, True), (True, False)):
        a, b = q.detach().requires_grad_(of_q), d.detach().requires_grad_(of_d)
        scores = score(a, b, method=method)
        assert scores.requires_grad
        scores.sum().backward()
        assert torch.equal(a.grad, q.grad) if of_q else a.grad is None
        assert torch.equal(b.grad, d.grad) if of_d else b.grad is None
    scores = score(q, d, method=method)
    found = torch.autograd.grad(scores.sum(), (q,) if rank else (q, d))  # not what the other rank asks for
    assert torch.equal(found[0], q.grad)


def on_places(method: str) -> None:
    """Tokens that one rank overwrites: noticed there, and told to the other."""
    rank = dist.get_rank()
    q, d, _ = plain(method)
    q = q * 1
    scores = score(q, d, method=method)
    if rank == 1:
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


def on_checkpoint(method: str) -> None:
    q, d, scores = plain(method)
    scores.sum().backward()
    a, b = q.detach().requires_grad_(), d.detach().requires_grad_()
    kept = torch.utils.checkpoint.checkpoint(lambda a, b: score(a, b, method=method), a, b, use_reentrant=False)
    kept.sum().backward()
    assert torch.equal(a.grad, q.grad)
    assert torch.equal(b.grad, d.grad)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "check", [on_repeated_backwards, on_second_derivative, on_modes, on_needs, on_places, on_checkpoint]
)
def test_autograd(two, check, method):
    two.run(check, method)


def on_compiled(method: str) -> None:
    """A function that is compiled calls what is not traced, forward and backward, with the results it has alone."""
    q, d, scores = plain(method)
    scores.logsumexp(1).sum().backward()
    wanted = [scores.detach(), q.grad, d.grad]

    @torch.compile(backend="aot_eager")
    def loss(q: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = score(q * 1, d * 1, method=method)
        return scores, mean(scores.logsumexp(1)) + 0 * offset(len(d))

    others = q.detach().requires_grad_(), d.detach().requires_grad_()
    again, total = loss(*others)
    assert torch.equal(again, wanted[0])
    total.backward()
    for found, want in zip(others, wanted[1:], strict=True):
        torch.testing.assert_close(found.grad * len(q), want)  # equally many queries everywhere


@pytest.mark.parametrize("method", METHODS)
def test_compiled(two, method):
    two.run(on_compiled, method)


# Failures


def told(call, on: int, kind: type[Exception], text: str) -> None:
    """The call raises its own error on rank `on`, and names it on the others, at once; the group goes on."""
    start = time.monotonic()
    with pytest.raises(kind if dist.get_rank() == on else RuntimeError) as caught:
        call()
    assert text in str(caught.value)
    if dist.get_rank() != on:
        assert f"rank {on} of {dist.get_world_size()}" in str(caught.value)
        assert kind.__name__ in str(caught.value)
    assert time.monotonic() - start < 10
    dist.barrier()


def on_wrong_arguments(method: str) -> None:
    wrong, q, d = dist.get_rank() == 1, torch.ones(2, 3, D, device=here()), torch.ones(2, 5, D, device=here())
    told(lambda: score(q, d[..., :4] if wrong else d, method=method), 1, ValueError, "width")
    told(lambda: score(q, d.half() if wrong else d, method=method), 1, TypeError, "float16")
    told(lambda: score(q, None if wrong else d, method=method), 1, TypeError, "NoneType")
    served = "cpu" if q.is_cuda else "triton"  # by the other device
    told(lambda: score(q, d, backend=served if wrong else None, method=method), 1, maxsim.UnsupportedError, served)
    told(lambda: score(q, d[:, None] if wrong else d, method=method), 1, ValueError, "candidates")
    told(lambda: score(q, d, method="star" if wrong else method), 1, ValueError, "star")
    told(lambda: offset(-2 if wrong else 2), 1, ValueError, "-2")
    plain(method)


def on_disagreement(method: str) -> None:
    wrong, q, d = dist.get_rank() == 1, torch.ones(2, 3, D, device=here()), torch.ones(2, 5, D, device=here())
    other = METHODS[METHODS.index(method) - 1]
    dtype = torch.bfloat16 if wrong else torch.float32
    for call, text in (
        (lambda: score(q[..., : D - wrong], d[..., : D - wrong], method=method), "widths by rank: [16, 15]"),
        (lambda: score(q.to(dtype), d.to(dtype), method=method), "dtypes by rank"),
        (lambda: score(q, d, method=other if wrong else method), "method by rank"),
        (lambda: score(q, d, masked="zero" if wrong else "exclude", method=method), "masked by rank"),
        (lambda: score(q, d, normalize=wrong, method=method), "normalize by rank"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is looked at
            call()
        assert text in str(caught.value)
    q.requires_grad_()
    scores = score(q, d, method=method)
    with pytest.raises(RuntimeError, match="not at the same step"):
        scores.sum().backward() if wrong else score(q, d, method=method)
    first, second = (score(q, each, method=method) for each in (d, 2 * d))
    with pytest.raises(RuntimeError, match="of different calls"):
        (second if wrong else first).sum().backward()
    with pytest.raises(RuntimeError, match="not at the same step"):
        offset(2) if wrong else mean(torch.ones(2, device=here()))
    plain(method)


def on_failure_inside(method: str) -> None:
    """Memory that runs out on one rank, in the forward and in the backward."""

    def broken(*args, **options):
        raise torch.OutOfMemoryError("no memory for this")

    q, d, scores = plain(method)
    for name, call in (("run", lambda: score(q, d, method=method)), ("gradients", lambda: scores.sum().backward())):
        right = getattr(autograd, name)
        if dist.get_rank() == 1:
            setattr(autograd, name, broken)
        try:
            told(call, 1, torch.OutOfMemoryError, "no memory for this")
        finally:
            setattr(autograd, name, right)
    plain(method)


class Short(TorchDispatchMode):
    """Memory for `left` of the package's allocations, but for what ranks say to each other."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        frame, within = sys._getframe(), set()
        while frame is not None:
            within.add((frame.f_globals["__name__"].split(".")[0], frame.f_code.co_name))
            frame = frame.f_back
        calls = {name for package, name in within if package == "maxsim"}
        if calls and "agree" not in calls and function.namespace != "c10d":
            held = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
            new = [x for x in tree_leaves(made) if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in held]
            taken = sum(x.numel() > 0 for x in new)
            self.left -= taken
            if taken and self.left < 0:
                raise MemoryError("no memory for this")
        return made


def on_any_allocation(form: str, method: str) -> None:
    """Memory that runs out on one rank, wherever it is asked for."""
    rank = dist.get_rank()
    queries, documents, masks = items_of(form, 2)
    leaf, given, mask = built(form, rank, documents[rank], masks[rank], torch.float32)
    if isinstance(given, torch.Tensor):  # not contiguous
        given = torch.cat([given, given], 2)[..., :D]
    q = torch.cat(queries[rank])[None]
    with Short(1000):  # the first such mode imports much
        score(q, given, None, mask, method=method)
    for wanted in ("score", "backward"):
        for left in range(200):
            scores = None if wanted == "score" else score(q, given, None, mask, method=method)
            upstream = None if scores is None else torch.ones_like(scores)
            full, failure = Short(left if rank else 1000), None
            start = time.monotonic()
            try:
                with full:
                    if scores is None:
                        score(q, given, None, mask, method=method)
                    else:
                        torch.autograd.grad(scores, leaf, upstream)
            except (MemoryError, RuntimeError) as error:
                failure = error
            assert time.monotonic() - start < 10
            ended = torch.tensor(int(failure is None))
            dist.broadcast(ended, 1)
            if ended:
                assert failure is None
                break
            assert isinstance(failure, MemoryError if rank else RuntimeError), failure
            assert "no memory for this" in str(failure)
        assert left > 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", ["padded", "masked on 0", "mixed", "packed, none on 1"])
def test_memory_that_runs_out_anywhere(two, form, method):
    two.run(on_any_allocation, form, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("check", [on_wrong_arguments, on_disagreement, on_failure_inside])
def test_failures_reach_every_rank(two, check, method):
    """Case 92."""
    two.run(check, method)


def on_death(method: str) -> None:
    if dist.get_rank() == 1:
        autograd.run = lambda *args, **options: os._exit(1)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        plain(method)
    assert time.monotonic() - start < 20


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_dies(method):
    ranks = Ranks(2)
    try:
        ranks.run(on_death, method, dead=(1,))
    finally:
        ranks.close()


# Groups


def on_groups(method: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([each]) for each in range(size)]
    q, d = (integers(10 * n + rank, 2 + n, 3, D, device=here()).requires_grad_() for n in range(2))
    assert torch.equal(score(q, d, method=method, group=alone[rank]), maxsim.score(q, d))
    assert offset(3, alone[rank]) == 0
    assert mean(torch.tensor([1.0, 3.0]), alone[rank]) == 2
    with pytest.raises(ValueError, match="not in the process group"):
        score(q, d, group=alone[rank - 1], method=method)
    if size == 4:
        pairs = [dist.new_group([1, 3]), dist.new_group([0, 2])]
        group = pairs[rank % 2 == 0]
        scores = score(q, d, method=method, group=group)
        everyone = [integers(10 + other, 3, 3, D) for other in (rank % 2, rank % 2 + 2)]
        assert torch.equal(scores, maxsim.score(q, torch.cat(everyone)))
        scores.sum().backward()
        assert torch.equal(q.grad, torch.autograd.grad(maxsim.score(q, torch.cat(everyone)).sum(), q)[0])
        asking = torch.cat([integers(other, 2, 3, D) for other in (rank % 2, rank % 2 + 2)])
        assert torch.equal(d.grad, torch.autograd.grad(maxsim.score(asking, d).sum(), d)[0])
        assert offset(3, group) == (3 if rank > 1 else 0)


@pytest.mark.parametrize("method", METHODS)
def test_groups(two, method):
    two.run(on_groups, method)


def on_destroyed_groups(method: str) -> None:
    group = dist.new_group([0, 1])
    kept = weakref.ref(group)
    scores = score(*(integers(n, 2, 3, D).requires_grad_() for n in range(2)), method=method, group=group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="the process group was destroyed"):
        scores.sum().backward()


@pytest.mark.parametrize("method", METHODS)
def test_a_graph_keeps_no_destroyed_group(two, method):
    two.run(on_destroyed_groups, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_groups_of_four(four, method):
    four.run(on_groups, method)


def on_tensors_of_other_makes() -> None:
    """What functional collectives give has no memory before it is waited for; a DTensor has none."""
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    own = (torch.arange(48.0).view(2, 3, 8) % 7 - 3).requires_grad_()
    queries = torch.eye(8)[None, :2]
    documents = collectives.all_gather_tensor_autograd(own, 0, dist.group.WORLD)
    assert type(documents) is not torch.Tensor
    assert type(as_tensor(documents, "documents")) is torch.Tensor
    assert type(as_tensor(documents.detach(), "documents")) is torch.Tensor
    scores = maxsim.score(queries, documents)
    assert torch.equal(scores, maxsim.score(queries, torch.cat([own, own])))
    assert torch.equal(maxsim.score(queries, list(documents)), scores)
    scores.sum().backward()
    wanted = torch.autograd.grad(2 * maxsim.score(queries, own).sum(), own)[0]
    assert torch.equal(own.grad, wanted)
    shards = distribute_tensor(own.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    for call in (lambda: maxsim.score(queries, shards), lambda: maxsim.Packed(shards[0], [0, 3])):
        with pytest.raises(TypeError, match=r"got DTensor, .* give its to_local\(\) or full_tensor\(\)"):
            call()


def test_tensors_of_other_makes(two):
    two.run(on_tensors_of_other_makes)


def test_without_a_group():
    q, d = integers(1, 2, 3, D).requires_grad_(), integers(2, 4, 5, D)
    for method in METHODS:
        scores = score(q, d, method=method)
        assert torch.equal(scores, maxsim.score(q, d))
        assert scores.requires_grad
    assert torch.equal(score(q, iter(d)), maxsim.score(q, d))
    with pytest.raises(ValueError, match="'gather', 'ring'"):
        score(q, d, method="star")
    with pytest.raises(ValueError, match="candidates"):
        score(q, d[None].expand(2, 4, 5, D))
    with pytest.raises(ValueError, match="not quantised ones"):
        score(torch.ones(1, 1, 4), maxsim.quantize(torch.ones(1, 1, 4)))
    assert offset(4) == 0
    for wrong in (-2, 1.5, True):
        with pytest.raises(ValueError, match="count must be"):
            offset(wrong)
    for length in range(1, 200):
        losses = random(length, length)
        assert torch.equal(mean(losses), losses.mean())
    assert mean(torch.zeros(0)).isnan()
    for wrong in (torch.tensor([1, 3]), [1.0]):
        with pytest.raises(TypeError, match=r"losses must be a tensor of floats, got (torch.int64|list)"):
            mean(wrong)


def test_reached_from_the_package():
    assert maxsim.distributed.score is score
    assert "distributed" in dir(maxsim)
    assert all(inspect.getdoc(getattr(maxsim.distributed, name)) for name in maxsim.distributed.__all__)
    alone, across = (list(inspect.signature(function).parameters.values()) for function in (maxsim.score, score))
    assert across[: len(alone)] == alone
    assert [each.name for each in across[len(alone) :]] == ["group", "method"]


# The loss


def on_mean() -> None:
    """The bits of `losses.mean()` where all ranks have equally many queries; what it is of none."""
    rank = dist.get_rank()
    for length in range(1, 60):
        losses = random(100 * length + rank, length, device=here())
        assert torch.equal(mean(losses), losses.mean())
    many = torch.full((1000,), 100.0, dtype=torch.float16, device=here())  # whose sum is beyond float16
    assert mean(many) == 100
    some = torch.ones(3 * rank, device=here(), requires_grad=True)
    loss = mean(some)
    assert loss == 2 * rank
    loss.backward()
    assert torch.equal(some.grad, torch.full_like(some, 2 / 3))
    assert mean(some[:0]).isnan()
    told(lambda: mean(3.0 if rank else some), 1, TypeError, "losses must be")


def test_mean(two):
    two.run(on_mean)


def on_loss(counts: list[int], method: str) -> None:
    """DDP's averaged gradient is that of one process's mean loss, with no factor of the number of ranks."""
    rank, device = dist.get_rank(), here()
    dtype, tolerance = (torch.float64, 1e-12) if device == "cpu" else (torch.float32, 1e-5)
    torch.manual_seed(0)
    encoder, alone = (torch.nn.Linear(12, D, dtype=dtype, device=device) for _ in range(2))
    alone.load_state_dict(encoder.state_dict())
    wrapped = torch.nn.parallel.DistributedDataParallel(encoder)
    queries = [random(each, count, 4, 12, dtype=dtype, device=device) for each, count in enumerate(counts)]
    documents = [random(10 + each, count, 7, 12, dtype=dtype, device=device) for each, count in enumerate(counts)]

    def losses(scores: torch.Tensor, first: int) -> torch.Tensor:
        labels = first + torch.arange(len(scores), device=scores.device)
        return torch.nn.functional.cross_entropy(scores / 5, labels, reduction="none")

    whole = losses(maxsim.score(alone(torch.cat(queries)), alone(torch.cat(documents))), 0)
    whole.mean().backward()
    first = offset(counts[rank])
    assert first == sum(counts[:rank])
    scores = score(wrapped(queries[rank]), wrapped(documents[rank]), method=method)
    mine = losses(scores, first)
    torch.testing.assert_close(mine, whole[first : first + counts[rank]])
    loss = mean(mine)
    if len(set(counts)) == 1:
        assert torch.equal(loss, mine.mean())
    loss.backward()
    for found, wanted in zip(encoder.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=tolerance, atol=tolerance)
    average = loss.detach() / dist.get_world_size()
    dist.all_reduce(average)
    torch.testing.assert_close(average, whole.mean().detach())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("counts", [[4, 4], [2, 5], [0, 3]], ids=str)
def test_loss_under_ddp(two, counts, method):
    """Cases 57 and 58."""
    two.run(on_loss, counts, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("counts", [[3, 3, 3, 3], [1, 4, 0, 2]], ids=str)
def test_loss_under_ddp_by_four(four, counts, method):
    four.run(on_loss, counts, method)


def on_several_documents() -> None:
    """Documents `[B, N, L, D]`, the right one of each query first: the labels that the guide gives."""
    rank, counts, N = dist.get_rank(), [3, 2], 4
    queries = [random(each, count, 5, D, device=here()) for each, count in enumerate(counts)]
    documents = [random(10 + each, count, N, 7, D, device=here()) for each, count in enumerate(counts)]
    found = score(queries[rank], documents[rank].flatten(0, 1))
    labels = offset(counts[rank] * N) + torch.arange(counts[rank], device=here()) * N
    for query, of, scores, label in zip(queries[rank], documents[rank], found, labels, strict=True):
        assert torch.equal(scores[label : label + N], maxsim.score(query, of)[0])


def test_several_documents_a_query(two):
    two.run(on_several_documents)


# Two GPUs


def on_memory(method: str) -> None:
    """A ring holds its own documents and a block that comes (of more than two ranks two), a gather all of them."""
    rank, block = dist.get_rank(), 64 << 20
    d = torch.ones(block // (2 * 128 * 64), 64, 128, dtype=torch.float16, device=here())
    q = integers(rank, 2, 3, 128, dtype=torch.float16, device=here())
    score(q, d, method=method)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    score(q, d, method=method)
    torch.cuda.synchronize()
    blocks = {"gather": 2, "ring": 1}[method]
    assert torch.cuda.max_memory_allocated() - before <= blocks * block + (8 << 20)


@pytest.mark.gpus
@pytest.mark.parametrize("form", FORMS)
def test_gpus_as_one_process(gpus, form):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gpus.run(on_exact, form, dtype, {})


@pytest.mark.gpus
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "check",
    [
        on_repeated_backwards, on_second_derivative, on_modes, on_needs, on_places, on_checkpoint, on_wrong_arguments,
        on_disagreement, on_failure_inside, on_memory,
    ],
)  # fmt: skip
def test_gpus(gpus, check, method):
    gpus.run(check, method)


@pytest.mark.gpus
@pytest.mark.parametrize("normalize", [False, True])
def test_gpus_rounding(gpus, normalize):
    gpus.run(on_rounding, normalize)


@pytest.mark.gpus
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("counts", [[4, 4], [2, 5], [0, 3]], ids=str)
def test_gpus_loss_under_ddp(gpus, counts, method):
    gpus.run(on_loss, counts, method)


@pytest.mark.parametrize("ended", ["well", "badly"])
def test_an_exchange_that_ends_while_it_is_looked_at(ended, monkeypatch):
    """A wait that timed out just before its exchange ended: what became of that counts, and one that succeeded is told
    to nobody as broken."""
    from types import SimpleNamespace

    from maxsim.distributed import talk

    told, waits = {}, iter([RuntimeError("timed out"), None if ended == "well" else RuntimeError("connection closed")])

    def wait(*timeout):
        error = next(waits)
        if error is not None:
            raise error

    monkeypatch.setattr(talk.dist.distributed_c10d, "_get_default_store", lambda: SimpleNamespace(set=told.__setitem__))
    own = SimpleNamespace(group=SimpleNamespace(group_name="g"), rank=3)
    work = SimpleNamespace(wait=wait, is_completed=lambda: True)
    if ended == "well":
        talk.Talk._wait(own, work)
        assert told == {}
    else:
        with pytest.raises(RuntimeError, match="connection closed"):
            talk.Talk._wait(own, work)
        assert told == {f"{talk.BROKEN}/g": "3"}
