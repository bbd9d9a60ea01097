"""KenLM's own binary files as a language model inside the search, by the package `kenlm`.

Shapes: N streams, Q queries.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.interface import LanguageModel
from asr.text.symbols import UNK_ID, Vocabulary

_LN_10 = math.log(10.0)


class KenLanguageModel(LanguageModel):
    """A model that KenLM answers for, one query at a time; each (history, word) is asked once.

    Several times slower than an ARPA file or our own binary read by `NgramLM`, which answers in batches.

    Args:
        path: an ARPA file or a binary of KenLM.
        words: the words that may be asked for.

    Raises:
        AsrError: the package is missing, the file is not a model, or it has none of the words.
    """

    def __init__(self, path: str | Path, words: Sequence[str]) -> None:
        try:
            self._kenlm: Any = importlib.import_module("kenlm")
        except ImportError as error:
            raise AsrError(
                f"{path}: a binary file of KenLM needs the package; `pip install kenlm`, or give the ARPA file."
            ) from error
        try:
            self._model = self._kenlm.Model(str(path))
        except (OSError, RuntimeError) as error:
            raise AsrError(f"{path}: KenLM cannot read this model ({str(error).splitlines()[0]}).") from error
        if not any(word in self._model for word in words):
            raise AsrError(f"{path}: the model lists none of the {len(words)} words; check their case.")
        self._vocabulary = Vocabulary(words, name=str(path))
        start = self._kenlm.State()
        self._model.BeginSentenceWrite(start)
        self._states: list[Any] = [start]
        self._edges: dict[tuple[int, int], tuple[float, int]] = {}
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>` for each stream, (num_streams,)."""
        return torch.zeros(num_streams, dtype=torch.int64)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | history) and the next context, (Q,) each."""
        with self._lock:
            answers = [self._edge(*query) for query in zip(context_idx.tolist(), word_id.tolist(), strict=True)]
        log_prob = torch.tensor([score for score, _ in answers], dtype=torch.float32)
        return log_prob, torch.tensor([state for _, state in answers], dtype=torch.int64)

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | history), (Q,)."""
        end = self._kenlm.State()
        with self._lock:
            scores = [self._model.BaseScore(self._states[idx], "</s>", end) for idx in context_idx.tolist()]
        return torch.tensor(scores, dtype=torch.float32) * _LN_10

    def _edge(self, context_idx: int, word_id: int) -> tuple[float, int]:
        known = self._edges.get((context_idx, word_id))
        if known is None:
            state = self._kenlm.State()
            word = "<unk>" if word_id == UNK_ID else self._vocabulary.words[word_id]
            score = self._model.BaseScore(self._states[context_idx], word, state) * _LN_10
            known = score, len(self._states)
            self._states.append(state)
            self._edges[context_idx, word_id] = known
        return known
