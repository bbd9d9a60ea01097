"""The language model that the search queries, and the network behind the cached recurrent language model.

Shapes: Q queries, N streams, K contexts, S state width, H hidden width, M history words, D width of carried states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from asr import old_paths
from asr.kernels.lookup import LookupTables
from asr.serialization import copied_to_processes
from asr.text.symbols import Vocabulary


class LanguageModel(ABC):
    """A language model that a decoder can query in batches.

    A context index is a number from 0 to 2**31 - 1 that the model gives to a word history. (Only combinations of models
    use larger ones.) Context indices and word ids are int64 tensors on the model's device; log probabilities are
    natural logarithms, float32. Queries come in any order and may repeat.

    Only the four abstract members are needed. The others let a model take part in compiled searches, do expensive
    work for many contexts at once, forget contexts, and carry a state from one sentence to the next.

    A model that forgets contexts answers one search at a time: what this search does not hold is lost, even if another
    one does. Searches that take turns, such as several `StreamingDecoder`s, each need a model of their own.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        copied_to_processes(cls)

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
            word_id: (Q,). A model of this program also scores `</s>`, as `final` does; a user's need not.

        Returns:
            log P(word | context), (Q,), and the context extended by the word, (Q,).
        """

    @abstractmethod
    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | context), (Q,)."""

    def lookup_tables(self) -> LookupTables | None:
        """The arrays with which a compiled loop scores words instead of `score`; None if no loop can do that.

        The loop may write to them. They are valid until the next call of any method of the model.
        """
        return None

    def expand(self, context_idx: Tensor, live: Tensor) -> None:  # noqa: B027, optional
        """Called after each run of a loop that used `lookup_tables`.

        The model takes over what the loop has added to the tables, and prepares the contexts for which the loop had no
        answer. Then the loop runs again with new tables.

        Args:
            context_idx: (K,) the contexts that will be queried next.
            live: (L,) the contexts that the search holds.
        """

    def reserve(self, num_queries: int) -> tuple[Tensor, ...] | None:
        """Prepares calls of `score` in which the host does not wait for a GPU, so that a CUDA graph can capture them.

        Until `release`, each call of `score` has this number of queries, which may repeat, and queues the same work on
        the same tensors. No other method may be called. A call for which there is too little room gives wrong answers.

        Returns:
            The tensors that calls read and write besides their arguments. If one is not the one of an earlier
            reservation, what was captured then is of no more use. None if the model cannot do that, as by default.
        """
        return None

    def release(self, num_queries: int) -> bool:
        """Ends a reservation, and takes over what the calls have added; the host waits for the device.

        Args:
            num_queries: number of queries of all calls, without repetitions that only filled up a call.

        Returns:
            Whether there was room for all calls. If not, the next reservation makes more.
        """
        return True

    def retain(self, live: Tensor) -> None:  # noqa: B027, optional
        """Tells the model which contexts the search still holds; it may forget all others.

        Contexts that `score` returns later are live as well, and so is that of `start`.

        Args:
            live: (L,).
        """

    def first_state(self, num_streams: int) -> Tensor:
        """The carried state before the first sentence of a recording, (N, D) float32; D is 0 if nothing is carried.

        A carried state is all that the model knows of a recording's earlier sentences. It is a value, not a context:
        it stays valid whatever the model forgets.
        """
        return torch.empty(num_streams, 0, device=device_of(self))

    def start_from(self, state: Tensor) -> Tensor:
        """The contexts of `<s>` after sentences that left the carried states (N, D), (N,)."""
        return self.start(len(state))

    def state_after(self, state: Tensor, sentences: Sequence[Sequence[int]]) -> Tensor:
        """The carried states after one more sentence each.

        Args:
            state: (N, D), the carried states before them.
            sentences: N lists of word ids without `<s>` and `</s>`. One without words does not change the state.

        Returns:
            (N, D).
        """
        return state


def device_of(lm: LanguageModel) -> torch.device:
    """Where a language model answers."""
    return lm.start(0).device


def contexts_at_start(lm: LanguageModel, num_streams: int, state: Tensor | None) -> Tensor:
    """The contexts (N,) with which streams begin: after `<s>` alone, or after the sentences that left state (N, D)."""
    return lm.start(num_streams) if state is None else lm.start_from(state)


CacheableTerms = Literal["none", "history", "group", "tree"]
"""Which parts of a score do not depend on both history and word, so that a cache may keep them.

`none`; `history`: log_prob = word_score - history_normalizer; `group`: the same, less group_normalizer; `tree`: the
decisions at the inner nodes of a tree, see `WordScorer.path_log_prob`.
"""


class WordScorer(ABC):
    """Scores words by what a hidden layer says of their histories, as an output layer does."""

    @abstractmethod
    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """Scores words.

        Args:
            hidden: (Q, H).
            history: (Q, M) the last words, newest first, `EPSILON_ID` where the sentence has not begun.
            word_id: (Q,).

        Returns:
            log P(word | history), (Q,).
        """

    @property
    def cacheable_terms(self) -> CacheableTerms:
        """Which parts of a score a cache may keep. Only scorers with such parts need the methods below."""
        return "none"

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """The score before normalization, (Q,)."""
        raise NotImplementedError

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        """What is subtracted for each history, (Q,)."""
        raise NotImplementedError

    def group_of(self, word_id: Tensor) -> Tensor:
        """The group, or class, of each word, (Q,)."""
        raise NotImplementedError

    def group_normalizer(self, hidden: Tensor, history: Tensor, group: Tensor) -> Tensor:
        """What is subtracted for each history and group, (Q,)."""
        raise NotImplementedError

    def path_log_prob(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, owner: Tensor, held: Tensor
    ) -> tuple[Tensor, int]:
        """`log_prob` along the words' paths in a tree.

        Args:
            hidden, history, word_id: as of `log_prob`.
            owner: (Q,) a row of `held` for each history.
            held: (O, K) 1 / P(node | history) of the K likeliest inner nodes by the counts, the root first; NaN where
                it is not known; read and filled.

        Returns:
            log_prob (Q,), and how many decisions had to be computed.
        """
        raise NotImplementedError

    def output_tables(self) -> tuple[Any, ...] | None:
        """What `asr.lm.cached.engine_numba` reads to score words; None if its loop cannot compute the scores."""
        return None


class StatefulNetwork(WordScorer):
    """A recurrent language model as a cached language model uses it: a state update and an output layer.

    Attributes:
        vocabulary: the words.
        state_size: S, the width of a state: all that the network remembers of a history.
        hidden_size: H, the width of what the output layer reads, see `project`.
        num_history_words: M, how many words of a history the output layer reads as well.
        has_exact_states: whether states must not be rounded, because they hold numbers of words or tokens.
    """

    vocabulary: Vocabulary
    state_size: int
    hidden_size: int
    num_history_words: int
    has_exact_states: bool = False

    @abstractmethod
    def initial_state(self) -> Tensor:
        """The state before `<s>` is read, (S,)."""

    @abstractmethod
    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        """Reads one word: state (Q, S), word_id (Q,) -> next state (Q, S)."""

    @property
    def recurrent_size(self) -> int:
        """The number of the state's first columns, which `step` reads."""
        return self.state_size

    @property
    def has_projection(self) -> bool:
        """Whether `project` multiplies; if not, it only selects columns."""
        return False

    @property
    def can_be_captured(self) -> bool:
        """Whether `step`, `project` and `log_prob` only queue work on a GPU, so that a CUDA graph can capture them."""
        return False

    def project(self, state: Tensor) -> Tensor:
        """What the output layer reads of a state: state (Q, S) -> hidden (Q, H), by default its last columns."""
        return state[:, self.state_size - self.hidden_size :]

    def branch(self, state: Tensor, before: Tensor, word_id: Tensor) -> Tensor:
        """`step` for many words after each state, which can share the state's matrix products.

        Args:
            state: (R, S).
            before: (Q,) which state each query follows.
            word_id: (Q,).

        Returns:
            The next states, (Q, S).
        """
        return self.step(state.index_select(0, before), word_id)

    def step_tables(self) -> tuple[Any, ...] | None:
        """What `asr.lm.cached.engine_numba` reads to run the hidden layer on bytes; None if its loop cannot."""
        return None


old_paths.offer(__name__)
