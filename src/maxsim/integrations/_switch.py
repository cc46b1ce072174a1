"""How a framework is switched over and back: what is replaced, what is counted, what is logged. Knows no framework."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import TracebackType
from typing import Any

import torch

logger = logging.getLogger("maxsim.integrations")

_lock = threading.RLock()  # held while a framework is imported: counters have their own
_counting = threading.Lock()
_served: Counter[str] = Counter()
_left: Counter[str] = Counter()


class IntegrationError(RuntimeError):
    """A framework cannot be switched over: not installed, another version, or what would be replaced is not there.
    Nothing has been changed."""


def calls() -> dict[str, int]:
    """How often scoring of ours was really reached, by function (`"sentence_transformers.colbert_scores"`), since the
    process began or `reset_calls()`. A call that was left to the host is not among them: see `calls_left()`."""
    with _counting:
        return dict(_served)


def calls_left() -> dict[str, int]:
    """How often a call was left to the framework's own scoring, by function and reason; each is logged the first
    time."""
    with _counting:
        return dict(_left)


def reset_calls() -> None:
    """Sets `calls()` and `calls_left()` to nothing. Reasons are then logged again."""
    with _counting:
        _served.clear()
        _left.clear()


def served(name: str) -> None:
    """Counts a call that scoring of ours has answered."""
    if torch.compiler.is_compiling():  # a graph has no counter
        return
    with _counting:
        _served[name] += 1


def left_to_host(name: str, reason: str) -> None:
    """Counts a call that the framework's own scoring answers, and logs the reason once."""
    if torch.compiler.is_compiling():
        return
    entry = f"{name}: {reason}"
    with _counting:
        _left[entry] += 1
        first = _left[entry] == 1
    if first:
        logger.warning("%s served by the host, because %s", name, reason)


@dataclass(frozen=True)
class Seam:
    """One attribute that is replaced while a switch is on.

    module: where it is, imported when the switch is thrown. name: the attribute, or `Class.attribute`. replacement:
    called with the host's own function first, then the call's arguments. parameters: the names that the host's function
    must have, None where any will do.
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    parameters: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Held:
    """A seam found in the running process."""

    def __init__(self, seam: Seam, switch: Switch, made: dict[tuple[int, int], Any]):
        self.seam = seam
        owner: Any = importlib.import_module(seam.module)
        *path, self.name = seam.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        self.owner = owner
        host = getattr(owner, self.name)
        if seam.parameters is not None:
            found = tuple(inspect.signature(host).parameters)
            if found != seam.parameters:
                raise TypeError(f"takes ({', '.join(found)}), expected ({', '.join(seam.parameters)})")
        self.own = self.name in vars(owner)  # else inherited: put back by deletion
        self.raw = inspect.getattr_static(owner, self.name)
        # plain functions of a class become methods again, so the wrapper has to be what the raw attribute is
        plain = self.raw.__func__ if isinstance(self.raw, (staticmethod, classmethod)) else self.raw

        @functools.wraps(plain)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not switch.enabled:  # somebody kept a reference
                return plain(*args, **kwargs)
            return seam.replacement(plain, *args, **kwargs)

        # a function that several modules have imported stays one object, which pickle wants to find by its name
        same = made.setdefault((id(plain), id(seam.replacement)), replacement)
        self.new = type(self.raw)(same) if isinstance(self.raw, (staticmethod, classmethod)) else same

    def install(self) -> None:
        setattr(self.owner, self.name, self.new)

    def restore(self) -> None:
        if inspect.getattr_static(self.owner, self.name, None) is not self.new:
            logger.warning("%s was replaced by others meanwhile and is left as it is; ours does nothing", self.seam)
        elif self.own:
            setattr(self.owner, self.name, self.raw)
        else:
            delattr(self.owner, self.name)


class Handle:
    """What `enable()` returns: as a context manager it takes back this one `enable()` at the end of the block. The
    framework is restored when no other is outstanding."""

    def __init__(self, switch: Switch):
        self._switch = switch

    def __enter__(self) -> Handle:
        self._switch._claim(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._switch._release(self)


class Switch:
    """The seams of one framework, all replaced or none.

    Args:
        package: the distribution's name, as pip knows it.
        versions: from the first version (inclusive) to the second (exclusive), `("6.0", "7")`.
        seams: what is replaced.
    """

    def __init__(self, package: str, versions: tuple[str, str], seams: Sequence[Seam]):
        self.package = package
        self.versions = versions
        self.seams = tuple(seams)
        self._claims: list[Handle] = []
        self._held: list[_Held] = []

    @property
    def enabled(self) -> bool:
        """Whether the framework is switched over."""
        return bool(self._held)

    def enable(self) -> Handle:
        """Replaces all seams, once however often it is called.

        Raises:
            IntegrationError: the package is missing or of another version, or a seam is not as expected; names all
                that is wrong. Nothing is replaced then.
        """
        handle = Handle(self)
        self._claim(handle)
        return handle

    def disable(self) -> None:
        """Puts back what the framework had, whatever `enable()` is outstanding. Nothing happens where none is."""
        with _lock:
            self._claims.clear()
            self._restore()

    def check(self) -> str:
        """The installed version, if it can be switched over. IntegrationError as for `enable`, nothing is replaced."""
        return self._find()[0]

    def _claim(self, handle: Handle) -> None:
        with _lock:
            if not self._held:
                version, found = self._find()
                try:
                    for held in found:
                        held.install()
                        self._held.append(held)
                except BaseException:
                    self._restore()
                    raise
                logger.info("replaced in %s %s: %s", self.package, version, ", ".join(map(str, self.seams)))
            if handle not in self._claims:
                self._claims.append(handle)

    def _release(self, handle: Handle) -> None:
        with _lock:
            if handle in self._claims:
                self._claims.remove(handle)
                if not self._claims:
                    self._restore()

    def _restore(self) -> None:
        was = self._held
        self._held = []
        for held in reversed(was):
            held.restore()
        if was:
            logger.info("put back in %s: %s", self.package, ", ".join(str(held.seam) for held in was))

    def _find(self) -> tuple[str, list[_Held]]:
        low, high = self.versions
        wanted = f"{self.package} from {low} up to, but without, {high}"
        try:
            version = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            raise IntegrationError(f"{self.package} is not installed; this integration is for {wanted}") from None
        if not _numbers(low) <= _numbers(version) < _numbers(high):
            raise IntegrationError(f"this integration is for {wanted}; installed is {version}. Nothing was replaced")
        found: list[_Held] = []
        wrong: list[str] = []
        made: dict[tuple[int, int], Any] = {}
        for seam in self.seams:
            try:
                found.append(_Held(seam, self, made))
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                wrong.append(f"{seam}: {error}")
        if wrong:
            raise IntegrationError(
                f"{self.package} {version} is not as expected ({wanted}), nothing was replaced:\n  "
                + "\n  ".join(wrong)
            )
        return version, found


def _numbers(version: str) -> tuple[int, ...]:
    """The release's numbers, without zeros at the end: `6.0.0` is `6`, and `6.1.dev0` counts as `6.1`."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release.group().split(".")] if release else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
