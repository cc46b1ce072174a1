"""Texts into a corpus and matches out of it: the join of encoders, corpus and scoring."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from .encode import Encoder, Progress
from .ops import matches
from .search import Corpus
from .sources import SourceError, Text

BATCH_DOCUMENTS = 256  # encoded at a time; fewer need more padding
# Committed together, or after so many seconds, whichever comes first: few segments where encoding is fast, little lost
# by an interruption where it is slow.
COMMIT_DOCUMENTS = 1024
COMMIT_SECONDS = 10.0


class Indexed(NamedTuple):
    """How many documents were new, and how many took the place of an older text."""

    added: int
    replaced: int


class Match(NamedTuple):
    """A query token, the document token it matched, and their similarity."""

    query: str
    document: str
    similarity: float


def new_texts(corpus: Corpus, texts: Iterable[Text], replace: bool = False) -> Iterator[Text]:
    """Those of `texts` that the corpus does not hold yet, so an interrupted run continues where it stopped.

    Args:
        replace: yield also those whose id the corpus holds with another text or other metadata, instead of raising.

    Raises:
        SourceError: an id that the corpus holds with another text or other metadata.
    """
    for batch in _batches(texts):
        ids = [text.id for text in batch]
        known, metadata = corpus.texts(ids), corpus.metadata(ids)
        for text in batch:
            if text.id not in known:
                yield text
                continue
            other = "another text" if known[text.id] != text.text else "other metadata"
            if known[text.id] == text.text and (metadata[text.id] or {}) == (text.metadata or {}):
                continue
            if not replace:
                raise SourceError(
                    f"{text.place}: the corpus holds {other} under the id {text.id!r}; nothing was changed: "
                    "--replace puts changed documents in the place of the old ones"
                )
            yield text


def index_texts(
    corpus: Corpus,
    encoder: Encoder,
    texts: Iterable[Text],
    progress: Progress | None = None,
    replace: bool = False,
) -> Indexed:
    """Encode texts and add them, some at a time, each time in one transaction; texts that are there are skipped.

    Args:
        progress: called with the number of documents encoded since the last call.
        replace: a document whose text or metadata has changed takes the place of the old one, in one transaction,
            instead of being an error.

    Raises:
        SourceError: an id that the corpus holds with another text or other metadata, an id that another process has
            added meanwhile, or what reading `texts` raises.
        ValueError: what the corpus refuses: embeddings of another width, NaN or infinity in them.
        CorpusError: as for `Corpus.add`.

    What was committed before an error or an interruption stays: all but at most ten seconds' work and 256 documents.
    """
    added = replaced = 0
    last = time.monotonic()
    pending: list[Text] = []
    embeddings: list[Tensor] = []
    cut: list[bool] = []

    def commit() -> None:
        nonlocal added, replaced, last
        ids = [text.id for text in pending]
        old = len(corpus.texts(ids)) if replace else 0
        try:
            corpus.add(
                ids,
                embeddings,
                texts=[text.text for text in pending],
                metadata=[text.metadata for text in pending],
                replace=replace,
                cut=cut,
            )
        except ValueError:
            there = {} if replace else corpus.texts(ids)
            if not there:
                raise
            raise SourceError(
                f"id {next(iter(there))!r} is already in the corpus: another process has added it meanwhile; when it "
                "has ended, the same command adds what is left"
            ) from None
        added, replaced = added + len(ids) - old, replaced + old
        pending.clear()
        embeddings.clear()
        cut.clear()
        last = time.monotonic()

    for batch in _batches(new_texts(corpus, texts, replace)):
        embeddings += encoder.documents([text.text for text in batch], progress)
        cut += encoder.were_cut
        pending += batch
        if len(pending) >= COMMIT_DOCUMENTS or time.monotonic() - last >= COMMIT_SECONDS:
            commit()
    if pending:
        commit()
    return Indexed(added, replaced)


def explain(corpus: Corpus, encoder: Encoder, query: str, id: str | int) -> list[Match]:
    """For each query token the document token that it matched; [] where either side has no tokens.

    Raises:
        KeyError: no such document.
        ValueError: the document's text is not kept, or it was encoded by another model.
    """
    document = corpus.get(id)
    if document.text is None:
        raise ValueError(f"the corpus keeps no text for {id!r}")
    pieces = encoder.document_tokens(document.text)
    if len(pieces) != len(document.embeddings):
        raise ValueError(
            f"document {id!r} has {len(document.embeddings)} embeddings, {encoder.name} makes {len(pieces)}"
        )
    embedding = encoder.queries([query])[0]
    if not pieces or not len(embedding):
        return []
    found = matches([embedding.to(document.embeddings)], [document.embeddings])
    winners, similarities = found.index[0, 0].tolist(), found.similarity[0, 0].tolist()
    return [
        Match(token, pieces[winner], similarity)
        for token, winner, similarity in zip(encoder.query_tokens(query), winners, similarities, strict=True)
    ]


def _batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    iterator = iter(texts)
    while batch := list(islice(iterator, BATCH_DOCUMENTS)):
        yield batch
