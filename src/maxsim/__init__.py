"""Late interaction, exactly and fast: `score(q, d) = Σ_i max_j ⟨q_i, d_j⟩` without the similarities ever being held."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import integrations as integrations
    from .best import TopK, topk
    from .bounds import error_bound
    from .certified import CertifiedTopK, certified_topk
    from .errors import UnsupportedError
    from .explaining import Explanation, explain
    from .ops import Matches, backend_for, matches, score, score_pairs
    from .packed import Packed, Views
    from .quantized import Quantized
    from .quantizing import quantize
    from .search import Corpus

__version__ = "0.1.0"

__all__ = [
    "CertifiedTopK",
    "Corpus",
    "Explanation",
    "Matches",
    "Packed",
    "Quantized",
    "TopK",
    "UnsupportedError",
    "Views",
    "backend_for",
    "certified_topk",
    "error_bound",
    "explain",
    "matches",
    "quantize",
    "score",
    "score_pairs",
    "topk",
]

# Rooms are loaded at the first use of a name: `maxsim --help` needs no torch, and scoring neither sqlite3 nor
# safetensors. No room may be called like a public name, which it would hide.
_ROOMS = {
    "best": ("TopK", "topk"),
    "bounds": ("error_bound",),
    "certified": ("CertifiedTopK", "certified_topk"),
    "errors": ("UnsupportedError",),
    "explaining": ("Explanation", "explain"),
    "ops": ("Matches", "backend_for", "matches", "score", "score_pairs"),
    "packed": ("Packed", "Views"),
    "quantized": ("Quantized",),
    "quantizing": ("quantize",),
    "search": ("Corpus",),
}


def __getattr__(name: str) -> Any:
    if name in ("distributed", "integrations"):
        return importlib.import_module(f".{name}", __name__)
    for room, names in _ROOMS.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f".{room}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "distributed", "integrations"})
