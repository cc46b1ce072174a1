"""Adding documents inside a transaction: converted, looked at, encoded and written a segment at a time."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..packed import Packed
from ..quantized import Codes, Quantized
from ..quantized.codes import SHARED
from ..quantized.plaid import lengths_of
from ..quantizing import of_unseen
from . import rows as sql
from . import segments
from .coding import Coding
from .documents import Id, check_id, check_text, encode_metadata
from .segments import write_codebook, write_segment

DECODED_BYTES = 16 << 20  # codes that become floats, at a time
Given = tuple[Id, str | None, str | None]  # a document's id, text, and metadata as JSON
FINITE_CHECK = 1 << 22  # elements looked at in one go


class SegmentBuffer:
    """Collects documents for one segment: converted to the dtype of the corpus, at most SEGMENT_BYTES of them."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self.dim = dim
        self.dtype = dtype
        self._tokens = torch.empty(0, dim, dtype=dtype, device="cpu")
        self._offsets = [0]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def tokens(self) -> Tensor:
        """[T, D]; overwritten after `clear`."""
        return self._tokens[: self._offsets[-1]]

    @property
    def offsets(self) -> Tensor:
        return torch.tensor(self._offsets, device="cpu")

    def room(self, length: int) -> bool:
        """Whether a document of `length` tokens still fits; the first one always does."""
        row_bytes = self.dim * self.dtype.itemsize
        return len(self) == 0 or (self._offsets[-1] + length) * row_bytes <= segments.SEGMENT_BYTES

    def append(self, document: Tensor) -> None:
        start, end = self._offsets[-1], self._offsets[-1] + document.shape[0]
        if end > self._tokens.shape[0]:
            grown = torch.empty(max(end, 2 * self._tokens.shape[0]), self.dim, dtype=self.dtype, device="cpu")
            grown[:start] = self._tokens[:start]
            self._tokens = grown
        self._tokens[start:end].copy_(document)
        self._offsets.append(end)

    def first_not_finite(self) -> tuple[int, int, int] | None:
        """Document, token and column of the first NaN or infinity in the dtype of the corpus."""
        values = self.tokens.view(-1)
        for low in range(0, values.numel(), FINITE_CHECK):
            finite = torch.isfinite(values[low : low + FINITE_CHECK])
            if not bool(finite.all()):
                token, column = divmod(low + int((~finite).nonzero()[0]), self.dim)
                document = int(torch.searchsorted(self.offsets, token, right=True)) - 1
                return document, token - self._offsets[document], column
        return None

    def clear(self) -> None:
        self._offsets = [0]


class Pending(NamedTuple):
    """A document that waits for its segment; `metadata` as JSON. `replace`: as for `Corpus.add`."""

    id: Id
    text: str | None
    metadata: str | None
    cut: bool
    replace: bool


class Taker(Protocol):
    """What documents of a source are given to, in their order."""

    @property
    def dim(self) -> int:
        """Width of the corpus."""

    def adopt(self, codes: Codes) -> None:
        """Codes by these parameters come next.

        Raises:
            ValueError: as `Coding.adopt`.
        """

    def add_rows(self, rows: Iterable[tuple[Any, Any, Any, Any, Any]], replace: bool) -> None:
        """Documents as `together` gives them."""

    def add_documents(self, rows: Sequence[Given], documents: Quantized, replace: bool) -> None:
        """Codes whose parameters were given to `adopt`."""


class Taking:
    """Documents of any form on their way: checked, converted to the dtype of the corpus, and taken a segment at a time.
    What becomes of them is said by `_take` and `_take_codes`."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._buffer, self._pending = SegmentBuffer(coding.dim, coding.dtype), list[Pending]()

    @property
    def dim(self) -> int:
        """Width of the corpus."""
        return self._coding.dim

    def room(self, length: int) -> bool:
        """Whether a document of `length` tokens goes into the segment of those before it."""
        return self._buffer.room(length)

    def add(
        self, id: Id, document: Tensor, text: str | None, metadata: str | None, cut: bool, replace: bool = False
    ) -> None:
        """One document, [L, D]; `metadata` as JSON.

        Raises:
            ValueError: another width, and as `flush`. CorpusError: as `flush`.
        """
        dim = self._coding.dim
        if document.shape[1] != dim:
            raise ValueError(f"document {id!r} has width {document.shape[1]}, the corpus has {dim}")
        if not self.room(document.shape[0]):
            self.flush()
        self._buffer.append(document)
        self._pending.append(Pending(id, text, metadata, cut, replace))

    def add_rows(self, rows: Iterable[tuple[Any, Any, Any, Any, Any]], replace: bool) -> None:
        """Documents as `together` gives them: id, tensor, text, metadata and whether the text was cut.

        Raises:
            TypeError, ValueError: ids, texts or metadata of another form; as `add`. CorpusError: as `add`.
        """
        for id, document, text, metadata, cut in rows:
            id = check_id(id)
            self.add(id, document, check_text(id, text), encode_metadata(id, metadata), bool(cut), replace)

    def add_documents(self, rows: Sequence[Given], documents: Quantized, replace: bool) -> None:
        """Codes whose parameters were given to `adopt`: as they are, in segments of their own, or decoded.

        Raises:
            ValueError, CorpusError: as `flush`.
        """
        self.flush()
        keep = self._coding.adopt(documents.parameters) is not None
        lengths, row_bytes, low = lengths_of(documents), self._coding.dim * self._coding.dtype.itemsize, 0
        room = segments.SEGMENT_BYTES if keep else DECODED_BYTES
        while low < len(rows):
            before = lengths[low:].cumsum(0) * row_bytes
            high = low + max(1, int(torch.searchsorted(before, room, right=True)))
            some = documents[low:high].compact()
            given = [Pending(*row, False, replace) for row in rows[low:high]]
            if keep:
                self._take_codes(given, some, lengths[low:high])
            else:
                self._add_decoded(given, some)
            low = high

    def _add_decoded(self, given: Sequence[Pending], documents: Quantized) -> None:
        packed = documents.dequantize()
        assert isinstance(packed, Packed)
        bounds = packed.offsets.tolist()
        for each, start, end in zip(given, bounds[:-1], bounds[1:], strict=True):
            self.add(each.id, packed.tokens[start:end], each.text, each.metadata, False, each.replace)

    def flush(self) -> None:
        """Has what there is taken as one segment.

        Raises:
            ValueError: NaN or infinity, and as `_take`. CorpusError: as `_take`.
        """
        if not self._pending:
            return
        bad = self._buffer.first_not_finite()
        if bad is not None:
            document, token, column = bad
            raise ValueError(
                f"document {self._pending[document].id!r} holds NaN or infinity in {_name(self._coding.dtype)}, at "
                f"token {token}, column {column}; nothing was added"
            )
        self._take(self._pending, self._buffer.tokens, self._buffer.offsets)
        self._pending.clear()
        self._buffer.clear()

    def _take(self, given: Sequence[Pending], tokens: Tensor, offsets: Tensor) -> None:
        """Documents in the dtype of the corpus, `[T, D]` and int64 `[N + 1]`, valid until this returns."""
        raise NotImplementedError

    def _take_codes(self, given: Sequence[Pending], documents: Quantized, lengths: Tensor) -> None:
        """Documents one after another, by tables of the corpus."""
        raise NotImplementedError


class Adding(Taking):
    """Documents on their way into the corpus, in the transaction `db`; `flush` ends it."""

    def __init__(self, db: sqlite3.Connection, catalogue: Path, folder: Path, coding: Coding) -> None:
        super().__init__(coding)
        self._db, self._folder = db, folder
        self._row = sql.row_of(db, catalogue)
        self.start, self._number = sql.counters(db)
        self._position = self.start

    @property
    def count(self) -> int:
        """How many were written."""
        return self._position - self.start

    def adopt(self, codes: Codes) -> None:
        """The corpus takes the tables of these parameters where it has none and would keep codes by them.

        Raises:
            ValueError: as `Coding.adopt`.
        """
        self.flush()
        coding = self._coding.adopt(codes)
        if coding is None:
            return
        if not self._coding.trained:
            sql.insert_codebook(self._db, write_codebook(self._folder, coding))
        self._coding = coding

    def _insert(self, given: Sequence[Pending]) -> int:
        """Rows of documents; those of the same ids that were there before the change are deleted where they are to be
        replaced: one that comes twice is an error. Returns the first's position.

        Raises:
            ValueError: an id that is there. CorpusError: a row to be replaced has changed since it was written.
        """
        first = self._position
        for id, text, metadata, cut, replace in given:
            old = self._row(id) if replace else None
            if old is not None and old.position < self.start:
                sql.tombstone(self._db, old.position)
            sql.insert_document(self._db, self._position, id, text, metadata, cut)
            self._position += 1
        return first

    def _write(self, tensors: Mapping[str, Tensor], offsets: Tensor, first: int) -> None:
        sql.insert_segment(self._db, write_segment(self._folder, self._number, tensors, offsets, first))
        self._number += 1

    def _take(self, given: Sequence[Pending], tokens: Tensor, offsets: Tensor) -> None:
        """Writes a segment.

        Raises:
            ValueError: an id that is there, no tokens to train on. CorpusError: the segment cannot be written, and as
                `_insert`.
        """
        first = self._insert(given)
        if not self._coding.trained:
            check_trainable(self._coding, tokens)
            self._coding = self._coding.train(tokens, offsets)
            sql.insert_codebook(self._db, write_codebook(self._folder, self._coding))
        self._write(self._coding.encode(tokens, offsets), offsets, first)

    def _take_codes(self, given: Sequence[Pending], documents: Quantized, lengths: Tensor) -> None:
        first, parameters = self._insert(given), documents.parameters
        if parameters.radius is None or parameters.norm is None:
            radius, norm = of_unseen(documents)
            parameters = dataclasses.replace(parameters, radius=radius, norm=norm)
        kept = {name: tensor for name, tensor in parameters.tensors().items() if name not in SHARED}
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        self._write({"codes": documents.codes, **kept}, offsets, first)


def check_trainable(coding: Coding, tokens: Tensor) -> None:
    """Raises ValueError where the first documents of a corpus have no tokens, and codes are trained on these."""
    if not coding.trained and not len(tokens):
        raise ValueError(
            f"the first documents are what {coding.name} codes are trained on, and these have no tokens; add others "
            "first, or give `like` to `create`"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
