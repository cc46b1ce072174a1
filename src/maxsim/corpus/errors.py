"""The store's own exception."""

from __future__ import annotations


class CorpusError(RuntimeError):
    """A corpus that is damaged, of a newer format, locked by a writer, or cannot be written; the message names the file
    and the fault."""
