"""What the language model carries over from one utterance of a session to the next.

A session is whatever continues: a recording that is cut into segments, a stream, or several recordings in order. After
each utterance the language model reads the words of its best path, and the next utterance of the session starts from
the state that this leaves (`LanguageModel.state_after`).

Shapes: N utterances, D width of carried states.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from asr.decoding.interface import DecodeResult
from asr.lm.combine import mapped_to
from asr.lm.interface import LanguageModel
from asr.text.symbols import Vocabulary


class CarriedStates:
    """One state for each session, D numbers however long the session is.

    Args:
        lm: the language model.
        vocabulary: the words of the decoding graph.
    """

    def __init__(self, lm: LanguageModel, vocabulary: Vocabulary) -> None:
        self._lm = mapped_to(lm, vocabulary)
        self._states: dict[Hashable, Tensor] = {}

    def __len__(self) -> int:
        return len(self._states)

    def before(self, sessions: Sequence[Hashable]) -> Tensor:
        """The states with which the next utterances of N distinct sessions start, (N, D)."""
        (first,) = self._lm.first_state(1)
        return torch.stack([self._states.get(session, first) for session in sessions])

    def add(self, sessions: Sequence[Hashable], results: Sequence[DecodeResult]) -> None:
        """Takes over the best words of these sessions' utterances."""
        sentences = [() if result.best is None else result.best.word_ids for result in results]
        self._states.update(zip(sessions, self._lm.state_after(self.before(sessions), sentences), strict=True))

    def end(self, session: Hashable) -> None:
        """Forgets a session."""
        self._states.pop(session, None)
