"""sentence-transformers 6: scoring for its losses, its evaluators and `model.similarity`.

Its public hooks need no patching:

    from maxsim.integrations import sentence_transformers as fast

    MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=fast.colbert_scores)
    MultiVectorInformationRetrievalEvaluator(..., score_functions={"maxsim": fast.maxsim})

`enable()` serves all of it, defaults included, until `disable()` or the end of a `with` block.

Scores are the host's: masked document tokens take no part, a document without a token scores -1e9, rows of zeros in a
padded tensor without a mask are padding, the result is float32 on the documents' device. What differs: similarities of
half-precision tokens are not rounded before they are compared and added up; and they are never held, so that
`chunk_elements` is accepted and means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..ops import score, score_pairs
from ._switch import Handle, Seam, Switch
from ._tokens import Side, as_float, device_of, fit, mask_of, of_host, or_host, side

Embeddings: TypeAlias = list[Any] | np.ndarray | Tensor
Host: TypeAlias = Callable[..., Tensor]

EMPTY_DOCUMENT = -1e9  # the host's score where there is no token, before it is divided by a query's length

_NAME = "sentence_transformers"
_SIMILARITY = "sentence_transformers.util.similarity"
_ENCODER = "sentence_transformers.multi_vector_encoder"
_COLBERT = f"{_ENCODER}.scoring.colbert"


def colbert_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Every query with every document, as the host's `colbert_scores`: `similarity_fct` of the ranking losses.

    Args:
        queries_embeddings: `[Q, q_tokens, dim]`.
        documents_embeddings: `[G, N, d_tokens, dim]`, N documents in each of G groups, all scored in one launch.
        queries_mask: `[Q, q_tokens]`, boolean, or numbers of at least 0 that weigh the tokens.
        documents_mask: `[G, N, d_tokens]`, any pattern.
        chunk_elements: accepted; nothing of that size is held.
        length_normalize: divide by the number of a query's kept tokens (MeanMaxSim).

    Returns:
        float32 `[Q, G * N]`, document n of group g in column g * N + n; a document of which nothing is kept scores
            −1e9.

    Raises:
        ImportError: the call is left to the host, and sentence-transformers is not installed. What else is wrong with a
            call, the host's own code says.
    """
    args = queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
    return _colbert(of_host(_COLBERT, "colbert_scores"), *args)


def kd_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Every query with its own documents, as the host's `colbert_kd_scores`: `similarity_fct` of
    `MultiVectorDistillKLDivLoss`.

    Args:
        queries_embeddings: `[Q, q_tokens, dim]`.
        documents_embeddings: `[Q, N, d_tokens, dim]`, N documents of each query.
        queries_mask: as for `colbert_scores`.
        documents_mask: `[Q, N, d_tokens]`, any pattern.
        chunk_elements: as for `colbert_scores`.
        length_normalize: as for `colbert_scores`.

    Returns:
        float32 `[Q, N]`; a document of which nothing is kept scores −1e9.

    Raises:
        ImportError: as `colbert_scores`.
    """
    args = queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
    return _kd(of_host(_COLBERT, "colbert_kd_scores"), *args)


def pairwise_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Query i with document i, as the host's `colbert_scores_pairwise`: `similarity_fct` of `MultiVectorMarginMSELoss`.

    Args:
        queries_embeddings: `[Q, q_tokens, dim]`, or a list of `[L_i, dim]`.
        documents_embeddings: `[Q, d_tokens, dim]`, or a list of `[L_i, dim]`.
        queries_mask: as for `colbert_scores`.
        documents_mask: `[Q, d_tokens]`, any pattern.
        chunk_elements: as for `colbert_scores`.
        length_normalize: as for `colbert_scores`.

    Returns:
        float32 `[Q]`.

    Raises:
        ImportError: as `colbert_scores`.
    """
    args = queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
    return _pairwise(of_host(_COLBERT, "colbert_scores_pairwise"), *args)


def maxsim(
    a: Embeddings,
    b: Embeddings,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Every query of `a` with every document of `b`, as the host's `maxsim`: for evaluators' `score_functions`.

    Args:
        a: `[A, tokens, dim]`, one `[tokens, dim]`, or a list of `[L_i, dim]` (torch or numpy).
        b: the same forms. Lists are scored without padding.
        a_mask: `[A, tokens]`, boolean, or numbers of at least 0 that weigh the tokens; or a list of such rows.
        b_mask: `[B, tokens]`, any pattern, or a list of rows.
        chunk_elements: accepted; nothing of that size is held.
        length_normalize: divide by the number of a query's kept tokens (MeanMaxSim).
        device: where to score; documents that are elsewhere go there a gigabyte at a time.

    Returns:
        float32 `[A, B]` on the documents' device; a document of which nothing is kept scores −1e9.

    Raises:
        ImportError: as `colbert_scores`.
    """
    args = a, b, a_mask, b_mask, chunk_elements, length_normalize, device
    return _maxsim(of_host(_SIMILARITY, "maxsim"), *args)


def maxsim_pairwise(
    a: Embeddings,
    b: Embeddings,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Query i of `a` with document i of `b`, as the host's `maxsim_pairwise`.

    Args:
        a: as for `maxsim`.
        b: as for `maxsim`, as many items as `a`.
        a_mask: as for `maxsim`.
        b_mask: as for `maxsim`.
        chunk_elements: as for `maxsim`.
        length_normalize: as for `maxsim`.
        device: as for `maxsim`.

    Returns:
        float32 `[A]`.

    Raises:
        ImportError: as `colbert_scores`.
    """
    args = a, b, a_mask, b_mask, chunk_elements, length_normalize, device
    return _maxsim_pairwise(of_host(_SIMILARITY, "maxsim_pairwise"), *args)


def enable() -> Handle:
    """Serves sentence-transformers' own calls, until `disable()` or, as a context manager, the end of the block.

    Models, losses and evaluators that exist already are served too. Where a call cannot be served (a device without a
    backend of ours, say) the host's own code runs and the reason is logged once.

    Raises:
        IntegrationError: not installed, a version that is not known, or what would be replaced is not as expected.
    """
    return _SWITCH.enable()


def disable() -> None:
    """Puts back what sentence-transformers had."""
    _SWITCH.disable()


# What is replaced takes the host's function first, then the host's arguments by the host's names.


def _in_place(name: str) -> Callable[[Callable[..., Tensor]], Host]:
    """Makes of scores of ours, by the host's arguments, what takes the place of a function of the host."""

    def made(ours: Callable[..., Tensor]) -> Host:
        def replacement(host: Host, *args: Any, **kwargs: Any) -> Tensor:
            return or_host(f"{_NAME}.{name}", lambda: ours(*args, **kwargs), lambda: host(*args, **kwargs))

        return replacement

    return made


@_in_place("colbert_scores")
def _colbert(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    documents = as_float(documents_embeddings)
    groups, n, length, width = documents.shape
    mask = None if documents_mask is None else mask_of(documents_mask).reshape(groups * n, length)
    flat = documents.reshape(groups * n, length, width)
    return _score(as_float(queries_embeddings), flat, queries_mask, mask, length_normalize)


@_in_place("kd_scores")
def _kd(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    documents = as_float(documents_embeddings)
    if documents.ndim != 4:
        raise ValueError(f"expected [Q, N, L, D], got {list(documents.shape)}")
    queries = side(as_float(queries_embeddings), queries_mask)
    keep = documents.any(-1) if documents_mask is None else mask_of(documents_mask).bool().to(documents.device)
    query_tokens, query_keep = queries.weighed().placed(documents.device)
    scores = score(query_tokens, documents, query_keep, keep).float().masked_fill(~keep.any(-1), EMPTY_DOCUMENT)
    return scores / queries.counts().to(scores)[:, None] if length_normalize else scores


@_in_place("pairwise_scores")
def _pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    sides = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    return _score(*sides, length_normalize, pairs=True)


@_in_place("maxsim")
def _maxsim(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: Any = None,
) -> Tensor:
    return _score(a, b, a_mask, b_mask, length_normalize, device)


@_in_place("maxsim_pairwise")
def _maxsim_pairwise(
    a: Any,
    b: Any,
    a_mask: Any = None,
    b_mask: Any = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: Any = None,
) -> Tensor:
    return _score(a, b, a_mask, b_mask, length_normalize, device, pairs=True)


# What every path of the host comes to, of one chunk: reached by references that were taken before `enable()`.


@_in_place("chunk")
def _documents_chunk(a: Tensor, b: Tensor, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    return _padded(score, a, b, a_mask, b_mask)


@_in_place("chunk_pairwise")
def _pairs_chunk(a: Tensor, b: Tensor, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    return _padded(score_pairs, a, b, a_mask, b_mask)


def _padded(form: Host, a: Tensor, b: Tensor, a_mask: Tensor | None, b_mask: Tensor | None) -> Tensor:
    """Padded sides with masks that the host has made."""
    queries = Side(a, None if a_mask is None else fit(a_mask, a))
    documents = Side(b, None if b_mask is None else fit(b_mask, b))
    return _scored(form, queries, documents, b.device)


def _score(a: Any, b: Any, a_mask: Any, b_mask: Any, mean: bool, device: Any = None, *, pairs: bool = False) -> Tensor:
    """Whatever forms the host takes, scored where the host would."""
    there = device_of(b)
    home = there or device_of(a) or torch.device("cpu")
    where = home if device is None else torch.device(device)
    queries, documents = side(a, a_mask), side(b, b_mask)
    if pairs and len(queries) != len(documents):
        raise ValueError("pairs need as many queries as documents")
    if not len(queries) or not len(documents):
        shape = [len(queries)] if pairs else [len(queries), len(documents)]
        return torch.zeros(shape, dtype=torch.float32, device=home)
    found = []
    for low, high in documents.ranges(moved=(there or torch.device("cpu")) != where):
        part = documents.part(low, high)
        if pairs:
            found.append(_scored(score_pairs, queries.part(low, high), part, where).to(home))
        else:
            found.append(_scored(score, queries, part, where).to(home))
    scores = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
    if mean:
        counts = queries.counts().to(scores)
        scores = scores / (counts if pairs else counts[:, None])
    return scores


def _scored(form: Host, queries: Side, documents: Side, where: torch.device) -> Tensor:
    query_tokens, query_keep = queries.weighed().placed(where)
    document_tokens, keep = documents.placed(where)
    scores = form(query_tokens, document_tokens, query_mask=query_keep, document_mask=keep).float()
    empty = documents.empty()
    return scores if empty is None else scores.masked_fill(empty.to(scores.device), EMPTY_DOCUMENT)


_SIX = ("queries_embeddings", "documents_embeddings", "queries_mask", "documents_mask", "chunk_elements")
_COLBERT_ARGS = (*_SIX, "length_normalize")
_MAXSIM_ARGS = ("a", "b", "a_mask", "b_mask", "chunk_elements", "length_normalize", "device")
_CHUNK_ARGS = ("a", "b", "a_mask", "b_mask")


def _seams() -> list[Seam]:
    """The two functions that every path comes to, and above them those that can be served whole, under each name that
    a module of the host has imported them by."""
    seams = [
        Seam(_SIMILARITY, "_maxsim_score_documents", _documents_chunk, _CHUNK_ARGS),
        Seam(_SIMILARITY, "_maxsim_score_pairs", _pairs_chunk, _CHUNK_ARGS),
    ]
    for module in (_SIMILARITY, "sentence_transformers.util", _ENCODER):
        seams.append(Seam(module, "maxsim", _maxsim, _MAXSIM_ARGS))
        seams.append(Seam(module, "maxsim_pairwise", _maxsim_pairwise, _MAXSIM_ARGS))
    losses = f"{_ENCODER}.losses"
    for name, replacement, users in (
        ("colbert_scores", _colbert, ("multiple_negatives_ranking", "cached_multiple_negatives_ranking")),
        ("colbert_kd_scores", _kd, ("distill_kl_div",)),
        ("colbert_scores_pairwise", _pairwise, ("margin_mse",)),
    ):
        for module in (_COLBERT, f"{_ENCODER}.scoring", *(f"{losses}.{user}" for user in users)):
            seams.append(Seam(module, name, replacement, _COLBERT_ARGS))
    return seams


_SWITCH = Switch("sentence-transformers", ("6.0", "7"), _seams())
