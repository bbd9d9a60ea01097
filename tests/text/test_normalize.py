"""Transcripts of each corpus in one form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr.text.normalize import (
    equivalent_forms,
    normalize_an4,
    normalize_english,
    normalize_librispeech,
    without_punctuation,
    written_as,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<s> R U B O U T </s> (an406-fcaw-b)", "R U B O U T"),
        ("GO", "GO"),
        ("<s> ++noise++ yes </s> (an1-x-b)", "YES"),
        ("<s> </s> (an1-x-b)", ""),
    ],
)
def test_an4(text: str, expected: str) -> None:
    assert normalize_an4(text) == expected


def test_librispeech_keeps_apostrophes_and_mends_white_space() -> None:
    assert normalize_librispeech("  THE BOYS'  O'CLOCK\tisn't ") == "THE BOYS' O'CLOCK ISN'T"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don’t stop -- it's well-known, 'tis!", "DON'T STOP IT'S WELL KNOWN 'TIS"),
        ("He said 'go away' and ''left''.", "HE SAID GO AWAY AND LEFT"),
        ("the boys' room", "THE BOYS' ROOM"),
        ("I’M A BIG BOY.", "I'M A BIG BOY"),
        ("ﬁne café_now", "FINE CAFÉ NOW"),
        ("route 66", "ROUTE 66"),
        ("' - '", ""),
    ],
)
def test_english(text: str, expected: str) -> None:
    assert normalize_english(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("‘Well-known’, he said…", "Well known he said"),
        ("don\u00ad’t 3.5 %", "don't 3 5"),
        ("नमस्ते, दुनिया।", "नमस्ते दुनिया"),
        ("می\u200cخواهم؟", "میخواهم"),
        ("你好，世界", "你好 世界"),
        ("- ' ''", ""),
    ],
)
def test_without_punctuation(text: str, expected: str) -> None:
    assert without_punctuation(text) == expected


@given(st.text())
def test_normalising_twice_changes_nothing_and_leaves_clean_words(text: str) -> None:
    once = normalize_english(text)
    assert once == " ".join(once.split())
    for word in once.split():
        assert any(letter.isalnum() for letter in word), word
    if text.isascii():
        assert normalize_english(once) == once


@pytest.mark.parametrize("word", ["été", "e\u0301te\u0301", "l'été", "l’été", "d‘e\u0301te\u0301"])
def test_words_are_found_in_their_equivalent_forms(word: str) -> None:
    assert word not in equivalent_forms(word)
    for form in equivalent_forms(word):
        assert written_as(word, {form, "ete"}) == form
        assert written_as(word, {form, word}) == word
    assert written_as(word, {"ete", "lete"}) is None
    assert list(equivalent_forms("ete")) == []
