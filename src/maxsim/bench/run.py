"""One case: prepare, check against the truth, time in turns, and say what stopped whom."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from .cases import Case
from .ceilings import Ceilings
from .coded_peers import CODED_PEERS
from .contenders import OURS, Contender, Unavailable, prepare_maxsim
from .host import STEPS
from .inputs import make, work
from .peers import PEERS
from .plain import PLAIN
from .records import Environment, Record, read
from .timer import Call, Timing, first_call, measure, peak_mib
from .truth import allowed, truth

CONTENDERS = {contender.name: contender for contender in (*OURS, *STEPS, *PLAIN, *PEERS, *CODED_PEERS)}
_CHILD_SECONDS = 240


class Poisoned(Exception):
    """A contender broke the device for this process: nothing more can run in it."""

    def __init__(self, contender: str, reason: str):
        super().__init__(f"{contender}: {reason}")
        self.contender = contender


@dataclass(frozen=True)
class Row:
    """A contender's outcome on a case. note: why it has no time, or None."""

    contender: str
    timing: Timing | None = None
    peak_mib: float | None = None
    error: float | None = None
    first_s: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Outcome:
    """flop, bytes: the least a forward does (`inputs.work`)."""

    case: Case
    rows: tuple[Row, ...]
    gemm_tflops: float
    copy_tbps: float
    flop: float
    bytes: float

    @property
    def floor_ms(self) -> tuple[float, str]:
        """The larger of the two limits at this run's ceilings, and which it is."""
        rate = self.gemm_tflops * (2 if self.case.codec in ("int8", "fp8") else 1)  # what tensor cores make of codes
        arithmetic, traffic = self.flop / rate / 1e9, self.bytes / self.copy_tbps / 1e9
        return (arithmetic, "gemm") if arithmetic > traffic else (traffic, "copy")

    def records(self, environment: Environment) -> list[Record]:
        """One for each contender that gave an answer; without times where the answer was wrong."""
        return [
            Record(
                case=self.case.name,
                contender=row.contender,
                median_ms=row.timing.median_ms if row.timing else None,
                p20_ms=row.timing.p20_ms if row.timing else None,
                p80_ms=row.timing.p80_ms if row.timing else None,
                host_us=row.timing.host_us if row.timing else None,
                peak_mib=row.peak_mib if row.timing else None,
                max_error=row.error,
                gemm_tflops=self.gemm_tflops,
                copy_tbps=self.copy_tbps,
                **asdict(environment),
            )
            for row in self.rows
            if row.timing or row.error is not None
        ]


def contender(name: str) -> Contender:
    """By name; `maxsim:triton` is ours with its backend forced."""
    if name.startswith("maxsim:") and name not in CONTENDERS:
        return Contender(
            name, partial(prepare_maxsim, backend=name.split(":", 1)[1]), OURS[0].exact, wrong=OURS[0].wrong
        )
    if name not in CONTENDERS:
        raise ValueError(f"no contender {name!r}; there are {', '.join(CONTENDERS)}, and maxsim:BACKEND")
    return CONTENDERS[name]


# Suites with contenders of their own.
SUITE_CONTENDERS = {
    "host": ["maxsim", *(step.name for step in STEPS), "matmul-amax-sum", "flash-maxsim", "late-interaction-kernels"]
}


def default_contenders(case: Case, device: torch.device) -> list[str]:
    """Ours, and all whose times say something about a case."""
    if case.codec:
        on_gpus = ["maxsim:triton", *(peer.name for peer in CODED_PEERS)]
        return ["maxsim", "maxsim-float", *(on_gpus if device.type == "cuda" else [])]
    if device.type == "cpu":
        return ["maxsim", "matmul", "naive", "numpy", "blocks16", "blocks4", "maxsim-cpu", "numkong"]
    ours, naive = ["maxsim"], ["naive"]
    if case.dtype == "float32":
        ours, naive = [*ours, "maxsim-high", "maxsim-medium"], [*naive, "naive-high", "naive-medium"]
    peers = ["flash-maxsim", "late-interaction-kernels"]
    if case.winners:
        return [*ours, *naive, "matched", *peers]
    if case.train:
        other = ["flash-maxsim-invgrid", "late-interaction-kernels-lowmem", "late-interaction-kernels-unified"]
        return [*ours, *naive, "matched", "compiled", *peers, *other]
    if case.ragged:
        peers.insert(1, "flash-maxsim-persistent")
    small = ["matmul-amax-sum"] if case.NQ * case.LQ * case.ND * case.LD < 2e7 else []
    return [*ours, *naive, "matched", "compiled", "chunked", "loop", *small, *peers]


def run_case(
    case: Case,
    names: Sequence[str],
    seconds: float,
    device: torch.device,
    ceilings: Ceilings,
    isolate: bool = True,
    tell: Callable[[str], None] = lambda step: None,
) -> Outcome:
    """Measures a case for about so many seconds, compilation and the truth not counted. `tell` hears of each step.

    Raises `Poisoned` where a contender broke the device.
    """
    tell("making the tokens")
    inputs = make(case, device)
    tell("finding the right answer in float64")
    right = truth(inputs)
    flop, moved = work(inputs)
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    for name in names:
        player = contender(name)
        tell(f"checking {name}")
        if isolate and player.isolated(case, device.type):
            _release(device)
            rows[name] = _in_child(case, name, seconds, device)
            continue
        try:
            call = player.prepare(inputs)
            result, first_s = first_call(call, device)
            error = right.error(result) if player.scored else None
            amiss = player.wrong(inputs, result, call)
            del result
            peak = peak_mib(call, device)
        except Exception as problem:
            rows[name] = Row(name, note=_reason(problem, name, device))
            continue
        limit = allowed(case, case.dtype in player.exact, player.tf32 and case.dtype == "float32")
        if error is not None and not error <= limit:
            rows[name] = Row(name, error=error, first_s=first_s, note=f"wrong: error {error:.1e}, allowed {limit:.1e}")
            continue
        if amiss is not None:
            rows[name] = Row(name, error=error, first_s=first_s, note=amiss)
            continue
        rows[name] = Row(name, peak_mib=peak, error=error, first_s=first_s)
        calls[name] = call
    del right
    _release(device)
    tell(f"timing {len(calls)} contenders for about {seconds:g} s")
    timings, stopped = measure({**ceilings.calls(), **calls}, seconds, device)
    for name, error_ in stopped.items():
        rows[name] = Row(name, note=_reason(error_, name, device))
    done = []
    for name in names:
        row = rows[name]
        done.append(Row(name, timings[name], row.peak_mib, row.error, row.first_s) if name in timings else row)
    calls.clear()
    _release(device)
    gemm, copy = ceilings.gemm_tflops(timings["gemm"]), ceilings.copy_tbps(timings["copy"])
    return Outcome(case, tuple(done), gemm, copy, flop, moved)


def _reason(problem: Exception, name: str, device: torch.device) -> str:
    """One line for the table. Raises `Poisoned` if the device no longer answers."""
    if isinstance(problem, Unavailable):
        return str(problem)
    text = " ".join(str(problem).split())
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as broken:
            raise Poisoned(name, text[:100]) from broken
    if isinstance(problem, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "out of memory"
    return f"{type(problem).__name__}: {text}"[:110]


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _in_child(case: Case, name: str, seconds: float, device: torch.device) -> Row:
    """A contender that may take its process down, beside the child's own ceilings."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "maxsim.bench", case.name, "--contenders", name, "--no-isolation"]
        command += ["--seconds", str(seconds), "--device", str(device), "--threads", str(torch.get_num_threads())]
        command += ["--out", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            return Row(name, note=f"hung in a process of its own ({_CHILD_SECONDS} s)")
        found = [record for path in Path(folder).glob("*.jsonl") for record in read(path)]
        for record in found:
            if record.contender == name and record.median_ms is not None:
                assert record.p20_ms is not None
                assert record.p80_ms is not None
                timing = Timing(record.median_ms, record.p20_ms, record.p80_ms, 0, record.host_us)
                return Row(name, timing, record.peak_mib, record.max_error)
            if record.contender == name:
                return Row(name, error=record.max_error, note=f"wrong: error {record.max_error:.1e}")
        if done.returncode < 0:
            return Row(name, note=f"crashed its process (signal {-done.returncode})")
        said = [line for line in done.stdout.splitlines() if name in line] or done.stderr.strip().splitlines()
        last = " ".join(said[-1].split()) if said else f"exit status {done.returncode}"
        if last.startswith(f"{name} not installed"):
            return Row(name, note=last.removeprefix(f"{name} "))
        return Row(name, note=f"in a process of its own: {last}"[:140])
