"""The corpus on disk: immutable segments of tokens and a SQLite catalogue. Knows nothing of scoring."""

from .checking import problems_of
from .coding import Coding
from .documents import Id, id_list
from .errors import CorpusError, FileError
from .gathering import gathered
from .kinds import holds_embeddings, kept_by, opened
from .lacking import Lacking
from .reading import Document, Info, Reader, Selection, Snapshot
from .segments import Segment
from .store import Store

__all__ = [
    "Coding",
    "CorpusError",
    "Document",
    "FileError",
    "Id",
    "Info",
    "Lacking",
    "Reader",
    "Segment",
    "Selection",
    "Snapshot",
    "Store",
    "gathered",
    "holds_embeddings",
    "id_list",
    "kept_by",
    "opened",
    "problems_of",
]
