"""What `benchmarks.hosts` calls: frameworks' own scoring and losses on their users' shapes, and the same with ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from maxsim import integrations

Call = Callable[[], Any]


@dataclass
class Case:
    """What is called, by contender, ours among them, as "maxsim".

    right: the framework's torch code in float32. counts: what `integrations.calls()` holds after a call of ours.
    values: a call's result → scores, or a loss and its gradients.
    """

    name: str
    calls: dict[str, Call]
    right: Call
    counts: str
    values: Callable[[Any], Sequence[Tensor]] = tuple


class Made:
    """Embeddings and masks from one seed; few and short ones where it is only tried (`small`)."""

    def __init__(self, device: torch.device, small: bool):
        self.device, self.small = device, small
        self.generator = torch.Generator(device).manual_seed(0)

    def size(self, full: int, small: int) -> int:
        return small if self.small else full

    def tokens(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return torch.nn.functional.normalize(values, dim=-1).to(dtype)

    def leaves(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        return [self.tokens(*shape).requires_grad_() for shape in shapes]

    def lengths(self, count: int, low: int, high: int) -> Tensor:
        found = torch.randint(low, high + 1, (count,), generator=self.generator, device=self.device)
        found[0] = high
        return found

    def ragged(self, count: int, low: int, high: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        lengths = self.lengths(count, low, high).tolist()
        return [item.clone() for item in self.tokens(sum(lengths), width, dtype=dtype).split(lengths)]

    def mask(self, count: int, low: int, high: int, holes: float = 0.0) -> Tensor:
        """Padding on the right, and holes, as where punctuation is left out."""
        kept = torch.rand(count, high, generator=self.generator, device=self.device) >= holes
        kept[:, 0] = True
        return kept & (torch.arange(high, device=self.device) < self.lengths(count, low, high)[:, None])

    def batch(self, queries: int, documents: int, high: int, columns: int) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves and masks of queries, then of columns of documents."""
        width = self.size(128, 16)
        leaves = self.leaves((queries, 32, width), *[(documents, high, width)] * columns)
        masks = [self.mask(documents, high // 4, high, holes=0.1) for _ in range(columns)]
        return leaves, [self.mask(queries, 8, 32), *masks]


class Given(torch.nn.Module):
    """In the place of an encoder: the embeddings are in the features. PyLate reads the attributes."""

    skiplist = (1,)
    do_query_expansion = True

    def forward(self, features: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        return features


def features(leaves: Sequence[Tensor], masks: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    return [
        {"token_embeddings": leaf, "attention_mask": mask, "input_ids": (~mask).long()}
        for leaf, mask in zip(leaves, masks, strict=True)
    ]


def parts(leaves: Sequence[Tensor], masks: Sequence[Tensor], part: int) -> tuple[list[Any], list[Any]]:
    """Leaves of so many items, as cached losses hold them."""
    chunks = [[chunk.detach().clone().requires_grad_() for chunk in leaf.split(part)] for leaf in leaves]
    return chunks, [list(mask.split(part)) for mask in masks]


def trained(loss: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Call:
    """→ a loss and its gradients. Cached losses have gone backward themselves, and are given detached."""

    def call() -> list[Tensor]:
        try:
            value = loss()
            if value.grad_fn is not None:
                value.backward()
            return [value.detach(), *(leaf.grad for leaf in leaves)]
        finally:  # nothing is left that the next call would add to, or not count as its memory
            for leaf in leaves:
                leaf.grad = None

    return call


def under(variable: str, backend: str, call: Call) -> Call:
    """A call with a backend named, which frameworks read from the environment each time."""

    def named() -> Any:
        os.environ[variable] = backend
        try:
            return call()
        finally:
            del os.environ[variable]

    return named


def backends(device: torch.device, **packages: str) -> list[str]:
    """`torch`, and of the others, which need a GPU, those whose package is there."""
    return ["torch", *(name for name, package in packages.items() if device.type == "cuda" and find_spec(package))]


def of_sentence_transformers(made: Made) -> Iterator[Case]:
    from sentence_transformers.multi_vector_encoder import losses
    from sentence_transformers.util import maxsim

    fast = integrations.sentence_transformers
    high, width = made.size(300, 12), made.size(128, 16)

    def scoring(name: str, queries: Any, count: int) -> Case:
        documents = made.ragged(count, high // 4, high, width)
        theirs, ours = (lambda: [maxsim(queries, documents)]), (lambda: [fast.maxsim(queries, documents)])
        shape = f"{name}-{len(queries)}x32-{count}x{high}-d{width}-float32-ragged"
        return Case(shape, {"maxsim": ours, "": theirs}, theirs, "sentence_transformers.maxsim")

    yield scoring("rerank", made.tokens(1, 32, width), made.size(1000, 9))
    yield scoring("evaluation", made.ragged(made.size(300, 5), 8, 32, width), made.size(5000, 20))

    def training(name: str, loss: Callable[..., Callable[[], Tensor]], leaves: Sequence[Tensor], hook: str) -> Case:
        theirs, ours = trained(loss(), leaves), trained(loss(similarity_fct=getattr(fast, hook)), leaves)
        shape = f"{name}-d{width}-float32-train"
        return Case(shape, {"maxsim": ours, "": theirs}, theirs, f"sentence_transformers.{hook}")

    model = Given()
    batch = made.size(128, 4)
    leaves, masks = made.batch(batch, batch, high, columns=2)
    columns = features(leaves, masks)

    def contrastive(**hook: Any) -> Callable[[], Tensor]:
        loss = losses.MultiVectorMultipleNegativesRankingLoss(model, **hook)
        return lambda: loss(columns)

    yield training(f"contrastive-{batch}x32-{2 * batch}x{high}", contrastive, leaves, "colbert_scores")

    batch, part = made.size(256, 4), made.size(32, 2)
    chunks, parted = parts(*made.batch(batch, batch, high, columns=2), part)

    def cached(**hook: Any) -> Callable[[], Tensor]:
        size = {"score_mini_batch_size": batch} if hook else {}
        loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=part, **size, **hook)
        return lambda: loss.calculate_loss_and_cache_gradients(chunks, parted)[0].detach()

    yield training(f"cached-{batch}x32-{2 * batch}x{high}", cached, [*chain(*chunks)], "colbert_scores")

    queries, ways = made.size(16, 2), made.size(32, 3)
    own, own_masks = made.batch(queries, queries, high, columns=ways)
    teacher = made.tokens(queries, ways)
    candidates = features(own, own_masks)

    def distillation(**hook: Any) -> Callable[[], Tensor]:
        loss = losses.MultiVectorDistillKLDivLoss(model, **hook)
        return lambda: loss(candidates, teacher)

    yield training(f"distillation-{queries}x32-{queries}x{ways}x{high}", distillation, own, "kd_scores")


def of_pylate(made: Made) -> Iterator[Case]:
    from pylate import losses, rank

    fast = integrations.pylate
    names = backends(made.device, flash="flash_maxsim", lik="late_interaction_kernels")
    high, width, count = made.size(300, 12), made.size(128, 16), made.size(1000, 9)

    def case(shape: str, ours: Call, theirs: Call, counts: str, **options: Any) -> Case:
        calls = {name: under("PYLATE_SCORES_BACKEND", name, theirs) for name in names}
        return Case(shape, {"maxsim": ours, **calls}, calls["torch"], f"pylate.{counts}", **options)

    query, documents = made.tokens(32, width), made.ragged(count, high // 4, high, width)
    ids = [list(range(count))]
    yield case(
        f"rerank-1x32-{count}x{high}-d{width}-float32-ragged",
        lambda: fast.rerank(ids, [query], [documents]),
        lambda: rank.rerank(ids, [query], [documents]),
        "rerank",
        values=lambda ranked: [torch.tensor([hit["score"] for hit in sorted(ranked[0], key=lambda hit: hit["id"])])],
    )

    def training(name: str, loss: Callable[..., Callable[[], Tensor]], leaves: Sequence[Tensor], hook: Any) -> Case:
        theirs, ours = trained(loss(), leaves), trained(loss(score_metric=hook), leaves)
        counts = getattr(hook, "__name__", type(hook).__name__)
        return case(f"{name}-d{width}-float32-train", ours, theirs, counts)

    model = Given()
    batch = made.size(128, 4)
    leaves, masks = made.batch(batch, batch, high, columns=2)
    columns = features(leaves, masks)

    def contrastive(**hook: Any) -> Callable[[], Tensor]:
        loss = losses.Contrastive(model, **hook)
        return lambda: loss(columns)

    yield training(f"contrastive-{batch}x32-{2 * batch}x{high}", contrastive, leaves, fast.ContrastiveScores())

    many, part = made.size(256, 4), made.size(32, 2)
    chunks, parted = parts(*made.batch(many, many, high, columns=2), part)
    whole = [torch.cat(mask) for mask in parted]

    def cached(**hook: Any) -> Callable[[], Tensor]:
        size = {"score_mini_batch_size": many} if hook else {}
        loss = losses.CachedContrastive(model, mini_batch_size=part, **size, **hook)
        return lambda: loss.calculate_loss_and_cache_gradients(chunks, whole).detach()

    yield training(f"cached-{many}x32-{2 * many}x{high}", cached, [*chain(*chunks)], fast.ContrastiveScores())

    queries, ways = made.size(16, 2), made.size(32, 3)
    own, own_masks = made.batch(queries, queries * ways, high, columns=1)
    teacher = made.tokens(queries, ways)
    candidates = features(own, own_masks)

    def distillation(**hook: Any) -> Callable[[], Tensor]:
        loss = losses.Distillation(model, **hook)
        return lambda: loss(candidates, teacher)

    yield training(f"distillation-{queries}x32-{queries}x{ways}x{high}", distillation, own, fast.kd_scores)


def of_colpali(made: Made) -> Iterator[Case]:
    from colpali_engine.loss import ColbertLoss
    from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor

    fast, score = integrations.colpali, BaseVisualRetrieverProcessor.score_multi_vector
    names = backends(made.device, lik="late_interaction_kernels")

    def case(shape: str, ours: Call, theirs: Call, right: Call, counts: str, **options: Any) -> Case:
        calls = {name: under("COLPALI_SCORES_BACKEND", name, theirs) for name in names}
        right = under("COLPALI_SCORES_BACKEND", "torch", right)
        return Case(shape, {"maxsim": ours, **calls}, right, f"colpali.{counts}", **options)

    def pages(count: int, low: int, high: int, width: int) -> Case:
        qs = made.ragged(made.size(128, 5), 20, 50, width, torch.bfloat16)
        ps = made.ragged(count, low, high, width, torch.bfloat16)
        shape = f"pages-{len(qs)}x50-{count}x{high}-d{width}-bfloat16" + ("-ragged" if low < high else "")
        exact = [[item.float() for item in items] for items in (qs, ps)]
        return case(
            shape,
            lambda: [fast.score_multi_vector(qs, ps, device=made.device)],
            lambda: [score(qs, ps, device=made.device)],
            lambda: [score(*exact, device=made.device)],
            "score_multi_vector",
        )

    yield pages(made.size(512, 9), made.size(1030, 11), made.size(1030, 11), made.size(128, 16))
    yield pages(made.size(512, 9), made.size(300, 3), made.size(1024, 11), made.size(320, 40))

    batch, high, width = made.size(64, 4), made.size(768, 12), made.size(128, 16)
    loss = ColbertLoss().to(made.device)

    def training(dtype: torch.dtype) -> Case:
        masks = [
            made.mask(batch, low, longest).flip(1) for low, longest in ((12, 30), (high // 2, high))
        ]  # on the left
        exact = [(made.tokens(*mask.shape, width) * mask[..., None]).to(dtype).float() for mask in masks]
        leaves = [value.to(dtype).requires_grad_() for value in exact]
        exact = [value.requires_grad_() for value in exact]
        step = trained(lambda: loss(*leaves), leaves)
        shape = f"contrastive-{batch}x30-{batch}x{high}-d{width}-{str(dtype).removeprefix('torch.')}-train"
        return case(
            shape,
            step,
            step,
            trained(lambda: loss(*exact), exact),
            "maxsim_inbatch",
            # padding gets other gradients, which a model multiplies by 0
            values=lambda found: [
                found[0],
                *(each * mask[..., None] for each, mask in zip(found[1:], masks, strict=True)),
            ],
        )

    with fast.enable():  # serves where no backend is named
        yield training(torch.float32)
        if made.device.type == "cuda":  # bfloat16 on a CPU is left to the framework
            yield training(torch.bfloat16)


def of_mteb(made: Made) -> Iterator[Case]:
    from mteb.similarity_functions import max_sim

    high, width = made.size(300, 12), made.size(128, 16)
    queries = made.ragged(made.size(300, 5), 8, 32, width)
    documents = made.ragged(made.size(5000, 20), high // 4, high, width)
    theirs, ours = (lambda: [max_sim(queries, documents)]), (lambda: [integrations.mteb.max_sim(queries, documents)])
    shape = f"evaluation-{len(queries)}x32-{len(documents)}x{high}-d{width}-float32-ragged"
    yield Case(shape, {"maxsim": ours, "": theirs}, theirs, "mteb.max_sim")


# by the name of the integration's module: the package, and its cases
HOSTS: dict[str, tuple[str, Callable[[Made], Iterator[Case]]]] = {
    "sentence_transformers": ("sentence-transformers", of_sentence_transformers),
    "pylate": ("pylate", of_pylate),
    "colpali": ("colpali-engine", of_colpali),
    "mteb": ("mteb", of_mteb),
}
