"""Processes that form a group and run the functions they are sent, so that tests pay for starting them once."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 60.0  # seconds for one function; a hang fails, it does not last


class Ranks:
    """`size` processes in one `torch.distributed` group. `run` sends all of them a function of a test module."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self._folder = size, tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        where = f"file://{pathlib.Path(self._folder.name, 'group')}"
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, backend, where, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, dead: tuple[int, ...] = ()) -> list[Any]:
        """What the function returned on each rank. AssertionError with every rank's traceback where one raised.

        dead: ranks expected to end their process in it; their result is None.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        results, wrong, end = [], [], time.monotonic() + TIMEOUT
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                wrong.append(f"rank {rank}: no answer after {TIMEOUT} s")
                continue
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = rank in dead, None if rank in dead else "the process died"
            results.append(value)
            if not good:
                wrong.append(f"rank {rank}: {value}")
        if any("no answer" in each for each in wrong):
            self.close()
        assert not wrong, "\n".join(wrong)
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, backend: str, where: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)  # at once: nobody waits for what PyTorch tidies up
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
