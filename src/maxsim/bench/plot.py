"""The outcomes of a run as bars: how much of the machine's limit each contender reaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .run import Outcome
from .table import is_ours


def draw(outcomes: Sequence[Outcome], path: Path) -> Path:
    """One panel a case: a bar for each contender that has a time, the fastest above, as long as its share of the limit,
    with its milliseconds. Written to `path` (.png or .svg)."""
    from matplotlib.figure import Figure

    shown = [outcome for outcome in outcomes if any(row.timing for row in outcome.rows)]
    bars = [sum(row.timing is not None for row in outcome.rows) for outcome in shown]
    height = sum(0.34 * count + 0.75 for count in bars) + 0.4
    figure = Figure(figsize=(9, max(2.0, height)), layout="constrained")
    panels: Any = figure.subplots(max(1, len(shown)), 1, squeeze=False, height_ratios=bars or [1])
    for panel, outcome in zip(panels[:, 0], shown, strict=False):
        timed = [(row, row.timing.median_ms) for row in outcome.rows if row.timing]
        timed.sort(key=lambda pair: -pair[1])
        floor, limit = outcome.floor_ms
        shares = [100 * floor / median for _, median in timed]
        colours = ["#1f6f8b" if is_ours(row) else "#b0b0b0" for row, _ in timed]
        panel.barh([row.contender for row, _ in timed], shares, color=colours)
        for place, ((_, median), share) in enumerate(zip(timed, shares, strict=True)):
            panel.text(share, place, f" {median:.4g} ms", va="center", fontsize=8)
        panel.axvline(100, color="black", linewidth=0.8)
        panel.set_xlim(0, max(118.0, 1.18 * max(shares)))
        panel.set_title(f"{outcome.case.name}: % of the limit ({limit}, {floor:.4g} ms)", fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return path
