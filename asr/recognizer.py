"""Recognizes recordings: features, acoustic model, decoder and language model in one module.

Long recordings are cut into segments at pauses, and segments of similar length form batches. Two stages are pipelined:
while one batch is decoded, the next one goes through the acoustic model.

Shapes: N recordings or segments, C channels or tokens, L samples, T frames.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from asr.audio.resample import checked_rate
from asr.audio.segments import Segment, open_recordings, segment_batches
from asr.bundle import Bundle
from asr.decoding import mbr
from asr.decoding.build import (
    Placement,
    build_decoder,
    calibration_of,
    chosen_decoder,
    chosen_mode,
    final_pass,
    has_transformer,
    language_models,
    recognition_settings,
    refuse_recurrent_options,
)
from asr.decoding.carried import CarriedStates, require_history
from asr.decoding.interface import Decoder, DecodeResult, Hypothesis, LanguageModels
from asr.decoding.nbest import n_best
from asr.decoding.rescoring import second_pass
from asr.decoding.settings import FIXED, DecodingOptions, Pass, ResourceOptions, refuse_unused, setting_options
from asr.decoding.warmup import made_up_log_prob, needs_warm_up, query_many
from asr.decoding.words import WordAligner, can_align, lexicon_of_graph, with_final_words, without_sentence_ends
from asr.errors import AsrError
from asr.graph.context import TIED_STATES, TiedStates
from asr.graph.decoding_graph import GraphModule
from asr.kernels.interrupts import interrupts_between_loops
from asr.kernels.jit import each_in_threads, torch_on_one_thread, uncompiled
from asr.kernels.linear import byte_products
from asr.kernels.memory import limit_compiled_shapes, no_autograd, release_now_and_then, to_device
from asr.lm.checks import require_language_model
from asr.lm.hot_words import DEFAULT_SCORE, HotWords, as_phrases
from asr.lm.interface import LanguageModel
from asr.models.adaptation import RecognizedSpeech, Speaker, SpeakerTransform, adapt, score_of_speaker
from asr.models.interface import ACOUSTIC_SECONDS, NormalizingNetwork, SpeakerStatistics, in_parts, moves_only
from asr.models.levels import with_equal_levels
from asr.models.pauses import with_silence_in_pauses
from asr.options import device_named, options_of, require_type
from asr.pipeline import EnginePool, Engines, StreamPool, pipelined
from asr.results import RecognitionResult, StageTimes, as_result, joined_recordings
from asr.serialization import copied_to_processes
from asr.text.lexicon import Lexicon

if TYPE_CHECKING:
    from asr.audio.io import AudioFile
    from asr.models.external import ExternalModel

# A GPU needs many streams at a time; with fewer, kernel launches on the host are the bottleneck.
_BATCH_SECONDS = {"cpu": 50.0, "cuda": 3000.0}

# Cache of the language model that a warm-up queries; it is dropped afterwards.
_WARM_UP_BYTES = 1 << 26


def _with_acoustic_model(acoustic_model: str | ExternalModel, *parts: Any) -> Bundle:
    """`bundle_with_acoustic_model`, imported on first use."""
    from asr.ctc.bundles import bundle_with_acoustic_model

    return bundle_with_acoustic_model(acoustic_model, *parts)


_Self = TypeVar("_Self", bound="Recognizer")


class _Scored(NamedTuple):
    """A batch after the acoustic model: log_prob (N, T, C), num_frames (N,), seconds and session of each segment, times
    so far."""

    log_prob: Tensor
    num_frames: Tensor
    lengths: list[float]
    times: StageTimes
    sessions: Sequence[Hashable] = ()


@copied_to_processes
class Recognizer(nn.Module):
    """Turns recordings into words. Needs neither Lightning, lhotse nor k2.

    Move it to a GPU with `.to("cuda")`, like any module; torch's default device has no effect. Features, acoustic
    model, decoding graph and recurrent language model are submodules. Language models that rescore lattices stay on the
    CPU, which is faster there, unless `resources` places them elsewhere. N-gram models are arrays: they move when they
    are next used, and are not in `state_dict()`. Several threads may call a recognizer at the same time: they share the
    weights, and each call has its own language model caches of up to `cache_bytes`. It always stays in evaluation mode,
    even after `train()`. `.half()`, `.bfloat16()` and autocast affect only the acoustic model; features, language
    models and search stay in float32.

    Args:
        bundle: the trained parts.
        mode: the language model that decides: `auto` (the bundle's default), `rnn`, `interpolated`, `large_ngram` or
            `ngram`; see `asr.decoding.settings.MODES`.
        acoustic_model: an external CTC network that replaces the bundle's, as `KIND:NAME` or the network itself; the
            bundle's words and language models stay. See `asr.ctc.bundles.bundle_with_acoustic_model`.
        language_model: your own model, which replaces the bundle's large one. The scores of the decoding graph's own
            n-gram are subtracted, and words are mapped if the vocabularies differ, so the model need not know the
            bundle. It may be on any device. Calls from several threads take turns.
        hot_words: words and phrases of the bundle's vocabulary to prefer; a mapping gives each its score, or None for
            `hot_word_score`. Scores of results include theirs.
        hot_word_score: natural log, added for each word of a phrase in `hot_words`.
        decoder: `auto`, `token-passing` or `k2`; see `asr.decoding.build.DECODERS`.
        lm_fusion: `chunks`: the language model rescores the lattice while it grows, on a CPU; `lattice`: when it is
            complete; `search` queries the language model at each frame, which takes several times as long; `auto` is
            `chunks` in token passing on a CPU with numba, otherwise `lattice`.
        keep_lattices: whether results include lattices, which costs time and memory. With a bundle that is not
            calibrated, words have confidences only if lattices are kept, or several hypotheses are requested.
        options: overrides of the bundle's tuned options: any of `asr.decoding.settings.setting_options` (beams, scales,
            a second pass, approximations of the recurrent model).
        resources: segments, batches, workers, memory and the language model's devices.

    Attributes:
        sampling_rate: the rate that recordings are resampled to, in Hz.
        settings: the options in force.
        final_mode, final_options: mode and decoding options of the last pass, which results report; without a second
            pass, those of `mode` and `settings`.
        joins_sentences: whether one search may find several sentences in a segment of a recording; see
            `sentence_pause_seconds` in `asr.decoding.settings.DecodingOptions`.
        carries_history: whether the language model remembers the earlier segments of a recording; see `carry_history`
            in `asr.decoding.settings.LanguageModelOptions`.
        calibration: of the words' confidences; None if the bundle has none. Set it to None to save the time that
            confidences take.

    Raises:
        AsrError: the bundle has no parts for the mode, or a sampling rate that is not between 1 kHz and 1 MHz; an
            option does not exist, is out of range or would have no effect; the language model's answers are not those
            of its interface; or the decoder cannot run here.

    Example:
        >>> recognizer = asr.load("librispeech")  # doctest: +SKIP
        >>> recognizer("talk.mp3")[0].text  # doctest: +SKIP
        'HELLO WORLD'
    """

    @interrupts_between_loops()
    @no_autograd()
    def __init__(
        self,
        bundle: Bundle,
        mode: str = "auto",
        *,
        acoustic_model: str | ExternalModel | None = None,
        language_model: LanguageModel | None = None,
        hot_words: Iterable[str] | Mapping[str, float | None] | None = None,
        hot_word_score: float = DEFAULT_SCORE,
        decoder: str = "auto",
        lm_fusion: str = "auto",
        keep_lattices: bool = False,
        options: dict[str, Any] | None = None,
        resources: ResourceOptions | None = None,
    ) -> None:
        super().__init__()
        require_type(bundle, Bundle, "bundle", "an asr.Bundle; asr.load takes the names and folders of bundles")
        limit_compiled_shapes()
        if acoustic_model is not None:
            bundle = _with_acoustic_model(acoustic_model, bundle)
        self.hot_words: HotWords | None = None
        if phrases := as_phrases(hot_words):
            vocabulary = bundle.graph.vocabulary
            self.hot_words = HotWords(phrases, vocabulary, hot_word_score, bundle.small_ngram)
            bundle = replace(bundle, graph=bundle.graph.with_gain(self.hot_words.gain(vocabulary)))
        self.sampling_rate = checked_rate(bundle.sampling_rate, f"bundle {bundle.name}: the sampling rate")
        self.features = bundle.features.network
        self.acoustic_model = bundle.acoustic_model.network
        if language_model is not None:
            require_language_model(language_model)
        self.language_model = language_model
        self.resources = resources if resources is not None else ResourceOptions()
        require_type(self.resources, ResourceOptions, "resources", "asr.ResourceOptions(...)")
        self.mode = chosen_mode(bundle, mode, language_model)
        if language_model is not None and self.resources.num_workers > 1:
            raise AsrError(
                f"num_workers is {self.resources.num_workers}, but there is one language model; give 0 or 1 with a "
                "language model of your own."
            )
        self.settings = recognition_settings(bundle, self.mode, options or {})
        self.final_mode, self.final_options = final_pass(bundle, self.mode, self.settings, options or {})
        if lm_fusion == "auto" and self.final_mode == self.mode == "ngram":
            lm_fusion = "lattice"  # there is nothing to combine
        self._asked_decoder = decoder, lm_fusion
        # Unknown names and options without effect are refused now, not only when a device is chosen.
        fusion = chosen_decoder(decoder, lm_fusion, bundle.graph, torch.device("cpu"))[1]
        # Options that act on a lattice are allowed: a call may request one later, by `nbest`.
        possible = Pass(self.mode, fusion, *self.settings.models, keeps_lattice=True)
        self.carries_history = self.settings.language_models.carry_history and possible.carries_history
        pause = self.options.sentence_pause_seconds
        self.joins_sentences = pause is not None and bundle.graph.can_join_sentences and not self.carries_history
        if pause is not None and self.joins_sentences:
            num_frames = max(2, round(pause / bundle.frame_seconds))
            bundle = replace(bundle, graph=bundle.graph.with_sentence_ends(num_frames))
        self.bundle = bundle
        self.graph = GraphModule(bundle.graph)
        self.refuse_unused(possible)
        if self.carries_history:
            require_history(bundle, language_model, self.resources.num_workers)
        self.keep_lattices = keep_lattices
        self.calibration = calibration_of(bundle, self.final_mode)
        asks_network = {"rnn", "interpolated"} & set(possible.modes)
        self.recurrent_model: nn.Module | None = None
        # Weights that are spread over host and device are moved by the language model itself, not as a submodule.
        if bundle.rnn_lm is not None and asks_network and self.resources.lm_device_bytes is None:
            self.recurrent_model = bundle.rnn_lm.network.to(self._network_device())
        self._frame_seconds = bundle.frame_seconds
        self.aligner: WordAligner | None = None
        if bundle.lexicon is not None and can_align(bundle.graph):
            self.aligner = WordAligner(bundle.lexicon, bundle.graph)
        self._rebuild_on_demand()
        self.eval()

    @classmethod
    @interrupts_between_loops()
    @no_autograd()
    def from_folder(
        cls: type[_Self],
        folder: str | Path | None,
        large_ngram: str | Path | None = None,
        rnn_lm: str | Path | None = None,
        lexicon: str | Path | Lexicon | None = None,
        acoustic_model: str | ExternalModel | None = None,
        ngram: str | Path | None = None,
        **arguments: Any,
    ) -> _Self:
        """Loads a bundle.

        Args:
            folder: the bundle; None for no bundle, if an external acoustic model comes with its own words.
            large_ngram: n-gram model that replaces the bundle's large one, see `Bundle.with_language_models`.
            rnn_lm: recurrent model that replaces the bundle's.
            lexicon: the pronunciations that the graph was built from, for exact word times; the bundle's own if None.
                Without one, a word's times are where the graph outputs it, which is up to a few phones late. For an
                external acoustic model, the spellings of the words in its tokens.
            acoustic_model: an external CTC network that replaces the bundle's; see
                `asr.ctc.bundles.bundle_with_acoustic_model` for this and `ngram`.
            ngram: n-gram model of words for the external model's decoding graph; replaces the bundle's.
            arguments: those of the constructor.

        Raises:
            AsrError: as for the constructor, or a file is missing or damaged.
        """
        if acoustic_model is None and (folder is None or ngram is not None):
            raise AsrError(
                "an n-gram model for the decoding graph (ngram) needs an external acoustic model (acoustic_model); a "
                "bundle has its own graph, so give a larger model with large_ngram instead."
            )
        require_type(lexicon, str | Path | Lexicon | None, "lexicon", "the path of a file, or a Lexicon")
        bundle = None if folder is None else Bundle.load(folder)
        if acoustic_model is not None:
            bundle = _with_acoustic_model(acoustic_model, bundle, ngram, lexicon)
        assert bundle is not None
        bundle = bundle.with_language_models(large_ngram, rnn_lm)
        if lexicon is not None and acoustic_model is None:
            given = lexicon if isinstance(lexicon, Lexicon) else [lexicon]
            bundle = replace(bundle, lexicon=lexicon_of_graph(given, bundle.graph))
        return cls(bundle, **arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses what would have no effect any more, or only a part of it."""
        if name in FIXED and "_engines" in self.__dict__:
            raise AsrError(f"{name} cannot be set once a recognizer is built; {FIXED[name]}.")
        super().__setattr__(name, value)

    @property
    def device(self) -> torch.device:
        """The device of the acoustic model's weights."""
        return next(self.acoustic_model.parameters()).device

    @property
    def batch_seconds(self) -> float:
        """Maximum audio in a batch, in seconds."""
        asked = self.resources.batch_seconds
        return _BATCH_SECONDS["cuda" if self.device.type == "cuda" else "cpu"] if asked is None else asked

    @property
    def options(self) -> DecodingOptions:
        """The beams and scales of `settings`."""
        return self.settings.decoding

    @property
    def decoder_name(self) -> str:
        """`token-passing` or `k2`."""
        return chosen_decoder(*self._asked_decoder, self.bundle.graph, self.device)[0]

    @property
    def lm_fusion(self) -> str:
        """`lattice`, `chunks` or `search`."""
        return chosen_decoder(*self._asked_decoder, self.bundle.graph, self.device)[1]

    def extra_repr(self) -> str:
        """The parts that are not submodules: n-gram models, and how the graph is searched."""
        small, large = self.bundle.small_ngram, self.bundle.large_ngram
        ngrams = {"small_ngram": small, "large_ngram": large if self.mode in ("large_ngram", "interpolated") else None}
        sizes = "".join(f", {name}={model.num_arcs} n-grams" for name, model in ngrams.items() if model is not None)
        second = self.settings.language_models.second_pass
        return (
            f"bundle={self.bundle.name}, mode={self.mode}, decoder={self.decoder_name}, lm_fusion={self.lm_fusion}, "
            f"second_pass={second}{sizes}"
        )

    def train(self: _Self, mode: bool = True) -> _Self:
        """Stays in evaluation mode whatever `mode` is: dropout and the like are always off in a recognizer."""
        # Each call comes here. Asking all modules takes a quarter of the time that it takes to set them.
        return super().train(False) if any(module.training for module in self.modules()) else self

    @uncompiled
    @no_autograd()
    def forward(
        self,
        audio: Any,
        sampling_rate: int | None = None,
        num_samples: Tensor | Sequence[int] | None = None,
        nbest: int = 1,
        speaker: Speaker | None = None,
        sessions: Sequence[Hashable] | None = None,
    ) -> list[RecognitionResult]:
        """Recognizes one recording or several.

        Args:
            audio: a file's path; a tensor or NumPy array with one recording (L,), a batch (N, L) or a batch with
                channels (N, C, L); or a list of recordings, each a path, (L,) or (C, L). Samples are floating-point
                numbers in [-1, 1], int16 or int32. Channels are averaged.
            sampling_rate: of arrays, in Hz; the bundle's own if None. Files bring their own.
            num_samples: (N,) length of each recording of a padded batch. Without it, trailing zeros in a batch are
                treated as padding.
            nbest: the maximum number of `hypotheses` of each result. Values above 1 need lattices, which take time.
            speaker: of all recordings, as returned by `speaker_statistics` or `speaker_transform`.
            sessions: with `carry_history`, the session of each recording: a recording continues the one before it of
                the same session. With None, each recording is a session of its own.

        Returns:
            A list with one result per recording, in order, even for a single recording.

        Raises:
            AsrError: a file cannot be read; a recording is empty, of another shape or type, or has samples that are not
                finite; the sampling rate, `nbest` or `speaker` is of another type or out of range; the acoustic model
                cannot use what is known of a speaker; or `sessions` do not fit.
        """
        require_type(nbest, Integral, "nbest", "a whole number")
        if not 1 <= nbest < 2**31:
            raise AsrError(f"nbest is {nbest}; ask for 1 hypothesis or more, below 2^31.")
        if speaker is not None:
            require_type(speaker, Speaker, "speaker", "what speaker_statistics or speaker_transform returned")
            self.require_normalizing()
        self.eval()  # a training loop that shares the acoustic model may have left it in training mode
        recordings = self._open(audio, sampling_rate, num_samples)
        sessions = self._sessions(sessions, len(recordings))
        batches = self._batches(recordings, sessions if self.carries_history else None)
        places = deque[list[tuple[int, int]]]()

        def taken() -> Iterator[list[Segment]]:
            for batch in batches:
                places.append([(segment.recording_idx, segment.begin) for segment in batch])
                yield batch

        def score(batch: list[Segment]) -> _Scored:
            scored = self._score([segment.samples for segment in batch], speaker=speaker)
            return scored._replace(sessions=[sessions[segment.recording_idx] for segment in batch])

        found: list[dict[int, RecognitionResult]] = [{} for _ in recordings]
        decoder = self._prepared_decoder(nbest > 1)
        with self._engines.lend(self._new_engines) as engines:
            decode = partial(self._decode, decoder, engines, nbest, self.carried_states(engines.models[0]))
            for results in pipelined(taken(), score, decode, self.resources.num_workers, engines.streams):
                for (recording_idx, begin), result in zip(places.popleft(), results, strict=True):
                    found[recording_idx][begin] = result
        return joined_recordings(found, self.sampling_rate)

    if TYPE_CHECKING:
        __call__ = forward  # to torch, calls of modules have no types

    @uncompiled
    @no_autograd()
    def speaker_statistics(
        self, audio: Any, sampling_rate: int | None = None, num_samples: Tensor | Sequence[int] | None = None
    ) -> SpeakerStatistics:
        """Collects the statistics of a speaker's features, from recordings without transcripts.

        Short recordings are recognized better with the statistics of others of the same speaker, or of the same
        microphone. Collecting takes a small part of the time of recognition. See
        `asr.models.interface.SpeakerStatistics`.

        Args:
            audio: recordings of one speaker in one acoustic environment, in the forms that `forward` takes. A minute
                is enough. The recordings to be recognized may be among them.
            sampling_rate: as for `forward`.
            num_samples: as for `forward`.

        Returns:
            The statistics, to be passed as `speaker` to later calls.

        Raises:
            AsrError: as for `forward`, or the acoustic model does not normalize its features.
        """
        network = self.require_normalizing()
        return network.statistics_of(self._features_of(audio, sampling_rate, num_samples))

    def require_normalizing(self) -> NormalizingNetwork:
        """The acoustic model, if it can use what is known about a speaker.

        Raises:
            AsrError: it does not normalize its features.
        """
        if not isinstance(self.acoustic_model, NormalizingNetwork):
            raise AsrError(
                f"bundle {self.bundle.name}: its acoustic model has no use for a speaker's statistics, because it does "
                "not normalize features by mean and variance."
            )
        return self.acoustic_model

    @uncompiled
    @no_autograd()
    def speaker_transform(
        self, audio: Any, sampling_rate: int | None = None, num_samples: Tensor | Sequence[int] | None = None
    ) -> SpeakerTransform:
        """Adapts to a speaker, from recordings without transcripts.

        The recordings are recognized, and a transform of the features is trained on the recognized words, which takes
        more than ten times as long as recognition. See `asr.models.adaptation`.

        Args:
            audio: recordings of one speaker in one acoustic environment, in the forms that `forward` takes.
            sampling_rate: as for `forward`.
            num_samples: as for `forward`.

        Returns:
            The transform, to be passed as `speaker` to later calls.

        Raises:
            AsrError: as for `forward`, or the bundle has no denominator graph, which only networks trained by
                lattice-free MMI have.

        Example:
            >>> speaker = recognizer.speaker_transform(["monday.mp3", "tuesday.mp3"])  # doctest: +SKIP
            >>> recognizer("wednesday.mp3", speaker=speaker)[0].text  # doctest: +SKIP
            'HELLO WORLD'
        """
        network, denominator = self.acoustic_model, self.bundle.denominator
        tied = self.bundle.graph.meta.get(TIED_STATES)
        if denominator is None or tied is None or not isinstance(network, NormalizingNetwork):
            raise AsrError(
                f"bundle {self.bundle.name}: it cannot adapt to speakers because it has no denominator graph; use a "
                "bundle whose network was trained by lattice-free MMI, made with 'asr bundle --denominator'."
            )
        self.eval()
        batches = self._features_of(audio, sampling_rate, num_samples)
        decoder, speech = self._prepared_decoder(), []
        with self._engines.lend(self._new_engines) as engines, engines.streams.running(0):
            engines.streams.catch_up()
            heard = list(batches)
            statistics = network.statistics_of(heard)
            for features, num_features in heard:
                log_prob, num_frames = self._log_prob(features, num_features, StageTimes(), statistics)
                with torch.autocast(self.device.type, enabled=False):
                    decoded = decoder.decode(log_prob, num_frames, engines.models[0].model)
                engines.models[0].forget_contexts()
                speech += [
                    RecognizedSpeech(row[:length], result.hypotheses[0].phones)
                    for row, length, result in zip(features, num_features.tolist(), decoded, strict=True)
                    if result.hypotheses
                ]
            transform = adapt(network, TiedStates.from_json(tied), denominator, speech, statistics)
        engines.streams.wait(0)
        return transform

    def _features_of(
        self, audio: Any, sampling_rate: int | None, num_samples: Tensor | Sequence[int] | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The features (N, T, F) of recordings and their numbers of frames (N,), in batches that are read as needed."""
        batches = self._batches(self._open(audio, sampling_rate, num_samples))
        return (self._features([segment.samples for segment in batch], StageTimes()) for batch in batches)

    def _open(
        self, audio: Any, sampling_rate: int | None, num_samples: Tensor | Sequence[int] | None
    ) -> list[Tensor | AudioFile]:
        rate = self.sampling_rate
        return open_recordings(audio, rate if sampling_rate is None else sampling_rate, rate, num_samples)

    def _sessions(self, sessions: Sequence[Hashable] | None, num_recordings: int) -> Sequence[Hashable]:
        """The session of each recording."""
        if sessions is None:
            return range(num_recordings)
        if not self.carries_history:
            raise AsrError("sessions have no effect without carry_history; leave them out, or set it.")
        if len(sessions) != num_recordings:
            raise AsrError(f"there are {len(sessions)} sessions for {num_recordings} recordings; give one for each.")
        return sessions

    def _batches(
        self, recordings: Sequence[Tensor | AudioFile], sessions: Sequence[Hashable] | None = None
    ) -> Iterator[list[Segment]]:
        """Batches of the recordings' segments; with sessions, in their order."""
        limit = self.resources.max_segment_seconds
        return segment_batches(recordings, self.sampling_rate, limit, self.batch_seconds, sessions)

    def carried_states(self, models: LanguageModels) -> CarriedStates | None:
        """New states for the sessions of one call or of streams; None if no history is carried."""
        if not self.carries_history or models.model is None:
            return None
        return CarriedStates(models.model, self.bundle.graph.vocabulary)

    def log_prob(
        self, samples: Sequence[Tensor], times: StageTimes, speaker: Speaker | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes token log-probabilities of segments.

        Args:
            samples: the segments, each (L,), at the bundle's sampling rate.
            times: the times of the stages `features` and `acoustic model` are added here.
            speaker: as for `forward`.

        Returns:
            log_prob (N, T, C), natural logs, and num_frames (N,).
        """
        return self._log_prob(*self._features(samples, times), times, speaker)

    def _features(self, samples: Sequence[Tensor], times: StageTimes) -> tuple[Tensor, Tensor]:
        """Features (N, T, F) without lasting changes of level, and their number of frames (N,)."""
        device = self.device
        num_samples = to_device(torch.tensor([len(row) for row in samples]), device)
        with times.measure("features", device):
            padded = to_device(nn.utils.rnn.pad_sequence(list(samples), batch_first=True), device)
            features, num_frames = self.features(padded, num_samples)
            if isinstance(self.acoustic_model, NormalizingNetwork):
                features = with_equal_levels(features, num_frames)
        return features, num_frames

    def _log_prob(
        self, features: Tensor, num_frames: Tensor, times: StageTimes, speaker: Speaker | None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (N, T', C) and their number of frames (N,)."""
        with times.measure("acoustic model", self.device):
            if int(num_frames.max()) == 0:
                return features.new_zeros(len(features), 0, len(self.bundle.graph.tokens)), num_frames
            network: Any = self.acoustic_model
            if speaker is not None:
                network = partial(score_of_speaker, network, speaker=speaker)
            frame_shift: Any = self.features.frame_shift
            with self.acoustic_arithmetic():
                log_prob, num_outputs = in_parts(
                    network, features, num_frames, ACOUSTIC_SECONDS * self.sampling_rate / frame_shift
                )
            margin = self.pause_margin
            if margin is not None:
                factor: Any = self.acoustic_model.subsampling_factor
                log_prob = with_silence_in_pauses(log_prob, features, num_frames, factor, margin)
            return log_prob, num_outputs

    @property
    def pause_margin(self) -> int | None:
        """Half of `pause_seconds` in frames of features; None if the acoustic model alone finds pauses."""
        pause, frame_shift = self.options.pause_seconds, cast("int", self.features.frame_shift)
        if pause is None or not isinstance(self.acoustic_model, NormalizingNetwork):
            return None
        return round(pause / 2 * self.sampling_rate / frame_shift)

    def acoustic_arithmetic(self) -> contextlib.AbstractContextManager[None]:
        """Context in which acoustic models compute with `resources.acoustic_precision` in this thread."""
        return byte_products(self.resources.acoustic_precision == "auto")

    def _score(self, samples: list[Tensor], speaker: Speaker | None = None) -> _Scored:
        """The first stage of a batch: features and acoustic model."""
        times = StageTimes()
        lengths = [len(row) / self.sampling_rate for row in samples]
        return _Scored(*self.log_prob(samples, times, speaker), lengths, times)

    def _decode(
        self,
        decoder: Decoder,
        engines: Engines,
        nbest: int,
        carried: CarriedStates | None,
        worker: int,
        scored: _Scored,
    ) -> list[RecognitionResult]:
        """The second stage of a batch: decoder and language model."""
        log_prob, num_frames, lengths, times, sessions = scored
        models = engines.models[worker]
        before = models.statistics()
        seconds_before = 0.0 if before is None else before.seconds_total
        with times.measure("search", self.device), torch.autocast(self.device.type, enabled=False):
            lm_state = None if carried is None else carried.before(sessions)
            decoded = decoder.decode(log_prob, num_frames, models.model, lm_state)
            if models.second is not None:
                keeps_lattice = self.needs_lattices or nbest > 1
                graph, options = self.bundle.graph, self.settings.language_models
                both = (models.model, models.second.model)
                decoded = second_pass(decoded, *both, graph, self.final_options, options, keeps_lattice)
            decoded = [without_sentence_ends(result, self.final_options) for result in decoded]
            lists = [self._hypotheses(result, nbest) for result in decoded]
            # A lattice may also have been searched for the words of least risk alone.
            is_asked = self.keep_lattices or nbest > 1
            decoded = each_in_threads(partial(self._with_final_words, is_asked), decoded)
            if carried is not None:
                carried.add(sessions, decoded)
        # No batch refers to histories of an earlier one, so the caches may evict them.
        models.forget_contexts()
        cache: dict[str, int | float] = {}
        after = models.statistics()
        if after is not None:
            cache = after.as_dict()
            lm_seconds = after.seconds_total - seconds_before
            times.stages["language model"] = lm_seconds
            times.stages["search"] -= lm_seconds
        results, total = [], sum(lengths)
        step, is_calibrated = self._frame_seconds, self.calibration is not None
        for result, hypotheses, length in zip(decoded, lists, lengths, strict=True):
            share = times.scaled(length / total)
            share.audio_seconds = length
            recognized = as_result(
                result, step, share, self.final_options, self.aligner, cache, hypotheses, is_calibrated
            )
            results.append(recognized if self.keep_lattices else replace(recognized, lattices=()))
        release_now_and_then(total)
        return results

    def _with_final_words(self, with_posteriors: bool, decoded: DecodeResult) -> DecodeResult:
        """`with_final_words`; without a calibration, posteriors are given as confidences if they are asked for."""
        options = self.final_options
        scale = 1.0 / options.am_scale if with_posteriors else None
        return with_final_words(decoded, self.bundle.graph, options, self.calibration, scale)

    def _hypotheses(self, decoded: DecodeResult, nbest: int) -> tuple[Hypothesis, ...]:
        if nbest == 1 or decoded.lattice is None:
            return ()
        if self.settings.language_models.second_pass == "nbest":
            return decoded.hypotheses[:nbest]
        return n_best(decoded.lattice, self.bundle.graph, self.final_options, nbest, decoded.original_frame)

    @uncompiled
    @no_autograd()  # weights are packed, and bytes multiplied, only where no gradients are recorded
    def prepare(self) -> None:
        """Builds the decoder and the language models now instead of at the first recording.

        On a new machine this compiles loops once, which takes some ten seconds; see `asr.decoding.warmup`.

        Raises:
            AsrError: the decoder cannot run here, or the device memory budget is too small.
        """
        self._prepared_decoder()
        self._engines.fill(self._new_engines)

    @property
    def needs_lattices(self) -> bool:
        """Whether every recording's lattice is kept: for the user, for confidences or for minimum Bayes risk."""
        return self.keep_lattices or self.calibration is not None or self.final_options.mbr_scale is not None

    def _prepared_decoder(self, keep_lattices: bool = False) -> Decoder:
        keep_lattices |= self.needs_lattices or self.settings.language_models.second_pass != "none"
        with self._engines.lock:
            if keep_lattices not in self._decoders:
                graph = self.graph.decoding_graph()
                decoder = build_decoder(self.decoder_name, self.lm_fusion, graph, self.options, keep_lattices)
                self._warm_up(decoder, keep_lattices)
                self._decoders[keep_lattices] = decoder
            return self._decoders[keep_lattices]

    @torch_on_one_thread()
    def _warm_up(self, decoder: Decoder, keep_lattices: bool) -> None:
        """Compiles all loops that recognition needs, so that the first recording's times do not include it."""
        second = self.settings.language_models
        passes = (self.lm_fusion, keep_lattices, second.second_pass, second.second_pass_mode)
        kind = (self.device.type, self.decoder_name, self.hot_words is not None, self.joins_sentences, *passes)
        if self.language_model is not None or not needs_warm_up(self.bundle, self.mode, self._placement().device, kind):
            return
        # Separate language models, so that caches and statistics start with the first real recording.
        engines = Engines([self.build_language_models(_WARM_UP_BYTES)], StreamPool(1, self.device))
        noise = torch.randn(2 * self.sampling_rate, generator=torch.Generator().manual_seed(0)) * 0.01
        self._score([noise, noise[: self.sampling_rate // 3]])
        log_prob, num_frames = made_up_log_prob(self.bundle.graph)
        self._decode(decoder, engines, 2, None, 0, _Scored(log_prob, num_frames, num_frames.tolist(), StageTimes()))
        for models in engines.models:
            if models.model is not None:
                query_many(models.model)
        if keep_lattices:  # for the words of least risk, or for confidences
            mbr.warm_up()

    def _rebuild_on_demand(self) -> None:
        """Drops decoders and language model caches; they are built on first use, for the weights of that time."""
        self._decoders: dict[bool, Decoder] = {}  # by whether lattices are kept
        self._engines = self._new_pool()

    def _new_pool(self) -> EnginePool:
        return EnginePool(is_exclusive=self.language_model is not None)

    def _new_engines(self, streams: StreamPool | None = None) -> Engines:
        """Language models for each worker, or one set if there are no workers, and their streams, new ones if None."""
        num_models, models = max(1, self.resources.num_workers), []
        streams = streams or StreamPool(self.resources.num_workers + 1, self.device)
        streams.catch_up()
        for worker in range(num_models):
            with streams.running(worker):
                models.append(self.build_language_models(self.resources.cache_bytes // num_models))
        return Engines(models, streams)

    def build_language_models(self, cache_bytes: int, search_device: torch.device | None = None) -> LanguageModels:
        """Builds new language models for the mode.

        Args:
            cache_bytes: the most memory for their caches.
            search_device: where a search of the decoding graph queries them; None if `lm_fusion` decides that.
        """
        options, placement = self.settings.language_models, self._placement(search_device)
        has_second = options.second_pass != "none"
        cache = replace(self.settings.cache, capacity_bytes=cache_bytes // (2 if has_second else 1))

        def build(mode: str, scales: DecodingOptions) -> LanguageModels:
            hot_words = self.hot_words
            if hot_words is not None:
                # What the graph's scores have gained is weighted by another scale than language models.
                hot_words = hot_words.scaled(scales.graph_scale / scales.lm_scale if scales.lm_scale else 0.0)
            weight, external = options.rnn_weight, self.language_model
            joins = self.joins_sentences
            return language_models(self.bundle, mode, weight, placement, cache, external, hot_words, joins)

        first = self.settings.decoding
        if not has_second:
            return build(self.mode, first)
        if placement.device_bytes is not None:
            placement = replace(placement, device_bytes=placement.device_bytes // 2)
        return replace(build(self.mode, first), second=build(options.second_pass_mode, self.final_options))

    def _placement(self, search_device: torch.device | None = None) -> Placement:
        """Where language models are; see `build_language_models`."""
        if has_transformer(self.bundle):  # whose histories are on the CPU, wherever its weights are
            return Placement(torch.device("cpu"))
        in_search = search_device is not None or self.lm_fusion == "search"
        return Placement.of(self.resources, search_device or self.device, in_search)

    def _network_device(self) -> torch.device:
        """Where the weights of the neural language model are."""
        if not has_transformer(self.bundle):
            return self._placement().device
        asked = self.resources.lm_output_device
        return self.device if asked is None else device_named(asked)

    def refuse_unused(self, run: Pass) -> None:
        """Refuses options given by the user that would have no effect in a pass.

        Raises:
            AsrError: an option would have no effect.
        """
        if self.bundle.acoustic_model.class_name == "External" and self.resources.acoustic_precision != "auto":
            raise AsrError(
                "acoustic_precision has no effect here: an external acoustic model has a precision of its own; leave "
                "it out."
            )
        if has_transformer(self.bundle):
            refuse_recurrent_options(self.settings.given, self.resources)
        if "pause_seconds" in self.settings.given and not isinstance(self.acoustic_model, NormalizingNetwork):
            raise AsrError("pause_seconds has no effect here: the acoustic model finds pauses itself; leave it out.")
        settings = setting_options()
        if "sentence_pause_seconds" in self.settings.given and (
            self.carries_history or not self.bundle.graph.can_join_sentences
        ):
            raise AsrError(
                "sentence_pause_seconds has no effect here: it needs a graph of tied states with silence between words "
                "(asr graph --topology chain-biphone --silence), and no carry_history; leave it out."
            )
        given = [settings[name] for name in sorted(self.settings.given)]
        resources = options_of(ResourceOptions)
        given += [one for name, one in resources.items() if getattr(self.resources, name) != one.default]
        refuse_unused(given, run)

    def __getstate__(self) -> dict[str, Any]:
        """State without decoders and engines: copies and other processes build their own."""
        return {**self.__dict__, "_decoders": {}, "_engines": self._new_pool()}

    @no_autograd()  # also within inference mode, the weights stay ordinary tensors
    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> _Self:
        """Moves the weights. Only the acoustic model changes its dtype."""
        self._rebuild_on_demand()
        super()._apply(moves_only(fn), *args, **kwargs)
        self.acoustic_model._apply(fn, *args, **kwargs)
        if self.recurrent_model is not None:
            self.recurrent_model.to(self._network_device())
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Loads weights and graph."""
        self._rebuild_on_demand()
        super()._load_from_state_dict(*args)
