"""How the tokens of a network spell the words of a list: as they are, or in plain form (`asr.text.plain_form`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from asr.errors import AsrError
from asr.fusion.interface import FloatArray
from asr.text.ctc_tokens import CTCTokens
from asr.text.normalize import equivalent_forms
from asr.text.plain_form import PlainForm, differ_in_form

_WORDS_LOOKED_AT = 1000


@dataclass(frozen=True)
class SpelledWords:
    """The words of a list that tokens spell.

    Args:
        words: the words by their spelling.
        form: the form in which words are compared; None if they are compared as they are.
    """

    words: Mapping[bytes, str]
    form: PlainForm | None = None

    def bytes_of(self, tokens: CTCTokens, entry: int) -> bytes:
        """What an entry of `CTCTokens.table` adds to a spelling."""
        own = tokens.bytes_of(entry)
        if self.form is None or not own:
            return own
        try:
            return _utf8(self.form.of(own.decode("utf-8", "surrogatepass")))
        except UnicodeDecodeError:  # a part of a character
            return own.lower()

    def listed(self, text: str) -> str:
        """A written word as the list has it, if it may be written in another form of Unicode."""
        return text if self.form is not None else self.words.get(_utf8(text), text)

    def has(self, text: str) -> bool:
        """Whether a word, as `listed` returns it, is in the list."""
        if self.form is None:
            return text in self._as_listed
        return all(_utf8(part) in self.words for part in self.form.words_of(text))

    @cached_property
    def _as_listed(self) -> frozenset[str]:
        return frozenset(self.words.values())


def spelled_words(
    words: Sequence[str],
    tokens: CTCTokens,
    is_plain: bool | None = None,
    preference: Sequence[float] | FloatArray | None = None,
) -> SpelledWords:
    """The words that can be spelled in some tokens: in their own or an equivalent form of Unicode, or in plain form.

    Args:
        words: the words.
        tokens: the tokens.
        is_plain: whether words are compared in plain form. None: if all words are in one letter case and without
            punctuation, unlike what the tokens spell.
        preference: of words with the same spelling, that with the highest value (W,) is meant; None for the first.

    Raises:
        AsrError: the tokens do not spell words, or hardly any of the words can be spelled.
    """
    if tokens.kind == "phones" or (tokens.kind == "letters" and tokens.boundary_id is None):
        raise AsrError(
            f"{tokens.name}: these tokens do not spell words, as they are neither pieces nor letters with a boundary "
            "between words; leave out words and language models of words, or give token_lm."
        )
    entries = range(len(tokens.table))
    pairs = [(tokens.text_of(entry), tokens.bytes_of(entry)) for entry in entries]
    if is_plain is None:
        is_plain = differ_in_form(words, [text for text, _ in pairs])
    form = None
    if is_plain:
        form = PlainForm.for_words(words)
    chars = {char for text, _ in pairs for char in (text if form is None else form.of(text))}
    # Of tokens that are parts of characters.
    parts = {byte for text, own in pairs if _utf8(text) != own for byte in own}

    def can_be_spelled(word: str) -> bool:
        return all(char in chars or parts.issuperset(_utf8(char)) for char in word)

    found: dict[bytes, int] = {}
    lacking = []
    for number, word in enumerate(words):
        forms: Iterable[str] = itertools.chain([word], equivalent_forms(word))
        forms = forms if form is None else map(form.of, forms)
        spelling = next(filter(can_be_spelled, forms), "")
        if not spelling:
            lacking.append(word)
            continue
        known = found.setdefault(_utf8(spelling), number)
        if form is None:
            is_better = spelling == word
        else:
            is_better = preference is not None and preference[number] > preference[known]
        if is_better:
            found[_utf8(spelling)] = number
    if 2 * len(lacking) > len(words):
        raise _too_few(lacking, len(words), tokens, can_be_spelled)
    return SpelledWords({spelling: words[number] for spelling, number in found.items()}, form)


def _too_few(
    lacking: Sequence[str], num_words: int, tokens: CTCTokens, can_be_spelled: Callable[[str], bool]
) -> AsrError:
    """Why hardly any words can be spelled, given those that cannot."""
    for change, case in ((str.upper, "upper"), (str.lower, "lower")):
        sample = [change(word) for word in lacking[:_WORDS_LOOKED_AT]]
        if 2 * sum(map(can_be_spelled, sample)) > len(sample):
            return AsrError(
                f"{tokens.name}: the words ({lacking[0]!r}, ...) cannot be spelled in the tokens, which are in {case} "
                "case; convert words and language models to that case, or set plain_words."
            )
    return AsrError(
        f"{tokens.name}: of {num_words} words, only {num_words - len(lacking)} can be spelled in the tokens, unlike "
        f"{lacking[0]!r}; give words and language models of the network's language."
    )


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
