"""`python -m benchmarks.hosts`: scoring inside of frameworks, as installed and with ours switched in; keeps a record.

Shapes are those of the frameworks' users, on token embeddings that are on the device already: reranking, evaluation
over a corpus, and losses with their gradients. A framework's contenders are its own ways of scoring:
sentence-transformers and MTEB have one; "torch", "lik" (late-interaction-kernels) and "flash" (flash-maxsim) are
backends of PyLate and colpali-engine, whose default, `auto`, takes flash (PyLate only) before lik before torch. Ours
come in by the hooks of `maxsim.integrations`, in colpali-engine's losses by `enable()`; cached losses score the batch
in one part with ours, in parts of their default elsewhere.

Errors are relative, in the 2-norm, against the framework's own torch code in float32: the largest of scores, or of a
loss and its gradients. Ours must stay under SCORES, LOSS and GRADIENTS, and be what was called, or the case has no rows
and the run fails; another contender that passes WRONG keeps its error and has no time. A framework that is missing, or
of a version that is not known, is named and skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.host_cases import HOSTS, Case, Made
from maxsim import integrations
from maxsim.bench.records import Record, environment, write
from maxsim.bench.timer import first_call, measure, peak_mib
from maxsim.integrations import IntegrationError

RECORDS = Path(__file__).parent / "records"
SCORES, LOSS, GRADIENTS = 1e-5, 1e-4, 2.0**-5  # a near tie's gradient may go to the other token
WRONG = 2.0**-5, 0.5  # of scores or losses, of gradients: bfloat16 similarities move a third of these


def errors(got: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    return [
        float((mine.to(other).double() - other.double()).norm() / other.double().norm())
        for mine, other in zip(got, right, strict=True)
    ]


def within(found: Sequence[float], scores: float, loss: float, gradients: float) -> bool:
    """Whether errors are allowed; no NaN is."""
    limits = [scores] if len(found) == 1 else [loss, *[gradients] * (len(found) - 1)]
    return all(error <= limit for error, limit in zip(found, limits, strict=True))


def measured(case: Case, host: str, seconds: float, device: torch.device, where: dict[str, Any]) -> list[Record]:
    """A row for each contender, printed too; theirs are called by the framework's name, version and backend."""
    right = case.values(case.right())
    found: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    integrations.reset_calls()
    for name, call in case.calls.items():
        try:
            wrong = errors(case.values(first_call(call, device)[0]), right)
        except Exception as error:  # a backend of theirs can fail in any way
            if name == "maxsim":
                raise
            found[name], notes[name] = None, f"{type(error).__name__}: {error}".split("\n")[0]
            continue
        found[name] = max(wrong)
        if name == "maxsim":
            if set(integrations.calls()) != {case.counts} or integrations.calls_left():
                raise AssertionError(f"{case.name}: not ours: {integrations.calls()}, {integrations.calls_left()}")
            if not within(wrong, SCORES, LOSS, GRADIENTS):
                raise AssertionError(f"{case.name}: errors of {', '.join(f'{error:.1e}' for error in wrong)}")
        elif not within(wrong, WRONG[0], *WRONG):
            notes[name] = "wrong"
    calls = {name: call for name, call in case.calls.items() if name not in notes}
    times, failed = measure(calls, seconds, device)
    notes |= {name: str(error) for name, error in failed.items()}
    peaks = {name: peak_mib(call, device) for name, call in calls.items() if name in times}
    rows = []
    for name in case.calls:
        time, contender = times.get(name), name if name == "maxsim" else f"{host}-{name}".rstrip("-")
        rows.append(
            Record(
                case=f"{host.rsplit('-', 1)[0]}-{case.name}",
                contender=contender,
                median_ms=time.median_ms if time else None,
                p20_ms=time.p20_ms if time else None,
                p80_ms=time.p80_ms if time else None,
                host_us=time.host_us if time else None,
                peak_mib=peaks.get(name),
                max_error=found[name],
                gemm_tflops=None,
                copy_tbps=None,
                **where,
            )
        )
        print(line(rows[-1], notes.get(name, "")), flush=True)
    return rows


def line(row: Record, note: str = "") -> str:
    cells = [
        f"{value:{form}}" if value is not None else "-"
        for value, form in ((row.median_ms, ".3f"), (row.host_us, ".0f"), (row.peak_mib, ".1f"), (row.max_error, ".1e"))
    ]
    return "{:68} {:32}{:>10}{:>10}{:>10}{:>9}  {}".format(row.case, row.contender, *cells, note).rstrip()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times frameworks' scoring, theirs and ours.")
    parser.add_argument("hosts", nargs="*", default=[], help=f"of {', '.join(HOSTS)}; all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="for one case")
    parser.add_argument("--small", action="store_true", help="shapes of seconds on a CPU, to try it")
    parser.add_argument("--out", default=str(RECORDS), help="directory of the record")
    parser.add_argument("--commit", help="for the record, where the tree has no history")
    chosen = parser.parse_args(argv)
    if unknown := set(chosen.hosts) - set(HOSTS):
        parser.error(f"no such host: {', '.join(sorted(unknown))}")
    device = torch.device(chosen.device)
    where = asdict(environment(device, chosen.commit))
    records: list[Record] = []
    failed: list[str] = []
    print(f"{'case':68} {'contender':32}{'ms':>10}{'host µs':>10}{'MiB':>10}{'error':>9}")
    for name in chosen.hosts or HOSTS:
        package, cases = HOSTS[name]
        try:
            with getattr(integrations, name).enable():
                host = f"{package}-{metadata.version(package)}"
        except IntegrationError as error:
            print(f"{name}: skipped, {error}", flush=True)
            continue
        for case in cases(Made(device, chosen.small)):
            try:
                records += measured(case, host, chosen.seconds, device, where)
            except AssertionError as error:
                failed.append(str(error))
                print(error, flush=True)
                continue
            kept = write(records, Path(chosen.out), "hosts")  # after every case: what follows may be stopped
    if records:
        print("record:", kept)
    if failed or not records:
        raise SystemExit("\n".join(failed) or "nothing to measure")


if __name__ == "__main__":
    main()
