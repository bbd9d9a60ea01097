"""Data and measurements of the decoding benchmarks: frames with references, time, word error rate, tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.backtrace import hypothesis_of_path
from asr.decoding.interface import Decoder, DecodeResult, Hypothesis
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.interface import LanguageModel
from asr.metrics import NO_ERRORS, ErrorCounts, count_errors, read_transcripts
from scripts.benchmarks.speech import Recording, frames_of

BATCH_SIZE = 32
# The RNN LM weighs the frames less than the n-gram does: at equal effort its beams are narrower. These give up little.
RNN_BEAMS = {"search_beam": 10.5, "output_beam": 5.0, "context_beam": 5.0}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Workload:
    """Utterances to decode.

    Args:
        name: what was recorded.
        frames: log_prob (T, C) of each utterance.
        references: its words.
        seconds: of speech.
    """

    name: str
    frames: list[Tensor]
    references: list[Sequence[str]]
    seconds: float

    @property
    def num_frames(self) -> int:
        return sum(map(len, self.frames))

    @property
    def num_words(self) -> int:
        return sum(map(len, self.references))


def heard(bundle: Bundle, name: str, speech: Sequence[Recording]) -> Workload:
    """Recordings, processed by the bundle's acoustic model."""
    frames = frames_of(bundle, speech)
    return Workload(name, frames, [one.words for one in speech], _seconds(bundle, frames))


def _seconds(bundle: Bundle, frames: Sequence[Tensor]) -> float:
    """The duration of log_prob (T, C) of some utterances."""
    return bundle.frame_seconds * sum(map(len, frames))


def given(bundle: Bundle, log_probs: Path, references: Path, every: int) -> Workload:
    """Frames of an npz (utterance id -> (T, C)) and lines `id words`; every n-th utterance."""
    words = read_transcripts(references)
    with np.load(log_probs) as archive:
        ids = sorted(name for name in archive if name in words)[::every]
        if not ids:
            raise AsrError(f"{log_probs}: there are no utterances of {references}; use the same ids in both files.")
        frames = [torch.from_numpy(archive[name].astype(np.float32)) for name in ids]
    return Workload(log_probs.stem, frames, [words[name] for name in ids], _seconds(bundle, frames))


def decode_all(
    first_pass: Decoder, frames: list[Tensor], lm: LanguageModel | None = None, batch_size: int = BATCH_SIZE
) -> tuple[list[DecodeResult], float]:
    """Results in order, and CPU seconds of this process; utterances of similar length are decoded together."""
    order = sorted(range(len(frames)), key=lambda i: -len(frames[i]))

    def run() -> list[DecodeResult]:
        found: dict[int, DecodeResult] = {}
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            padded = torch.nn.utils.rnn.pad_sequence([frames[i] for i in chosen], batch_first=True)
            results = first_pass.decode(padded, torch.tensor([len(frames[i]) for i in chosen]), lm)
            found.update(zip(chosen, results, strict=True))
        return [found[i] for i in range(len(frames))]

    return timed(run)


def timed(work: Callable[[], _T]) -> tuple[_T, float]:
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


def lesser(work: Callable[[], tuple[_T, float]]) -> tuple[_T, float]:
    """The faster of two runs, work giving a result and its seconds: other load on a machine slows either."""
    one, other = work(), work()
    return one if one[1] <= other[1] else other


def best_of(results: Sequence[DecodeResult]) -> list[Hypothesis | None]:
    return [result.best for result in results]


def errors(workload: Workload, hypotheses: Sequence[Hypothesis | None]) -> list[ErrorCounts]:
    """Of each utterance; no hypothesis counts as no words."""
    pairs = zip(workload.references, hypotheses, strict=True)
    return [count_errors(list(words), one.words if one is not None else ()) for words, one in pairs]


def word_error_rate(workload: Workload, hypotheses: Sequence[Hypothesis | None]) -> float:
    """In %."""
    return 100.0 * sum(errors(workload, hypotheses), NO_ERRORS).rate


def kaldi_decoder(
    graph: DecodingGraph, options: DecodingOptions, frames: Sequence[Tensor]
) -> tuple[list[Hypothesis | None], float]:
    """The hypotheses of kaldi-decoder's `FasterDecoder`, one utterance at a time, and the CPU seconds of its search.

    Raises:
        ImportError: kaldi-decoder or kaldifst is not installed.
    """
    from asr.testing.kaldi_search import KaldiSearch

    search = KaldiSearch(graph, options.search_beam, options.max_active_states, options.min_active_states)
    found, seconds = timed(lambda: [search.decode(log_prob * options.am_scale) for log_prob in frames])
    return [None if one is None else hypothesis_of_path(graph, options, *one, 0.0, 0.0) for one in found], seconds


def best_first_pass(graph: DecodingGraph, options: DecodingOptions, rescores: bool = False) -> Decoder:
    """k2's pass where there is a k2, else the torch pass; if it rescores, either rescores its lattice on the fly."""
    try:
        from asr.decoding.k2 import K2Decoder

        return K2Decoder(graph, options)
    except AsrError:
        return TokenPassingDecoder(graph, options, lm_fusion="lattice" if rescores else "search")
