"""Vocabularies of graphs and language models, and the output symbols of acoustic models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.text.documents import read_text
from asr.text.normalize import has_other_forms, written_as

EPSILON_ID = 0
BOS_ID = 1
EOS_ID = 2
UNK_ID = 3
SPECIAL_WORDS = ("<eps>", "<s>", "</s>", "<unk>")

# Symbols that building a graph adds to a list of words or tokens; they are neither words nor outputs of a network.
DISAMBIGUATION = re.compile(r"#\d+$|#nonterm|#bos$|#eos$")


def first_words(path: str | Path) -> list[str]:
    """The first word of each line of a word list that is not empty.

    Raises:
        AsrError: the file is missing or not UTF-8.
    """
    text = read_text(path, "word list")
    words = text.split()
    if "\n".join(words) == text.rstrip("\n"):  # nothing but words, as in most lists: ten times as fast
        return words
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def ordinary_words(words: Iterable[str]) -> list[str]:
    """The distinct words that are not special, in order."""
    return [word for word in dict.fromkeys(words) if word not in SPECIAL_WORDS]


def _numbered(symbols: Sequence[str], name: str, kind: str) -> dict[str, int]:
    """Symbol -> its place.

    Args:
        symbols: the symbols.
        name: source of the symbols, for error messages.
        kind: what they are, for error messages.

    Raises:
        AsrError: one occurs twice, is empty or has white space in it.
    """
    id_of = dict(zip(symbols, range(len(symbols)), strict=True))
    joined = "".join(symbols)
    # All at once, since one by one the checks take most of a second for a large vocabulary.
    if len(id_of) < len(symbols) or "" in id_of or joined.split() != [joined]:
        seen = set[str]()
        for place, symbol in enumerate(symbols):
            if not symbol or symbol.split() != [symbol]:
                raise AsrError(
                    f"{name}: entry {place} is {symbol!r}; {kind}s must not be empty or have white space in them."
                )
            if symbol in seen:
                raise AsrError(f"{name}: the {kind} {symbol!r} occurs twice; remove one of the two entries.")
            seen.add(symbol)
    return id_of


class Vocabulary:
    """Words and their ids: 0 `<eps>`, 1 `<s>`, 2 `</s>`, 3 `<unk>`, then the words in the order given.

    Args:
        words: the ordinary words, without the four special ones.
        name: source of the list, for error messages.

    Raises:
        AsrError: a word occurs twice, is empty, has white space in it or is a special one.
    """

    def __init__(self, words: Iterable[str], name: str = "vocabulary") -> None:
        self.words: tuple[str, ...] = (*SPECIAL_WORDS, *words)
        self._id_of = _numbered(self.words, name, "word")

    @classmethod
    def from_file(cls, path: str | Path) -> Vocabulary:
        """Reads one word per line, or Kaldi's `word id`; ids and special words are ignored.

        Raises:
            AsrError: the file is missing, empty or not UTF-8, or a word occurs twice.
        """
        words = [word for word in first_words(path) if word not in SPECIAL_WORDS]
        if not words:
            raise AsrError(f"{path}: the word list is empty; it needs one word per line.")
        return cls(words, name=str(path))

    @property
    def ordinary(self) -> tuple[str, ...]:
        """The words without the special ones."""
        return self.words[len(SPECIAL_WORDS) :]

    def save(self, path: str | Path) -> None:
        """Writes the ordinary words, one per line."""
        Path(path).write_text("".join(f"{word}\n" for word in self.ordinary), encoding="utf-8")

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._id_of

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Vocabulary) and self.words == other.words)

    def __hash__(self) -> int:
        return hash(self.words)

    def id_of(self, word: str) -> int:
        """The id of a word, or `UNK_ID` for an out-of-vocabulary word."""
        return self._id_of.get(word, UNK_ID)

    def ids_of(self, words: Sequence[str]) -> Tensor:
        """The ids of several words, (len(words),) int64."""
        ids = map(self._id_of.get, words, repeat(UNK_ID))
        return torch.from_numpy(np.fromiter(ids, dtype=np.int64, count=len(words)))

    def map_to(self, other: Vocabulary) -> Tensor:
        """The ids of this vocabulary's words in another one, (V,) int64; `UNK_ID` for words that it does not have.

        A word that the other one has in an equivalent form (`asr.text.normalize`) has the id of that.
        """
        if self == other:
            return torch.arange(len(self))
        ids = other.ids_of(self.words)
        joined = "".join((*self.words, *other.words))
        if joined.isascii() and "`" not in joined:
            return ids  # the equivalent forms of such words have characters beyond ASCII
        for place in ids.eq(UNK_ID).nonzero()[:, 0].tolist():
            word = self.words[place]
            if has_other_forms(word) and (form := written_as(word, other._id_of)) is not None:
                ids[place] = other._id_of[form]
        return ids


BLANK = "<blk>"
BLANK_ID = 0


class TokenTable:
    """Output symbols and their ids; id 0 is the blank.

    Args:
        tokens: the symbols after the blank: phones, characters or word pieces; a leading `<blk>` is accepted.
        name: source of the symbols, for error messages.

    Raises:
        AsrError: there are no symbols, or one occurs twice, is empty or has white space in it.
    """

    def __init__(self, tokens: Iterable[str], name: str = "token table") -> None:
        symbols = list(tokens)
        if symbols[:1] == [BLANK]:
            symbols = symbols[1:]
        if not symbols:
            raise AsrError(f"{name}: the token table is empty; it needs one symbol per line.")
        self.name = name
        self.tokens: tuple[str, ...] = (BLANK, *symbols)
        self._id_of = _numbered(self.tokens, name, "token")

    @classmethod
    def from_file(cls, path: str | Path) -> TokenTable:
        """Reads one symbol per line, the blank first, as written by `save`, or `symbol id` as in Kaldi and k2.

        Raises:
            AsrError: the file is missing, empty or not UTF-8, the first symbol is not the blank, or ids are not
                consecutive from 0.
        """
        rows = [line.split() for line in read_text(path, "token table").splitlines() if line.strip()]
        if rows and rows[0][0] != BLANK:
            raise AsrError(f"{path}: the first symbol is {rows[0][0]!r}; it must be {BLANK!r}, which has the id 0.")
        for token_id, row in enumerate(rows):
            if len(row) > 2 or (len(row) == 2 and row[1] != str(token_id)):
                raise AsrError(
                    f"{path}, line {token_id + 1}: expected `symbol` or `symbol {token_id}`, not {' '.join(row)!r}."
                )
        return cls((row[0] for row in rows), name=str(path))

    def save(self, path: str | Path) -> None:
        """Writes one symbol per line, the blank first."""
        Path(path).write_text("".join(f"{token}\n" for token in self.tokens), encoding="utf-8")

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._id_of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenTable) and self.tokens == other.tokens

    def __hash__(self) -> int:
        return hash(self.tokens)

    def id_of(self, token: str) -> int:
        """The id of a token.

        Raises:
            AsrError: the token is not in the table.
        """
        try:
            return self._id_of[token]
        except KeyError:
            raise AsrError(f"{self.name}: the token {token!r} is not in the table; does the lexicon fit it?") from None

    def ids_of(self, tokens: Sequence[str]) -> list[int]:
        """The ids of several tokens."""
        return [self.id_of(token) for token in tokens]
