"""Past 2^31 elements and 65,535 of anything, and how much memory a call takes. The big ones need a GPU; each has a
cheap sibling."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from budget import true_scores
from lanes import Lane, integers, interpreter_when

import maxsim
from maxsim import Packed, Views

MIB = 1 << 20
GPU = Lane("triton", "cuda")
huge = pytest.mark.skipif(
    "not __import__('lanes').CUDA or torch.cuda.mem_get_info()[1] < 70 << 30", reason="needs a GPU with 70 GiB"
)


def truth(q, d):
    return true_scores(q, d, *[torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) for x in (q, d)])


# Cheap: the same address arithmetic with few tokens, in memory that is reserved and hardly touched.


@pytest.mark.dtypes(torch.float16)
def test_views_beyond_two_to_the_31(lane, dtype):
    """Cases 25, 28 and 31: a document whose first element lies past 2^31."""
    D, T = 320, 2**31 // 320 + 1000
    buffer = torch.zeros(T, D, dtype=dtype, device=lane.device)
    document = integers(1, 5, D, dtype=dtype, device=lane.device)
    buffer[-5:] = document
    q = integers(2, 3, D, dtype=dtype, device=lane.device)
    views = Views(buffer, [0, T - 5, T - 1], [2, 5, 1])
    found = lane.score(q, views)
    assert torch.equal(found[:, 1:], lane.score(q, [document, document[4:]]))
    assert float(found[0, 0]) == 0
    assert torch.equal(lane.matches(q, views).index[:, 1], lane.matches(q, document).index[:, 0])


@interpreter_when(lambda lane, dtype, side: side == "documents")
@pytest.mark.dtypes(torch.float16)
@pytest.mark.parametrize("side", ["queries", "documents"])
def test_strides_beyond_two_to_the_31(lane, dtype, side):
    """Case 31: item × stride needs 64 bits, forward and backward."""
    stride = 2**31 // 2 + 64
    buffer = torch.zeros(2 * stride + 256, dtype=dtype, device=lane.device)
    apart = buffer.as_strided((3, 4, 16), (stride, 16, 1))
    apart[...] = integers(3, 3, 4, 16, dtype=dtype, device=lane.device)
    near, other = (
        apart.clone().requires_grad_(),
        integers(4, 2, 5, 16, dtype=dtype, device=lane.device).requires_grad_(),
    )
    far = apart.detach().requires_grad_()

    def score(x, y):
        return lane.score(x, y) if side == "queries" else lane.score(y, x)

    wanted = torch.autograd.grad(score(near, other).sum(), (near, other))
    scores = score(far, other)
    found = torch.autograd.grad(scores.sum(), (far, other))
    assert torch.equal(scores, score(near, other))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("NQ", "ND"), [(1, 65536), (65536, 1), (3, 70000)])
def test_more_than_65535_items(lane, NQ, ND):
    """Case 32: forward and backward."""
    q, d = (
        integers(5, NQ, 1, 16, device=lane.device).requires_grad_(),
        integers(6, ND, 1, 16, device=lane.device).requires_grad_(),
    )
    found = lane.score(q, d)
    wanted = q.detach()[:, 0].double() @ d.detach()[:, 0].double().T
    assert torch.equal(found.detach().double(), wanted)
    found.sum().backward()
    assert torch.equal(q.grad[0, 0], d.detach().double().sum(0)[0].float())
    assert torch.equal(d.grad[-1, 0], q.detach().double().sum(0)[0].float())


def test_one_document_of_more_than_65535_tiles(lane):
    """Case 32 (d): with a tile of 16 at least, a million tokens."""
    LD = 65536 * 16 + 1
    d = torch.zeros(1, LD, 16, dtype=torch.float16, device=lane.device)
    q = torch.zeros(2, 16, dtype=torch.float16, device=lane.device)
    d[0, -1, 3], q[:, 3] = 2, 1
    leaf = d.requires_grad_()
    scores = lane.score(q, leaf)
    assert scores.tolist() == [[4]]
    scores.backward()
    assert leaf.grad.nonzero().tolist() == [[0, LD - 1, 3]]
    assert lane.matches(q, d).index.tolist() == [[[LD - 1] * 2]]


MEMORY = """
import json, resource, sys, torch, maxsim
torch.set_num_threads(2)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
torch.manual_seed(0)
warm = torch.randn(8, 40, 128, requires_grad=True)
half = warm.detach().half()
maxsim.score(warm, warm, backend="cpu").sum().backward()
maxsim.score(half, half, backend="cpu")
"""
SKEWED = (
    MEMORY
    + """
lengths = torch.full((10001,), 32); lengths[5000] = 8192
tokens = torch.randn(int(lengths.sum()), 128, dtype=torch.float16)
packed = maxsim.Packed(tokens, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
q = torch.randn(32, 128, dtype=torch.float16)
before = peak()
maxsim.score(q, packed, backend="cpu")
print(json.dumps(peak() - before))
"""
)
TRAINING = (
    MEMORY
    + """
q, d = torch.randn(64, 32, 128, requires_grad=True), torch.randn(64, 600, 128, requires_grad=True)
q.grad, d.grad = torch.ones_like(q), torch.ones_like(d)
before = peak()
maxsim.score(q, d, backend="cpu").sum().backward()
print(json.dumps(peak() - before))
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
@pytest.mark.parametrize(
    ("script", "mib"), [(SKEWED, 32 + 8), (TRAINING, 32 + 2.5 + 8 + 2 * 19)], ids=["skewed", "training"]
)
def test_memory_on_the_cpu(environment, script, mib):
    """Cases 96 and 97. Skewed lengths: the result and 32 MiB, where padding would take 20 GiB; 8 MiB more for the
    allocator's own. Training:
    winners (2 bytes each, 2.5 MiB), their workspace, and gradients twice (accumulated), where the similarities
    would take 300 MiB.
    """
    environment["PYTHONPATH"] = f"{pathlib.Path(maxsim.__file__).parents[1]}:{environment.get('PYTHONPATH', '')}"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) <= mib * MIB, f"{json.loads(done.stdout) / MIB:.1f} MiB"


# Large: as reported.


@huge
@pytest.mark.gpu
@pytest.mark.slow
def test_padded_documents_past_two_to_the_31():
    """Cases 25 and 27: 2,151,360,000 elements between live memory full of ones; the only match in the last token of
    all."""
    around = [torch.ones(3 << 28, dtype=torch.float32, device="cuda")]
    d = torch.zeros(9000, 747, 320, dtype=torch.float16, device="cuda")
    around.append(torch.ones(3 << 28, dtype=torch.float32, device="cuda"))
    d[:, ::5, ::7] = 0.5
    d[8999, 746] = 0
    d[8999, 746, 0] = 8
    q = integers(7, 44, 320, dtype=torch.float16, device="cuda")
    q[:, 0] = 1
    found = GPU.score(q, d)
    assert torch.equal(found[:, 8980:], GPU.score(q, d[8980:].clone()))
    assert float(found[0].argmax()) == 8999
    assert torch.equal(found[0, 8980:].double(), truth(q[None], d[8980:])[0])
    assert int(GPU.matches(q, Views(d.view(-1, 320), [8999 * 747], [747])).index[0, 0, 0]) == 746
    leaf = d.requires_grad_()
    GPU.score(q, leaf)[0, 8999].backward()
    won = GPU.matches(q, d.detach()[8999]).index[0, 0] == 746
    assert bool(won.any())
    assert torch.equal(leaf.grad[8999, 746], q[won].float().sum(0).half())
    assert not leaf.grad[:8999].any()
    assert all(each.eq(1).all() for each in around)


@huge
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_offsets_times_width(index):
    """Case 28: the offsets fit in 32 bits, times the width they do not."""
    T = 2**24 + 64
    tokens = torch.zeros(T, 128, dtype=torch.float16, device="cuda")
    document = integers(8, 64, 128, dtype=torch.float16, device="cuda")
    tokens[-64:] = document
    offsets = torch.tensor([0, 1, 2**23, T - 64, T], dtype=index)
    q = integers(9, 32, 128, dtype=torch.float16, device="cuda")
    for given in (offsets, offsets.cuda()):
        found = GPU.score(q, Packed(tokens, given))
        assert torch.equal(found[:, 3:], GPU.score(q, document))
        assert found[0, :3].tolist() == [0, 0, 0]
    leaf = tokens.requires_grad_()
    GPU.score(q, Packed(leaf, offsets))[0, 3].backward()
    own = document.clone().requires_grad_()
    GPU.score(q, own).backward()
    assert torch.equal(leaf.grad[-64:], own.grad)
    assert not leaf.grad[:-64].any()


@huge
@pytest.mark.gpu
@pytest.mark.slow
def test_scores_past_two_to_the_31():
    """Case 30: 2,147,516,416 scores, and canaries beside them."""
    q, d = integers(10, 65537, 1, 16, device="cuda").half(), integers(11, 32768, 1, 16, device="cuda").half()
    canaries = [torch.full((MIB,), 7.0, device="cuda") for _ in range(2)]
    found = GPU.score(q, d)
    canaries.append(torch.full((MIB,), 7.0, device="cuda"))
    for rows in (slice(0, 3), slice(32766, 32770), slice(65534, 65537)):
        assert torch.equal(found[rows], q[rows, 0].float() @ d[:, 0].float().T)
    assert all(each.eq(7).all() for each in canaries)


@huge
@pytest.mark.gpu
@pytest.mark.slow
def test_winners_past_two_to_the_31():
    """A winners table of more than 2^31 entries, and its gradients."""
    q = integers(12, 1, 65536, 16, dtype=torch.float16, device="cuda").requires_grad_()
    d = integers(13, 34000, 3, 16, dtype=torch.float16, device="cuda").requires_grad_()
    scores = GPU.score(q, d)
    assert torch.equal(scores[:, -2:].detach().double(), truth(q.detach(), d.detach()[-2:]))
    scores[0, -1].backward()
    own = d.detach()[-1:].clone().requires_grad_()
    query = q.detach().clone().requires_grad_()
    GPU.score(query, own).sum().backward()
    assert torch.equal(d.grad[-1:], own.grad)
    assert not d.grad[:-1].any()
    assert torch.equal(q.grad, query.grad)


@huge
@pytest.mark.gpu
@pytest.mark.slow
def test_one_document_of_65536_tiles():
    """Case 32 (d): with the largest tile."""
    LD = 65536 * 256 + 1
    d = torch.zeros(1, LD, 16, dtype=torch.float16, device="cuda")
    q = torch.zeros(2, 16, dtype=torch.float16, device="cuda")
    d[0, -1, 3], q[:, 3] = 2, 1
    assert GPU.score(q, d).tolist() == [[4]]
    assert GPU.matches(q, d).index.tolist() == [[[LD - 1] * 2]]


def extra_memory(call) -> int:
    """Peak of the allocator above what was there, after one call to warm up."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_memory_of_skewed_lengths():
    """Case 96: the result and at most 32 MiB."""
    lengths = torch.full((10001,), 32)
    lengths[5000] = 8192
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    packed = Packed(torch.randn(int(offsets[-1]), 128, dtype=torch.float16, device="cuda"), offsets)
    q = torch.randn(32, 128, dtype=torch.float16, device="cuda")
    assert extra_memory(lambda: GPU.score(q, packed)) <= 4 * 10001 + 32 * MIB


def training_memory(B: int) -> int:
    q = torch.randn(B, 32, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    d = torch.randn(B, 1030, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step():
        q.grad = d.grad = None
        GPU.score(q, d).sum().backward()

    step()
    q.grad = d.grad = None
    return extra_memory(step)  # above the gradients, which both steps leave behind


@pytest.mark.gpu
def test_memory_of_training():
    """Case 97: under 150 MB beyond inputs and gradients at B = 128; the winners grow with B², nothing with LD."""
    small, large = training_memory(64), training_memory(128)
    assert large < 150e6
    # the contract: 2 bytes a winner, a workspace of at most 4 bytes a winner, 32 MiB
    winners = 128 * 128 * 32
    assert large <= (2 + 4) * winners + 4 * 128 * 128 * 2 + 32 * MIB
    assert large <= 4 * small + 32 * MIB


@pytest.mark.gpu
def test_memory_returns():
    """Case 98: graphs dropped without a backward, and calls that raise, leave nothing behind."""
    q = torch.randn(4, 32, 64, device="cuda", requires_grad=True)
    d = torch.randn(50, 60, 64, device="cuda", requires_grad=True)
    GPU.score(q, d).sum().backward()
    q.grad = d.grad = None
    before = torch.cuda.memory_allocated()
    for turn in range(1000):
        scores = GPU.score(q, d)
        if turn % 2:
            with pytest.raises(ValueError):  # noqa: PT011
                GPU.score(q, d[..., :3])
        del scores
    assert torch.cuda.memory_allocated() == before
