"""`maxsim verify`: scores, winners and gradients of this machine held to float64, and their bits to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..errors import UnsupportedError
from ..layout import make_problem
from ..ops import matches, score, score_pairs
from .cases import Case, parse
from .contenders import at_precision
from .inputs import Inputs, make
from .plain import naive
from .truth import GRADIENT_EXACT, GRADIENT_TF32, allowed, pieces, truth

# Sizes at which a CPU of two cores is through with all of it in a minute; several tiles and no whole number of them.
GRID, PAIRS, CANDIDATES = "6x32-150x90-d128", "40x32-40x90-d128", "6x32-25x90-d128"
LONG, CODED = "3x300-100x90-d128", "6x32-60x60-d128"
LAYOUTS = {
    "padded": GRID,
    "long queries": LONG,
    "masked": f"{GRID}-masked",
    "ragged": f"{GRID}-ragged",
    "views": f"{GRID}-views",
    "candidates": f"{CANDIDATES}-candidates",
    "pairs": f"{PAIRS}-pairs",
    "int8": f"{CODED}-int8",
    "int8 ragged": f"{CODED}-ragged-int8",
    "fp8": f"{CODED}-fp8",
    "residual": f"{CODED}-residual2",
    "pq": f"{CODED}-pq16",
}
TRAINED = ("padded", "long queries", "masked", "ragged", "views", "candidates", "pairs")
# dtype and PyTorch's switch for float32 products
DTYPES = (("float16", "highest"), ("bfloat16", "highest"), ("float32", "highest"), ("float32", "high"))
TOP = 20


@dataclass(frozen=True)
class Check:
    """What one backend makes of one dtype and layout.

    max_error, mean_error: of scores, absolute, against float64; plain_max, plain_mean: of plain PyTorch in the same
    dtype (of quantised documents in float32, on what the codes stand for). allowed: the largest error that passes.
    winners: the share of query tokens whose winner is float64's; gap: by how much the similarity of the others' winner
    is below the best. top20: the share of float64's 20 best documents among ours. gradient: the larger of both sides'
    ‖grad − right‖ / ‖right‖. None where it does not apply. same_bits: a second run gives the same scores and gradients.
    any_batch: a query and a document alone give the bits that they have in the batch. wrong: what does not hold.
    """

    backend: str
    dtype: str
    layout: str
    max_error: float
    mean_error: float
    plain_max: float
    plain_mean: float
    allowed: float
    winners: float | None
    gap: float | None
    top20: float | None
    gradient: float | None
    same_bits: bool
    any_batch: bool
    wrong: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def verify(device: torch.device, tell: Callable[[str], None] = lambda step: None) -> Iterator[Check]:
    """Every backend that serves it, for each dtype and layout."""
    for dtype, precision in DTYPES:
        for layout, name in LAYOUTS.items():
            case = parse(_with_dtype(name, dtype))
            inputs = make(case, device)
            known = truth(inputs).scores
            plain = (_plain(inputs).double() - known).abs()
            gradients = _right_gradients(case, device) if layout in TRAINED else None
            label = dtype if precision == "highest" else f"{dtype} {precision}"
            for backend in dispatch.ORDER:
                if not at_precision(precision, partial(_serves, inputs, backend))():
                    continue
                tell(f"{backend} {label} {layout}")
                tf32 = precision != "highest"
                check = partial(_check, inputs, known, plain, gradients, backend, label, layout, tf32)
                yield at_precision(precision, check)()


def _with_dtype(name: str, dtype: str) -> str:
    shape, _, rest = name.partition("-d128")
    return f"{shape}-d128-{dtype}{rest}"


def _documents(inputs: Inputs) -> Any:
    return inputs.form(inputs.documents) if inputs.codes is None else inputs.codes


def _masks(inputs: Inputs) -> dict[str, Any]:
    return {"query_mask": inputs.query_mask, "document_mask": inputs.document_mask}


def _serves(inputs: Inputs, backend: str) -> bool:
    problem = make_problem(inputs.queries, _documents(inputs), **_masks(inputs), pairwise=inputs.case.pairs)
    try:
        return backend == dispatch.select(problem, backend).NAME
    except UnsupportedError:
        return False


def _plain(inputs: Inputs) -> Tensor:
    """Scores of plain PyTorch: the usual lines, in the inputs' dtype."""
    case, known = inputs.case, inputs.decoded()
    queries, documents, mask = known.queries, known.documents, known.document_mask
    if known.starts is not None:
        documents, mask = known.block(slice(None))
    if case.codec:
        queries, documents = queries.float(), documents.float()
    return at_precision("highest", lambda: naive(queries, documents, known.query_mask, mask, case))()  # type: ignore[no-any-return]


def _right_gradients(case: Case, device: torch.device) -> tuple[Inputs, tuple[Tensor, Tensor]]:
    inputs = make(replace(case, train=True), device)
    found = truth(inputs).gradients
    assert found is not None
    return inputs, found


def _check(
    inputs: Inputs, known: Tensor, plain: Tensor, gradients: tuple[Inputs, tuple[Tensor, Tensor]] | None, backend: str,
    dtype: str, layout: str, tf32: bool,
) -> Check:  # fmt: skip
    case, documents = inputs.case, _documents(inputs)
    function: Any = score_pairs if case.pairs else score
    options = {**_masks(inputs), "backend": backend}
    found = function(inputs.queries, documents, **options)
    error = (found.double() - known).abs()
    same = torch.equal(found, function(inputs.queries, documents, **options))
    limit = allowed(case, True, tf32)
    wrong = [] if float(error.max()) <= limit else [f"a score is off by {float(error.max()):.1e}, allowed {limit:.1e}"]
    winners = gap = top = gradient = None
    if not case.pairs:
        winners, gap = _winners(inputs, matches(inputs.queries, documents, **options).index)
        if not gap <= allowed(replace(case, winners=True), True, tf32):
            wrong.append(f"a winner is {gap:.1e} below the best")
        top = _agreement(found, known)
    if gradients is not None:
        trained, right = gradients
        got = _gradients(trained, backend)
        pairs = zip(got, right, strict=True)
        gradient = max(float((g.double() - r).norm() / r.norm()) for g, r in pairs)
        same = same and all(map(torch.equal, got, _gradients(trained, backend)))
        if not gradient <= (GRADIENT_TF32 if tf32 else GRADIENT_EXACT):
            wrong.append(f"a gradient is off by {gradient:.1e} of its length")
    alone = _alone(inputs, found, backend)
    wrong += [] if same else ["another run gave other bits"]
    wrong += [] if alone else ["bits of a score change with its batch"]
    return Check(
        backend, dtype, layout, float(error.max()), float(error.mean()), float(plain.max()), float(plain.mean()), limit,
        winners, gap, top, gradient, same, alone, tuple(wrong),
    )  # fmt: skip


def _winners(inputs: Inputs, index: Tensor) -> tuple[float, float]:
    """The share of query tokens that match float64's token, and what the others' falls short by, at most."""
    known, counted, equal, gap = inputs.decoded(), 0, 0, 0.0
    for part, similarities in pieces(known):
        best, right = similarities.max(-1)  # [nq, LQ, n]
        chosen = index[part].transpose(1, 2)
        kept = torch.ones_like(best, dtype=torch.bool)
        if inputs.query_mask is not None:
            kept &= inputs.query_mask[part[0]][..., None]
        missing = (best - similarities.gather(-1, chosen.clamp(min=0)[..., None])[..., 0]).masked_fill(chosen < 0, 1.0)
        counted += int(kept.sum())
        equal += int(((chosen == right) & kept).sum())
        gap = max(gap, float(missing[kept].max()))
    return equal / max(counted, 1), gap


def _agreement(found: Tensor, known: Tensor) -> float:
    """The share of the best documents by `known` that are among the best by `found`."""
    count = min(TOP, known.shape[1])
    ours, theirs = found.double().topk(count).indices, known.topk(count).indices
    return float((ours[:, :, None] == theirs[:, None]).any(1).double().mean())


def _gradients(inputs: Inputs, backend: str) -> tuple[Tensor, ...]:
    assert inputs.upstream is not None
    queries, tokens = (x.detach().requires_grad_() for x in (inputs.queries, inputs.documents))
    function: Any = score_pairs if inputs.case.pairs else score
    scores = function(queries, inputs.form(tokens), **_masks(inputs), backend=backend)
    return torch.autograd.grad(scores, (queries, tokens), inputs.upstream.to(scores.dtype))


def _alone(inputs: Inputs, found: Tensor, backend: str) -> bool:
    """Whether some scores have the same bits where one query meets one document, in a padded tensor of its own."""
    case = inputs.case
    for row, column in ((0, 0), (case.NQ - 1, case.ND - 1), (case.NQ // 2, case.ND // 3)):
        column = row if case.pairs else column
        query = inputs.queries[row : row + 1]
        if inputs.query_mask is not None:
            query = query[:, inputs.query_mask[row]]
        if inputs.codes is not None:
            document: Any = inputs.codes[column : column + 1]
        elif case.candidates:
            document = inputs.documents[row, column : column + 1]
            if inputs.document_mask is not None:
                document = document[:, inputs.document_mask[row, column]]
        else:
            document, mask = inputs.block(slice(column, column + 1))
            document = document if mask is None else document[:, mask[0]]
        expected = found[row] if case.pairs else found[row, column]
        if not torch.equal(_on(query, document, backend)[0, 0], expected):
            return False
    return True


def _on(query: Tensor, document: Any, backend: str) -> Tensor:
    try:
        return score(query, document, backend=backend)
    except UnsupportedError:  # one token may lie where that backend cannot read it; another has the same bits
        return score(query, document)


def table(checks: Sequence[Check]) -> str:
    """A line for each check, and under it what is wrong."""
    head = f"{'backend':8}{'dtype':15}{'layout':14}{'max err':>9}{'mean':>9}{'plain':>9}{'mean':>9}{'winners':>9}"
    lines = [f"{head}{'gap':>9}{'top 20':>8}{'grad':>9}  bits"]
    for each in checks:
        bits = "same" if each.same_bits and each.any_batch else "DIFFER"
        line = f"{each.backend:8}{each.dtype:15}{each.layout:14}"
        line += "".join(f"{x:9.1e}" for x in (each.max_error, each.mean_error, each.plain_max, each.plain_mean))
        line += f"{_share(each.winners, 9)}{_size(each.gap)}{_share(each.top20, 8)}{_size(each.gradient)}  {bits}"
        lines += [line, *(f"    WRONG: {reason}" for reason in each.wrong)]
    return "\n".join(lines)


def _share(value: float | None, width: int) -> str:
    return f"{'–':>{width}}" if value is None else f"{100 * value:{width - 1}.2f}%"


def _size(value: float | None) -> str:
    return f"{'–':>9}" if value is None else f"{value:9.1e}"
