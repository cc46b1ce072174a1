"""vLLM: late-interaction scores of its workers (`/rerank`, `/score`), through its plugin entry point. Experimental.

    MAXSIM_VLLM=1 vllm serve ...

Installed beside vLLM this package changes nothing: vLLM calls `register` in each of its processes, and that returns
at once unless `MAXSIM_VLLM` is 1 or `VLLM_PLUGINS`, vLLM's own list, names `maxsim`. `LLM.score` offline scores in
the calling process by other code, which is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import score, score_pairs
from ..packed import Packed
from ._switch import Handle, IntegrationError, Seam, Switch, left_to_host, logger, served


def register() -> None:
    """The plugin of vLLM's group `vllm.general_plugins`: `enable()` if it is asked for. An IntegrationError becomes a
    line in the log: a server starts all the same, with its own scoring."""
    asked = os.environ.get("MAXSIM_VLLM", "") == "1"
    if asked or "maxsim" in os.environ.get("VLLM_PLUGINS", "").split(","):
        try:
            enable()
        except IntegrationError as error:
            logger.error("vLLM keeps its own scoring: %s", error)


def enable() -> Handle:
    """Serves the scoring of vLLM's workers in this process, until `disable()` or the end of the returned context
    manager's block.

    Raises:
        IntegrationError: vLLM is not installed, of another version, or not as expected. Nothing is replaced then.
    """
    return _switch.enable()


def disable() -> None:
    """Puts back what vLLM had. Nothing happens where it was not replaced."""
    _switch.disable()


def scores(queries: list[Tensor], docs: list[Tensor]) -> list[Tensor]:
    """Scores of query i with document i, float32 scalars, as `LateInteractionRunner._score`: one packed copy of the
    documents, one launch, for one query that all share and for several.

    Args:
        queries: `[LQ, D]` each; the same tensor at several places is one query.
        docs: `[LD, D]` each. One without tokens scores −inf.

    Returns:
        one float32 scalar a pair, on the documents' device.

    Raises:
        ValueError: numbers of queries and documents that differ; and as `maxsim.score`.
        TypeError: as `maxsim.score`.
        UnsupportedError: as `maxsim.score`.
    """
    if len(queries) != len(docs):
        raise ValueError(f"got {len(queries)} queries and {len(docs)} documents")
    if not docs:
        return []
    if len({each.dtype for each in (*queries, *docs)}) > 1:
        queries, docs = _floats(queries), _floats(docs)
    distinct = {id(query): query for query in queries}
    documents = Packed.from_list(docs)
    if len(distinct) == 1:
        return list(score(queries[0], documents)[0].unbind())
    row = {key: i for i, key in enumerate(distinct)}
    pairs = torch.tensor([[row[id(query)], i] for i, query in enumerate(queries)], device="cpu")
    return list(score_pairs(list(distinct.values()), documents, pairs).unbind())


def _floats(items: list[Tensor]) -> list[Tensor]:
    converted = {id(item): item.float() for item in items}  # one of each, so that a shared query stays shared
    return [converted[id(item)] for item in items]


def _score(host: Callable[..., list[Tensor]], runner: Any, queries: list[Tensor], docs: list[Tensor]) -> list[Tensor]:
    try:
        result = scores(queries, docs)
    except Exception as error:  # requests are answered whatever happens here
        logger.debug("scores of vLLM's requests", exc_info=error)
        left_to_host("vllm.scores", f"of {type(error).__name__}")
        return host(runner, queries, docs)
    served("vllm.scores")
    return result


_switch = Switch(
    "vllm",
    ("0.33", "0.34"),
    [Seam("vllm.v1.pool.late_interaction_runner", "LateInteractionRunner._score", _score, ("self", "queries", "docs"))],
)
