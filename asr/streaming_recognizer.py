"""Words while the audio still comes: many streams through one recognizer, each joining and leaving when it wants to."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from asr.am.windows import WindowedNetwork, WindowStream
from asr.data.resampling import checked_rate
from asr.data.sample_stream import FeatureStream, ResampleStream
from asr.decoding.first_pass import DecodeResult, Hypothesis
from asr.decoding.streaming import StreamingDecoder
from asr.decoding_mode import language_models
from asr.errors import AsrError
from asr.evaluation.timing import StageTimes
from asr.recognizer import Recognizer
from asr.result import Word, words_in_time
from asr.stream_result import StreamResult, num_equal
from asr.streaming_options import StreamingOptions

_NO_SAMPLES = torch.zeros(0)


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
    `Recognizer` finds in the whole recording.

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
        self._recognizer = recognizer
        self._rate = recognizer.sampling_rate
        network: Any = recognizer.acoustic_model
        features: Any = recognizer.features
        self.frame_seconds = features.frame_shift * network.subsampling_factor / self._rate
        self._windows = WindowedNetwork(network, self.options.window_sizes(self.frame_seconds))
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
            k2_streaming = importlib.import_module("asr.decoding.k2_streaming")
            self._decoder = k2_streaming.K2StreamingDecoder(graph, recognizer.options, models.model, rules)
        else:
            seconds = self.options.commit_seconds
            commit_frames = None if seconds is None else max(1, round(seconds / self.frame_seconds))
            self._decoder = StreamingDecoder(graph, recognizer.options, models.model, rules, commit_frames)
        self._streams: dict[int, _Stream] = {}
        self._num_opened = 0

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

    @torch.no_grad()
    def close(self, stream: int) -> None:
        """No more samples will come; the stream's last result is still to come from `step`."""
        one = self._open(stream)
        one.is_closed = True
        one.windows.push(one.features.push(one.resampler.push(_NO_SAMPLES, is_last=True), is_last=True))
        one.windows.close()

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
