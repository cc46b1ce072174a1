"""A source in parts: what a corpus lacks of it, found before anything is changed, and added a segment in a transaction.
So what was interrupted goes on where it was: documents that are there as the source has them are passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantized import Codes, Quantized
from . import rows as sql
from .adding import Adding, Given, Pending, Taking, check_trainable
from .coding import Coding, as_bytes
from .documents import Id
from .errors import FileError
from .gathering import Lot, gathered
from .kinds import Source
from .reading import Snapshot

Progress = Callable[[int], object]  # called with a number of documents
THERE, NEW, CHANGED = range(3)


class Bounds(NamedTuple):
    """Where documents that were given end, their beginning first; `which` of them are those of a lot."""

    ends: list[int]
    which: list[int]


class Lacking(NamedTuple):
    """What a corpus lacks of a source: THERE, NEW or CHANGED for each document, in its order. `replace`: those that
    have changed are to be replaced."""

    source: Source
    found: bytes
    replace: bool

    @property
    def skipped(self) -> int:
        """How many are there."""
        return self.found.count(THERE)

    @property
    def added(self) -> int:
        """How many are new."""
        return self.found.count(NEW)

    @property
    def replaced(self) -> int:
        """How many take the place of another of the same id."""
        return self.found.count(CHANGED)


class Looking(Taking):
    """Compares documents with those of a corpus, of which `reading` gives a connection and a snapshot, and finds every
    fault that `Adding` would. `found`: of each document THERE, NEW, or, with `replace`, CHANGED."""

    def __init__(
        self,
        reading: Callable[[], AbstractContextManager[tuple[Any, Snapshot]]],
        coding: Coding,
        catalogue: Path,
        where: Path,
        progress: Progress | None,
    ) -> None:
        super().__init__(coding)
        self.found, self._ids = bytearray(), set[Id]()
        self._reading, self._catalogue, self._where, self._progress = reading, catalogue, where, progress

    def adopt(self, codes: Codes) -> None:
        self._coding = self._coding.adopt(codes) or self._coding

    def _take(self, given: Sequence[Pending], tokens: Tensor, offsets: Tensor) -> None:
        if not self.found:
            check_trainable(self._coding, tokens)
        ends = offsets.tolist()
        self._compare(given, lambda lot, coding, which: _floats_equal(lot, coding, tokens, Bounds(ends, which)))

    def _take_codes(self, given: Sequence[Pending], documents: Quantized, lengths: Tensor) -> None:
        ends = [0, *lengths.cumsum(0).tolist()]
        self._compare(given, lambda lot, _, which: _codes_equal(lot, documents, Bounds(ends, which)))

    def _compare(self, given: Sequence[Pending], equal: Callable[[Lot, Coding, list[int]], list[bool]]) -> None:
        """`equal`: whether documents of the corpus have the embeddings of these of the given ones.

        Raises:
            FileError: an id that comes twice, or one that the corpus has otherwise and that is not to be replaced.
            CorpusError: a row of the catalogue, or a segment, is damaged.
        """
        differ: list[str | None] = []  # in what, of each
        places: dict[int, int] = {}  # in the corpus, of those whose embeddings are yet to be compared
        found = bytearray(len(given))
        with self._reading() as (db, snapshot):
            row = sql.row_of(db, self._catalogue)
            for i, each in enumerate(given):
                if each.id in self._ids:
                    raise FileError(f"{self._where}: id {each.id!r} comes twice; nothing was changed")
                self._ids.add(each.id)
                kept = row(each.id)
                found[i] = NEW if kept is None else THERE
                differ.append(None if kept is None else _differ(kept, each))
                if kept is not None and differ[i] is None:
                    places[kept.position] = i
            positions = torch.tensor(sorted(places), dtype=torch.int64, device="cpu")
            for lot in gathered(snapshot, positions, exact=True):
                which = [places[position] for position in lot.positions.tolist()]
                for i, same in zip(which, equal(lot, snapshot.coding, which), strict=True):
                    differ[i] = None if same else "other embeddings"
        for i, what in enumerate(differ):
            if what is not None and not given[i].replace:
                raise FileError(
                    f"{self._where}: the corpus holds {what} under the id {given[i].id!r}; nothing was changed: "
                    "--replace puts changed documents in the place of the old ones"
                )
            if what is not None:
                found[i] = CHANGED
        self.found += found
        if self._progress:
            self._progress(len(given))


def _differ(kept: sql.Row, given: Pending) -> str | None:
    """In what a document of the corpus is not the one given, but for embeddings."""
    if kept.text != given.text:
        return "another text"
    same = _fields(kept.metadata) == _fields(given.metadata)
    return None if same else "other metadata"


def _fields(metadata: str | None) -> str:
    """In one order; as JSON still, of which true is not 1."""
    return json.dumps(json.loads(metadata or "{}"), sort_keys=True)


def _floats_equal(lot: Lot, coding: Coding, tokens: Tensor, bounds: Bounds) -> list[bool]:
    """Floats given, in the dtype of the corpus, beside those that it keeps, or beside its codes."""
    kept, pairs = lot.tensors.get("tokens", lot.tensors.get("exact")), list(_pairs(lot, bounds))
    if kept is not None:
        return [same and torch.equal(kept[there], tokens[here]) for same, there, here in pairs]
    which = [n for n, (same, *_) in enumerate(pairs) if same]
    if not which:
        return [False] * len(pairs)
    found = [False] * len(pairs)
    given = torch.cat([tokens[pairs[n][2]] for n in which])
    rows = torch.cat([torch.arange(pairs[n][1].start, pairs[n][1].stop, device="cpu") for n in which])
    lengths = torch.tensor([pairs[n][1].stop - pairs[n][1].start for n in which], device="cpu")
    documents, named = torch.tensor(which, device="cpu"), coding.of_documents()
    some = {name: each[documents if name in named else rows] for name, each in as_bytes(lot.tensors).items()}
    agree = coding.agree(some, given, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    for n, same in zip(which, torch.split(agree, lengths.tolist()), strict=True):
        found[n] = bool(same.all())
    return found


def _codes_equal(lot: Lot, documents: Quantized, bounds: Bounds) -> list[bool]:
    """Codes given beside codes kept, by the same tables."""
    parameters, kept = documents.parameters, as_bytes(lot.tensors)
    # what else is kept to decode with, 1 / norm, follows from these
    given = as_bytes({"codes": documents.codes, **parameters.of_tokens()})
    both = [(kept[name], given[name]) for name in ("codes", "centroid", "factor") if name in given]
    found = [
        same and all(torch.equal(one[there], other[here]) for one, other in both)
        for same, there, here in _pairs(lot, bounds)
    ]
    if parameters.scale is not None:
        own = parameters.scale[torch.tensor(bounds.which, device="cpu")]
        found = [same and one for same, one in zip(found, (lot.tensors["scale"] == own).tolist(), strict=True)]
    return found


def _pairs(lot: Lot, bounds: Bounds) -> Iterator[tuple[bool, slice, slice]]:
    """Of each document of the lot, whether it has as many tokens as the one given, and the tokens of both."""
    ends = lot.offsets.tolist()
    for n, i in enumerate(bounds.which):
        there, here = slice(ends[n], ends[n + 1]), slice(bounds.ends[i], bounds.ends[i + 1])
        yield there.stop - there.start == here.stop - here.start, there, here


class Parts:
    """What takes a source in place of `Adding`: each segment in a transaction of its own, which `changing` begins. A
    context, whose end is that of the last.

    Raises:
        FileError: (at its end) what was found of the source, or of the corpus, is so no more.
    """

    def __init__(
        self,
        changing: Callable[[], AbstractContextManager[tuple[Any, Adding]]],
        lacking: Lacking,
        dim: int,
        progress: Progress | None,
    ) -> None:
        self._dim = dim
        self._changing, self._lacking, self._progress = changing, lacking, progress
        self._found = iter(lacking.found)
        self._change: AbstractContextManager[tuple[Any, Adding]] | None = None
        self._adding: Adding | None = None
        self._codes: Codes | None = None
        self._count = 0  # in this transaction

    @property
    def dim(self) -> int:
        return self._dim

    def adopt(self, codes: Codes) -> None:
        self._codes = codes

    def add_rows(self, rows: Iterable[tuple[Any, Any, Any, Any, Any]], replace: bool) -> None:
        for row in rows:
            if self._next() == THERE:
                continue
            if self._adding is not None and not self._adding.room(len(row[1])):
                self._commit()
            self._begun().add_rows([row], replace)
            self._count += 1

    def add_documents(self, rows: Sequence[Given], documents: Quantized, replace: bool) -> None:
        lacks = [self._next() != THERE for _ in rows]
        if not any(lacks):
            return
        if not all(lacks):
            documents = documents[torch.tensor(lacks, device="cpu").nonzero().flatten()].compact()
        given = list(compress(rows, lacks))
        self._begun().add_documents(given, documents, replace)
        self._count += len(given)
        self._commit()

    def _next(self) -> int:
        """What was found of the next document."""
        found = next(self._found, None)
        if found is None:
            raise ValueError("it has more documents")
        return found

    def _begun(self) -> Adding:
        if self._adding is None:
            change = self._changing()
            _, self._adding = change.__enter__()
            self._change = change
            if self._codes is not None:
                self._adding.adopt(self._codes)
        return self._adding

    def _commit(self) -> None:
        change, self._change, self._adding = self._change, None, None
        if change is not None:
            change.__exit__(None, None, None)
            count, self._count = self._count, 0
            if self._progress:
                self._progress(count)

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
                if next(self._found, None) is not None:
                    raise ValueError("it has fewer documents")
            elif self._change is not None:
                self._change.__exit__(kind, error, trace)
        except ValueError as other:
            error = other
        if isinstance(error, ValueError):
            why = str(error).removesuffix("; nothing was added")
            raise FileError(
                f"{self._lacking.source.path}: this, or the corpus, has changed since it was looked at: {why}; the "
                "same command adds what is left"
            ) from error
