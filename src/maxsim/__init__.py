"""Late interaction, exactly and fast: `score(q, d) = Σ_i max_j ⟨q_i, d_j⟩` without the similarities ever being held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import UnsupportedError
from .ops import Matches, backend_for, matches, score, score_pairs
from .packed import Packed, Views
from .topk import TopK, topk

if TYPE_CHECKING:
    from .search import Corpus

__version__ = "0.1.0"

__all__ = [
    "Corpus",
    "Matches",
    "Packed",
    "TopK",
    "UnsupportedError",
    "Views",
    "backend_for",
    "matches",
    "score",
    "score_pairs",
    "topk",
]


def __getattr__(name: str) -> Any:
    if name == "Corpus":  # sqlite3 and safetensors are loaded by those who use a store
        from .search import Corpus

        return Corpus
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
