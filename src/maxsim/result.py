"""What a backend's forward returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

Again: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class Scored(NamedTuple):
    """What a forward found.

    scores: `Problem.shape`, float32 (float64).
    winners: `Problem.winners_shape` in `Problem.winners_dtype`, −1 for none.
    maxima: `Problem.winners_shape`, what was summed, 0 for masked query tokens.
    again: makes scores, and winners where they were asked for, of other tensors of the same shapes, strides, dtypes and
        alignment; None where launches cannot be repeated.
    """

    scores: Tensor
    winners: Tensor | None = None
    maxima: Tensor | None = None
    again: Again | None = None
