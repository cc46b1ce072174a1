"""The commands of `maxsim` and their options, from what `--help` shows, where a page says `<!-- commands -->`."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
from typing import Any
from unittest import mock

import typer

from maxsim.bench import main as bench
from maxsim.cli import app


def described() -> str:
    """A section a command, in Markdown."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in sorted(group.commands.items()))


def _bench() -> str:
    """What `maxsim bench --help` prints: it has a parser of its own."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="90"),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        bench(["--help"], program="maxsim bench")
    return f"```console\n$ maxsim bench --help\n{printed.getvalue()}```"


def _command(name: str, command: Any) -> str:
    if name == "bench":
        return f"## bench\n\n{_bench()}"
    shown = [each for each in command.params if "--help" not in each.opts]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    options = [each for each in shown if each.param_type_name == "option"]
    usage = " ".join(["maxsim", name, *map(_argument, arguments), *(["[options]"] if options else [])])
    lines = [f"## {name}", "", "```console", f"$ {usage}", "```", "", inspect.cleandoc(command.help or "")]
    if shown:
        lines += ["", "| | |", "|---|---|"]
        lines += [f"| `{_argument(each)}` | {_text(each)} |" for each in arguments]
        lines += [f"| {', '.join(f'`{name}`' for name in each.opts)} | {_text(each)} |" for each in options]
    return "\n".join(lines)


def _argument(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name).upper()
    name += "..." if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _text(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    default = parameter.default
    if default is None or isinstance(default, bool) or callable(default) or parameter.required:
        return text
    return f"{text} Default: `{getattr(default, 'value', default)}`."
