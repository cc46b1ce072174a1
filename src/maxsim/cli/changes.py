"""Commands that change a corpus without an encoder: delete, compact."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any

import typer

from .errors import orderly_stop, plain_errors, refusals
from .options import CorpusPath, Json
from .output import count, print_json


@plain_errors
def delete(
    corpus: CorpusPath,
    ids: Annotated[list[str], typer.Argument(help="Ids; digits also stand for the whole number.")],
    as_json: Json = False,
) -> None:
    """Delete documents, all or none."""
    from ..search import Corpus

    target = Corpus.open(corpus)
    with refusals():
        deleted = target.delete([id_in(target, id) for id in ids])
    if as_json:
        print_json({"corpus": str(corpus), "deleted": deleted, "documents": len(target)})
    else:
        typer.echo(f"deleted {count(deleted, 'document')}; {corpus} holds {len(target)}")


@plain_errors
def compact(corpus: CorpusPath, as_json: Json = False) -> None:
    """Give back the room of deleted documents, and put small segments together."""
    from ..search import Corpus

    target = Corpus.open(corpus)
    with orderly_stop():
        freed = target.compact()
    segments = target.info().segments
    if as_json:
        print_json({"corpus": str(corpus), "freed": freed, "segments": segments})
    else:
        typer.echo(f"gave {freed} bytes back; {corpus} has {count(segments, 'segment')}")


def id_in(corpus: Any, word: str) -> str | int:
    """The id that a word of a command line stands for."""
    if word not in corpus and re.fullmatch(r"-?\d{1,19}", word):  # longer ones are no int ids
        number = int(word)
        if -(2**63) <= number < 2**63 and number in corpus:
            return number
    return word


def filter_of(words: list[str]) -> dict[str, list[Any]] | None:
    """`field=value` → what `Corpus.search` takes. A value that reads as a number, true, false or null is that and a
    text, since some tools write all metadata as texts; one in double quotes is a text alone."""
    wanted: dict[str, list[Any]] = {}
    for word in words:
        field, equals, text = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"expected FIELD=VALUE, got {word!r}", param_hint="--filter")
        wanted.setdefault(field, []).extend(_values(text))
    return wanted or None


def _values(text: str) -> list[Any]:
    """What the value of a word may be in metadata."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    if isinstance(value, str):
        return [value]
    if isinstance(value, float):
        known = math.isfinite(value)
    else:
        known = value is None or (isinstance(value, int) and -(2**63) <= value < 2**63)
    return [text, value] if known else [text]
