"""The clock by which a query engine times its stages."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch


class StageClock:
    """Seconds of the host.

    Args:
        devices: where the engine works.
        synchronize: wait for these devices before each reading, so that a stage's seconds are those of its work and not
            those of launching it.
    """

    def __init__(self, devices: Iterable[torch.device], synchronize: bool) -> None:
        self._awaited = [device for device in dict.fromkeys(devices) if synchronize and device.type == "cuda"]

    def now(self) -> float:
        """Seconds since some moment."""
        for device in self._awaited:
            torch.cuda.synchronize(device)
        return time.perf_counter()
