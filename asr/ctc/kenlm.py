"""Language models in KenLM's binary format, read with the package `kenlm`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asr.ctc.stateful_models import StatefulModel
from asr.errors import AsrError
from asr.text.symbols import UNK_ID, Vocabulary

_LN_10 = math.log(10.0)


class KenLanguageModel(StatefulModel):
    """A language model queried through KenLM.

    Several times slower than an ARPA file or our binary loaded as `NgramLM`, which scores in batches.

    Args:
        path: an ARPA file or a KenLM binary.
        words: the words that may be queried.

    Raises:
        AsrError: the package is not installed, the file is not a model, or it has none of the words.
    """

    def __init__(self, path: str | Path, words: Sequence[str]) -> None:
        try:
            self._kenlm: Any = importlib.import_module("kenlm")
        except ImportError as error:
            raise AsrError(
                f"{path}: a KenLM binary needs the package kenlm; `pip install kenlm`, or give the ARPA file."
            ) from error
        try:
            self._model = self._kenlm.Model(str(path))
        except (OSError, RuntimeError) as error:
            raise AsrError(f"{path}: KenLM cannot read this model ({str(error).splitlines()[0]}).") from error
        if not any(word in self._model for word in words):
            raise AsrError(f"{path}: the model has none of the {len(words)} words; check their letter case.")
        first = self._kenlm.State()
        self._model.BeginSentenceWrite(first)
        super().__init__(Vocabulary(words, name=str(path)), first)

    def after(self, state: Any, word_id: int) -> tuple[float, Any]:
        """Like `StatefulModel.after`."""
        following = self._kenlm.State()
        word = "<unk>" if word_id == UNK_ID else self.vocabulary.words[word_id]
        return self._model.BaseScore(state, word, following) * _LN_10, following

    def at_end(self, state: Any) -> float:
        """Like `StatefulModel.at_end`."""
        return float(self._model.BaseScore(state, "</s>", self._kenlm.State())) * _LN_10
