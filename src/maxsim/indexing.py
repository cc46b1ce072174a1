"""Texts into a corpus and explanations of its hits: the join of encoders, corpus and scoring."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from . import explaining
from .encode import Encoder, EncoderError, Place, Progress
from .explaining import Explanation
from .explaining.images import data_uri, patch_grid
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


def explain(
    corpus: Corpus, encoder: Encoder, query: str, id: str | int, embedding: Tensor | None = None
) -> Explanation:
    """The score that a search gives a document, token by token.

    Tokens whose texts are not known (the corpus keeps none, another model made the embeddings, the model does not say)
    are called by their numbers, and a note says why. Where the document's metadata have "patches", as for
    `maxsim.explain`, its tokens are patches of a page, and "image" may be a data URI or a path, relative to the corpus'
    folder.

    Args:
        embedding: what `encoder.queries` made of the query, float `[L, D]`; None: made here.

    Raises:
        KeyError: no such document.
    """
    document = corpus.get(id)
    if embedding is None:
        (embedding,) = encoder.queries([query])
    notes: list[str] = []
    query_text, query_spans = _text(encoder.query_spans, query, len(embedding), "query", notes)
    count = len(document.embeddings)
    image, patches = _patches(corpus, document.metadata or {}, count, notes)
    text = document_spans = None
    # a text that is kept beside a page is not what was encoded
    if patches is None and document.text is not None:
        text, document_spans = _text(encoder.document_spans, document.text, count, "document", notes)
    elif patches is None:
        notes.append("The corpus keeps no text of this document: its tokens are called by their numbers.")
    codes = corpus.codes(id)
    return explaining.explain(
        embedding.to(document.embeddings),
        document.embeddings if codes is None else codes,
        query_text=query_text,
        query_tokens=query_spans,
        document_text=text,
        document_tokens=document_spans,
        image=image,
        patches=patches,
        name=document.id,
        notes=notes,
    )


def _text(
    spans_of: Callable[[str], tuple[str, list[Place]]], text: str, count: int, side: str, notes: list[str]
) -> tuple[str | None, list[Place] | None]:
    """A text and the places of its tokens, or nothing and a note."""
    try:
        whole, spans = spans_of(text)
    except EncoderError as error:
        notes.append(f"The tokens of the {side} are called by their numbers: {error}.")
        return None, None
    if len(spans) != count:
        notes.append(
            f"The {side} has {count} embeddings, but its text {len(spans)} tokens: another model made them. They are "
            "called by their numbers."
        )
        return None, None
    return whole, spans


def _patches(corpus: Corpus, metadata: dict[str, Any], count: int, notes: list[str]) -> tuple[str | None, Any]:
    """The image, as a data URI, and the patches of a page, as far as they are kept and right."""
    patches, image = metadata.get("patches"), metadata.get("image")
    if patches is None:
        return None, None
    try:
        grid = patch_grid(patches, count)
    except (ValueError, TypeError) as error:
        notes.append(f"The metadata of this document say something else of its patches: {error}.")
        return None, None
    if image is None:
        return None, grid
    try:
        named = isinstance(image, str) and not image.startswith("data:")
        return data_uri(corpus.path / image if named else image), grid
    except (OSError, ValueError, TypeError) as error:
        notes.append(f"The image of this document cannot be shown: {error}.")
        return None, grid


def _batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    iterator = iter(texts)
    while batch := list(islice(iterator, BATCH_DOCUMENTS)):
        yield batch
