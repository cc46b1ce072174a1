"""What a backend's forward returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .plans import Plan


class Scored(NamedTuple):
    """scores: `Problem.shape`, float32 (float64). winners: `Problem.winners_shape` in `Problem.winners_dtype`, −1 for
    none.
    maxima: `Problem.winners_shape`, what was summed, 0 for masked query tokens. again: scores other tensors of the same
    shapes, strides, dtypes and alignment, where that is one launch."""

    scores: Tensor
    winners: Tensor | None = None
    maxima: Tensor | None = None
    again: Plan | None = None
