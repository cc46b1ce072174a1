"""Commands for embeddings that are there already: `index` of them, `add`, `export`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from .errors import check_same, orderly_stop, plain_errors, refusals
from .options import CorpusPath, Json
from .output import count, print_json


def index_embeddings(
    source: Path, corpus: Path, model: str | None, dtype: str | None, exact: str | None, replace: bool, as_json: bool
) -> None:
    """`index` of a file or folder of embeddings, which makes the corpus if need be; without `dtype` one that keeps
    codes as they are, or float16."""
    from ..corpus import kept_by, opened
    from ..search import Corpus

    start, there, made = time.monotonic(), corpus.exists(), False
    with orderly_stop(), refusals():
        given = opened(source)
        try:
            target = Corpus.open(corpus)
        except FileNotFoundError:
            kept = kept_by(given)
            more = kept.options if dtype in (None, kept.dtype) else {}
            target = Corpus.create(corpus, kept.dim, dtype or kept.dtype, model, exact=exact, **more)
            made = True
        else:
            facts = target.info()
            check_same("dtype", dtype or facts.dtype, facts.dtype, corpus)
            check_same("exact", exact or facts.exact, facts.exact, corpus)
            if model is not None:
                check_same("model", model, facts.encoder, corpus)
        before = len(target)
        try:
            added = target.add_source(given, replace)
        except BaseException:
            if made and not target.info().segments:  # else another process has added some
                _remove(corpus, keep=there)
            raise
    replaced = before + added - len(target)
    if as_json:
        seconds = round(time.monotonic() - start, 3)
        counts = {"added": added - replaced, "replaced": replaced, "documents": len(target), "seconds": seconds}
        print_json({"corpus": str(corpus), **counts})
    else:
        more_text = f", replaced {replaced}" if replace else ""
        typer.echo(f"added {count(added - replaced, 'document')}{more_text}; {corpus} holds {len(target)}")


def _remove(corpus: Path, keep: bool) -> None:
    """A corpus that holds nothing. keep: the folder, which was there before."""
    for path in corpus.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not keep:
        corpus.rmdir()


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
    replace: Annotated[bool, typer.Option("--replace", help="Replace documents whose id is there already.")] = False,
    as_json: Json = False,
) -> None:
    """Add embeddings that other programs wrote, each file in one transaction. Nothing is ever unpickled."""
    from ..search import Corpus

    target, done = Corpus.open(corpus), list[tuple[Path, int]]()
    with orderly_stop(), refusals():
        for path in files:
            try:
                done.append((path, target.add_file(path, replace)))
            except BaseException:
                if done:  # these stay
                    said = ", ".join(f"{count(number, 'document')} of {each}" for each, number in done)
                    typer.echo(f"maxsim: added {said}; {path} is what failed:", err=True)
                raise
    added = sum(number for _, number in done)
    if as_json:
        print_json({"corpus": str(corpus), "added": added, "documents": len(target)})
    else:
        typer.echo(f"added {count(added, 'document')}; {corpus} holds {len(target)}")


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
