"""What can be asked of a corpus on disk: a snapshot at a time, whatever writers do meanwhile."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..packed import Packed
from . import catalogue
from . import rows as sql
from .catalogue import Catalogue
from .checking import problems_of
from .coding import Coding
from .documents import Id, check_id, id_list
from .errors import CorpusError
from .filtering import check_filter
from .segments import Segment, SegmentFile, open_codebook


class Document(NamedTuple):
    """One stored document; `embeddings` is a copy, [L, D] in the corpus' `dtype`: what was added where floats are kept
    (beside codes too), else what the codes stand for."""

    id: Id
    embeddings: Tensor
    text: str | None
    metadata: dict[str, Any] | None


@dataclass(frozen=True)
class Info:
    """What a corpus holds. `tokens` and `bytes` count what is on the disk, deleted documents included.

    `cut` counts documents whose text goes on behind what was encoded of it; None for a corpus made before this was
    kept. `exact` is the dtype of the float copy beside codes, None without one; `options` are those of the codec.
    """

    documents: int
    cut: int | None
    deleted: int
    tokens: int
    segments: int
    bytes: int
    dim: int
    dtype: str
    exact: str | None
    options: dict[str, Any]
    encoder: str | None
    format: int


class Snapshot(NamedTuple):
    """A corpus at one moment: segments in the order of adding, and how their tensors are read."""

    generation: int
    coding: Coding
    segments: tuple[Segment, ...]

    def segment_of(self, position: int) -> Segment:
        """The segment that holds a document."""
        place = bisect_right(self.segments, position, key=lambda segment: segment.record.first) - 1
        if place < 0 or position > self.segments[place].record.last:
            raise CorpusError(
                f"the catalogue names a document at position {position}, which no segment has; see `check`"
            )
        return self.segments[place]

    def places(self, positions: Tensor, shard: tuple[int, int] = (0, 1)) -> Iterator[tuple[Segment, Tensor]]:
        """The segments of a shard that hold documents of these positions, int64 and rising, with their rows."""
        low = 0
        while low < len(positions):
            segment = self.segment_of(int(positions[low]))
            high = int(torch.searchsorted(positions, segment.record.last, right=True))
            if segment.record.belongs(shard):
                yield segment, segment.rows(positions[low:high])
            low = high


class Selection(NamedTuple):
    """What a search reads: a snapshot, of each of this handle's segments, which are open, the rows (documents) to
    score, int64, ascending, None = all, and how many documents these and those of other shards are."""

    snapshot: Snapshot
    parts: list[tuple[Segment, Tensor | None]]
    documents: int


class Reader:
    """An open corpus, read only. The segments of its `shard` (rank, size) are mapped, others when they are needed."""

    def __init__(self, path: str | os.PathLike[str], shard: tuple[int, int] = (0, 1)) -> None:
        self.path = Path(path).absolute()  # the same folder wherever the process goes
        self._shard = shard
        self._folder = self.path / "segments"
        self._catalogue = Catalogue(self.path)
        self._lock = threading.Lock()
        with self._catalogue.reading() as db:
            self._catalogue.check(db)
            self._settings = made = sql.settings(db, self._catalogue.path)
            self._snapshot = Snapshot(-1, Coding(made.dim, made.dtype, made.exact, made.options), ())
            self._load(db, made)

    @property
    def dim(self) -> int:
        """Width D of every embedding, known since the corpus was opened."""
        return self._settings.dim

    @property
    def dtype(self) -> torch.dtype:
        """What embeddings and queries are converted to: the dtype kept, of codes that of the copy beside them, or
        float32 without one."""
        return self.coding.dtype

    @property
    def coding(self) -> Coding:
        """How embeddings are kept."""
        return self._snapshot.coding

    @property
    def encoder(self) -> str | None:
        """Name of the model whose embeddings these are, None if `create` was given none."""
        return self._settings.encoder

    def __len__(self) -> int:
        return self.info().documents

    def __contains__(self, id: object) -> bool:
        with self._catalogue.reading() as db:
            return sql.find(db, check_id(id)) is not None

    def __repr__(self) -> str:
        name, kind = type(self).__name__, self._settings.dtype
        return f"{name}({str(self.path)!r}, {len(self)} documents, {kind} [*, {self.dim}])"

    def get(self, id: Id) -> Document:
        """One document.

        Args:
            id: as it was added.

        Raises:
            KeyError: an id that is not there.
            TypeError, ValueError: an id that no document can have.
            CorpusError: the files are not what the catalogue says, or the catalogue cannot be read.
        """
        with self._catalogue.reading() as db:
            held = sql.existing(id, sql.holding(db, self._catalogue.path)(check_id(id)))
            snapshot = self._refresh(db)
            segment = snapshot.segment_of(held.position)
            segment.open()
        local = segment.row(held.position)
        start, length = segment.starts[local : local + 1], segment.lengths[local : local + 1]
        kept = segment.tensors.get("tokens", segment.tensors.get("exact"))
        if kept is not None:
            embeddings = kept[int(start) : int(start + length)].clone()
        else:
            codes = snapshot.coding.documents(segment.tensors, segment.offsets, segment.longest)
            decoded = codes[local].dequantize(snapshot.coding.dtype)  # type: ignore[index]
            assert isinstance(decoded, Packed)
            embeddings = decoded.tokens
        return Document(held.id, embeddings, held.text, held.metadata)

    def texts(self, ids: Iterable[Id]) -> dict[Id, str | None]:
        """The texts of those of `ids` that are in the corpus.

        Args:
            ids: any iterable of ids; those that are not there are left out of the result.

        Returns:
            text by id, None for a document without one.

        Raises:
            TypeError, ValueError: an id that no document can have, or a single str instead of ids.
            FileNotFoundError, CorpusError: the catalogue has gone, or cannot be read.
        """
        with self._catalogue.reading() as db:
            find = sql.holding(db, self._catalogue.path)
            found = ((id, find(id)) for id in id_list(ids))
            return {id: held.text for id, held in found if held is not None}

    def metadata(self, ids: Iterable[Id]) -> dict[Id, dict[str, Any] | None]:
        """The metadata of those of `ids` that are in the corpus.

        Args:
            ids: as for `texts`.

        Returns:
            a dict by id, None for a document without any.

        Raises:
            TypeError: as `texts`.
            ValueError: as `texts`.
            FileNotFoundError: as `texts`.
            CorpusError: as `texts`.
        """
        with self._catalogue.reading() as db:
            find = sql.holding(db, self._catalogue.path)
            found = ((id, find(id)) for id in id_list(ids))
            return {id: held.metadata for id, held in found if held is not None}

    def fields_without_documents(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that no document has as a field of its metadata: a filter on them finds nothing but what it
        asks to have none. Reads the metadata of all documents.

        Raises:
            FileNotFoundError, CorpusError: the catalogue has gone, or cannot be read.
        """
        with self._catalogue.reading() as db:
            return [name for name in names if not sql.has_field(db, name)]

    def ids(self) -> list[Id]:
        """All ids, in the order in which they were added.

        Raises:
            FileNotFoundError, CorpusError: the catalogue has gone, or cannot be read.
        """
        with self._catalogue.reading() as db:
            return [row[0] for row in db.execute("SELECT id FROM documents WHERE deleted = 0 ORDER BY position")]

    def info(self) -> Info:
        """What the corpus holds now, read from the catalogue alone.

        Raises:
            FileNotFoundError, CorpusError: the catalogue has gone, or cannot be read.
        """
        with self._catalogue.reading() as db:
            self._catalogue.check(db)
            made = sql.settings(db, self._catalogue.path)
            records, cut, format = sql.segment_records(db), sql.count_cut(db), catalogue.format_of(db)
        deleted = sum(r.deleted for r in records)
        return Info(
            documents=sum(r.documents for r in records) - deleted,
            cut=cut,
            deleted=deleted,
            tokens=sum(r.tokens for r in records),
            segments=len(records),
            bytes=sum(r.bytes for r in records) + (made.codebook.bytes if made.codebook else 0),
            dim=self.dim,
            dtype=made.dtype,
            exact=made.exact,
            options=dict(made.options),
            encoder=self.encoder,
            format=format,
        )

    def check(self) -> list[str]:
        """Read every byte and compare it with the catalogue; returns what is wrong, [] for a sound corpus."""
        return problems_of(self.path)

    def select(self, subset: Iterable[Id] | None = None, filter: Mapping[str, Any] | None = None) -> Selection:
        """What a search reads now.

        Args:
            subset: ids to search in, None for all.
            filter: metadata that documents must have, None for any.

        Raises:
            KeyError: an id of `subset` that is not there.
            TypeError, ValueError: a filter of another form.
        """
        wanted = None if subset is None else set(id_list(subset))
        fields = None if filter is None else check_filter(filter)
        with self._catalogue.reading() as db:
            snapshot = self._refresh(db)
            chosen = None if wanted is None else sorted(sql.position_of(db, id) for id in wanted)
            if fields:
                found = sql.matching(db, fields)
                chosen = found if chosen is None else sorted(set(chosen).intersection(found))
        if chosen is None:
            own = [segment for segment in snapshot.segments if segment.record.belongs(self._shard)]
            count = sum(segment.record.documents - segment.record.deleted for segment in snapshot.segments)
            return Selection(snapshot, [(segment, segment.kept) for segment in own], count)
        parts = snapshot.places(torch.tensor(chosen, dtype=torch.int64, device="cpu"), self._shard)
        return Selection(snapshot, list(parts), len(chosen))

    def locate(self, ids: Iterable[Id]) -> tuple[Selection, list[int]]:
        """A snapshot with these documents selected, of all shards, and the position of each.

        Args:
            ids: any iterable of ids; one that comes twice has its position twice.

        Raises:
            KeyError: an id that is not there.
        """
        with self._catalogue.reading() as db:
            snapshot = self._refresh(db)
            positions = [sql.position_of(db, id) for id in ids]
            chosen = torch.tensor(sorted(set(positions)), dtype=torch.int64, device="cpu")
            parts = list[tuple[Segment, Tensor | None]](snapshot.places(chosen))
            for segment, _ in parts:
                segment.open()
        return Selection(snapshot, parts, len(chosen)), positions

    def ids_at(self, positions: Iterable[int]) -> dict[int, Id]:
        """Ids by position, deleted documents included until `compact` drops them.

        Args:
            positions: places in the order of adding; those that hold nothing are left out of the result.
        """
        with self._catalogue.reading() as db:
            query = "SELECT id FROM documents WHERE position = ?"
            found = ((position, db.execute(query, (position,)).fetchone()) for position in positions)
            return {position: row[0] for position, row in found if row is not None}

    @contextmanager
    def _seeing(self) -> Iterator[tuple[Any, Snapshot]]:
        """The catalogue and the corpus as they are now."""
        with self._catalogue.reading() as db:
            yield db, self._refresh(db)

    def _refresh(self, db: Any) -> Snapshot:
        """The corpus as the catalogue has it now; segments that did not change stay open."""
        with self._lock:
            made = sql.settings(db, self._catalogue.path)
            if made.generation != self._snapshot.generation or made.state != self._settings.state:
                self._catalogue.check(db)
                self._load(db, made)
            return self._snapshot

    def _load(self, db: Any, made: sql.Settings) -> None:
        """Opens what is new of this shard, of a catalogue that was checked."""
        known = {segment.record.number: segment for segment in self._snapshot.segments}
        records = sql.segment_records(db)
        self._check_same(made, known, records)
        coding = self._snapshot.coding
        if made.codebook is not None and coding.tables is None:
            coding = open_codebook(self._folder, made.codebook, coding)
        found = tuple(self._open(db, known, record, coding) for record in records)
        self._settings = made
        self._snapshot = Snapshot(made.generation, coding, found)

    def _check_same(self, made: sql.Settings, known: Mapping[int, Segment], records: list[sql.SegmentRecord]) -> None:
        """Raises CorpusError where another corpus, or an earlier state of this one, has taken its place: what is held
        of segments is then of others."""
        now, before = self._settings, self._snapshot.generation
        same = (made.dim, made.dtype, made.exact, made.options) == (now.dim, now.dtype, now.exact, now.options)
        same &= now.codebook is None or made.codebook == now.codebook
        same &= made.generation > before or (made.generation, made.state) == (before, now.state)
        held = ((known[record.number].record, record) for record in records if record.number in known)
        if not same or any(one.sha256 != other.sha256 for one, other in held):
            raise CorpusError(
                f"{self.path}: another corpus, or an earlier state of this one, has taken its place since it was "
                "opened: open it again"
            )

    def _open(self, db: Any, known: Mapping[int, Segment], record: sql.SegmentRecord, coding: Coding) -> Segment:
        segment = known.get(record.number)
        if segment is not None and segment.record == record:
            return segment
        file = SegmentFile(self._folder, record, coding) if segment is None else segment.file
        made = Segment(record, file, sql.deleted_positions(db, record) if record.deleted else ())
        if record.belongs(self._shard):
            made.open()
        return made
