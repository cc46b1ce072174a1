"""Tables of the benchmarks' records, made at every build where a page says `<!-- table: NAME -->`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxsim.bench.cases import parse
from maxsim.bench.records import Record, read


@dataclass(frozen=True)
class Table:
    """files: records, whose earlier rows stand where a case and contender come twice. columns: contenders and their
    headings. memory: MiB beside milliseconds."""

    files: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    memory: bool = False


OURS = ("maxsim", "maxsim")
FM, LIK = ("flash-maxsim", "flash-maxsim"), ("late-interaction-kernels", "LIK")
TABLES = {
    "forward": Table(("h200-forward",), (OURS, ("maxsim:triton", "portable"), ("naive", "naive"), FM, LIK)),
    "codes": Table(("h200-codes",), (OURS, ("maxsim-float", "float16"), ("flash-maxsim-int8", "flash-maxsim"))),
    "training": Table(
        ("h200-distillation", "h200-training", "h200-training-peers"),
        (OURS, ("late-interaction-kernels-lowmem", "LIK, lowmem"), LIK, FM, ("naive", "naive")),
        memory=True,
    ),
    "step": Table(
        ("h200-step",),
        (
            ("maxsim-step", "maxsim"),
            ("naive-step", "naive"),
            ("maxsim-cached-step", "maxsim, in parts"),
            ("naive-cached-step", "naive, in parts"),
        ),
        memory=True,
    ),
    "distributed": Table(
        ("h200-distributed-2",),
        (("maxsim-gather", "gather"), ("maxsim-ring", "ring"), ("alone", "alone"), ("naive", "naive")),
        memory=True,
    ),
    "cpu": Table(
        ("amd-epyc-cpu",),
        (
            ("matmul", "matmul alone"),
            OURS,
            ("naive", "einsum"),
            ("numpy", "numpy"),
            ("maxsim-cpu", "maxsim-cpu"),
            ("blocks4", "blocks of 4"),
        ),
    ),
}


def latest(records: Path) -> dict[str, Path]:
    """The records by name without their date, the newest of each."""
    return {path.stem[len("2026-11-30-") :]: path for path in sorted(records.glob("*.jsonl"))}


def conditions(rows: Sequence[Record]) -> str:
    """Where and with what rows were measured."""
    row = rows[0]
    triton = f", triton {row.triton}" if row.driver else ""
    kernels = ", ".join(dict.fromkeys(each.kernels for each in rows))
    return f"{row.card}, torch {row.torch}{triton}, kernels {kernels}, {row.date}"


def title(name: str) -> str:
    """A case in words: 1 × 1,024 tokens against 5,000 × 1,024, float16."""
    case = parse(name)
    kind = {"residual2": "residual, 2 bits", "pq16": "pq, 16 bytes"}.get(case.codec or "", case.codec or case.dtype)
    length = f"{case.LD:,} on average" if case.ragged else f"{case.LD:,}"
    more = "".join(
        f", {word}"
        for flag, word in (("winners", "winners"), ("candidates", "each query's own"), ("train", "gradients"))
        if getattr(case, flag)
    )
    return f"{case.NQ:,} × {case.LQ:,} tokens against {case.ND:,} × {length}, {kind}{more}"


def table(name: str, records: Path) -> str:
    """A table in Markdown, and the conditions below it."""
    chosen, files = TABLES[name], latest(records)
    rows = [row for file in chosen.files for row in read(files[file])]
    cells: dict[tuple[str, str], Record] = {}
    for row in rows:
        cells.setdefault((row.case, row.contender), row)
    headings = " | ".join(heading for _, heading in chosen.columns)
    lines = [f"| | {headings} |", f"|---{'|---' * len(chosen.columns)}|"]
    for case in dict.fromkeys(row.case for row in rows):
        found = [_cell(cells.get((case, key)), chosen.memory) for key, _ in chosen.columns]
        lines.append(f"| {title(case)} | {' | '.join(found)} |")
    unit = "ms, and MiB beyond the inputs" if chosen.memory else "ms"
    named = ", ".join(f"`{files[file].name}`" for file in chosen.files)
    return "\n".join([*lines, "", f"<small>Medians, {unit}. {named}: {conditions(rows)}.</small>"])


def figures(value: float) -> str:
    """Three of them, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def _cell(row: Record | None, memory: bool) -> str:
    if row is None:
        return "–"
    if row.median_ms is None:
        return "out of memory" if row.max_error is None else "wrong scores"
    ms = figures(row.median_ms)
    return f"{ms}, {row.peak_mib:,.0f}" if memory and row.peak_mib is not None else ms
