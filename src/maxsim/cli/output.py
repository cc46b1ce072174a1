"""What the command prints: results for people and as JSON, warnings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer


def count(number: int, what: str) -> str:
    return f"{number} {what if number == 1 else f'{what[:-1]}ies' if what.endswith('y') else f'{what}s'}"


def warn(message: str) -> None:
    print(f"maxsim: warning: {message}", file=sys.stderr)


def warn_cut(number: int, what: str, limit: int, lost: str) -> None:
    if number:
        longer = f"{count(number, what)} {'is' if number == 1 else 'are'} longer"
        warn(f"{longer} than {limit} tokens; what follows these {lost}")


def told_added(corpus: Path, added: int, replaced: int | None, skipped: int, holds: int, more: str = "") -> str:
    """replaced: None where nothing was to be; more: what else is to be said of what was not added."""
    also = "" if replaced is None else f", replaced {replaced}"
    there = f"{skipped} {'was' if skipped == 1 else 'were'} there already{more}"
    return f"added {count(added, 'document')}{also} ({there}); {corpus} holds {holds}"


def passed_over(empty: list[str], what: str) -> str:
    more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
    return f"passed over {count(len(empty), what)} without any text: {empty[0]}{more}"


def shown(id: str | int) -> str:
    """An id for people: a string that could be taken for a whole number in quotation marks."""
    return json.dumps(id) if isinstance(id, str) and id.lstrip("-").isdecimal() else str(id)


def print_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    typer.echo(text)


def one_line(text: str) -> str:
    line = " ".join(text.split())
    return line[:100] + ("…" if len(line) > 100 else "")


def print_hits(results: list[dict[str, Any]]) -> None:
    for number, result in enumerate(results):
        if len(results) > 1 or "id" in result:
            asked = f"{shown(result['id'])}  " if "id" in result else ""
            typer.echo(("\n" if number else "") + asked + one_line(result["query"]))
        if not result["hits"]:
            typer.echo("no hits")
        for rank, hit in enumerate(result["hits"], 1):
            typer.echo(f"{rank:>3}  {hit['score']:8.4f}  {shown(hit['id'])}  {one_line(hit['text'] or '')}")
            for note in hit.get("notes", []):
                typer.echo(f"{'':>15}({note})")
            for match in hit.get("matches", []):
                query = f"#{match['position']}" if match["query"] is None else match["query"]
                document = f"#{match['index']}" if match["document"] is None else match["document"]
                share = "" if match["share"] is None else f"  {100 * match['share']:.1f} %"
                typer.echo(f"{'':>15}{query} → {document}  {match['similarity']:.3f}{share}")
        if "page" in result:
            typer.echo(f"explained in {result['page']}")
