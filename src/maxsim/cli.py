"""The command `maxsim`: index texts, search them, look at a corpus.

Results go to the standard output (`--json` for machines), progress and errors to the standard error. Exit codes: 0
done, 1 an error that the message explains, 2 wrong usage, 130 stopped with Ctrl-C.

Torch and what needs it is imported by the commands, so that help and wrong usage come at once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer

from . import __version__, sources
from .errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from .encode import Encoder
    from .search import Corpus

P = ParamSpec("P")
R = TypeVar("R")

app = typer.Typer(
    name="maxsim",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

CorpusPath = Annotated[Path, typer.Argument(metavar="CORPUS", help="Folder of the corpus.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
Device = Annotated[str | None, typer.Option(help='"cpu", "cuda" or "cuda:N"; without it a CUDA GPU if there is one.')]


class Dtype(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


def _plain_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Errors that a user can mend become one line and exit code 1; any other is our fault and keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            _stop("stopped", 130)
        except (BrokenPipeError, typer.Exit, typer.BadParameter):
            raise  # typer's own; of the first, that the reader of our output has gone, it makes a quiet end
        except Exception as error:
            message = _explanation(error)
            if message is None:
                raise
            _stop(message)

    return wrapped


def _explanation(error: Exception) -> str | None:
    """What a user can do about it, None for an error that is our fault."""
    from torch import OutOfMemoryError

    from .corpus import CorpusError
    from .encode import EncoderError

    if isinstance(error, OutOfMemoryError):
        return "the GPU's memory is too small for this; try --device cpu"
    if isinstance(error, UnsupportedError):
        return f"{' '.join(str(error).split())}; try --device cpu"
    explained = isinstance(error, (CorpusError, sources.SourceError, EncoderError, OSError))
    return str(error) if explained else None


@contextmanager
def _refusals() -> Iterator[None]:
    """What a corpus refuses: NaN from an encoder, an id that another process has added or deleted meanwhile."""
    try:
        yield
    except KeyError as error:
        _stop(str(error.args[0]))  # its str() would have quotation marks
    except ValueError as error:
        _stop(str(error))


@contextmanager
def _orderly_stop() -> Iterator[None]:
    """Ctrl-C is an exception in here, so that what is half written is removed and the user told what there is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(message: str, code: int = 1) -> NoReturn:
    typer.echo(f"maxsim: {message}", err=True)
    raise typer.Exit(code) from None


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


@app.command()
@_plain_errors
def index(
    source: Annotated[
        Path,
        typer.Argument(
            help='A file with one document a line, a .jsonl file with "id" and "text", or a folder of .txt files.'
        ),
    ],
    corpus: CorpusPath,
    model: Annotated[
        str, typer.Option(help="Encoder: a sentence-transformers or PyLate model, by name or folder.")
    ] = "minilm",
    dtype: Annotated[Dtype | None, typer.Option(help="How a new corpus keeps embeddings; without it float16.")] = None,
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
    """
    from . import encode, indexing
    from .progress import track
    from .search import Corpus

    start = time.monotonic()
    empty: list[str] = []
    found = sum(1 for _ in sources.read(source, empty))  # every fault of the source is found before the work begins
    target: Corpus | None
    try:
        target = Corpus.open(corpus)
    except FileNotFoundError:
        target = None
    else:
        _check_same("model", model, target.encoder, corpus)
        kept = target.info().dtype
        _check_same("dtype", dtype.value if dtype else kept, kept, corpus)
    encoder = encode.load(model, _device(device))
    if target is None:
        try:
            target = Corpus.create(corpus, encoder.dim, (dtype or Dtype.float16).value, encoder=encoder.name)
        except FileExistsError as error:
            if "already holds a corpus" not in str(error):
                raise
            _stop(
                f"another process has just made a corpus in {corpus}; give the same command again to add what it lacks"
            )
    _check_width(encoder, target)
    todo = sum(1 for _ in indexing.new_texts(target, sources.read(source), replace))
    try:
        with _orderly_stop(), _refusals(), track("encoding", todo) as progress:
            done = indexing.index_texts(target, encoder, sources.read(source), progress, replace)
    except KeyboardInterrupt:
        _stop(f"stopped; {corpus} holds {_count(len(target), 'document')}, run the same command to go on", 130)
    finally:
        _warn_cut(encoder.cut, "document", encoder.limit, "cannot be found")
    skipped = found - sum(done)
    if as_json:
        counts = {**done._asdict(), "skipped": skipped, "empty": len(empty), "documents": len(target)}
        seconds = round(time.monotonic() - start, 3)
        _print_json({"corpus": str(corpus), **counts, "cut": encoder.cut, "limit": encoder.limit, "seconds": seconds})
    else:
        replaced = f", replaced {done.replaced}" if replace else ""
        there = f"{skipped} {'was' if skipped == 1 else 'were'} there already"
        if empty:
            there += f"; {_passed_over(empty, 'document')}"
        typer.echo(f"added {_count(done.added, 'document')}{replaced} ({there}); {corpus} holds {len(target)}")


@app.command()
@_plain_errors
def search(
    corpus: CorpusPath,
    query: Annotated[list[str] | None, typer.Argument(help="One or more queries.")] = None,
    queries: Annotated[
        Path | None,
        typer.Option(
            help="Read queries from a file or folder, in the forms of `index`; - is the standard input, one a line."
        ),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=0, help="Hits for each query.")] = 10,
    explain: Annotated[bool, typer.Option(help="Show which token of the document each query token matched.")] = False,
    model: Annotated[str | None, typer.Option(help="Encoder; without it the one the corpus was indexed with.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Find the best documents for each query, exactly."""
    asked: list[tuple[str | int | None, str]] = [(None, text) for text in query or []]
    if not all(text.strip() for _, text in asked):
        raise typer.BadParameter("a query must not be empty", param_hint="QUERY")
    if queries is not None:
        standard, empty = str(queries) == "-", list[str]()
        read = sources.read_stream(sys.stdin.buffer, "stdin") if standard else sources.read(queries, empty)
        asked += [(text.id, text.text) for text in read]
        if empty:
            _warn(_passed_over(empty, "query"))
    if not asked:
        raise typer.BadParameter("give at least one query, or --queries FILE", param_hint="QUERY")
    from . import encode, indexing
    from .search import Corpus

    where = _device(device)
    opened = Corpus.open(corpus, where)
    name = model or opened.encoder
    if name is None:
        raise encode.EncoderError(f"{corpus} does not say which model made its embeddings; give --model")
    if opened.encoder is not None:
        _check_same("model", name, opened.encoder, corpus)
    encoder = encode.load(name, where)
    _check_width(encoder, opened)
    results = []
    embeddings = encoder.queries([text for _, text in asked])
    _warn_cut(encoder.cut_queries, "query", encoder.query_limit, "is not searched for")
    with _refusals():
        found = opened.search(embeddings, k)
    for (id, text), hits in zip(asked, found, strict=True):
        ids = [hit.id for hit in hits]
        texts, metadata = opened.texts(ids), opened.metadata(ids)
        rows: list[dict[str, Any]] = [
            {"id": hit.id, "score": hit.score, "text": texts.get(hit.id), "metadata": metadata.get(hit.id)}
            for hit in hits
        ]
        if explain:
            for row in rows:
                with _refusals():
                    matches = indexing.explain(opened, encoder, text, row["id"])
                row["matches"] = [match._asdict() for match in matches]
        results.append({**({} if id is None else {"id": id}), "query": text, "hits": rows})
    if as_json:
        _print_json(results)
    else:
        _print_hits(results)


@app.command()
@_plain_errors
def info(corpus: CorpusPath, as_json: Json = False) -> None:
    """What a corpus holds."""
    from .search import Corpus

    facts = dataclasses.asdict(Corpus.open(corpus).info())
    if as_json:
        _print_json(facts)
    else:
        for name, value in facts.items():
            typer.echo(f"{name:<10} {'not known' if value is None else value}")


@app.command()
@_plain_errors
def check(corpus: CorpusPath, as_json: Json = False) -> None:
    """Read every byte of a corpus and say what is wrong with it; exit code 1 if anything is."""
    from .search import Corpus

    problems = Corpus.open(corpus).check()
    if as_json:
        _print_json({"sound": not problems, "problems": problems})
    else:
        typer.echo("\n".join(problems) or f"{corpus} is sound")
    if problems:
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@_plain_errors
def bench(context: typer.Context) -> None:
    """Time scoring beside its contenders; `maxsim bench --help` says how."""
    from .bench import main as bench_main

    raise typer.Exit(bench_main(context.args, program="maxsim bench"))


def _device(name: str | None) -> torch.device:
    import torch

    from .devices import device_of

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return device_of(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None


def _check_same(what: str, asked: str, kept: str | None, corpus: Path) -> None:
    from .corpus import CorpusError

    if asked != kept:
        raise CorpusError(f"{corpus} was made with {what} {kept}, not {asked}; give --{what} {kept} or another folder")


def _check_width(encoder: Encoder, corpus: Corpus) -> None:
    from .encode import EncoderError

    if encoder.dim != corpus.dim:
        raise EncoderError(f"the model {encoder.name!r} has width {encoder.dim}, {corpus.path} holds {corpus.dim}")


def _count(number: int, what: str) -> str:
    return f"{number} {what if number == 1 else f'{what[:-1]}ies' if what.endswith('y') else f'{what}s'}"


def _warn(message: str) -> None:
    print(f"maxsim: warning: {message}", file=sys.stderr)


def _warn_cut(number: int, what: str, limit: int, lost: str) -> None:
    if number:
        longer = f"{_count(number, what)} {'is' if number == 1 else 'are'} longer"
        _warn(f"{longer} than {limit} tokens; what follows these {lost}")


def _passed_over(empty: list[str], what: str) -> str:
    more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
    return f"passed over {_count(len(empty), what)} without any text: {empty[0]}{more}"


def _shown(id: str | int) -> str:
    """An id for people: a string that could be taken for a whole number in quotation marks."""
    return json.dumps(id) if isinstance(id, str) and id.lstrip("-").isdecimal() else str(id)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line[:100] + ("…" if len(line) > 100 else "")


def _print_hits(results: list[dict[str, Any]]) -> None:
    for number, result in enumerate(results):
        if len(results) > 1 or "id" in result:
            asked = f"{_shown(result['id'])}  " if "id" in result else ""
            typer.echo(("\n" if number else "") + asked + _one_line(result["query"]))
        if not result["hits"]:
            typer.echo("no hits")
        for rank, hit in enumerate(result["hits"], 1):
            typer.echo(f"{rank:>3}  {hit['score']:8.4f}  {_shown(hit['id'])}  {_one_line(hit['text'] or '')}")
            for match in hit.get("matches", []):
                typer.echo(f"{'':>15}{match['query']} → {match['document']}  {match['similarity']:.3f}")


def main() -> None:
    app(prog_name="maxsim")
