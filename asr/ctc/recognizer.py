"""Recognizes recordings with an external network and its decoder.

Shapes: N recordings, C channels, L samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from asr.audio.segments import open_recordings, segment_batches
from asr.ctc.decoder import CTCDecoder
from asr.ctc.interface import CTCHypothesis
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.kernels.jit import uncompiled
from asr.kernels.memory import no_autograd
from asr.models.external import ExternalModel
from asr.options import require_type
from asr.results import Alternative, RecognitionResult, StageTimes, Word, joined_recordings

# A GPU needs many recordings at a time.
_BATCH_SECONDS = {"cpu": 50.0, "cuda": 600.0}


class Network(Protocol):
    """A network that reads waveforms."""

    sampling_rate: int
    frame_shift: float

    def __call__(self, waveform: Any, sampling_rate: int | None = None) -> tuple[Tensor, Tensor]:
        """Waveforms, such as a list of (L,) -> what the decoder reads, (N, T, ...), and the numbers of frames (N,)."""


class ExternalRecognizer:
    """Turns recordings into words. Long recordings are cut into segments at pauses.

    Args:
        network: the network.
        decoder: a decoder of its output: what the network returns, and `nbest` -> a list of hypotheses for each, best
            first.
        resources: of these, `max_segment_seconds` and `batch_seconds` (by default, 50 on a CPU and 600 on a GPU).

    Attributes:
        sampling_rate: the rate that recordings are resampled to, in Hz.
    """

    carries_history = False

    def __init__(
        self, network: Network, decoder: Callable[..., list[Any]], resources: ResourceOptions | None = None
    ) -> None:
        self.network = network
        self.decoder = decoder
        self.resources = ResourceOptions() if resources is None else resources
        require_type(self.resources, ResourceOptions, "resources", "asr.ResourceOptions(...)")
        self.sampling_rate = network.sampling_rate

    @property
    def batch_seconds(self) -> float:
        """Maximum audio in a batch, in seconds."""
        asked = self.resources.batch_seconds
        return _BATCH_SECONDS["cuda" if self.device.type == "cuda" else "cpu"] if asked is None else asked

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return torch.device("cpu")

    @uncompiled
    @no_autograd()
    def __call__(
        self,
        audio: Any,
        sampling_rate: int | None = None,
        num_samples: Tensor | Sequence[int] | None = None,
        nbest: int = 1,
    ) -> list[RecognitionResult]:
        """Recognizes one recording or several.

        Args:
            audio: a file's path; a tensor or NumPy array with one recording (L,), a batch (N, L) or a batch with
                channels (N, C, L); or a list of recordings, each a path, (L,) or (C, L).
            sampling_rate: of arrays, in Hz; the network's own if None. Files bring their own.
            num_samples: (N,) length of each recording of a padded batch.
            nbest: the maximum number of `hypotheses` of each result.

        Returns:
            A list with one result per recording, in order.

        Raises:
            AsrError: a file cannot be read; a recording is empty, of another shape or type, or has samples that are not
                finite; or as for the network and the decoder.
        """
        rate = self.sampling_rate
        recordings = open_recordings(audio, rate if sampling_rate is None else sampling_rate, rate, num_samples)
        found: list[dict[int, RecognitionResult]] = [{} for _ in recordings]
        for batch in segment_batches(recordings, rate, self.resources.max_segment_seconds, self.batch_seconds):
            results = self._recognize([segment.samples for segment in batch], nbest)
            for segment, result in zip(batch, results, strict=True):
                found[segment.recording_idx][segment.begin] = result
        return joined_recordings(found, rate)

    def _recognize(self, samples: list[Tensor], nbest: int) -> list[RecognitionResult]:
        times = StageTimes()
        with times.measure("acoustic model", self.device):
            values, num_frames = self.network(samples)
        with times.measure("search", self.device):
            lists = self.decoder(values, num_frames, nbest=nbest)
        lengths = [len(each) / self.sampling_rate for each in samples]
        results = []
        for hypotheses, length in zip(lists, lengths, strict=True):
            share = times.scaled(length / sum(lengths))
            share.audio_seconds = length
            results.append(_as_result(hypotheses, self.network.frame_shift, share, nbest))
        return results


def _as_result(
    hypotheses: Sequence[CTCHypothesis], frame_shift: float, times: StageTimes, nbest: int
) -> RecognitionResult:
    sentences = [_as_sentence(each, frame_shift, times.audio_seconds) for each in hypotheses]
    best, is_complete = sentences[0], hypotheses[0].is_complete
    if not is_complete and not best.words:
        return RecognitionResult((), 0.0, 0.0, 0.0, 0.0, is_complete, times)
    scores = best.am_score, best.graph_score, best.lm_score, best.total
    result = RecognitionResult(best.words, *scores, is_complete, times)
    return replace(result, hypotheses=tuple(sentences)) if nbest > 1 else result


def _as_sentence(found: CTCHypothesis, frame_shift: float, duration: float) -> Alternative:
    words = words_in_seconds(found, frame_shift, duration)
    return Alternative(words, found.am_score, 0.0, found.lm_score, found.score)


def words_in_seconds(
    found: CTCHypothesis, frame_shift: float, duration: float, first_frame: int = 0
) -> tuple[Word, ...]:
    """The words of a hypothesis with times in seconds.

    Args:
        found: the hypothesis.
        frame_shift: seconds per frame.
        duration: of the recording so far, in seconds; no word begins or ends after it.
        first_frame: the frame of the recording at which the hypothesis begins.
    """

    def seconds(frame: int) -> float:
        return min((first_frame + frame) * frame_shift, duration)

    return tuple(
        Word(word.text, seconds(word.start_frame), seconds(word.end_frame), word.confidence) for word in found.words
    )


class CTCRecognizer(ExternalRecognizer):
    """Recognizes recordings with an external CTC network.

        model = load_acoustic_model("torchaudio:WAV2VEC2_ASR_BASE_960H")
        recognizer = CTCRecognizer(model, CTCDecoder(model.tokens, ngram="3gram.arpa"))
        print(recognizer("talk.mp3")[0].text)

    Args:
        model: the network.
        decoder: a decoder for the network's tokens.
        resources: as for `ExternalRecognizer`.

    Raises:
        AsrError: the decoder was built for different tokens.
    """

    def __init__(self, model: ExternalModel, decoder: CTCDecoder, resources: ResourceOptions | None = None) -> None:
        if model.tokens.symbols != decoder.tokens.symbols:
            raise AsrError(
                f"{model.name}: the network's {len(model.tokens)} tokens ({model.tokens.symbols[1]!r}, ...) are not "
                f"the decoder's {len(decoder.tokens)}; build the decoder with tokens=model.tokens."
            )
        super().__init__(model, decoder, resources)
