"""Progress of long work on the standard error."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class track:
    """Progress over `total` things, None where that is not known: a bar on a terminal, otherwise a line every ten
    seconds and, where the total is known, one at the end.

    Use as a context manager; call it with the number of things done since the last call.
    """

    EVERY_SECONDS = 10.0

    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._start = self._last = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task(what, total=total, rate="")

    def __enter__(self) -> track:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        rate = f"{self.done / max(now - self._start, 1e-9):.0f}/s"
        if self._bar:
            self._bar.update(self._task, completed=self.done, rate=rate)
        elif self.done == self.total or now - self._last >= self.EVERY_SECONDS:
            self._last = now
            of = "" if self.total is None else f" of {self.total}"
            print(f"{self.what}: {self.done}{of}, {rate}", file=sys.stderr, flush=True)
