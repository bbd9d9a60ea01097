"""Words without letter case and punctuation, and tokens that are alike without them.

Networks that write `Hello, Mr. O'Neill.` are used with language models of `hello mr o'neill`, or `HELLO MR O'NEILL`.
Then words are compared in their plain form: in lower case, without punctuation except for apostrophes and hyphens
inside words, and with a hyphen as a word boundary if no word of the list has one.

Shapes: C columns of a network, E entries of a table of tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asr.text.ctc_tokens import CONTINUATION_PREFIX, PIECE_PREFIX, CTCTokens
from asr.text.symbols import BLANK

# Lower case depends on what is around a sigma, and has two characters for İ.
_ALIKE = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "Σ": "σ", "ς": "σ", "İ": "i"})
_HYPHENS = "-‐‑–—"
_ENDS_OF_SENTENCES = ".,?!"
_WORDS_LOOKED_AT = 20_000
# Exceptions among as many words do not decide which letter case a list is in.
_SHARE_OF_EXCEPTIONS = 0.01


@dataclass(frozen=True)
class PlainForm:
    """The form in which words are compared.

    Args:
        separators: characters that separate words.
    """

    separators: str = _HYPHENS

    @classmethod
    def for_words(cls, words: Iterable[str]) -> PlainForm:
        """The form for a list of words, in which hyphens separate words unless a word of the list has one."""
        inside = {char for word in words for char in word[1:-1]}
        return cls("" if inside.intersection(_HYPHENS) else _HYPHENS)

    def of(self, text: str) -> str:
        """A text in plain form, without separators."""
        text = text.translate(_ALIKE).lower()
        if text.isalpha():
            return text
        return "".join([char for char in text if char == "'" or char in self._kept or not _is_punctuation(char)])

    def words_of(self, text: str) -> list[str]:
        """The words of the list's kind that a written word consists of."""
        for separator in self.separators:
            text = text.replace(separator, " ")
        return [word for word in map(self.of, text.split()) if word]

    def separates(self, text: str) -> bool:
        """Whether a text begins with a separator; punctuation may be before it."""
        return next((char in self.separators for char in text if char in self.separators or self.of(char)), False)

    @property
    def _kept(self) -> str:
        return "" if self.separators else _HYPHENS


def differ_in_form(words: Sequence[str], texts: Iterable[str]) -> bool:
    """Whether all words are in one letter case, without punctuation at their ends, and some texts of tokens are not."""
    sample = words[:: 1 + len(words) // _WORDS_LOOKED_AT]
    most = _SHARE_OF_EXCEPTIONS * len(sample)
    if sum(word[-1:] in _ENDS_OF_SENTENCES for word in sample) > most:
        return False
    has_lower = sum(word != word.upper() for word in sample) > most
    has_upper = sum(word != word.lower() for word in sample) > most
    if has_lower == has_upper:
        return False
    written = "".join(texts)
    in_other_case = (not has_lower and written != written.upper()) or (not has_upper and written != written.lower())
    return in_other_case or any(char in written for char in _ENDS_OF_SENTENCES)


class PlainTokens(CTCTokens):
    """The tokens of a CTC network in plain form: those that differ in letter case and punctuation only are one.

    An entry of `table` has the sum of the probabilities of its tokens. Punctuation is part of the blank, and a hyphen
    that separates words of the boundary, if there is one.

    Args:
        tokens: the network's tokens, letters or pieces.
        form: the form in which words are compared.
    """

    def __init__(self, tokens: CTCTokens, form: PlainForm) -> None:
        named: dict[str, int] = {BLANK: 0}
        entry_of = [0] * len(tokens)
        for entry, column in enumerate(tokens.columns):
            symbol = _in_plain_form(tokens, entry, form) if entry else BLANK
            entry_of[column] = named.setdefault(symbol, len(named))
        super().__init__(
            list(named),
            blank=0,
            word_boundary="" if tokens.boundary_id is None else tokens.table.tokens[tokens.boundary_id],
            kind=tokens.kind,
            num_spellings=tokens.num_spellings,
            byte_level=tokens.is_byte_level,
        )
        self.form, self.name, self.piece_model = form, tokens.name, tokens.piece_model
        self.word_boundary = tokens.word_boundary  # the network's symbol, as `symbols` are
        self._letter_case = str.lower
        self.symbols, self.blank_id = tokens.symbols, tokens.blank_id
        self.columns = [self.blank_id, *map(entry_of.index, range(1, len(named)))]
        # What is added to them: in each round, at most one other column for each entry.
        self._rounds: list[tuple[list[int], list[int]]] = []
        num_added = [0] * len(named)
        for column, entry in enumerate(entry_of):
            if column != self.columns[entry]:
                if num_added[entry] == len(self._rounds):
                    self._rounds.append(([], []))
                entries, columns = self._rounds[num_added[entry]]
                entries.append(entry)
                columns.append(column)
                num_added[entry] += 1

    def in_order_of_table(self, log_prob: Tensor) -> Tensor:
        """Natural log-probabilities of the network's columns (..., C) -> of the entries of `table` (..., E)."""
        found = log_prob.index_select(-1, torch.tensor(self.columns, device=log_prob.device))
        for entries, columns in self._rounds:
            found[..., entries] = torch.logaddexp(found[..., entries], log_prob[..., columns])
        return found


def tokens_for_words(tokens: CTCTokens, words: Sequence[str]) -> CTCTokens:
    """The tokens, in plain form if all words are in one letter case and without punctuation, unlike the tokens."""
    if tokens.kind == "phones" or isinstance(tokens, PlainTokens):
        return tokens
    if not differ_in_form(words, [tokens.text_of(entry) for entry in range(len(tokens.table))]):
        return tokens
    plain = PlainTokens(tokens, PlainForm.for_words(words))
    # Tokens that are all in the other case, without punctuation, can stay what they are.
    return tokens if len(plain.table) == len(tokens.table) else plain


def _in_plain_form(tokens: CTCTokens, entry: int, form: PlainForm) -> str:
    """The symbol of an entry of a table in plain form, or the blank."""
    symbol = tokens.table.tokens[entry]
    if entry == tokens.boundary_id or not tokens.is_text(entry) or symbol == PIECE_PREFIX:
        return symbol
    mark = next((mark for mark in (PIECE_PREFIX, CONTINUATION_PREFIX) if symbol.startswith(mark)), "")
    mark = mark if tokens.kind == "pieces" else ""
    text = symbol.removeprefix(mark)
    if tokens.is_byte_level:  # other characters stand for bytes
        plain = "".join(form.of(char) if char.isascii() else char for char in text)
    elif tokens.is_byte(entry):
        return symbol
    else:
        plain = PIECE_PREFIX.join(map(form.of, text.split(PIECE_PREFIX)))
    if not plain and tokens.boundary_id is not None and form.separates(text):
        return tokens.table.tokens[tokens.boundary_id]
    return mark + plain if plain else BLANK


def _is_punctuation(char: str) -> bool:
    return unicodedata.category(char)[0] in "PS"
