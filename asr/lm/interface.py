"""The language model that the search asks, and the network behind the cached recurrent language model.

Shapes: Q queries, N streams, K contexts, S state width, H hidden width, M history words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from asr.kernels.lookup import LookupTables
from asr.text.symbols import Vocabulary


class LanguageModel(ABC):
    """A language model that a decoder can query in batches.

    A context index is a number that the model gives to a word history. Context indices and word ids are int64 tensors
    on the model's device; log probabilities are natural logarithms, float32. Queries come in any order and may repeat.

    Only the four abstract members are needed. The others let a model take part in compiled searches, do expensive
    work for many contexts at once, and forget contexts.
    """

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` refers to."""

    @abstractmethod
    def start(self, num_streams: int) -> Tensor:
        """The context of the history `<s>`, once for each stream, (N,)."""

    @abstractmethod
    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Scores words after contexts.

        Args:
            context_idx: (Q,).
            word_id: (Q,).

        Returns:
            log P(word | context), (Q,), and the context extended by the word, (Q,).
        """

    @abstractmethod
    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | context), (Q,)."""

    def lookup_tables(self) -> LookupTables | None:
        """The arrays from which a compiled loop answers instead of `score`; None if only `score` can answer.

        The loop may write to them. They are valid until the next call of any method of the model.
        """
        return None

    def expand(self, context_idx: Tensor, live: Tensor) -> None:  # noqa: B027, optional
        """Called after each run of a loop that used `lookup_tables`.

        The model registers what the loop has added to the tables, and prepares the contexts that a loop could not
        answer for. Then the loop runs again with new tables.

        Args:
            context_idx: (K,) the contexts that will be asked next.
            live: (L,) the contexts that the search holds.
        """

    def retain(self, live: Tensor) -> None:  # noqa: B027, optional
        """Says which contexts the search still holds; the model may forget all others.

        Contexts that `score` returns later are live as well, and so is that of `start`.

        Args:
            live: (L,).
        """


class StatefulNetwork(Protocol):
    """A language model network as the query engine runs it: a state step and an output layer.

    The state row holds all that the network remembers of a history, its last `hidden_size` columns being what
    the output layer reads. `history` gives the last `num_history_words` words of a history, newest first, padded
    with `EPSILON_ID` before `<s>`; MaxEnt features are hashed from it.
    A network may say in `recurrent_size` how many columns, from the first, the next step reads; all where it does not.
    One that spares work where many rows follow one state has a method `branch`, see `branched`; one whose scores
    compiled loops may make a method `output_for_loop`, see `NceOutput`.
    """

    vocabulary: Vocabulary
    state_size: int
    hidden_size: int
    num_history_words: int

    def initial_state(self) -> Tensor:
        """The state before `<s>` is read, (S,)."""

    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        """Reads one word: state (Q, S), word_id (Q,) -> next state (Q, S)."""

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,), without any cache."""


def branched(network: StatefulNetwork, state: Tensor, before: Tensor, word_id: Tensor) -> Tensor:
    """What follows state[before] and word_id: state (R, S), before, word_id (Q,) -> (Q, S)."""
    branch = getattr(network, "branch", None)
    if branch is None:
        return network.step(state.index_select(0, before), word_id)
    following: Tensor = branch(state, before, word_id)
    return following
