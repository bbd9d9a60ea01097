"""An acoustic model over audio that is still arriving: chunks, each evaluated in a window with context on both sides.

Positions of chunks depend only on the beginning of the stream, so that outputs do not depend on how audio arrives.

Shapes: N streams, T frames of features, F features, T' frames of output, C tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.errors import AsrError
from asr.models.adaptation import Speaker
from asr.models.interface import (
    STD_FLOOR,
    AcousticNetwork,
    BoundedNetwork,
    SpeakerStatistics,
    in_parts,
)
from asr.models.pauses import audible, in_pauses, outputs_of, silenced


class RunningNorm:
    """Mean and variance of the features of a stream so far; after `max_frames` frames, older ones decay.

    A window normalized by its own statistics would turn the noise of a pause into speech. Windows are therefore
    normalized by the whole stream so far, and only the first chunk of a pause counts. As long as the features vary less
    than those of speech, the outputs are blank.

    Args:
        feature_dim: F.
        max_frames: the maximum number of frames that count.
        min_feature_std: standard deviation, averaged over features, from which on the stream is taken for speech.
        device: where the features are.
        known: statistics of the speaker's other recordings, up to 10 s of which count as the oldest frames.

    Digital silence does not count: a muted microphone is no quiet room.
    """

    def __init__(
        self,
        feature_dim: int,
        max_frames: int,
        min_feature_std: float,
        device: torch.device,
        known: SpeakerStatistics | None = None,
    ) -> None:
        self._max_frames = max_frames
        self._min_feature_std = min_feature_std
        self._count = 0.0
        self._sums = torch.zeros(2, feature_dim, dtype=torch.float64, device=device)
        self._energies = torch.zeros(0, device=device)
        self._has_begun = False
        self._in_pause = False
        if known is not None:
            self._count = float(min(known.limited().num_frames, max_frames))
            mean, variance = (part.to(device).double() for part in (known.mean, known.variance))
            self._sums = self._count * torch.stack([mean, variance + mean.square()])

    def statistics(self, features: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation, (F,) float32 each, of the frames so far and these (T, F), which are not added.

        None as long as there has been only noise.
        """
        features = audible(features)
        count = self._count + len(features)
        mean, square = (self._sums + _sums(features)) / max(count, 1.0)
        std = (square - mean.square()).clamp(min=0.0).sqrt()
        if not self._has_begun and float(std.mean()) < self._min_feature_std:
            return None
        self._has_begun = True
        return mean.float(), std.float().clamp(min=STD_FLOOR)

    def add(self, features: Tensor, has_speech: bool) -> None:
        """Adds frames (T, F) to the statistics."""
        if not has_speech and self._in_pause:
            return
        # Only the first chunk of noise counts, before the first word as well.
        self._in_pause = not has_speech
        features = audible(features)
        count = self._count + len(features)
        if count > self._max_frames:
            self._sums *= (self._max_frames - len(features)) / self._count
            count = self._max_frames
        self._count = count
        self._sums += _sums(features)
        self._energies = torch.cat([self._energies, features.mean(dim=1)])[-self._max_frames :]

    def in_pauses(self, features: Tensor, num_heard: int, margin: int) -> Tensor:
        """Which frames (T, F) lie in long pauses of the stream, (T,) bool.

        Args:
            features: not normalized.
            num_heard: number of the last of them, which have not been added. The levels of noise and speech are those
                of these frames and of all that have been.
            margin: see `asr.models.pauses.in_pauses`.
        """
        energy = features.mean(dim=1)
        heard = torch.cat([self._energies, energy[len(energy) - num_heard :]])
        return in_pauses(energy[None], torch.ones_like(energy[None], dtype=torch.bool), heard[None], margin)[0]


def _sums(features: Tensor) -> Tensor:
    """Sums of the values and of their squares: (T, F) -> (2, F)."""
    values = features.double()
    return torch.stack([values.sum(0), values.square().sum(0)])


@dataclass(frozen=True)
class WindowSizes:
    """Sizes of the acoustic model's windows, in frames of output.

    Args:
        chunk: number of outputs that a window yields.
        left: context before the chunk.
        right: context after the chunk. An output is delayed by `right` frames and up to a chunk.
        memory: the maximum number of frames that count in the normalization of the features.
        min_feature_std: see `RunningNorm`; outputs are blank until the features vary this much.
        pause_margin: in long pauses, which begin and end this many frames of features from anything loud, outputs are
            blank, too; None leaves pauses to the network.

    Raises:
        AsrError: a size is out of range.
    """

    chunk: int
    left: int
    right: int
    memory: int
    min_feature_std: float = 0.0
    pause_margin: int | None = None

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.left < 0 or self.right < 0 or self.memory < self.chunk:
            raise AsrError(
                f"windows of {self.chunk} frames with {self.left} before, {self.right} after and a memory of "
                f"{self.memory}: the chunk needs at least 1, the context at least 0, the memory at least a chunk."
            )


class WindowStream:
    """The features of one stream: those that the next windows need, and those of the current utterance.

    Args:
        feature_dim: F.
        factor: frames of features for each frame of output.
        sizes: sizes of the windows.
        device: where the network is.
        speaker: what is known about the speaker, if anything.

    Attributes:
        num_outputs: frames of output so far.
        is_done: whether all windows of a closed stream have been evaluated.
        is_whole: whether the last window was complete, with all of its right context; if not, it was the stream's last.
    """

    def __init__(
        self, feature_dim: int, factor: int, sizes: WindowSizes, device: torch.device, speaker: Speaker | None = None
    ) -> None:
        self._factor = factor
        self._sizes = sizes
        self._features = torch.zeros(0, feature_dim, device=device)
        self._first = 0  # the frame of output at which the buffered features begin
        self.num_outputs = 0
        self._is_closed = False
        self.is_done = False
        self.is_whole = True
        self._is_noise = False
        self._in_pauses = torch.zeros(0, dtype=torch.bool, device=device)
        self._speaker = speaker
        known = None if speaker is None else speaker.statistics
        self._norm = RunningNorm(feature_dim, sizes.memory * factor, sizes.min_feature_std, device, known)
        self.begin_utterance()

    def push(self, features: Tensor) -> None:
        """Adds features (T, F)."""
        self._features = torch.cat([self._features, features])

    def close(self) -> None:
        """Ends the stream; no more features may be pushed."""
        self._is_closed = True

    def begin_utterance(self, num_last: int = 0) -> None:
        """Begins a new utterance with the next outputs, or with the last `num_last` of those so far."""
        last = [torch.cat(self._utterance)[-num_last * self._factor :].clone()] if num_last else []
        self._utterance: list[Tensor] = last
        self._begin = self.num_outputs - num_last

    @property
    def is_ready(self) -> bool:
        """Whether a window can be evaluated."""
        return len(self._features) >= self._wanted() or (self._is_closed and not self.is_done)

    @property
    def num_history(self) -> int:
        """Frames of features that the next window has before its chunk."""
        return (self.num_outputs - self._first) * self._factor

    def _wanted(self) -> int:
        """Number of features in the buffer when the next window is complete."""
        return self.num_history + (self._sizes.chunk + self._sizes.right) * self._factor

    def window(self) -> Tensor:
        """The next window (T, F), normalized; call `accept` with its outputs."""
        self.is_whole = len(self._features) >= self._wanted()
        seen, begin = self._features[: self._wanted()], self.num_history
        self._in_pauses = self._pauses_in(seen, len(seen) - begin)[begin:]
        return self._normalized(seen, self._norm.statistics(seen[begin:]))

    def accept(self, chunk: Tensor) -> Tensor:
        """Takes the outputs of the window's chunk (T', C), and returns those of the stream: blank in pauses."""
        chunk = self._unless_noise(chunk)
        has_speech = bool((chunk.argmax(1) > 0).any())
        taken = self._features[self.num_history :][: len(chunk) * self._factor]
        self._norm.add(taken, has_speech)
        self._utterance.append(taken.clone())  # a view would keep the whole buffer in memory
        self.is_done = not self.is_whole
        self.num_outputs += len(chunk)
        first = max(0, self.num_outputs - self._sizes.left)
        self._features = self._features[(first - self._first) * self._factor :]
        self._first = first
        return chunk

    def utterance(self) -> Tensor:
        """The utterance so far and a window's right context (T, F), normalized by the whole stream so far."""
        behind = self._features[self.num_history :][: self._sizes.right * self._factor]
        features = torch.cat([*self._utterance, behind])
        self._in_pauses = self._pauses_in(features, len(behind))
        return self._normalized(features, self._norm.statistics(behind[:0]))

    def of_utterance(self, outputs: Tensor) -> Tensor:
        """The outputs for `utterance` without those of its right context; blank in noise and pauses."""
        return self._unless_noise(outputs[: self.num_outputs - self._begin])

    def _normalized(self, features: Tensor, statistics: tuple[Tensor, Tensor] | None) -> Tensor:
        self._is_noise = statistics is None
        if statistics is None:
            return torch.zeros_like(features)
        normal = (features - statistics[0]) / statistics[1]
        return normal if self._speaker is None else self._speaker.transformed(normal)

    def _pauses_in(self, features: Tensor, num_heard: int) -> Tensor:
        margin = self._sizes.pause_margin
        if margin is None:
            return torch.zeros(len(features), dtype=torch.bool, device=features.device)
        return self._norm.in_pauses(features, num_heard, margin)

    def _unless_noise(self, outputs: Tensor) -> Tensor:
        if not len(outputs):
            return outputs
        where = outputs_of(self._in_pauses, len(outputs), self._factor)
        return silenced(outputs, where | self._is_noise)


class ChunkedEncoder:
    """Runs windows of many streams through the acoustic model in one batch.

    Args:
        network: the acoustic model. Of a `BoundedNetwork`, only a chunk's outputs are computed.
        sizes: sizes of the windows. Left context beyond the network's receptive field is left out; right context also
            counts in the normalization, and is kept.
        max_frames: frames of features that the network reads at a time when it evaluates whole utterances, see
            `asr.models.interface.in_parts`.
        drafts: whether the chunks' outputs are provisional, so that `BoundedNetwork.draft` computes them.
    """

    def __init__(
        self, network: AcousticNetwork, sizes: WindowSizes, max_frames: float = math.inf, drafts: bool = False
    ) -> None:
        self._network = network
        self._max_frames = max_frames
        seen: tuple[int, int] | None = getattr(network, "receptive_field", None)
        if seen is not None:
            sizes = replace(sizes, left=min(sizes.left, -(-seen[0] // network.subsampling_factor)))
        self.sizes = sizes
        bounded = network if isinstance(network, BoundedNetwork) else None
        self._bounded = bounded.draft if bounded is not None and drafts else bounded

    def open(self, device: torch.device, speaker: Speaker | None = None) -> WindowStream:
        """Opens a new stream, of a known speaker if one is given."""
        return WindowStream(self._network.num_features, self._network.subsampling_factor, self.sizes, device, speaker)

    @torch.no_grad()
    def step(self, streams: Sequence[WindowStream]) -> list[Tensor]:
        """Evaluates the next window of each stream; all must be ready.

        Returns:
            log_prob (T', C) of the chunk of each stream.
        """
        windows = [stream.window() for stream in streams]
        if not any(map(len, windows)):
            nothing = windows[0].new_zeros(0, self._network.num_tokens)
            return [stream.accept(nothing) for stream in streams]
        if self._bounded is not None:
            chunks = self._outputs_in_context(self._bounded, streams, windows)
        else:
            chunks = self._outputs(streams, windows)
        return [stream.accept(chunk) for stream, chunk in zip(streams, chunks, strict=True)]

    @torch.no_grad()
    def utterance_log_probs(self, streams: Sequence[WindowStream]) -> list[Tensor]:
        """Evaluates the utterance of each stream so far as a whole, normalized by the whole stream so far.

        The first windows of a stream are normalized by only about a second of it, which causes a tenth more errors.

        Returns:
            log_prob (T', C) of each utterance, with as many frames as `step` has returned.
        """
        utterances = [stream.utterance() for stream in streams]
        if not any(map(len, utterances)):
            nothing = utterances[0].new_zeros(0, self._network.num_tokens)
            return [stream.of_utterance(nothing) for stream in streams]
        num_frames = torch.tensor([len(utterance) for utterance in utterances], device=utterances[0].device)
        padded = nn.utils.rnn.pad_sequence(utterances, batch_first=True)
        outputs, _ = in_parts(self._last_layer, padded, num_frames, self._max_frames)
        return [stream.of_utterance(row) for stream, row in zip(streams, outputs, strict=True)]

    def _last_layer(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized features (N, T, F), num_frames (N,) -> log_prob (N, T', C), num_frames' (N,)."""
        outputs, num_outputs = self._network.forward_normalized(features, num_frames)
        return outputs[-1], num_outputs

    def _outputs(self, streams: Sequence[WindowStream], windows: Sequence[Tensor]) -> list[Tensor]:
        """Normalized windows (T, F) -> log_prob (T', C) of their chunks, taken from the whole windows' outputs."""
        num_frames = torch.tensor([len(window) for window in windows], device=windows[0].device)
        padded = nn.utils.rnn.pad_sequence(list(windows), batch_first=True)
        outputs, num_outputs = self._last_layer(padded, num_frames)
        chunks = []
        for stream, row, num in zip(streams, outputs, num_outputs.tolist(), strict=True):
            begin = stream.num_history // self._network.subsampling_factor
            chunks.append(row[begin : begin + self.sizes.chunk if stream.is_whole else num])
        return chunks

    def _outputs_in_context(
        self, network: BoundedNetwork, streams: Sequence[WindowStream], windows: Sequence[Tensor]
    ) -> list[Tensor]:
        """The same, but only the chunks' outputs are computed; context beyond a stream's ends is zero."""
        left, right = network.receptive_field
        factor = network.subsampling_factor
        nums = [
            self.sizes.chunk if stream.is_whole else -(-(len(window) - stream.num_history) // factor)
            for stream, window in zip(streams, windows, strict=True)
        ]
        length = left + max(nums) * factor + right
        rows = []
        for stream, window, num in zip(streams, windows, nums, strict=True):
            begin = stream.num_history - left
            seen = window[max(0, begin) : stream.num_history + num * factor + right]
            before = max(0, -begin)
            rows.append(F.pad(seen, (0, 0, before, length - before - len(seen))))
        outputs = network.forward_in_context(torch.stack(rows))
        return [row[:num] for row, num in zip(outputs, nums, strict=True)]
