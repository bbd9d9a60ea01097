"""Rejects words that a search finds in noise.

A search must explain every frame. A network trained on speech finds no silence in noise, so the best path stays in a
few tokens for seconds, with words around them. In speech, a token lasts 50 ms on average. In less than a second of
noise, tokens cannot last long, but then there are only a few words with low confidences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asr.decoding.interface import Hypothesis

# Words are judged together if the silence between them is shorter.
_GAP_SECONDS = 0.3

# At most this many words with a mean confidence below this are all rejected.
_FEW_WORDS, _IMPROBABLE = 3, 0.25


def spoken(hypothesis: Hypothesis, frame_seconds: float, max_token_seconds: float | None) -> list[bool]:
    """Which words of a hypothesis are speech rather than noise.

    Args:
        hypothesis: with calibrated confidences if available, and with exact word times if known.
        frame_seconds: time between two frames, in seconds.
        max_token_seconds: words count as noise if the tokens of all words between two silences last longer than this on
            average; None accepts all words.
    """
    num_words = len(hypothesis.words)
    is_spoken = [True] * num_words
    if max_token_seconds is None:
        return is_spoken
    if hypothesis.confidences and num_words <= _FEW_WORDS and sum(hypothesis.confidences) < _IMPROBABLE * num_words:
        return [False] * num_words
    starts, ends, first = hypothesis.start_frames, hypothesis.end_frames, 0
    for last in range(num_words):
        if last + 1 < num_words and (starts[last + 1] - ends[last]) * frame_seconds < _GAP_SECONDS:
            continue
        lengths = _lengths(hypothesis.phones, starts[first], ends[last])
        if lengths and sum(lengths) * frame_seconds > max_token_seconds * len(lengths):
            is_spoken[first : last + 1] = [False] * (last + 1 - first)
        first = last + 1
    return is_spoken


def _lengths(runs: Sequence[tuple[int, int, int]], begin: int, end: int) -> list[int]:
    """The number of frames of each run of tokens within a span."""
    return [min(last, end) - max(first, begin) for _, first, last in runs if first < end and last > begin]


def only_words(hypothesis: Hypothesis, stays: Sequence[bool]) -> Hypothesis:
    """The hypothesis with the words that stay; scores and phones remain those of the whole path."""
    if all(stays):
        return hypothesis
    kept = [position for position, stay in enumerate(stays) if stay]
    return replace(
        hypothesis,
        word_ids=tuple(hypothesis.word_ids[i] for i in kept),
        words=tuple(hypothesis.words[i] for i in kept),
        start_frames=tuple(hypothesis.start_frames[i] for i in kept),
        end_frames=tuple(hypothesis.end_frames[i] for i in kept),
        confidences=tuple(hypothesis.confidences[i] for i in kept if hypothesis.confidences),
    )
