"""Transcripts of each corpus in one form: upper case, words separated by one blank, no punctuation but the apostrophe.

| corpus | as distributed | what changes |
| --- | --- | --- |
| LibriSpeech | `WORDS IN UPPER CASE`, apostrophes inside and at the end of words | white space only |
| AN4 | `<s> WORDS </s> (utterance)` or the words alone; spelled letters are words | all but the words goes |
| speechocean762 | upper case; now and then an apostrophe of another shape | apostrophes |
| other English text | anything | `normalize_english` |
"""

from __future__ import annotations

import re
import unicodedata

_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "`": "'", "´": "'"})
_AN4_MARKS = re.compile(r"</?s>|\(\S*\)\s*$")
_NOT_WORD = re.compile(r"[^\w']+|_")
_LONE_APOSTROPHE = re.compile(r"(?<!\w)'+(?!\w)")
_REPEATED_APOSTROPHE = re.compile(r"''+")


def normalize_librispeech(text: str) -> str:
    """LibriSpeech's transcripts are normalised already; case and white space are made sure of."""
    return " ".join(text.upper().split())


def normalize_an4(text: str) -> str:
    """Removes `<s>`, `</s>` and a final `(utterance)`; fillers such as `++noise++` go with them."""
    words = _AN4_MARKS.sub(" ", text).upper().split()
    return " ".join(word for word in words if not word.startswith("++"))


def normalize_speechocean762(text: str) -> str:
    """Upper case with plain apostrophes; punctuation goes."""
    return normalize_english(text)


def normalize_english(text: str) -> str:
    """Any English text: compatibility forms and apostrophes unified, hyphens and punctuation to blanks, upper case.

    An apostrophe stays where it touches a letter (`DON'T`, `BOYS'`, `'TIS`); a pair of them around words is quotation
    and goes. Digits stay as they are: a lexicon reports them as unknown words rather than having them guessed at here.
    """
    text = unicodedata.normalize("NFKC", text).translate(_APOSTROPHES)
    text = _REPEATED_APOSTROPHE.sub(" ", text)
    text = re.sub(r"(?<!\w)'([^']*\w)'(?!\w)", r" \1 ", text)
    text = _LONE_APOSTROPHE.sub(" ", _NOT_WORD.sub(" ", text))
    return " ".join(text.upper().split())
