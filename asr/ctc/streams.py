"""Recognizes live streams with an external network that keeps states and a decoder that reads its output as it arrives.

Shapes: L samples, T frames.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from asr.audio.resample import ResampleStream, checked_rate
from asr.audio.samples import as_piece
from asr.ctc.interface import CTCHypothesis
from asr.ctc.recognizer import Network, words_in_seconds
from asr.decoding.online import EndpointRules
from asr.errors import AsrError
from asr.kernels.jit import uncompiled
from asr.kernels.memory import no_autograd
from asr.results import StageTimes, StreamResult, Word, num_shown

# The distance at which endpoints are looked for.
_ENDPOINT_SECONDS = 0.1


class StreamingNetwork(Network, Protocol):
    """A network that reads waveforms, whole or in chunks."""

    def stream(self) -> Any:
        """A new utterance: `accept` takes samples (L,) and `is_last`, and returns the frames (T, ...) they complete."""


class StreamingDecoder(Protocol):
    """A decoder such as `asr.ctc.CTCDecoder` and `asr.transducer.TransducerDecoder`."""

    @property
    def stream(self) -> Callable[..., Any]:
        """Begins a new utterance: `accept`, `partial`, `num_stable_words` and `finish`."""


class StreamSettings(Protocol):
    """What is needed of `asr.streaming.StreamingOptions`."""

    @property
    def partial_policy(self) -> str: ...

    def endpoint_rules(self, frame_seconds: float) -> EndpointRules: ...


@dataclass
class _Stream:
    """The state of a stream.

    Attributes:
        reader: the network's.
        search: the decoder's, of the current utterance.
        held: samples that the network has not read.
        begin, end: the frames at which the current utterance begins, and up to which it was decoded.
        best: words of the best hypothesis after the last chunk.
        shown: words of the last partial result.
    """

    resampler: ResampleStream
    reader: Any
    search: Any
    sampling_rate: int
    held: Tensor = field(default_factory=lambda: torch.zeros(0))
    num_samples: int = 0
    is_closed: bool = False
    begin: int = 0
    end: int = 0
    best: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.is_closed or len(self.held) >= self.reader.chunk_samples


class ExternalStreams:
    """Recognizes streams; its methods are those of `asr.streaming.StreamingRecognizer`.

        network = load_transducer("onnx:zipformer/")
        streams = ExternalStreams(network, TransducerDecoder(network, ngram="3gram.arpa"), StreamingOptions())

    The network reads a stream once, in chunks of its own size, and keeps its states when an utterance ends. Results do
    not depend on how the samples are cut, nor on other streams. Words are final when their utterance ends.

    Args:
        network: the network.
        decoder: a decoder of its output.
        options: `asr.streaming.StreamingOptions`; of these, the partial policy and the endpoints act.
        confidences: whether final words have confidences, which the decoder's streams must be able to compute.

    Attributes:
        times: computing time so far of all streams together.

    Raises:
        AsrError: the network or the decoder cannot read streams.
    """

    engine = None

    def __init__(
        self, network: StreamingNetwork, decoder: StreamingDecoder, options: StreamSettings, confidences: bool = False
    ) -> None:
        self._network, self.options = network, options
        self._new_search: Callable[[], Any] = decoder.stream
        if confidences:
            self._new_search = functools.partial(decoder.stream, confidences=True)
        network.stream()
        self._new_search().finish()  # so that it gives its language model back
        self._rules = options.endpoint_rules(network.frame_shift)
        self._step = max(1, round(_ENDPOINT_SECONDS / network.frame_shift))
        self.times = StageTimes()
        self._streams: dict[int, _Stream] = {}
        self._num_opened = 0
        self._lock = threading.RLock()

    def __getstate__(self) -> NoReturn:
        raise AsrError("open streams cannot be copied or sent to another process; send the network and the decoder.")

    def open(self, sampling_rate: int | None = None) -> int:
        """Opens a stream of samples at a rate in Hz, the network's own if None, and returns its number.

        Raises:
            AsrError: the sampling rate is out of range.
        """
        rate = self._network.sampling_rate if sampling_rate is None else checked_rate(sampling_rate)
        with self._lock:
            number = self._num_opened
            self._num_opened += 1
            resampler = ResampleStream(rate, self._network.sampling_rate)
            self._streams[number] = _Stream(resampler, self._network.stream(), self._new_search(), rate)
        return number

    def push(self, stream: int, samples: Any) -> None:
        """Takes more samples (L,) of a stream.

        Raises:
            AsrError: the stream is not open, or as for `as_piece`. The samples are then ignored.
        """
        with self._lock:
            one = self._open(stream)
            piece = as_piece(samples, f"stream {stream} at {one.num_samples / one.sampling_rate:.2f} s")
            one.num_samples += len(piece)
            self.times.audio_seconds += len(piece) / one.sampling_rate
            one.held = torch.cat([one.held, one.resampler.push(piece)])

    def close(self, stream: int) -> None:
        """Ends a stream; its last result still comes from `step`."""
        with self._lock:
            one = self._open(stream)
            one.is_closed = True
            one.held = torch.cat([one.held, one.resampler.push(torch.zeros(0), is_last=True)])

    @property
    def is_ready(self) -> bool:
        """Whether some stream has a chunk for `step` to process."""
        with self._lock:
            return any(one.is_ready for one in self._streams.values())

    @uncompiled
    @no_autograd()
    def step(self) -> list[StreamResult]:
        """Processes what has arrived -> new results in the order of the streams.

        Raises:
            Exception: the network or the decoder failed; all open streams have then ended without a result.
        """
        with self._lock:
            try:
                ready = [(number, one) for number, one in self._streams.items() if one.is_ready]
                return [result for number, one in ready for result in self._results(number, one)]
            except BaseException:  # also Ctrl-C
                self._streams.clear()
                raise

    def _open(self, stream: int) -> _Stream:
        if stream not in self._streams or self._streams[stream].is_closed:
            raise AsrError(
                f"stream {stream} is not open; `open` opens streams, and `close`, or a `step` that fails, ends them."
            )
        return self._streams[stream]

    def _results(self, number: int, one: _Stream) -> Iterator[StreamResult]:
        while one.is_ready:
            size = one.reader.chunk_samples
            is_last = one.is_closed and len(one.held) <= size
            with self.times.measure("acoustic model"):
                frames = one.reader.accept(one.held[:size], is_last=is_last)
            one.held = one.held[size:]
            for part in frames.split(self._step) if len(frames) else ():
                with self.times.measure("search"):
                    one.search.accept(part)
                    one.end += len(part)
                    best = one.search.partial()
                if self._is_endpoint(best, one.end - one.begin):
                    yield from self._final(number, one, "pause")
            if is_last:
                yield from self._final(number, one, "end")
                del self._streams[number]
                return
            yield from self._partial(number, one)

    def _is_endpoint(self, best: CTCHypothesis, num_frames: int) -> bool:
        heard = 0
        if best.tokens:
            last = best.tokens[-1]
            heard = min(last.end_frame, last.start_frame + self._rules.longest_token)
        return self._rules.apply(bool(best.words), num_frames - heard, num_frames)

    def _partial(self, number: int, one: _Stream) -> Iterator[StreamResult]:
        best = one.search.partial()
        words = tuple(word.text for word in best.words)
        num_stable = one.search.num_stable_words
        num = num_shown(self.options.partial_policy, one.best, words, num_stable)
        one.best = words
        if words[:num] != one.shown:
            one.shown = words[:num]
            begin, end = self._span(one)
            yield StreamResult(number, False, "", begin, end, self._words(one, best)[:num], min(num_stable, num))

    def _final(self, number: int, one: _Stream, reason: str) -> Iterator[StreamResult]:
        """Yields the result of an utterance that has ended, unless it was a pause, and begins the next one."""
        with self.times.measure("search"):
            best = one.search.finish()
        if best.words or reason == "end":
            words, (begin, end) = self._words(one, best), self._span(one)
            end = one.num_samples / one.sampling_rate if reason == "end" else end
            scores = best.am_score, 0.0, best.lm_score, best.score
            yield StreamResult(number, True, reason, begin, end, words, len(words), best.is_complete, *scores)
        if reason != "end":
            one.search = self._new_search()
        one.begin, one.best, one.shown = one.end, (), ()

    def _span(self, one: _Stream) -> tuple[float, float]:
        """Begin and end of the current utterance so far, in seconds of the stream."""
        shift, heard = self._network.frame_shift, one.num_samples / one.sampling_rate
        return min(one.begin * shift, heard), min(one.end * shift, heard)

    def _words(self, one: _Stream, found: CTCHypothesis) -> tuple[Word, ...]:
        return words_in_seconds(found, self._network.frame_shift, one.num_samples / one.sampling_rate, one.begin)
