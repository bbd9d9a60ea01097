"""Normalizes transcripts: upper case, words separated by single spaces, no punctuation except the apostrophe.

`written_as` finds words in collections that write them otherwise.

| corpus | as distributed | changes |
| --- | --- | --- |
| LibriSpeech | upper case, apostrophes inside and at the end of words | white space only |
| AN4 | `<s> WORDS </s> (utterance)` or words alone; spelled letters are words | all but the words is removed |
| speechocean762 | upper case, some apostrophes of other shapes | as other English text |
| other English text | anything | see `normalize_english` |
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Container, Iterator

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u31c0-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Characters of scripts without spaces between words (Thai, Lao, Burmese, Khmer, kana, Chinese), for `re`."""

_IS_UNSPACED = re.compile(f"[{UNSPACED}]")
_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "`": "'", "´": "'"})
_AN4_MARKS = re.compile(r"</?s>|\(\S*\)\s*$")
_NOT_WORD = re.compile(r"[^\w']|_")
_REPEATED_APOSTROPHE = re.compile(r"''+")


def normalize_librispeech(text: str) -> str:
    """Normalizes case and white space; the rest of LibriSpeech's transcripts is normalized already."""
    return " ".join(text.upper().split())


def normalize_an4(text: str) -> str:
    """Removes `<s>`, `</s>`, a final `(utterance)`, and fillers such as `++noise++`."""
    words = _AN4_MARKS.sub(" ", text).upper().split()
    return " ".join(word for word in words if not word.startswith("++"))


def normalize_english(text: str) -> str:
    """Normalizes any English text: compatibility characters, apostrophes, hyphens, punctuation and case.

    An apostrophe next to a letter is kept (`DON'T`, `BOYS'`, `'TIS`), unless a pair of them quotes words. Digits are
    kept, so that a lexicon reports them as out-of-vocabulary words.
    """
    return without_punctuation(unicodedata.normalize("NFKC", text)).upper()


def without_punctuation(text: str) -> str:
    """Leaves words of letters, their marks (vowels in Indian scripts, for example), digits and apostrophes.

    Other characters, such as hyphens, separate words. Apostrophes of all shapes become '; one next to a letter is kept,
    unless a pair of them quotes words.
    """
    text = _REPEATED_APOSTROPHE.sub(" ", text.translate(_APOSTROPHES))
    text = re.sub(r"(?<!\w)'([^']*\w)'(?!\w)", r" \1 ", text)
    words = _NOT_WORD.sub(lambda match: _between_words(match[0]), text).split()
    return " ".join(word for word in words if any(map(str.isalnum, word)))


def _between_words(character: str) -> str:
    """What takes the place of a character that is no letter, digit or apostrophe."""
    category = unicodedata.category(character)
    if category == "Cf":  # such as a soft hyphen, or what joins letters
        return ""
    return character if category.startswith("M") else " "


def is_unspaced(character: str) -> bool:
    """Whether a character is of a script without spaces between words."""
    return _IS_UNSPACED.match(character) is not None


def has_other_forms(word: str) -> bool:
    """Whether a word may have `equivalent_forms`; false for most words."""
    return "'" in word or not word.isascii()


def equivalent_forms(word: str) -> Iterator[str]:
    """The same word in Unicode's forms NFC and NFD, with its apostrophes as they are, as ' and as ’; not the word."""
    if not has_other_forms(word):
        return
    straight = word.translate(_APOSTROPHES)
    for text in dict.fromkeys((word, straight, straight.replace("'", "’"))):
        for form in dict.fromkeys((unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text))):
            if form != word:
                yield form


def only_case_of(text: str) -> Callable[[str], str] | None:
    """What converts words to the letter case of a text; None if it has letters in both cases, or none that have one."""
    lower, upper = text.lower(), text.upper()
    if lower == upper:
        return None
    return str.lower if text == lower else str.upper if text == upper else None


def written_in_any_case(word: str, known: Container[str]) -> Iterator[str]:
    """A word as a collection has it, by `written_as`: as given, in upper case and in lower case."""
    names = (written_as(way, known) for way in (word, word.upper(), word.lower()))
    return (name for name in names if name is not None)


def written_as(word: str, known: Container[str]) -> str | None:
    """A word as a collection has it: as given, or in one of its `equivalent_forms`; None if it has none of them."""
    return word if word in known else next((form for form in equivalent_forms(word) if form in known), None)
