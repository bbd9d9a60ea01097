"""Words of a transcript to the acoustic model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asr.errors import AsrError
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable


class Tokenizer:
    """Turns words into token ids by a lexicon (phones) or by spelling (`lexicon` None: characters).

    Args:
        tokens: the table; every phone of the lexicon must be in it.
        lexicon: pronunciations; None to spell.

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
        """Reads lexicons, of which the first that has a word wins, and a token table, by default the phones, sorted.

        Raises:
            AsrError: a file cannot be used, or neither is given.
        """
        lexicon = Lexicon.from_files(lexicons, keep_stress) if lexicons else None
        if tokens is not None:
            return cls(TokenTable.from_file(tokens), lexicon)
        if lexicon is None:
            raise AsrError("data: give a lexicon to train on phones, or tokens with one character a line to spell.")
        return cls(TokenTable(lexicon.phones, name=lexicon.name), lexicon)

    def encode(self, words: Sequence[str], variants: Sequence[int] | None = None) -> tuple[list[int], list[str]]:
        """The token ids of the words that can be written, and the words that cannot (unknown words), in order.

        Args:
            words: the words of one transcript.
            variants: for each word which of its pronunciations to take; the first of all words by default.
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
