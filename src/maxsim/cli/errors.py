"""What goes wrong, said so that a user can mend it: one line on the standard error, and an exit code."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

import typer

from .. import sources
from ..errors import UnsupportedError
from .output import count

if TYPE_CHECKING:
    import torch

    from ..encode import Encoder
    from ..search import Corpus

P = ParamSpec("P")
R = TypeVar("R")


def plain_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Errors that a user can mend become one line and exit code 1; any other is our fault and keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            stop("stopped", 130)
        except (BrokenPipeError, typer.Exit, typer.BadParameter):
            raise  # typer's own; of the first, that the reader of our output has gone, it makes a quiet end
        except Exception as error:
            message = _explanation(error)
            if message is None:
                raise
            stop(message)

    return wrapped


def _explanation(error: Exception) -> str | None:
    """What a user can do about it, None for an error that is our fault."""
    from torch import OutOfMemoryError

    from ..corpus import CorpusError, FileError
    from ..distributed.talk import RankError
    from ..encode import EncoderError

    if isinstance(error, OutOfMemoryError):
        return "the GPU's memory is too small for this; try --device cpu"
    if isinstance(error, UnsupportedError):
        return f"{' '.join(str(error).split())}; try --device cpu"
    explained = isinstance(error, (CorpusError, FileError, sources.SourceError, EncoderError, RankError, OSError))
    return str(error) if explained else None


@contextmanager
def refusals() -> Iterator[None]:
    """What a corpus refuses: NaN from an encoder, an id that another process has added or deleted meanwhile; and
    packages that a kind of file needs."""
    try:
        yield
    except KeyError as error:
        stop(str(error.args[0]))  # its str() would have quotation marks
    except (ValueError, ImportError) as error:
        stop(str(error))


@contextmanager
def orderly_stop() -> Iterator[None]:
    """Ctrl-C is an exception in here, so that what is half written is removed and the user told what there is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def only_maker(corpus: Path) -> Iterator[None]:
    """Of two processes that make a corpus at once the second is told so."""
    try:
        yield
    except FileExistsError as error:
        if "already holds a corpus" not in str(error):
            raise
        stop(f"another process has just made a corpus in {corpus}; give the same command again to add what it lacks")


def interrupted(corpus: Path, documents: int) -> str:
    """What is told after Ctrl-C, of a command that goes on where it was."""
    return f"stopped; {corpus} holds {count(documents, 'document')}, run the same command to go on"


def stop(message: str, code: int = 1) -> NoReturn:
    typer.echo(f"maxsim: {message}", err=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # of which torchrun, which speaks last, makes its report
        Path(file).write_text(json.dumps({"message": f"maxsim: {message}", "timestamp": str(int(time.time()))}))
    raise typer.Exit(code) from None


def device_of(name: str | None) -> torch.device:
    import torch

    from .. import devices

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return devices.device_of(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None


def check_same(what: str, asked: str | None, kept: str | None, corpus: Path) -> None:
    from ..corpus import CorpusError

    if asked != kept:
        mend = f"give --{what} {kept}" if kept is not None else f"leave --{what} out"
        raise CorpusError(f"{corpus} was made with {what} {kept}, not {asked}; {mend} or take another folder")


def check_width(encoder: Encoder, corpus: Corpus) -> None:
    from ..encode import EncoderError

    if encoder.dim != corpus.dim:
        raise EncoderError(f"the model {encoder.name!r} has width {encoder.dim}, {corpus.path} holds {corpus.dim}")
