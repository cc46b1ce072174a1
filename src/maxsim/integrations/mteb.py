"""MTEB's `max_sim`, for models that MTEB scores itself.

A wrapper of one's own needs no patching: its `similarity` calls `max_sim` of this module. `enable()` serves MTEB's own,
for all models whose metadata say `MAX_SIM`. Models of sentence-transformers and PyLate are scored by their own
libraries: those are to be switched over.

Scores are MTEB's. Lists are padded with zeros there, so that 0 competes with the tokens of a document that is shorter
than what it is padded to; so it does here, where no document is padded. Half precision on both sides is not cast to
float32 beforehand: products and sums are float32 all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..ops import score, score_pairs
from ._switch import Handle, Seam, Switch
from ._tokens import of_host, or_host, packed, ranges

Embeddings: TypeAlias = Sequence[Any] | np.ndarray | Tensor
Host: TypeAlias = Callable[..., Tensor]

_FUNCTIONS = "mteb.similarity_functions"

# MTEB pads all documents to the longest, or, where that would compare more than OVERHEAD times the real token pairs,
# those of a group of up to CHUNK_TOKENS padded tokens. What a document is padded to decides whether 0 competes.
OVERHEAD = 2
CHUNK_TOKENS = isqrt(100_000_000)


def max_sim(a: Embeddings, b: Embeddings, batch_size: int = 128) -> Tensor:
    """Every query of `a` with every document of `b`, as MTEB's `max_sim`.

    Args:
        a: `[A, tokens, dim]`, one `[tokens, dim]`, or a list of `[L_i, dim]` (torch or numpy).
        b: the same forms; lists are scored without padding.
        batch_size: accepted; nothing is held that it would bound.

    Returns:
        float32 (float64 for float64) `[A, B]` on the device of `a`. Inputs on the CPU are scored on the GPU where there
        is one, documents a gigabyte at a time, as MTEB does.

    Raises:
        ImportError: the call is left to MTEB, and that is not installed. What else is wrong with a call, MTEB's own
            code says.
    """
    return _max_sim(of_host(_FUNCTIONS, "max_sim"), a, b, batch_size)


def pairwise_max_sim(queries_embeddings: Embeddings, documents_embeddings: Embeddings) -> Tensor:
    """Query i with document i, as MTEB's `pairwise_max_sim`, in one launch. Nothing is padded.

    Args:
        queries_embeddings: `[N, tokens, dim]`, or a list of `[L_i, dim]` (torch or numpy).
        documents_embeddings: the same forms, as many.

    Returns:
        float32 (float64 for float64) `[N]` on the documents' device.

    Raises:
        ImportError: as `max_sim`.
    """
    return _pairwise_max_sim(of_host(_FUNCTIONS, "pairwise_max_sim"), queries_embeddings, documents_embeddings)


def enable() -> Handle:
    """Serves MTEB's own calls of `max_sim` and `pairwise_max_sim`, until `disable()` or, as a context manager, the end
    of the block.

    Raises:
        IntegrationError: not installed, a version that is not known, or what would be replaced is not as expected.
    """
    return _SWITCH.enable()


def disable() -> None:
    """Puts back what MTEB had."""
    _SWITCH.disable()


def _max_sim(host: Host, a: Any, b: Any, batch_size: int = 128) -> Tensor:
    def ours() -> Tensor:
        if not len(a) or not len(b):
            raise ValueError("nothing to score")
        ragged = _ragged(a) or _ragged(b)
        queries, documents = _agreed(_items(a, ragged), _items(b, ragged))
        where = _where(queries[0], documents[0])
        home = queries[0].device
        lengths = [len(item) for item in documents]
        if not any(lengths):
            raise ValueError("no document has a token")
        padded = _padded([len(item) for item in queries], lengths) if ragged else [False] * len(lengths)
        # a padded tensor stays one; a list, and what is unbound of a tensor beside a list, is packed
        query_tokens = packed(queries, where) if isinstance(queries, list) else queries.to(where)
        found = []
        for low, high in ranges(lengths, documents[0].shape[-1], moved=documents[0].device != where):
            part = documents[low:high]
            tokens = packed(part, where, padded[low:high]) if isinstance(part, list) else part.to(where)
            found.append(score(query_tokens, tokens).to(home))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    return or_host("mteb.max_sim", lambda: _with_memory(ours), lambda: host(a, b, batch_size))


def _pairwise_max_sim(host: Host, queries_embeddings: Any, documents_embeddings: Any) -> Tensor:
    def ours() -> Tensor:
        queries, documents = _agreed(_items(queries_embeddings, True), _items(documents_embeddings, True))
        if not documents or not all(len(item) for item in documents):
            raise ValueError("nothing to score")
        device = documents[0].device
        return score_pairs(packed(queries, device), packed(documents, device))

    args = queries_embeddings, documents_embeddings
    return or_host("mteb.pairwise_max_sim", lambda: _with_memory(ours), lambda: host(*args))


def _with_memory(ours: Callable[[], Tensor]) -> Tensor:
    try:
        return ours()
    except torch.OutOfMemoryError as error:
        raise NotImplementedError("the GPU has too little memory left") from error


def _ragged(value: Any) -> bool:
    """MTEB's test for a list of `[L, dim]`."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and getattr(value[0], "ndim", None) == 2


def _items(value: Any, split: bool) -> Tensor | list[Tensor]:
    """`[N, L, dim]`, or `split` one tensor an item."""
    if split and isinstance(value, (list, tuple)):
        return [_tensor(item) for item in value]
    tensor = _tensor(value)
    tensor = tensor[None] if tensor.ndim == 2 else tensor
    return list(tensor.unbind()) if split else tensor


def _tensor(value: Any) -> Tensor:
    """As MTEB does, but half precision stays."""
    if not isinstance(value, Tensor):
        return torch.as_tensor(np.asarray(value), dtype=torch.float32, device="cpu")
    return value.float() if value.is_floating_point() and value.element_size() < 2 else value


def _agreed(a: Any, b: Any) -> tuple[Any, Any]:
    """Both in one dtype: half precision is cast where the other side is not the same."""
    dtypes = {item.dtype for side in (a, b) for item in (side if isinstance(side, list) else [side])}
    if len(dtypes) > 1:
        half = (torch.float16, torch.bfloat16)

        def cast(side: Any) -> Any:
            if isinstance(side, list):
                return [cast(item) for item in side]
            return side.float() if side.dtype in half else side

        return cast(a), cast(b)
    return a, b


def _where(a: Tensor, b: Tensor) -> torch.device:
    """The device that MTEB scores on."""
    for tensor in (a, b):
        if tensor.device.type != "cpu":
            return tensor.device
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        raise NotImplementedError("MTEB scores on this machine's Apple GPU")
    return a.device


def _padded(queries: list[int], documents: list[int]) -> list[bool]:
    """Whether MTEB pads a document, by the lengths of all."""
    groups = [list(range(len(documents)))]
    if len(queries) * max(queries) * len(documents) * max(documents) > OVERHEAD * sum(queries) * sum(documents):
        groups = [[]]
        for index in sorted(range(len(documents)), key=documents.__getitem__):
            if groups[-1] and (len(groups[-1]) + 1) * documents[index] > CHUNK_TOKENS:
                groups.append([])
            groups[-1].append(index)
    padded = [False] * len(documents)
    for group in groups:
        longest = max(documents[index] for index in group)
        if not longest:
            raise ValueError("no document of a group has a token")
        for index in group:
            padded[index] = documents[index] < longest
    return padded


_SEAMS = [
    Seam(module, "max_sim", _max_sim, ("a", "b", "batch_size"))
    for module in (_FUNCTIONS, "mteb.models.abs_encoder", "mteb.models.model_implementations.random_baseline")
] + [
    Seam(module, "pairwise_max_sim", _pairwise_max_sim, ("queries_embeddings", "documents_embeddings"))
    for module in (_FUNCTIONS, "mteb.models.abs_encoder")
]
_SWITCH = Switch("mteb", ("2.24", "3"), _SEAMS)
