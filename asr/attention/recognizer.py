"""Recognizes recordings with an attention model, but for segments in which nobody speaks."""

from __future__ import annotations

from torch import Tensor

from asr.audio.segments import is_steady
from asr.fusion.recognizer import FusionRecognizer
from asr.results import Alternative, RecognitionResult, StageTimes


class AttentionRecognizer(FusionRecognizer):
    """Turns recordings into words.

        model = load_attention_model("transformers:openai/whisper-small")
        recognizer = AttentionRecognizer(AttentionDecoder(model, ngram="4gram.arpa"))
        print(recognizer("talk.mp3")[0].text)

    Attention models were trained to write something, and may invent a text for silence. So segments whose level never
    changes (`asr.audio.segments.is_steady`) are not decoded. Arguments are those of `FusionRecognizer`.
    """

    def _recognize(self, samples: list[Tensor], nbest: int) -> list[RecognitionResult]:
        may_speak = [not is_steady(own, self.sampling_rate) for own in samples]
        spoken = [own for own, may in zip(samples, may_speak, strict=True) if may]
        found = iter(super()._recognize(spoken, nbest) if spoken else ())
        return [
            next(found) if may else _nothing(len(own) / self.sampling_rate, nbest)
            for own, may in zip(samples, may_speak, strict=True)
        ]


def _nothing(audio_seconds: float, nbest: int) -> RecognitionResult:
    """The result for silence."""
    times = StageTimes()
    times.audio_seconds = audio_seconds
    sentences = (Alternative((), 0.0, 0.0, 0.0, 0.0),) if nbest > 1 else ()
    return RecognitionResult((), 0.0, 0.0, 0.0, 0.0, True, times, hypotheses=sentences)
