"""A pytest plugin for a framework's own suite: `-p switched_in` with MAXSIM_SWITCH="pylate colpali" turns those on
for the whole run, and its last lines say how often scoring of ours was reached."""

from __future__ import annotations

import importlib
import os

from maxsim.integrations import calls, calls_left

NAMES = os.environ.get("MAXSIM_SWITCH", "").split()


def pytest_configure(config):
    for name in NAMES:
        importlib.import_module(f"maxsim.integrations.{name}").enable()


def pytest_terminal_summary(terminalreporter):
    for what, counts in (("calls", calls()), ("left to the host", calls_left())):
        for name, count in sorted(counts.items()):
            terminalreporter.write_line(f"{what}: {name} {count}")


def pytest_sessionfinish(session, exitstatus):
    reached = {name.split(".")[0] for name in calls()}
    if exitstatus == 0 and not set(NAMES) <= reached:
        session.exitstatus = 1  # green without us says nothing
