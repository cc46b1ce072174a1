"""Tokens of the host on their way through a GPU: two buffers, one being filled while the other is scored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..corpus import Coding, Segment, Selection
from .homes import Block, Home

ALIGNMENT = 256  # bytes: copies and kernels take what begins there at full speed


class Layout:
    """A segment as one run of bytes: where each of its tensors begins. Float copies beside codes are left out."""

    def __init__(self, segment: Segment, coding: Coding) -> None:
        self.segment = segment
        named = {name: segment.tensors[name] for name in (*coding.of_tokens(), *coding.of_documents())}
        named.pop("exact", None)
        self._tensors = {**named, "offsets": segment.offsets}
        self._places, self.bytes = dict[str, int](), 0
        for name, tensor in self._tensors.items():
            self._places[name] = self.bytes
            self.bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def of(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors that lie in a buffer, uint8."""
        found = {}
        for name, tensor in self._tensors.items():
            place = self._places[name]
            found[name] = buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return found

    def fill(self, buffer: Tensor) -> Tensor:
        """The segment's bytes in a buffer of the host that has room for them."""
        for name, target in self.of(buffer).items():
            target.copy_(self._tensors[name])
        return buffer[: self.bytes]


class Streamed(Home):
    """`pinned`: segments are kept in page-locked memory; else each is copied from its file into one of two buffers of
    such memory, by a thread, while others are on their way. On the CPU, for tests, nothing overlaps."""

    def __init__(self, device: torch.device, shard: tuple[int, int], pinned: bool) -> None:
        super().__init__(device, shard)
        self.name = "pinned" if pinned else "mapped"
        self._pinned = pinned
        self._lock = threading.Lock()
        self._images: dict[int, Tensor] = {}  # by segment number
        # CPU streams do nothing, under the same names
        self._api: Any = torch.cuda if device.type == "cuda" else torch.cpu

    def blocks(self, selection: Selection) -> Iterator[Block]:
        parts, coding = self.parts(selection), selection.snapshot.coding
        layouts = [Layout(segment, coding) for segment, _ in parts]
        if not layouts:
            return
        self._forget(selection)
        on_device = self.coding(selection)
        with ThreadPoolExecutor(1, "maxsim-read") as reader:
            pipe = Pipe(self.device, self._api, reader, layouts, self._image if self._pinned else None)
            try:
                for (segment, rows), tensors in zip(parts, pipe.segments(), strict=True):
                    rows = None if rows is None else rows.to(self.device)
                    offsets = tensors.pop("offsets")
                    documents = on_device.documents(tensors, offsets, segment.longest, rows)
                    yield Block(documents, self._positions(segment, rows))
            finally:
                pipe.close()

    def pick(self, selection: Selection, positions: Tensor, exact: bool) -> Iterator[Block]:
        yield from self.copied(selection, positions, exact)

    def _positions(self, segment: Segment, rows: Tensor | None) -> Tensor:
        if segment.positions is not None:
            every = segment.positions.to(self.device)
            return every if rows is None else every[rows]
        if rows is None:
            rows = torch.arange(segment.record.documents, device=self.device)
        return rows + segment.record.first

    def _image(self, layout: Layout) -> Tensor:
        """The segment in page-locked memory, read once."""
        number = layout.segment.record.number
        with self._lock:
            image = self._images.get(number)
        if image is None:
            image = layout.fill(_host(layout.bytes, self.device))
            with self._lock:
                self._images[number] = image
        return image

    def _forget(self, selection: Selection) -> None:
        """Images of segments that are no more."""
        there = {segment.record.number for segment in selection.snapshot.segments}
        with self._lock:
            self._images = {number: image for number, image in self._images.items() if number in there}


class Pipe:
    """Segments one after another in two buffers of the device.

    Two events a buffer: `arrived`, after the copy into it, and `scored`, after what read it. The copy of segment n + 1
    is started before n is handed out, so that it runs while n is scored; the thread fills the host's buffer for n + 2.
    """

    def __init__(
        self,
        device: torch.device,
        api: Any,
        reader: ThreadPoolExecutor,
        layouts: list[Layout],
        image: Callable[[Layout], Tensor] | None,
    ) -> None:
        size = max(layout.bytes for layout in layouts)
        self._api, self._device, self._reader, self._layouts, self._image = api, device, reader, layouts, image
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._staging = [_host(size, device) for _ in range(2)] if image is None else []
        self._copies = api.Stream(device) if device.type == "cuda" else api.Stream()
        self._copies.wait_stream(api.current_stream(device))  # buffers may be memory that is still being read
        self._arrived, self._scored = ([api.Event() for _ in range(2)] for _ in range(2))
        self._read: Future[Tensor] | None = None

    def segments(self) -> Iterator[dict[str, Tensor]]:
        """Each segment's tensors on the device, valid until the next is asked for."""
        count = len(self._layouts)
        self._prepare(0)
        self._start(0)
        for n, layout in enumerate(self._layouts):
            if n + 1 < count:
                self._start(n + 1)
            stream = self._api.current_stream(self._device)
            self._arrived[n % 2].wait(stream)
            yield layout.of(self._buffers[n % 2])
            self._scored[n % 2].record(self._api.current_stream(self._device))

    def close(self) -> None:
        """Before the buffers go: whatever the copy stream does in them comes first, and the thread has ended."""
        if self._read is not None and not self._read.cancel():
            self._read.exception()
        self._api.current_stream(self._device).wait_stream(self._copies)
        for event in self._arrived:  # host buffers may be given to others as soon as they are freed
            event.synchronize()

    def _prepare(self, n: int) -> None:
        """Has the thread bring segment n into the host's buffer."""
        try:
            self._read = self._reader.submit(self._bring, n)
        except RuntimeError:  # no thread is to be had, as where the main one has ended
            self._read = Future()
            self._read.set_result(self._bring(n))

    def _bring(self, n: int) -> Tensor:
        if self._image is not None:
            return self._image(self._layouts[n])
        self._arrived[n % 2].synchronize()  # what this buffer held has left it
        return self._layouts[n].fill(self._staging[n % 2])

    def _start(self, n: int) -> None:
        """Begins the copy of segment n, once what it overwrites has been scored."""
        assert self._read is not None
        source = self._read.result()
        self._scored[n % 2].wait(self._copies)
        with self._api.stream(self._copies):
            self._buffers[n % 2][: len(source)].copy_(source, non_blocking=True)
            self._arrived[n % 2].record(self._copies)
        if n + 1 < len(self._layouts):
            self._prepare(n + 1)


def _host(size: int, device: torch.device) -> Tensor:
    """Page-locked, where a GPU copies from it: with that GPU current, since another would be started for it."""
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    with torch.cuda.device(device):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
