"""Honest timing: named cases, contenders in turns, answers checked and the machine's limits measured in the same run.

`main` is the command line; `run_case` measures one case; `records` says what is kept. `import maxsim` leaves it alone.
"""

from .cases import SUITES, Case, parse
from .cli import main
from .records import Environment, Record, environment, kernels_hash
from .run import CONTENDERS, Outcome, run_case

__all__ = [
    "CONTENDERS",
    "SUITES",
    "Case",
    "Environment",
    "Outcome",
    "Record",
    "environment",
    "kernels_hash",
    "main",
    "parse",
    "run_case",
]
