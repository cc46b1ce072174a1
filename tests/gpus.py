"""Processes of pytest-xdist take a machine's GPUs in turn: each sees all of them, another one first."""

from __future__ import annotations

import os
import re
from pathlib import Path


def in_turn(worker: str, visible: str) -> str:
    """What CUDA_VISIBLE_DEVICES is for a worker (`gw3`; "" is no worker)."""
    number, cards = re.fullmatch(r"gw(\d+)", worker), visible.split(",")
    first = int(number[1]) % len(cards) if number else 0
    return ",".join(cards[first:] + cards[:first])


def present() -> str:
    cards = sorted(int(path.name[len("nvidia") :]) for path in Path("/dev").glob("nvidia[0-9]*"))
    return ",".join(map(str, cards))


visible = os.environ.get("CUDA_VISIBLE_DEVICES", present())
if "," in visible:  # before CUDA is first looked at
    os.environ["CUDA_VISIBLE_DEVICES"] = in_turn(os.environ.get("PYTEST_XDIST_WORKER", ""), visible)
