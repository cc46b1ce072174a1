"""Work shared between threads in which PyTorch itself stays on one thread.

A matrix product that PyTorch cuts up for its threads has shapes, and perhaps bits, that depend on their number; here
each job is whole, so who runs it changes nothing. The threads are kept: starting one costs more than a small score.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

Job = TypeVar("Job")

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_size = 0


class Scratch:
    """Buffers of one worker, by name, kept for all its jobs of a call."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor; the next `take` of that name may hand out the same memory."""
        count = 1
        for size in shape:
            count *= size
        kept = self._kept.get(name)
        if kept is None or kept.numel() < count or kept.dtype != dtype:
            kept = self._kept[name] = torch.empty(count, dtype=dtype, device="cpu")
        return kept[:count].view(shape)


def run(jobs: Iterable[Job], work: Callable[[Job, Scratch], None], threads: int) -> None:
    """Calls `work(job, scratch)` for each job on up to `threads` threads, and waits. The first error is raised here."""
    queue = deque(jobs)

    def drain() -> None:
        scratch = Scratch()
        with torch.inference_mode():
            while True:
                try:
                    job = queue.popleft()
                except IndexError:
                    return
                work(job, scratch)

    if threads == 1:
        drain()
        return
    futures = list[Future[None]]()
    try:
        with suppress(RuntimeError):  # no thread is to be had: the main one has ended, or there are too many
            pool = _workers(threads)
            for _ in range(min(threads, len(queue))):
                futures.append(pool.submit(drain))
        if not futures:
            _alone(drain)
        for future in futures:
            future.result()
    finally:
        queue.clear()  # after an error or an interrupt the others stop at their next job


def _alone(work: Callable[[], None]) -> None:
    """On this thread, with the bits of others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work()
    finally:
        torch.set_num_threads(before)


def _workers(count: int) -> ThreadPoolExecutor:
    """Raises RuntimeError where a thread cannot be started."""
    global _pool, _size
    with _lock:
        if _pool is None or _size < count:
            pool, ready = ThreadPoolExecutor(count, thread_name_prefix="maxsim"), threading.Barrier(count)
            try:
                for future in [pool.submit(_stay_single, ready) for _ in range(count)]:
                    future.result()
            except RuntimeError:
                ready.abort()  # those that were started wait for the others
                raise
            # the smaller one is not shut down: another thread may be about to use it, and unused it ends by itself
            _pool, _size = pool, count
            # each thread has its own number, but the last one set is also the default of threads yet to come: put that
            # back, from a thread of no account
            keeper = threading.Thread(target=torch.set_num_threads, args=(torch.get_num_threads(),))
            keeper.start()
            keeper.join()
        return _pool


def _stay_single(ready: threading.Barrier) -> None:
    torch.get_num_threads()  # reads the default, which would otherwise overwrite the next line at the first operator
    torch.set_num_threads(1)
    ready.wait()


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _size, _lock
    _pool, _size, _lock = None, 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
