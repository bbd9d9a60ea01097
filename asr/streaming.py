"""Recognizes many live streams at once; streams may open and close at any time.

A stream is cut into chunks (`asr.models.windows`), which are searched as they come. Results do not depend on the sizes
of the pieces in which the audio arrives.

Shapes: N streams, L samples, T' frames of output, C tokens.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from asr.audio.fbank import FeatureStream
from asr.audio.resample import ResampleStream, checked_rate
from asr.audio.samples import as_piece
from asr.decoding import mbr
from asr.decoding.backend import SearchGraph
from asr.decoding.build import device_with_loops
from asr.decoding.interface import DecodeResult, Hypothesis, LanguageModels
from asr.decoding.online import SHORTEST_COMMIT_SECONDS, EndpointRules, StreamingDecoder
from asr.decoding.settings import Pass
from asr.decoding.token_passing import TokenPassingDecoder
from asr.decoding.warmup import made_up_log_prob, needs_warm_up
from asr.decoding.words import only_words, spoken, with_final_words, without_sentence_ends
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.interrupts import interrupts_between_loops
from asr.kernels.jit import torch_on_one_thread, uncompiled
from asr.kernels.memory import no_autograd, release_now_and_then
from asr.lm.interface import LanguageModel
from asr.models.adaptation import Speaker
from asr.models.external.network import ExternalNetwork
from asr.models.external.streaming import StateEncoder, StateStream
from asr.models.interface import ACOUSTIC_SECONDS
from asr.models.windows import ChunkedEncoder, WindowSizes, WindowStream
from asr.options import require_type
from asr.recognizer import Recognizer
from asr.results import StageTimes, StreamResult, Word, notes_on, num_shown, words_in_time
from asr.text.symbols import EOS_ID

PARTIAL_POLICIES = {
    "agreed": "words on which the best paths of two chunks in succession agree",
    "best": "the best path at each chunk; earliest, and most often revised",
    "stable": "words that all paths share; never revised",
}
"""Policy for the words of an unfinished utterance that are shown -> its description."""


@dataclass(frozen=True)
class StreamingOptions:
    """Windows of the acoustic model, partial results and endpoints. Times are in seconds.

    Args:
        chunk_seconds: audio between two results.
        left_seconds: maximum left context of a chunk in the acoustic model.
        right_seconds: right context of a chunk in the acoustic model. A word's latency is this, up to one chunk, and
            the computing time.
        memory_seconds: the maximum amount of audio whose mean and variance normalize the features.
        min_feature_std: standard deviation of the log energies, averaged over bands, below which the beginning of a
            stream is treated as noise. Stationary noise has 0.8, clean speech 3 or more; 0 treats nothing as noise.
        partial_policy: which words of an unfinished utterance are shown, a key of `PARTIAL_POLICIES`.
        silence_before_words: a pause this long ends an utterance without words.
        silence_after_words: a pause this long ends an utterance with words.
        longest_utterance: maximum duration of an utterance; after half of it, ever shorter pauses end it.
        force_commit_seconds: words of the best path become final at this age, 0.2 or more: sooner, the word that
            follows has not been heard. With None, words become final only when all paths share them, which is exact;
            memory is still bounded by `longest_utterance`. Token passing only.
        partial_search_beam, partial_max_active_states: upper limits for the live search's beams where it only provides
            partial results and endpoints, because each utterance is searched again when it has ended.
        decoder: `token-passing`, or `k2`, which rescores its lattice. The cost and memory of k2 grow with the length of
            an utterance, and its partial results are never stable.
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
    partial_search_beam: float = 10.0
    partial_max_active_states: int = 1000
    decoder: str = "token-passing"
    cache_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        positive = ("chunk_seconds", "silence_before_words", "silence_after_words", "longest_utterance")
        for name in (*positive, "partial_search_beam", "partial_max_active_states"):
            if not _is_positive(getattr(self, name)):
                raise AsrError(f"streaming: {name} is {getattr(self, name)!r}; it must be above 0, at most 10^9.")
        for name in ("partial_max_active_states", "cache_bytes"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise AsrError(f"streaming: {name} is {value!r}; it must be a whole number above 0.")
        commit = self.force_commit_seconds
        if commit is not None and not (_is_positive(commit) and commit >= SHORTEST_COMMIT_SECONDS):
            raise AsrError(
                f"streaming: force_commit_seconds is {commit!r}; it must be from {SHORTEST_COMMIT_SECONDS} to 10^9, or "
                "None."
            )
        for name in ("left_seconds", "right_seconds", "memory_seconds", "min_feature_std"):
            if getattr(self, name) != 0 and not _is_positive(getattr(self, name)):
                raise AsrError(f"streaming: {name} is {getattr(self, name)!r}; it must be from 0 to 10^9.")
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
            longest_token=round(_LONGEST_TOKEN_SECONDS / frame_seconds),
        )


_LARGEST = 10**9
_LONGEST_TOKEN_SECONDS = 0.5
# In utterances so long that short pauses end them, endpoints are looked for at this distance: few ends of chunks lie in
# a short pause.
_ENDPOINT_SECONDS = 0.1
_NO_SAMPLES = torch.zeros(0, dtype=torch.float32)

# Cache of the language model that a warm-up queries, and the frames of a chunk in the warm-up.
_WARM_UP_BYTES, _WARM_UP_CHUNK = 1 << 26, 16


_Method = TypeVar("_Method", bound=Callable[..., Any])

# The options that say how windows are cut and normalized.
_OF_WINDOWS = ("left_seconds", "right_seconds", "memory_seconds", "min_feature_std")


def _encoder(recognizer: Recognizer, options: StreamingOptions, drafts: bool) -> Any:
    """The encoder that runs chunks through the network: with windows, or with states if the network is external.

    Args:
        recognizer: has the acoustic model.
        options: sizes of windows.
        drafts: whether the chunks' outputs are for partial results and endpoints alone.

    Raises:
        AsrError: the network is external, and reads whole utterances or has no windows for an option that was set.
    """
    network: Any = recognizer.acoustic_model
    if not isinstance(network, ExternalNetwork):
        frame_seconds = recognizer.bundle.frame_seconds
        frames_a_second = network.subsampling_factor / frame_seconds
        sizes = replace(options.window_sizes(frame_seconds), pause_margin=recognizer.pause_margin)
        return ChunkedEncoder(network, sizes, ACOUSTIC_SECONDS * frames_a_second, drafts)
    for name in _OF_WINDOWS:
        if getattr(options, name) != getattr(StreamingOptions, name):
            raise AsrError(
                f"streaming: {name} sets windows, but {network.model.name} keeps states and has none; leave it out."
            )
    return StateEncoder(network)


def _is_positive(value: object) -> bool:
    """Whether an option is a number above 0, and not so large that a number of frames overflows."""
    # `float` raises for the largest integers.
    return isinstance(value, Real) and not isinstance(value, bool) and bool(0 < value <= _LARGEST)  # type: ignore[operator]


def _one_at_a_time(method: _Method) -> _Method:
    """Decorator that runs a method under its object's lock, without gradients."""

    @uncompiled
    @wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock, no_autograd():
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


@dataclass
class _Stream:
    """The state of a stream.

    Attributes:
        begin: the output frame at which its current utterance begins.
        best: word ids of the best path at the last chunk.
        shown: word ids of the last partial result.
        rest: (T', C), the outputs of the last chunk that the search has not read, because the utterance ended before.
    """

    resampler: ResampleStream
    features: FeatureStream
    windows: WindowStream | StateStream
    search: int
    begin: int = 0
    num_samples: int = 0
    sampling_rate: int = 0
    is_closed: bool = False
    best: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()
    rest: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


class SecondLook:
    """Searches utterances of streams again after they have ended, as recordings are searched.

    Confidences, lattice rescoring and minimum-Bayes-risk decoding need a lattice, which the live search does not keep.
    A language model inside the live search does worse, because each of its histories takes up room in the beams.

    Args:
        recognizer: gives options and calibration, if any.
        graph: the decoding graph.
        models: the language model that rescores the lattice, if any.
        keeps_words: whether the words of the live search stay, so that only their confidences are new.
        search_graph: as for `TokenPassingDecoder`.
    """

    def __init__(
        self,
        recognizer: Recognizer,
        graph: DecodingGraph,
        models: LanguageModels,
        keeps_words: bool,
        search_graph: SearchGraph | None = None,
    ) -> None:
        self._calibration = recognizer.calibration
        self._models = models
        self._keeps_words = keeps_words
        self._options = recognizer.options
        self._graph = graph
        fusion = "chunks" if recognizer.lm_fusion == "chunks" else "lattice"
        self._decoder = TokenPassingDecoder(
            graph, self._options, lm_fusion=fusion, keep_lattice=True, search_graph=search_graph
        )

    def at(
        self, log_probs: Sequence[Tensor], decoded: Sequence[DecodeResult], lm_state: Tensor | None = None
    ) -> list[DecodeResult]:
        """Searches utterances again.

        Args:
            log_probs: (T', C) of each utterance.
            decoded: the results of the live search.
            lm_state: as for `Decoder.decode`.

        Returns:
            The new result of each utterance.
        """
        num_frames = torch.tensor([len(log_prob) for log_prob in log_probs])
        padded = nn.utils.rnn.pad_sequence(list(log_probs), batch_first=True)
        results = self._decoder.decode(padded, num_frames, self._models.model, lm_state)
        self._models.forget_contexts()
        return [self._final(again, before) for again, before in zip(results, decoded, strict=True)]

    def _final(self, again: DecodeResult, before: DecodeResult) -> DecodeResult:
        options = self._options
        again = without_sentence_ends(again, options)
        if again.best is None or (self._keeps_words and before.best is not None):
            again = replace(again, hypotheses=before.hypotheses, reached_final=before.reached_final)
            options = replace(options, mbr_scale=None)
        return with_final_words(again, self._graph, options, self._calibration)


class StreamingRecognizer:
    """Recognizes streams; all streams that have a chunk ready form one batch.

    `push` takes samples, and `step` processes one chunk of each stream that has enough of them. Results depend neither
    on how the samples are cut nor on the other streams, and the memory for a stream does not grow. The acoustic model
    sees a stream through windows (see `StreamingOptions`), so the words may differ from those that `Recognizer` finds
    in the whole recording. Several threads may call the methods. They take turns, because all streams share the search
    and the language model's caches. `step` returns the results of all streams, whichever thread calls it.

    On a GPU, only the acoustic model runs there. Chunks are searched on the CPU: a chunk has too few frames to pay for
    the launches of a GPU.

    The recognizer's `lm_fusion` says where the language model acts. With `lattice` or `chunks`, partial results come
    from the graph's own n-gram, and the language model rescores each utterance when it has ended. With `search`, the
    language model also decides the partial results. It does so too where words become final before their utterance
    ends: with the policy `stable` and with `force_commit_seconds`.

    Args:
        recognizer: gives bundle, mode, language model, fusion, decoding options and device. If it was built with your
            own `language_model`, do not use it and streams at the same time: both tell the model what to forget.
        options: windows, partial results and endpoints.

    Attributes:
        engine: the recurrent model's query engine, for its statistics; None without a recurrent model.
        times: computing time so far of all streams together; `search` includes the language model.

    Raises:
        AsrError: the decoder cannot run here.
    """

    @interrupts_between_loops()
    @no_autograd()
    def __init__(self, recognizer: Recognizer, options: StreamingOptions | None = None) -> None:
        require_type(recognizer, Recognizer, "recognizer", "an asr.Recognizer, such as asr.load returns")
        self.options = options if options is not None else StreamingOptions()
        require_type(self.options, StreamingOptions, "options", "asr.StreamingOptions(...)")
        self._lock = threading.RLock()
        self._recognizer = recognizer
        self._rate = recognizer.sampling_rate
        self.frame_seconds = recognizer.bundle.frame_seconds
        self._is_k2 = self.options.decoder == "k2"
        # Where the language model acts: in the live search; or in the second look, when an utterance has ended; or in
        # k2's decoder, which rescores its own lattice then.
        is_decided_early = self.options.partial_policy == "stable" or self.options.force_commit_seconds is not None
        self._lm_in_search = recognizer.lm_fusion == "search" or is_decided_early
        self._lm_comes_last = not self._is_k2 and not self._lm_in_search
        # Whether the live search's words are final, so that a second look can only add confidences. The user's own
        # model holds contexts of open streams there, and a second search would make it forget them.
        is_own_model = recognizer.language_model is not None and not self._lm_comes_last
        self._keeps_words = self.options.partial_policy == "stable" or is_own_model
        # Whether the second look searches for the words of minimum Bayes risk.
        self._seeks_least_risk = recognizer.options.mbr_scale is not None and not self._keeps_words
        self._check_settings()
        recognizer.eval()
        self._graph = recognizer.graph.decoding_graph()
        self._search_graph: SearchGraph | None = None
        if not self._is_k2:
            self._graph = self._graph.to(device_with_loops(recognizer.device))
            # Live search, second look and those of the warm-up share it: it takes half as much memory as the graph.
            self._search_graph = SearchGraph(self._graph, recognizer.options)
        self.times = StageTimes()
        self._rules = self.options.endpoint_rules(self.frame_seconds)
        self._decoder = self._new_search()
        self._windows = _encoder(recognizer, self.options, self._is_draft)
        self._warm_up()
        self._streams: dict[int, _Stream] = {}
        self._num_opened = 0

    def __getstate__(self) -> NoReturn:
        raise AsrError(
            "a StreamingRecognizer has open streams and cannot be copied, pickled or sent to another process; send "
            "its Recognizer, and create a StreamingRecognizer there."
        )

    def _check_settings(self) -> None:
        """Refuses settings that streams do not support."""
        settings = self._recognizer.settings
        if settings.language_models.second_pass != "none":
            raise AsrError(
                f"streams have no second pass ({settings.language_models.second_pass}); set second_pass to none."
            )
        fusion = self._recognizer.lm_fusion
        if self._is_k2:
            fusion = "lattice"
        elif self._lm_in_search:
            fusion = "search"
        has_lattice = self._is_k2 or self._seeks_least_risk
        self._recognizer.refuse_unused(Pass(self._recognizer.mode, fusion, *settings.models, keeps_lattice=has_lattice))
        if self._is_k2 and self._recognizer.carries_history:
            raise AsrError("streaming: k2 starts every utterance from <s>; leave out carry_history, or the decoder k2.")
        if self._keeps_words and "mbr_scale" in settings.given:
            raise AsrError(
                "mbr_scale has no effect here: the words of the live search are final, because the partial policy is "
                "stable, or your own language model acts in the search; leave it out."
            )

    def _new_search(self) -> Any:
        """The decoder of all streams, with new language models."""
        search_device = None if self._lm_comes_last else self._graph.device
        models = self._recognizer.build_language_models(self.options.cache_bytes, search_device)
        self.engine = models.engine
        self._carried = self._recognizer.carried_states(models)
        self._second_look = self._new_second_look(models)
        # Whether the live search only gives partial results and endpoints, until the second look.
        self._is_draft = self._lm_comes_last and self._second_look is not None
        return self._new_decoder(models.model)

    def _new_second_look(self, models: LanguageModels) -> SecondLook | None:
        """The second look, if a lattice is needed or the language model has not acted before.

        Args:
            models: those of the live search, which the second look uses where the live search does not.
        """
        recognizer = self._recognizer
        needs_lattice = recognizer.calibration is not None or self._seeks_least_risk
        if not needs_lattice and not (self._lm_comes_last and models.model is not None):
            return None
        if self._keeps_words:
            models = LanguageModels(None, None)
        elif not self._lm_comes_last:
            models = recognizer.build_language_models(self.options.cache_bytes)
        return SecondLook(recognizer, self._graph, models, self._keeps_words, self._search_graph)

    def _new_decoder(self, model: LanguageModel | None) -> Any:
        options = self._recognizer.options
        if self._is_draft:
            most = min(options.max_active_states, self.options.partial_max_active_states)
            beam = min(options.search_beam, self.options.partial_search_beam)
            least = min(options.min_active_states, most)
            options = replace(options, search_beam=beam, min_active_states=least, max_active_states=most)
            model = None
        if self._is_k2:
            k2_online = importlib.import_module("asr.decoding.k2_online")
            return k2_online.K2StreamingDecoder(self._graph, options, model, self._rules)
        seconds = self.options.force_commit_seconds
        commit_frames = None if seconds is None else max(1, round(seconds / self.frame_seconds))
        shared = self._search_graph
        return StreamingDecoder(self._graph, options, model, self._rules, commit_frames, search_graph=shared)

    @torch_on_one_thread()
    def _warm_up(self) -> None:
        """Compiles all loops that streams need, so that the first stream does not wait for it."""
        recognizer = self._recognizer
        kind = (
            "streams",
            recognizer.joins_sentences,
            self.options.decoder,
            self._lm_in_search,
            self._second_look is not None,
        )
        is_external = recognizer.language_model is not None
        if is_external or not needs_warm_up(recognizer.bundle, recognizer.mode, self._graph.device, kind):
            return
        # Separate language models, so that caches and statistics start with the first real stream.
        models = recognizer.build_language_models(_WARM_UP_BYTES, self._graph.device)
        decoder, second_look = self._new_decoder(models.model), self._new_second_look(models)
        log_prob, num_frames = made_up_log_prob(self._graph)
        streams = decoder.start(len(num_frames))
        for begin in range(0, log_prob.shape[1], _WARM_UP_CHUNK):
            chunk = log_prob[:, begin : begin + _WARM_UP_CHUNK]
            decoder.advance(streams, chunk, (num_frames - begin).clamp(0, chunk.shape[1]))
        for stream in streams:
            decoder.is_endpoint(stream)
            decoder.partial(stream)
            decoder.finalize(stream)
        if second_look is not None:
            second_look.at([log_prob[0]], [DecodeResult((), False, 0)])
            mbr.warm_up()  # for the words of least risk, or for confidences
        noise = torch.randn(1, recognizer.sampling_rate, generator=torch.Generator().manual_seed(0)) * 0.01
        num_samples = torch.tensor([noise.shape[1]], device=recognizer.device)
        features, num_features = recognizer.features(noise.to(recognizer.device), num_samples)
        with recognizer.acoustic_arithmetic():
            recognizer.acoustic_model.forward_normalized(features, num_features)  # type: ignore[operator]

    @_one_at_a_time
    def open(self, sampling_rate: int | None = None, speaker: Speaker | None = None) -> int:
        """Opens a stream.

        Args:
            sampling_rate: of its samples, in Hz; the bundle's own if None.
            speaker: whose voice it is, as `Recognizer.speaker_statistics` or `Recognizer.speaker_transform` returns it.
                The first seconds are then not normalized by themselves alone.

        Returns:
            The stream's number.

        Raises:
            AsrError: the sampling rate is out of range, or the acoustic model cannot use what is known of a speaker.
        """
        device = self._recognizer.device
        if self._decoder is None:  # since a step failed
            self._decoder = self._new_search()
        if speaker is None:
            windows = self._windows.open(device)
        else:
            require_type(speaker, Speaker, "speaker", "what speaker_statistics or speaker_transform returned")
            self._recognizer.require_normalizing()
            windows = self._windows.open(device, speaker)
        rate = self._rate if sampling_rate is None else checked_rate(sampling_rate)
        (search,) = self._start()
        features: Any = self._recognizer.features
        number = self._num_opened
        self._num_opened += 1
        resampler, stream = ResampleStream(rate, self._rate), FeatureStream(features)
        self._streams[number] = _Stream(resampler, stream, windows, search, sampling_rate=rate)
        return number

    @_one_at_a_time
    def push(self, stream: int, samples: Any) -> None:
        """Takes more samples of a stream.

        Args:
            stream: an open stream.
            samples: (L,) of any length: a tensor or NumPy array of floating-point samples in [-1, 1], int16 or int32.

        Raises:
            AsrError: the stream is not open, or the samples have the wrong shape or type, or are NaN or too large. The
                samples are then ignored, and the stream stays open.
        """
        one = self._open(stream)
        samples = as_piece(samples, f"stream {stream} at {one.num_samples / one.sampling_rate:.2f} s")
        one.num_samples += len(samples)
        self.times.audio_seconds += len(samples) / one.sampling_rate
        with self.times.measure("features", self._recognizer.device):
            one.windows.push(one.features.push(one.resampler.push(samples.cpu())))

    @_one_at_a_time
    def close(self, stream: int) -> None:
        """Ends a stream; its last result still comes from `step`."""
        one = self._open(stream)
        one.is_closed = True
        one.windows.push(one.features.push(one.resampler.push(_NO_SAMPLES, is_last=True), is_last=True))
        one.windows.close()

    @_one_at_a_time
    def step(self) -> list[StreamResult]:
        """Processes one chunk of each stream that has one ready.

        Returns:
            New results in the order of the streams. The list may be empty even though chunks were processed; use
            `is_ready` to see whether more are waiting.

        Raises:
            Exception: the acoustic model, the search or the language model failed. All open streams have then ended
                without a result, because they share the search. New ones can be opened.
        """
        numbers = [number for number, one in self._streams.items() if one.windows.is_ready]
        try:
            return self._step(numbers) if numbers else []
        except BaseException:  # also Ctrl-C
            self._streams.clear()
            self._decoder = None  # its caches may be half written
            raise

    def _step(self, numbers: Sequence[int]) -> list[StreamResult]:
        streams = [self._streams[number] for number in numbers]
        device = self._recognizer.device
        with self.times.measure("acoustic model", device), self._recognizer.acoustic_arithmetic():
            chunks = self._windows.step([one.windows for one in streams])
        with self.times.measure("search", device):
            self._advance(streams, chunks)
            ended = self._ended(numbers)
        results = self._looked_at_again({number: found for number, found in ended.items() if found is not None})
        self._carry(results)
        ended |= results
        with self.times.measure("search", device):
            return [
                result
                for number in numbers
                for result in (self._final(number, ended[number]) if number in ended else self._partial(number))
            ]

    def _advance(self, streams: Sequence[_Stream], chunks: Sequence[Tensor]) -> None:
        """Searches a chunk (T', C) of each stream; in a long utterance, only up to its endpoint, if it has one."""
        short, long = list[_Stream](), list[_Stream]()
        for one, chunk in zip(streams, chunks, strict=True):
            one.rest = chunk
            is_long = self._rules.is_long(one.windows.num_outputs - one.begin)
            (long if is_long and not (one.windows.is_done or self._is_k2) else short).append(one)
        self._search_rest(short)
        step = max(1, round(_ENDPOINT_SECONDS / self.frame_seconds))
        for one in long:
            while len(one.rest) and not self._decoder.is_endpoint(one.search):
                self._search_rest([one], step)

    def _search_rest(self, streams: Sequence[_Stream], most: int | None = None) -> None:
        """Searches what is left of the chunks of streams, or at most so many outputs of each."""
        if streams:
            chunks = [one.rest[:most] for one in streams]
            num_frames = torch.tensor([len(chunk) for chunk in chunks])
            log_prob = nn.utils.rnn.pad_sequence(chunks, batch_first=True)
            self._decoder.advance([one.search for one in streams], log_prob, num_frames)
            for one, chunk in zip(streams, chunks, strict=True):
                one.rest = one.rest[len(chunk) :]

    @property
    @_one_at_a_time
    def is_ready(self) -> bool:
        """Whether some stream has a chunk for `step` to process."""
        return any(one.windows.is_ready for one in self._streams.values())

    @_one_at_a_time
    def has_chunk(self, stream: int) -> bool:
        """Whether a stream has a chunk for `step` to process; False if it has ended."""
        return stream in self._streams and self._streams[stream].windows.is_ready

    def _start(self, lm_state: Tensor | None = None) -> list[int]:
        """Opens a stream of the decoder."""
        started: list[int] = self._decoder.start(1) if lm_state is None else self._decoder.start(1, lm_state)
        return started

    def _open(self, stream: int) -> _Stream:
        if stream not in self._streams or self._streams[stream].is_closed:
            raise AsrError(
                f"stream {stream} is not open; `open` opens streams, and `close`, or a `step` that fails, ends them."
            )
        return self._streams[stream]

    def _ended(self, numbers: Sequence[int]) -> dict[int, DecodeResult | None]:
        """Stream number -> result of its utterance, for utterances that have ended; None for a pause without words."""
        ended: dict[int, DecodeResult | None] = {}
        for number in numbers:
            one = self._streams[number]
            if one.windows.is_done or self._decoder.is_endpoint(one.search):
                found = without_sentence_ends(self._decoder.finalize(one.search), self._recognizer.options)
                has_words = found.best is not None and bool(found.best.words)
                ended[number] = found if one.windows.is_done or has_words else None
        return ended

    def _looked_at_again(self, ended: dict[int, DecodeResult]) -> dict[int, DecodeResult]:
        """Replaces the results of utterances that have ended by those of the second look, if there is one."""
        if self._second_look is None or not ended:
            return ended
        streams = [self._streams[number] for number in ended]
        with self.times.measure("acoustic model", self._recognizer.device), self._recognizer.acoustic_arithmetic():
            whole = self._windows.utterance_log_probs([one.windows for one in streams])
        log_probs = [row[: len(row) - len(one.rest)] for row, one in zip(whole, streams, strict=True)]
        with self.times.measure("search", self._recognizer.device):
            again = self._second_look.at(log_probs, list(ended.values()), self._lm_state(list(ended)))
            return dict(zip(ended, again, strict=True))

    def _lm_state(self, numbers: Sequence[int]) -> Tensor | None:
        """What the language model carries over from earlier utterances of streams, (N, D); None if nothing."""
        return None if self._carried is None else self._carried.before(numbers)

    def _carry(self, ended: dict[int, DecodeResult]) -> None:
        """Lets the language model read the words of utterances that have ended."""
        if self._carried is not None and ended:
            with self.times.measure("search", self._recognizer.device):
                self._carried.add(list(ended), list(ended.values()))

    def _partial(self, number: int) -> Iterator[StreamResult]:
        one = self._streams[number]
        hypothesis = self._decoder.partial(one.search)
        word_ids = hypothesis.word_ids if hypothesis is not None else ()
        num_settled = self._decoder.num_settled_words(one.search)
        num = num_shown(self.options.partial_policy, one.best, word_ids, num_settled)
        one.best = word_ids
        if hypothesis is not None and word_ids[:num] != one.shown:
            one.shown = word_ids[:num]
            words = self._words(one, hypothesis, num)
            begin, end = self._span(one)
            is_revised = self._second_look is not None and not self._keeps_words
            num_stable = 0 if is_revised else len(self._words(one, hypothesis, num_settled))
            yield StreamResult(number, False, "", begin, end, words, num_stable)

    def _final(self, number: int, decoded: DecodeResult | None) -> Iterator[StreamResult]:
        """Yields the result of an utterance that has ended, unless `decoded` is None, and begins the next utterance."""
        one = self._streams[number]
        begin, end = self._span(one)
        if decoded is not None:
            release_now_and_then(end - begin)
            best, is_complete = decoded.best, decoded.reached_final
            words = () if best is None else self._words(one, best, len(best.words))
            scores = () if best is None else (best.am_score, best.graph_score, best.lm_score, best.total)
            notes = () if best is None else (notes_on(len(best.words) - len(words), words),)
            reason = "end" if one.windows.is_done else "pause"
            yield StreamResult(number, True, reason, begin, end, words, len(words), is_complete, *scores, *notes)
        if one.windows.is_done:
            del self._streams[number]
            if self._carried is not None:
                self._carried.end(number)
        else:
            (one.search,) = self._start(self._lm_state([number]))
            one.windows.begin_utterance(len(one.rest))
            one.begin, one.best, one.shown = one.windows.num_outputs - len(one.rest), (), ()
            if len(one.rest):
                self._search_rest([one])

    def _span(self, one: _Stream) -> tuple[float, float]:
        """Begin and end of the current utterance so far, in seconds of the stream."""
        heard = one.num_samples / one.sampling_rate
        end = (one.windows.num_outputs - len(one.rest)) * self.frame_seconds
        return one.begin * self.frame_seconds, heard if one.windows.is_done else min(end, heard)

    def _words(self, one: _Stream, hypothesis: Hypothesis, num_words: int) -> tuple[Word, ...]:
        """Those of the first words of a hypothesis that are not noise; the words after them help to tell."""
        is_word = [word_id != EOS_ID for word_id in hypothesis.word_ids]
        hypothesis, num_words = only_words(hypothesis, is_word), sum(is_word[:num_words])
        if self._recognizer.aligner is not None:
            hypothesis = self._recognizer.aligner.aligned(hypothesis)
        limit = self._recognizer.options.max_token_seconds
        is_spoken = spoken(hypothesis, self.frame_seconds, limit)
        hypothesis = only_words(hypothesis, [stays and place < num_words for place, stays in enumerate(is_spoken)])
        return words_in_time(hypothesis, self.frame_seconds, one.num_samples / one.sampling_rate, one.begin)


def recognize_stream(
    recognizer: Recognizer,
    pieces: Iterable[Any],
    sampling_rate: int | None = None,
    options: StreamingOptions | None = None,
    speaker: Speaker | None = None,
) -> Iterator[StreamResult]:
    """Recognizes one stream while its samples arrive.

    Args:
        recognizer: the recognizer.
        pieces: samples (L,) of any length, as `StreamingRecognizer.push` takes them.
        sampling_rate: in Hz; the bundle's own if None.
        options: see `StreamingOptions`.
        speaker: see `StreamingRecognizer.open`.

    Yields:
        Partial and final results; the last one has the reason `end`.

    Raises:
        AsrError: `pieces` is a single array; or as for `StreamingRecognizer` and its methods.

    Example:
        >>> for result in recognize_stream(recognizer, microphone, 16000):  # doctest: +SKIP
        ...     print("final" if result.is_final else "partial", result.text)
    """
    if isinstance(pieces, (Tensor, np.ndarray)):
        raise AsrError("pieces is one array; give a list or another iterable of pieces (samples,), such as [samples].")
    require_type(pieces, Iterable, "pieces", "an iterable of pieces (samples,)")
    streaming = StreamingRecognizer(recognizer, options)
    stream = streaming.open(sampling_rate, speaker)
    for samples in pieces:
        streaming.push(stream, samples)
        while streaming.is_ready:
            yield from streaming.step()
    streaming.close(stream)
    while streaming.is_ready:
        yield from streaming.step()
