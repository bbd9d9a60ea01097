"""Clocks of work done: of GPUs, which compute while the host goes on, so each reading waits; and of a process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch


def waiting_clock(*devices: torch.device) -> Callable[[], float]:
    """A function that waits for the GPUs among these devices and returns the seconds since an arbitrary moment."""
    awaited = [device for device in dict.fromkeys(devices) if device.type == "cuda"]

    def now() -> float:
        for device in awaited:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def processor_seconds(pid: int) -> float:
    """The processor seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
