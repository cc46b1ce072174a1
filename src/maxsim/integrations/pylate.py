"""PyLate: its scoring functions and its training metric, in one launch a call, with the scores of its own torch path.

Hooks of PyLate's own, nothing replaced:

    losses.Contrastive(model, score_metric=ContrastiveScores())
    losses.CachedContrastive(model, score_metric=ContrastiveScores())
    losses.Distillation(model, score_metric=kd_scores)

With `enable()` its own names (`rank.rerank`, `retrieve.ColBERT`, evaluators, `model.similarity`, the losses'
defaults) are served as well, on a GPU and on a CPU, wherever its backend is `auto`; one that is named, by `backend=`
or `PYLATE_SCORES_BACKEND`, is obeyed. While it is on, `auto` never takes flash-maxsim, whose adapter in PyLate reads
a mask as a length and so scores other tokens than those kept where a mask has holes, as PyLate's punctuation masks
have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..ops import score, score_pairs
from ._switch import Handle, Seam, Switch, left_to_host, served
from ._tokens import packed

FLOATS = {"float16", "bfloat16", "float32", "float64"}
EMBEDDINGS = ("queries_embeddings", "documents_embeddings")
MASKS = ("queries_mask", "documents_mask")


def colbert_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    masked: str = "zero",
) -> Tensor:
    """Scores of every query with every document, as `pylate.scores.colbert_scores` on its torch path.

    Args:
        queries_embeddings: `[A, S, H]`, or any other form that `maxsim.score` takes where there is no mask.
        documents_embeddings: `[B, T, H]`, likewise.
        queries_mask: `[A, S]`. A masked token adds nothing.
        documents_mask: `[B, T]`. Boolean masks keep any pattern of tokens, without a copy of the documents; other
            dtypes weigh similarities, as PyLate's do.
        masked: "zero": masked document tokens compete with similarity 0, as in PyLate. "exclude": they take no part (a
            document of which nothing is kept scores −inf); masks are then read as boolean.

    Returns:
        float32 `[A, B]` for half-precision inputs too, whose scores PyLate returns and adds up in half precision.

    Raises:
        TypeError: as `maxsim.score`.
        ValueError: as `maxsim.score`, and candidates per query.
        UnsupportedError: as `maxsim.score`.
    """
    if isinstance(documents_embeddings, Tensor) and documents_embeddings.ndim == 4:
        raise ValueError(f"documents must have shape [B, T, H], got {list(documents_embeddings.shape)}: see kd_scores")
    result = _score(queries_embeddings, documents_embeddings, queries_mask, documents_mask, masked)
    served("pylate.colbert_scores")
    return result


def kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    masked: str = "zero",
) -> Tensor:
    """Scores of each query with its own documents, as `pylate.scores.colbert_kd_scores`: `score_metric=` of
    `Distillation`.

    Args:
        queries_embeddings: `[A, S, H]`.
        documents_embeddings: `[A, B, T, H]`, B documents of each query.
        queries_mask: `[A, S]`, as for `colbert_scores`.
        documents_mask: `[A, B, T]`, as for `colbert_scores`.
        masked: as for `colbert_scores`.

    Returns:
        float32 `[A, B]`.

    Raises:
        TypeError: as `maxsim.score`.
        ValueError: as `maxsim.score`, and documents without four dimensions.
        UnsupportedError: as `maxsim.score`.
    """
    if isinstance(documents_embeddings, Tensor) and documents_embeddings.ndim != 4:
        raise ValueError(f"documents must have shape [A, B, T, H], got {list(documents_embeddings.shape)}")
    result = _score(queries_embeddings, documents_embeddings, queries_mask, documents_mask, masked)
    served("pylate.kd_scores")
    return result


def pairwise_scores(queries_embeddings: Any, documents_embeddings: Any) -> Tensor:
    """Scores of query i with document i, as `pylate.scores.colbert_scores_pairwise`.

    Args:
        queries_embeddings: `[B, L, H]` or a list of `[L_i, H]`, torch or numpy.
        documents_embeddings: the same forms. Where one side is longer its rest is not scored, as there. Every row
            counts, rows of zeros too.

    Returns:
        float32 `[B]`.

    Raises:
        TypeError: as `maxsim.score`.
        ValueError: as `maxsim.score`.
        UnsupportedError: as `maxsim.score`.
    """
    count = min(len(queries_embeddings), len(documents_embeddings))
    result = score_pairs(queries_embeddings[:count], documents_embeddings[:count])
    served("pylate.pairwise_scores")
    return result


class ContrastiveScores:
    """`score_metric=` of `Contrastive` and `CachedContrastive`: what `pylate.scores.ColBERTScores` computes with a
    call for each of the N document columns, in one.

    Args:
        masked: as for `colbert_scores`.

    Called with queries `[Q, S, H]`, documents `[D, N, T, H]`, `queries_mask` `[Q, S]` and `documents_mask` `[D, N,
    T]`, it returns float32 `[Q, D·N]`, document d's k-th column at d·N + k. Nothing of the size of the similarities
    is held: `score_mini_batch_size` saves no memory here, and the full batch is fastest.

    Raises:
        ValueError: an unknown `masked`; documents without four dimensions; and as `maxsim.score`.
        TypeError: as `maxsim.score`.
        UnsupportedError: as `maxsim.score`.
    """

    def __init__(self, masked: str = "zero"):
        if masked not in ("exclude", "zero"):
            raise ValueError(f"masked must be 'exclude' or 'zero', got {masked!r}")
        self.masked = masked

    def __call__(
        self,
        queries_embeddings: Tensor,
        documents_embeddings: Tensor,
        queries_mask: Tensor | None = None,
        documents_mask: Tensor | None = None,
    ) -> Tensor:
        if documents_embeddings.ndim != 4:
            raise ValueError(f"documents must have shape [D, N, T, H], got {list(documents_embeddings.shape)}")
        if documents_mask is not None:
            documents_mask = documents_mask.expand(documents_embeddings.shape[:-1]).flatten(0, 1)
        result = _score(
            queries_embeddings, documents_embeddings.flatten(0, 1), queries_mask, documents_mask, self.masked
        )
        served("pylate.ContrastiveScores")
        return result

    def __repr__(self) -> str:
        return f"ContrastiveScores(masked={self.masked!r})"


def rerank(
    documents_ids: Sequence[Sequence[int | str]],
    queries_embeddings: Any,
    documents_embeddings: Any,
    device: str | None = None,
) -> list[list[dict[str, Any]]]:
    """Candidates of each query, best first, as `pylate.rank.rerank`, which pads those of a query to the longest.

    Args:
        documents_ids: of each query's candidates.
        queries_embeddings: `[L, H]` each; one tensor or array of two dimensions is one query.
        documents_embeddings: for each query `[L, H]` each: tensors, arrays or lists of numbers. Those shorter than the
            longest of their query compete with the similarity 0 of padding, as there.
        device: where to score; None: where the query is.

    Returns:
        for each query its `{"id", "score"}`.

    Raises:
        ValueError: a query without candidates, or whose candidates have no tokens; and as `maxsim.score`.
        TypeError: as `maxsim.score`.
        UnsupportedError: as `maxsim.score`.
        ImportError: PyLate is not installed.
    """
    from pylate.rank.rank import reshape_embeddings
    from pylate.utils.tensor import convert_to_tensor

    queries, candidates = reshape_embeddings(queries_embeddings), reshape_embeddings(documents_embeddings)
    results = []
    for ids, query, documents in zip(documents_ids, queries, candidates, strict=False):
        tokens = convert_to_tensor(query)
        items = [convert_to_tensor(document) for document in documents]
        longest = max((len(item) for item in items), default=0)
        if not longest:
            raise ValueError("a query needs candidates with tokens")
        where = torch.device(device) if device is not None else tokens.device
        own = packed(items, where, [len(item) < longest for item in items])
        scores, order = torch.sort(score(tokens[None], own)[0], descending=True, stable=True)
        ranked = zip(order.tolist(), scores.tolist(), strict=True)
        results.append([{"id": ids[i], "score": value} for i, value in ranked])
    served("pylate.rerank")
    return results


def enable() -> Handle:
    """Serves PyLate's own scoring functions, until `disable()` or the end of the returned context manager's block.

    Raises:
        IntegrationError: PyLate is not installed, of another version, or not as expected. Nothing is replaced then.
    """
    return _switch.enable()


def disable() -> None:
    """Puts back what PyLate had. Nothing happens where it was not replaced."""
    _switch.disable()


def _score(
    queries: Any, documents: Any, query_mask: Tensor | None, document_mask: Tensor | None, masked: str
) -> Tensor:
    queries, query_mask = _weighed(queries, query_mask, masked)
    documents, document_mask = _weighed(documents, document_mask, masked)
    return score(queries, documents, query_mask, document_mask, masked=masked)


def _weighed(embeddings: Any, mask: Tensor | None, masked: str) -> tuple[Any, Tensor | None]:
    """PyLate multiplies similarities by a mask of whatever dtype. One that is not boolean is multiplied into the
    tokens, which comes to the same and, unlike a look at its values, waits for no device."""
    if mask is None or not isinstance(embeddings, Tensor):
        return embeddings, mask
    if mask.shape != embeddings.shape[:-1]:  # PyLate broadcasts
        mask = mask.expand(embeddings.shape[:-1]).contiguous()
    if mask.dtype == torch.bool:
        return embeddings, mask
    if masked == "exclude":
        return embeddings, mask != 0
    return embeddings * mask.unsqueeze(-1).to(embeddings), None


# What `enable()` replaces. PyLate's functions are captured by name all over it, and users capture them too; but all of
# them ask `_try_flash`, then `_try_lik`, and where the latter says yes look up the functions of `_lik_backend`.

_choice = threading.local()  # whether the `_try_lik` just asked chose us


def _try_flash(host: Callable[..., bool], backend: str, *embeddings: Any) -> bool:
    return False if backend == "auto" else host(backend, *embeddings)


def _try_lik(host: Callable[..., bool], backend: str, *embeddings: Any) -> bool:
    _choice.ours = backend == "auto" and _servable("pylate.scores", *embeddings)
    return _choice.ours or host(backend, *embeddings)


def _in_place_of(ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def replacement(host: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        chosen, _choice.ours = getattr(_choice, "ours", False), False
        if not chosen:  # somebody asked for late-interaction-kernels by name
            return host(*args, **kwargs)
        try:
            return ours(*args, **kwargs)
        except (UnsupportedError, NotImplementedError, TypeError, ValueError) as error:  # or its einsum broadcasts
            from pylate.scores._lik_backend import LIKUnsupported

            left_to_host(f"pylate.{ours.__name__}", str(error))
            raise LIKUnsupported(str(error)) from error  # on which PyLate takes its torch path

    return replacement


def _contrastive(
    host: Callable[..., Tensor],
    metric: Any,
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    backend: str | None = None,
) -> Tensor:
    from pylate.scores import colbert
    from pylate.utils.tensor import convert_to_tensor

    queries, documents = convert_to_tensor(queries_embeddings), convert_to_tensor(documents_embeddings)
    if colbert._resolve_backend(backend) == "auto" and _servable("pylate.ContrastiveScores", queries, documents):
        masks = [None if mask is None else convert_to_tensor(mask) for mask in (queries_mask, documents_mask)]
        try:
            return ContrastiveScores()(queries, documents, *masks)
        except (UnsupportedError, NotImplementedError, TypeError, ValueError) as error:
            left_to_host("pylate.ContrastiveScores", str(error))
    return host(metric, queries, documents, queries_mask, documents_mask, backend)


def _rerank(
    host: Callable[..., Any], documents_ids: Any, queries_embeddings: Any, documents_embeddings: Any, device: Any = None
) -> Any:
    from pylate.scores import colbert

    arguments = (documents_ids, queries_embeddings, documents_embeddings, device)
    if colbert._resolve_backend(None) == "auto":
        try:
            return rerank(*arguments)
        except (UnsupportedError, NotImplementedError, TypeError, ValueError) as error:  # of which PyLate has its own
            left_to_host("pylate.rerank", str(error))
    return host(*arguments)


def _servable(name: str, queries: Any, documents: Any) -> bool:
    """Whether PyLate would score these and we do; what it refuses it may refuse itself, in its own words."""
    reason = _reason(queries, documents)
    if reason:
        left_to_host(name, reason)
    return not reason


def _reason(queries: Any, documents: Any) -> str | None:
    dtypes, devices, widths = set(), set(), set()
    for side, embeddings in (("queries", queries), ("documents", documents)):
        items: Sequence[Any] = [embeddings] if isinstance(embeddings, Tensor) else embeddings
        if not len(items):
            return f"there are no {side}"
        for item in items:
            if not hasattr(item, "dtype") or item.ndim < 2:
                return f"{side} are neither a tensor nor a list of [L, H] tensors or arrays"
            if side == "documents" and item.shape[-2] == 0:
                return "a document has no tokens"
            dtypes.add(str(item.dtype).removeprefix("torch."))
            devices.add(item.device if isinstance(item, Tensor) else torch.device("cpu"))
            widths.add(item.shape[-1])
    if len(dtypes) > 1 or not dtypes <= FLOATS:
        return f"embeddings are of dtype {', '.join(sorted(dtypes))}"
    if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", "cuda"}:
        return f"embeddings are on {', '.join(sorted(map(str, devices)))}"
    if len(widths) > 1 or widths == {0}:
        return f"embeddings have {', '.join(map(str, sorted(widths)))} columns"
    return None


_RERANK = ("documents_ids", *EMBEDDINGS, "device")
_COLBERT, _LIK = "pylate.scores.colbert", "pylate.scores._lik_backend"
_switch = Switch(
    "pylate",
    ("1.5.1", "1.7"),
    [
        Seam(_COLBERT, "_try_flash", _try_flash, ("backend", "tensors")),
        Seam(_COLBERT, "_try_lik", _try_lik, ("backend", "tensors")),
        Seam(_COLBERT, "ColBERTScores.__call__", _contrastive, ("self", *EMBEDDINGS, *MASKS, "backend")),
        Seam(_LIK, "colbert_scores_lik", _in_place_of(colbert_scores), (*EMBEDDINGS, *MASKS)),
        Seam(_LIK, "colbert_kd_scores_lik", _in_place_of(kd_scores), (*EMBEDDINGS, *MASKS)),
        Seam(_LIK, "colbert_scores_pairwise_lik", _in_place_of(pairwise_scores), EMBEDDINGS),
        *(Seam(f"pylate.{room}", "rerank", _rerank, _RERANK) for room in ("rank.rank", "rank", "retrieve.colbert")),
    ],
)
