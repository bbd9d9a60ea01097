"""Adapters for your own language model: any torch module with a state becomes a network for `CachedRNNLM`.

Shapes: Q queries, V words, S state width, U tokens of a word's spelling.

    class MyLstm(nn.Module):
        def initial_state(self):
            return torch.zeros(64), torch.zeros(64)
        def forward(self, symbol_id, state):
            hidden, cell = self.cell(self.embedding(symbol_id), state)
            return self.output(hidden).log_softmax(dim=1), (hidden, cell)

    network = WordModule(MyLstm(), vocabulary)                          # a language model of words
    network = SpelledModule(MyLstm(), vocabulary, spellings, begin_id)  # one of characters or word pieces
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.lm.interface import StatefulNetwork
from asr.text.symbols import BOS_ID, SPECIAL_WORDS, Vocabulary

_LOGGER = logging.getLogger(__name__)
# Natural log of a sum of probabilities beyond which scores are probably logits. Training by NCE stays far below it.
_MOST_LOG_SUM = 1.0


class StatefulModule(Protocol):
    """A module that the adapters accept. State tensors are float and of fixed size. They can hold integers below 2^24,
    so a Transformer's state may be its last words (or its keys and values), padded."""

    def initial_state(self) -> tuple[Tensor, ...]:
        """The state before anything is read, without a batch dimension."""

    def __call__(self, symbol_id: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Reads symbol_id (Q,) in states (Q, ...) -> log_prob of each next symbol (Q, V), next states (Q, ...)."""


class _ModuleNetwork(nn.Module, StatefulNetwork):
    """A row of states holds the module's state tensors one after the other, then its log_prob of the next symbols.

    The module is set to evaluation mode: dropout would make each score a random one.
    """

    def __init__(self, module: nn.Module, vocabulary: Vocabulary, num_symbols: int) -> None:
        super().__init__()
        self.module = module.eval()
        self.vocabulary = vocabulary
        self.num_history_words = 0
        self._shapes = [part.shape for part in _initial_state(module)]
        self._is_checked = False
        self._begin = sum(shape.numel() for shape in self._shapes)  # of the log_prob
        self.state_size = self._begin + num_symbols

    def initial_state(self) -> Tensor:
        parts: tuple[Tensor, ...] = self.module.initial_state()  # type: ignore[operator]
        row = torch.cat([part.reshape(-1) for part in parts])
        return torch.cat((row, row.new_zeros(self.state_size - self._begin)))

    def _read(self, state: Tensor, symbol_id: Tensor) -> tuple[Tensor, Tensor]:
        """Reads one symbol: rows (Q, S), symbol_id (Q,) -> the next rows (Q, S), and the log_prob in them."""
        columns = state[:, : self._begin].split([shape.numel() for shape in self._shapes], dim=1)
        parts = tuple(part.reshape(-1, *shape) for part, shape in zip(columns, self._shapes, strict=True))
        log_prob, following = self.module(symbol_id, parts)
        if not self._is_checked and len(log_prob):
            self._is_checked = True
            _warn_of_logits(log_prob[0])
        return torch.cat((*(part.flatten(1) for part in following), log_prob), dim=1), log_prob


class WordModule(_ModuleNetwork):
    """A language model of words as a `StatefulNetwork`.

    The module runs once per history, not once per successor. Each history keeps its V log-probabilities: 0.4 MB with
    100,000 words. For large vocabularies, implement `StatefulNetwork`, which scores only what is asked for.

    Args:
        module: a `StatefulModule`; its symbols are the ids of `vocabulary`.
        vocabulary: the words.
    """

    def __init__(self, module: nn.Module, vocabulary: Vocabulary) -> None:
        super().__init__(module, vocabulary, len(vocabulary))
        self.hidden_size = len(vocabulary)

    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        following, log_prob = self._read(state, word_id)
        if log_prob.shape[1] != self.hidden_size:
            raise AsrError(
                f"The language model module scores {log_prob.shape[1]} words and its vocabulary has "
                f"{self.hidden_size}; give it the word list that it was trained with."
            )
        return following

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, V), the distribution itself -> log_prob (Q,)."""
        return hidden.gather(1, word_id[:, None])[:, 0]


class SpelledModule(_ModuleNetwork):
    """A language model of characters or word pieces as a `StatefulNetwork` over words.

    A word's score is the sum over the tokens of its spelling; the state is the one after the last word's last token.

    Args:
        module: its symbols are token ids.
        vocabulary: the words.
        spellings: the token ids of each word, `</s>` included; a word without a spelling is never predicted.
        begin_id: the token that is read for `<s>`.
    """

    def __init__(
        self, module: nn.Module, vocabulary: Vocabulary, spellings: dict[str, Sequence[int]], begin_id: int
    ) -> None:
        if "</s>" not in spellings:
            raise AsrError("The spellings lack '</s>'; give the token (or tokens) that end a sentence.")
        with torch.no_grad():
            initial = tuple(part[None] for part in _initial_state(module))
            num_tokens = module.eval()(torch.tensor([begin_id], device=initial[0].device), initial)[0].shape[1]
        super().__init__(module, vocabulary, num_tokens)
        table = {SPECIAL_WORDS[BOS_ID]: [begin_id], **{word: list(ids) for word, ids in spellings.items()}}
        width = max(len(ids) for ids in table.values())
        padded = [[*table.get(word, []), *[-1] * width][:width] for word in vocabulary.words]
        # (V, U), -1 beyond a spelling's end.
        self.spelling: Tensor
        self.register_buffer("spelling", torch.tensor(padded, dtype=torch.int64), persistent=False)
        # The output layer reads the whole row: longer spellings run the module again.
        self.hidden_size = self.state_size

    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        return self._spell(state, self.spelling[word_id])[0]

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        tokens = self.spelling[word_id]
        scores = self._spell(hidden, tokens, only_score=True)[1]
        return scores.masked_fill((tokens[:, 0] < 0) | (word_id == BOS_ID), -math.inf)

    def _spell(self, state: Tensor, tokens: Tensor, only_score: bool = False) -> tuple[Tensor, Tensor]:
        """state (Q, S), tokens (Q, U) -> the state after all of them, and their log_prob (Q,)."""
        scores = state.new_zeros(len(state))
        last_step = tokens.shape[1] - 1
        for step, column in enumerate(tokens.unbind(dim=1)):
            active = (column >= 0).nonzero()[:, 0]
            if active.numel() == 0:
                break
            token_id = column[active]
            distribution = state[active, self._begin :]
            scores = scores.index_add(0, active, distribution.gather(1, token_id[:, None])[:, 0])
            if only_score and step == last_step:
                break
            state = state.index_copy(0, active, self._read(state[active], token_id)[0])
        return state, scores


def _initial_state(module: nn.Module) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = module.initial_state()  # type: ignore[operator]
    if isinstance(parts, Tensor):  # which would be taken apart
        raise AsrError(f"{type(module).__name__}.initial_state: it returns a tensor; expected a tuple of tensors.")
    return parts


def _warn_of_logits(log_prob: Tensor) -> None:
    """Warns if scores of next symbols (V,) are far from normalized."""
    log_sum = float(log_prob.detach().logsumexp(0))
    if log_sum > _MOST_LOG_SUM:
        _LOGGER.warning(
            "The language model module's probabilities of the next symbol sum to %.3g instead of 1; apply log_softmax "
            "to its output.",
            math.exp(min(log_sum, 700.0)),
        )
