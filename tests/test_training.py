"""Where people train: mixed precision, scaled losses, checkpoints, compiled steps, cached gradients, wrapped modules.
What autograd itself asks for is in `test_gradients.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from lanes import integers, random
from ranks import Ranks
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

import maxsim
from maxsim import Packed

N, LQ, LD, D = 4, 5, 9, 16
DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Encoder(torch.nn.Module):
    """Two layers, dropout between, unit tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, D)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(self.layers(x), dim=-1)


def encoder(device: str = "cpu", dropout: float = 0.0) -> Encoder:
    torch.manual_seed(0)
    return Encoder(dropout).to(device)


def batch(device: str = "cpu", seed: int = 0, count: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    return random(seed, count, LQ, 8, device=device), random(seed + 1, count, LD, 8, device=device)


def contrast(scores: torch.Tensor) -> torch.Tensor:
    return cross_entropy(scores * 4, torch.arange(len(scores), device=scores.device))


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    assert all(each is not None for each in found)
    return found


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def close(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_step_is_plain_pytorch(lane):
    model, (q, d) = encoder(lane.device), batch(lane.device)
    contrast(lane.score(model(q), model(d))).backward()
    found = gradients(model)
    similarity = torch.einsum("qid,njd->qnij", model(q), model(d))
    contrast(similarity.amax(-1).sum(-1)).backward()
    close(found, gradients(model))


def test_autocast_around_a_step(lane):
    """What the encoder gives (here bfloat16) is what is scored; sums and the loss are float32, inside as outside."""
    model, (q, d) = encoder(lane.device), batch(lane.device)
    with torch.autocast(lane.device, torch.bfloat16):
        a, b = model.layers(q), model.layers(d)
        assert a.dtype == torch.bfloat16
        inside = lane.score(a, b)
        loss = contrast(inside)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, lane.score(a, b))
    loss.backward()
    assert all(torch.isfinite(each).all() for each in gradients(model))


def test_scaled_losses(lane):
    """A power of two goes through float32 gradients exactly, and carries what half precision alone would lose."""
    q, d = (random(n, 3, 4, D, device=lane.device).requires_grad_() for n in (1, 2))
    (plain,) = torch.autograd.grad(contrast(lane.score(q, d)), q)
    (scaled,) = torch.autograd.grad(contrast(lane.score(q, d)) * 2.0**16, q)
    assert torch.equal(scaled, plain * 2.0**16)
    half = [x.detach().half().requires_grad_() for x in (q, d)]
    lost, kept = (torch.autograd.grad(lane.score(*half).sum() * 2.0**-30 * scale, half[0])[0] for scale in (1, 2.0**16))
    assert not lost.any()
    assert kept.any()


def test_grad_scaler(lane):
    """The scaler's step is the step without it; one whose gradients overflow is left out."""
    results = []
    for scaled in (False, True):
        model, (q, d) = encoder(lane.device), batch(lane.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler(lane.device, init_scale=2.0**10, enabled=scaled)
        for factor in (1.0, float("inf"), 1.0) if scaled else (1.0, 1.0):
            optimizer.zero_grad()
            loss = contrast(lane.score(model(q), model(d))) * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([parameter.detach() for parameter in model.parameters()])
    close(results[1], results[0])


@DYNAMO
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(lane, reentrant):
    """Of the score alone, and of encoder and score together, dropout included: the same bits."""
    model, (q, d) = encoder(lane.device, dropout=0.5), batch(lane.device)
    q, d = q.requires_grad_(), d.requires_grad_()

    def step(q, d):
        return contrast(lane.score(model(q), model(d)))

    def later(q, d):
        return contrast(checkpoint(lane.score, model(q), model(d), use_reentrant=reentrant))

    found = []
    for run in (step, later, lambda q, d: checkpoint(step, q, d, use_reentrant=reentrant)):
        torch.manual_seed(1)
        run(q, d).backward()
        found.append([*gradients(model), q.grad, d.grad])
        q.grad = d.grad = None
    assert same(found[1], found[0])
    assert same(found[2], found[0])


@DYNAMO
def test_compiled_step(lane):
    """Encoder, score and loss in one graph, in a loop with an optimiser."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = encoder(lane.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(q, d, model=model):
            return contrast(lane.score(model(q), model(d)))

        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        losses = []
        for seed in range(4):
            optimizer.zero_grad()
            loss = run(*batch(lane.device, 10 * seed))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append(losses)
    close(results[1], results[0], 1e-6)


@DYNAMO
def test_checkpoint_in_a_compiled_step(lane):
    torch._dynamo.reset()
    model, (q, d) = encoder(lane.device), batch(lane.device)

    def step(q, d):
        return contrast(checkpoint(lambda q, d: lane.score(model(q), model(d)), q, d, use_reentrant=False))

    step(q, d).backward()
    wanted = gradients(model)
    torch.compile(step, fullgraph=True, backend="aot_eager")(q, d).backward()
    close(gradients(model), wanted, 1e-6)


def test_several_losses_of_one_score(lane):
    """Backwards through one graph, one after another, add up to that of the sum."""
    model, (q, d) = encoder(lane.device), batch(lane.device)
    scores = lane.score(model(q), model(d))
    parts = [contrast(scores), scores[:, 1].mean(), scores.T[::2].square().sum()]
    sum(parts).backward(retain_graph=True)
    whole = gradients(model)
    for part in parts[:-1]:
        part.backward(retain_graph=True)
    parts[-1].backward()
    close(gradients(model), whole)


EDITS = {
    "divide": (lambda s, n: s.div_(n[:, None]), lambda s, n: s / n[:, None]),
    "filter": (
        lambda s, n: s.mul_(torch.where(s > s.diagonal()[:, None], 0.5, 1.0).detach()),
        lambda s, n: s * torch.where(s > s.diagonal()[:, None], 0.5, 1.0).detach(),
    ),
    "by mask": (
        lambda s, n: s.masked_fill_(torch.eye(len(s), device=s.device) > 0, -1),
        lambda s, n: torch.where(torch.eye(len(s), device=s.device) > 0, -1, s),
    ),
    "a row": (lambda s, n: s[0].zero_(), lambda s, n: torch.cat([s[:1] * 0, s[1:]])),
    "minimum": (lambda s, n: s.sub_(s.detach().amin(1, True)), lambda s, n: s - s.detach().amin(1, True)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_scores_edited_in_place(lane, edit):
    """As colpali-engine's filter of high negatives and PyLate's scaling do."""
    q, d = (random(n, N, LQ, D, device=lane.device).requires_grad_() for n in (3, 4))
    lengths = torch.arange(1, N + 1, device=lane.device)
    in_place, beside = EDITS[edit]
    weights = random(5, N, N, device=lane.device)
    scores = lane.score(q, d)
    in_place(scores, lengths)
    found = torch.autograd.grad((scores * weights).sum(), (q, d))
    wanted = torch.autograd.grad((beside(lane.score(q, d), lengths) * weights).sum(), (q, d))
    assert same(list(found), list(wanted))


@pytest.mark.dtypes(torch.float16, torch.bfloat16, torch.float32)
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_cached_gradients(lane, dtype, chunk):
    """GradCache (Gao et al.): tokens without a graph, their gradients from the loss in chunks of queries, then the
    encoder a chunk at a time. The gradients of tokens are the whole's, to one rounding a chunk."""
    count = 8
    q, d = (x.to(dtype) for x in batch(lane.device, 20, count))
    model = encoder(lane.device).to(dtype)
    a, b = (model(x).detach().requires_grad_() for x in (q, d))
    contrast(lane.score(a, b)).backward()
    x, y = (each.detach().requires_grad_() for each in (a, b))
    labels = torch.arange(count, device=lane.device)
    for low in range(0, count, chunk):
        part = slice(low, low + chunk)
        cross_entropy(lane.score(x[part], y) * 4, labels[part], reduction="sum").div(count).backward()
    step = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}[dtype]
    chunks = -(-count // chunk)
    for found, wanted in ((x.grad, a.grad), (y.grad, b.grad)):
        error = (found.double() - wanted.double()).abs()
        assert bool((error <= (chunks + 1) * step * wanted.double().abs().amax()).all())
    contrast(lane.score(model(q), model(d))).backward()
    wanted = gradients(model)
    for tokens, given in ((q, x.grad), (d, y.grad)):
        for low in range(0, count, chunk):
            model(tokens[low : low + chunk]).backward(given[low : low + chunk])
    close(gradients(model), wanted, 4 * chunks * step)


def test_a_penalty_on_gradients_raises(lane):
    """Right or an error, through an encoder too: its first derivative is there, its second is refused in words."""
    model, (q, d) = encoder(lane.device), batch(lane.device)
    tokens = model(q)
    (grad,) = torch.autograd.grad(contrast(lane.score(tokens, model(d))), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="maxsim has no second derivative"):
        grad.square().sum().backward()


def test_a_loop_learns(lane):
    """Packed tokens, Adam, a loss that falls."""
    model = encoder(lane.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    q, d = batch(lane.device)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        documents = Packed(model(d).flatten(0, 1), list(range(0, N * LD + 1, LD)))
        loss = contrast(lane.score(model(q), documents))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# Wrapped modules: a rank scores its own batch inside of the module


class Contrastive(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return contrast(maxsim.score(self.encoder(q), self.encoder(d)))


def averaged() -> list[torch.Tensor]:
    """Gradients of the mean loss over the batches of all ranks, in one process."""
    torch.manual_seed(0)
    model = Contrastive()
    for rank in range(dist.get_world_size()):
        (model(*batch(seed=10 * rank)) / dist.get_world_size()).backward()
    return gradients(model)


def on_ddp() -> None:
    torch.manual_seed(0)
    model = Contrastive()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(*batch(seed=10 * dist.get_rank())).backward()
    close(gradients(model), averaged(), 1e-6)


def on_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for precision, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 5e-2)):
        torch.manual_seed(0)
        model = Contrastive()
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        for layer in (*model.encoder.layers, model):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        model(*batch(seed=10 * dist.get_rank())).backward()
        close([each.full_tensor() for each in gradients(model)], averaged(), tolerance)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("wrapper", [on_ddp, on_fsdp])
def test_wrapped(two, wrapper):
    two.run(wrapper)


def test_integers_in_half_precision_are_rounded_once(lane):
    """The gradient of a token that many queries chose: float32 until the end, however many terms."""
    q = integers(1, 600, 1, D, bound=3, device=lane.device).bfloat16()
    d = torch.ones(1, 1, D, dtype=torch.bfloat16, device=lane.device, requires_grad=True)
    lane.score(q, d).sum().backward()
    assert torch.equal(d.grad[0, 0], q.float().sum((0, 1)).bfloat16())
