"""The store: documents with ids, token embeddings, texts and metadata in a folder, changed by transactions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from ..devices import no_autocast
from ..quantized import Quantized
from . import catalogue
from . import rows as sql
from .adding import Adding
from .catalogue import Catalogue
from .coding import Coding
from .compacting import compact
from .documents import Id, check_id, check_text, encode_metadata, id_list, together
from .exporting import Exported, export
from .kinds import Source, opened
from .lacking import Lacking, Looking, Parts, Progress
from .reading import Reader
from .segments import CODEBOOK, write_codebook

Embeddings: TypeAlias = Any  # [N, L, D], a list or iterator of [L_i, D], Packed or Views; torch or numpy
S = TypeVar("S", bound="Store")


class Store(Reader):
    """A corpus on disk. Make one with `create` or `open`.

    The folder holds catalogue.sqlite and segments/*.safetensors; it may be moved, copied and read from a read-only
    place. Each change is one transaction: after a crash at any instant the folder opens as it was before or after. A
    handle sees the changes of other handles and processes from their commit on, and may be used from several threads. A
    second writer waits for the first.
    """

    @classmethod
    def create(
        cls: type[S],
        path: str | os.PathLike[str],
        dim: int,
        dtype: str | torch.dtype = "float16",
        encoder: str | None = None,
        *,
        exact: str | torch.dtype | None = None,
        scale: str | float | None = None,
        bits: int | None = None,
        centroids: int | None = None,
        renormalize: bool | None = None,
        parts: int | None = None,
        seed: int | None = None,
        like: Quantized | None = None,
    ) -> S:
        """Make an empty corpus in a folder that is absent or empty.

        Args:
            path: the folder; its parents are made too.
            dim: width D of every embedding.
            dtype: how embeddings are kept. "float16", "bfloat16" or "float32" (or the torch dtype): as they are.
                "int8", "fp8", "residual" or "pq": as codes of `maxsim.quantize`, which are what is searched.
            encoder: name of the model whose embeddings these are, kept for those who search with texts.
            exact: of codes: "float16", "bfloat16" or "float32" keeps a copy of the embeddings beside them, of which a
                search reads only what the codes do not rule out: hits and scores are those of a corpus of that dtype.
            scale: of "int8" and "fp8", as for `maxsim.quantize`.
            bits: of "residual", as for `maxsim.quantize`.
            centroids: of "residual", as for `maxsim.quantize`.
            renormalize: of "residual", as for `maxsim.quantize`.
            parts: of "pq", as for `maxsim.quantize`.
            seed: of the training of "residual" and "pq", as for `maxsim.quantize`.
            like: documents of this codec and width whose centroids, buckets and codewords are taken. None: "residual"
                and "pq" train theirs on the documents of the first segment that `add` writes (240 MiB, or what the
                first call adds), so the first call should bring many.

        Raises:
            FileExistsError: a corpus, or anything else, is there.
            TypeError, ValueError: unknown dtype, dim below 1, options that are wrong or of another codec, `like` of
                another codec or width.
            CorpusError: the catalogue cannot be written.
        """
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or dim < 1:
            raise ValueError(f"dim must be a whole number of at least 1, got {dim!r}")
        dim = int(dim)
        options = {"scale": scale, "bits": bits, "centroids": centroids, "renormalize": renormalize, "parts": parts}
        options["seed"] = seed
        coding = Coding.make(dim, dtype, exact, options, like)
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        here = [p.name for p in folder.iterdir() if not p.name.startswith(catalogue.FILE)]
        others = sorted(name for name in here if name != "segments")
        if others:
            raise FileExistsError(f"{folder} is not empty (it holds {others[0]}): a corpus needs a folder of its own")
        segments, target = folder / "segments", Catalogue(folder)
        segments.mkdir(exist_ok=True)
        # a creation that was killed may have left tables, whole or half
        strays = sorted(p.name for p in segments.iterdir() if p.name != CODEBOOK and p.suffix != ".tmp")
        if strays and target.absent():  # the first `add` would sweep them away
            raise FileExistsError(
                f"{segments} is not empty (it holds {strays[0]}), and there is no catalogue: restore {catalogue.FILE} "
                "from a copy, or take another folder"
            )
        with target.creating() as db:
            made = sql.Settings(dim, coding.name, encoder, 0, coding.exact, dict(coding.options))
            sql.insert_settings(db, made)
            if coding.tables is not None:
                sql.insert_codebook(db, write_codebook(segments, coding))
        return cls(folder)

    @classmethod
    def open(cls: type[S], path: str | os.PathLike[str]) -> S:
        """Open a corpus; everything that can be checked without reading the tokens is checked here.

        Raises:
            FileNotFoundError: no corpus there.
            NotADirectoryError: a file is there.
            CorpusError: damaged, of a newer format, or locked; names the file and what is wrong.
        """
        return cls(path)

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
                hit. Iterators are consumed with at most one segment (240 MiB) in memory, beside what the catalogue gets
                of this call: ids, texts and metadata, which are written when it commits.
            texts: a str or None for each document.
            metadata: a JSON-able dict or None for each document.
            replace: documents of these ids that are there already are deleted in the same transaction, instead of being
                an error; the new ones stand last in the order of adding.
            cut: whether the text goes on behind its embeddings, a bool for each document, for `info` to count.

        Returns:
            the number of documents added.

        Raises:
            ValueError: an id that is there already or comes twice, another width, numbers of ids and embeddings that
                differ, NaN or infinity (also one that appears in the conversion; says where, in metadata too), metadata
                that are nested more than 100 deep, no tokens to train codes on.
            TypeError: ids that are neither str nor int, embeddings that are not floats, metadata that is not JSON.
            CorpusError: another process keeps writing, the disk is full, the folder cannot be written, or a row of the
                catalogue that would be replaced is damaged.
        """
        if embeddings is None:
            raise TypeError("embeddings must be floats [N, L, D] or a list of [L, D], got None")
        given = together(ids, embeddings, texts, metadata, cut)
        with self._changing() as (_, adding):
            adding.add_rows(given, replace)
        return adding.count

    def add_file(self, path: str | os.PathLike[str], replace: bool = False) -> int:
        """Add the documents of a file, or of a folder, that another program wrote, all or none, with bounded memory.

        Args:
            path: `.npz`, `.safetensors` or `.pt`: `tokens` [T, D] with `offsets` [N + 1] or `lengths` [N], or padded
                `embeddings` [N, L, D], perhaps with `lengths` [N] or a `mask` (or `attention_mask`) [N, L] of 0 and 1,
                and `ids`; or one array [L, D] a document, named by its id. In a `.pt` file also a list of [L, D].
                `.npy`: [N, L, D]. `.parquet`: a column `embeddings` of lists of lists of floats, perhaps `id` and
                `text`; other columns become metadata. Without ids documents are named "file:number", from 1.
                Codes that `maxsim.Quantized.save` or `export` wrote (`.safetensors`): as they are in a corpus of that
                codec without a float copy, elsewhere what they decode to.
                An index of PyLate, fast-plaid or ColBERT (a folder): its codes as they are in a corpus of `residual`
                codes that has the index's tables, or none yet; in any other what they decode to. Documents are named by
                their numbers in the index, from 0, those of PyLate by its map of ids, of which an export as JSON is
                read. Any other folder: the files below it, where a `.npy` of [L, D] is one document, named by its path
                in the folder without the ending.
                A file of JSON lines beside a file, of the same name but for the ending, has ids, texts and metadata of
                its documents: `id`, `text` and other fields, as `export` writes them.
            replace: as for `add`.

        Returns:
            the number of documents added.

        Raises:
            ValueError: another kind of file, other contents, ids, embeddings or metadata of a type that `add` does not
                take, objects that are pickled (nothing is ever unpickled), an index of other tables than a corpus of
                `residual` codes has; and as for `add`.
            ImportError: Parquet without pyarrow.
            OSError: the file cannot be read.
            CorpusError: as for `add`.
        """
        source = opened(Path(path))
        with self._changing() as (_, adding):
            source.add_to(adding, replace)
        return adding.count

    def lacking(self, source: Source, replace: bool = False, progress: Progress | None = None) -> Lacking:
        """What `add_lacking` would add of a file or folder that was `opened`, which is read for that, and compared.
        Changes nothing.

        Args:
            source: what `maxsim.corpus.opened` gave.
            replace: documents that the corpus has otherwise (another text, other metadata or embeddings) are to be
                replaced, instead of being an error. Where codes alone are kept, embeddings that would have the same
                codes are no others (`residual`: around the centroid of those there, whether or not another is nearer).
            progress: called with the number of documents looked at since the last call.

        Returns:
            numbers of documents: `added`, `replaced`, and `skipped`, which are there as the source has them.

        Raises:
            ValueError: a document that the corpus has otherwise; and as `add_file`.
            ImportError, OSError, CorpusError: as `add_file`.
        """
        with self._seeing() as (_, snapshot):
            coding = snapshot.coding
        looking = Looking(self._seeing, coding, self._catalogue.path, source.path, progress)
        with torch.no_grad(), no_autocast("cpu"):
            source.add_to(looking, replace)
            looking.flush()
        return Lacking(source, bytes(looking.found), replace)

    def add_lacking(self, lacking: Lacking, progress: Progress | None = None) -> None:
        """Add what is lacking, a segment (240 MiB of tokens) or a part of an index in one transaction each: what is
        interrupted keeps those that were done, and the rest is `lacking` then.

        Args:
            lacking: what `lacking` gave of this corpus, and of a source that has not changed since.
            progress: called with the number of documents that were added since the last call, after each transaction.

        Raises:
            ValueError: the source, or the corpus, has changed meanwhile.
            OSError, CorpusError: as `add_file`.
        """
        with Parts(self._changing, lacking, self.dim, progress) as parts:
            lacking.source.add_to(parts, lacking.replace)

    def discard(self, keep: bool) -> None:
        """Remove a corpus to which nothing was ever added; one that holds anything stays, and one that
        somebody is adding to.

        Args:
            keep: the folder itself, emptied.

        Raises:
            FileNotFoundError: it has gone. OSError, CorpusError: it cannot be removed.
        """
        self._catalogue.discard(keep)

    def export(self, path: str | os.PathLike[str]) -> Exported:
        """Write all documents to files that other programs read, and `add_file` too, with bounded memory.

        Args:
            path: `.safetensors`, `.npz` or `.parquet`: `tokens` [T, D] and `offsets` [N + 1], in Parquet a column
                `embeddings`, in the order of adding; floats as they are kept (bfloat16 as float32 but in safetensors).
                Of a corpus that keeps codes alone safetensors has the codes, the others what they decode to, float32.
                Beside it, with the ending `.jsonl`, a line a document: `id`, `text` and metadata. `.jsonl`: only these.

        Returns:
            documents: their number. files: the paths of what was written, the lines last.

        Raises:
            FileExistsError: one of the files is there.
            ValueError: another ending; metadata with a field `id` or `text`.
            ImportError: Parquet without pyarrow.
            OSError: a file cannot be written; none is left.
            CorpusError: the files of the corpus are not what the catalogue says.
        """
        return export(Path(path), self._catalogue, self._refresh)

    def update(
        self,
        ids: Iterable[Id],
        embeddings: Embeddings = None,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[Mapping[str, Any] | None] | None = None,
    ) -> int:
        """Change documents that are there, all or none. What is not given stays as it is.

        Args:
            ids: of documents that are there, each once.
            embeddings: as for `add`; None leaves them. Documents with new ones stand last in the order of adding.
            texts: as for `add`; None leaves them.
            metadata: as for `add`; None leaves them.

        Returns:
            the number of documents changed.

        Raises:
            KeyError: an id that is not there.
            ValueError: an id that comes twice, nothing to change, and as for `add`.
            TypeError, CorpusError: as for `add`.
        """
        if embeddings is None and texts is None and metadata is None:
            raise ValueError("give embeddings, texts or metadata to change")
        given, seen = together(ids, embeddings, texts, metadata), set[Id]()
        with self._changing() as (db, adding):
            row = sql.row_of(db, self._catalogue.path)
            for id, document, text, data, _ in given:
                id = check_id(id)
                if id in seen:
                    raise ValueError(f"id {id!r} comes twice; nothing was changed")
                seen.add(id)
                kept = sql.existing(id, row(id))
                new_text = kept.text if texts is None else check_text(id, text)
                new_data = kept.metadata if metadata is None else encode_metadata(id, data)
                if embeddings is None:
                    sql.set_beside(db, kept.position, new_text, new_data)
                else:
                    sql.tombstone(db, kept.position)
                    adding.add(id, document, new_text, new_data, cut=False)
        return len(seen)

    def compact(self) -> int:
        """Rewrite segments without deleted documents, and small segments as larger ones, in one transaction. Ids and
        the order of adding stay; what a segment holds of a document is copied as it is.

        Returns:
            the bytes that the segments have become smaller by.

        Raises:
            CorpusError: as for `add`; nothing has changed then. Needs room for what is rewritten beside the old files.
        """
        with self._changing() as (db, _):
            for _ in sql.checked(db, self._catalogue.path, "deleted = 1")():
                pass  # what is dropped was deleted, and not damaged
            removed, freed = compact(db, self._folder, self._refresh(db))
        for record in removed:  # numbers are never given again: no other writer can mean these files
            with suppress(OSError):  # Windows keeps what a reader has mapped; the next change sweeps it
                (self._folder / record.file).unlink()
        return freed

    def delete(self, ids: Iterable[Id]) -> int:
        """Delete documents, all or none; their ids may be added again.

        Args:
            ids: any iterable of ids; one that comes twice counts once.

        Returns:
            how many were deleted.

        Raises:
            KeyError: an id that is not there.
            TypeError, ValueError: an id that no document can have.
            CorpusError: as for `add`.
        """
        wanted = dict.fromkeys(id_list(ids))
        with self._catalogue.writing() as db:
            row = sql.row_of(db, self._catalogue.path)
            for id in wanted:
                sql.tombstone(db, sql.existing(id, row(id)).position)
        return len(wanted)

    @contextmanager
    def _changing(self) -> Iterator[tuple[Any, Adding]]:
        """One transaction that may write segments; files are as before where it fails."""
        with self._catalogue.writing() as db:
            kept = self._sweep(db)
            try:
                adding = Adding(db, self._catalogue.path, self._folder, self._refresh(db).coding)
                yield db, adding
                adding.flush()
            except BaseException:
                self._remove(kept)  # a full disk gets its room back
                raise

    def _sweep(self, db: Any) -> set[str]:
        """Removes what failed or dead writers have left, inside a change; returns the names of the files there are."""
        made = sql.settings(db, self._catalogue.path)
        kept = {record.file for record in sql.segment_records(db)}
        if made.codebook is not None:
            kept.add(made.codebook.file)
        self._remove(kept)
        return kept

    def _remove(self, kept: set[str]) -> None:
        """Removes all files but these; the caller holds the write lock."""
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.iterdir():
            if path.name not in kept:
                try:
                    path.unlink()
                except PermissionError:
                    if os.name != "nt":  # which keeps what a reader has mapped
                        raise
