"""Recognizes recordings with a transducer: encoder, search and language models.

Shapes: N recordings, C channels, L samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asr.audio.segments import open_recordings, segment_batches
from asr.ctc.interface import CTCHypothesis
from asr.decoding.settings import ResourceOptions
from asr.kernels.jit import uncompiled
from asr.kernels.memory import no_autograd
from asr.options import require_type
from asr.results import Alternative, RecognitionResult, StageTimes, Word, joined
from asr.transducer.decoder import TransducerDecoder

# A GPU needs many recordings at a time.
_BATCH_SECONDS = {"cpu": 50.0, "cuda": 600.0}


class TransducerRecognizer:
    """Turns recordings into words with a transducer. Long recordings are cut into segments at pauses.

        network = load_transducer("transformers:nvidia/parakeet-tdt-0.6b-v3")
        recognizer = TransducerRecognizer(TransducerDecoder(network, ngram="4gram.arpa"))
        print(recognizer("talk.mp3")[0].text)

    Args:
        decoder: the decoder, with its network.
        resources: of these, `max_segment_seconds` and `batch_seconds` (by default, 50 on a CPU and 600 on a GPU).

    Attributes:
        sampling_rate: the rate that recordings are resampled to, in Hz.
    """

    carries_history = False

    def __init__(self, decoder: TransducerDecoder, resources: ResourceOptions | None = None) -> None:
        self.decoder = decoder
        self.resources = ResourceOptions() if resources is None else resources
        require_type(self.resources, ResourceOptions, "resources", "asr.ResourceOptions(...)")
        self.sampling_rate = decoder.network.sampling_rate

    @property
    def batch_seconds(self) -> float:
        """Maximum audio in a batch, in seconds."""
        asked = self.resources.batch_seconds
        return _BATCH_SECONDS["cuda" if self.device.type == "cuda" else "cpu"] if asked is None else asked

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.decoder.network.device

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
        in_order = [dict(sorted(parts.items())) for parts in found]
        return [joined([*parts.values()], [begin / rate for begin in parts]) for parts in in_order]

    def _recognize(self, samples: list[Tensor], nbest: int) -> list[RecognitionResult]:
        times = StageTimes()
        with times.measure("acoustic model", self.device):
            encoded, num_frames = self.decoder.network(samples)
        with times.measure("search", self.device):
            lists = self.decoder(encoded, num_frames, nbest=nbest)
        lengths = [len(each) / self.sampling_rate for each in samples]
        results = []
        for hypotheses, length in zip(lists, lengths, strict=True):
            share = times.scaled(length / sum(lengths))
            share.audio_seconds = length
            results.append(_as_result(hypotheses, share, nbest))
        return results


def _as_result(hypotheses: Sequence[CTCHypothesis], times: StageTimes, nbest: int) -> RecognitionResult:
    sentences = [_as_sentence(each, times.audio_seconds) for each in hypotheses]
    best, is_complete = sentences[0], hypotheses[0].is_complete
    if not is_complete:
        return RecognitionResult((), 0.0, 0.0, 0.0, 0.0, is_complete, times)
    scores = best.am_score, best.graph_score, best.lm_score, best.total
    result = RecognitionResult(best.words, *scores, is_complete, times)
    return replace(result, hypotheses=tuple(sentences)) if nbest > 1 else result


def _as_sentence(found: CTCHypothesis, duration: float) -> Alternative:
    words = []
    for word in found.words:
        assert word.start is not None and word.end is not None
        words.append(Word(word.text, min(word.start, duration), min(word.end, duration)))
    return Alternative(tuple(words), found.am_score, 0.0, found.lm_score, found.score)
