"""A clock of work done: GPUs compute while the host goes on, so each reading waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def waiting_clock(*devices: torch.device) -> Callable[[], float]:
    """A function that waits for the GPUs among these devices and returns the seconds since an arbitrary moment."""
    awaited = [device for device in dict.fromkeys(devices) if device.type == "cuda"]

    def now() -> float:
        for device in awaited:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
