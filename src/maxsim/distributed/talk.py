"""What ranks say to each other: small tables of facts, errors that reach every rank, and flat tensors in whole.

Facts come with a flag, so that a rank that fails takes the others out with its message in place of leaving them
waiting. Only `torch.distributed` and raw tensors here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FACTS = 17  # numbers that a rank tells at once, its flag, step and call included
_CALLS = count(1)
_MESSAGE = 1024  # bytes of an error's text
LOOK = timedelta(seconds=1)  # how often a rank that waits looks whether others go on
BROKEN = "maxsim.distributed/broken"  # where a rank says that its connection to another is


class Step(IntEnum):
    """Where in a call ranks speak to each other."""

    ARGUMENTS = 1
    READY = 2
    SCORED = 3
    BACKWARD = 4
    GRADIENTS = 5
    MEAN = 6
    OFFSET = 7
    OPENED = 8
    SEARCH = 9
    FOUND = 10
    NAMED = 11


class RankError(RuntimeError):
    """Another rank failed, with its message, or is at another step."""


class Talk:
    """A process group as one of its ranks sees it.

    Args:
        group: a group of `torch.distributed`; None is the default one.
        device: where this rank's documents are (None: unknown, since its arguments are wrong).

    Raises:
        ValueError: the process does not belong to the group.
    """

    def __init__(self, group: Any, device: torch.device | None):
        group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group given")
        # a graph that waits for its backward must not keep a destroyed group: threads of gloo that live until Python
        # ends may abort the process there
        self._group = weakref.ref(group)
        config = dist.distributed_c10d.get_backend_config(group)
        self.devices = [pair.split(":")[0] for pair in config.split(",")]
        # facts go by the host where the group has a backend for it: nothing waits for a GPU then
        if "cpu" in self.devices:
            self._device = torch.device("cpu")
        elif device is not None and device.type in self.devices:
            self._device = device
        else:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._call: int | None = None  # which call this is: rank 0's number of it, from the first exchange on

    @property
    def group(self) -> Any:
        """
        Raises:
            RuntimeError: it was destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def agree(self, step: Step, facts: Sequence[int] = (), error: Exception | None = None) -> list[list[int]]:
        """Every rank's facts, in rank order. `step`: which exchange this is, the same on all ranks.

        Raises:
            the error given; RankError with the text of another rank's, or where ranks are not at the same step of
            the same call.
        """
        call = next(_CALLS) if self._call is None else self._call
        row = [int(error is not None), step, call, *facts]
        row += [0] * (_FACTS - len(row))
        try:
            table = self.rows(torch.tensor(row, device="cpu")).tolist()
            failed = [rank for rank, (flag, *_) in enumerate(table) if flag]
            texts = self.rows(_written(error)) if failed else None
        except Exception as broken:
            if error is not None:
                raise error from broken
            why = " ".join(str(broken).split())
            raise RankError(f"maxsim.distributed: another rank has ended, or cannot be reached: {why}") from broken
        if error is not None:
            raise error
        if texts is not None:
            said = [f"rank {rank} of {self.size} failed: {_read(texts[rank])}" for rank in failed]
            raise RankError(f"maxsim.distributed: {'; '.join(said)}")
        steps = [other for _, other, *_ in table]
        calls = {other for _, _, other, *_ in table}
        if self._call is None:
            self._call, calls = table[0][2], {0}
        if len(set(steps)) > 1 or len(calls) > 1:
            at = ", ".join(Step(step).name.lower() for step in steps) + (
                " of different calls" if len(calls) > 1 else ""
            )
            raise RankError(
                "maxsim.distributed: ranks are not at the same step: all must make the same calls, and run their "
                f"backwards, in the same order (steps by rank: {at})"
            )
        return [row[3 : 3 + len(facts)] for row in table]

    def rows(self, own: Tensor) -> Tensor:
        """A flat tensor of each rank, all of one size, as rows on the CPU.

        Raises:
            RuntimeError: a rank has ended: this one's connection to it is broken, or another rank has said so.
        """
        own = own.to(self._device)
        table = own.new_empty(self.size * own.numel())
        if self._device.type == "cpu":
            self._wait(_all_gather(table, own, self.group, async_op=True))
        else:
            _all_gather(table, own, self.group)
        return table.view(self.size, -1).cpu()

    def _wait(self, work: Any) -> None:
        """For an exchange; a rank that waits for one that waits for one that has ended would do so until the group's
        timeout, and looks now and then whether anyone has met a broken connection."""
        store, broken = dist.distributed_c10d._get_default_store(), f"{BROKEN}/{self.group.group_name}"
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    try:
                        work.wait()  # it may have succeeded since
                        return
                    except RuntimeError:
                        store.set(broken, str(self.rank))
                        raise
                if store.check([broken]):
                    said = store.get(broken).decode()
                    raise RuntimeError(f"rank {said} has lost its connection to another") from None

    @contextmanager
    def together(self, step: Step) -> Iterator[None]:
        """What is done inside has succeeded on all ranks, or raises on all of them."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        self.agree(step, error=failure)

    def gather(self, own: Tensor, sizes: Sequence[int], whole: Tensor) -> None:
        """The flat tensors of all ranks, one after another in `whole`; rank r's has `sizes[r]` elements."""
        if not whole.numel():
            return
        if len(set(sizes)) == 1:
            _all_gather(whole.view(torch.uint8), own.view(torch.uint8), self.group)
            return
        works = []
        for rank, part in enumerate(torch.split(whole, list(sizes))):
            if rank == self.rank:
                part.copy_(own)
            if part.numel():
                root = dist.get_global_rank(self.group, rank)
                works.append(dist.broadcast(part.view(torch.uint8), root, self.group, async_op=True))
        for work in works:
            work.wait()

    def scatter(self, whole: Tensor, sizes: Sequence[int], out: Tensor) -> None:
        """Part r of `whole`, of `sizes[r]` elements, goes to rank r; `out` `[size, sizes[rank]]` is what came."""
        dist.all_to_all_single(out.view(-1), whole, [sizes[self.rank]] * self.size, list(sizes), group=self.group)

    @staticmethod
    def nothing(own: Tensor) -> Tensor:
        """What is sent, and what comes, in place of tensors without elements."""
        return own.new_zeros(2, dtype=torch.uint8)

    def shift(self, own: Tensor, arrival: Tensor, nothing: Tensor) -> Shift:
        """Starts sending a flat tensor to the next rank while the previous rank's comes. Allocates nothing."""
        return Shift(self, own, arrival, nothing)


class Shift:
    """A transfer around the ring under way; `wait` before what it moves is touched."""

    def __init__(self, talk: Talk, own: Tensor, arrival: Tensor, nothing: Tensor):
        # a first transfer must be one of all ranks (NCCL), so nothing is sent as one byte
        self._arrival = arrival
        self._held = [
            x.view(torch.uint8) if x.numel() else byte
            for x, byte in zip((own, arrival), torch.split(nothing, 1), strict=True)
        ]
        after, before = ((talk.rank + step) % talk.size for step in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._held[0], dist.get_global_rank(talk.group, after), talk.group),
                dist.P2POp(dist.irecv, self._held[1], dist.get_global_rank(talk.group, before), talk.group),
            ]
        )

    def wait(self) -> Tensor:
        """What has come."""
        for work in self._works:
            work.wait()
        return self._arrival


def _all_gather(whole: Tensor, own: Tensor, group: Any, async_op: bool = False) -> Any:
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the new name, and the old
    return collective(whole, own, group=group, async_op=async_op)


def _written(error: Exception | None) -> Tensor:
    text = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_MESSAGE]
    return torch.tensor([*text.ljust(_MESSAGE, b"\0")], dtype=torch.uint8, device="cpu")


def _read(text: Tensor) -> str:
    return bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
