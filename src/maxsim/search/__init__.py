"""Exact search over a corpus: the join of the store and the scoring functions."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import torch

from ..best import check_k
from ..corpus import Document, Id, Store
from ..devices import device_of
from ..layout import TokensLike
from .homes import Home
from .queries import queries_of
from .scan import winners

__all__ = ["Corpus", "Hit"]

C = TypeVar("C", bound="Corpus")


class Hit(NamedTuple):
    """A document of a search's result and its score."""

    id: Id
    score: float


class Corpus(Store):
    """Documents on disk, with ids, token embeddings, texts and metadata, that can be searched exactly.

    `Corpus.create(path, dim)` makes one in a new folder and `Corpus.open(path)` opens it; `add`, `delete` and `search`
    change and ask it, `get`, `texts`, `metadata`, `ids`, `in` and `len` read it, `info` and `check` describe and
    verify it.

        corpus = maxsim.Corpus.create("embeddings", dim=128)
        corpus.add(["a", 2], [torch.randn(7, 128), torch.randn(300, 128)], texts=["first", "second"])
        hits = corpus.search(torch.randn(1, 32, 128), k=2)  # hits[0][0].id, .score
        maxsim.Corpus.open("embeddings", device="cuda")  # its tokens copied to a GPU and searched there
        maxsim.Corpus.create("codes", dim=128, dtype="int8", exact="float16")  # the same hits, half the bytes read

    An id is a str or an int, and 1 and "1" are two ids. Embeddings are kept in one dtype (float16 unless told), which
    queries are converted to, or as codes. Each change is one transaction, seen by other handles and processes from its
    commit on; after a crash the folder opens as it was before or after. It may be moved, copied, read from a read-only
    place, and used from several threads and processes; a second writer waits for the first.
    """

    def __init__(self, path: str | os.PathLike[str], device: str | torch.device | None = None) -> None:
        self.device = device_of(device or "cpu")
        super().__init__(path)
        self._home = Home(self.device)

    @classmethod
    def open(cls: type[C], path: str | os.PathLike[str], device: str | torch.device | None = None) -> C:
        """Open a corpus; everything that can be checked without reading the tokens is checked here.

        Args:
            path: the folder.
            device: where the tokens live. None or "cpu" maps the files into memory, "cuda" or "cuda:N" copies them to
                the GPU and keeps them there.

        Raises:
            FileNotFoundError: no corpus there.
            NotADirectoryError: a file is there.
            ValueError: another device, or a GPU that is not there.
            CorpusError: damaged, of a newer format, or locked; names the file and what is wrong.
        """
        return cls(path, device)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} on {self.device})"

    def get(self, id: Id) -> Document:
        """As `Store.get`, embeddings on the device of the corpus."""
        found = super().get(id)
        return found._replace(embeddings=found.embeddings.to(self.device))

    def search(self, queries: TokensLike, k: int, subset: Iterable[Id] | None = None) -> list[list[Hit]]:
        """The k best documents of each query, exactly.

        Args:
            queries: `[NQ, LQ, D]` of which every row counts, one `[LQ, D]`, a list or another iterable of `[L_i, D]`
                (torch or numpy, of any mixture of dtypes and devices), an object array of them, `Packed`, `Views`, or
                PyTorch's jagged nested tensor; any float dtype, converted to `dtype`, on any device.
            k: at least 0; beyond the corpus it gives every document that has tokens.
            subset: ids to search in; None searches everything, an empty one nothing.

        Returns:
            for each query its hits: score descending, then the order in which documents were added. Documents without
            tokens are never hits; a query without tokens has none. Of a corpus that keeps codes alone these are the
            best by the scores of codes; where it keeps a float copy beside them (`exact`), hits and scores are those of
            the copy.

        Raises:
            ValueError: negative k, queries of another shape or width, NaN or infinity in them (in the corpus' dtype),
                codes without a bound beside a float copy (`fp8` on a GPU).
            TypeError: queries of another form or not floats, k that is not an integer, a single str as `subset`.
            KeyError: an id in `subset` that is not there.
            CorpusError: the files are not what the catalogue says.
            UnsupportedError: no backend can score this corpus on its device.
        """
        k = check_k(k)
        asked = queries_of(queries, self._snapshot.coding, self.device)
        while True:
            selection = self.select(subset)
            found = winners(asked, self._home, selection, k)
            hits = found.positions >= 0
            wanted = set(found.positions[hits].tolist())
            names = self.ids_at(wanted)
            if len(names) == len(wanted):  # else a compaction dropped documents that were deleted meanwhile
                break
        return [
            [Hit(names[position], score) for position, score, hit in zip(*row, strict=True) if hit]
            for row in zip(found.positions.tolist(), found.scores.tolist(), hits.tolist(), strict=True)
        ]
