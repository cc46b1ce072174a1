"""Explanations as one HTML page: what it says without a script, and the numbers that its script shows more by."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import torch
from markupsafe import Markup
from torch import Tensor

from .pieces import Cell

if TYPE_CHECKING:
    from . import Explanation

HERE = Path(__file__).parent
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 does not have


class Row(NamedTuple):
    """A line of a document's table: a query token, what it matched, both as (before, token, after) in their words."""

    position: int
    token: tuple[str, str, str]
    matched: tuple[str, str, str] | None
    nothing: str
    similarity: str
    share: str
    bar: float  # of 100, by the largest share


class Hit(NamedTuple):
    """A document of the page."""

    name: str | None
    score: str
    facts: list[str]
    notes: Sequence[str]
    cells: list[Cell]
    others: list[Cell]  # tokens of a page image that are no patches
    image: str | None
    patches: tuple[int, int] | None
    rows: list[Row]
    masked: frozenset[int]


def render(explanations: Sequence[Explanation]) -> str:
    """The page. What it may load is nothing, its policy says, and what it may run is the one script."""
    if not explanations:
        raise ValueError("a page needs at least one explanation")
    first = explanations[0]
    for other in explanations[1:]:
        if other.query != first.query or not torch.equal(other.query_mask, first.query_mask):
            raise ValueError("a page is of one query: the explanations have different ones")
    style, script = (HERE / "page.css").read_text("utf-8"), (HERE / "page.js").read_text("utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("page.html.jinja").render(
        title=" ".join(first.query.text.split()) if first.query.known else "A query",
        query=first.query.cells(),
        query_masked=_masked(first.query_mask),
        hits=[_hit(each) for each in explanations],
        data={"query": _labels(first.query), "hits": [_numbers(each) for each in explanations]},
        style=Markup(style),
        script=Markup(script),
        allowed=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        images=any(each.patches is not None for each in explanations),
    )
    return SURROGATE.sub("\N{REPLACEMENT CHARACTER}", page)


def _hit(of: Explanation) -> Hit:
    grid, cells = of.patches, of.document.cells()
    patches = set() if grid is None else set(grid.flatten().tolist())
    kept, query_kept = int(of.document_mask.sum()), int(of.query_mask.sum())
    facts = [f"{kept} of {len(of.document)} document tokens kept" if kept < len(of.document) else f"{kept} tokens"]
    if query_kept < len(of.query):
        facts.append(f"{query_kept} of {len(of.query)} query tokens kept")
    if of.masked == "zero" and kept < len(of.document):
        facts.append("masked tokens compete with 0")
    if of.normalize:
        facts.append("unit vectors")
    notes = list(of.notes)
    if not kept and of.score == -math.inf:
        notes.append("No token of this document is kept: its score is −∞.")
    if not query_kept:
        notes.append("No query token is kept.")
    if math.isnan(of.score):
        notes.append("The score is not a number: a NaN takes part in it.")
    share = of.share.nan_to_num(0.0)
    largest = max(float(share.abs().max()), 1e-30) if len(share) else 1.0
    rows = []
    for match in of.matches:
        j, i = match.index, match.position
        rows.append(
            Row(
                i,
                of.query.word(i),
                None if j < 0 else _place(of, j),
                _nothing(of, i),
                "" if not of.query_mask[i] else number(match.similarity),
                "" if match.share is None or not of.query_mask[i] else percent(match.share),
                round(100 * abs(float(share[i])) / largest, 2),
            )
        )
    return Hit(
        None if of.name is None else str(of.name),
        number(of.score, 4),
        facts,
        notes,
        [] if grid is not None else cells,
        [] if grid is None else _others(cells, patches),
        of.image,
        None if grid is None else (grid.shape[0], grid.shape[1]),
        rows,
        _masked(of.document_mask),
    )


def _nothing(of: Explanation, i: int) -> str:
    """What is said of a query token that no document token stands against."""
    if of.index[i] >= 0:
        return ""
    if not of.query_mask[i]:
        return "masked"
    return "a masked token" if of.similarity[i] == 0 else "nothing"


def _others(cells: list[Cell], patches: set[int]) -> list[Cell]:
    """Tokens of a page image that are no patches, with spaces between them."""
    found = [cell for cell in cells if cell.tokens and not set(cell.tokens) <= patches]
    return [each for cell in found for each in (cell, Cell(" "))]


def _numbers(of: Explanation) -> dict[str, Any]:
    """For the script. Similarities are bytes: 0 for what takes no part, else from 1, the least, to 255."""
    low, high, shades = _shades(of.similarities)
    if of.masked == "zero":
        shades[:, ~of.document_mask] = 0
    shades[~of.query_mask] = 0
    grid = of.patches
    return {
        "index": of.index.tolist(),
        "nothing": [_nothing(of, i) for i in range(len(of.query))],
        "similarity": [number(x) for x in of.similarity.tolist()],
        "value": [x if math.isfinite(x) else 0.0 for x in of.similarity.tolist()],
        "share": ["" if math.isnan(x) else percent(x) for x in of.share.tolist()],
        "labels": _labels(of.document) if grid is None else [_place(of, j)[1] for j in range(len(of.document))],
        "low": low,
        "high": high,
        "shades": base64.b64encode(shades.numpy().tobytes()).decode(),
        "patches": None
        if grid is None
        else {"rows": grid.shape[0], "columns": grid.shape[1], "tokens": grid.flatten().tolist()},
    }


def _shades(similarities: Tensor) -> tuple[float, float, Tensor]:
    real = similarities.isfinite()
    if not real.any():
        return 0.0, 0.0, torch.zeros(similarities.shape, dtype=torch.uint8, device="cpu")
    low, high = float(similarities[real].min()), float(similarities[real].max())
    scaled = (similarities.double() - low) / max(high - low, 1e-30) * 254 + 1
    shades = torch.where(real, scaled.round().nan_to_num(0.0), 0.0).to(torch.uint8)
    shades[similarities == math.inf] = 255
    return low, high, shades


def _place(of: Explanation, j: int) -> tuple[str, str, str]:
    """A document token in its word; of a patch its row and column, from 1."""
    if of.patches is not None:
        at = (of.patches == j).nonzero().tolist()
        if at:
            return "", f"row {at[0][0] + 1}, column {at[0][1] + 1}", ""
    return of.document.word(j)


def _labels(pieces: Any) -> list[str]:
    return [pieces.label(i) for i in range(len(pieces))]


def _masked(mask: Tensor) -> frozenset[int]:
    return frozenset((~mask).nonzero().flatten().tolist())


def number(value: float, digits: int = 3) -> str:
    """A number for people."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.{digits}g}"
    return text.replace("-", "−")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %".replace("-", "−")
