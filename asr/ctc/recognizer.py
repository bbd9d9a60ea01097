"""Recognizes waveforms with an external network and a `CTCDecoder`.

Shapes: N recordings, L samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
from torch import Tensor

from asr.audio.samples import as_recordings
from asr.audio.segments import at_rate, split_at_pauses
from asr.ctc.decoder import CTCDecoder
from asr.ctc.interface import CTCHypothesis
from asr.errors import AsrError
from asr.models.external import ExternalModel
from asr.results import RecognitionResult, StageTimes, Word, joined


class CTCRecognizer:
    """Recognizes recordings of any length with an external CTC network.

        model = load_acoustic_model("torchaudio:WAV2VEC2_ASR_BASE_960H")
        recognizer = CTCRecognizer(model, CTCDecoder(model.tokens, ngram="3gram.arpa", frame_shift=model.frame_shift))
        print(recognizer(waveform, 16000)[0].text)

    Args:
        model: the network.
        decoder: a decoder for the network's tokens.
        max_segment_seconds: longer recordings are cut at pauses into pieces of at most this length.

    Raises:
        AsrError: the decoder was built for different tokens.
    """

    def __init__(self, model: ExternalModel, decoder: CTCDecoder, max_segment_seconds: float = 25.0) -> None:
        if model.tokens.symbols != decoder.tokens.symbols:
            raise AsrError(
                f"{model.name}: the network's {len(model.tokens)} tokens ({model.tokens.symbols[1]!r}, ...) are not "
                f"the decoder's {len(decoder.tokens)}; build the decoder with tokens=model.tokens."
            )
        self.model = model
        self.decoder = decoder
        self.max_segment_seconds = max_segment_seconds

    def __call__(
        self,
        waveform: Tensor | npt.NDArray[Any] | Sequence[Tensor | npt.NDArray[Any]],
        sampling_rate: int | None = None,
    ) -> list[RecognitionResult]:
        """Recognizes one recording or several.

        Args:
            waveform: samples (L,), (N, L) or a list of (L,), and so on, as for `asr.audio.samples.as_recordings`.
            sampling_rate: of the samples, in Hz; the network's own if None.

        Returns:
            One result per recording, in order.

        Raises:
            AsrError: as for `as_recordings`.
        """
        rate = self.model.sampling_rate if sampling_rate is None else sampling_rate
        return [self._recognize(each, rate) for each in as_recordings(waveform, sampling_rate=rate)]

    def _recognize(self, waveform: Tensor, sampling_rate: int) -> RecognitionResult:
        rate = self.model.sampling_rate
        waveform = at_rate(waveform, sampling_rate, rate)
        pieces, offsets = [], []
        for begin, end in split_at_pauses(waveform, rate, self.max_segment_seconds):
            times = StageTimes((end - begin) / rate)
            with times.measure("acoustic model"):
                log_probs, lengths = self.model(waveform[begin:end])
            with times.measure("search"):
                (found,) = self.decoder(log_probs, lengths)
            assert isinstance(found, list)
            pieces.append(self._result(found[0], times))
            offsets.append(begin / rate)
        return joined(pieces, offsets)

    def _result(self, found: CTCHypothesis, times: StageTimes) -> RecognitionResult:
        shift, duration = self.model.frame_shift, times.audio_seconds
        words = tuple(
            Word(
                word.text,
                min(word.start_frame * shift, duration),
                min(word.end_frame * shift, duration),
                word.confidence,
            )
            for word in found.words
        )
        return RecognitionResult(words, found.am_score, 0.0, found.lm_score, found.score, found.is_complete, times)
