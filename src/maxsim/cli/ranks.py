"""Processes that `torchrun` started: which of them this is, its device, and its part in one command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import typer

from .errors import device_of

if TYPE_CHECKING:
    import torch

    from ..distributed.talk import Talk


class Rank(NamedTuple):
    """This process: its device, its shard (rank, size), and how it talks to the others, None without any."""

    device: torch.device
    shard: tuple[int, int]
    talk: Talk | None

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside has succeeded on all ranks, or ends all of them, with the message of the one it was."""
        if self.talk is None:
            yield
            return
        from ..distributed.talk import Step

        with self.talk.together(Step.OPENED):
            yield


def started_by_torchrun() -> bool:
    """Whether this is one of several processes."""
    return "MASTER_ADDR" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: str | None) -> Iterator[Rank]:
    """This process among those that `torchrun` started, or alone. "cuda" is its own GPU: that of its local rank."""
    if not started_by_torchrun():
        yield Rank(device_of(device), (0, 1), None)
        return
    import torch
    import torch.distributed as dist

    where = device_of(device)
    if where.type == "cuda":
        if device is not None and ":" in device:
            raise typer.BadParameter(f"each process has its own GPU: give cuda, not {device}", param_hint="--device")
        where = device_of(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(where)
    dist.init_process_group("gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        from ..distributed.talk import Talk

        yield Rank(where, (dist.get_rank(), dist.get_world_size()), Talk(None, where))
    finally:
        dist.destroy_process_group()
