"""Work of several threads at the same time on a GPU: each has a stream; events say what must be there before what.

On a CPU the same calls do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class DeviceStreams:
    """A stream for each of some threads, all behind what this thread has queued so far, such as copies of weights.

    Args:
        number: of threads, which number themselves from 0.
        device: what they compute on.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._streams: list[Any] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(number)]
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def running(self, thread: int, after: Any = None) -> Iterator[None]:
        """What is queued inside runs in the thread's stream, behind an event that another thread has recorded."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[thread]):
            if after is not None:
                self._streams[thread].wait_event(after)
            yield

    def event(self, thread: int) -> Any:
        """An event behind all that is in the thread's stream so far; None on a CPU."""
        return self._streams[thread].record_event() if self._streams else None

    def wait(self, thread: int) -> None:
        """Keeps the host until the thread's stream has done all."""
        if self._streams:
            self._streams[thread].synchronize()


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor where it is needed; to a GPU by way of pinned memory, so that the host does not wait for the copy."""
    if host.device.type == "cpu" and device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
