"""What the language model carries over from one utterance of a session to the next.

A session is whatever continues: a recording that is cut into segments, a stream, or several recordings in order. After
each utterance the language model reads the words of its best path, and the next utterance of the session starts from
the state that this leaves (`LanguageModel.state_after`).

Shapes: N utterances, D width of carried states.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.interface import DecodeResult
from asr.errors import AsrError
from asr.lm.combine import mapped_to
from asr.lm.interface import LanguageModel
from asr.lm.rnn.model import RNNLanguageModel
from asr.text.symbols import Vocabulary

_LOGGER = logging.getLogger(__name__)


def require_history(bundle: Bundle, language_model: LanguageModel | None, num_workers: int) -> None:
    """Refuses what would keep the language model from remembering earlier utterances.

    Args:
        bundle: has the language models.
        language_model: the user's own, or None.
        num_workers: how many batches are decoded at the same time.

    Raises:
        AsrError: batches are decoded at the same time, or the user's language model carries nothing.
    """
    if num_workers > 1:
        raise AsrError(
            f"num_workers is {num_workers}, but with carry_history a batch needs the words of the one before; give 0 "
            "or 1."
        )
    if language_model is not None:
        if not language_model.first_state(0).shape[1]:
            raise AsrError(
                f"carry_history: {type(language_model).__name__} carries nothing between sentences; leave it out, or "
                "define first_state, start_from and state_after."
            )
        return
    network = None if bundle.rnn_lm is None else bundle.rnn_lm.network
    if isinstance(network, RNNLanguageModel) and not network.config.carry_state:
        _LOGGER.warning(
            "carry_history: the recurrent language model was trained with every sentence on its own, so words may get "
            "worse; train it with carry_state."
        )


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
