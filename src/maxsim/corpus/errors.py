"""The store's own exceptions."""

from __future__ import annotations


class CorpusError(RuntimeError):
    """A corpus that is damaged, of a newer format, locked by a writer, or cannot be written; the message names the file
    and the fault."""


class FileError(ValueError):
    """A file of another program that cannot be read as embeddings; the message names it and says what was expected."""
