"""Where the time goes: seconds of each stage of recognition, against the seconds of audio."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class StageTimes:
    """Wall-clock seconds by stage, in the order in which the stages first ran.

    Args:
        audio_seconds: duration of what was recognized.
        stages: stage -> seconds.
    """

    audio_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.stages.values())

    @property
    def real_time_factor(self) -> float:
        """Seconds of work for a second of audio; 0 without audio."""
        return self.total / self.audio_seconds if self.audio_seconds > 0 else 0.0

    @contextmanager
    def measure(self, stage: str, device: torch.device | None = None) -> Iterator[None]:
        """Adds the time of the block to a stage; on a GPU waits for the work of this thread's stream."""
        _synchronize(device)
        begin = time.perf_counter()
        try:
            yield
        finally:
            _synchronize(device)
            self.stages[stage] = self.stages.get(stage, 0.0) + time.perf_counter() - begin

    def add(self, other: StageTimes) -> None:
        """Adds the times of another run."""
        self.audio_seconds += other.audio_seconds
        for stage, seconds in other.stages.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def scaled(self, factor: float) -> StageTimes:
        """A share of these stages, such as one utterance's of its batch; the audio stays to be set."""
        return StageTimes(0.0, {stage: seconds * factor for stage, seconds in self.stages.items()})

    def format(self) -> str:
        """One line: each stage, the sum, and the real-time factor."""
        parts = [f"{stage} {seconds:.2f} s" for stage, seconds in self.stages.items()]
        return f"{', '.join(parts)}; {self.audio_seconds:.1f} s of audio, real-time factor {self.real_time_factor:.3f}"


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        # Other streams may go on with other batches.
        torch.cuda.current_stream(device).synchronize()
