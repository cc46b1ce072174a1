"""Which home a corpus gets: the one asked for, or the first that has room."""

from __future__ import annotations

from pathlib import Path

import torch

from ..corpus import Selection, Snapshot
from .homes import Home, Resident
from .streaming import Streamed

HOMES = ("device", "pinned", "mapped")
OF_DEVICE = 0.8  # of the free memory of a GPU: scores, winners and documents yet to come need some
OF_HOST = 0.6  # of the host's available memory


def home_of(name: str | None, device: torch.device, shard: tuple[int, int], snapshot: Snapshot) -> Home:
    """The home, with tokens on the device if they live there.

    Raises:
        ValueError: another name, or "pinned" without a GPU.
    """
    if name is not None and name not in HOMES:
        raise ValueError(f"home must be one of {', '.join(map(repr, HOMES))}, got {name!r}")
    if device.type == "cpu" and name == "pinned":
        raise ValueError('home "pinned" is for a GPU, which copies from there: on the CPU take "mapped"')
    if name is None:
        name = "mapped" if device.type == "cpu" else _first_with_room(device, shard, snapshot)
    if name == "device":
        resident = Resident(device, shard)
        resident.load(Selection(snapshot, [], 0))
        return resident
    return Home(device, shard) if device.type == "cpu" else Streamed(device, shard, name == "pinned")


def check_shard(shard: object) -> tuple[int, int]:
    """Raises ValueError for anything but (rank, size) with 0 <= rank < size."""
    whole = isinstance(shard, tuple) and len(shard) == 2 and all(type(each) is int for each in shard)
    if not whole or not 0 <= shard[0] < shard[1]:  # type: ignore[index]
        raise ValueError(f"shard must be (rank, size) with 0 <= rank < size, got {shard!r}")
    return shard  # type: ignore[return-value]


def _first_with_room(device: torch.device, shard: tuple[int, int], snapshot: Snapshot) -> str:
    size = bytes_of(snapshot, Home(device, shard))
    if size <= OF_DEVICE * torch.cuda.mem_get_info(device)[0]:
        return "device"
    return "pinned" if size <= OF_HOST * _available() else "mapped"


def bytes_of(snapshot: Snapshot, home: Home) -> int:
    """Of what a search reads, float copies beside codes left out."""
    records = [segment.record for segment in snapshot.segments if home.owns(segment)]
    kept = {name: shape for name, shape in snapshot.coding.of_tokens().items() if name != "exact"} if records else {}
    row = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in kept.values())
    return sum(row * record.tokens + 32 * record.documents for record in records)


def _available() -> int:
    """Bytes of the host's memory that can be had; 0 where that is not known."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0
