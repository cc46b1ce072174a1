"""What masked document tokens that compete with similarity 0 change at a document's end. The tiles know nothing of
them: `gaps` holds the row of each document's first masked token, or NO_GAP."""

from __future__ import annotations

from .gluon_names import gl, gluon
from .hopper_maxima import maximum
from .spans import NO_GAP


@gluon.jit
def or_zero(value, gap):
    """The larger of the kept tokens' largest similarities and 0, where a token is masked."""
    return maximum(value, gl.where(gap == NO_GAP, float("-inf"), 0.0))


@gluon.jit
def zero_wins(value, row, gap):
    """Whether a masked token comes before the kept one in `row` that has the largest similarity, of equals the
    first."""
    return (gap != NO_GAP) & ((value < 0) | ((value == 0) & (row > gap)))
