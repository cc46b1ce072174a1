"""Exact search over a corpus: the join of the store and the scoring functions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..best import check_k
from ..corpus import CorpusError, Document, Id, Store, id_list
from ..devices import device_of
from ..layout import TokensLike
from ..quantized import Quantized
from .placing import check_shard, home_of
from .queries import candidate_lists, count_of, queries_of
from .ranks import together
from .scan import Winners, ranked, winners

__all__ = ["Corpus", "Hit", "together"]

C = TypeVar("C", bound="Corpus")


class Hit(NamedTuple):
    """A document of a search's result: its id, as it was added, and its score, a Python float with float32's value."""

    id: Id
    score: float


class Corpus(Store):
    """Documents on disk, with ids, token embeddings, texts and metadata, that can be searched exactly.

    `Corpus.create(path, dim)` makes one in a new folder and `Corpus.open(path)` opens it; `add`, `delete` and `search`
    change and ask it, `get`, `texts`, `metadata`, `ids`, `in` and `len` read it, `info` and `check` describe and
    verify it. `update` changes documents, `rerank` scores candidates, `compact` gives room back.

        corpus = maxsim.Corpus.create("embeddings", dim=128)
        corpus.add(["a", 2], [torch.randn(7, 128), torch.randn(300, 128)], texts=["first", "second"])
        hits = corpus.search(torch.randn(1, 32, 128), k=2)  # hits[0][0].id, .score
        maxsim.Corpus.open("embeddings", device="cuda")  # its tokens copied to a GPU and searched there
        maxsim.Corpus.create("codes", dim=128, dtype="int8", exact="float16")  # the same hits, half the bytes read

    An id is a str or an int, and 1 and "1" are two ids. Embeddings are kept in one dtype (float16 unless told), which
    queries are converted to, or as codes. Each change is one transaction, seen by other handles and processes from its
    commit on; after a crash the folder opens as it was before or after. It may be moved, copied, read from a read-only
    place, and used from several threads and processes (a handle that is pickled opens the folder there); a second
    writer waits for the first.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str | torch.device | None = None,
        home: str | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self.device = device_of(device or "cpu")
        super().__init__(path, check_shard(shard))
        self.place = home_of(home, self.device, shard, self._snapshot)

    @classmethod
    def open(
        cls: type[C],
        path: str | os.PathLike[str],
        device: str | torch.device | None = None,
        home: str | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> C:
        """Open a corpus; everything that can be checked without reading the tokens is checked here, of the segments of
        its shard.

        Args:
            path: the folder.
            device: what scores: None or "cpu", "cuda" or "cuda:N".
            home: where the tokens live. "device": in the memory of the device, copied there when the corpus is opened.
                "pinned": in page-locked memory of the host, from where they come through two buffers of the GPU, one
                being filled while the other is scored; read from the files when the corpus is first searched. "mapped":
                in the files, mapped into memory, which may be larger than that; on a GPU they come through two
                page-locked buffers. None: on the CPU "mapped", on a GPU the first of the three that has room.
            shard: (rank, size): this handle searches the segments whose number leaves `rank` when divided by `size`,
                for several processes that search one corpus together (`maxsim.search.together`). It opens these; one
                of the others where `get`, `rerank` or `export` ask for what it holds.

        Raises:
            FileNotFoundError: no corpus there.
            NotADirectoryError: a file is there.
            ValueError: another device or home, a GPU that is not there, a shard of another form.
            CorpusError: damaged, of a newer format, or locked; names the file and what is wrong.
        """
        return cls(path, device, home, shard)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and what other processes are sent, are handles of their own on the same folder."""
        return type(self), (self.path, self.device, self.home, self.shard)

    @property
    def home(self) -> str:
        """Where the tokens live: "device", "pinned" or "mapped"."""
        return self.place.name

    @property
    def shard(self) -> tuple[int, int]:
        """(rank, size), which of the segments this handle searches."""
        return self.place.shard

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} on {self.device}, {self.home})"

    def get(self, id: Id) -> Document:
        """One document, its embeddings on the device of the corpus.

        Args:
            id: as it was added.

        Raises:
            KeyError: an id that is not there.
            TypeError: an id that is neither str nor int.
            ValueError: an int id beyond 64 bits, or text that is no Unicode.
            CorpusError: the files are not what the catalogue says, or the catalogue cannot be read.
        """
        found = super().get(id)
        return found._replace(embeddings=found.embeddings.to(self.device))

    def codes(self, id: Id) -> Quantized | None:
        """The codes of the document `id`, on the device of the corpus, where a search scores these alone; None where
        floats are kept. Errors as `get`."""
        selection, _ = self.locate(id_list([id]))
        ((segment, rows),) = selection.parts
        if "tokens" in segment.tensors or "exact" in segment.tensors:
            return None
        found = selection.snapshot.coding.documents(segment.tensors, segment.offsets, segment.longest, rows)
        assert isinstance(found, Quantized)
        return found.compact().to(self.device)

    def search(
        self,
        queries: TokensLike,
        k: int,
        subset: Iterable[Id] | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> list[list[Hit]]:
        """The k best documents of each query, exactly.

        Args:
            queries: `[NQ, LQ, D]` of which every row counts, one `[LQ, D]`, a list or another iterable of `[L_i, D]`
                (torch or numpy, of any mixture of dtypes and devices), an object array of them, `Packed`, `Views`, or
                PyTorch's jagged nested tensor; any float dtype, converted to `dtype`, on any device.
            k: at least 0; beyond the corpus it gives every document that has tokens.
            subset: ids to search in; None searches everything, an empty one nothing.
            filter: `{field: value or list of values}`, documents whose metadata have in every field one of the values:
                a str, a number (1 and 1.0 are one), True, False or None, which is also a field that is not there.

        Returns:
            for each query its hits: score descending, then the order in which documents were added. Documents without
            tokens are never hits; a query without tokens has none. Of a corpus that keeps codes alone these are the
            best by the scores of codes; where it keeps a float copy beside them (`exact`), hits and scores are those of
            the copy.

        Raises:
            ValueError: negative k, queries of another shape or width, NaN or infinity in them (in the corpus' dtype),
                codes without a bound beside a float copy (`fp8` on a GPU).
            TypeError: queries of another form or not floats, k that is not an integer, a single str as `subset`, a
                filter of another form.
            KeyError: an id in `subset` that is not there.
            CorpusError: the files are not what the catalogue says.
            UnsupportedError: no backend can score this corpus on its device.
        """
        k = check_k(k)
        asked = queries_of(queries, self.coding, self.device)
        subset = None if subset is None else id_list(subset)
        before = None
        while True:
            selection = self.select(subset, filter)
            if selection.snapshot is before:
                raise CorpusError(f"{self.path}: its catalogue lacks documents that its segments have; see `check`")
            before = selection.snapshot
            found = winners(asked, self.place, selection, k)
            wanted = set(found.positions[found.positions >= 0].tolist())
            names = self.ids_at(wanted)
            if len(names) == len(wanted):  # else a compaction dropped documents that were deleted meanwhile
                break
        return self.hits(found, names)

    def hits(self, found: Winners, names: Mapping[int, Id]) -> list[list[Hit]]:
        """Winners by their ids, a list for each query.

        Args:
            found: positions and scores of each query's winners, best first.
            names: ids by position.
        """
        return [
            [Hit(names[position], score) for position, score in zip(*row, strict=True) if position >= 0]
            for row in zip(found.positions.tolist(), found.scores.tolist(), strict=True)
        ]

    def rerank(
        self, queries: TokensLike, ids: Sequence[Id] | Sequence[Sequence[Id]], k: int | None = None
    ) -> list[list[Hit]]:
        """Candidates of each query in the order of their exact scores. Nothing but the candidates is read, in place
        where their tokens are on the scoring device.

        Args:
            queries: as for `search`.
            ids: a list of ids for each query, of any lengths, or one list for all queries. An id that comes twice
                counts once.
            k: the best k of each list; None: all.

        Returns:
            as `search`, of the float copy where one is kept.

        Raises:
            KeyError: an id that is not there.
            ValueError: another number of lists than of queries; and as `search`.
            TypeError: as `search`.
            CorpusError: as `search`.
            UnsupportedError: as `search`.
        """
        asked = queries_of(queries, self.coding, self.device)
        lists = candidate_lists(ids, count_of(asked))
        most = max(map(len, lists), default=0) if k is None else check_k(k)
        selection, places = self.locate([id for each in lists for id in each])
        query = [n for n, each in enumerate(lists) for _ in each]
        names = dict(zip(places, (id for each in lists for id in each), strict=True))
        pairs = torch.tensor(list(zip(query, places, strict=True)), dtype=torch.int64, device=self.device).view(-1, 2)
        found = ranked(asked, pairs, self.place, selection)
        hits: list[list[Hit]] = [[] for _ in lists]
        for n, position, score in found:
            if len(hits[n]) < most:
                hits[n].append(Hit(names[position], score))
        return hits
