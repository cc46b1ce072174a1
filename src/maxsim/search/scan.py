"""The best documents of each query, over all blocks of a corpus; `[NQ, ND]` scores are never held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..best import merge, topk
from ..certified import CertifiedTopK, MismatchError, Part, certify, in_groups
from ..corpus import CorpusError, Selection
from ..graph import run
from ..layout import make_problem
from ..packed import Packed
from .homes import Home
from .queries import count_of, query_lengths, some_of


class Winners(NamedTuple):
    """scores: float32 `[NQ, K]`, falling; positions: int64 of the same shape. −1 where there is no further hit."""

    scores: Tensor
    positions: Tensor


def winners(asked: Tensor | Packed, home: Home, selection: Selection, k: int) -> Winners:
    """The k best documents of each query among the selected ones: score descending, then position ascending."""
    NQ = count_of(asked)
    none = Winners(*(torch.empty(NQ, 0, dtype=each, device=home.device) for each in (torch.float32, torch.int64)))
    k = min(k, selection.documents)
    if not k or not NQ or not home.parts(selection):
        return none
    if selection.snapshot.coding.exact is not None:
        found = in_groups(lambda low, high: _certified(some_of(asked, low, high), home, selection, k), NQ)
        return Winners(found.scores, found.indices)
    scores, positions = none
    for block in home.blocks(selection):
        best = topk(asked, block.documents, k)
        place = torch.where(best.indices < 0, best.indices, block.positions[best.indices.clamp(min=0)])
        # blocks come in the order of adding, so columns of equal scores stay in it
        scores, positions = merge(torch.cat([scores, best.scores], 1), torch.cat([positions, place], 1), k)
    return Winners(scores, positions)


def _certified(asked: Tensor | Packed, home: Home, selection: Selection, k: int) -> CertifiedTopK:
    def parts() -> Iterator[Part]:
        for block in home.blocks(selection):
            yield Part(make_problem(asked, block.documents), block.positions)

    try:
        return certify(parts(), lambda pairs: pair_scores(asked, pairs, home, selection), k, home.device)
    except MismatchError as error:
        raise CorpusError(f"codes are not of the floats beside them: {error}; see `check`") from error


def pair_scores(asked: Tensor | Packed, pairs: Tensor, home: Home, selection: Selection) -> Tensor:
    """Scores `[P]` of pairs (query, position), int64 `[P, 2]` on the scoring device: of the float copies where the
    corpus keeps them. Only these documents are read."""
    positions, which = torch.unique(pairs[:, 1], return_inverse=True)
    which, order = which.sort(stable=True)
    found = torch.empty(len(pairs), dtype=torch.float32, device=home.device)
    ends = torch.bincount(which, minlength=len(positions)).cumsum(0).cpu()  # of each document's pairs
    low = first = 0
    for block in home.pick(selection, positions.cpu(), exact=True):
        high = low + len(block.positions)
        last = int(ends[high - 1])
        local = torch.stack([pairs[order[first:last], 0], which[first:last] - low], 1)
        found[first:last] = run(make_problem(asked, block.documents, pairs=local, pairwise=True), None).scores
        low, first = high, last
    return torch.empty_like(found).scatter_(0, order, found)


def ranked(asked: Tensor | Packed, pairs: Tensor, home: Home, selection: Selection) -> list[tuple[int, int, float]]:
    """Pairs (query, position) of `pairs`, each once, with scores: by query, then score descending, then position. Those
    without tokens on either side are left out."""
    if not len(pairs):
        return []
    pairs = torch.unique(pairs, dim=0)
    lengths = query_lengths(asked)
    blank = torch.cat([segment.positions_of(rows)[segment.lengths[rows] == 0] for segment, rows in selection.parts])
    pairs = pairs[(lengths[pairs[:, 0]] > 0) & ~torch.isin(pairs[:, 1], blank.to(pairs.device))]
    if not len(pairs):
        return []
    scores = pair_scores(asked, pairs, home, selection)
    order = scores.sort(descending=True, stable=True).indices
    order = order[pairs[order, 0].sort(stable=True).indices]
    query, position = pairs[order].unbind(1)
    return list(zip(query.tolist(), position.tolist(), scores[order].tolist(), strict=True))
