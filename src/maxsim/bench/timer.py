"""Clocks: contenders take turns in one process, caches are cold, medians are reported, host time is measured apart."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

MOST = 300  # samples of a contender
_FLUSH_BYTES = 256 * 2**20  # several times the L2 of any card
_CYCLES_PER_US = 2000  # of the GPU's clock, about
_PAUSE_S = 0.01  # on a CPU: threads of the previous contender's runtime spin for a while before they sleep


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call; `host_us`: microseconds until the call returned, its work queued (a GPU's only)."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    host_us: float | None = None


def quantile(values: list[float], share: float) -> float:
    """A value of the list, not one between two."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timing(samples_ms: list[float], host_us: list[float] | None = None) -> Timing:
    return Timing(
        quantile(samples_ms, 0.5),
        quantile(samples_ms, 0.2),
        quantile(samples_ms, 0.8),
        len(samples_ms),
        quantile(host_us, 0.5) if host_us else None,
    )


def first_call(call: Call, device: torch.device) -> tuple[Any, float]:
    """The result of the first call, and its seconds, compilation included."""
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def peak_mib(call: Call, device: torch.device) -> float | None:
    """The most memory that one call held above what was held before it, its result included. None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak / 2**20


def measure(
    calls: Mapping[str, Call], seconds: float, device: torch.device
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """Timings of contenders that take turns for about so many seconds together, and what stopped the others.

    Every call must have run once before.
    """
    errors: dict[str, Exception] = {}
    collecting = gc.isenabled()
    gc.disable()
    try:
        if device.type == "cuda":
            host = _host_times(calls, min(1.0, seconds / 4), device, errors)
            flush = torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
            samples = _turns(calls, seconds, errors, lambda name, call: _gpu_ms(call, host[name], flush))
        else:
            host = {name: [] for name in calls}
            samples = _turns(calls, seconds, errors, lambda name, call: _wall_ms(call))
    finally:
        if collecting:
            gc.enable()
    return {name: timing(samples[name], host[name]) for name in calls if samples[name] and name not in errors}, errors


def _turns(
    calls: Mapping[str, Call], seconds: float, errors: dict[str, Exception], sample: Callable[[str, Call], float]
) -> dict[str, list[float]]:
    """Rounds of one sample each, in an order that shifts by one a round, so that all follow the hot ones in turn.

    A contender gets one sample at least, and at most twice an equal share of the time: a slow one does not take it all.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    share = 2 * seconds / max(1, len(calls))
    order = list(calls)
    start = time.perf_counter()

    def waiting(name: str) -> bool:
        if name in errors or len(samples[name]) >= MOST:
            return False
        return not samples[name] or (spent[name] < share and time.perf_counter() - start < seconds)

    while turn := [name for name in order if waiting(name)]:
        for name in turn:
            before = time.perf_counter()
            try:
                samples[name].append(sample(name, calls[name]))
            except Exception as error:
                errors[name] = error.with_traceback(None)  # whose frames would hold the tensors of the call
            spent[name] += time.perf_counter() - before
        order.append(order.pop(0))
    return samples


def _wall_ms(call: Call) -> float:
    time.sleep(_PAUSE_S)
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return 1e3 * elapsed


def _gpu_ms(call: Call, host_us: list[float], flush: torch.Tensor) -> float:
    """GPU time of one call with a cold L2, without gaps while the host prepares its kernels."""
    cuda: Any = torch.cuda
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    # Reading evicts the cache and leaves nothing to write back, where a zeroed buffer would be written back meanwhile.
    flush.sum()
    # The GPU sleeps for as long as the host needs to queue the call.
    cuda._sleep(int(_CYCLES_PER_US * min(2000.0, 50 + 1.5 * quantile(host_us, 0.8))))
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    del result
    return float(begin.elapsed_time(end))


def _host_times(
    calls: Mapping[str, Call], seconds: float, device: torch.device, errors: dict[str, Exception]
) -> dict[str, list[float]]:
    """Microseconds a call takes on the host: the GPU idle at first, its queue short (ten calls at most), in turns."""
    bursts = dict.fromkeys(calls, 1)

    def host_us(name: str, call: Call) -> float:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(bursts[name]):
            call()
        returned = time.perf_counter() - start
        torch.cuda.synchronize(device)
        us = 1e6 * returned / bursts[name]
        bursts[name] = 10 if (time.perf_counter() - start) / bursts[name] < 1e-3 else 1
        return us

    return _turns(calls, seconds, errors, host_us)
