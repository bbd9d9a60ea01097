"""Runs the two stages of recognition beside each other, in threads and, on a GPU, in CUDA streams.

Each worker of the second stage has language models of its own, which are lent to one call at a time (`EnginePool`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

from asr.decoding.interface import LanguageModels


class StreamPool:
    """One CUDA stream per thread, for the lifetime of the pool; on a CPU the methods do nothing.

    The allocator returns memory to the stream that it was allocated in. So everything that a thread modifies from call
    to call, such as language model caches and search buffers, must be created and used in that thread's stream.

    Args:
        number: number of threads, which are numbered from 0.
        device: the device that the threads compute on.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._streams: list[Any] = []
        self._device = device
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(number)]
        self.catch_up()

    def catch_up(self) -> None:
        """Makes all streams wait for the work that the calling thread has queued so far, such as changes of weights."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextlib.contextmanager
    def running(self, thread: int, after: Any = None) -> Iterator[None]:
        """Runs the block in the thread's stream, which first waits for the event `after`, if any."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[thread]):
            if after is not None:
                self._streams[thread].wait_event(after)
            yield

    def event(self, thread: int) -> Any:
        """An event recorded after everything in the thread's stream so far; None on a CPU."""
        return self._streams[thread].record_event() if self._streams else None

    def wait(self, thread: int) -> None:
        """Blocks until all work in the thread's stream is done."""
        if self._streams:
            self._streams[thread].synchronize()


class Engines(NamedTuple):
    """The resources that the workers of one call use exclusively.

    Attributes:
        models: the language models of each worker, created in its stream.
        streams: one for each worker, and one for the acoustic model.
    """

    models: list[LanguageModels]
    streams: StreamPool


class EnginePool:
    """A pool of `Engines`, each lent to one call at a time.

    A language model's caches change with every query, so two calls must never share one. A call takes an idle set, or a
    new one if there is none, and returns it with warm caches. Of a set whose call failed, only the streams are used
    again, to which the buffers of searches belong: its caches may be half written. Copies of a pool are empty.

    Args:
        is_exclusive: whether calls take turns, because all sets would hold the same language model.
    """

    def __init__(self, is_exclusive: bool) -> None:
        self.lock = threading.RLock()
        self._is_exclusive = is_exclusive
        self._turn = threading.RLock()
        self._idle: list[Engines] = []
        self._streams: list[StreamPool] = []  # of sets whose call failed

    def fill(self, make: Callable[[StreamPool | None], Engines]) -> None:
        """Makes a set unless one is idle."""
        with self.lock:
            if not self._idle:
                self._idle.append(make(None))

    @contextlib.contextmanager
    def lend(self, make: Callable[[StreamPool | None], Engines]) -> Iterator[Engines]:
        """Lends a set to the caller alone until the block ends.

        Args:
            make: makes a set with these streams, or with new ones if None.
        """
        with self._turn if self._is_exclusive else contextlib.nullcontext():
            with self.lock:
                engines = self._idle.pop() if self._idle else make(self._streams.pop() if self._streams else None)
            try:
                yield engines
            except BaseException:
                self._streams.append(engines.streams)
                raise
            with self.lock:
                self._idle.append(engines)

    def __reduce__(self) -> tuple[type[EnginePool], tuple[bool]]:
        return EnginePool, (self._is_exclusive,)


_Item = TypeVar("_Item")
_Between = TypeVar("_Between")
_Result = TypeVar("_Result")


def pipelined(
    items: Iterable[_Item],
    first: Callable[[_Item], _Between],
    second: Callable[[int, _Between], _Result],
    num_workers: int,
    streams: StreamPool,
) -> Iterator[_Result]:
    """Runs two overlapping stages on all items and yields the results in the order of the items.

    Threads suffice: torch and k2 release the GIL while they compute. On a GPU each thread has a stream, and the second
    stage waits for the first on the device, not on the host.

    Args:
        items: taken as they are needed; at most `num_workers` + 1 are in progress.
        first: first stage; runs in one thread, item after item.
        second: second stage; runs in the workers. Its first argument is the worker's number, 0 to `num_workers` - 1.
        num_workers: 0 runs both stages in turn, in this thread.
        streams: one for each worker, and one for the first stage.

    Raises:
        Exception: whatever a stage raises for the first failing item, in the order of the items.
    """
    streams.catch_up()
    if num_workers == 0:
        for item in items:
            with streams.running(0):
                result = second(0, first(item))
            streams.wait(0)
            yield result
        return
    idle: queue.SimpleQueue[int] = queue.SimpleQueue()
    for worker in range(num_workers):
        idle.put(worker)

    @torch.no_grad()
    def run_first(item: _Item) -> tuple[_Between, Any]:
        with streams.running(num_workers):
            return first(item), streams.event(num_workers)

    @torch.no_grad()
    def run_second(pending: Future[tuple[_Between, Any]]) -> _Result:
        value, is_ready = pending.result()
        worker = idle.get()
        try:
            with streams.running(worker, after=is_ready):
                result = second(worker, value)
            # Any thread may read the result, and the memory of `value` returns to the first stage's stream.
            streams.wait(worker)
            return result
        finally:
            idle.put(worker)

    in_progress: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(1) as front, ThreadPoolExecutor(num_workers) as back:
        try:
            for item in items:
                in_progress.append(back.submit(run_second, front.submit(run_first, item)))
                if len(in_progress) > num_workers:
                    yield in_progress.popleft().result()
            while in_progress:
                yield in_progress.popleft().result()
        finally:
            for future in in_progress:
                future.cancel()
