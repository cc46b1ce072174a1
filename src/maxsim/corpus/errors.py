"""The store's own exception."""

from __future__ import annotations


class CorpusError(RuntimeError):
    """A corpus that is damaged, of a newer format, or locked by a writer; the message names the file and the fault."""
