"""What is kept of a run: one JSON line a row, and where and with what it was measured."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Environment:
    """card: its short name (`h200`), or the processor's. kernels: `kernels_hash()`. None where it does not apply."""

    card: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str | None
    kernels: str
    date: str


@dataclass(frozen=True)
class Record:
    """One contender on one case. max_error: as `Truth.error` says; times are None where the result was wrong."""

    case: str
    contender: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    host_us: float | None
    peak_mib: float | None
    max_error: float | None
    gemm_tflops: float | None
    copy_tbps: float | None
    card: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str | None
    kernels: str
    date: str


KEYS = tuple(field.name for field in fields(Record))


def kernels_hash(package: Path = PACKAGE) -> str:
    """What times belong to: 16 hex digits that change with the sources of `kernels`, `backends`, `gpu.py` and
    `autograd.py`."""
    digest = hashlib.sha256()
    sources = [package / "autograd.py", package / "gpu.py"]
    for folder in ("kernels", "backends"):
        sources += (package / folder).rglob("*.py")
    for path in sorted(sources, key=lambda source: source.relative_to(package).as_posix()):
        if path.exists():
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def environment(device: torch.device | str, commit: str | None = None) -> Environment:
    """Where a run takes place. `commit` replaces the one git names, for a copy of the tree without its history."""
    device = torch.device(device)
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return Environment(
        card=card_name(device),
        driver=_output(*query) if device.type == "cuda" else None,
        torch=str(torch.__version__),
        triton=_version("triton"),
        commit=commit or _output("git", "-C", str(PACKAGE), "describe", "--always", "--dirty"),
        kernels=kernels_hash(),
        date=datetime.date.today().isoformat(),
    )


def card_name(device: torch.device) -> str:
    """`h200` for "NVIDIA H200"; the processor's model on a CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    words = re.sub(r"\b(nvidia|geforce|tesla)\b|\(r\)|\(tm\)", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") or device.type


def write(records: Iterable[Any], directory: Path, what: str, append: bool = False) -> Path:
    """Writes `<date>-<card>-<what>.jsonl` in a directory and says where. A second run of a day replaces the first.

    records: dataclasses, or dicts, that hold an `Environment` beside what was measured. ValueError where there is none.
    """
    rows = [each if isinstance(each, dict) else asdict(each) for each in records]
    if not rows:
        raise ValueError("no records to write")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{rows[0]['date']}-{rows[0]['card']}-{what}.jsonl"
    with path.open("a" if append else "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return path


def read(path: Path) -> list[Record]:
    """The records of a file. ValueError for a line with other keys than a record's."""
    records = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if tuple(row) != KEYS:
            raise ValueError(f"{path} holds a line with keys {', '.join(row)}, a record has {', '.join(KEYS)}")
        records.append(Record(**row))
    return records


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """First line of what a command prints; None where it is missing, fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None
