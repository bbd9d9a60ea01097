"""Recognizes streams: words while the audio is still coming, for many streams at once that open and close at any time.

A stream is cut into chunks. The acoustic model evaluates each chunk in a window with audio on both sides of it, and
only the chunk's own outputs are used. Where chunks lie depends on nothing but the beginning of the stream, so that
results do not depend on how the audio arrives.

Shapes: N streams, L samples, T frames of features, F features, T' frames of output, C tokens.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from asr.audio.cmvn import STD_FLOOR
from asr.audio.resample import FeatureStream, ResampleStream, checked_rate
from asr.audio.waveform import as_samples
from asr.decoding.build import LanguageModels
from asr.decoding.confidence import calibrated
from asr.decoding.interface import DecodeResult, Hypothesis
from asr.decoding.online import EndpointRules, StreamingDecoder
from asr.decoding.rejection import only_words, spoken
from asr.decoding.settings import Pass
from asr.decoding.token_passing import TokenPassingDecoder
from asr.decoding.warmup import made_up_log_prob, needs_warm_up
from asr.errors import AsrError
from asr.kernels.heap import release_now_and_then
from asr.lm.interface import LanguageModel
from asr.models.external.network import ExternalNetwork
from asr.models.external.streaming import StateEncoder, StateStream
from asr.models.interface import LOG_PROB_IN_NOISE, AcousticNetwork
from asr.recognizer import Recognizer
from asr.results import StageTimes, StreamResult, Word, notes_on, num_equal, words_in_time


class RunningNorm:
    """Mean and variance of the features of a stream so far; beyond `max_frames` frames the older ones decay.

    A window that is normalized by its own statistics would turn the noise of a pause into speech. Therefore windows are
    normalized by everything heard so far; of a pause only the first chunk counts; and as long as the features vary less
    than those of speech do, nothing is normalized at all.

    Args:
        feature_dim: F.
        max_frames: the maximum number of frames that count.
        min_feature_std: standard deviation, averaged over features, above which the stream is taken for speech.
        device: where the features are.
    """

    def __init__(self, feature_dim: int, max_frames: int, min_feature_std: float, device: torch.device) -> None:
        self._max_frames = max_frames
        self._min_feature_std = min_feature_std
        self._count = 0.0
        self._sums = torch.zeros(2, feature_dim, dtype=torch.float64, device=device)
        self._has_begun = False
        self._in_pause = False

    def statistics(self, features: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation, (F,) float32 each, of the frames so far and these (T, F), which are not kept.

        None as long as there has been nothing but noise.
        """
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
        # Of noise before the first word, too, only the first chunk counts.
        self._in_pause = not has_speech
        count = self._count + len(features)
        if count > self._max_frames:
            self._sums *= (self._max_frames - len(features)) / self._count
            count = self._max_frames
        self._count = count
        self._sums += _sums(features)


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

    Raises:
        AsrError: a size is out of range.
    """

    chunk: int
    left: int
    right: int
    memory: int
    min_feature_std: float = 0.0

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.left < 0 or self.right < 0 or self.memory < self.chunk:
            raise AsrError(
                f"windows of {self.chunk} frames with {self.left} before, {self.right} after and a memory of "
                f"{self.memory}: the chunk needs at least 1, the context at least 0, the memory at least a chunk."
            )


class WindowStream:
    """The features of one stream that its coming windows will see.

    Args:
        feature_dim: F.
        factor: frames of features for each frame of output.
        sizes: sizes of the windows.
        device: where the network is.
    """

    def __init__(self, feature_dim: int, factor: int, sizes: WindowSizes, device: torch.device) -> None:
        self._factor = factor
        self._sizes = sizes
        self._features = torch.zeros(0, feature_dim, device=device)
        # The frame of output at which the buffered features begin, and the next one to be output.
        self._first = 0
        self._next = 0
        self._is_closed = False
        self._is_done = False
        # False for the last window of a stream, which has less context than it could have.
        self._is_whole = True
        self._is_noise = False
        self._norm = RunningNorm(feature_dim, sizes.memory * factor, sizes.min_feature_std, device)

    def push(self, features: Tensor) -> None:
        """Adds features (T, F)."""
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
        """Whether a window can be evaluated."""
        return len(self._features) >= self._wanted() or (self._is_closed and not self._is_done)

    @property
    def is_done(self) -> bool:
        """Whether all windows of a closed stream have been evaluated."""
        return self._is_done

    def _wanted(self) -> int:
        """Number of features in the buffer when the next window is complete."""
        return (self._next - self._first + self._sizes.chunk + self._sizes.right) * self._factor

    def window(self) -> Tensor:
        """The next window (T, F), normalized; a call of `accept` must follow."""
        self._is_whole = len(self._features) >= self._wanted()
        seen = self._features[: self._wanted()]
        statistics = self._norm.statistics(seen[(self._next - self._first) * self._factor :])
        self._is_noise = statistics is None
        return torch.zeros_like(seen) if statistics is None else (seen - statistics[0]) / statistics[1]

    def accept(self, log_prob: Tensor) -> Tensor:
        """Cuts the outputs of the window (T', C) down to those of its chunk; those of the last window stay whole."""
        begin = self._next - self._first
        end = begin + self._sizes.chunk if self._is_whole else len(log_prob)
        chunk = log_prob[begin:end]
        if self._is_noise:
            chunk = torch.full_like(chunk, LOG_PROB_IN_NOISE)
            chunk[:, 0] = 0.0
        has_speech = bool((chunk.argmax(1) > 0).any())
        self._norm.add(self._features[begin * self._factor : end * self._factor], has_speech)
        self._is_done = not self._is_whole
        self._next = self._first + max(begin, end)
        first = max(0, self._next - self._sizes.left)
        self._features = self._features[(first - self._first) * self._factor :]
        self._first = first
        return chunk


class ChunkedEncoder:
    """Runs windows of many streams through the acoustic model in one batch.

    Args:
        network: the acoustic model.
        sizes: sizes of the windows. Left context that the network does not see is left out; what comes after a chunk
            also counts in the normalization, and stays.
    """

    def __init__(self, network: AcousticNetwork, sizes: WindowSizes) -> None:
        self._network = network
        seen: tuple[int, int] | None = getattr(network, "receptive_field", None)
        if seen is not None:
            sizes = replace(sizes, left=min(sizes.left, -(-seen[0] // network.subsampling_factor)))
        self.sizes = sizes

    def open(self, device: torch.device) -> WindowStream:
        """A new stream."""
        return WindowStream(self._network.num_features, self._network.subsampling_factor, self.sizes, device)

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
        num_frames = torch.tensor([len(window) for window in windows], device=windows[0].device)
        padded = nn.utils.rnn.pad_sequence(windows, batch_first=True)
        outputs, num_outputs = self._network.forward_normalized(padded, num_frames)
        return [
            stream.accept(row[:num])
            for stream, row, num in zip(streams, outputs[-1], num_outputs.tolist(), strict=True)
        ]


PARTIAL_POLICIES = {
    "agreed": "words on which the best paths of two chunks in succession agree",
    "best": "the best path at each chunk; earliest, and most often revised",
    "stable": "words that all paths share; never revised",
}
"""Which words of an unfinished utterance are shown -> what that means."""


@dataclass(frozen=True)
class StreamingOptions:
    """Windows of the acoustic model, partial results and endpoints. Times are in seconds.

    Args:
        chunk_seconds: audio between two results.
        left_seconds: the maximum of audio before a chunk that the acoustic model sees.
        right_seconds: audio after a chunk that the acoustic model sees. A word comes out this much, up to a chunk, and
            the time of computing after it was spoken.
        memory_seconds: the maximum amount of audio whose mean and variance normalize the features.
        min_feature_std: standard deviation of the log energies, averaged over bands, below which the beginning of a
            stream is taken for noise. Stationary noise has 0.8, clean speech 3 or more; 0 takes nothing for noise.
        partial_policy: which words of an unfinished utterance are shown, a key of `PARTIAL_POLICIES`.
        silence_before_words: a pause this long ends an utterance without words.
        silence_after_words: a pause this long ends an utterance with words.
        longest_utterance: an utterance ends here at the latest; from half of it on ever shorter pauses end it.
        force_commit_seconds: words of the best path become final when they are this old. None makes final only what all
            paths share, which is exact, and bounded because `longest_utterance` ends utterances. Token passing only.
        decoder: `token-passing`, with the language model within the search, or `k2`, which rescores its lattice; k2's
            cost and memory grow with an utterance, and none of its partial results is stable.
        cache_bytes: memory for the recurrent language model's histories.

    Raises:
        AsrError: a value is out of range.
    """

    chunk_seconds: float = 0.64
    left_seconds: float = 4.0
    right_seconds: float = 0.64
    memory_seconds: float = 30.0
    min_feature_std: float = 1.25
    partial_policy: str = "agreed"
    silence_before_words: float = 5.0
    silence_after_words: float = 1.0
    longest_utterance: float = 30.0
    force_commit_seconds: float | None = None
    decoder: str = "token-passing"
    cache_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        for name in ("chunk_seconds", "silence_before_words", "silence_after_words", "longest_utterance"):
            if not 0 < getattr(self, name) < math.inf:
                raise AsrError(f"streaming: {name} is {getattr(self, name)}; it must be above 0, and finite.")
        commit = self.force_commit_seconds
        if commit is not None and not 0 < commit < math.inf:
            raise AsrError(f"streaming: force_commit_seconds is {commit}; it must be above 0, and finite, or None.")
        for name in ("left_seconds", "right_seconds", "memory_seconds", "min_feature_std"):
            if not 0 <= getattr(self, name) < math.inf:
                raise AsrError(f"streaming: {name} is {getattr(self, name)}; it must be 0 or more, and finite.")
        if self.decoder not in ("token-passing", "k2"):
            raise AsrError(f"streaming: there is no decoder {self.decoder!r}; choose token-passing or k2.")
        if self.partial_policy not in PARTIAL_POLICIES:
            known = ", ".join(PARTIAL_POLICIES)
            raise AsrError(f"streaming: there is no partial_policy {self.partial_policy!r}; choose one of {known}.")

    def window_sizes(self, frame_seconds: float) -> WindowSizes:
        """The sizes of windows in frames of output, which are `frame_seconds` apart."""
        chunk = max(1, round(self.chunk_seconds / frame_seconds))
        return WindowSizes(
            chunk=chunk,
            left=round(self.left_seconds / frame_seconds),
            right=round(self.right_seconds / frame_seconds),
            memory=max(chunk, round(self.memory_seconds / frame_seconds)),
            min_feature_std=self.min_feature_std,
        )

    def endpoint_rules(self, frame_seconds: float) -> EndpointRules:
        """The endpoint rules in frames of output."""
        return EndpointRules(
            silence_before_words=max(1, round(self.silence_before_words / frame_seconds)),
            silence_after_words=max(1, round(self.silence_after_words / frame_seconds)),
            longest=max(1, round(self.longest_utterance / frame_seconds)),
        )


_NO_SAMPLES = torch.zeros(0)


# For the language model that a warm-up asks, and the frames of a chunk in it.
_WARM_UP_BYTES, _WARM_UP_CHUNK = 1 << 26, 16


_Method = TypeVar("_Method", bound=Callable[..., Any])


# What says how windows are cut and normalized.
_OF_WINDOWS = ("left_seconds", "right_seconds", "memory_seconds", "min_feature_std")


def _encoder(network: Any, options: StreamingOptions, frame_seconds: float) -> Any:
    """What runs chunks through the acoustic model: in windows, unless it is from elsewhere and keeps states.

    Raises:
        AsrError: it is from elsewhere and reads whole utterances, or an option is for windows, of which it has none.
    """
    if not isinstance(network, ExternalNetwork):
        return ChunkedEncoder(network, options.window_sizes(frame_seconds))
    for name in _OF_WINDOWS:
        if getattr(options, name) != getattr(StreamingOptions, name):
            raise AsrError(f"streaming: {name} is for windows; {network.model.name} keeps states; leave it out.")
    return StateEncoder(network)


def _one_at_a_time(method: _Method) -> _Method:
    """The method under its object's lock."""

    @wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


@dataclass
class _Stream:
    """The parts of a stream, and where its current utterance begins (in frames of output)."""

    resampler: ResampleStream
    features: FeatureStream
    windows: WindowStream | StateStream
    search: int
    begin: int = 0
    num_samples: int = 0
    sampling_rate: int = 0
    is_closed: bool = False
    best: tuple[int, ...] = ()
    shown: tuple[int, ...] = field(default=())
    # Of the current utterance so far, (T', C) each, for its confidences.
    log_probs: list[Tensor] = field(default_factory=list)


class SecondLook:
    """Searches an utterance of a stream again when it has ended, as that of a recording is searched.

    The search of a stream keeps no lattice, which confidences need, and its beams hold fewer words, since each history
    of a language model within the search counts. A lattice that the language model rescores finds better words.

    Args:
        recognizer: with a calibration. A language model of the user's, which holds what open streams need, is not
            asked again: words then stay as they are.
        options: under the policy `stable`, words stay as they are.
    """

    def __init__(self, recognizer: Recognizer, options: StreamingOptions) -> None:
        assert recognizer.calibration is not None
        self._calibration = recognizer.calibration
        self._keeps_words = options.partial_policy == "stable" or recognizer.language_model is not None
        self._models = LanguageModels(None, None)
        if not self._keeps_words:
            self._models = recognizer.build_language_models(options.cache_bytes)
        self._options = recognizer.options
        graph, fusion = recognizer.graph.decoding_graph(), recognizer.lm_fusion
        self._decoder = TokenPassingDecoder(graph, self._options, lm_fusion=fusion, keep_lattice=True)

    def at(self, log_prob: Tensor, decoded: DecodeResult) -> DecodeResult:
        """What was found in an utterance, now with confidences.

        Args:
            log_prob: (T', C) of the utterance.
            decoded: what the stream's search found.
        """
        (again,) = self._decoder.decode(log_prob[None], lm=self._models.model)
        self._models.forget_contexts()
        if not again.reached_final or (self._keeps_words and decoded.best is not None):
            again = replace(again, hypotheses=decoded.hypotheses, reached_final=decoded.reached_final)
        if again.best is None:
            return again
        best = calibrated(again.best, again.lattice, self._options, self._calibration, again.original_frame)
        return replace(again, hypotheses=(best,))


class StreamingRecognizer:
    """Recognizes streams; those that have a chunk ready form one batch.

    `push` takes samples, and `step` works on one chunk of each stream that has enough of them. Results depend neither
    on how the samples are cut nor on the other streams, and the memory for a stream does not grow. The acoustic model
    sees a stream through windows (see `StreamingOptions`), so that its words may differ from those that `Recognizer`
    finds in the whole recording. Several threads may call the methods; they take turns, since all streams share the
    search and the language model's caches. `step` returns results of every stream, whoever calls it.

    Args:
        recognizer: its bundle, mode, language model, decoding options and device are used. A language model that was
            handed to it should answer either it or streams at any time, since both tell the model what to forget.
        options: windows, partial results and endpoints.

    Attributes:
        engine: the recurrent model's query engine, for its statistics; None without one.
        times: seconds of computing so far, all streams together; `search` includes the language model.

    Raises:
        AsrError: the decoder cannot run here.
    """

    def __init__(self, recognizer: Recognizer, options: StreamingOptions | None = None) -> None:
        self.options = options if options is not None else StreamingOptions()
        self._lock = threading.RLock()
        self._recognizer = recognizer
        self._rate = recognizer.sampling_rate
        network: Any = recognizer.acoustic_model
        features: Any = recognizer.features
        self.frame_seconds = features.frame_shift * network.subsampling_factor / self._rate
        self._check_settings()
        self._windows = _encoder(network, self.options, self.frame_seconds)
        recognizer.eval()
        models = recognizer.build_language_models(self.options.cache_bytes)
        self.engine = models.engine
        self.times = StageTimes()
        self._graph = recognizer.graph.decoding_graph()
        self._second_look = SecondLook(recognizer, self.options) if recognizer.calibration else None
        self._decoder = self._new_decoder(models.model)
        self._warm_up()
        self._streams: dict[int, _Stream] = {}
        self._num_opened = 0

    def _check_settings(self) -> None:
        """Refuses what streams cannot do."""
        settings = self._recognizer.settings
        if settings.language_models.second_pass != "none":
            raise AsrError(
                f"streams have no second pass ({settings.language_models.second_pass}); set second_pass to none."
            )
        is_k2 = self.options.decoder == "k2"
        fusion = "lattice" if is_k2 else "search"
        self._recognizer.refuse_unused(Pass(self._recognizer.mode, fusion, *settings.models, keeps_lattice=is_k2))

    def _new_decoder(self, model: LanguageModel | None) -> Any:
        options, rules = self._recognizer.options, self.options.endpoint_rules(self.frame_seconds)
        if self.options.decoder == "k2":
            k2_online = importlib.import_module("asr.decoding.k2_online")
            return k2_online.K2StreamingDecoder(self._graph, options, model, rules)
        seconds = self.options.force_commit_seconds
        commit_frames = None if seconds is None else max(1, round(seconds / self.frame_seconds))
        return StreamingDecoder(self._graph, options, model, rules, commit_frames)

    @torch.no_grad()
    def _warm_up(self) -> None:
        """Compiles what streams need, so that the first one does not wait for it."""
        recognizer = self._recognizer
        kind = ("streams", self.options.decoder)
        is_external = recognizer.language_model is not None
        if is_external or not needs_warm_up(recognizer.bundle, recognizer.mode, recognizer.device, kind):
            return
        # Language models of its own: caches and statistics start with the first real stream.
        decoder = self._new_decoder(recognizer.build_language_models(_WARM_UP_BYTES).model)
        log_prob, num_frames = made_up_log_prob(self._graph)
        streams = decoder.start(len(num_frames))
        for begin in range(0, log_prob.shape[1], _WARM_UP_CHUNK):
            chunk = log_prob[:, begin : begin + _WARM_UP_CHUNK]
            decoder.advance(streams, chunk, (num_frames - begin).clamp(0, chunk.shape[1]))
        for stream in streams:
            decoder.is_endpoint(stream)
            decoder.partial(stream)
            decoder.finalize(stream)
        if self._second_look is not None:
            self._second_look.at(log_prob[0], DecodeResult((), False, 0))
        noise = torch.randn(recognizer.sampling_rate, generator=torch.Generator().manual_seed(0)) * 0.01
        features, num_features = recognizer.features(noise[None], torch.tensor([len(noise)]))
        recognizer.acoustic_model.forward_normalized(features, num_features)  # type: ignore[operator]

    @_one_at_a_time
    def open(self, sampling_rate: int | None = None) -> int:
        """Opens a stream.

        Args:
            sampling_rate: of its samples, in Hz; the bundle's own if None.

        Returns:
            the stream's number.

        Raises:
            AsrError: the sampling rate is out of range.
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
    def push(self, stream: int, samples: Any) -> None:
        """Takes more samples of a stream.

        Args:
            stream: an open stream.
            samples: (L,) of any length: a tensor or NumPy array of floating-point samples in [-1, 1], int16 or int32.

        Raises:
            AsrError: the stream is not open, or the samples have another shape or type, or are not finite. They are
                then left out, and the stream goes on.
        """
        one = self._open(stream)
        where = f"stream {stream} at {one.num_samples / one.sampling_rate:.2f} s"
        samples = as_samples(samples, f"{where}: the piece")
        if samples.dim() != 1:
            raise AsrError(f"{where}: the piece has the shape {tuple(samples.shape)}; give (samples,).")
        if not bool(torch.isfinite(samples).all()):
            raise AsrError(f"{where}: the piece has samples that are NaN or infinite; it is left out.")
        one.num_samples += len(samples)
        self.times.audio_seconds += len(samples) / one.sampling_rate
        with self.times.measure("features", self._recognizer.device):
            one.windows.push(one.features.push(one.resampler.push(samples.float().cpu())))

    @_one_at_a_time
    @torch.no_grad()
    def close(self, stream: int) -> None:
        """Ends a stream; its last result still comes from `step`."""
        one = self._open(stream)
        one.is_closed = True
        one.windows.push(one.features.push(one.resampler.push(_NO_SAMPLES, is_last=True), is_last=True))
        one.windows.close()

    @_one_at_a_time
    def step(self) -> list[StreamResult]:
        """Works on one chunk of each stream that has one.

        Returns:
            New results in the order of the streams. The list is empty where nothing has changed, even if there was work
            to do; ask `is_ready` for that.
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
            if self._second_look is not None:
                for one, chunk in zip(streams, chunks, strict=True):
                    one.log_probs.append(chunk.half())
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
                one.begin, one.best, one.shown, one.log_probs = one.windows.num_outputs, (), (), []
            return
        hypothesis = self._decoder.partial(one.search)
        word_ids = hypothesis.word_ids if hypothesis is not None else ()
        num_stable = self._decoder.num_settled_words(one.search)
        num_shown = {"best": len(word_ids), "stable": num_stable}.get(
            self.options.partial_policy, max(num_stable, num_equal(one.best, word_ids))
        )
        one.best = word_ids
        if hypothesis is not None and word_ids[:num_shown] != one.shown:
            one.shown = word_ids[:num_shown]
            words = self._words(one, hypothesis)[:num_shown]
            begin, end = self._span(one)
            yield StreamResult(number, False, "", begin, end, words, min(num_stable, len(words)))

    def _final(self, number: int, one: _Stream, decoded: DecodeResult, reason: str) -> StreamResult:
        begin, end = self._span(one)
        if self._second_look is not None:
            decoded = self._second_look.at(torch.cat(one.log_probs).float(), decoded)
        release_now_and_then(end - begin)
        best = decoded.best
        if best is None:
            return StreamResult(number, True, reason, begin, end, (), 0, decoded.reached_final)
        words = self._words(one, best)
        notes = notes_on(len(best.words) - len(words), words)
        scores = (best.am_score, best.graph_score, best.lm_score, best.total)
        reached_final = decoded.reached_final
        return StreamResult(number, True, reason, begin, end, words, len(words), reached_final, *scores, notes)

    def _span(self, one: _Stream) -> tuple[float, float]:
        heard = one.num_samples / one.sampling_rate
        end = one.windows.num_outputs * self.frame_seconds
        return one.begin * self.frame_seconds, heard if one.windows.is_done else min(end, heard)

    def _words(self, one: _Stream, hypothesis: Hypothesis) -> tuple[Word, ...]:
        if self._recognizer.aligner is not None:
            hypothesis = self._recognizer.aligner.aligned(hypothesis)
        limit = self._recognizer.options.max_token_seconds
        hypothesis = only_words(hypothesis, spoken(hypothesis, self.frame_seconds, limit))
        return words_in_time(hypothesis, self.frame_seconds, one.num_samples / one.sampling_rate, one.begin)


def recognize_stream(
    recognizer: Recognizer,
    pieces: Iterable[Any],
    sampling_rate: int | None = None,
    options: StreamingOptions | None = None,
) -> Iterator[StreamResult]:
    """Recognizes one stream while its samples arrive.

    Args:
        recognizer: the recognizer.
        pieces: samples (L,) of any length, as `StreamingRecognizer.push` takes them.
        sampling_rate: in Hz; the bundle's own if None.
        options: see `StreamingOptions`.

    Yields:
        Partial and final results; the last one has the reason `end`.

    Example:
        >>> for result in recognize_stream(recognizer, microphone, 16000):  # doctest: +SKIP
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
