"""Figure 2 of Flash-MaxSim (arXiv 2605.29517) on this card: latency and peak memory of 1×1024 against B×1024, for
growing B, each contender until it can no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .cases import Case, parse
from .records import Record

SIZES = (100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
CONTENDERS = ("maxsim", "naive", "matched", "flash-maxsim", "late-interaction-kernels")
TOKENS, WIDTH = 1024, 128
RESERVE = 8 << 30  # bytes of a card for the limits, the truth and what is made on the way
MOST_ON_A_CPU = 500
# Colours that colour-blind readers can tell apart (Okabe and Ito), and markers for lines that hide each other.
STYLES: dict[str, dict[str, Any]] = {
    "maxsim": {"color": "#D55E00", "marker": "o", "linewidth": 2.5},
    "naive": {"color": "#999999", "marker": "s"},
    "matched": {"color": "#555555", "marker": "D"},
    "flash-maxsim": {"color": "#0072B2", "marker": "^", "linestyle": "--"},
    "late-interaction-kernels": {"color": "#009E73", "marker": "v", "linestyle": ":"},
}


def cases(device: torch.device) -> list[Case]:
    """From 100 documents to the most that fit."""
    most = MOST_ON_A_CPU
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        most = max(SIZES[0], (free - RESERVE) // (2 * TOKENS * WIDTH) // 1000 * 1000)
    sizes = [size for size in SIZES if size < most]
    return [Case(1, TOKENS, size, TOKENS, WIDTH, "float16") for size in [*sizes, most]]


def stopped(case: Case, later: Sequence[Case], failed: Sequence[str]) -> list[str]:
    """What to leave out of larger cases: CASE=CONTENDER for all that failed in this one."""
    return [f"{larger.name}={name}" for larger in later if larger.ND > case.ND for name in failed]


def draw(records: Sequence[Record], stem: Path) -> list[Path]:
    """Draws a record's rows to `stem` + .png and .svg, and says where. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels: Any = figure.subplots(1, 2)
    for panel, key, title in (
        (panels[0], "median_ms", "Latency, ms"),
        (panels[1], "peak_mib", "Peak memory beyond the inputs, MiB"),
    ):
        for name in dict.fromkeys(row.contender for row in records):
            points = _points(records, name, key)
            if points:
                panel.plot(*zip(*points, strict=True), markersize=5, label=name, **STYLES.get(name, {}))
        panel.set(xscale="log", yscale="log", xlabel="documents of 1,024 tokens", title=title)
        panel.grid(visible=True, which="major", alpha=0.3)
    panels[0].legend(frameon=False)
    row = records[0]
    figure.suptitle(f"One query of {TOKENS:,} tokens, D = {WIDTH}, float16")
    figure.supxlabel(
        f"{row.card}, torch {row.torch}, triton {row.triton}, kernels {row.kernels}, {row.date}; "
        "every score checked against float64; a line ends where its contender fails",
        fontsize=8,
    )
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _points(records: Sequence[Record], name: str, key: str) -> list[tuple[int, float]]:
    rows = [(parse(row.case).ND, getattr(row, key)) for row in records if row.contender == name]
    return sorted((size, value) for size, value in rows if value)
