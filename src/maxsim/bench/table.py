"""What a person sees of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .run import Outcome, Row

# header and width, the first column to the left
_CASE = {"contender": 33, "ms": 9, "p20": 9, "p80": 9, "host µs": 9, "MiB": 9, "error": 9}
_CASE |= {"TFLOP/s": 9, "TB/s": 9, "of limit": 9, "× maxsim": 9, "first s": 8}
_SUMMARY = {"case": 46, "maxsim ms": 10, "of limit": 9, "limit": 6, "best peer": 33, "ms": 9, "faster": 8}
_SUMMARY |= {"host µs": 9, "× 3 calls": 10}

THREE_CALLS = "matmul-amax-sum"  # what a host time is compared with


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    first, *rest = [
        f"{cell:<{width}}" if n == 0 else f"{cell:>{width}}"
        for n, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]
    return "".join([first, *rest]).rstrip()


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _figures(value: float) -> str:
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def is_ours(row: Row) -> bool:
    return row.contender.split(":")[0] in ("maxsim", "maxsim-high", "maxsim-medium")


def ours(outcome: Outcome) -> Row | None:
    """The first of ours that has a time."""
    return next((row for row in outcome.rows if is_ours(row) and row.timing), None)


def best_peer(outcome: Outcome) -> Row | None:
    """The fastest right answer of the others; the product alone is a limit, not an answer."""
    rivals = [row for row in outcome.rows if row.timing and row.error is not None and not is_ours(row)]
    return min(rivals, key=lambda row: row.timing.median_ms if row.timing else 0.0, default=None)


def _whole(row: Row) -> bool:
    """Whether a row does the work of its case, and is not one step of a call."""
    return row.error is not None or ":" not in row.contender


def _rates(outcome: Outcome, median: float) -> list[str]:
    share = 100 * outcome.floor_ms[0] / median
    return [f"{outcome.flop / median / 1e9:.3g}", f"{outcome.bytes / median / 1e9:.3g}", f"{share:.1f} %"]


def case_table(outcome: Outcome) -> str:
    """A case: every contender's times, memory, error, rates, share of the limit, and time relative to ours."""
    floor, limit = outcome.floor_ms
    what = "forward " if outcome.case.train else ""
    reference = ours(outcome)
    ceilings = f"gemm {outcome.gemm_tflops:.3g} TFLOP/s, copy {outcome.copy_tbps:.3g} TB/s"
    lines = [
        outcome.case.name,
        f"  {what}{outcome.flop / 1e12:.3g} TFLOP, {outcome.bytes / 1e9:.3g} GB; in this run {ceilings}",
        f"  {what}limit {_figures(floor)} ms ({limit})",
        "  " + _line(_CASE, _CASE.values()),
    ]
    for row in outcome.rows:
        if row.timing is None:
            lines.append(f"  {row.contender:33}   {row.note or 'no time'}")
            continue
        median = row.timing.median_ms
        cells = [
            row.contender,
            *map(_figures, (median, row.timing.p20_ms, row.timing.p80_ms)),
            _number(row.timing.host_us),
            _number(row.peak_mib),
            "–" if row.error is None else f"{row.error:.1e}",
            *(_rates(outcome, median) if _whole(row) else ["–"] * 3),
            _number(median / reference.timing.median_ms if reference and reference.timing else None, 2),
            _number(row.first_s),
        ]
        lines.append("  " + _line(cells, _CASE.values()))
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line a case: ours, its share of the limit, the best of the others, and the host's time beside three calls."""
    lines = [_line(_SUMMARY, _SUMMARY.values())]
    for outcome in outcomes:
        mine, peer = ours(outcome), best_peer(outcome)
        three = next((row.timing for row in outcome.rows if row.contender == THREE_CALLS and row.timing), None)
        floor, limit = outcome.floor_ms
        median = mine.timing.median_ms if mine and mine.timing else None
        rival = peer.timing.median_ms if peer and peer.timing else None
        host = mine.timing.host_us if mine and mine.timing else None
        cells = [
            outcome.case.name,
            "–" if median is None else _figures(median),
            "–" if median is None else f"{100 * floor / median:.1f} %",
            limit,
            peer.contender if peer else "–",
            "–" if rival is None else _figures(rival),
            "–" if median is None or rival is None else f"{rival / median:.2f}×",
            _number(host),
            "" if host is None or three is None or not three.host_us else f"{host / three.host_us:.2f}×",
        ]
        lines.append(_line(cells, _SUMMARY.values()))
    return "\n".join(lines)
