"""Items as runs of token rows: which rows are kept; documents cut in pieces, and what is found for pieces put
together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cpu_maxima import Pieces

NEVER = np.iinfo(np.int64).max  # a position after every other
# AMD EPYC (Zen 3), 32x32 vs 32x10x180 float32, three in four kept: 7.4 ms in place, 11 gathered
GATHER = 24  # query rows whose products take as long as to gather a document row


class Kept(NamedTuple):
    """Kept tokens of some items in order, int64 each."""

    item: np.ndarray  # of each token
    position: np.ndarray  # of each token in its item
    row: np.ndarray  # of each token
    counts: np.ndarray  # of each item's kept tokens
    first_masked: np.ndarray  # position of each item's first masked token, NEVER where there is none


def kept(start: np.ndarray, length: np.ndarray, mask: np.ndarray | None) -> Kept:
    """Items are rows `start[n]` to `start[n] + length[n]`, of which `mask` (bool, an entry a row) keeps some."""
    item = np.repeat(np.arange(len(start)), length)
    position = np.arange(len(item)) - np.repeat(length.cumsum() - length, length)
    row = start[item] + position
    first_masked = np.full(len(start), NEVER)
    if mask is None:
        return Kept(item, position, row, length, first_masked)
    keep = mask[row]
    if not keep.all():
        gone = np.flatnonzero(~keep)[::-1]  # the first is written last
        first_masked[item[gone]] = position[gone]
        item, position, row = item[keep], position[keep], row[keep]
    return Kept(item, position, row, np.bincount(item, minlength=len(start)), first_masked)


def _slots(start: np.ndarray, length: np.ndarray, mask: np.ndarray, limit: int) -> np.ndarray | None:
    """The mask `[count, width]` of documents of one length, up to `limit`, that follow one another, else None."""
    width = int(length[0]) if len(length) else 0
    if not 0 < width <= limit or bool((length != width).any() or (np.diff(start) != width).any()):
        return None
    return mask[start[0] : start[0] + len(start) * width].reshape(-1, width)


class Documents:
    """Documents cut in `pieces` of at most `limit` kept tokens, `owner` the document of each, to be multiplied by some
    `query_rows`. `empty`: bool `[count]`, without a token that competes. With `masked_zero` a masked token competes
    with similarity 0."""

    def __init__(
        self, start: np.ndarray, length: np.ndarray, mask: np.ndarray | None, masked_zero: bool, limit: int,
        query_rows: int,
    ):  # fmt: skip
        self.count = len(start)
        rows, first, size, kept_tokens, first_masked, gone = None, start, length, length, None, None
        self._position: Tensor | None = None
        self._first_kept: Tensor | None = None  # of documents whose masked rows are multiplied too
        self._zero: Tensor | None = None
        slots = None if mask is None else _slots(start, length, mask, limit)
        if slots is not None and (~slots).sum() * query_rows <= GATHER * slots.sum():
            if not slots.all():
                gone, kept_tokens = np.flatnonzero(~slots), slots.sum(1)
                self._first_kept = torch.from_numpy(np.where(kept_tokens > 0, slots.argmax(1), -1))[:, None]
                first_masked = np.where(slots.all(1), NEVER, slots.argmin(1))
        elif mask is not None:
            found = kept(start, length, mask)
            if (found.first_masked != NEVER).any():
                rows, size, kept_tokens, first_masked = found.row, found.counts, found.counts, found.first_masked
                first = size.cumsum() - size
                self._position, self._begin = torch.from_numpy(found.position), torch.from_numpy(first)
        if masked_zero and first_masked is not None:
            self._zero = torch.from_numpy(first_masked)[:, None]
        empty = (length if masked_zero else kept_tokens) == 0
        self.empty, self.some_empty = torch.from_numpy(empty), bool(empty.any())
        self.owner = np.arange(self.count)
        self._offset: np.ndarray | None = None  # of a piece in its document, where not every document is one piece
        if bool((size == 0).any()) or int(size.max(initial=0)) > limit:
            cuts = -(-size // limit)
            self.owner = np.repeat(self.owner, cuts)
            self._offset = (np.arange(len(self.owner)) - np.repeat(cuts.cumsum() - cuts, cuts)) * limit
            first = first[self.owner] + self._offset
            size = np.minimum(limit, size[self.owner] - self._offset)
        self.pieces = Pieces(first, size, rows, gone)

    def gather(self, value: Tensor, place: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Of pieces `[P, R]` → of documents `[count, R]`: the largest similarity (−inf without any), its token's
        position (−1)."""
        if self._offset is not None:
            value, place = self._join(value, place)
        if place is not None and self._position is not None and len(self._position):
            token = (place + self._begin[:, None]).clamp_(0, len(self._position) - 1)
            place = torch.where(place < 0, place, self._position[token])
        if place is not None and self._first_kept is not None:
            place = torch.where(value == -torch.inf, self._first_kept, place)  # what is masked was as small
        if self._zero is not None:
            competes = self._zero != NEVER
            if place is not None:
                # of equals the lowest position wins, a masked token's too
                wins = (value < 0) | ((value == 0) & (self._zero < place))
                place = place.masked_fill(competes & wins, -1)
            value = torch.where(competes, value.clamp_min(0), value)
        return value, place

    def _join(self, value: Tensor, place: Tensor | None) -> tuple[Tensor, Tensor | None]:
        shape = self.count, value.shape[1]
        joined = value.new_full(shape, -torch.inf)
        found = None if place is None else place.new_full(shape, -1)
        if place is not None and self._offset is not None:
            place = place + torch.from_numpy(self._offset)[:, None]
        many = np.bincount(self.owner, minlength=self.count)[self.owner] > 1
        single = np.flatnonzero(~many)
        of, at = torch.from_numpy(self.owner[single]), torch.from_numpy(single)
        joined[of] = value[at]
        if found is not None and place is not None:
            found[of] = place[at]
        for document in np.unique(self.owner[many]).tolist():
            low, high = np.searchsorted(self.owner, (document, document + 1)).tolist()
            if found is None or place is None:
                joined[document] = value[low:high].amax(0)
            else:
                joined[document], piece = value[low:high].max(0)  # the first of equals, the first NaN
                found[document] = place[low:high].gather(0, piece[None])[0]
        return joined, found
