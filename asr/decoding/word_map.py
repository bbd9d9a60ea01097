"""A language model asked with the graph's word ids."""

from __future__ import annotations

from asr.lm.adapters import MappedLM
from asr.lm.contract import LanguageModel
from asr.text.vocabulary import Vocabulary


class WordMapper:
    """Maps a language model's words to the graph's where the lists differ, and remembers the last one mapped.

    Args:
        vocabulary: the graph's words.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._last: tuple[LanguageModel, LanguageModel] | None = None

    def mapped(self, lm: LanguageModel | None) -> LanguageModel | None:
        """The same language model, answering for the graph's word ids; None for None."""
        if lm is None:
            return None
        if self._last is None or self._last[0] is not lm:
            same = lm.vocabulary == self._vocabulary
            self._last = (lm, lm if same else MappedLM(lm, self._vocabulary))
        return self._last[1]
