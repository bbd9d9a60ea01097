"""An acoustic model that sees whole utterances, run over windows of a stream.

A stream is cut into chunks, each is evaluated in a window with so much before and so much behind it, and only the
chunk's own outputs are used. Where chunks lie depends on nothing but the beginning of the stream, so that the outputs
do not depend on how the audio came in.

Shapes: N streams, T frames of features, F features, T' frames of output, C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asr.am.network import AcousticNetwork
from asr.am.running_norm import RunningNorm
from asr.errors import AsrError

_NOT_SPOKEN = -20.0


@dataclass(frozen=True)
class WindowSizes:
    """In frames of output.

    Args:
        chunk: outputs that a window yields.
        left: frames seen before the chunk.
        right: frames seen behind it: for so long, and for the chunk, an output is waited for.
        memory: so many frames count in the normalisation of the features at most.
        least_spread: of the features, see `RunningNorm`; until it is reached outputs are blank.

    Raises:
        AsrError: a size is out of its range.
    """

    chunk: int
    left: int
    right: int
    memory: int
    least_spread: float = 0.0

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.left < 0 or self.right < 0 or self.memory < self.chunk:
            raise AsrError(
                f"windows of {self.chunk} frames with {self.left} before and {self.right} behind, {self.memory} "
                "remembered: the chunk must have at least one, the others may be none, and memory holds a chunk."
            )


class WindowStream:
    """The features of a stream that windows to come will see.

    Args:
        feature_dim: F.
        factor: frames of features for a frame of output.
        sizes: of the windows.
        device: of the network.
    """

    def __init__(self, feature_dim: int, factor: int, sizes: WindowSizes, device: torch.device) -> None:
        self._factor = factor
        self._sizes = sizes
        self._features = torch.zeros(0, feature_dim, device=device)
        # The frame of output at which the held features begin, and the next to come out.
        self._first = 0
        self._next = 0
        self._is_closed = False
        self._is_done = False
        # Whether the window that is being evaluated has all that it may see, or is the last.
        self._is_whole = True
        self._is_noise = False
        self._norm = RunningNorm(feature_dim, sizes.memory * factor, sizes.least_spread, device)

    def push(self, features: Tensor) -> None:
        """(T, F) more features."""
        self._features = torch.cat([self._features, features])

    def close(self) -> None:
        """No more features will come."""
        self._is_closed = True

    @property
    def num_outputs(self) -> int:
        """Frames of output so far."""
        return self._next

    @property
    def is_ready(self) -> bool:
        """Whether there is a window to evaluate."""
        return len(self._features) >= self._wanted() or (self._is_closed and not self._is_done)

    @property
    def is_done(self) -> bool:
        """Whether all windows of a closed stream have been evaluated."""
        return self._is_done

    def _wanted(self) -> int:
        """Features held when the next window is whole."""
        return (self._next - self._first + self._sizes.chunk + self._sizes.right) * self._factor

    def window(self) -> Tensor:
        """The next window (T, F), normalised; `accept` must follow."""
        self._is_whole = len(self._features) >= self._wanted()
        seen = self._features[: self._wanted()]
        statistics = self._norm.statistics(seen[(self._next - self._first) * self._factor :])
        self._is_noise = statistics is None
        return torch.zeros_like(seen) if statistics is None else (seen - statistics[0]) / statistics[1]

    def accept(self, log_prob: Tensor) -> Tensor:
        """Takes the window's outputs (T', C) and gives those of its chunk (T'', C); the last chunk takes all."""
        begin = self._next - self._first
        end = begin + self._sizes.chunk if self._is_whole else len(log_prob)
        chunk = log_prob[begin:end]
        if self._is_noise:
            chunk = torch.full_like(chunk, _NOT_SPOKEN)
            chunk[:, 0] = 0.0
        has_speech = bool((chunk.argmax(1) > 0).any())
        self._norm.take(self._features[begin * self._factor : end * self._factor], has_speech)
        self._is_done = not self._is_whole
        self._next = self._first + max(begin, end)
        first = max(0, self._next - self._sizes.left)
        self._features = self._features[(first - self._first) * self._factor :]
        self._first = first
        return chunk


class WindowedNetwork:
    """Runs the windows of many streams through the network together.

    Args:
        network: the acoustic model.
        sizes: of the windows.
    """

    def __init__(self, network: AcousticNetwork, sizes: WindowSizes) -> None:
        self._network = network
        self.sizes = sizes

    def open(self, device: torch.device) -> WindowStream:
        """A stream that has heard nothing yet."""
        return WindowStream(self._network.num_features, self._network.subsampling_factor, self.sizes, device)

    @torch.no_grad()
    def step(self, streams: Sequence[WindowStream]) -> list[Tensor]:
        """Evaluates the next window of each stream, all of which must be ready -> log_prob (T'', C) of each chunk."""
        windows = [stream.window() for stream in streams]
        if not any(map(len, windows)):
            nothing = windows[0].new_zeros(0, self._network.num_tokens)
            return [stream.accept(nothing) for stream in streams]
        num_frames = torch.tensor([len(window) for window in windows], device=windows[0].device)
        padded = nn.utils.rnn.pad_sequence(windows, batch_first=True)
        outputs, num_outputs = self._network.outputs_of_normal(padded, num_frames)
        return [
            stream.accept(row[:num])
            for stream, row, num in zip(streams, outputs[-1], num_outputs.tolist(), strict=True)
        ]
