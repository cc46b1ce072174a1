"""The corpus on disk: immutable segments of tokens and a SQLite catalogue. Knows nothing of scoring."""

from .documents import Id
from .errors import CorpusError
from .segments import Segment
from .store import Document, Info, Store

__all__ = ["CorpusError", "Document", "Id", "Info", "Segment", "Store"]
