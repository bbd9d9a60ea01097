"""Words that are none: what a network that was trained on speech makes of noise.

A search has to explain every frame. In noise the network finds no silence, and the cheapest path holds a few tokens for
seconds each, with words around them. Nobody speaks like that: in speech a token lasts 50 ms on average. In less than a
second of noise tokens cannot last long, but then there are few words, and they are improbable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asr.decoding.interface import Hypothesis

# Words with a shorter silence between them are judged together.
_GAP_SECONDS = 0.3

# So few words that are all probably wrong are more likely no words at all.
_FEW_WORDS, _IMPROBABLE = 3, 0.25


def spoken(hypothesis: Hypothesis, frame_seconds: float, max_token_seconds: float | None) -> list[bool]:
    """Which words of a hypothesis are speech.

    Args:
        hypothesis: with the times of its words' phones where they are known, and calibrated confidences.
        frame_seconds: time between two frames.
        max_token_seconds: words whose tokens last longer than this on average, together with those of the words around
            them up to a silence, are noise; None takes nothing for noise.
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
    """Frames of each run of tokens within a span."""
    return [min(last, end) - max(first, begin) for _, first, last in runs if first < end and last > begin]


def only_words(hypothesis: Hypothesis, stays: Sequence[bool]) -> Hypothesis:
    """The hypothesis with some of its words; scores and phones are those of the whole path."""
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
