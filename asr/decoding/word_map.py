"""A language model asked with the graph's word ids."""

from __future__ import annotations

from asr.lm.combine import RemappedLM
from asr.lm.interface import LanguageModel
from asr.text.symbols import Vocabulary

_MOST_KNOWN = 64


class WordMapper:
    """Maps language models' words to the graph's where the lists differ, and remembers those last mapped.

    Several threads may ask.

    Args:
        vocabulary: the graph's words.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, tuple[LanguageModel, LanguageModel]] = {}

    def mapped(self, lm: LanguageModel | None) -> LanguageModel | None:
        """The same language model, answering for the graph's word ids; None for None."""
        if lm is None:
            return None
        known = self._known.get(id(lm))
        if known is None:
            known = (lm, lm if lm.vocabulary == self._vocabulary else RemappedLM(lm, self._vocabulary))
            if len(self._known) >= _MOST_KNOWN:
                self._known = {}
            # The model itself is kept, so that nothing else gets its id.
            self._known[id(lm)] = known
        return known[1]
