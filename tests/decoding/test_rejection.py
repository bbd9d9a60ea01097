"""What a search makes of noise: words whose tokens last for seconds."""

from __future__ import annotations

from dataclasses import replace

from asr.decoding.interface import Hypothesis
from asr.decoding.rejection import only_words, spoken

# Two words of 3 frames a token, a silence of a second, then a word of two tokens of 20 frames each.
SPEECH_THEN_NOISE = Hypothesis(
    (1, 2, 3), ("YES", "NO", "HUM"), -1.0, -2.0, -3.0, -6.0, (0, 6, 46), (6, 12, 86), (0.9, 0.8, 0.3),
    ((4, 0, 3), (5, 3, 6), (6, 6, 9), (7, 9, 12), (8, 46, 66), (9, 66, 86)),
)  # fmt: skip


def test_words_of_long_tokens_are_noise() -> None:
    assert spoken(SPEECH_THEN_NOISE, 0.03, 0.25) == [True, True, False]
    left = only_words(SPEECH_THEN_NOISE, spoken(SPEECH_THEN_NOISE, 0.03, 0.25))
    assert left.words == ("YES", "NO") and left.word_ids == (1, 2) and left.end_frames == (6, 12)
    assert left.confidences == (0.9, 0.8) and left.total == -6.0


def test_the_limit_is_a_mean_in_seconds() -> None:
    assert spoken(SPEECH_THEN_NOISE, 0.03, 0.601) == [True, True, True]
    assert spoken(SPEECH_THEN_NOISE, 0.01, 0.25) == [True, True, True]
    assert spoken(SPEECH_THEN_NOISE, 0.03, 0.08) == [False, False, False]
    assert spoken(SPEECH_THEN_NOISE, 0.03, None) == [True, True, True]


def test_few_words_that_are_improbable_are_noise() -> None:
    quick = replace(SPEECH_THEN_NOISE, phones=((4, 0, 3), (5, 3, 6), (6, 6, 9), (7, 9, 12), (8, 46, 49)))
    assert spoken(quick, 0.03, 0.25) == [True] * 3
    assert spoken(replace(quick, confidences=(0.3, 0.3, 0.1)), 0.03, 0.25) == [False] * 3
    assert spoken(replace(quick, confidences=(0.3, 0.3, 0.1)), 0.03, None) == [True] * 3
    assert spoken(replace(quick, confidences=(0.3, 0.3, 0.2)), 0.03, 0.25) == [True] * 3
    four = replace(quick, words=("A",) * 4, start_frames=(0, 6, 46, 47), end_frames=(6, 12, 47, 49))
    assert spoken(replace(four, confidences=(0.1,) * 4), 0.03, 0.25) == [True] * 4


def test_words_without_a_silence_between_them_are_judged_together() -> None:
    # 0.2 s of silence: four tokens of 3 frames and two of 20 have a mean of 0.26 s.
    near = Hypothesis(
        (1, 2, 3), ("YES", "NO", "HUM"), 0.0, 0.0, 0.0, 0.0, (0, 6, 18), (6, 12, 58), (),
        ((4, 0, 3), (5, 3, 6), (6, 6, 9), (7, 9, 12), (8, 18, 38), (9, 38, 58)),
    )  # fmt: skip
    assert spoken(near, 0.03, 0.25) == [False, False, False]
    assert spoken(near, 0.03, 0.27) == [True, True, True]
    assert only_words(near, [False] * 3).words == ()
