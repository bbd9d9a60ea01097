"""Language models made of others: interpolations, differences, and models queried with other word ids or elsewhere.

An interpolation or a difference queries each model once and combines their rows of scores in a few steps, two rows at
a time. So a difference of interpolations is one model with one packed context (`DenseContexts`), and compiled loops
can look it up if they can look up each of its models.

Shapes: Q queries, V words, M models, L live contexts, K contexts, N streams, D width of carried states.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr import old_paths
from asr.errors import AsrError
from asr.kernels.jit import kernel
from asr.kernels.lookup import AnyTables, AnyType, LookupTables, compiled_expansion, compiled_lookup, expand, look_up
from asr.kernels.memory import no_autograd
from asr.lm.contexts import (
    FORGET_FROM,
    ContextTable,
    DenseContexts,
    has_room,
    pack_contexts,
    release_all,
    unpack_contexts,
)
from asr.lm.interface import LanguageModel, device_of
from asr.text.symbols import EOS_ID, SPECIAL_WORDS, UNK_ID, Vocabulary

_LOGGER = logging.getLogger(__name__)

MIX, ADD, SUBTRACT = range(3)

_LEAST = -1e20  # float32 can hold the sum of many
_MOST_MAPPED = 64  # models that a `WordMapper` remembers


class Step(NamedTuple):
    """Combines two rows of scores into a new one, see `CombinedLM`.

    Attributes:
        kind: `MIX`, log(exp(left + left_weight) + exp(right + right_weight)), the weights being logarithms; `ADD`,
            left * left_weight + right * right_weight; or `SUBTRACT`, left - right, but -inf where right is infinite.
        left, right: row numbers; the models' rows come first, then one row for each step.
    """

    kind: int
    left: int
    right: int
    left_weight: float = 0.0
    right_weight: float = 0.0

    def applied(self, rows: list[Tensor]) -> Tensor:
        """The new row, (Q,)."""
        left, right = rows[self.left], rows[self.right]
        if self.kind == MIX:
            return torch.logaddexp(torch.add(left, self.left_weight), torch.add(right, self.right_weight))
        if self.kind == SUBTRACT:
            # Words that the small model rules out are not in the graph, and must not come back as +inf or nan.
            return torch.where(torch.isinf(right), torch.full_like(left, -math.inf), torch.sub(left, right))
        total = torch.zeros_like(left)
        for weight, row in ((self.left_weight, left), (self.right_weight, right)):
            if weight:  # 0 * -inf would be nan
                total = torch.add(total, row, alpha=weight)
        return total


class CombinedLM(LanguageModel):
    """Several models over one vocabulary, with scores combined in steps. A model that occurs twice is queried once.

    Args:
        parts: the models; the models and steps of combined ones are taken over.
        steps: combine the parts' rows of scores; the last step's row is the result.
        forget_from: see `DenseContexts`.

    Raises:
        AsrError: the vocabularies differ.
    """

    def __init__(self, parts: Sequence[LanguageModel], steps: Sequence[Step], forget_from: int = FORGET_FROM) -> None:
        if any(part.vocabulary != parts[0].vocabulary for part in parts):
            raise AsrError("The language models have different word lists; map them to one with RemappedLM.")
        parts = [NumberedLM(part) if _is_wrapped_combination(part) else part for part in parts]
        models: list[LanguageModel] = []
        for part in parts:
            models += part.models if isinstance(part, CombinedLM) else [part]
        self.models: list[LanguageModel] = list({id(model): model for model in models}.values())
        self.steps: list[Step] = []
        self._add_steps([self._add_part(part) for part in parts], steps)
        self.contexts = DenseContexts(len(self.models), device_of(self.models[0]), forget_from)
        self._step_rows = np.array([(step.kind, step.left, step.right) for step in self.steps])
        self._step_weights = np.array([step[3:] for step in self.steps], dtype=np.float32)
        self._any_type = [AnyType() for _ in self.models]

    def _add_part(self, part: LanguageModel) -> int:
        """Adds the steps of a part that is a combination itself; returns the number of the row with its scores."""
        position = {id(model): row for row, model in enumerate(self.models)}
        if not isinstance(part, CombinedLM):
            return position[id(part)]
        return self._add_steps([position[id(model)] for model in part.models], part.steps)

    def _add_steps(self, rows: list[int], steps: Sequence[Step]) -> int:
        """Adds steps that combine the rows with these numbers; returns the number of the last row."""
        for step in steps:
            rows.append(len(self.models) + len(self.steps))
            self.steps.append(step._replace(left=rows[step.left], right=rows[step.right]))
        return rows[-1]

    @property
    def vocabulary(self) -> Vocabulary:
        return self.models[0].vocabulary

    def start(self, num_streams: int) -> Tensor:
        packed = self.contexts.pack([model.start(num_streams) for model in self.models])
        self.contexts.check()
        return packed

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """The combined score and the next context, (Q,) each; see `LanguageModel.score`.

        Raises:
            AsrError: a model's context index is too large to be packed; on a GPU only `start`, `final` and `retain`
                raise it.
        """
        contexts = self.contexts.unpack(context_idx)
        answers = [model.score(own, word_id) for model, own in zip(self.models, contexts, strict=True)]
        next_idx = self.contexts.extended(context_idx, [idx for _, idx in answers])
        return self._combined([log_prob for log_prob, _ in answers]), next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        self.contexts.check()
        contexts = self.contexts.unpack(context_idx)
        return self._combined([model.final(own) for model, own in zip(self.models, contexts, strict=True)])

    def first_state(self, num_streams: int) -> Tensor:
        return torch.cat([model.first_state(num_streams) for model in self.models], dim=1)

    def start_from(self, state: Tensor) -> Tensor:
        """The contexts of `<s>` after the carried states (N, D); models that carry none start from `<s>` alone."""
        packed = self.contexts.pack([model.start_from(own) for model, own in self._own_states(state)])
        self.contexts.check()
        return packed

    def state_after(self, state: Tensor, sentences: Sequence[Sequence[int]]) -> Tensor:
        return torch.cat([model.state_after(own, sentences) for model, own in self._own_states(state)], dim=1)

    def _own_states(self, state: Tensor) -> list[tuple[LanguageModel, Tensor]]:
        widths = [model.first_state(0).shape[1] for model in self.models]
        return list(zip(self.models, state.split(widths, dim=1), strict=True))

    def _combined(self, rows: list[Tensor]) -> Tensor:
        for step in self.steps:
            rows.append(step.applied(rows))
        return rows[-1]

    def reserve(self, num_queries: int) -> tuple[Tensor, ...] | None:
        tensors: list[Tensor] = []
        with contextlib.ExitStack() as undo:
            for model in self.models:
                own = model.reserve(num_queries)
                if own is None:
                    return None
                undo.callback(model.release, 0)
                tensors += own
            tensors += self.contexts.reserve(num_queries)
            undo.pop_all()
        return tuple(tensors)

    def release(self, num_queries: int) -> bool:
        releases = [functools.partial(model.release, num_queries) for model in self.models]
        return release_all([*releases, self.contexts.release])

    def lookup_tables(self) -> CombinedTables | None:
        """The tables of all the models; None if one has none, or if there is only one model."""
        if len(self.models) == 1:
            return None
        tables = []
        for model, any_type in zip(self.models, self._any_type, strict=True):
            own = model.lookup_tables()
            if own is None:
                return None
            tables.append(any_type(own))
        return CombinedTables(tuple(tables), self._step_rows, self._step_weights, self.contexts.lookup_tables())

    def expand(self, context_idx: Tensor, live: Tensor) -> None:
        self.contexts.take()
        parts = zip(self.models, self.contexts.unpack(context_idx), self.contexts.unpack(live), strict=True)
        for model, own_idx, own_live in parts:
            model.expand(own_idx, own_live)

    def retain(self, live: Tensor) -> None:
        for model, own_live in zip(self.models, self.contexts.unpack(live), strict=True):
            model.retain(own_live)
        self.contexts.retain(live)


class Interpolated(CombinedLM):
    """Two or more models interpolated word by word.

    `linear` mixes probabilities: the weights are probabilities themselves, and the result sums to one. `log-linear`
    adds weighted log probabilities and is not normalized.

    Args:
        models: the models, over one vocabulary.
        weights: one for each model.
        kind: `linear` or `log-linear`.

    Raises:
        AsrError: the vocabularies differ, or the weights are invalid.
    """

    def __init__(
        self,
        models: Sequence[LanguageModel],
        weights: Sequence[float],
        kind: Literal["linear", "log-linear"] = "linear",
    ) -> None:
        if len(models) < 2 or len(weights) != len(models):
            raise AsrError(
                f"{len(models)} language models with {len(weights)} weights; give two or more, a weight each."
            )
        if kind not in ("linear", "log-linear"):
            raise AsrError(f"{kind!r} is not a kind of interpolation; choose 'linear' or 'log-linear'.")
        if kind == "linear" and not (min(weights) >= 0.0 and abs(sum(weights) - 1.0) <= 1e-6):
            raise AsrError(f"The weights {tuple(weights)} of a linear interpolation must be 0 or more, and sum to one.")
        steps: list[Step] = []
        left, left_weight = 0, float(weights[0])
        for right, weight in enumerate(map(float, weights[1:]), 1):
            if kind == "linear":
                total = left_weight + weight
                shares = (left_weight / total, weight / total) if total else (0.5, 0.5)
                steps.append(Step(MIX, left, right, *(math.log(share) if share else -math.inf for share in shares)))
                left_weight = total
            else:
                steps.append(Step(ADD, left, right, left_weight, weight))
                left_weight = 1.0
            left = len(models) + len(steps) - 1
        super().__init__(models, steps)


class Difference(CombinedLM):
    """log P_large - log P_small: added to scores that contain the small model, it replaces the small by the large one.

    Args:
        large: the model that decides in the end.
        small: the model that the decoding graph was built from.
        forget_from: see `DenseContexts`.

    Raises:
        AsrError: the vocabularies differ.
    """

    def __init__(self, large: LanguageModel, small: LanguageModel, forget_from: int = FORGET_FROM) -> None:
        super().__init__([large, small], [Step(SUBTRACT, 0, 1)], forget_from)


class CombinedTables(NamedTuple):
    """The arrays of a `CombinedLM` that `look_up_combined` reads.

    Attributes:
        models: the tables of each model.
        step_rows: (steps, 3) kind, left and right of each step.
        step_weights: (steps, 2) float32, left and right weight of each step.
        numberings: of the packed contexts, see `DenseContexts.lookup_tables`.
    """

    models: tuple[AnyTables, ...]
    step_rows: Any
    step_weights: Any
    numberings: Any

    @property
    def always_answers(self) -> bool:
        """Whether all models always answer, and packing contexts takes no numbering, which may run out of room."""
        return len(self.models) == 2 and all(tables.always_answers for tables in self.models)


@compiled_lookup(CombinedTables)
@kernel(fastmath=False)
def look_up_combined(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """`CombinedLM.score` as a loop, called through `look_up`."""
    num, num_models = len(word_id), len(tables.models)
    if num_models > 2 and not has_room(tables.numberings, num):
        return False
    contexts, following = np.empty((num_models, num), dtype=np.int64), np.empty((num_models, num), dtype=np.int64)
    rows = np.empty((num_models + len(tables.step_rows), num), dtype=np.float32)
    # `expand` says what is wrong with unknown contexts.
    if not unpack_contexts(context_idx, tables.numberings, contexts):
        return False
    for which in range(num_models):
        if not look_up(contexts[which], word_id, tables.models[which], rows[which], following[which]):
            return False
    for which in range(len(tables.step_rows)):
        kind, left, right = tables.step_rows[which]
        left_weight, right_weight = tables.step_weights[which]
        _apply_step(kind, rows[left], rows[right], left_weight, right_weight, rows[num_models + which])
    for i in range(num):
        log_prob[i] = rows[len(rows) - 1, i]
    pack_contexts(following, tables.numberings, next_idx)
    return True


@compiled_expansion(CombinedTables)
@kernel(fastmath=False)
def expand_combined(context_idx: Any, tables: Any) -> int:
    """Expands the histories (K,) of all the models -> how many, or -1 if one model could not expand all."""
    num_models, num_expanded = len(tables.models), 0
    contexts = np.empty((num_models, len(context_idx)), dtype=np.int64)
    if not unpack_contexts(context_idx, tables.numberings, contexts):
        return -1
    for which in range(num_models):
        num = expand(contexts[which], tables.models[which])
        if num < 0:
            return -1
        num_expanded += num
    return num_expanded


def _apply_step(kind: int, left: Any, right: Any, left_weight: Any, right_weight: Any, result: Any) -> None:
    """Fills result (Q,) from left and right (Q,), see `Step`."""
    for i in range(len(result)):
        if kind == MIX:
            one, other = left[i] + left_weight, right[i] + right_weight
            high, low = max(one, other), min(one, other)
            # Both may be -inf.
            result[i] = high if low == -np.inf else high + np.log1p(np.exp(low - high))
        elif kind == SUBTRACT:
            result[i] = -np.inf if np.isinf(right[i]) else left[i] - right[i]
        else:
            result[i] = 0.0
            if left_weight != 0.0:
                result[i] += left_weight * left[i]
            if right_weight != 0.0:
                result[i] += right_weight * right[i]


class WrappedLM(LanguageModel):
    """A language model that passes every call on to another one; subclasses change some of them.

    Args:
        lm: the other one.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm

    @property
    def vocabulary(self) -> Vocabulary:
        return self._lm.vocabulary

    def start(self, num_streams: int) -> Tensor:
        return self._lm.start(num_streams)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        return self._lm.score(context_idx, word_id)

    def final(self, context_idx: Tensor) -> Tensor:
        return self._lm.final(context_idx)

    def first_state(self, num_streams: int) -> Tensor:
        return self._lm.first_state(num_streams)

    def start_from(self, state: Tensor) -> Tensor:
        return self._lm.start_from(state)

    def state_after(self, state: Tensor, sentences: Sequence[Sequence[int]]) -> Tensor:
        return self._lm.state_after(state, sentences)

    def reserve(self, num_queries: int) -> tuple[Tensor, ...] | None:
        return self._lm.reserve(num_queries)

    def release(self, num_queries: int) -> bool:
        return self._lm.release(num_queries)

    def lookup_tables(self) -> LookupTables | None:
        return self._lm.lookup_tables()

    def expand(self, context_idx: Tensor, live: Tensor) -> None:
        self._lm.expand(context_idx, live)

    def retain(self, live: Tensor) -> None:
        self._lm.retain(live)


LISTED_SHARE = 0.25
"""`unknown_share` of a recognizer's language models.

In the books of the LibriSpeech recipe, a quarter of the words that the bundle's recurrent model lacks are in its graph.
"""


class RemappedLM(WrappedLM):
    """A model queried with the word ids of another vocabulary; words that it does not have share its `<unk>` evenly.

    Each of them gets P(<unk> | history) times `unknown_share`, divided by their number. In a history each is `<unk>`.

    Args:
        lm: the model.
        vocabulary: the words whose ids queries use.
        unknown_share: part of the probability of `<unk>` that goes to words of the vocabulary; the rest is for words in
            neither. With 1, the probabilities of all words but `<unk>` itself sum to one, if the model lacks some.
        warn: whether to log a warning if the model lacks words of the vocabulary.

    Attributes:
        num_oov_words: the number of words of the vocabulary that the model does not have.

    Raises:
        AsrError: the model has none of the words.
    """

    def __init__(
        self, lm: LanguageModel, vocabulary: Vocabulary, unknown_share: float = 1.0, warn: bool = True
    ) -> None:
        super().__init__(lm)
        self._vocabulary = vocabulary
        word_map = vocabulary.map_to(lm.vocabulary)
        self._word_map = word_map.to(device_of(lm))
        self.num_oov_words = _num_unlisted(word_map, lm.vocabulary, vocabulary, "The language model" if warn else "")
        self._share: Tensor | None = None
        if self.num_oov_words / unknown_share > 1:
            self._share = self._word_map.eq(UNK_ID).float() * math.log(unknown_share / self.num_oov_words)
            self._share[: len(SPECIAL_WORDS)] = 0.0
        self._share_array = np.zeros(0, dtype=np.float32) if self._share is None else self._share.cpu().numpy()
        self._any_type = AnyType()
        self._tables: RemappedTables | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, next_idx = self._lm.score(context_idx, self._word_map[word_id])
        return log_prob if self._share is None else log_prob + self._share[word_id], next_idx

    def state_after(self, state: Tensor, sentences: Sequence[Sequence[int]]) -> Tensor:
        return self._lm.state_after(state, [[int(self._word_map[word]) for word in words] for words in sentences])

    def lookup_tables(self) -> RemappedTables | None:
        tables = self._lm.lookup_tables()
        if tables is None:
            return None
        own = self._any_type(tables)
        if self._tables is None or self._tables.model is not own:
            self._tables = RemappedTables(self._word_map.numpy(), self._share_array, own)
        return self._tables


class RemappedTables(NamedTuple):
    """What `look_up_remapped` reads: word_map (V,); share (V,) or (0,), added to words' scores; the model's tables."""

    word_map: Any
    share: Any
    model: AnyTables

    @property
    def always_answers(self) -> bool:
        """Whether the model itself always answers."""
        return self.model.always_answers


@compiled_lookup(RemappedTables)
@kernel(fastmath=False)
def look_up_remapped(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """`RemappedLM.score` as a loop, called through `look_up`."""
    word_map, share = tables.word_map, tables.share
    num = len(word_id)
    mapped = np.empty(num, dtype=np.int64)
    for i in range(num):
        mapped[i] = word_map[word_id[i]]
    could = look_up(context_idx, mapped, tables.model, log_prob, next_idx)
    if len(share):
        for i in range(num):
            log_prob[i] += share[word_id[i]]
    return could


class SentencesLM(WrappedLM):
    """A model that is asked about several sentences in a row: after `</s>`, the history is `<s>` again.

    Args:
        lm: the model; its `score` of `</s>` must be that of `final`.
    """

    @no_autograd()
    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm)
        self._any_type = AnyType()
        # The context of `<s>`, (1,), in one tensor for good, which a CUDA graph may read; it changes if others are
        # forgotten.
        self._begin = torch.zeros(1, dtype=torch.int64, device=device_of(lm))
        self._is_known = False

    @property
    def inner(self) -> LanguageModel:
        """The model."""
        return self._lm

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, next_idx = self._lm.score(context_idx, word_id)
        return log_prob, torch.where(word_id == EOS_ID, self._first(), next_idx)

    def reserve(self, num_queries: int) -> tuple[Tensor, ...] | None:
        self._first()  # before the reservation, during which `start` may not be called
        own = self._lm.reserve(num_queries)
        return None if own is None else (*own, self._begin)

    def lookup_tables(self) -> SentencesTables | None:
        first = int(self._first())  # before the tables, which are valid until the next call
        tables = self._lm.lookup_tables()
        return None if tables is None else SentencesTables(first, self._any_type(tables))

    def retain(self, live: Tensor) -> None:
        self._is_known = False
        super().retain(live)

    def _first(self) -> Tensor:
        if not self._is_known:
            self._begin.copy_(self._lm.start(1))
            self._is_known = True
        return self._begin


class SentencesTables(NamedTuple):
    """What `look_up_sentences` reads: the context of `<s>`; the model's tables."""

    start: int
    model: AnyTables

    @property
    def always_answers(self) -> bool:
        """Whether the model itself always answers."""
        return self.model.always_answers


@compiled_lookup(SentencesTables)
@kernel(fastmath=False, allocates=False)
def look_up_sentences(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """`SentencesLM.score` as a loop, called through `look_up`."""
    could = look_up(context_idx, word_id, tables.model, log_prob, next_idx)
    for i in range(len(word_id)):
        if word_id[i] == EOS_ID:
            next_idx[i] = tables.start
    return could


@compiled_expansion(RemappedTables)
@compiled_expansion(SentencesTables)
@kernel(fastmath=False)
def expand_wrapped(context_idx: Any, tables: Any) -> int:
    """Expands the histories (K,) of the model within -> how many, or -1 if it could not expand all."""
    return expand(context_idx, tables.model)


def num_oov_words(model: Vocabulary, words: Vocabulary, name: str = "") -> int:
    """How many of the words are missing from `model`, a language model's vocabulary.

    Args:
        model: the language model's vocabulary.
        words: the words.
        name: what messages call the model; a warning is logged if some are missing. "" for no warning.

    Raises:
        AsrError: all of them are.
    """
    return _num_unlisted(words.map_to(model), model, words, name)


def _num_unlisted(word_map: Tensor, model: Vocabulary, words: Vocabulary, name: str) -> int:
    """`num_oov_words`, with the ids (V,) that the words have in the model."""
    ordinary = word_map[len(SPECIAL_WORDS) :]
    num_unlisted = int(ordinary.eq(UNK_ID).sum())
    if 0 < len(ordinary) == num_unlisted:
        raise AsrError(
            f"{name or 'The language model'} ({model.words[-1]!r}, ...) has none of the {num_unlisted} words asked for "
            f"({words.words[-1]!r}, ...); check that both have the same language and letter case."
        )
    if num_unlisted and name:
        _LOGGER.warning(
            "%s lacks %d of %d words; they share the probability of its <unk>.", name, num_unlisted, len(ordinary)
        )
    return num_unlisted


def mapped_to(
    lm: LanguageModel, vocabulary: Vocabulary, unknown_share: float = 1.0, warn: bool = True
) -> LanguageModel:
    """The model itself if it has this vocabulary, else a `RemappedLM` with these arguments."""
    return lm if lm.vocabulary == vocabulary else RemappedLM(lm, vocabulary, unknown_share, warn)


class WordMapper:
    """Maps language models to the graph's word ids if the vocabularies differ, and remembers the last models mapped.

    Several threads may use it at the same time.

    Args:
        vocabulary: the graph's words.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._mapped: dict[int, tuple[LanguageModel, LanguageModel]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[WordMapper], tuple[Vocabulary]]:
        return WordMapper, (self._vocabulary,)

    def mapped(self, lm: LanguageModel | None) -> LanguageModel | None:
        """The same language model, queried with the graph's word ids; None for None."""
        if lm is None:
            return None
        # Threads that share a model must share its mapped model, too, since that has a state of its own.
        with self._lock:
            if id(lm) not in self._mapped:
                own = mapped_to(lm, self._vocabulary)
                if len(self._mapped) >= _MOST_MAPPED:
                    self._mapped = {}
                # The model itself is kept, too, so that no other gets its id.
                self._mapped[id(lm)] = (lm, own)
            return self._mapped[id(lm)][1]


class MovedLM(LanguageModel):
    """Answers queries from a device with a language model on another one; each call is one copy there and one back.

    Args:
        lm: the language model.
        device: where queries come from and answers go.
    """

    def __init__(self, lm: LanguageModel, device: torch.device) -> None:
        self._lm = lm
        self._home = device_of(lm)
        self._device = device

    @property
    def vocabulary(self) -> Vocabulary:
        return self._lm.vocabulary

    def start(self, num_streams: int) -> Tensor:
        return self._lm.start(num_streams).to(self._device)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        query = torch.stack([context_idx, word_id]).to(self._home)
        log_prob, next_idx = self._lm.score(query[0], query[1])
        # Numbers of both types in one copy: a context is below 2**63, so no bits are lost.
        answer = torch.stack([next_idx, log_prob.float().view(torch.int32).long()]).to(self._device)
        return answer[1].int().view(torch.float32), answer[0]

    def final(self, context_idx: Tensor) -> Tensor:
        return self._lm.final(context_idx.to(self._home)).to(self._device)

    def retain(self, live: Tensor) -> None:
        self._lm.retain(live.to(self._home))

    def first_state(self, num_streams: int) -> Tensor:
        return self._lm.first_state(num_streams).to(self._device)

    def start_from(self, state: Tensor) -> Tensor:
        return self._lm.start_from(state.to(self._home)).to(self._device)

    def state_after(self, state: Tensor, sentences: Sequence[Sequence[int]]) -> Tensor:
        return self._lm.state_after(state.to(self._home), sentences).to(self._device)


def on_device(lm: LanguageModel, device: torch.device) -> LanguageModel:
    """The language model itself if it answers on this device, otherwise a `MovedLM` of it."""
    device = torch.empty(0, device=device).device  # with its number
    return lm if device_of(lm) == device else MovedLM(lm, device)


class FiniteLM(WrappedLM):
    """A model whose scores are finite, so that they can be multiplied by 0; compiled loops do not look them up."""

    def reserve(self, num_queries: int) -> None:
        """None: each search has its own, which is not worth a capture."""

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, next_idx = super().score(context_idx, word_id)
        return log_prob.clamp(min=_LEAST), next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        return super().final(context_idx).clamp(min=_LEAST)

    def lookup_tables(self) -> None:
        """None."""


def without_weight(lm: LanguageModel, scale: float) -> LanguageModel:
    """The model itself, or if its scale is 0 a `FiniteLM` of it: what has no weight rules nothing out."""
    return lm if scale else FiniteLM(lm)


class NumberedLM(WrappedLM):
    """A wrapped combination as a part of another one, which packs contexts of at most 31 bits: the contexts of the
    combination, packed ones themselves, are numbered. Compiled loops do not look it up.
    """

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm)
        self._forget_all()

    def _forget_all(self) -> None:
        self._numbers, self._forget_at = ContextTable(device_of(self._lm)), FORGET_FROM

    def reserve(self, num_queries: int) -> None:
        """None."""

    def start(self, num_streams: int) -> Tensor:
        return self._numbers.index_of(super().start(num_streams))

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, next_idx = super().score(self._numbers.key_of(context_idx), word_id)
        return log_prob, self._numbers.index_of(next_idx)

    def final(self, context_idx: Tensor) -> Tensor:
        return super().final(self._numbers.key_of(context_idx))

    def start_from(self, state: Tensor) -> Tensor:
        return self._numbers.index_of(super().start_from(state))

    def lookup_tables(self) -> None:
        """None."""

    def expand(self, context_idx: Tensor, live: Tensor) -> None:
        super().expand(self._numbers.key_of(context_idx), self._numbers.key_of(live))

    def retain(self, live: Tensor) -> None:
        """Tells the model which contexts (L,) the search still holds; once many are numbered, forgets the others."""
        super().retain(self._numbers.key_of(live))
        if live.numel() == 0:
            self._forget_all()
        elif len(self._numbers) >= self._forget_at:
            self._numbers.keep(live)
            self._forget_at = max(FORGET_FROM, 2 * len(self._numbers))


def _is_wrapped_combination(lm: LanguageModel) -> bool:
    inner = lm
    while isinstance(inner, (WrappedLM, MovedLM)):
        inner = inner._lm
    return inner is not lm and isinstance(inner, CombinedLM) and len(inner.models) > 1


old_paths.offer(__name__)
