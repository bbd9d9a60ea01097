"""What every language model answers to the search, and what the query engine asks of a network.

Shapes: Q queries, S state width, H hidden width, M history words.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from asr.text.symbols import Vocabulary


@runtime_checkable
class LanguageModel(Protocol):
    """The contract between search and language model: integer tensors in, tensors out.

    Log probabilities are natural logarithms, float32. A context index stands for a word history; index and
    word ids are int64 on `device`. Queries come in any order, with duplicates.
    """

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>` for each stream, context_idx (num_streams,)."""

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | history) and the history extended by the word: log_prob (Q,), next_idx (Q,)."""

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | history), (Q,)."""


LookupTables = tuple[Any, ...]
"""Arrays and numbers from which a compiled loop answers in a language model's stead."""


@runtime_checkable
class LoopLM(Protocol):
    """A language model that may be looked up by a compiled loop, without a call for each frame of the search."""

    def for_loop(self) -> LookupTables | None:
        """What the loop reads; None where only `score` can answer."""


@runtime_checkable
class ExpandingLM(Protocol):
    """A `LoopLM` whose tables grow by what they are asked, and which may need more than a loop to answer."""

    def expand(self, context_idx: Tensor, held: Tensor) -> None:
        """After each run of the loop: takes in what is new, and makes the histories (K,) ready to be asked.

        A loop that found one which was not, or no room, stops there, and begins again with new tables; where there are
        none any more, `score` is to be asked for the rest. The search holds the histories (H,).
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
