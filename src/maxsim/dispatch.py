"""Which backend serves a problem: the first that can, or every reason why none does."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from .errors import UnsupportedError
from .layout import Problem
from .result import Scored

ORDER = ("hopper", "triton", "cpu")  # fastest first
logger = logging.getLogger("maxsim")


class Backend(Protocol):
    """What a module in `backends/` offers."""

    NAME: str

    def unsupported(self, problem: Problem) -> Sequence[str]:
        """Every reason why this backend cannot serve the problem; empty where it can."""

    def preferred(self, problem: Problem) -> bool:
        """Whether the backend is faster at this problem than those behind it."""

    def forward(self, problem: Problem, winners: bool, maxima: bool) -> Scored:
        """Scores of a problem that is not empty, and, where asked, winners and (never without them) the maxima
        summed."""

    def backward(
        self, problem: Problem, winners: Tensor, grad: Tensor, need_queries: bool, need_documents: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Gradients with the shape of the problem's data, from the winners alone. dtype: of the data, or the sums' own,
        `Problem.result_dtype`."""


@cache
def _load(name: str) -> Backend | str:
    """The backend, or the reason why it cannot be imported."""
    if name == "cpu":
        from .backends import cpu

        return cast(Backend, cpu)
    if name in ("hopper", "triton"):
        try:
            if name == "hopper":
                from .backends import hopper

                return cast(Backend, hopper)
            from .backends import triton

            return cast(Backend, triton)
        except (ImportError, AttributeError, TypeError) as error:
            # triton is not installed, broken, or has changed: the other backends work all the same
            if importlib.util.find_spec("triton") is not None:
                logger.warning("the %s backend is left out: its kernels cannot be imported: %s", name, error)
            return f"its kernels cannot be imported: {error}"
    raise ValueError(f"backend must be one of {', '.join(map(repr, ORDER))} or None, got {name!r}")


def select(problem: Problem, backend: str | None = None) -> Backend:
    """The backend asked for, else the fastest that can serve the problem.

    Raises:
        UnsupportedError: naming each backend tried and every reason it gave.
        ValueError: an unknown name.
        TypeError: no name.
    """
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be one of {', '.join(map(repr, ORDER))} or None, got {type(backend).__name__}")
    reasons: dict[str, Sequence[str]] = {}
    slower: list[Backend] = []
    for name in ORDER if backend is None else (backend,):
        module = _load(name)
        if isinstance(module, str):
            reasons[name] = [module]
        elif backend is None and not module.preferred(problem):
            slower.append(module)
        elif not (why := module.unsupported(problem)):
            return module
        else:
            reasons[name] = why
    for module in slower:
        why = module.unsupported(problem)
        if not why:
            return module
        reasons[module.NAME] = why
    raise UnsupportedError(reasons)
