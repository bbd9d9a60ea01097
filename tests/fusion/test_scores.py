"""What words add to the scores of hypotheses, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asr.ctc.word_trie import LEAST_LOG_PROB
from asr.fusion.interface import FusionConfig
from asr.fusion.scores import NO_WORD, OUTSIDE, WordScores, unigrams_of
from asr.fusion.spelling import spelled_words
from asr.lm.ngram.arpa import LN_10
from asr.lm.ngram.io import read_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.text.ctc_tokens import CTCTokens
from asr.text.symbols import UNK_ID

UNIGRAMS = """\\data\\
ngram 1=6

\\1-grams:
-2.0\t<unk>
-99\t<s>
-0.6\t</s>
-0.5\ta
-0.7\tab
-1.1\tb

\\end\\
"""
PIECES = CTCTokens(["<blk>", "▁a", "b", "▁b", "▁", "c"])
A, B, NEW_B, MARK, C = 1, 2, 3, 4, 5
SCALE = 0.5


@pytest.fixture
def unigrams(tmp_path: Path) -> NgramLM:
    (tmp_path / "unigrams.arpa").write_text(UNIGRAMS)
    return read_ngram_lm(tmp_path / "unigrams.arpa")


def scores_of(ngram: NgramLM, gains: dict[str, float] | None = None, **settings: Any) -> WordScores:
    config = FusionConfig(lm_scale=SCALE, **{"spelling_penalty": -1.0, **settings})
    return WordScores(PIECES, spelled_words(["a", "ab", "b"], PIECES), config, ngram.vocabulary, ngram, gains)


def read(scores: WordScores, *entries: int) -> list[tuple[int, int, float, float]]:
    """Place, word, gain and guess after each of some tokens in a row."""
    found, place = [], np.zeros(1, dtype=np.int64)
    for entry in entries:
        extension = scores.extended(place, np.array([entry]))
        found.append(tuple(float(values[0]) for values in extension))
        place = extension.place
    return found  # type: ignore[return-value]


def test_a_guess_is_the_best_unigram_that_may_follow(unigrams: NgramLM) -> None:
    scores = scores_of(unigrams)
    first, second, third = read(scores, A, B, NEW_B)
    # "a" is the best word of all, so that a word that begins so loses nothing.
    assert first[1:] == (NO_WORD, 0.0, 0.0)
    assert second[1:] == pytest.approx((NO_WORD, 0.0, SCALE * (0.5 - 0.7) * LN_10))
    # "ab" ends where "b" begins.
    assert third[1:] == pytest.approx((unigrams.vocabulary.id_of("ab"), 0.0, SCALE * (0.5 - 1.1) * LN_10))


def test_words_that_are_not_listed(unigrams: NgramLM) -> None:
    scores = scores_of(unigrams)
    _, outside, end = read(scores, A, C, A)
    assert outside[0] == OUTSIDE
    assert outside[1:] == pytest.approx((NO_WORD, 0.0, SCALE * (0.5 - 2.0) * LN_10 - 1.0))
    assert end[1:] == pytest.approx((UNK_ID, -1.0, 0.0))
    word, gain = scores.finished(np.array([OUTSIDE]))
    assert (word[0], gain[0]) == (UNK_ID, -1.0)


def test_an_unlisted_word_may_be_the_best_guess(unigrams: NgramLM) -> None:
    scores = scores_of(unigrams, spelling_penalty=1.4)
    (beginning,) = read(scores, NEW_B)
    assert beginning[3] == pytest.approx(SCALE * (0.5 - 2.0) * LN_10 + 1.4)
    assert beginning[3] > SCALE * (0.5 - 1.1) * LN_10
    _, between = read(scores_of(unigrams, spelling_penalty=9.0), A, MARK)
    assert between[3] == 0.0


def test_listed_words_only(unigrams: NgramLM) -> None:
    scores = scores_of(unigrams, spelling_penalty=-math.inf)
    _, outside = read(scores, A, C)
    assert outside[3] == -math.inf


def test_hot_words_raise_guesses(unigrams: NgramLM) -> None:
    first, second, end = read(scores_of(unigrams, {"ab": 2.0}), A, B, A)
    assert first[3] == 0.0
    assert second[3] == 0.0  # the best word is "ab" now
    assert end[1:] == pytest.approx((unigrams.vocabulary.id_of("ab"), SCALE * 2.0, 0.0))
    (other,) = read(scores_of(unigrams, {"ab": 2.0}), NEW_B)
    assert other[3] == pytest.approx(SCALE * ((0.7 - 1.1) * LN_10 - 2.0))


def test_beginnings_of_hot_words_are_raised_if_unlisted_words_cost_nothing() -> None:
    config = FusionConfig(lm_scale=1.0, spelling_penalty=0.0)
    scores = WordScores(PIECES, spelled_words(["ab"], PIECES), config, gains={"ab": 2.0})
    first, second, end = read(scores, A, B, NEW_B)
    assert (first[3], second[3]) == (2.0, 2.0)
    assert end[2:] == (2.0, 0.0)
    _, outside = read(scores, A, C)
    assert outside[3] == 0.0


def test_marks_end_words_once(unigrams: NgramLM) -> None:
    scores = scores_of(unigrams, word_insertion_penalty=0.25)
    first, mark, again, following = read(scores, A, MARK, MARK, B)
    assert mark[:3] == (0, unigrams.vocabulary.id_of("a"), 0.25)
    assert mark[3] == 0.0
    assert again[:3] == (0, NO_WORD, 0.0)
    assert following[1:3] == (NO_WORD, 0.0)
    word, gain = scores.finished(np.array([0, int(first[0])]))
    assert word.tolist() == [NO_WORD, unigrams.vocabulary.id_of("a")]
    assert gain.tolist() == [0.0, 0.25]


@pytest.mark.parametrize("others", [[], ["\u00e3", "\u00a9"]], ids=["plain", "with its bytes"])
def test_words_in_another_form_of_unicode(others: list[str]) -> None:
    tokens = CTCTokens(["<blk>", "▁", "e", "\u0301", "a", *others])
    config = FusionConfig()
    scores = WordScores(tokens, spelled_words(["\u00e9", "a"], tokens), config)
    place = np.zeros(1, dtype=np.int64)
    for entry in (1, 2, 3):
        place = scores.extended(place, np.array([entry])).place
    word, gain = scores.finished(place)
    assert place[0] > 0
    assert gain[0] == 0.0
    assert word[0] == NO_WORD  # without a language model


def test_words_in_bytes() -> None:
    tokens = CTCTokens(["<blk>", "▁", "a", "<0xC3>", "<0xA9>"])
    spelled = spelled_words(["a\u00e9"], tokens)
    assert spelled.words == {"a\u00e9".encode(): "a\u00e9"}
    scores = WordScores(tokens, spelled, FusionConfig())
    *_, last = read(scores, 1, 2, 3, 4)
    _, gain = scores.finished(np.array([int(last[0])]))
    assert gain[0] == 0.0


def test_tokens_one_by_one_and_whole_texts_have_the_same_words() -> None:
    pieces = ["▁", "▁A", "a", "Σ", "σ", "ς", "▁ΟΔ", "ΟΣ", "İ", "i", "-", ".-", ",", "'", "▁-", "▁(", "(—.", "—"]
    tokens = CTCTokens(["<blk>", *pieces])
    spelled = spelled_words(["a", "aσ", "οδος", "οδοσα", "ia", "a'a"], tokens, is_plain=True)
    assert spelled.form is not None
    scores = WordScores(tokens, spelled, FusionConfig(spelling_penalty=-1.0))
    generator = np.random.default_rng(0)
    num_listed = 0
    for _ in range(2000):
        entries = generator.integers(1, len(tokens), generator.integers(1, 6)).tolist()
        place, gain = np.zeros(1, dtype=np.int64), 0.0
        for entry in entries:
            extension = scores.extended(place, np.array([entry]))
            place, gain = extension.place, gain + float(extension.gain[0])
        gain += float(scores.finished(place)[1][0])
        texts = [tokens.text_of(*entries[first:after]) for first, after in tokens.group(entries)]
        words = [word for text in texts for word in spelled.form.words_of(text)]
        assert gain == -sum(not spelled.has(word) for word in words), texts
        num_listed += sum(map(spelled.has, words))
    assert num_listed > 300


def test_guesses_leave_a_chance_to_words_that_the_ngram_model_excludes(tmp_path: Path) -> None:
    """Another language model may find them likely."""
    (tmp_path / "unigrams.arpa").write_text(UNIGRAMS.replace("-1.1\tb", "-99\tb"))
    score, _ = unigrams_of(["a", "b"], read_ngram_lm(tmp_path / "unigrams.arpa"))
    assert score.tolist() == pytest.approx([-0.5 * LN_10, LEAST_LOG_PROB], abs=1e-4)
