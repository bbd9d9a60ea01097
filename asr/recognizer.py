"""Waveforms to words: features, acoustic model, first pass and language model behind one module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from asr.bundle import Bundle
from asr.decoding.first_pass import FirstPass
from asr.decoding.word_alignment import WordAligner, can_align
from asr.decoding_mode import LanguageModels, chosen_mode, decoding_options, language_models
from asr.device_streams import to_device
from asr.errors import AsrError
from asr.evaluation.timing import StageTimes
from asr.first_pass_choice import build_first_pass, chosen_first_pass
from asr.frontend import as_utterances, at_rate, like_length_batches, split_at_pauses
from asr.lm.adapters import mark_live
from asr.overlap import overlapped
from asr.result import RecognitionResult, as_result, joined
from asr.text.lexicon import Lexicon

_Self = TypeVar("_Self", bound="Recognizer")
_MOST_WORKERS = 64


class _Scored(NamedTuple):
    """A batch behind the acoustic model: log_prob (N, T, C), num_frames (N,), seconds of each, times so far."""

    log_prob: Tensor
    num_frames: Tensor
    lengths: list[float]
    times: StageTimes


class Recognizer(nn.Module):
    """Turns waveforms into words; needs neither Lightning, lhotse nor k2.

    Move it to a GPU with `.to("cuda")` as any module.

    Args:
        bundle: the trained parts.
        mode: `auto` (the first that the bundle has parts for), `on_the_fly`, `interpolated`, `large_ngram` or `ngram`.
        first_pass: `auto` (see `asr.first_pass_choice.default_first_pass`), `k2` or `torch`, whose lattices the
            language model rescores on the fly; or `torch-search`, with the language model inside the search, where it
            decides what is pruned: that takes several times as long.
        max_segment_seconds: longer recordings are cut at pauses into pieces of at most this length.
        batch_seconds: pieces are recognized together up to this much audio, padding included.
        cache_bytes: what the recurrent language model's caches may hold; the least used histories make room.
        lm_device_bytes: device memory for the tables of the large language models, which stay in host memory beyond it;
            None puts all on the device. Results are the same.
        num_workers: so many batches are searched at a time, each with a language model (and a share of `cache_bytes`)
            of its own, while the next goes through the acoustic model; 0 does everything in turn. The words are the
            same. More than the machine has cores beside the acoustic model's is no use.
        lexicon: the graph's pronunciations, from which words get the times of their phones; the bundle's own if None.
            Without one a word's times are where the graph writes it, which is up to a few phones late.
        keep_lattices: whether results have lattices, and words confidences; costs time and memory.
        options: override those that the bundle was tuned to: any field of `DecodingOptions`, and `rnn_weight`.

    Raises:
        AsrError: the bundle has no parts for the mode, an option does not exist, or the first pass cannot run here.
    """

    def __init__(
        self,
        bundle: Bundle,
        mode: str = "auto",
        first_pass: str = "auto",
        max_segment_seconds: float = 25.0,
        batch_seconds: float = 100.0,
        cache_bytes: int = 1 << 30,
        lm_device_bytes: int | None = None,
        num_workers: int = 0,
        keep_lattices: bool = False,
        lexicon: Lexicon | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.bundle = bundle
        self.features = bundle.features.network
        self.acoustic_model = bundle.acoustic_model.network
        self.mode = chosen_mode(bundle, mode)
        self.options, self.rnn_weight = decoding_options(bundle, self.mode, options or {})
        if not 0 <= num_workers <= _MOST_WORKERS:
            raise AsrError(f"the number of workers is {num_workers}; it lies between 0 and {_MOST_WORKERS}.")
        if not 1.0 <= max_segment_seconds < math.inf:
            raise AsrError(f"max_segment_seconds is {max_segment_seconds}; give 1 second or more.")
        if not 0.0 < batch_seconds < math.inf:
            raise AsrError(f"batch_seconds is {batch_seconds}; it must be above 0, and finite.")
        self._wanted_first_pass = first_pass
        chosen_first_pass(first_pass, bundle.graph, torch.device("cpu"))
        self.max_segment_seconds = max_segment_seconds
        self.batch_seconds = batch_seconds
        self.cache_bytes = cache_bytes
        self.num_workers = num_workers
        self.keep_lattices = keep_lattices
        if lexicon is None and can_align(bundle.graph):
            lexicon = bundle.lexicon
        self.aligner = WordAligner(lexicon, bundle.graph) if lexicon is not None else None
        self.lm_device_bytes = lm_device_bytes
        # Built for the device that the weights are on when they are first needed.
        self._first_pass: FirstPass | None = None
        self._language_models: list[LanguageModels] = []
        self.eval()

    @classmethod
    def from_folder(
        cls: type[_Self],
        folder: str | Path,
        large_ngram: str | Path | None = None,
        rnn_lm: str | Path | None = None,
        **arguments: Any,
    ) -> _Self:
        """Loads a bundle, with a user's own language models where given (`Bundle.with_language_models`).

        The other arguments are those of the constructor.
        """
        return cls(Bundle.load(folder).with_language_models(large_ngram, rnn_lm), **arguments)

    @property
    def sampling_rate(self) -> int:
        """What waveforms are brought to, in Hz."""
        return self.bundle.sampling_rate

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.acoustic_model.parameters()).device

    @property
    def first_pass_name(self) -> str:
        """`k2`, `torch` or `torch-search`."""
        return chosen_first_pass(self._wanted_first_pass, self.bundle.graph, self.device)

    @torch.no_grad()
    def forward(
        self, waveform: Tensor | Sequence[Tensor], sampling_rate: int | None = None, num_samples: Tensor | None = None
    ) -> list[RecognitionResult]:
        """Recognizes one recording or several.

        Args:
            waveform: float samples in [-1, 1]: (L,), a batch (N, L), or a list of (L,) or (channels, L).
            sampling_rate: of the samples, in Hz; the bundle's own if None.
            num_samples: (N,) of a padded batch.

        Returns:
            A result a recording, in order.

        Raises:
            AsrError: a recording is empty, has samples that are not numbers, or a sampling rate that is none.
        """
        rate = self.sampling_rate
        old_rate = rate if sampling_rate is None else sampling_rate
        recordings = [at_rate(row, old_rate, rate) for row in as_utterances(waveform, num_samples)]
        pieces = [
            (recording_idx, begin, end)
            for recording_idx, recording in enumerate(recordings)
            for begin, end in split_at_pauses(recording, rate, self.max_segment_seconds)
        ]
        batches = like_length_batches([end - begin for _, begin, end in pieces], int(self.batch_seconds * rate))
        samples = ([recordings[pieces[i][0]][pieces[i][1] : pieces[i][2]] for i in batch] for batch in batches)
        self.prepare()
        found: dict[int, RecognitionResult] = {}
        for batch, results in zip(
            batches, overlapped(samples, self._scored, self._searched, self.num_workers, self.device), strict=True
        ):
            found.update(zip(batch, results, strict=True))
        recognized = []
        for recording_idx in range(len(recordings)):
            own = [i for i, piece in enumerate(pieces) if piece[0] == recording_idx]
            recognized.append(joined([found[i] for i in own], [pieces[i][1] / rate for i in own]))
        return recognized

    def log_prob(self, samples: Sequence[Tensor], times: StageTimes) -> tuple[Tensor, Tensor]:
        """Pieces of audio to token log-probabilities (N, T, C) and num_frames (N,); adds to the times."""
        device = self.device
        num_samples = to_device(torch.tensor([len(row) for row in samples]), device)
        with times.measure("features", device):
            padded = to_device(nn.utils.rnn.pad_sequence(list(samples), batch_first=True), device)
            features, num_frames = self.features(padded, num_samples)
        with times.measure("acoustic model", device):
            if int(num_frames.max()) == 0:
                return features.new_zeros(len(samples), 0, len(self.bundle.graph.tokens)), num_frames
            log_prob, num_frames = self.acoustic_model(features, num_frames)
        return log_prob, num_frames

    def _scored(self, samples: list[Tensor]) -> _Scored:
        """The first stage of a batch: features and acoustic model."""
        times = StageTimes()
        lengths = [len(row) / self.sampling_rate for row in samples]
        return _Scored(*self.log_prob(samples, times), lengths, times)

    def _searched(self, worker: int, scored: _Scored) -> list[RecognitionResult]:
        """The second stage of a batch: first pass and language model."""
        log_prob, num_frames, lengths, times = scored
        first_pass, models = self._first_pass, self._language_models[worker]
        assert first_pass is not None
        before = dict(models.engine.statistics().as_dict()) if models.engine is not None else {}
        with times.measure("search", self.device):
            decoded = first_pass.decode(log_prob, num_frames, models.model)
        if models.model is not None:
            # No history is held from one batch to the next.
            mark_live(models.model, num_frames.new_empty(0, dtype=torch.int64))
        cache: dict[str, int | float] = {}
        if models.engine is not None:
            after = models.engine.statistics()
            cache = after.as_dict()
            lm_seconds = after.seconds_total - before["seconds_total"]
            times.stages["language model"] = lm_seconds
            times.stages["search"] -= lm_seconds
        samples_per_frame: Any = self.features.frame_shift * self.acoustic_model.subsampling_factor  # type: ignore[operator]
        step = float(samples_per_frame) / self.sampling_rate
        results = []
        for result, length in zip(decoded, lengths, strict=True):
            share = times.scaled(length / sum(lengths))
            share.audio_seconds = length
            results.append(as_result(result, step, share, self.options, self.aligner, cache))
        return results

    def prepare(self) -> None:
        """Builds what the first recording would wait for: first pass, and a language model a worker.

        Raises:
            AsrError: the first pass cannot run here, or the budget of device memory is too small.
        """
        if self._first_pass is None:
            graph = self.bundle.graph.to(self.device)
            self._first_pass = build_first_pass(self.first_pass_name, graph, self.options, self.keep_lattices)
        num_models = max(1, self.num_workers)
        while len(self._language_models) < num_models:
            self._language_models.append(
                language_models(
                    self.bundle,
                    self.mode,
                    self.rnn_weight,
                    self.device,
                    self.lm_device_bytes,
                    self.cache_bytes // num_models,
                )
            )

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes: they build first pass and caches of their own."""
        return {**self.__dict__, "_first_pass": None, "_language_models": []}

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> _Self:
        """Follows `.to(device)`: graph and caches are built again where the weights are."""
        self._first_pass = None
        self._language_models = []
        super()._apply(fn, *args, **kwargs)
        return self
