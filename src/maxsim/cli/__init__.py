"""The command `maxsim`: index texts, search them, look at a corpus.

Results go to the standard output (`--json` for machines), progress and errors to the standard error. Exit codes: 0
done, 1 an error that the message explains, 2 wrong usage, 130 stopped with Ctrl-C.

Torch and what needs it is imported by the commands, so that help and wrong usage come at once.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import __version__, sources
from . import changes, embeddings, searching
from .errors import (
    check_same,
    check_width,
    device_of,
    interrupted,
    only_maker,
    orderly_stop,
    plain_errors,
    refusals,
    stop,
)
from .options import CorpusPath, Device, Json
from .output import count, passed_over, print_json, told_added, warn_cut

if TYPE_CHECKING:
    from ..search import Corpus

app = typer.Typer(
    name="maxsim",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # a paragraph of help is wrapped as a whole, its lines in the source are not kept
)


class Float(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Dtype(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    int8 = "int8"
    fp8 = "fp8"
    residual = "residual"
    pq = "pq"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"maxsim {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Exact late-interaction search over your texts."""


@plain_errors
def index(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            help='A file with one document a line, a .jsonl file with "id" and "text", a .tsv file of ids and texts, '
            "or a folder of .txt files; or embeddings, as `add` takes them."
        ),
    ],
    corpus: CorpusPath,
    model: Annotated[
        str, typer.Option(help="Encoder: a sentence-transformers or PyLate model, by name or folder.")
    ] = "minilm",
    dtype: Annotated[Dtype | None, typer.Option(help="How a new corpus keeps embeddings; without it float16.")] = None,
    exact: Annotated[
        Float | None, typer.Option(help="Keep a float copy beside codes, so that hits are exact; a new corpus only.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace documents whose text has changed, instead of stopping there.")
    ] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Encode texts and add them to a corpus, which is made if need be.

    Documents that the corpus already holds are skipped, so after an interruption the same command goes on where it
    stopped. Documents that are no longer in the source stay in the corpus. Of each document an encoder reads the first
    300 tokens, or fewer if that is the model's limit; how many documents are longer is said at the end, and kept for
    `info`. Documents without any text are passed over and counted.

    Embeddings that are there already are added as `add` does: no model is needed, and one that is named is kept for
    those who search with texts. The codes of an index of PyLate, fast-plaid or ColBERT, and of a file
    of codes, stay as they are, unless --dtype asks for something else.
    """
    from ..corpus import holds_embeddings

    place = device_of(device)
    if holds_embeddings(source):
        source_of_model = context.get_parameter_source("model")
        told = source_of_model is not None and source_of_model.name != "DEFAULT"
        kind, copy = dtype.value if dtype else None, exact.value if exact else None
        embeddings.index_embeddings(source, corpus, model if told else None, kind, copy, replace, as_json)
        return
    from .. import encode, indexing
    from ..progress import track
    from ..search import Corpus

    start = time.monotonic()
    empty: list[str] = []
    found = sum(1 for _ in sources.read(source, empty))  # every fault of the source is found before the work begins
    target: Corpus | None
    try:
        target = Corpus.open(corpus)
    except FileNotFoundError:
        target = None
    else:
        check_same("model", model, target.encoder, corpus)
        kept = target.info()
        check_same("dtype", dtype.value if dtype else kept.dtype, kept.dtype, corpus)
        check_same("exact", exact.value if exact else kept.exact, kept.exact, corpus)
    encoder = encode.load(model, place)
    if target is None:
        kind, copy = (dtype or Dtype.float16).value, exact.value if exact else None
        with only_maker(corpus):
            target = Corpus.create(corpus, encoder.dim, kind, encoder.name, exact=copy)
    check_width(encoder, target)
    todo = sum(1 for _ in indexing.new_texts(target, sources.read(source), replace))
    try:
        with orderly_stop(), refusals(), track("encoding", todo) as progress:
            done = indexing.index_texts(target, encoder, sources.read(source), progress, replace)
    except KeyboardInterrupt:
        stop(interrupted(corpus, len(target)), 130)
    finally:
        warn_cut(encoder.cut, "document", encoder.limit, "cannot be found")
    skipped = found - sum(done)
    if as_json:
        counts = {**done._asdict(), "skipped": skipped, "empty": len(empty), "documents": len(target)}
        seconds = round(time.monotonic() - start, 3)
        print_json({"corpus": str(corpus), **counts, "cut": encoder.cut, "limit": encoder.limit, "seconds": seconds})
    else:
        more = f"; {passed_over(empty, 'document')}" if empty else ""
        replaced = done.replaced if replace else None
        typer.echo(told_added(corpus, done.added, replaced, skipped, len(target), more))


@plain_errors
def info(corpus: CorpusPath, as_json: Json = False) -> None:
    """What a corpus holds."""
    from ..search import Corpus

    facts = dataclasses.asdict(Corpus.open(corpus).info())
    if as_json:
        print_json(facts)
    else:
        facts["options"] = ", ".join(f"{name} {value}" for name, value in facts["options"].items()) or None
        for name, value in facts.items():
            unknown = "not known" if name == "cut" else "none"
            typer.echo(f"{name:<10} {unknown if value is None else value}")


@plain_errors
def check(corpus: CorpusPath, as_json: Json = False) -> None:
    """Read every byte of a corpus and say what is wrong with it; exit code 1 if anything is."""
    from ..corpus import problems_of

    problems = problems_of(corpus)
    if as_json:
        print_json({"sound": not problems, "problems": problems})
    else:
        typer.echo("\n".join(problems) or f"{corpus} is sound")
    if problems:
        raise typer.Exit(1)


@plain_errors
def bench(context: typer.Context) -> None:
    """Time scoring beside its contenders; `maxsim bench --help` says how."""
    from ..bench import main as bench_main

    raise typer.Exit(bench_main(context.args, program="maxsim bench"))


@plain_errors
def verify(device: Device = None, as_json: Json = False) -> None:
    """Hold every backend, dtype and layout of this machine to float64.

    Errors of scores beside plain PyTorch's, winners, gradients, the 20 best documents, and whether another run, and a
    query and a document alone, give the same bits. A minute on two cores. Exit code 1 if anything is wrong.
    """
    from ..bench.cli import steps
    from ..bench.verify import table
    from ..bench.verify import verify as checks_of

    with steps("verifying") as tell:
        checks = list(checks_of(device_of(device), tell))
    wrong = sum(bool(check.wrong) for check in checks)
    if as_json:
        print_json({"sound": not wrong, "checks": [check.as_json() for check in checks]})
    else:
        typer.echo(table(checks))
        typer.echo(f"{count(len(checks), 'check')}: {f'{wrong} wrong' if wrong else 'all right'}")
    if wrong:
        raise typer.Exit(1)


# in the order of `maxsim --help`
app.command()(index)
app.command(cls=searching.Search)(searching.search)
for command in (
    searching.rerank,
    embeddings.add,
    info,
    check,
    changes.delete,
    changes.compact,
    embeddings.export,
    verify,
):
    app.command()(command)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)(bench)


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # of a terminal or pipe that has not all characters, as on Windows
    app(prog_name="maxsim")
