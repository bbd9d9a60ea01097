"""Converts the words of a transcript to tokens of the acoustic model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asr.errors import AsrError
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable


class Tokenizer:
    """Converts words to token ids, with a lexicon (phones) or by spelling (characters).

    Args:
        tokens: the token table, with all phones of the lexicon.
        lexicon: pronunciations; None for characters.

    Raises:
        AsrError: a phone of the lexicon is not in the table.
    """

    def __init__(self, tokens: TokenTable, lexicon: Lexicon | None = None) -> None:
        self.tokens = tokens
        self.lexicon = lexicon
        if lexicon is not None:
            tokens.ids_of(lexicon.phones)

    @classmethod
    def from_files(
        cls, lexicons: Sequence[str | Path] = (), tokens: str | Path | None = None, keep_stress: bool = False
    ) -> Tokenizer:
        """Reads lexicons and a token table; a word's pronunciations come from the first lexicon that has it.

        Args:
            lexicons: files of pronunciations; none for characters.
            tokens: the token table; by default the phones of the lexicons, sorted.
            keep_stress: keep the stress marks of vowels.

        Raises:
            AsrError: a file cannot be used, or there are neither lexicons nor tokens.
        """
        lexicon = Lexicon.from_files(lexicons, keep_stress) if lexicons else None
        if tokens is not None:
            return cls(TokenTable.from_file(tokens), lexicon)
        if lexicon is None:
            raise AsrError("data: give a lexicon to train on phones, or tokens with one character per line.")
        return cls(TokenTable(lexicon.phones, name=lexicon.name), lexicon)

    def encode(self, words: Sequence[str], variants: Sequence[int] | None = None) -> tuple[list[int], list[str]]:
        """The token ids of a transcript.

        Args:
            words: the words.
            variants: for each word the index of its pronunciation; by default 0.

        Returns:
            The ids, and the out-of-vocabulary words, in order, which have no ids.
        """
        ids: list[int] = []
        unknown: list[str] = []
        for position, word in enumerate(words):
            if self.lexicon is None:
                if all(letter in self.tokens for letter in word):
                    ids += self.tokens.ids_of(list(word))
                else:
                    unknown.append(word)
            elif word in self.lexicon:
                choice = variants[position] if variants is not None else 0
                ids += self.tokens.ids_of(self.lexicon[word][choice])
            else:
                unknown.append(word)
        return ids, unknown
