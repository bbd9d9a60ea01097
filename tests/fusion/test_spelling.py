"""The words of a list as tokens spell them, exactly and in plain form."""

from __future__ import annotations

import pytest

from asr.errors import AsrError
from asr.fusion.spelling import spelled_words
from asr.text.ctc_tokens import CTCTokens
from asr.text.plain_form import PlainForm

CASED = CTCTokens(["<blk>", "▁H", "ello", "▁w", "el", "l", "-", "k", "now", "n", ",", ".", "'", "▁D", "on", "t", "▁h"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello,", ["hello"]),
        ("“Hello”", ["hello"]),
        ("don’t", ["don't"]),
        ("well-known", ["well", "known"]),
        ("ÉTÉ!", ["été"]),
        ("—", []),
        ("$5.00", ["500"]),
        ("ΟΔΟΣ", ["οδοσ"]),
        ("Οδος.", ["οδοσ"]),
        ("İstanbul", ["istanbul"]),
    ],
)
def test_plain_forms(text: str, words: list[str]) -> None:
    assert PlainForm().words_of(text) == words


def test_hyphens_stay_if_listed_words_have_them() -> None:
    spelled = spelled_words(["well-known", "hello"], CASED)
    assert spelled.form is not None
    assert spelled.words == {b"well-known": "well-known", b"hello": "hello"}
    assert spelled.has("Well-known,")
    assert not spelled.has("well known")


@pytest.mark.parametrize(
    ("words", "is_plain"),
    [
        (["hello", "well"], True),
        (["HELLO", "WELL"], True),
        (["Hello", "well"], False),
        (["hello", "hello,"], False),
        (["don't", "well-known"], True),
    ],
)
def test_plain_form_is_chosen_for_lists_without_case_and_punctuation(words: list[str], is_plain: bool) -> None:
    assert (spelled_words(words, CASED).form is not None) == is_plain


def test_tokens_in_the_words_letter_case_are_compared_exactly() -> None:
    lower = CTCTokens(["<blk>", "▁hello", "▁", "w", "e", "l"])
    assert spelled_words(["hello", "well"], lower).form is None
    assert spelled_words(["HELLO", "WELL"], lower).words == {b"hello": "HELLO", b"well": "WELL"}
    with pytest.raises(AsrError, match=r"in lower case; convert .* or set plain_words"):
        spelled_words(["HELLO", "WELL"], lower, is_plain=False)


@pytest.mark.parametrize("symbols", [["▁Hello", "▁well"], ["▁hello", "▁well", "▁W"], ["▁hello", "▁well", "."]])
def test_other_case_or_punctuation_among_the_tokens_decides(symbols: list[str]) -> None:
    assert spelled_words(["hello", "well"], CTCTokens(["<blk>", *symbols])).form is not None


def test_hyphens_at_the_ends_of_words_do_not_decide() -> None:
    form = spelled_words(["well-", "-hello"], CASED, True).form
    assert form is not None and form.words_of("well-known") == ["well", "known"]


def test_parts_of_characters_are_in_lower_case() -> None:
    tokens = CTCTokens(["<blk>", "▁Aũ", "ŏb"], byte_level=True)
    spelled = spelled_words(["aé"], tokens, True)
    assert [tokens.bytes_of(entry) for entry in (1, 2)] == [b"A\xc3", b"\xa9b"]
    assert [spelled.bytes_of(tokens, entry) for entry in (1, 2)] == [b"a\xc3", b"\xa9b"]


def test_few_exceptions_do_not_decide() -> None:
    words = ["hello", "well", "known", "now"]
    assert spelled_words([*(100 * words), "Hello", "well."], CASED).form is not None
    assert spelled_words([*(10 * words), "Hello", "well."], CASED).form is None


def test_the_likelier_of_words_with_one_plain_form() -> None:
    words = ["Hello", "well", "hello"]
    assert spelled_words(words, CASED, True).words[b"hello"] == "Hello"
    assert spelled_words(words, CASED, True, [-3.0, -1.0, -2.0]).words[b"hello"] == "hello"
    assert spelled_words(words, CASED, True, [-2.0, -1.0, -3.0]).words[b"hello"] == "Hello"


@pytest.mark.parametrize("order", [1, -1])
def test_a_word_in_its_own_form_of_unicode_comes_first(order: int) -> None:
    tokens = CTCTokens(["<blk>", "▁", "e", "\u0301", "a"])
    composed, decomposed = "\u00e9", "e\u0301"
    spelled = spelled_words([composed, decomposed][::order], tokens, preference=[0.0, -1.0][::order])
    assert spelled.words == {decomposed.encode(): decomposed}
    assert spelled.listed(decomposed) == decomposed
    assert spelled_words([composed, "a"], tokens).listed(decomposed) == composed


def test_words_in_plain_form_may_have_other_forms_of_unicode() -> None:
    tokens = CTCTokens(["<blk>", "▁Caf", "▁caf", "\u00e9", "."])
    spelled = spelled_words(["cafe\u0301", "caf"], tokens)
    assert spelled.words == {"caf\u00e9".encode(): "cafe\u0301", b"caf": "caf"}
    assert spelled.has("Caf\u00e9.")


def test_what_tokens_add_in_plain_form() -> None:
    spelled = spelled_words(["hello", "don't"], CASED)
    texts = [spelled.bytes_of(CASED, entry) for entry in range(len(CASED.table))]
    assert texts[:3] == [b"", b"h", b"ello"]
    assert [texts[CASED.table.id_of(symbol)] for symbol in (",", ".", "'", "-")] == [b"", b"", b"'", b""]
