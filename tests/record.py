"""`--record FOLDER`: what ran, on what, and which tests failed, as JSON, to be committed beside the change it belongs
to."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import torch

from maxsim.bench.records import environment


class Recorder:
    """Counts tests: one that errs in its set-up or tear-down has failed."""

    def __init__(self, folder: str, commit: str | None):
        self.folder, self.commit = pathlib.Path(folder), commit
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            known = self.outcomes.get(report.nodeid)
            self.outcomes[report.nodeid] = "failed" if "failed" in (known, report.outcome) else report.outcome

    def pytest_sessionfinish(self) -> None:
        found = list(self.outcomes.values())
        counts: dict[str, object] = {name: found.count(name) for name in ("passed", "failed", "skipped")}
        if counts["failed"]:
            counts["failures"] = sorted(name for name, outcome in self.outcomes.items() if outcome == "failed")
        place = environment("cuda" if torch.cuda.is_available() else "cpu", self.commit)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{place.date}-{place.card}-tests.json"
        path.write_text(json.dumps(counts | dataclasses.asdict(place)) + "\n")
