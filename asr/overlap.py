"""Two stages of work at the same time: while batches are searched, the next one goes through the acoustic model.

Frame-batch and index-table rescore with one to four workers beside the rest of the recognizer. Here the first stage
has one thread, the second one to four, each with a language model of its own. On a CPU torch and k2 let go of Python's
lock while they compute; on a GPU each thread has a stream, and a search waits there, not on the host, for the acoustic
model's event.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from asr.device_streams import DeviceStreams

_Item = TypeVar("_Item")
_Between = TypeVar("_Between")
_Result = TypeVar("_Result")


def overlapped(
    items: Iterable[_Item],
    first: Callable[[_Item], _Between],
    second: Callable[[int, _Between], _Result],
    num_workers: int,
    device: torch.device,
) -> Iterator[_Result]:
    """Runs both stages on all items; the results are those of running them one after the other, and in order.

    Args:
        items: taken as they are needed: at most `num_workers` + 1 are under way.
        first: run in one thread, item after item.
        second: run in the workers; its first argument is the worker, 0 to `num_workers` - 1.
        num_workers: 0 runs everything in turn, in this thread.
        device: what both compute on.

    Raises:
        whatever a stage raises, for the first item in order.
    """
    if num_workers == 0:
        for item in items:
            yield second(0, first(item))
        return
    idle: queue.SimpleQueue[int] = queue.SimpleQueue()
    for worker in range(num_workers):
        idle.put(worker)
    streams = DeviceStreams(num_workers + 1, device)

    @torch.no_grad()
    def run_first(item: _Item) -> tuple[_Between, Any]:
        with streams.running(num_workers):
            return first(item), streams.event(num_workers)

    @torch.no_grad()
    def run_second(made: Future[tuple[_Between, Any]]) -> _Result:
        value, is_made = made.result()
        worker = idle.get()
        try:
            with streams.running(worker, after=is_made):
                result = second(worker, value)
            # The result is read by any thread, and the memory of the value goes back to the first stage's stream.
            streams.wait(worker)
            return result
        finally:
            idle.put(worker)

    under_way: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(1) as front, ThreadPoolExecutor(num_workers) as back:
        try:
            for item in items:
                under_way.append(back.submit(run_second, front.submit(run_first, item)))
                if len(under_way) > num_workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for waiting in under_way:
                waiting.cancel()
