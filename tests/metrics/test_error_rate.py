from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr import nist
from asr.errors import AsrError
from asr.metrics import (
    ConfidenceBin,
    ErrorCounts,
    align,
    alignment_errors,
    bootstrap_interval,
    calibration,
    characters,
    count_errors,
    normalized_cross_entropy,
    probability_of_improvement,
    score_transcripts,
)
from tests.reference.edit_distance import edit_distance

WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=7)


@given(WORDS, WORDS)
def test_number_of_errors_is_the_edit_distance(reference, hypothesis):
    counts = count_errors(reference, hypothesis)
    assert counts.num_errors == edit_distance(reference, hypothesis)
    assert counts.num_ref == len(reference)
    assert counts.num_insertions - counts.num_deletions == len(hypothesis) - len(reference)


def test_counts_by_hand():
    assert count_errors("the cat sat".split(), "the bat sat on".split()) == ErrorCounts(3, 1, 1, 0)
    assert count_errors([], ["a"]).rate == float("inf")
    assert count_errors([], []).rate == 0.0


def test_a_character_error_rate_counts_the_gaps():
    assert characters(["ab", "c"]) == ["a", "b", " ", "c"]
    report = score_transcripts({"u": ("ab", "c")}, {"u": ("abc",)})
    assert report.total_characters == ErrorCounts(4, 0, 0, 1)
    assert report.total_words.num_errors == 2


def test_canonically_equivalent_words_are_the_same():
    one, two = "été".split(), "e\u0301te\u0301".split()
    assert one != two
    assert count_errors(one, two).num_errors == 0
    assert characters(two) == ["é", "t", "é"]
    assert align(one, two) == [("été", "été")]
    assert alignment_errors(nist.align(one, two)).num_errors == 0
    assert nist.resolve({"a": one}, {"a": two}) == ({"a": ("été",)}, {"a": ("été",)})


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("今天 天气 OK 吗", "今天天气 OK 吗"),
        ("カレー を たべる 。", "カレーをたべる。"),
        ("สวัสดี ครับ", "สวัสดีครับ"),
        ("한국어 문장", "한국어 문장"),
        ("नमस्ते दुनिया", "नमस्ते दुनिया"),
    ],
)
def test_a_character_error_rate_counts_no_gaps_where_scripts_have_none(words, wanted):
    assert "".join(characters(words.split())) == wanted


def test_ids_that_look_alike_are_different():
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    references = {composed: ("x",), decomposed: ("y",)}
    assert score_transcripts(references, dict(reversed(references.items()))).total_words.num_errors == 0
    with pytest.raises(
        AsrError, match=r"check that both files use the same ids, in the same Unicode form \(NFC or NFD\)"
    ):
        score_transcripts({composed: ("x",)}, {decomposed: ("x",)})


def test_ids_must_match():
    with pytest.raises(AsrError, match=r"1 of 2 utterances have no hypothesis, first 'b'"):
        score_transcripts({"a": ("x",), "b": ("y",)}, {"a": ("x",)})
    with pytest.raises(AsrError, match="no reference, first 'c'"):
        score_transcripts({"a": ("x",)}, {"a": ("x",), "c": ()})
    with pytest.raises(AsrError, match="no reference transcripts"):
        score_transcripts({}, {})
    report = score_transcripts({"a": ("x",), "b": ("y",)}, {"a": ("x",)}, missing_is_empty=True)
    assert report.total_words == ErrorCounts(2, 0, 0, 1)
    assert report.num_wrong_utterances == 1


@pytest.mark.slow
def test_the_bootstrap_interval_holds_the_rate_and_narrows_with_data():
    mixed = [ErrorCounts(10, 1, 0, 0), ErrorCounts(10, 3, 0, 0)]
    low, high = bootstrap_interval(mixed * 20)
    assert low < 0.2 < high
    narrow_low, narrow_high = bootstrap_interval(mixed * 500)
    assert narrow_high - narrow_low < (high - low) / 3
    assert bootstrap_interval(mixed * 20) == (low, high)
    assert bootstrap_interval([ErrorCounts(10, 2, 0, 0)] * 9) == (0.2, 0.2)


def test_paired_comparison():
    good, bad = ErrorCounts(10, 1, 0, 0), ErrorCounts(10, 2, 0, 0)
    assert probability_of_improvement([good] * 30, [bad] * 30) == 1.0
    assert probability_of_improvement([good] * 30, [good] * 30) == 0.5
    assert probability_of_improvement([good, bad] * 30, [bad, good] * 30) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(AsrError, match="score the same ones"):
        probability_of_improvement([good], [bad, bad])


def test_normalized_cross_entropy_by_hand():
    """Without confidences, three right words of four cost 3.245 bits. No word is quite sure: it might cost infinity."""
    assert normalized_cross_entropy([(True, 0.5), (False, 0.25), (True, 0.75), (True, 1.0)]) == 0.436
    assert normalized_cross_entropy([(True, 0.75)] * 3 + [(False, 0.75)]) == 0.0
    assert normalized_cross_entropy([(True, 1.0), (False, 0.0)]) == 1.0
    assert normalized_cross_entropy([(True, 0.5), (False, 1.0)]) == -6.144
    assert normalized_cross_entropy([(True, 0.0), (False, 0.5)]) == -6.144
    for nothing in ([], [(True, 0.5)] * 2, [(False, 0.5)] * 2, [(True, 0.5), (False, None)]):
        assert normalized_cross_entropy(nothing) is None


def test_words_are_sorted_into_tenths_of_confidence():
    marked = [(True, 1.0), (False, 0.0), (True, 0.95), (False, 0.31), (True, 0.39)]
    bins = [ConfidenceBin(1, 0.0, 0), ConfidenceBin(2, 0.35, 1), ConfidenceBin(2, 0.975, 2)]
    assert calibration(marked) == bins
    assert calibration([(True, 1.5), (False, -0.5)]) == [ConfidenceBin(1, -0.5, 0), ConfidenceBin(1, 1.5, 1)]
