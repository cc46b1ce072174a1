"""colpali-engine: page images against queries from ragged lists, and the scores behind its losses, with its semantics.

    scores = score_multi_vector(qs, ps)  # for processor.score_multi_vector(qs, ps)

With `enable()` every processor's `score` and `score_multi_vector` and the five ColBERT losses are served, on a GPU
and on a CPU, where `COLPALI_SCORES_BACKEND` is `auto`. Padding is rows of zeros in colpali-engine and never masked: a
row of zeros is a token of similarity 0, which wins over a negative one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..ops import score
from ..packed import Packed, as_tensor
from ._switch import Handle, Seam, Switch, left_to_host, served
from ._tokens import packed, ranges


def score_multi_vector(
    qs: Tensor | Sequence[Tensor],
    ps: Tensor | Sequence[Tensor],
    batch_size: int = 128,
    device: str | torch.device | None = None,
) -> Tensor:
    """Scores of every query with every passage, as `BaseVisualRetrieverProcessor.score_multi_vector`, without its
    tiles of 128 × 128 padded items.

    Args:
        qs: a list of `[L_i, D]`, or `[NQ, L, D]`.
        ps: a list of `[L_i, D]`, or `[NP, L, D]`, a tensor being read in place where it is on the device already.
        batch_size: says, for a list, which passages are taken as padded with zeros: those shorter than the longest of
            their batch, which is how colpali-engine's scores depend on it. Neither memory nor speed do, here.
        device: where to score; None: the GPU if there is one.

    Returns:
        float32 `[NQ, NP]` on the CPU, summed in float32 whatever the dtype, where colpali-engine sums in the inputs'.

    Raises:
        ValueError: no queries or no passages, a batch of passages without tokens, a batch_size below 1, and as
            `maxsim.score`.
        TypeError: as `maxsim.score`.
        UnsupportedError: as `maxsim.score`.
    """
    if len(qs) == 0:
        raise ValueError("No queries provided")
    if len(ps) == 0:
        raise ValueError("No passages provided")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    queries = qs if isinstance(qs, Tensor) else Packed.from_list(list(qs))
    # zero rows that pad queries add nothing to a score, so queries need no batches
    parts = [score(queries, documents) for documents in _passages(ps, batch_size, torch.device(device))]
    result = torch.cat(parts, 1).to("cpu", torch.float32)
    served("colpali.score_multi_vector")
    return result


def maxsim_inbatch(query: Tensor, doc: Tensor) -> Tensor:
    """Every query with every document, as `colpali_engine.utils.maxsim.maxsim_inbatch`. All rows count, those of zeros
    too. Of tokens that are equally similar the first takes the whole gradient, where colpali-engine's `amax` shares it
    out.

    Args:
        query: `[B, L, D]`.
        doc: `[C, L, D]`, of the same dtype.

    Returns:
        float32 `[B, C]`.

    Raises:
        TypeError: as `maxsim.score`.
        ValueError: as `maxsim.score`.
        UnsupportedError: as `maxsim.score`.
    """
    result = score(query, doc)
    served("colpali.maxsim_inbatch")
    return result


def maxsim_kd(query: Tensor, doc: Tensor) -> Tensor:
    """Each query with its own documents, as `colpali_engine.utils.maxsim.maxsim_kd`. Otherwise as `maxsim_inbatch`.

    Args:
        query: `[B, L, D]`.
        doc: `[B, N, L, D]`, of the same dtype.

    Returns:
        float32 `[B, N]`.

    Raises:
        TypeError: as `maxsim.score`.
        ValueError: as `maxsim.score`, and documents without four dimensions.
        UnsupportedError: as `maxsim.score`.
    """
    if doc.ndim != 4:
        raise ValueError(f"documents must have shape [B, N, L, D], got {list(doc.shape)}")
    result = score(query, doc)
    served("colpali.maxsim_kd")
    return result


def enable() -> Handle:
    """Serves colpali-engine's own scoring, until `disable()` or the end of the returned context manager's block.

    Raises:
        IntegrationError: colpali-engine is not installed, of another version, or not as expected. Nothing is replaced
            then.
    """
    return _switch.enable()


def disable() -> None:
    """Puts back what colpali-engine had. Nothing happens where it was not replaced."""
    _switch.disable()


def _passages(ps: Tensor | Sequence[Tensor], batch_size: int, device: torch.device) -> Iterator[Tensor | Packed]:
    """The passages in groups whose copy is bounded; of a list with a row of zeros after each that colpali-engine would
    pad. Of those shorter than the longest of their batch one such row does what all do; the longest compete with
    none."""
    if isinstance(ps, Tensor):
        if ps.ndim != 3 or not ps.shape[1]:
            raise ValueError(f"passages must be a list or have shape [NP, L, D] with tokens, got {list(ps.shape)}")
        for low, high in ranges([ps.shape[1]] * len(ps), ps.shape[2], ps.device.type != device.type):
            yield ps[low:high].to(device)
        return
    items = [as_tensor(passage, f"passage {i}") for i, passage in enumerate(ps)]
    if any(item.ndim != 2 for item in items):
        raise ValueError("a passage of a list must have shape [L, D]")
    lengths = [len(item) for item in items]
    longest = [max(lengths[low : low + batch_size]) for low in range(0, len(items), batch_size)]
    if not all(longest):
        raise ValueError("a batch of passages has no tokens")
    padded = [length < longest[i // batch_size] for i, length in enumerate(lengths)]
    for low, high in ranges(lengths, items[0].shape[-1], True):
        yield packed(items[low:high], device, padded[low:high])


# What `enable()` replaces: the functions that colpali-engine's dispatcher looks up at every call, and the tiles.


def _in_place_of(ours: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def replacement(host: Callable[..., Tensor], query: Tensor, doc: Tensor) -> Tensor:
        if _backend() != "auto":  # late-interaction-kernels, by name
            return host(query, doc)
        name = f"colpali.{ours.__name__}"
        reason = _reason(query, doc)
        if reason is None:
            try:
                return ours(query, doc)
            except (UnsupportedError, NotImplementedError, TypeError, ValueError) as error:  # or its einsum broadcasts
                reason = str(error)
        left_to_host(name, reason)
        return host(query, doc)

    return replacement


def _multi_vector(
    host: Callable[..., Tensor], qs: Any, ps: Any, batch_size: int = 128, device: str | torch.device | None = None
) -> Tensor:
    if _backend() == "auto":
        from colpali_engine.utils.torch_utils import get_torch_device

        where = torch.device(device or get_torch_device("auto"))
        reason = f"the device is {where}"
        if where.type in ("cpu", "cuda"):
            try:
                return score_multi_vector(qs, ps, batch_size, where)
            except (UnsupportedError, NotImplementedError, TypeError, ValueError) as error:  # of which it has its own
                reason = str(error)
        left_to_host("colpali.score_multi_vector", reason)
    return host(qs, ps, batch_size, device)


def _backend() -> str:
    from colpali_engine.utils import maxsim

    return str(maxsim._resolve_backend())


def _reason(query: Any, doc: Any) -> str | None:
    """Why colpali-engine, or late-interaction-kernels behind it, should have this call; None where we serve it."""
    if not (isinstance(query, Tensor) and isinstance(doc, Tensor)):
        return "its arguments are not tensors"
    if query.device != doc.device or query.device.type not in ("cpu", "cuda"):
        return f"queries are on {query.device}, documents on {doc.device}"
    if query.dtype != doc.dtype or not query.is_floating_point():
        return f"queries are {query.dtype}, documents {doc.dtype}"
    if query.device.type == "cpu" and query.element_size() < 4:
        return "on a CPU it returns half precision, and float32 would be another result"
    if doc.shape[-2] == 0:
        return "documents have no tokens"
    return None


_LIK = "colpali_engine.utils._lik_backend"
_switch = Switch(
    "colpali-engine",
    ("0.3.17", "0.4"),
    [
        Seam(_LIK, "maxsim_inbatch_lik", _in_place_of(maxsim_inbatch), ("query", "doc")),
        Seam(_LIK, "maxsim_kd_lik", _in_place_of(maxsim_kd), ("query", "doc")),
        Seam(
            "colpali_engine.utils.processing_utils",
            "BaseVisualRetrieverProcessor.score_multi_vector",
            _multi_vector,
            ("qs", "ps", "batch_size", "device"),
        ),
    ],
)
