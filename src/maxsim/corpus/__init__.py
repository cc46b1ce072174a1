"""The corpus on disk: immutable segments of tokens and a SQLite catalogue. Knows nothing of scoring."""

from .coding import Coding
from .documents import Id
from .errors import CorpusError
from .reading import Document, Info, Reader, Selection, Snapshot
from .segments import Segment
from .store import Store

__all__ = ["Coding", "CorpusError", "Document", "Id", "Info", "Reader", "Segment", "Selection", "Snapshot", "Store"]
