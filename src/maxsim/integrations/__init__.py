"""Scoring of ours inside of frameworks: a module each, which loads its framework when it is called.

Every module has functions for the framework's public hooks, and `enable()` and `disable()` for those who want the
framework's own calls served without changing them:

    with maxsim.integrations.sentence_transformers.enable():
        ...

`calls()` says how often scoring of ours was really reached, `calls_left()` what was left to the framework and why;
what is replaced, and what is left, is logged under `maxsim.integrations`.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._switch import IntegrationError, calls, calls_left, reset_calls

__all__ = ["IntegrationError", "calls", "calls_left", "reset_calls"]

FRAMEWORKS = ("colpali", "mteb", "pylate", "sentence_transformers", "vllm")


def __getattr__(name: str) -> Any:
    if name in FRAMEWORKS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *FRAMEWORKS})
