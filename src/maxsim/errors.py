"""The library's own exception."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class UnsupportedError(RuntimeError):
    """No backend, or not the one asked for, can serve the problem exactly. The message lists every reason."""

    def __init__(self, reasons: Mapping[str, Sequence[str]]):
        self.reasons = {name: list(why) for name, why in reasons.items()}
        lines = [f"  {name}: {'; '.join(why)}" for name, why in self.reasons.items()]
        super().__init__("no backend can serve this problem:\n" + "\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:  # worker processes send it back to their parent
        return type(self), (self.reasons,)
