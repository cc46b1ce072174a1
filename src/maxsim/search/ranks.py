"""One search by several processes: each scores its shard of the segments, and all get the best of all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..best import check_k, merge
from ..corpus import CorpusError, Id, Selection
from ..distributed.talk import RankError, Step, Talk
from ..layout import TokensLike
from ..packed import Packed
from .queries import count_of, queries_of
from .scan import Winners, winners

if TYPE_CHECKING:
    from . import Corpus, Hit

TRIES = 100  # of ranks to see the same state of a corpus that is being changed


def together(
    corpus: Corpus,
    queries: TokensLike,
    k: int,
    subset: Iterable[Id] | None = None,
    filter: Mapping[str, Any] | None = None,
    *,
    group: Any = None,
) -> list[list[Hit]]:
    """`Corpus.search` by all ranks of a process group: each opens the corpus with its shard and makes the same call.

        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        corpus = maxsim.Corpus.open(path, device=f"cuda:{local_rank}", shard=(rank, size))
        hits = maxsim.search.together(corpus, queries, k=10)

    Args:
        corpus: opened with `shard=(rank, size)` of the group.
        queries: as for `Corpus.search`, the same on all ranks, and so the following.
        k: as for `Corpus.search`.
        subset: as for `Corpus.search`.
        filter: as for `Corpus.search`.
        group: a group of `torch.distributed`; None is the default one. Winners travel by its backend for the CPU where
            it has one (gloo), else by NCCL.

    Returns:
        on every rank the hits of all segments: those that one process would find.

    Raises:
        ValueError: as `Corpus.search`, ranks that do not agree, another shard than the rank's.
        TypeError: as `Corpus.search`.
        KeyError: as `Corpus.search`.
        CorpusError: as `Corpus.search`.
        UnsupportedError: as `Corpus.search`.
        RankError: a RuntimeError. What is raised on one rank is raised there as it is, and on all others, within
            seconds, as this, with that rank's message.
    """
    talk = Talk(group, corpus.device)
    if isinstance(subset, Iterable) and not isinstance(subset, (str, bytes)):
        subset = list(subset)  # an iterator is read once
    before = None
    while True:
        asked, selection = _agreed(talk, corpus, queries, k, subset, filter)
        if selection.snapshot is before:
            raise CorpusError(f"{corpus.path}: its catalogue lacks documents that its segments have; see `check`")
        queries, before = asked, selection.snapshot
        found = _merged(talk, corpus, asked, selection, min(check_k(k), selection.documents))
        wanted = set(found.positions[found.positions >= 0].tolist())
        names: dict[int, Id] = {}
        failure = None
        try:
            names = corpus.ids_at(wanted)
        except Exception as error:
            failure = error
        missing = talk.agree(Step.NAMED, [len(wanted) - len(names)], failure)
        if not any(count for count, *_ in missing):  # else a compaction dropped what was deleted meanwhile
            return corpus.hits(found, names)


def _agreed(
    talk: Talk, corpus: Corpus, queries: TokensLike, k: int, subset: Any, filter: Any
) -> tuple[Tensor | Packed, Selection]:
    """Queries and what is searched, once all ranks have the same."""
    for _ in range(TRIES):
        facts: list[int] = []
        failure = None
        try:
            if corpus.shard != (talk.rank, talk.size):
                raise ValueError(f"corpus has the shard {corpus.shard}, expected {(talk.rank, talk.size)} on this rank")
            asked = queries_of(queries, corpus.coding, corpus.device)
            selection = corpus.select(subset, filter)
            facts = [check_k(k), count_of(asked), _digest(asked), selection.documents, selection.snapshot.generation]
        except Exception as error:
            failure = error
        table = talk.agree(Step.SEARCH, facts, failure)
        asking = [row[:3] for row in table]
        if any(row != asking[0] for row in asking):
            raise ValueError(f"ranks do not ask the same: k, number and digest of queries by rank: {asking}")
        if all(row == table[0] for row in table):
            return asked, selection
        if all(row[4] == table[0][4] for row in table):
            raise ValueError(f"ranks search other documents, numbers by rank: {[row[3] for row in table]}")
        queries = asked
    raise RankError(f"the corpus changed between ranks {TRIES} times in a row")


def _digest(asked: Tensor | Packed) -> int:
    tokens = asked if isinstance(asked, Tensor) else asked.tokens
    data = tokens.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def _merged(talk: Talk, corpus: Corpus, asked: Tensor | Packed, selection: Selection, k: int) -> Winners:
    """The winners of all ranks, on the CPU."""
    NQ, failure = count_of(asked), None
    scores = torch.full((NQ, k), float("-inf"), dtype=torch.float32, device="cpu")
    positions = torch.full((NQ, k), -1, dtype=torch.int64, device="cpu")
    try:
        own = winners(asked, corpus.place, selection, k)
        scores[:, : own.scores.shape[1]], positions[:, : own.scores.shape[1]] = own.scores, own.positions
    except Exception as error:
        failure = error
    talk.agree(Step.FOUND, error=failure)
    if not NQ * k:
        return Winners(scores, positions)
    both = torch.stack([scores.view(torch.int32).long(), positions])
    table = talk.rows(both.flatten()).view(talk.size, 2, NQ, k).permute(1, 2, 0, 3).flatten(2)
    positions, order = table[1].sort(dim=1)  # the order of adding, which decides between equal scores
    scores = table[0].gather(1, order).int().view(torch.float32)
    return Winners(*merge(scores, positions, k))
