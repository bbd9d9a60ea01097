"""Streams of a simulated GPU, and a model of the caching allocator that they share.

torch's allocator returns a freed block to the stream in which it was allocated, at once and without waiting: the next
work of that stream may write to it. So a block must not be freed while queued work of another stream may still use it,
unless the host has seen that work done, or the block's own stream waits for it. This model tracks, for every block,
each stream's last use, and which work each stream and the host know to be done, and counts the blocks that are freed
too early. It counts them when they are freed, whether or not their memory is used again, which depends on the schedule.

Likewise it counts blocks that a stream uses while another stream may still write to them, and blocks that it writes to
while another stream may still use them. Kernels and captured graphs count as readers, since nothing says which of their
arguments they write to.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

_OWN_FILES = ("simulated_gpu", "simulated_streams", "/torch/", "contextlib", "threading")


class _Work:
    """A stream of the pool: how much work has been queued in it, and which work of each other stream it follows."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.queued = 0
        self.is_behind: dict[int, int] = {}

    def state(self) -> dict[int, int]:
        """All work that is done once the work queued here so far is done."""
        return {**self.is_behind, self.number: self.queued}

    def wait_for(self, state: dict[int, int]) -> None:
        """Makes work that is queued from now on run after this work."""
        for number, amount in state.items():
            self.is_behind[number] = max(self.is_behind.get(number, 0), amount)


class SimulatedEvent:
    """Replaces `torch.cuda.Event`: some work."""

    def __init__(self, model: StreamModel, state: dict[int, int]) -> None:
        self._model = model
        self.state = state

    def synchronize(self) -> None:
        """Records that the host has seen the work done."""
        self._model.see(self.state)


class SimulatedStream:
    """Replaces `torch.cuda.Stream`."""

    def __init__(self, model: StreamModel, work: _Work) -> None:
        self._model = model
        self._work = work

    @property
    def cuda_stream(self) -> int:
        """A number that identifies the stream; 0 is the default stream."""
        return self._work.number

    def wait_stream(self, stream: SimulatedStream) -> None:
        """Makes work that is queued from now on run after the work queued in the other stream."""
        self._work.wait_for(stream._work.state())

    def wait_event(self, event: SimulatedEvent) -> None:
        """Makes work that is queued from now on run after the event."""
        self._work.wait_for(event.state)

    def record_event(self) -> SimulatedEvent:
        """An event for the work queued so far."""
        return SimulatedEvent(self._model, self._work.state())

    def synchronize(self) -> None:
        """Records that the host has seen all work queued here done."""
        self._model.see(self._work.state())


class _Block:
    """Memory: its stream, the number of tensors that hold it, and where each stream last used it and wrote to it."""

    def __init__(self, home: _Work, num_bytes: int, file: str) -> None:
        self.home = home
        self.num_bytes = num_bytes
        self.file = file
        self.num_tensors = 0
        self.used: dict[int, tuple[int, str]] = {}
        self.written: dict[int, tuple[int, str]] = {}


class StreamModel:
    """The streams of a device and its memory.

    Args:
        num_streams: number of streams of each priority besides the default one; torch has pools of 32.

    Attributes:
        hazards: blocks that were freed too early, by the place of the last use.
        races: uses of blocks that did not wait for another stream's use, by the places of both.
        bytes_held: bytes of the blocks that tensors hold, by the file that made them.
        most_held: the maximum of `bytes_held` for each file.
        peak_bytes: the maximum over all files together.
    """

    def __init__(self, num_streams: int = 32) -> None:
        self.hazards: Counter[str] = Counter()
        self.races: Counter[tuple[str, str]] = Counter()
        self.bytes_held: Counter[str] = Counter()
        self.most_held: Counter[str] = Counter()
        self.peak_bytes = 0
        self._num_bytes = 0
        self._default = _Work(0)
        self._pool = [_Work(1 + number) for number in range(2 * num_streams)]
        self._turns = {0: itertools.cycle(self._pool[:num_streams]), -1: itertools.cycle(self._pool[num_streams:])}
        self._capturing: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._blocks: dict[int, _Block] = {}
        self._lock = threading.RLock()
        self._thread = threading.local()

    def new_stream(self, device: Any = None, priority: int = 0) -> SimulatedStream:
        """Replaces `torch.cuda.Stream`: the next stream of the pool of this priority."""
        with self._lock:
            return SimulatedStream(self, next(self._turns[priority]))

    @contextlib.contextmanager
    def capturing(self, stream: SimulatedStream) -> Iterator[None]:
        """Runs the block in a stream that this thread captures; what other threads queue there counts as a race."""
        number = stream.cuda_stream
        self._capturing[number] = threading.get_ident()
        try:
            with self.running(stream):
                yield
        finally:
            del self._capturing[number]

    def current(self, device: Any = None) -> SimulatedStream:
        """Replaces `torch.cuda.current_stream`."""
        return SimulatedStream(self, self._current())

    @contextlib.contextmanager
    def running(self, stream: SimulatedStream | None) -> Iterator[None]:
        """Replaces `torch.cuda.stream`."""
        before = self._current()
        self._thread.work = before if stream is None else stream._work
        try:
            yield
        finally:
            self._thread.work = before

    def see(self, state: dict[int, int]) -> None:
        """Records that the host has seen this work done."""
        with self._lock:
            for number, amount in state.items():
                self._done[number] = max(self._done.get(number, 0), amount)

    def see_all(self, device: Any = None) -> None:
        """Replaces `torch.cuda.synchronize`."""
        for work in (self._default, *self._pool):
            self.see(work.state())

    def work(
        self, inputs: Sequence[Tensor], outputs: Sequence[tuple[Tensor, Tensor]], changed: Sequence[Tensor] = ()
    ) -> None:
        """Queues work in the current stream.

        Args:
            inputs: the host tensors with the values that the work reads or changes.
            outputs: each tensor that was made, and the host tensor with its values.
            changed: those of the inputs that the work is known to change.
        """
        with self._lock:
            own = self._current()
            own.queued += 1
            now = own.queued, _place()
            if self._capturing.get(own.number, threading.get_ident()) != threading.get_ident():
                self.races[now[1], "another thread's capture"] += 1
            addresses = {_address(held) for held in changed}
            for address in {_address(held) for held in inputs}:
                block = self._blocks.get(address)
                if block is None:
                    continue
                changes = address in addresses
                for place in self._unfinished(block.used if changes else block.written, own):
                    self.races[place, now[1]] += 1
                block.used[own.number] = now
                if changes:
                    block.written[own.number] = now
            for block in self.made(*outputs):
                block.used[own.number] = block.written[own.number] = now

    def _unfinished(self, uses: dict[int, tuple[int, str]], by: _Work) -> list[str]:
        """The places of those uses, one for each stream, that a stream's work does not certainly follow."""
        return [
            place
            for number, (amount, place) in uses.items()
            if number != by.number and amount > max(self._done.get(number, 0), by.is_behind.get(number, 0))
        ]

    def made(self, *outputs: tuple[Tensor, Tensor]) -> list[_Block]:
        """Counts tensors, and the host tensors with their values, as users of their memory -> the memory of each."""
        blocks = []
        with self._lock:
            for tensor, held in outputs:
                if getattr(tensor, "is_counted", False):
                    continue
                tensor.is_counted = True  # type: ignore[attr-defined]
                address = _address(held)
                block = self._blocks.get(address)
                if block is None:
                    file = _place().rpartition(":")[0]
                    block = self._blocks[address] = _Block(self._current(), held.untyped_storage().nbytes(), file)
                    self._hold(block, block.num_bytes)
                block.num_tensors += 1
                weakref.finalize(tensor, self._dropped, address).atexit = False
                blocks.append(block)
        return blocks

    def _hold(self, block: _Block, num_bytes: int) -> None:
        self.bytes_held[block.file] += num_bytes
        self._num_bytes += num_bytes
        self.most_held[block.file] = max(self.most_held[block.file], self.bytes_held[block.file])
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)

    def _current(self) -> _Work:
        return getattr(self._thread, "work", self._default)

    def _dropped(self, address: int) -> None:
        with self._lock:
            block = self._blocks[address]
            block.num_tensors -= 1
            if block.num_tensors:
                return
            del self._blocks[address]
            self._hold(block, -block.num_bytes)
            self.hazards.update(self._unfinished(block.used, block.home))


def _address(held: Tensor) -> int:
    return held.untyped_storage()._cdata


def _place() -> str:
    """The line of the program that has requested the work."""
    frame = sys._getframe(2)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _OWN_FILES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
