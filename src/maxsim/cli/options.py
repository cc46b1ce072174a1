"""Arguments and options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CorpusPath = Annotated[Path, typer.Argument(metavar="CORPUS", help="Folder of the corpus.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
Device = Annotated[str | None, typer.Option(help='"cpu", "cuda" or "cuda:N"; without it a CUDA GPU if there is one.')]
Model = Annotated[str | None, typer.Option(help="Encoder; without it the one the corpus was indexed with.")]
