"""Commands for embeddings that are there already: `index` of them, `add`, `export`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import check_same, interrupted, only_maker, orderly_stop, plain_errors, refusals, stop
from .options import CorpusPath, Json
from .output import count, print_json, told_added

if TYPE_CHECKING:
    from ..corpus import Lacking
    from ..corpus.kinds import Source
    from ..search import Corpus


def index_embeddings(
    source: Path, corpus: Path, model: str | None, dtype: str | None, exact: str | None, replace: bool, as_json: bool
) -> None:
    """`index` of a file or folder of embeddings, which makes the corpus if need be; without `dtype` one that keeps
    codes as they are, or float16."""
    from ..corpus import CorpusError, kept_by, opened
    from ..search import Corpus

    start, there, made = time.monotonic(), corpus.exists(), False
    numbers: dict[Path, int] = {source: 0}
    with orderly_stop(), refusals(), _stays(numbers):
        given = opened(source)
        try:
            target = Corpus.open(corpus)
        except FileNotFoundError:
            kept = kept_by(given)
            more = kept.options if dtype in (None, kept.dtype) else {}
            with only_maker(corpus):
                target = Corpus.create(corpus, kept.dim, dtype or kept.dtype, model, exact=exact, **more)
            made = True
        else:
            facts = target.info()
            check_same("dtype", dtype or facts.dtype, facts.dtype, corpus)
            check_same("exact", exact or facts.exact, facts.exact, corpus)
            if model is not None:
                check_same("model", model, facts.encoder, corpus)
        try:
            done = _add(target, corpus, given, replace, numbers)
        except BaseException:
            if made:
                with suppress(OSError, CorpusError):  # what went wrong before is to be told
                    target.discard(keep=there)
            raise
    _tell(target, corpus, [done], replace, as_json, round(time.monotonic() - start, 3))


def _add(target: Corpus, corpus: Path, source: Source, replace: bool, numbers: dict[Path, int]) -> Lacking:
    """What the corpus lacks of a source, a part at a time; returns what that was. numbers: of documents that were
    added, by source."""
    from ..progress import track

    try:
        with track("looking", None) as progress:
            lacking = target.lacking(source, replace, progress)
        with track("adding", lacking.added + lacking.replaced) as progress:

            def added(documents: int) -> None:
                numbers[source.path] += documents
                progress(documents)

            target.add_lacking(lacking, added)
    except KeyboardInterrupt:
        documents = len(target)
        if not documents:  # of a new corpus, which goes
            raise
        stop(interrupted(corpus, documents), 130)
    return lacking


def _tell(target: Corpus, corpus: Path, done: list[Lacking], replace: bool, as_json: bool, seconds: float) -> None:
    added, replaced, skipped = (sum(getattr(each, name) for each in done) for name in ("added", "replaced", "skipped"))
    if as_json:
        counts = {"added": added, "replaced": replaced, "skipped": skipped, "documents": len(target)}
        print_json({"corpus": str(corpus), **counts, "seconds": seconds})
    else:
        typer.echo(told_added(corpus, added, replaced if replace else None, skipped, len(target)))


@contextmanager
def _stays(numbers: dict[Path, int]) -> Iterator[None]:
    """Where something fails, what was added stays, and is told. numbers: of documents of each source, the last being
    the one that fails."""
    try:
        yield
    except typer.Exit:  # it was told what there is
        raise
    except Exception:
        *_, last = numbers
        said = [f"{count(n, 'document')} of {path}" for path, n in numbers.items() if n or path != last]
        if said:
            typer.echo(f"maxsim: added {', '.join(said)}; {last} is what failed:", err=True)
        raise


@plain_errors
def add(
    corpus: CorpusPath,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Embeddings: .npz, .npy, .safetensors, .parquet, .pt, folders of these, or indexes of PyLate, "
            "fast-plaid or ColBERT."
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace documents that have changed, instead of stopping there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Add embeddings that other programs wrote. Nothing is ever unpickled.

    Each file is looked at before anything of it is added: documents that the corpus holds as they are in the file are
    passed over, others of the same ids are an error, or replaced with --replace. Then 240 MiB of tokens, or a part of
    an index, are added at a time, so after an interruption the same command goes on where it stopped.
    """
    from ..corpus import opened
    from ..search import Corpus

    start, target = time.monotonic(), Corpus.open(corpus)
    done: list[Lacking] = []
    numbers: dict[Path, int] = {}
    with orderly_stop(), refusals(), _stays(numbers):
        for path in files:
            numbers[path] = numbers.pop(path, 0)
            done.append(_add(target, corpus, opened(path), replace, numbers))
    _tell(target, corpus, done, replace, as_json, round(time.monotonic() - start, 3))


@plain_errors
def export(
    corpus: CorpusPath,
    file: Annotated[
        Path,
        typer.Argument(help="What to write: .safetensors, .npz or .parquet, or .jsonl for texts and metadata alone."),
    ],
    as_json: Json = False,
) -> None:
    """Write all documents: embeddings to FILE, and beside it, as JSON lines, ids, texts and metadata.

    `maxsim index FILE CORPUS` makes the same corpus of them again. Where codes alone are kept, .safetensors has the
    codes and the others what they decode to.
    """
    from ..search import Corpus

    opened = Corpus.open(corpus)
    with orderly_stop(), refusals():
        made = opened.export(file)
    written = list(map(str, made.files))
    if as_json:
        print_json({"corpus": str(corpus), "files": written, "documents": made.documents})
    else:
        typer.echo(f"wrote {count(made.documents, 'document')} to {' and '.join(written)}")
