"""Launches that were compiled once, to be repeated for tensors like those they were made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Repeatable(Protocol):
    """Scores other tensors of the same shapes, strides, dtypes and alignment; with winners where it was made so, and
    with scales of queries that are codes."""

    def repeat(
        self, queries: Tensor, documents: Tensor, target: Tensor, winners: Tensor | None, scales: Tensor | None = None
    ) -> None: ...


class _Scales:
    """Where scales of queries stand among arguments that are kept."""


def without(arguments: tuple[Any, ...], scales: Tensor | None) -> tuple[Any, ...]:
    """The arguments to be kept for another launch: without those scales, which each launch has of its own."""
    return arguments if scales is None else tuple(_Scales if each is scales else each for each in arguments)


def filled(arguments: tuple[Any, ...], scales: Tensor | None) -> tuple[Any, ...]:
    return arguments if scales is None else tuple(scales if each is _Scales else each for each in arguments)


class Launch(NamedTuple):
    """One launch of a forward."""

    kernel: Any  # triton's CompiledKernel; None under the interpreter
    blocks: tuple[int, int, int]
    arguments: tuple[Any, ...]  # but for those of `repeat`

    def repeat(
        self, queries: Tensor, documents: Tensor, target: Tensor, winners: Tensor | None, scales: Tensor | None = None
    ) -> None:
        self.kernel[self.blocks](queries, documents, target, winners, *filled(self.arguments, scales))


class InParts(NamedTuple):
    """A forward of long queries, and the launch that adds up what it finds for their blocks."""

    forward: Repeatable
    sums: int  # how many it finds
    total: Launch

    def repeat(
        self, queries: Tensor, documents: Tensor, target: Tensor, winners: Tensor | None, scales: Tensor | None = None
    ) -> None:
        sums = torch.empty(self.sums, dtype=torch.float32, device=documents.device)
        self.forward.repeat(queries, documents, sums, winners, scales)
        self.total.kernel[self.total.blocks](sums, target, *self.total.arguments)


class OfCodes(NamedTuple):
    """A forward of documents that are codes, after the launch that makes codes of queries."""

    encode: Launch
    slots: int
    pitch: int
    forward: Repeatable

    def repeat(
        self, queries: Tensor, documents: Tensor, target: Tensor, winners: Tensor | None, scales: Tensor | None = None
    ) -> None:
        codes = torch.empty((self.slots, self.pitch), dtype=documents.dtype, device=documents.device)
        scales = torch.empty(self.slots, dtype=torch.float32, device=documents.device)
        self.encode.kernel[self.encode.blocks](queries, codes, scales, *self.encode.arguments)
        self.forward.repeat(codes, documents, target, winners, scales)


class Slot(int):
    """A tensor of `Steps.run`, by its place there."""


class _Step:
    """One launch: compiled as it first runs, and from then on without the look-up."""

    def __init__(self, kernel: Any, programs: int, arguments: tuple[Any, ...], num_warps: int):
        self.kernel, self.programs, self.num_warps = kernel, (programs, 1, 1), num_warps
        self.arguments = list(arguments)
        self.places = [(at, int(each)) for at, each in enumerate(arguments) if isinstance(each, Slot)]

    def filled(self, slots: Sequence[Any]) -> list[Any]:
        arguments = self.arguments.copy()
        for at, slot in self.places:
            arguments[at] = slots[slot]
        return arguments

    def compile(self, tensors: Sequence[Tensor | None]) -> Any:
        """Runs, and returns triton's CompiledKernel; None under the interpreter."""
        return self.kernel[self.programs](*self.filled(tensors), num_warps=self.num_warps)


class Steps:
    """What a computation allocates and launches, noted from sizes alone; `run` does it, the first time compiling, for
    any tensors of the same shapes, strides, dtypes and alignment."""

    def __init__(self, inputs: int, results: Sequence[tuple[torch.Size, torch.dtype]]):
        self.inputs, self.results = inputs, results
        self.rooms: list[tuple[int, torch.dtype, int]] = []  # of one buffer: where each begins, and how long it is
        self.bytes = 0
        self.reused: list[Slot] = []
        self.steps: list[_Step] = []
        self.compiled: list[Any] = []
        self.again: list[Any] = []  # those, to be called

    def result(self, n: int) -> Slot:
        return Slot(self.inputs + n)

    def room(self, dtype: torch.dtype, count: int) -> Slot:
        if self.reused:
            return self.reused.pop(0)
        self.rooms.append((self.bytes, dtype, count))
        self.bytes += -(-count * dtype.itemsize // 256) * 256
        return Slot(self.inputs + len(self.results) + len(self.rooms) - 1)

    def reuse(self, mark: int) -> None:
        """The rooms from the one numbered `mark` on are given out again: to as many, of the same dtypes, no larger."""
        first = self.inputs + len(self.results)
        self.reused = [Slot(first + n) for n in range(mark, len(self.rooms))]

    def launch(self, kernel: Any, programs: int, *arguments: Any, num_warps: int = 4) -> None:
        """Notes a launch; constants are arguments like others."""
        self.steps.append(_Step(kernel, programs, arguments, num_warps))

    def run(self, device: torch.device, *inputs: Tensor | None) -> list[Tensor]:
        """The results."""
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.results]
        buffer = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        if self.compiled:
            if not self.again:
                self.again = [each[step.programs] for each, step in zip(self.compiled, self.steps, strict=True)]
            base = buffer.data_ptr()
            slots = [None if each is None else each.data_ptr() for each in (*inputs, *results)]
            slots += [base + begin for begin, _, _ in self.rooms]
            for again, step in zip(self.again, self.steps, strict=True):
                again(*step.filled(slots))
            return results
        tensors = [*inputs, *results]
        for begin, dtype, count in self.rooms:
            tensors.append(buffer[begin : begin + count * dtype.itemsize].view(dtype))
        compiled = [step.compile(tensors) for step in self.steps]
        self.compiled = [] if None in compiled else compiled
        return results
