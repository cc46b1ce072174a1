"""What hosts hand over, as tensors: arrays and lists taken as the hosts take them, moved to where they are scored."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import UnsupportedError
from ..packed import Packed, as_tensor
from ._switch import left_to_host, served

MOVED_ELEMENTS = 1 << 28  # of documents that come from another device at a time: 1 GiB of float32


def or_host(name: str, ours: Callable[[], Tensor], host: Callable[[], Tensor]) -> Tensor:
    """Scores of ours, counted as `name`; the host's where we cannot serve the call, counted and logged.

    Arguments that we refuse go to the host too: what is wrong with them is for its own errors to say.
    """
    try:
        scores = ours()
    except (UnsupportedError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
    except (TypeError, ValueError):
        reason = "its arguments are not what scoring of ours takes"
    else:
        served(name)
        return scores
    left_to_host(name, reason)
    return host()


def of_host(module: str, name: str) -> Callable[..., Tensor]:
    """A function of the host, which is imported when it is called."""

    def call(*args: Any) -> Tensor:
        result: Tensor = getattr(importlib.import_module(module), name)(*args)
        return result

    return call


def as_float(value: Any) -> Tensor:
    """A tensor or array (or a list of equal ones, stacked) as floats; whole numbers become float32."""
    if isinstance(value, (list, tuple)):
        items = [as_float(item) for item in value]
        value = torch.stack(items) if items else torch.empty(0, dtype=torch.float32, device="cpu")
    tensor = as_tensor(value, "embeddings")
    return tensor if tensor.is_floating_point() else tensor.float()


def device_of(value: Any) -> torch.device | None:
    """Where embeddings are; None for numpy arrays and empty lists."""
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value.device if isinstance(value, Tensor) else None


def mask_of(mask: Any) -> Tensor:
    """A mask as a tensor; a list of rows is filled up with False."""
    if isinstance(mask, (list, tuple)):
        return pad_sequence([_tensor(row) for row in mask], batch_first=True)
    if not isinstance(mask, (Tensor, np.ndarray)):
        raise TypeError(f"a mask must be a tensor, an array or a list of them, got {type(mask).__name__}")
    return _tensor(mask)


def _tensor(mask: Any) -> Tensor:
    return mask if isinstance(mask, Tensor) else torch.as_tensor(mask, device="cpu")


def packed(items: Sequence[Tensor], device: torch.device, padded: Sequence[bool] = ()) -> Packed:
    """A list of `[L_i, D]` without padding, on `device`: one copy, and one transfer where they are elsewhere.

    Items that are `padded` get one row of zeros at their end: whatever the number of such rows, 0 competes.
    """
    lengths = [len(item) for item in items]
    pieces = list(items)
    if any(padded):
        zeros = items[0].new_zeros(1, items[0].shape[1])
        pieces = [
            piece for item, more in zip(items, padded, strict=True) for piece in ([item, zeros] if more else [item])
        ]
        lengths = [length + more for length, more in zip(lengths, padded, strict=True)]
    offsets = torch.tensor([0, *accumulate(lengths)], device="cpu")
    return Packed(torch.cat(pieces).to(device), offsets, max(lengths))


def ranges(lengths: Sequence[int], width: int, moved: bool) -> Iterator[tuple[int, int]]:
    """Items to score at a time, first and last + 1: all, or if they are `moved` as many as `MOVED_ELEMENTS` holds."""
    low = held = 0
    for i, length in enumerate(lengths):
        if moved and i > low and (held + length) * width > MOVED_ELEMENTS:
            yield low, i
            low, held = i, 0
        held += length
    yield low, len(lengths)


@dataclass(frozen=True)
class Side:
    """Queries or documents as sentence-transformers takes them.

    items: `[N, L, D]`, or a list of `[L_i, D]`. mask: `[N, L]` of booleans (True = keep) or of numbers, which are
    weights of query tokens; None where all tokens count.
    """

    items: Tensor | list[Tensor]
    mask: Tensor | None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> list[int]:
        if isinstance(self.items, list):
            return [len(item) for item in self.items]
        return [self.items.shape[1]] * self.items.shape[0]

    def part(self, low: int, high: int) -> Side:
        return Side(self.items[low:high], None if self.mask is None else self.mask[low:high])

    def ranges(self, moved: bool) -> Iterator[tuple[int, int]]:
        return ranges(self.lengths, self.items[0].shape[-1], moved)

    def placed(self, where: torch.device) -> tuple[Tensor | Packed, Tensor | None]:
        """Tokens and boolean mask on a device."""
        if isinstance(self.items, list):
            return packed(self.items, where), None
        return self.items.to(where), None if self.mask is None else self.mask.bool().to(where)

    def weighed(self) -> Side:
        """Query tokens times their weights, where the mask has weights: what a token's best match is multiplied by
        may as well multiply the token."""
        if self.mask is None or self.mask.dtype == torch.bool or isinstance(self.items, list):
            return self
        if self.mask.device.type == "cpu":
            wrong = "weights below 0 turn a best match into a worst"
            if torch.compiler.is_compiling():  # where no branch may depend on values
                torch._assert_async((self.mask >= 0).all(), wrong)
            elif bool((self.mask < 0).any()):
                raise ValueError(wrong)
        return Side(self.items * self.mask.to(self.items)[..., None], self.mask)

    def empty(self) -> Tensor | None:
        """True for items without a kept token; None where there is none."""
        if self.mask is not None:
            return ~self.mask.bool().any(-1)
        empty = [length == 0 for length in self.lengths]
        return torch.tensor(empty, device="cpu") if any(empty) else None

    def counts(self) -> Tensor:
        """Kept tokens of each item, at least 1."""
        if self.mask is not None:
            return self.mask.bool().sum(-1).clamp(min=1)
        return torch.tensor([max(length, 1) for length in self.lengths], device="cpu")


def side(value: Any, mask: Any) -> Side:
    """Any form that sentence-transformers takes. Without a mask rows of zeros in a padded tensor are padding, in a list
    they are tokens."""
    given = None if mask is None else mask_of(mask)
    if isinstance(value, (list, tuple)):
        items = [as_float(item) for item in value]
        if given is None or not items:
            return Side(items, None)
        value = pad_sequence(items, batch_first=True)  # a mask may keep what padding adds
    tokens = as_float(value)
    if tokens.ndim == 2:
        tokens, given = tokens[None], given if given is None or given.ndim > 1 else given[None]
    if tokens.ndim != 3:
        raise ValueError(f"expected [N, L, D], got {list(tokens.shape)}")
    return Side(tokens, tokens.any(-1) if given is None else fit(given, tokens))


def fit(mask: Tensor, tokens: Tensor) -> Tensor:
    """A mask of one row, or of one for each item, `[N, L]`."""
    if mask.ndim != 2 or mask.shape[0] not in (1, tokens.shape[0]) or mask.shape[1] != tokens.shape[1]:
        raise ValueError(f"a mask of shape {list(mask.shape)} for tokens of shape {list(tokens.shape)}")
    return mask.expand(tokens.shape[:2])
