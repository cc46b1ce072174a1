"""The store: documents with ids, token embeddings, texts and metadata in a folder, changed by transactions."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..devices import device_of
from . import catalogue as sql
from .catalogue import Catalogue
from .documents import Id, check_id, check_text, encode_metadata, id_list, together
from .errors import CorpusError
from .segments import DTYPES, Segment, SegmentBuffer, SegmentRecord, keep_rows, open_segment, sha256

Embeddings: TypeAlias = Any  # [N, L, D], a list or iterator of [L_i, D], Packed or Views; torch or numpy
S = TypeVar("S", bound="Store")


class Document(NamedTuple):
    """One stored document; `embeddings` is a copy, [L, D] in the corpus' dtype and on its device."""

    id: Id
    embeddings: Tensor
    text: str | None
    metadata: dict[str, Any] | None


@dataclass(frozen=True)
class Info:
    """What a corpus holds. `tokens` and `bytes` count what is on the disk, deleted documents included.

    `cut` counts documents whose text goes on behind what was encoded of it; None for a corpus made before this was
    kept.
    """

    documents: int
    cut: int | None
    deleted: int
    tokens: int
    segments: int
    bytes: int
    dim: int
    dtype: str
    encoder: str | None
    format: int


class Store:
    """A corpus on disk. Make one with `create` or `open`.

    The folder holds catalogue.sqlite and segments/*.safetensors; it may be moved, copied and read from a read-only
    place. Each change is one transaction: after a crash at any instant the folder opens as it was before or after. A
    handle sees the changes of other handles and processes from their commit on, and may be used from several threads. A
    second writer waits for the first.
    """

    def __init__(self, path: str | os.PathLike[str], device: str | torch.device | None = None) -> None:
        self.path = Path(path)
        self.device = device_of(device or "cpu")
        self._folder = self.path / "segments"
        self._catalogue = Catalogue(self.path)
        self._lock = threading.Lock()
        self._generation = -1
        self._segments: tuple[Segment, ...] = ()
        with self._catalogue.reading() as db:
            self._settings = sql.settings(db, self._catalogue.path)
            self._refresh(db)

    @classmethod
    def create(
        cls: type[S],
        path: str | os.PathLike[str],
        dim: int,
        dtype: str | torch.dtype = "float16",
        encoder: str | None = None,
    ) -> S:
        """Make an empty corpus in a folder that is absent or empty.

        Args:
            path: the folder; its parents are made too.
            dim: width D of every embedding.
            dtype: "float16", "bfloat16" or "float32" (or the torch dtype): how embeddings are kept.
            encoder: name of the model whose embeddings these are, kept for those who search with texts.

        Raises:
            FileExistsError: a corpus, or anything else, is there.
            ValueError: unknown dtype, or dim below 1.
            CorpusError: the catalogue cannot be written.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim must be a whole number of at least 1, got {dim!r}")
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(p.name for p in folder.iterdir() if not p.name.startswith(sql.FILE) and p.name != "segments")
        if others:
            raise FileExistsError(f"{folder} is not empty (it holds {others[0]}): a corpus needs a folder of its own")
        segments, catalogue = folder / "segments", Catalogue(folder)
        segments.mkdir(exist_ok=True)
        strays = sorted(p.name for p in segments.iterdir())
        if strays and catalogue.absent():  # the first `add` would sweep them away
            raise FileExistsError(
                f"{segments} is not empty (it holds {strays[0]}), and there is no catalogue: restore {sql.FILE} from a "
                "copy, or take another folder"
            )
        catalogue.create(dim, name, encoder)
        return cls(folder)

    @classmethod
    def open(cls: type[S], path: str | os.PathLike[str], device: str | torch.device | None = None) -> S:
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

    @property
    def dim(self) -> int:
        """Width D of every embedding, known since the corpus was opened."""
        return self._settings.dim

    @property
    def dtype(self) -> torch.dtype:
        """How embeddings are kept, and what queries are converted to: float16, bfloat16 or float32."""
        return DTYPES[self._settings.dtype]

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
        return f"{name}({str(self.path)!r}, {len(self)} documents, {kind} [*, {self.dim}] on {self.device})"

    def add(
        self,
        ids: Iterable[Id],
        embeddings: Embeddings,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[Mapping[str, Any] | None] | None = None,
        replace: bool = False,
        cut: Iterable[bool] | None = None,
    ) -> int:
        """Add documents, all or none.

        Args:
            ids: str or int (64 bits), one a document, unique in the corpus; 1 and "1" are different ids.
            embeddings: floats [N, L, D], a list or iterator of [L_i, D], `Packed` or `Views`, torch or numpy, on any
                device; converted to the corpus' dtype. A document may have no tokens: it keeps its id and is never a
                hit. Iterators are consumed with at most one segment (256 MiB) in memory.
            texts: a str or None for each document.
            metadata: a JSON-able dict or None for each document.
            replace: documents of these ids that are there already are deleted in the same transaction, instead of being
                an error; the new ones stand last in the order of adding.
            cut: whether the text goes on behind its embeddings, a bool for each document, for `info` to count.

        Returns:
            the number of documents added.

        Raises:
            ValueError: an id that is there already or comes twice, another width, numbers of ids and embeddings that
                differ, NaN or infinity (also one that appears in the conversion).
            TypeError: ids that are neither str nor int, embeddings that are not floats, metadata that is not JSON.
            CorpusError: another process keeps writing, the disk is full, or the folder cannot be written.
        """
        rows = together(ids, embeddings, texts, metadata, cut)
        with self._catalogue.writing() as db:
            records = sql.segment_records(db)
            self._sweep(records)
            number = records[-1].number + 1 if records else 1
            start = position = records[-1].first + records[-1].documents if records else 0
            buffer, pending = SegmentBuffer(self.dim, self.dtype), list[Id]()
            written: list[SegmentRecord] = []

            def flush() -> None:
                bad = buffer.first_not_finite()
                if bad is not None:
                    raise ValueError(
                        f"document {pending[bad]!r} holds NaN or infinity in {self._settings.dtype}; nothing was added"
                    )
                written.append(buffer.write(self._folder, number + len(written), position - len(pending)))
                sql.insert_segment(db, written[-1])
                pending.clear()

            try:
                for id, document, text, data, is_cut in rows:
                    id = check_id(id)
                    if document.shape[1] != self.dim:
                        raise ValueError(f"document {id!r} has width {document.shape[1]}, the corpus has {self.dim}")
                    if not buffer.room(document.shape[0]):
                        flush()
                    old = sql.find(db, id) if replace else None
                    if old is not None and old[0] < start:  # an id that comes twice stays an error
                        sql.tombstone(db, old[0])
                    sql.insert_document(db, position, id, check_text(id, text), encode_metadata(id, data))
                    if is_cut:
                        sql.insert_cut(db, position)
                    buffer.append(document)
                    pending.append(id)
                    position += 1
                if pending:
                    flush()
            except BaseException:
                self._sweep(records)  # a full disk gets its room back
                raise
        return position - start

    def delete(self, ids: Iterable[Id]) -> int:
        """Delete documents, all or none; their ids may be added again. Returns how many were deleted.

        Raises:
            KeyError: an id that is not there.
            TypeError, ValueError: an id that no document can have.
            CorpusError: as for `add`.
        """
        wanted = dict.fromkeys(id_list(ids))
        with self._catalogue.writing() as db:
            for id in wanted:
                sql.tombstone(db, _position(db, id))
        return len(wanted)

    def get(self, id: Id) -> Document:
        """One document.

        Raises:
            KeyError: an id that is not there.
            TypeError, ValueError: an id that no document can have.
            CorpusError: the files are not what the catalogue says, or the catalogue cannot be read.
        """
        with self._catalogue.reading() as db:
            row = sql.find(db, check_id(id), "position, id, text, metadata")
            if row is None:
                raise KeyError(f"no document has the id {id!r}")
            segments = self._refresh(db)
        position, found, text, metadata = row
        segment = segments[_segment_index(segments, position)]
        local = position - segment.record.first
        start, length = int(segment.starts[local]), int(segment.lengths[local])
        embeddings = segment.tokens[start : start + length].clone()
        return Document(found, embeddings, text, None if metadata is None else json.loads(metadata))

    def texts(self, ids: Iterable[Id]) -> dict[Id, str | None]:
        """The texts of those of `ids` that are in the corpus, None for a document without one.

        Raises:
            TypeError, ValueError: an id that no document can have, or a single str instead of ids.
            FileNotFoundError, CorpusError: the catalogue has gone, or cannot be read.
        """
        with self._catalogue.reading() as db:
            found = ((id, sql.find(db, id, "text")) for id in id_list(ids))
            return {id: row[0] for id, row in found if row is not None}

    def metadata(self, ids: Iterable[Id]) -> dict[Id, dict[str, Any] | None]:
        """The metadata of those of `ids` that are in the corpus, None for a document without any. Errors as `texts`."""
        with self._catalogue.reading() as db:
            found = ((id, sql.find(db, id, "metadata")) for id in id_list(ids))
            return {id: json.loads(row[0]) if row[0] else None for id, row in found if row is not None}

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
            records, cut = sql.segment_records(db), sql.count_cut(db)
        deleted = sum(r.deleted for r in records)
        return Info(
            documents=sum(r.documents for r in records) - deleted,
            cut=cut,
            deleted=deleted,
            tokens=sum(r.tokens for r in records),
            segments=len(records),
            bytes=sum(r.bytes for r in records),
            dim=self.dim,
            dtype=self._settings.dtype,
            encoder=self.encoder,
            format=sql.FORMAT,
        )

    def check(self) -> list[str]:
        """Read every byte and compare it with the catalogue; returns what is wrong, [] for a sound corpus."""
        with self._catalogue.reading() as db:
            problems = [
                f"{self._catalogue.path}: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"
            ]
            records = sql.segment_records(db)
        for record in records:
            try:
                open_segment(self._folder, record, self.dim, self.dtype, torch.device("cpu"))
            except CorpusError as error:
                problems.append(str(error))
                continue
            path = self._folder / record.file
            if sha256(path) != record.sha256:
                problems.append(f"{path}: its bytes have changed since it was written (checksum differs)")
        return problems

    def select(self, subset: Iterable[Id] | None = None) -> list[tuple[Segment, Tensor | None]]:
        """What a search reads now: open segments, each with its rows to score (int64, ascending) or None for all.

        Raises:
            KeyError: an id of `subset` that is not there.
        """
        wanted = None if subset is None else set(id_list(subset))
        with self._catalogue.reading() as db:
            segments = self._refresh(db)
            positions = None if wanted is None else sorted(_position(db, id) for id in wanted)
        if positions is None:
            return [(segment, segment.kept) for segment in segments]
        rows: dict[int, list[int]] = {}
        for position in positions:
            index = _segment_index(segments, position)
            rows.setdefault(index, []).append(position - segments[index].record.first)
        return [(segments[index], torch.tensor(rows[index], device=self.device)) for index in rows]

    def ids_at(self, positions: Iterable[int]) -> dict[int, Id]:
        """Ids by position, deleted documents included."""
        with self._catalogue.reading() as db:
            query = "SELECT id FROM documents WHERE position = ?"
            return {position: db.execute(query, (position,)).fetchone()[0] for position in positions}

    def _refresh(self, db: Any) -> tuple[Segment, ...]:
        """The segments as the catalogue has them now; those that did not change stay open."""
        with self._lock:
            generation = sql.settings(db, self._catalogue.path).generation
            if generation != self._generation:
                known = {segment.record: segment for segment in self._segments}
                self._segments = tuple(known.get(r) or self._open(db, r) for r in sql.segment_records(db))
                self._generation = generation
            return self._segments

    def _open(self, db: Any, record: SegmentRecord) -> Segment:
        segment = next((s for s in self._segments if s.record.number == record.number), None)
        if segment is None:
            segment = open_segment(self._folder, record, self.dim, self.dtype, self.device)
        kept = keep_rows(segment, sql.deleted_rows(db, record) if record.deleted else [])
        return Segment(record, segment.tokens, segment.starts, segment.lengths, segment.longest, kept)

    def _sweep(self, records: Sequence[SegmentRecord]) -> None:
        """Removes what failed or dead writers have left; the caller holds the write lock."""
        self._folder.mkdir(exist_ok=True)
        known = {record.file for record in records}
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink()


def _position(db: Any, id: Id) -> int:
    row = sql.find(db, id)
    if row is None:
        raise KeyError(f"no document has the id {id!r}")
    return int(row[0])


def _segment_index(segments: Sequence[Segment], position: int) -> int:
    return bisect_right(segments, position, key=lambda segment: segment.record.first) - 1
