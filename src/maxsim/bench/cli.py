"""`maxsim bench`, `python -m benchmarks` and `python -m maxsim.bench`: arguments in, tables out, records kept."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from ..devices import device_of
from . import figure2, plot
from .cases import CODECS, DTYPES, SUITES, Case, described, parse
from .ceilings import Ceilings
from .records import environment, read, write
from .run import CONTENDERS, SUITE_CONTENDERS, Outcome, Poisoned, contender, default_contenders, run_case
from .table import case_table, summary

FIGURE2 = "figure2"
OWN_HELP = {
    "ragged": "documents of different lengths, packed",
    "masked": "padded queries and documents of different lengths, with masks",
    "winners": "which token won, not only scores",
    "pairs": "query i with document i only",
    "candidates": "as many documents of each query's own",
    "train": "the gradients of both sides too",
}
MOST_FLOP_ON_A_CPU = 1e11  # of a suite's case: about a second a call, and the truth takes many


def _parser(program: str = "python -m maxsim.bench") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Times maxsim beside its contenders and the machine's own limits, and checks every answer.",
        epilog=f"contenders: {', '.join(CONTENDERS)}; maxsim:BACKEND forces a backend of ours",
    )
    suites = ", ".join(SUITES)
    parser.add_argument(
        "what",
        nargs="*",
        help=f"suites ({suites}; on a CPU only cpu and host) or cases such as 1x32-100x300-d128-float16; without any, "
        "forward where there is a CUDA GPU and cpu where there is none; figure2, by itself, draws latency and memory "
        "over the number of documents",
    )
    own = parser.add_argument_group("a problem of your own")
    own.add_argument("--queries", metavar="COUNTxTOKENS", help="such as 128x32; with --documents, in place of names")
    own.add_argument("--documents", metavar="COUNTxTOKENS", help="such as 10000x300; of ragged ones the mean length")
    own.add_argument("--dim", type=int, default=128, help="width of a token (128)")
    kinds = ", ".join(DTYPES + CODECS)
    own.add_argument("--dtype", default="float16", help=f"{kinds}; of codes the queries are float16")
    for flag in ("ragged", "masked", "winners", "pairs", "candidates", "train"):
        own.add_argument(f"--{flag}", action="store_true", help=OWN_HELP[flag])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the times as well (.png or .svg)")
    parser.add_argument("--contenders", help="names separated by commas instead of the usual ones of each case")
    parser.add_argument("--seconds", type=float, help="time for one case (2; 8 on a CPU), compilation not counted")
    parser.add_argument("--device", help="cuda or cpu (cuda where there is one, but the cpu suite runs on the CPU)")
    parser.add_argument("--threads", type=int, help="CPU threads (those PyTorch takes)")
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--commit", help="for the record, where the tree has no history")
    parser.add_argument("--skip", action="append", default=[], metavar="CASE=CONTENDER", help="leave this one out")
    parser.add_argument("--append", action="store_true", help="add to a record of the same day")
    parser.add_argument("--as", dest="label", help="last part of the record's name (the suite's or the case's)")
    parser.add_argument("--no-isolation", action="store_true", help="run contenders that may crash in this process too")
    return parser


def cases_of(what: Sequence[str]) -> list[Case]:
    """Suites and case names, in order, each case once. ValueError for a name that is neither."""
    cases: dict[str, Case] = {}
    for name in what:
        for case in SUITES[name] if name in SUITES else (parse(name),):
            cases.setdefault(case.name, case)
    return list(cases.values())


def _own(options: argparse.Namespace) -> Case:
    flags = {flag: True for flag in OWN_HELP if getattr(options, flag)}
    return described(options.queries, options.documents, options.dim, options.dtype, **flags)


def too_large(what: Sequence[str]) -> str | None:
    """The first suite among `what` that holds a case too large for a CPU."""
    for name in what:
        if any(case.flop > MOST_FLOP_ON_A_CPU for case in SUITES.get(name, ())):
            return f"the suite {name}"
    return None


@contextmanager
def steps(what: str) -> Iterator[Callable[[str], None]]:
    """Tells the steps of long work on the standard error: in one line of a terminal, elsewhere a line each."""
    terminal = sys.stderr.isatty()

    def tell(step: str) -> None:
        line = f"{what}: {step}"
        print(
            f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}" if terminal else line,
            end="" if terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    try:
        yield tell
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None, out: Path | None = None, program: str = "python -m maxsim.bench") -> int:
    """Runs the command line. `out`: where records go unless told; None keeps none. `program`: what usage calls it."""
    parser = _parser(program)
    options = parser.parse_args(argv)
    here = "forward" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    own = options.queries is not None or options.documents is not None
    if own and (options.what or options.queries is None or options.documents is None):
        parser.error("a problem of your own takes --queries and --documents, and no names")
    options.what = options.what or ([] if own else [here])
    drawn = options.what == [FIGURE2]
    if options.plot is not None and options.plot.suffix not in (".png", ".svg"):
        parser.error(f"--plot writes .png or .svg, got {options.plot.name}")
    if options.plot is not None and not options.plot.parent.is_dir():
        parser.error(f"no folder {options.plot.parent} for the plot")
    if (drawn or options.plot) and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"{'figure2' if drawn else '--plot'} needs matplotlib: pip install matplotlib")
    try:
        cases = [_own(options)] if own else [] if drawn else cases_of(options.what)
        chosen = options.contenders.split(",") if options.contenders else [*figure2.CONTENDERS] if drawn else None
        for name in chosen or ():
            contender(name)
    except ValueError as error:
        parser.error(str(error))
    on_cpu = not torch.cuda.is_available() or (bool(options.what) and all(name == "cpu" for name in options.what))
    try:
        device = device_of(options.device or ("cpu" if on_cpu else "cuda"))
    except ValueError as error:
        parser.exit(2, f"{program}: --device: {error}\n")
    if device.type == "cpu" and (large := too_large(options.what)):
        parser.exit(
            2,
            f"{program}: {large} is meant for a GPU and would take very long on this CPU; take the suite cpu, or name "
            "a case by itself to have it all the same\n",
        )
    for what in ("seconds", "threads"):
        if (given := getattr(options, what)) is not None and given <= 0:
            parser.error(f"--{what} must be more than 0, got {given:g}")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("highest")
    if drawn:
        cases = figure2.cases(device)
        options.contenders = ",".join(chosen or ())  # for a process that carries on
    elif len(options.what) == 1 and options.what[0] in SUITE_CONTENDERS and not chosen:
        chosen = SUITE_CONTENDERS[options.what[0]]
        options.contenders = ",".join(chosen)
    seconds = options.seconds or (2.0 if device.type == "cuda" else 8.0)
    label = options.label or (options.what[0] if len(options.what) == 1 else "cases")
    folder = options.out or out
    where = environment(device, options.commit)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else f", driver {where.driver}"
    print(f"{where.card}{threads}, torch {where.torch}, triton {where.triton}, kernels {where.kernels}", flush=True)

    several = f"{len(cases)} cases, each for" if len(cases) > 1 else "one case, for"
    print(f"{several} about {seconds:g} s of timing, and what preparing and checking it takes", flush=True)
    outcomes: list[Outcome] = []
    ceilings = Ceilings(device)
    append = options.append
    path: Path | None = None
    for number, case in enumerate(cases):
        names = [
            name for name in chosen or default_contenders(case, device) if f"{case.name}={name}" not in options.skip
        ]
        start = time.perf_counter()
        try:
            with steps(f"{number + 1} of {len(cases)}, {case.name}") as tell:
                outcome = run_case(case, names, seconds, device, ceilings, not options.no_isolation, tell)
        except Poisoned as broken:
            print(f"{case.name}: the device broke under {broken}", flush=True)
            if options.no_isolation:
                return 1
            options.skip.append(f"{case.name}={broken.contender}")
            options.label, options.out, options.append, options.commit = label, folder, append, where.commit
            _carry_on(options, cases[number:])
        outcomes.append(outcome)
        if label == FIGURE2:
            failed = [row.contender for row in outcome.rows if row.timing is None]
            options.skip += figure2.stopped(case, cases[number:], failed)
        print(f"\n{case_table(outcome)}\n  ({time.perf_counter() - start:.0f} s)", flush=True)
        records = outcome.records(where)
        if folder and records:
            path = write(records, folder, label, append)
            append = True
    print(f"\n{summary(outcomes)}")
    if options.plot:
        print(f"\ndrawn: {plot.draw(outcomes, options.plot)}")
    if path:
        print(f"\nrecord: {path}")
        if label == FIGURE2:
            print("drawn:", *figure2.draw(read(path), path.with_suffix("")))
    return 0


def _carry_on(options: argparse.Namespace, cases: Sequence[Case]) -> NoReturn:
    """The rest of the run in a process that replaces this one, whose device is broken and still holds its memory."""
    command = [sys.executable, "-m", "maxsim.bench", *(case.name for case in cases), "--as", options.label]
    for skipped in options.skip:
        command += ["--skip", skipped]
    for name in ("contenders", "seconds", "device", "threads", "out", "commit", "plot"):
        if getattr(options, name) is not None:
            command += [f"--{name}", str(getattr(options, name))]
    command += ["--append"] if options.append else []
    sys.stdout.flush()
    os.execv(sys.executable, command)
