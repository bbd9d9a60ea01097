"""A language model asked with the graph's word ids."""

from __future__ import annotations

import threading

from asr.lm.combine import RemappedLM
from asr.lm.interface import LanguageModel
from asr.text.symbols import Vocabulary

_CAPACITY = 64


class WordMapper:
    """Maps language models' words to the graph's where the vocabularies differ, and remembers the last ones mapped.

    Several threads may ask.

    Args:
        vocabulary: the graph's words.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._mapped: dict[int, tuple[LanguageModel, LanguageModel]] = {}
        self._lock = threading.Lock()

    def mapped(self, lm: LanguageModel | None) -> LanguageModel | None:
        """The same language model, answering for the graph's word ids; None for None."""
        if lm is None:
            return None
        # Two threads with one model must get one mapped model: it has a state of its own.
        with self._lock:
            if id(lm) not in self._mapped:
                own = lm if lm.vocabulary == self._vocabulary else RemappedLM(lm, self._vocabulary)
                if len(self._mapped) >= _CAPACITY:
                    self._mapped = {}
                # The model itself is kept, too, so that no other gets its id.
                self._mapped[id(lm)] = (lm, own)
            return self._mapped[id(lm)][1]
