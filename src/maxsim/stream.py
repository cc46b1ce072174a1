"""The token rows of one side one after another, in blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from .kernels.cpu_rows import norms
from .layout import Tokens
from .quantized.codes import owners, rows_of
from .quantized.kmeans import sample_rows

BLOCK = 1 << 20  # elements of a block


class Block(NamedTuple):
    """Rows `low` to `high`: tokens `[m, D]`, in float64 where they are normalised, those left out 0, and the item of
    each, int64."""

    low: int
    high: int
    tokens: Tensor
    owner: Tensor


@dataclass(frozen=True)
class Stream:
    """Items that follow one another: `tokens` padded or ragged without gaps, read in blocks of rows, which are those of
    `flat` where the strides allow that view."""

    tokens: Tokens
    flat: Tensor | None
    normalize: bool

    @classmethod
    def of(cls, tokens: Tokens, normalize: bool) -> Stream:
        """Of any tokens; ragged ones that do not follow one another are copied.

        Raises:
            ValueError: ragged items that leave their buffer (looked at, on a GPU too).
        """
        if tokens.ragged:
            tokens = _packed(tokens)
        data, mask = tokens.data.detach(), tokens.mask
        if data.ndim == 4:
            data, mask = data.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
        try:
            flat = data.view(-1, data.shape[-1])
        except RuntimeError:  # strides that no single row stride describes
            flat = None
        return cls(dataclasses.replace(tokens, data=data, mask=mask), flat, normalize)

    @property
    def rows(self) -> int:
        return self.tokens.data.shape[:-1].numel()

    @property
    def device(self) -> torch.device:
        return self.tokens.data.device

    @property
    def kept(self) -> int:
        """How many rows the mask keeps."""
        return self.rows if self.tokens.mask is None else int(self.tokens.mask.sum())

    def ranges(self) -> Iterator[tuple[int, int]]:
        step = max(1, BLOCK // self.tokens.width)
        return ((low, min(low + step, self.rows)) for low in range(0, self.rows, step))

    def owner(self, low: int, high: int) -> Tensor:
        """The document of each row, int64."""
        if self.tokens.ends is not None:
            return owners(low, high, self.tokens.ends)
        return torch.arange(low, high, device=self.device) // self.tokens.max_length

    def blocks(self) -> Iterator[Block]:
        data, mask, length = self.tokens.data, self.tokens.mask, self.tokens.max_length
        for low, high in self.ranges():
            owner = self.owner(low, high)
            if self.flat is not None:
                tokens = self.flat[low:high]
            else:
                tokens = data[owner, torch.arange(low, high, device=self.device) % length]
            if mask is not None:
                tokens = torch.where(mask.reshape(-1)[low:high, None], tokens, 0.0)
            if self.normalize:
                # by the norms that scores divide by, which overflow and vanish where float32's squares do
                single = tokens if tokens.dtype == torch.float64 else tokens.float()
                tokens = tokens.double() / norms(single).double()
            yield Block(low, high, tokens, owner)

    def sample(self, most: int, seed: int) -> Tensor:
        """At most `most` of the kept rows, float32, in their order: the same ones in any layout."""
        chosen = sample_rows(self.kept, most, seed).to(self.device)
        if self.tokens.mask is not None:
            chosen = self.tokens.mask.reshape(-1).nonzero()[:, 0][chosen]
        out = torch.empty(len(chosen), self.tokens.width, dtype=torch.float32, device=self.device)
        low = 0
        for block in self.blocks():
            high = int(torch.searchsorted(chosen, block.high))
            out[low:high] = block.tokens[chosen[low:high] - block.low]
            low = high
        return out

    def largest(self) -> Tensor:
        """The largest magnitude of each row, float32.

        Raises:
            ValueError: NaN or infinity.
        """
        found = torch.empty(self.rows, dtype=torch.float32, device=self.device)
        for block in self.blocks():
            found[block.low : block.high] = block.tokens.abs().amax(1)
            finite = found[block.low : block.high].isfinite()
            if not bool(finite.all()):
                self._refuse(block, int((~finite).nonzero()[0]))
        return found

    def _refuse(self, block: Block, row: int) -> None:
        document, values = int(block.owner[row]), block.tokens[row]
        starts = self.tokens.starts
        first = self.tokens.max_length * document if starts is None else int(starts[document])
        column = int((~values.float().isfinite()).nonzero()[0])
        raise ValueError(
            f"cannot quantise {float(values[column])}, in document {document}, token {block.low + row - first}, "
            f"column {column}"
        )

    def sums(self, rows: Tensor) -> Tensor:
        """Of each item's rows, floats `[rows]` → `[N]`, in one order on every run."""
        t = self.tokens
        if t.starts is None:
            return rows.view(t.count, t.max_length).sum(1)
        if not len(rows):
            return rows.new_zeros(t.count)
        every = torch.arange(len(rows), device=self.device)
        return embedding_bag(every, rows[:, None], t.starts, mode="sum")[:, 0]

    def of_documents(self, rows: Tensor) -> Tensor:
        """The largest of each document's rows, values >= 0 `[rows]` → `[N]`, 0 without rows."""
        out = rows.new_zeros(self.tokens.count)
        for low, high in self.ranges():
            out.scatter_reduce_(0, self.owner(low, high), rows[low:high], "amax")
        return out


def _packed(tokens: Tokens) -> Tokens:
    """Ragged documents checked, and one after another, which copies those that are not."""
    assert tokens.starts is not None
    assert tokens.ends is not None
    starts, ends = tokens.starts.long(), tokens.ends.long()
    T = tokens.data.shape[0]
    if bool(((starts < 0) | (ends < starts) | (ends > T)).any()):
        raise ValueError(f"items must lie in 0..{T}, and end after they start: see validate=True")
    if tokens.consecutive:
        return dataclasses.replace(tokens, starts=starts, ends=ends)
    rows, after = rows_of(starts, ends), (ends - starts).cumsum(0)
    mask = None if tokens.mask is None else tokens.mask[rows]
    return dataclasses.replace(
        tokens, data=tokens.data[rows], starts=after - (ends - starts), ends=after, consecutive=True, mask=mask
    )
