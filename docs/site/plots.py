"""The plots of the site, drawn from benchmarks/records at every build, so that they cannot say anything else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from tables import conditions, figures, latest, title

from maxsim.bench import figure2
from maxsim.bench.cases import parse
from maxsim.bench.records import Record, read

INK = "#010203"  # stands for the page's own colour of text, in light and in dark
# Okabe and Ito's, which colour-blind readers can tell apart
COLOURS = {"ours": "#D55E00", "portable": "#E69F00", "naive": "#888888", "FM": "#0072B2", "LIK": "#009E73"}
NAMES = {
    "maxsim": ("maxsim", "ours"),
    "maxsim:triton": ("maxsim, portable", "portable"),
    "maxsim-high": ("maxsim, high", "portable"),
    "maxsim-float": ("maxsim, float16", "portable"),
    "naive": ("naive", "naive"),
    "naive-high": ("naive, high", "naive"),
    "flash-maxsim": ("flash-maxsim", "FM"),
    "flash-maxsim-int8": ("flash-maxsim, int8", "FM"),
    "late-interaction-kernels": ("late-interaction-kernels", "LIK"),
    "late-interaction-kernels-lowmem": ("late-interaction-kernels, lowmem", "LIK"),
    "numpy": ("numpy", "LIK"),
    "maxsim-cpu": ("maxsim-cpu", "FM"),
    "matmul": ("matmul alone", "portable"),
}
STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # text stays text
}
FORWARD = (
    "1x1024-5000x1024-d128-float16",
    "128x32-10000x300-d128-float16",
    "128x32-20000x97-d128-float16-ragged",
    "1x32-10000x300-d128-float16",
)
FLOAT32 = ("1x1024-500x1024-d128-float32", "1x32-5000x300-d128-float32")


def draw(records: Path, folder: Path) -> None:
    """Draws every plot to a file of `folder`, which is made."""
    folder.mkdir()
    files = latest(records)

    def rows(name: str) -> list[Record]:
        return read(files[name])

    _bars(rows("h200-forward"), FORWARD, folder / "forward.svg")
    _bars(rows("h200-forward"), FLOAT32, folder / "float32.svg", error=True)
    _bars(rows("h200-codes"), tuple(dict.fromkeys(row.case for row in rows("h200-codes"))), folder / "codes.svg")
    cpus = rows("amd-epyc-cpu")
    _bars(cpus, tuple(dict.fromkeys(row.case for row in cpus)), folder / "cpu.svg")
    _training([*rows("h200-training"), *rows("h200-training-peers")], folder / "training.svg")
    _quality(files["amd-epyc-quality"], folder / "quality.svg")
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "figure2"}):
        for path in figure2.draw(rows("h200-figure2"), folder / "figure2"):
            if path.suffix == ".png":
                path.unlink()
    _theme(folder / "figure2.svg")


def _bars(records: Sequence[Record], cases: Sequence[str], path: Path, error: bool = False) -> None:
    """A panel a case: a bar for each contender that gave right scores, its milliseconds, the fastest above."""
    shown = [
        [row for row in records if row.case == case and row.median_ms and row.contender in NAMES] for case in cases
    ]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": path.stem}):
        heights = [len(rows) for rows in shown]
        figure = Figure(figsize=(8.6, sum(0.27 * count + 0.62 for count in heights) + 0.3), layout="constrained")
        panels: Any = figure.subplots(len(shown), 1, squeeze=False, height_ratios=[n + 1 for n in heights])
        for panel, rows in zip(panels[:, 0], shown, strict=True):
            rows.sort(key=lambda row: -(row.median_ms or 0))
            longest = rows[0].median_ms or 0
            for place, row in enumerate(rows):
                colour = NAMES[row.contender][1]
                panel.barh(place, row.median_ms, color=COLOURS[colour], height=0.72)
                beside = f"{figures(row.median_ms or 0)} ms"
                if error:
                    beside += f",  largest error {row.max_error:.1e}"
                _label(panel, row.median_ms, place, beside, 9)
            panel.set_yticks(range(len(rows)), [NAMES[row.contender][0] for row in rows])
            panel.set_xlim(0, longest * (1.5 if error else 1.14))
            panel.set_xticks([])
            panel.tick_params(length=0)
            panel.spines[["bottom", "left"]].set_visible(False)
            panel.set_title(title(rows[0].case), fontsize=10, loc="left", fontweight="bold")
        figure.supxlabel(f"{conditions([row for rows in shown for row in rows])}; medians", fontsize=8)
        figure.savefig(path, metadata={"Date": None})
    _theme(path)


def _label(panel: Any, x: float, y: float, text: str, size: float) -> None:
    """Beside the end of a bar."""
    panel.annotate(text, (x, y), (3, 0), textcoords="offset points", va="center", fontsize=size)


def _training(records: Sequence[Record], path: Path) -> None:
    """Forward and both gradients: time beside memory, a group of bars a case, on logarithmic scales."""
    cases = list(dict.fromkeys(row.case for row in records if "candidates" not in row.case))
    contenders = ("maxsim", "late-interaction-kernels-lowmem", "late-interaction-kernels", "flash-maxsim", "naive")
    colours = ("#D55E00", "#009E73", "#56B4E9", "#0072B2", "#888888")
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": path.stem}):
        figure = Figure(figsize=(9.4, 6.4), layout="constrained")
        panels: Any = figure.subplots(1, 2, sharey=True)
        for panel, key, what in ((panels[0], "median_ms", "ms"), (panels[1], "peak_mib", "MiB beyond the inputs")):
            for n, contender in enumerate(contenders):
                first = {row.case: row for row in reversed(records) if row.contender == contender}
                points = [(place, getattr(first[case], key)) for place, case in enumerate(cases) if case in first]
                ys = [place + 0.16 * (n - 2) for place, _ in points]
                panel.barh(ys, [value for _, value in points], height=0.15, color=colours[n], label=contender)
                for y, (_, value) in zip(ys, points, strict=True):
                    _label(panel, value, y, figures(value), 7.5)
            panel.set(xscale="log", title=what)
            low, high = panel.get_xlim()
            panel.set_xlim(low, high * 2)
            panel.grid(visible=True, axis="x", alpha=0.25)
        names = [parse(case) for case in cases]
        panels[0].set_yticks(range(len(cases)), [f"{c.NQ}×{c.LQ} against {c.ND}×{c.LD}" for c in names])
        panels[0].invert_yaxis()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        figure.supxlabel(f"bfloat16; {conditions(records)}; medians", fontsize=8)
        figure.savefig(path, metadata={"Date": None})
    _theme(path)


def _quality(path: Path, target: Path) -> None:
    """What a codec keeps of the 20 best documents, over its bytes a dimension, a line a collection."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {
        "int8": ("int8", "o"),
        "fp8": ("fp8", "s"),
        "residual": ("residual, 4, 2 and 1 bits", "^"),
        "pq": ("pq", "v"),
    }
    collections = {
        "faq": "building-law FAQ, D = 384",
        "attack": "ATT&CK, D = 384",
        "fitz-gov": "fitz-gov, D = 384",
        "fitz-gov-128": "fitz-gov, D = 128",
        "wiki-128": "Wikipedia, D = 128",
    }
    colours = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": target.stem}):
        figure = Figure(figsize=(8.6, 4.2), layout="constrained")
        panel: Any = figure.subplots()
        for (collection, name), colour in zip(collections.items(), colours, strict=True):
            for kind, (_, marker) in kinds.items():
                points = [
                    (row["bytes_a_token"] / row["width"], row["same_of_20"])
                    for row in rows
                    if row["collection"] == collection
                    and row["contender"].split("-")[0] == kind
                    and not row["contender"].endswith(("token", "group64", "group32"))
                ]
                panel.plot(
                    *zip(*sorted(points), strict=True), marker=marker, color=colour, linewidth=1
                ) if points else None
            panel.plot([], [], color=colour, label=name)
        for name, marker in kinds.values():
            panel.plot([], [], marker=marker, linestyle="", color=INK, label=name)
        panel.set(xscale="log", xlabel="bytes a dimension", ylabel="of the 20 best documents", ylim=(13.5, 20.3))
        panel.set_xticks([1 / 24, 1 / 12, 1 / 8, 1 / 4, 1 / 2, 1], ["1/24", "1/12", "1/8", "1/4", "1/2", "1"])
        panel.set_xticks([], minor=True)
        panel.grid(visible=True, alpha=0.25)
        panel.legend(frameon=False, ncols=2, loc="lower right")
        first = rows[0]
        figure.supxlabel(
            f"{first['card']}, torch {first['torch']}, kernels {first['kernels']}, {first['date']}", fontsize=8
        )
        figure.savefig(target, metadata={"Date": None})
    _theme(target)


def _theme(path: Path) -> None:
    """Text and axes in the colour of the page's own text; as wide as there is room."""
    svg = path.read_text().replace(INK, "currentColor").replace("#555555", "currentColor")
    path.write_text(svg.replace("<svg ", '<svg class="plot" ', 1))
