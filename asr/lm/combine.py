"""Gives int64 keys small dense numbers, in batches.

Shapes: Q queries, K keys held.


Language models behind other numbers: contexts numbered densely, words of another vocabulary.

Shapes: Q queries, N streams.


Two language models as one: interpolated, or one minus the other, with both contexts packed in one index.

Shapes: Q queries, N streams.


What one language model says less what another says, as a loop for `jit`. Uncompiled it is a slow oracle.

Shapes: Q queries, V words.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.hash_table import HashTable
from asr.kernels.jit import kernel
from asr.kernels.lookup import compiled_lookup, look_up
from asr.lm.interface import LanguageModel
from asr.text.symbols import SPECIAL_WORDS, UNK_ID, Vocabulary

_FIRST_BUCKETS = 1 << 9


class ContextTable:
    """Numbers keys 0, 1, 2, ... as they first come; equal keys get equal numbers.

    Args:
        device: where the table lives and is asked.
        num_buckets: its first size, a power of two; it grows by doubling.
    """

    def __init__(self, device: torch.device | str = "cpu", num_buckets: int = _FIRST_BUCKETS) -> None:
        self._table = HashTable(num_buckets, torch.device(device))
        self._key_of = torch.zeros(num_buckets, dtype=torch.int64, device=device)
        # Numbers that there is room for, ascending.
        self._free = torch.arange(num_buckets, device=device)

    def __len__(self) -> int:
        return self._table.count

    def key_of(self, idx: Tensor) -> Tensor:
        """The keys of numbers given before, (Q,)."""
        return self._key_of.index_select(0, idx)

    def index_of(self, key: Tensor) -> Tensor:
        """Numbers of keys, which are not negative, (Q,) int64; new keys are taken in, sorted among themselves."""
        slot, missing = self._table.find(key)
        if missing is not None:
            slot = self._insert(key, slot, missing)
        return self._table.values.index_select(0, slot)

    def keep(self, idx: Tensor) -> None:
        """Forgets all keys but those of numbers (K,); the others' numbers are given again."""
        is_kept = torch.zeros(len(self._key_of), dtype=torch.bool, device=self._key_of.device)
        is_kept[idx] = True
        self._table.keep(is_kept.index_select(0, self._table.values))
        self._free = (~is_kept).nonzero().squeeze(1)

    def _insert(self, key: Tensor, slot: Tensor, missing: Tensor) -> Tensor:
        """Takes in the keys at the positions `missing`; slot (Q,) of the others -> slot (Q,) of all."""
        table, num_rebuilds = self._table, self._table.num_rebuilds
        new_slot, one = table.insert(key.index_select(0, missing))
        new_key, order = key.index_select(0, missing.index_select(0, one)).sort()
        while len(new_key) > len(self._free):
            num = len(self._key_of)
            self._key_of = torch.cat([self._key_of, torch.zeros_like(self._key_of)])
            self._free = torch.cat([self._free, torch.arange(num, 2 * num, device=key.device)])
        number, self._free = self._free[: len(new_key)], self._free[len(new_key) :]
        table.values.index_copy_(0, new_slot.index_select(0, one.index_select(0, order)), number)
        self._key_of.index_copy_(0, number, new_key)
        if table.num_rebuilds != num_rebuilds:
            return table.find(key)[0]
        return slot.index_copy_(0, missing, new_slot)


_LOGGER = logging.getLogger(__name__)


_FEWEST_TO_FORGET = 1 << 16


class NumberedLM(LanguageModel):
    """Gives the contexts of a model small numbers in the order of their coming, so that they fit 32 bits.

    Args:
        lm: a model with contexts of up to 63 bits.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm
        self._table = ContextTable(lm.start(0).device)
        self._forget_at = _FEWEST_TO_FORGET

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._lm.vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>`, (num_streams,)."""
        return self._table.index_of(self._lm.start(num_streams))

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | history) and the next context, (Q,) each."""
        log_prob, next_idx = self._lm.score(self._table.key_of(context_idx), word_id)
        return log_prob, self._table.index_of(next_idx)

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | history), (Q,)."""
        return self._lm.final(self._table.key_of(context_idx))

    def retain(self, live: Tensor) -> None:
        """Passes on which contexts (L,) the search still holds; the numbers of others are given again, now and then."""
        self._lm.retain(self._table.key_of(live))
        if live.numel() == 0:
            self._table = ContextTable(live.device)
        elif len(self._table) >= self._forget_at:
            self._table.keep(live)
            self._forget_at = max(_FEWEST_TO_FORGET, 2 * len(self._table))


class RemappedLM(LanguageModel):
    """A model asked with the word ids of another vocabulary; words it does not have share its `<unk>` evenly.

    Each gets log P(<unk> | history) less the logarithm of their number, so that what the model gives to all words
    together stays one; as history each is `<unk>`.

    Args:
        lm: the model.
        vocabulary: the word ids to answer for.

    `num_oov_words` says how many words of the vocabulary the model lacks; a warning is logged for them.

    Raises:
        AsrError: the model has none of the words.
    """

    def __init__(self, lm: LanguageModel, vocabulary: Vocabulary) -> None:
        self._lm = lm
        self._vocabulary = vocabulary
        self._word_map = vocabulary.map_to(lm.vocabulary).to(lm.start(0).device)
        self.num_oov_words = num_oov_words(lm.vocabulary, vocabulary)
        if self.num_oov_words:
            _LOGGER.warning(
                "The language model lacks %d of %d words; they share the probability of its <unk>.",
                self.num_oov_words,
                len(vocabulary) - len(SPECIAL_WORDS),
            )
        self._share: Tensor | None = None
        if self.num_oov_words > 1:
            self._share = self._word_map.eq(UNK_ID).float() * -math.log(self.num_oov_words)
            self._share[: len(SPECIAL_WORDS)] = 0.0
        self._share_array = np.zeros(0, dtype=np.float32) if self._share is None else self._share.cpu().numpy()

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>`, (num_streams,)."""
        return self._lm.start(num_streams)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | history) and the next context, (Q,) each."""
        log_prob, next_idx = self._lm.score(context_idx, self._word_map[word_id])
        return log_prob if self._share is None else log_prob + self._share[word_id], next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | history), (Q,)."""
        return self._lm.final(context_idx)

    def lookup_tables(self) -> RemappedTables | None:
        """The model's own, with the word map and the shares of its `<unk>`."""
        tables = self._lm.lookup_tables()
        return None if tables is None else RemappedTables(self._word_map.numpy(), self._share_array, tables)

    def expand(self, context_idx: Tensor, live: Tensor) -> None:
        """Passes on which contexts (K,) a loop will ask, and which (L,) the search holds."""
        self._lm.expand(context_idx, live)

    def retain(self, live: Tensor) -> None:
        """Passes on which contexts (L,) the search still holds."""
        self._lm.retain(live)


class RemappedTables(NamedTuple):
    """What `look_up_remapped` reads: word_map (V,), what is added to a word's score (V,) or (0,), and the model's."""

    word_map: Any
    share: Any
    model: Any

    @property
    def always_answers(self) -> bool:
        """Whether the model itself does."""
        return bool(self.model.always_answers)


@compiled_lookup(RemappedTables)
@kernel(fastmath=False)
def look_up_remapped(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """Answers as `RemappedLM.score`, for `look_up`."""
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


def num_oov_words(model: Vocabulary, words: Vocabulary) -> int:
    """How many of the words a language model with the vocabulary `model` lacks.

    Raises:
        AsrError: it lacks all of them.
    """
    ordinary = words.map_to(model)[len(SPECIAL_WORDS) :]
    num_unlisted = int(ordinary.eq(UNK_ID).sum())
    if 0 < len(ordinary) == num_unlisted:
        raise AsrError(
            f"The language model ({model.words[-1]!r}, ...) has none of the {num_unlisted} words asked for "
            f"({words.words[-1]!r}, ...); check that both are of one language and case."
        )
    return num_unlisted


# Of a packed context index: so many for the second model's, and the mask of these.
CONTEXT_BITS = 32


LOW_CONTEXT = (1 << CONTEXT_BITS) - 1


class CombinedLM(LanguageModel):
    """Two models whose log probabilities a function makes one of, word by word.

    A context index holds the first model's in the upper 32 bits (31 used), the second's below. A combined model's own
    contexts are numbered (`NumberedLM`) where it is combined again, so that combinations nest.

    Args:
        first, second: the models, over one vocabulary.
        combine: (Q,) and (Q,) -> (Q,), natural logs all.

    Raises:
        AsrError: the vocabularies differ.
    """

    def __init__(
        self, first: LanguageModel, second: LanguageModel, combine: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        if first.vocabulary != second.vocabulary:
            raise AsrError("Two language models have different word lists; map one to the other's with RemappedLM.")
        self.first, self.second = (NumberedLM(lm) if isinstance(lm, CombinedLM) else lm for lm in (first, second))
        self._combine = combine
        # Whether an index came that has no room: on a device it is not waited for word by word.
        self._exceeds: Tensor | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self.first.vocabulary

    def start(self, num_streams: int) -> Tensor:
        """Both models' history `<s>`, (num_streams,)."""
        packed = self._packed(self.first.start(num_streams), self.second.start(num_streams))
        self._check_room()
        return packed

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Combined log P(word | history) and the packed next context, (Q,) each."""
        first_idx, second_idx = self.unpack(context_idx)
        first, first_next = self.first.score(first_idx, word_id)
        second, second_next = self.second.score(second_idx, word_id)
        return self._combine(first, second), self._packed(first_next, second_next)

    def final(self, context_idx: Tensor) -> Tensor:
        """Combined log P(</s> | history), (Q,).

        Raises:
            AsrError: an index given before needed more bits than it has; on a CPU `score` says so.
        """
        self._check_room()
        first_idx, second_idx = self.unpack(context_idx)
        return self._combine(self.first.final(first_idx), self.second.final(second_idx))

    def lookup_tables(self) -> DifferenceTables | None:
        """Both models' tables, where this is the difference of two that have some."""
        if self._combine is not _subtract:
            return None
        large, small = self.first.lookup_tables(), self.second.lookup_tables()
        return None if large is None or small is None else DifferenceTables(large, small)

    def expand(self, context_idx: Tensor, live: Tensor) -> None:
        """Passes on to both models which contexts (K,) a loop will ask, and which (L,) the search holds."""
        for lm, own_idx, own_live in zip(
            (self.first, self.second), self.unpack(context_idx), self.unpack(live), strict=True
        ):
            lm.expand(own_idx, own_live)

    def retain(self, live: Tensor) -> None:
        """Passes on to both models which contexts (L,) the search still holds."""
        for lm, idx in zip((self.first, self.second), self.unpack(live), strict=True):
            lm.retain(idx)

    def _packed(self, first_idx: Tensor, second_idx: Tensor) -> Tensor:
        upper = torch.bitwise_or(
            torch.bitwise_right_shift(first_idx, CONTEXT_BITS - 1),
            torch.bitwise_right_shift(second_idx, CONTEXT_BITS),
        )
        exceeds = torch.any(upper)
        self._exceeds = exceeds if self._exceeds is None else torch.logical_or(self._exceeds, exceeds)
        if upper.device.type == "cpu":
            self._check_room()
        return self.pack(first_idx, second_idx)

    def _check_room(self) -> None:
        if self._exceeds is not None and bool(self._exceeds):
            raise AsrError(
                f"A context index of an interpolated language model exceeds {CONTEXT_BITS - 1} bits, the room that "
                "packing leaves it; wrap that model in NumberedLM."
            )

    @staticmethod
    def pack(first_idx: Tensor, second_idx: Tensor) -> Tensor:
        """(Q,), (Q,) -> (Q,)."""
        return torch.bitwise_or(torch.bitwise_left_shift(first_idx, CONTEXT_BITS), second_idx)

    @staticmethod
    def unpack(context_idx: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`."""
        return torch.bitwise_right_shift(context_idx, CONTEXT_BITS), torch.bitwise_and(context_idx, LOW_CONTEXT)


def interpolated_lm(
    models: Sequence[LanguageModel], weights: Sequence[float], kind: Literal["linear", "log-linear"] = "linear"
) -> CombinedLM:
    """Two or more models interpolated word by word; more than two nest from the left.

    `linear` mixes probabilities: the weights are probabilities themselves and the result sums to one. `log-linear`
    adds weighted log probabilities and is not normalized.

    Args:
        models: the models, over one vocabulary.
        weights: one weight a model.
        kind: `linear` or `log-linear`.

    Raises:
        AsrError: the vocabularies differ, or the weights make no sense.
    """
    if len(models) < 2 or len(weights) != len(models):
        raise AsrError(f"{len(models)} language models with {len(weights)} weights; give two or more, a weight each.")
    if kind not in ("linear", "log-linear"):
        raise AsrError(f"{kind!r} is no kind of interpolation; take 'linear' or 'log-linear'.")
    if kind == "linear" and (min(weights) < 0.0 or abs(sum(weights) - 1.0) > 1e-6):
        raise AsrError(f"The weights {tuple(weights)} of a linear interpolation must be positive and sum to one.")
    combine = _log_of_sum if kind == "linear" else _weighted_sum
    mixed, mixed_weight = models[0], float(weights[0])
    for lm, weight in zip(models[1:], weights[1:], strict=True):
        share = mixed_weight, float(weight)
        mixed_weight = 1.0
        if kind == "linear":
            mixed_weight = sum(share)
            share = (share[0] / mixed_weight, share[1] / mixed_weight) if mixed_weight else (0.5, 0.5)
        mixed = CombinedLM(mixed, lm, combine(*share))
    assert isinstance(mixed, CombinedLM)
    return mixed


def difference_lm(large: LanguageModel, small: LanguageModel) -> CombinedLM:
    """log P_large - log P_small: added to scores that hold the small model exactly, it puts the large one in its place.

    Args:
        large: the model that shall count.
        small: the model that the decoding graph was built from.

    Raises:
        AsrError: the vocabularies differ.
    """
    return CombinedLM(large, small, _subtract)


def interpolated_difference_lm(large: LanguageModel, small: LanguageModel, large_weight: float) -> CombinedLM:
    """Linear interpolation of a model with the graph's own one, less the graph's own one, which is asked once.

    Equals `difference_lm(interpolated_lm([large, small], weights), small)`, whose contexts it need not number.

    Args:
        large: the model that is mixed in.
        small: the model that the decoding graph was built from.
        large_weight: share of the large model, 0 to 1.

    Raises:
        AsrError: the vocabularies differ.
    """
    mix = _log_of_sum(large_weight, 1.0 - large_weight)
    return CombinedLM(large, small, lambda first, second: _subtract(mix(first, second), second))


def _log_of_sum(first_weight: float, second_weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    first_log, second_log = (math.log(weight) if weight else -math.inf for weight in (first_weight, second_weight))
    return lambda first, second: torch.logaddexp(torch.add(first, first_log), torch.add(second, second_log))


def _weighted_sum(first_weight: float, second_weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    def combine(first: Tensor, second: Tensor) -> Tensor:
        mixed = torch.zeros_like(first)
        for weight, score in ((first_weight, first), (second_weight, second)):
            if weight:  # 0 * -inf would be nan
                mixed = torch.add(mixed, score, alpha=weight)
        return mixed

    return combine


def _subtract(large: Tensor, small: Tensor) -> Tensor:
    # what the small model rules out is not in the graph, and must not come back as +inf or nan
    return torch.where(torch.isinf(small), torch.full_like(large, -math.inf), torch.sub(large, small))


class DifferenceTables(NamedTuple):
    """What `look_up_difference` reads: both models' tables."""

    large: Any
    small: Any

    @property
    def always_answers(self) -> bool:
        """Whether both models do."""
        return bool(self.large.always_answers and self.small.always_answers)


@compiled_lookup(DifferenceTables)
@kernel(fastmath=False)
def look_up_difference(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """Answers as `difference_lm(large, small).score`, for `look_up`."""
    num = len(word_id)
    large_idx, small_idx = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    for i in range(num):
        large_idx[i], small_idx[i] = context_idx[i] >> CONTEXT_BITS, context_idx[i] & LOW_CONTEXT
    small_score, small_next = np.empty(num, dtype=np.float32), np.empty(num, dtype=np.int64)
    large_could = look_up(large_idx, word_id, tables.large, log_prob, next_idx)
    small_could = look_up(small_idx, word_id, tables.small, small_score, small_next)
    if not (large_could and small_could):
        return False
    for i in range(num):
        # As `_subtract`: what the small model rules out does not come back.
        log_prob[i] = -np.inf if np.isinf(small_score[i]) else log_prob[i] - small_score[i]
        next_idx[i] = (next_idx[i] << CONTEXT_BITS) | small_next[i]
    return True
