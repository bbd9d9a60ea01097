"""Mean and variance of the features that a stream has had so far, where those of the whole recording are not known.

Shapes: T frames, F features.


An acoustic model that sees whole utterances, run over windows of a stream.

A stream is cut into chunks, each is evaluated in a window with so much before and so much behind it, and only the
chunk's own outputs are used. Where chunks lie depends on nothing but the beginning of the stream, so that the outputs
do not depend on how the audio came in.

Shapes: N streams, T frames of features, F features, T' frames of output, C tokens.


How a stream is recognized: windows of the acoustic model, partial results, the end of an utterance.

Words while the audio still comes: many streams through one recognizer, each joining and leaving when it wants to."""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from asr.audio.resample import FeatureStream, ResampleStream, checked_rate
from asr.decoding.build import language_models
from asr.decoding.interface import DecodeResult, Hypothesis
from asr.decoding.online import EndpointRules, StreamingDecoder
from asr.errors import AsrError
from asr.models.interface import AcousticNetwork
from asr.recognizer import Recognizer
from asr.results import StageTimes, StreamResult, Word, num_equal, words_in_time

_FLOOR = 1e-5


class RunningNorm:
    """Sums over the frames so far, of which the older fade once there are more than `max_frames`.

    A network that normalises by a window of its own would take the noise of a pause for speech. Therefore a window is
    normalised by all that has been heard, of a pause only the first chunk counts, and before the features have varied
    as those of speech do nothing is normalised at all.

    Args:
        feature_dim: F.
        max_frames: so many frames count at most.
        min_feature_std: the standard deviation, averaged over features, from which on there is taken to be speech.
        device: where features are.
    """

    def __init__(self, feature_dim: int, max_frames: int, min_feature_std: float, device: torch.device) -> None:
        self._max_frames = max_frames
        self._least_spread = min_feature_std
        self._count = 0.0
        self._sums = torch.zeros(2, feature_dim, dtype=torch.float64, device=device)
        self._has_begun = False
        self._in_pause = False

    def statistics(self, features: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation, (F,) float32 each, with these frames (T, F) counted in for now.

        None as long as there has been nothing but noise.
        """
        count = self._count + len(features)
        mean, square = (self._sums + _sums(features)) / max(count, 1.0)
        std = (square - mean.square()).clamp(min=0.0).sqrt()
        if not self._has_begun and float(std.mean()) < self._least_spread:
            return None
        self._has_begun = True
        return mean.float(), std.float().clamp(min=_FLOOR)

    def take(self, features: Tensor, has_speech: bool) -> None:
        """Counts frames (T, F) in for good."""
        if not has_speech and self._in_pause:
            return
        # Noise before the first word counts once, too, and not all that has been waited.
        self._in_pause = not has_speech
        count = self._count + len(features)
        if count > self._max_frames:
            self._sums *= (self._max_frames - len(features)) / self._count
            count = self._max_frames
        self._count = count
        self._sums += _sums(features)


def _sums(features: Tensor) -> Tensor:
    """(T, F) -> (2, F), of the values and of their squares."""
    values = features.double()
    return torch.stack([values.sum(0), values.square().sum(0)])


_NOT_SPOKEN = -20.0


@dataclass(frozen=True)
class WindowSizes:
    """In frames of output.

    Args:
        chunk: outputs that a window yields.
        left: frames seen before the chunk.
        right: frames seen behind it: for so long, and for the chunk, an output is waited for.
        memory: so many frames count in the normalisation of the features at most.
        min_feature_std: of the features, see `RunningNorm`; until it is reached outputs are blank.

    Raises:
        AsrError: a size is out of its range.
    """

    chunk: int
    left: int
    right: int
    memory: int
    min_feature_std: float = 0.0

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
        self._norm = RunningNorm(feature_dim, sizes.memory * factor, sizes.min_feature_std, device)

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


class ChunkedEncoder:
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
        outputs, num_outputs = self._network.forward_normalized(padded, num_frames)
        return [
            stream.accept(row[:num])
            for stream, row, num in zip(streams, outputs[-1], num_outputs.tolist(), strict=True)
        ]


PARTIALS = {
    "agreed": "words on which the best paths of two chunks in succession agree",
    "best": "the best path at each chunk; soonest, and most often taken back",
    "settled": "words that all paths share; never taken back",
}


@dataclass(frozen=True)
class StreamingOptions:
    """Seconds, unless said otherwise.

    Args:
        chunk_seconds: audio between two results.
        left_seconds: audio before a chunk that the acoustic model sees.
        right_seconds: audio behind it that the acoustic model sees. A word is told so much, and up to a chunk, after
            it was spoken, and the time that computing takes.
        memory_seconds: audio whose mean and variance the features are normalised by, at most.
        min_feature_std: standard deviation of the features' log energies, averaged over bands, until which a stream's
            beginning is taken for noise. Stationary noise has 0.8, clean speech 3 or more; 0 for none.
        partials: a key of `PARTIALS`.
        silence_before_words: a pause this long ends an utterance in which nothing has been said.
        silence_after_words: a pause this long ends an utterance with words.
        longest_utterance: an utterance ends here at the latest; from half of it on shorter and shorter pauses end it.
        commit_seconds: what the best path said so long ago is decided; None decides only what all paths share, which is
            exact and, as long as `longest_utterance` ends utterances, bounded. The torch pass only.
        first_pass: `torch`, with the language model inside the search, or `k2`, with the language model behind it; k2's
            cost and memory grow with an utterance, and of its partial results nothing is settled.
        cache_bytes: what the recurrent language model's histories may take.

    Raises:
        AsrError: a number is out of its range.
    """

    chunk_seconds: float = 0.64
    left_seconds: float = 4.0
    right_seconds: float = 0.64
    memory_seconds: float = 30.0
    min_feature_std: float = 1.25
    partials: str = "agreed"
    silence_before_words: float = 5.0
    silence_after_words: float = 1.0
    longest_utterance: float = 30.0
    commit_seconds: float | None = None
    first_pass: str = "torch"
    cache_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        for name in ("chunk_seconds", "silence_before_words", "silence_after_words", "longest_utterance"):
            if not 0 < getattr(self, name) < math.inf:
                raise AsrError(f"streaming: {name} is {getattr(self, name)}; it must be above 0, and finite.")
        if self.commit_seconds is not None and not 0 < self.commit_seconds < math.inf:
            raise AsrError(f"streaming: commit_seconds is {self.commit_seconds}; it must be above 0, or none.")
        for name in ("left_seconds", "right_seconds", "memory_seconds", "min_feature_std"):
            if not 0 <= getattr(self, name) < math.inf:
                raise AsrError(f"streaming: {name} is {getattr(self, name)}; it must be 0 or more, and finite.")
        if self.first_pass not in ("torch", "k2"):
            raise AsrError(f"streaming: there is no first pass {self.first_pass!r}; it is torch or k2.")
        if self.partials not in PARTIALS:
            raise AsrError(f"streaming: there are no partial results {self.partials!r}; choose {', '.join(PARTIALS)}.")

    def window_sizes(self, frame_seconds: float) -> WindowSizes:
        """In frames of output, `frame_seconds` apart."""
        chunk = max(1, round(self.chunk_seconds / frame_seconds))
        return WindowSizes(
            chunk=chunk,
            left=round(self.left_seconds / frame_seconds),
            right=round(self.right_seconds / frame_seconds),
            memory=max(chunk, round(self.memory_seconds / frame_seconds)),
            min_feature_std=self.min_feature_std,
        )

    def endpoint_rules(self, frame_seconds: float) -> EndpointRules:
        """In frames of output."""
        return EndpointRules(
            silence_before_words=max(1, round(self.silence_before_words / frame_seconds)),
            silence_after_words=max(1, round(self.silence_after_words / frame_seconds)),
            longest=max(1, round(self.longest_utterance / frame_seconds)),
        )


_NO_SAMPLES = torch.zeros(0)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _one_at_a_time(method: _Method) -> _Method:
    """The method under its object's lock."""

    @wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


@dataclass
class _Stream:
    """A stream's parts and where its present utterance begins, in frames of output."""

    resampler: ResampleStream
    features: FeatureStream
    windows: WindowStream
    search: int
    begin: int = 0
    num_samples: int = 0
    sampling_rate: int = 0
    is_closed: bool = False
    best: tuple[int, ...] = ()
    shown: tuple[int, ...] = field(default=())


class StreamingRecognizer:
    """Recognizes streams, all that are ready in one batch.

    `push` takes samples, `step` works on a chunk of each stream that has enough of them. The results depend neither on
    how a stream's samples are cut nor on what other streams there are, and a stream's memory does not grow. The
    acoustic model hears a stream through windows (see `StreamingOptions`), so that its words are not exactly those that
    `Recognizer` finds in the whole recording. Several threads may call the methods; they take turns, since all streams
    share the search and the language model's caches. `step` returns results of every stream, whoever calls it.

    Args:
        recognizer: its bundle, mode, decoding options and device are used.
        options: windows, partial results and the ends of utterances.

    Attributes:
        engine: the recurrent model's query engine, for its statistics; None without one.
        times: what has been computed so far, all streams together; `search` has the language model in it.

    Raises:
        AsrError: an option is out of its range.
    """

    def __init__(self, recognizer: Recognizer, options: StreamingOptions | None = None) -> None:
        self.options = options if options is not None else StreamingOptions()
        self._lock = threading.RLock()
        self._recognizer = recognizer
        self._rate = recognizer.sampling_rate
        network: Any = recognizer.acoustic_model
        features: Any = recognizer.features
        self.frame_seconds = features.frame_shift * network.subsampling_factor / self._rate
        self._windows = ChunkedEncoder(network, self.options.window_sizes(self.frame_seconds))
        device = recognizer.device
        models = language_models(
            recognizer.bundle,
            recognizer.mode,
            recognizer.rnn_weight,
            device,
            recognizer.lm_device_bytes,
            self.options.cache_bytes,
        )
        self.engine = models.engine
        self.times = StageTimes()
        graph = recognizer.bundle.graph.to(device)
        rules = self.options.endpoint_rules(self.frame_seconds)
        self._decoder: Any
        if self.options.first_pass == "k2":
            k2_streaming = importlib.import_module("asr.decoding.k2_online")
            self._decoder = k2_streaming.K2StreamingDecoder(graph, recognizer.options, models.model, rules)
        else:
            seconds = self.options.commit_seconds
            commit_frames = None if seconds is None else max(1, round(seconds / self.frame_seconds))
            self._decoder = StreamingDecoder(graph, recognizer.options, models.model, rules, commit_frames)
        self._streams: dict[int, _Stream] = {}
        self._num_opened = 0

    @_one_at_a_time
    def open(self, sampling_rate: int | None = None) -> int:
        """A new stream's number; the sampling rate of its samples is the bundle's own if None.

        Raises:
            AsrError: as `checked_rate`.
        """
        rate = self._rate if sampling_rate is None else checked_rate(sampling_rate)
        (search,) = self._decoder.start()
        features: Any = self._recognizer.features
        number = self._num_opened
        self._num_opened += 1
        self._streams[number] = _Stream(
            ResampleStream(rate, self._rate),
            FeatureStream(features),
            self._windows.open(self._recognizer.device),
            search,
            sampling_rate=rate,
        )
        return number

    @_one_at_a_time
    @torch.no_grad()
    def push(self, stream: int, samples: Tensor) -> None:
        """Takes more of a stream's samples.

        Args:
            stream: an open stream.
            samples: (L,) float in [-1, 1], as few or as many as there are.

        Raises:
            AsrError: the stream is not open, or the samples are of another shape or type, or not numbers. The stream
                then is as if they had not come, and goes on.
        """
        one = self._open(stream)
        where = f"stream {stream} at {one.num_samples / one.sampling_rate:.2f} s"
        if not isinstance(samples, Tensor):
            raise AsrError(f"{where}: a {type(samples).__name__}; give a tensor, of numpy's torch.from_numpy(array).")
        if samples.dim() != 1 or not samples.is_floating_point():
            raise AsrError(
                f"{where}: samples of shape {tuple(samples.shape)} and type {samples.dtype}; give (samples,) of "
                "floating-point numbers in [-1, 1]."
            )
        if not bool(torch.isfinite(samples).all()):
            raise AsrError(f"{where}: there are samples that are NaN or infinite; this piece is left out.")
        one.num_samples += len(samples)
        self.times.audio_seconds += len(samples) / one.sampling_rate
        with self.times.measure("features", self._recognizer.device):
            one.windows.push(one.features.push(one.resampler.push(samples.float().cpu())))

    @_one_at_a_time
    @torch.no_grad()
    def close(self, stream: int) -> None:
        """No more samples will come; the stream's last result is still to come from `step`."""
        one = self._open(stream)
        one.is_closed = True
        one.windows.push(one.features.push(one.resampler.push(_NO_SAMPLES, is_last=True), is_last=True))
        one.windows.close()

    @_one_at_a_time
    def step(self) -> list[StreamResult]:
        """Works on a chunk of each stream that has one.

        Returns:
            New results in the order of the streams; nothing also where nothing has changed, see `is_ready`.
        """
        numbers = [number for number, one in self._streams.items() if one.windows.is_ready]
        if not numbers:
            return []
        streams = [self._streams[number] for number in numbers]
        device = self._recognizer.device
        with self.times.measure("acoustic model", device):
            chunks = self._windows.step([one.windows for one in streams])
        num_frames = torch.tensor([len(chunk) for chunk in chunks])
        log_prob = torch.nn.utils.rnn.pad_sequence(chunks, batch_first=True)
        with self.times.measure("search", device):
            self._decoder.advance([one.search for one in streams], log_prob, num_frames)
            return [result for number in numbers for result in self._results(number)]

    @property
    @_one_at_a_time
    def is_ready(self) -> bool:
        """Whether `step` has something to work on."""
        return any(one.windows.is_ready for one in self._streams.values())

    def _open(self, stream: int) -> _Stream:
        if stream not in self._streams or self._streams[stream].is_closed:
            raise AsrError(f"stream {stream} is not open; `open` opens streams and `close` closes them.")
        return self._streams[stream]

    def _results(self, number: int) -> Iterator[StreamResult]:
        one = self._streams[number]
        is_end = one.windows.is_done
        if is_end or self._decoder.is_endpoint(one.search):
            result = self._decoder.finalize(one.search)
            if is_end:
                del self._streams[number]
            if is_end or (result.best is not None and result.best.words):
                yield self._final(number, one, result, "end" if is_end else "pause")
            if not is_end:
                (one.search,) = self._decoder.start()
                one.begin, one.best, one.shown = one.windows.num_outputs, (), ()
            return
        hypothesis = self._decoder.partial(one.search)
        word_ids = hypothesis.word_ids if hypothesis is not None else ()
        num_settled = self._decoder.num_settled_words(one.search)
        num_shown = {"best": len(word_ids), "settled": num_settled}.get(
            self.options.partials, max(num_settled, num_equal(one.best, word_ids))
        )
        one.best = word_ids
        if hypothesis is not None and word_ids[:num_shown] != one.shown:
            one.shown = word_ids[:num_shown]
            words = self._words(one, hypothesis)[:num_shown]
            begin, end = self._span(one)
            yield StreamResult(number, False, "", begin, end, words, min(num_settled, num_shown))

    def _final(self, number: int, one: _Stream, decoded: DecodeResult, reason: str) -> StreamResult:
        begin, end = self._span(one)
        best = decoded.best
        if best is None:
            return StreamResult(number, True, reason, begin, end, (), 0, decoded.reached_final)
        words = self._words(one, best)
        scores = (best.am_score, best.graph_score, best.lm_score, best.total)
        return StreamResult(number, True, reason, begin, end, words, len(words), decoded.reached_final, *scores)

    def _span(self, one: _Stream) -> tuple[float, float]:
        heard = one.num_samples / one.sampling_rate
        end = one.windows.num_outputs * self.frame_seconds
        return one.begin * self.frame_seconds, heard if one.windows.is_done else min(end, heard)

    def _words(self, one: _Stream, hypothesis: Hypothesis) -> tuple[Word, ...]:
        if self._recognizer.aligner is not None:
            hypothesis = self._recognizer.aligner.aligned(hypothesis)
        return words_in_time(hypothesis, self.frame_seconds, one.num_samples / one.sampling_rate, one.begin)


def recognize_stream(
    recognizer: Recognizer,
    pieces: Iterable[Tensor],
    sampling_rate: int | None = None,
    options: StreamingOptions | None = None,
) -> Iterator[StreamResult]:
    """Recognizes one stream of samples as it comes.

    Args:
        recognizer: the recognizer.
        pieces: (L,) float samples each, of any length.
        sampling_rate: in Hz; the bundle's own if None.
        options: see `StreamingOptions`.

    Yields:
        Partial and final results, the last one with the reason `end`.

    Example:
        >>> for result in recognize_stream(recognizer, microphone, 16000):
        ...     print("final" if result.is_final else "partial", result.text)
    """
    streaming = StreamingRecognizer(recognizer, options)
    stream = streaming.open(sampling_rate)
    for samples in pieces:
        streaming.push(stream, samples)
        while streaming.is_ready:
            yield from streaming.step()
    streaming.close(stream)
    while streaming.is_ready:
        yield from streaming.step()
