"""Adapters for your own language model: any torch module with a state becomes a network for `CachedRNNLM`.

Shapes: Q queries, V words, S state width, P numbers of a module's state, U tokens of a word's spelling.

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
import threading
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.kernels.hash_table import first_of_each
from asr.kernels.memory import no_autograd
from asr.lm.interface import StatefulNetwork
from asr.options import require_type
from asr.text.symbols import BOS_ID, SPECIAL_WORDS, Vocabulary

_LOGGER = logging.getLogger(__name__)
# Natural log of a sum of probabilities beyond which scores are probably logits. Training by NCE stays far below it.
_MOST_LOG_SUM = 1.0
# Columns of a state of `WordModule` from its end; and in place of a word before `<s>` is read.
_WORD, _PLACE = -2, -1
_NO_WORD = -1
# The most histories whose outputs `WordModule` keeps, and how many scores it computes at once: of 2**20, 2**22 and
# 2**24, the second took the least time.
_MOST_KEPT = 1 << 14
_SCORES_AT_ONCE = 1 << 22


class StatefulModule(Protocol):
    """A module that the adapters accept. State tensors are float and of fixed size. They can hold integers below 2^24,
    so a Transformer's state may be its last words (or its keys and values), padded."""

    def initial_state(self) -> tuple[Tensor, ...]:
        """The state before anything is read, without a batch dimension."""

    def __call__(self, symbol_id: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Reads symbol_id (Q,) in states (Q, ...) -> log_prob of each next symbol (Q, V), next states (Q, ...)."""


class _ModuleNetwork(nn.Module, StatefulNetwork):
    """What the adapters have in common: the module's state tensors, one after the other, are one row of P numbers.

    The module is set to evaluation mode: dropout would make each score a random one.
    """

    num_history_words = 0

    def __init__(self, module: nn.Module, vocabulary: Vocabulary) -> None:
        super().__init__()
        require_type(vocabulary, Vocabulary, "vocabulary", "asr.text.symbols.Vocabulary(words)")
        self.module = module.eval()
        self.vocabulary = vocabulary
        self._shapes = [part.shape for part in _initial_state(module)]
        self._is_checked = False
        self._num_numbers = sum(shape.numel() for shape in self._shapes)  # P

    def _first(self) -> Tensor:
        """The state before anything is read, (P,)."""
        return torch.cat([part.reshape(-1) for part in _initial_state(self.module)])

    def _num_scored(self, symbol_id: int) -> int:
        """The number of symbols that the module scores after this one.

        Raises:
            AsrError: its output is not as `StatefulModule` says.
        """
        states = tuple(part.expand(2, *part.shape) for part in _initial_state(self.module))
        output = self.module(torch.tensor([symbol_id] * 2, device=states[0].device), states)
        log_prob, following = output if isinstance(output, (tuple, list)) and len(output) == 2 else (output, ())
        is_as_told = isinstance(log_prob, Tensor) and log_prob.dim() == 2 and isinstance(following, (tuple, list))
        if not is_as_told or [part.shape for part in following] != [part.shape for part in states] or not len(log_prob):
            raise AsrError(
                f"{type(self.module).__name__}: for two symbols, the module returns {_shown(output)}; expected a tuple "
                f"of the log_prob (2, V) of the next symbols, and the next states, {_shown(states)}."
            )
        return log_prob.shape[1]

    def _read(self, before: Tensor, symbol_id: Tensor) -> tuple[Tensor, Tensor]:
        """Reads one symbol: states (Q, P), symbol_id (Q,) -> the next states (Q, P), log_prob of the next symbols."""
        columns = before.split([shape.numel() for shape in self._shapes], dim=1)
        parts = tuple(part.reshape(-1, *shape) for part, shape in zip(columns, self._shapes, strict=True))
        log_prob, following = self.module(symbol_id, parts)
        if not self._is_checked and len(log_prob):
            self._is_checked = True
            _warn_of_logits(log_prob[0])
        return torch.cat([part.flatten(1) for part in following], dim=1), log_prob


class _Read(NamedTuple):
    """What a module has computed for the histories that it has read last, in K places.

    Attributes:
        row: (K, S) int32, the bits of the rows of states that were read.
        after: (K, P) the states after them.
        log_prob: (K, V) of the next words.
        versions: of the module's weights, with which this was computed.
    """

    row: Tensor
    after: Tensor
    log_prob: Tensor
    versions: tuple[int, ...]


class WordModule(_ModuleNetwork):
    """A language model of words as a `StatefulNetwork`.

    The module runs once per history, not once per successor, when a word after it is first scored. The
    log-probabilities of all words are kept for the histories that it has read last; others are read again when they are
    needed. For large vocabularies, implement `StatefulNetwork`, which scores only what is asked for.

    A row of states holds the module's state before the last word, this word, and the place of what the module computes
    from both. Threads take turns.

    Args:
        module: a `StatefulModule`; its symbols are the ids of `vocabulary`.
        vocabulary: the words.
        kept_bytes: memory for log-probabilities; 256 MiB are enough for 670 histories of 100,000 words.

    Raises:
        AsrError: the module's state or output is not as `StatefulModule` says, or it scores another number of words.
    """

    has_exact_states = True

    @no_autograd()
    def __init__(self, module: nn.Module, vocabulary: Vocabulary, kept_bytes: int = 1 << 28) -> None:
        super().__init__(module, vocabulary)
        self.state_size = self.hidden_size = self._num_numbers + 2
        row_bytes = 4 * (self.state_size + self._num_numbers + len(vocabulary))
        self._num_places = max(1, min(_MOST_KEPT, kept_bytes // row_bytes))
        self._kept: _Read | None = None
        self._next_place = 0
        self._lock = threading.Lock()
        num_scored = self._num_scored(BOS_ID)
        if num_scored != len(vocabulary):
            raise AsrError(
                f"The language model module scores {num_scored} words and its vocabulary has {len(vocabulary)}; give "
                "it the word list that it was trained with."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        self._kept = None  # it is where the weights were
        return super()._apply(*arguments, **options)

    def initial_state(self) -> Tensor:
        first = self._first()
        return torch.cat((first, first.new_tensor([_NO_WORD, 0]))).float()  # as places may be too large for float16

    @no_autograd()
    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        after = state[:, : self._num_numbers].clone()
        read = (state[:, _WORD] != _NO_WORD).nonzero()[:, 0]
        with self._lock:
            if len(read):
                for some, place, kept in self._outputs(state[read]):
                    after[read[some]] = kept.after[place]
            place = (torch.arange(len(state), device=state.device) + self._next_place) % self._num_places
            self._next_place = (self._next_place + len(state)) % self._num_places
        return torch.cat((after, word_id[:, None].to(after.dtype), place[:, None].to(after.dtype)), dim=1)

    @no_autograd()
    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, S), states -> log_prob (Q,)."""
        scores = hidden.new_empty(len(hidden))
        with self._lock:
            for some, place, kept in self._outputs(hidden):
                scores[some] = kept.log_prob[place, word_id[some]].to(scores.dtype)
        return scores

    def _outputs(self, state: Tensor) -> Iterator[tuple[Tensor, Tensor, _Read]]:
        """For some after others of the states (Q, S): which they are, and in which places their outputs are now."""
        versions = tuple(each._version for each in self.module.parameters() if not each.is_inference())
        if self._kept is None or self._kept.versions != versions:
            self._kept = None  # frees its memory
            self._kept = _Read(
                state.new_full((self._num_places, self.state_size), -1, dtype=torch.int32),  # the bits of no row
                state.new_empty(self._num_places, self._num_numbers),
                state.new_empty(self._num_places, len(self.vocabulary)),
                versions,
            )
        kept = self._kept
        # Bits are compared, because NaN does not equal itself.
        bits, place = state.contiguous().view(torch.int32), state[:, _PLACE].long()
        num_at_once = max(1, _SCORES_AT_ONCE // len(self.vocabulary))
        left = torch.arange(len(state), device=state.device)
        while True:
            is_there = (kept.row[place[left]] == bits[left]).all(1)
            found, left = left[is_there], left[~is_there]
            if len(found):
                yield found, place[found], kept
            if not len(left):
                return
            one = left[first_of_each(place[left])[0][:num_at_once]]
            where = place[one]
            after, log_prob = self._read(state[one, : self._num_numbers], state[one, _WORD].long())
            kept.row[where] = -1  # in case of an interrupt
            kept.after[where], kept.log_prob[where] = after.to(kept.after.dtype), log_prob.to(kept.log_prob.dtype)
            kept.row[where] = bits[one]


class SpelledModule(_ModuleNetwork):
    """A language model of characters or word pieces as a `StatefulNetwork` over words.

    A word's score is the sum over the tokens of its spelling. A row of states holds the module's state after the last
    word's last token, and then the log-probabilities of the next token.

    Args:
        module: its symbols are token ids.
        vocabulary: the words.
        spellings: the token ids of each word, `</s>` included; a word without a spelling is never predicted.
        begin_id: the token that is read for `<s>`.

    Raises:
        AsrError: the module's state or output is not as `StatefulModule` says, `</s>` or all words lack a spelling, or
            a spelling has tokens that the module does not score.
    """

    def __init__(
        self, module: nn.Module, vocabulary: Vocabulary, spellings: dict[str, Sequence[int]], begin_id: int
    ) -> None:
        if "</s>" not in spellings:
            raise AsrError("The spellings lack '</s>'; give the token (or tokens) that end a sentence.")
        super().__init__(module, vocabulary)
        with torch.no_grad():
            num_tokens = self._num_scored(begin_id)
        self.state_size = self._num_numbers + num_tokens
        table = {SPECIAL_WORDS[BOS_ID]: [begin_id], **{word: list(ids) for word, ids in spellings.items()}}
        _check_spellings(table, vocabulary, num_tokens)
        width = max(len(ids) for ids in table.values())
        padded = [[*table.get(word, []), *[-1] * width][:width] for word in vocabulary.words]
        # (V, U), -1 beyond a spelling's end.
        self.spelling: Tensor
        self.register_buffer("spelling", torch.tensor(padded, dtype=torch.int64), persistent=False)
        # The output layer reads the whole row: longer spellings run the module again.
        self.hidden_size = self.state_size

    def initial_state(self) -> Tensor:
        first = self._first()
        return torch.cat((first, first.new_zeros(self.state_size - self._num_numbers)))

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
            distribution = state[active, self._num_numbers :]
            scores = scores.index_add(0, active, distribution.gather(1, token_id[:, None])[:, 0])
            if only_score and step == last_step:
                break
            following = self._read(state[active, : self._num_numbers], token_id)
            state = state.index_copy(0, active, torch.cat(following, dim=1))
        return state, scores


def _check_spellings(table: Mapping[str, Sequence[int]], vocabulary: Vocabulary, num_tokens: int) -> None:
    for word, ids in table.items():
        wrong = [each for each in ids if not isinstance(each, (Integral, Tensor)) or not 0 <= each < num_tokens]
        if wrong:
            raise AsrError(
                f"The spelling of {word!r} has the token {wrong[0]!r}, but the language model module scores the tokens "
                f"0 to {num_tokens - 1}; give the ids of its tokens."
            )
    lacking = [word for word in vocabulary.ordinary if not table.get(word)]
    if not lacking:
        return
    if len(lacking) == len(vocabulary.ordinary):
        raise AsrError(f"None of the {len(lacking)} words has a spelling ({lacking[0]}, ...); check their letter case.")
    _LOGGER.warning("%d words have no spelling and are never predicted (%s, ...).", len(lacking), lacking[0])


def _shown(output: Any) -> str:
    """The shapes of tensors, and the types of other things."""
    if isinstance(output, (tuple, list)):
        return f"({', '.join(map(_shown, output))})"
    return f"a tensor of the shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__


def _initial_state(module: nn.Module) -> tuple[Tensor, ...]:
    if not hasattr(module, "initial_state"):
        raise AsrError(
            f"{type(module).__name__}: the language model module has no method initial_state, which returns its state "
            "before anything is read; wrap it in a module with the methods of asr.lm.torch_adapter.StatefulModule."
        )
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
