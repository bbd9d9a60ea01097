"""Look-up of n-grams on a CPU: a compact, exact hash index, and one compiled loop over all queries.

`ArcIndex` finds an arc by (state, label) in one or two memory accesses. Its keys are mixed by a one-to-one map of their
bits: the upper bits give the place, and the lower 31, stored beside the arc's number, tell neighbors apart. So 8 bytes
a slot are exact.

`score_words` follows backoffs for each query. Tensor operations in `NgramLM` give the same bits on any device and are
several times slower on a CPU. Without numba the function is a slow reference for tests.

Shapes: A arcs, B slots, Q queries, V words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.jit import kernel
from asr.kernels.lookup import compiled_lookup

IntArray = npt.NDArray[np.int32]
_EMPTY = -1
MULTIPLIERS = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))
_PLACE_BITS = 32
_TAG_BITS = 31
_TAG_MASK = (1 << _TAG_BITS) - 1
_WINDOW = 8  # slots examined together if the first one holds another key
_MIN_HOMES = 1 << 6  # with fewer, 31 bits would not distinguish all keys of one home
_MAX_HOMES = 1 << 31  # multiplied by the upper 32 bits of a key, more would not fit an int64
_BUILD_BLOCK = 1 << 22
_BUILD_HOMES = 1 << 24


@dataclass(frozen=True)
class ArcIndex:
    """Linear probing over `slot`; a slot holds `tag << 32 | arc_idx`, or -1.

    Attributes:
        slot: (B,) int64; the last 8 are always empty.
        num_homes: number of slots at which the search for a key may begin.
        word_bits: labels are below `2 ** word_bits`.
        key_bits: how many bits a packed (state, label) has.
    """

    slot: Tensor
    num_homes: int
    word_bits: int
    key_bits: int

    def to(self, device: torch.device | str) -> ArcIndex:
        """The same table on a device."""
        return ArcIndex(self.slot.to(device), self.num_homes, self.word_bits, self.key_bits)

    @classmethod
    def build(cls, state: IntArray, label: IntArray, first_arc: int, num_words: int, load: float) -> ArcIndex:
        """Indexes the arcs `first_arc`, `first_arc + 1`, ...

        Args:
            state: (A,) source state of each arc, ascending.
            label: (A,) word of each arc.
            first_arc: number of the first arc given.
            num_words: labels are below this.
            load: share of slots in use; 0.5 is fast, 0.8 small.

        Raises:
            AsrError: the model is too large or too crowded for exact tags.
        """
        word_bits = (num_words - 1).bit_length()
        state_bits = int(state[-1]).bit_length() if len(state) else 1
        key_bits = max(_PLACE_BITS, state_bits + word_bits)
        num_homes = max(_MIN_HOMES, int(len(state) / load))
        if num_homes > _MAX_HOMES:
            raise AsrError(
                f"The n-gram model's {len(state)} arcs are too many for a hash index; use none (--no-index)."
            )
        index = cls(torch.zeros(0, dtype=torch.int64), num_homes, word_bits, key_bits)
        home = np.empty(len(state), dtype=np.uint32)
        entry = np.empty(len(state), dtype=np.int64)
        for begin in range(0, len(state), _BUILD_BLOCK):
            part = slice(begin, begin + _BUILD_BLOCK)
            key = index._key(
                torch.from_numpy(state[part].astype(np.int64)), torch.from_numpy(label[part].astype(np.int64))
            )
            home[part] = index._home(key).numpy()
            arc_idx = np.arange(first_arc + begin, first_arc + begin + len(key))
            entry[part] = (torch.bitwise_and(key, _TAG_MASK).numpy() << 32) | arc_idx
        slot = np.full(num_homes + _WINDOW, _EMPTY, dtype=np.int64)
        farthest, num_taken = 0, 0
        for begin in range(0, num_homes, _BUILD_HOMES):  # bounds what sorting takes
            by_home = np.flatnonzero((home >= begin) & (home < begin + _BUILD_HOMES))
            if not len(by_home):
                continue
            by_home = by_home[np.argsort(home[by_home], kind="stable")]
            own = home[by_home].astype(np.int64)
            # Sorted by home, each key takes the first free slot, which is after that of the key before it.
            rank = np.arange(len(own))
            place = rank + np.maximum.accumulate(np.maximum(own, num_taken) - rank)
            farthest = max(farthest, int((place - own).max()))
            num_taken = int(place[-1]) + 1
            if num_taken + _WINDOW > len(slot):
                slot = np.append(slot, np.full(num_taken + _WINDOW - len(slot), _EMPTY))
            slot[place] = entry[by_home]
        spread = (farthest + 1) * (((1 << _PLACE_BITS) // num_homes) + 1) << (key_bits - _PLACE_BITS)
        if spread >> _TAG_BITS:
            raise AsrError(f"The n-gram model's {len(state)} arcs cannot be distinguished by hashing; use no index.")
        return cls(torch.from_numpy(slot), num_homes, word_bits, key_bits)

    def find(self, state: Tensor, label: Tensor) -> Tensor:
        """arc_idx (Q,) int64, -1 where the state has no such arc."""
        key = self._key(state, label)
        place, tag = self._home(key), _low_word(key).bitwise_and(_TAG_MASK)
        entry = self.slot.index_select(0, place)
        stored = _high_word(entry)
        same = stored.eq(tag)
        arc_idx = _low_word(entry).to(torch.int64).masked_fill_(same.logical_not(), _EMPTY)
        pending = torch.nonzero(same.logical_or_(stored.lt(0)).logical_not_()).squeeze(1)
        place, tag = place.index_select(0, pending).add_(1), tag.index_select(0, pending)
        offset = torch.arange(_WINDOW, device=key.device)
        while len(pending):
            window = self.slot.index_select(0, (place[:, None] + offset).view(-1))
            stored = _high_word(window).reshape(-1, _WINDOW)
            same = stored.eq(tag[:, None])
            found = _low_word(window).reshape(-1, _WINDOW).masked_fill(same.logical_not(), _EMPTY).amax(1)
            arc_idx.index_copy_(0, pending, found.to(torch.int64))
            ended = found.ge(0).logical_or_(stored.amin(1).lt(0))
            going_on = torch.nonzero(ended.logical_not_()).squeeze(1)
            pending, tag = pending.index_select(0, going_on), tag.index_select(0, going_on)
            place = place.index_select(0, going_on).add_(_WINDOW)
        return arc_idx

    def _key(self, state: Tensor, label: Tensor) -> Tensor:
        """(state, label) as one number of `key_bits` bits, mixed one-to-one, (Q,)."""
        mask = (1 << self.key_bits) - 1
        key = torch.bitwise_left_shift(state, self.word_bits).add_(label)
        key.mul_(MULTIPLIERS[0]).bitwise_and_(mask)
        key.bitwise_xor_(torch.bitwise_right_shift(key, self.key_bits // 2))
        return key.mul_(MULTIPLIERS[1]).bitwise_and_(mask)

    def _home(self, key: Tensor) -> Tensor:
        """Where a key is first looked for, (Q,): its upper 32 bits scaled to the number of homes."""
        upper = torch.bitwise_right_shift(key, self.key_bits - _PLACE_BITS)
        return torch.bitwise_right_shift(upper.mul_(self.num_homes), _PLACE_BITS)


def _low_word(packed: Tensor) -> Tensor:
    """The lower 32 bits of each int64 as int32, a view (little-endian machines, as all that torch runs on)."""
    return packed.view(torch.int32)[0::2]


def _high_word(packed: Tensor) -> Tensor:
    """The upper 32 bits of each int64 as int32, a view."""
    return packed.view(torch.int32)[1::2]


_BLOCK = 128  # queries whose memory accesses overlap


class NgramTables(NamedTuple):
    """What `score_words` reads of an n-gram model, see `NgramArrays`.

    Attributes:
        word_map: (V,) int64 the word that is looked up for each word; empty if each is itself.
        slot, num_homes, word_bits, key_bits: of the `ArcIndex`; an empty `slot` means binary search.
        score_level: empty where scores are not quantized.
    """

    word_map: Any
    slot: Any
    num_homes: int
    word_bits: int
    key_bits: int
    arc_begin: Any
    label: Any
    backoff_state: Any
    backoff_score: Any
    score: Any
    score_level: Any
    dst_state: Any

    @property
    def always_answers(self) -> bool:
        """Yes: every n-gram that is not listed backs off. Only states that do not exist have no answer."""
        return True


@kernel(fastmath=False, allocates=False)
def score_words(state: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any, work: Any) -> bool:
    """Fills log_prob (Q,) and next_idx (Q,) as `NgramLM.score` does; words are already mapped.

    work (5, 128) int64 is to work in.

    Returns:
        False if there is no such state.
    """
    slot, num_homes, word_bits, key_bits = tables.slot, tables.num_homes, tables.word_bits, tables.key_bits
    arc_begin, label, backoff_state = tables.arc_begin, tables.label, tables.backoff_state
    backoff_score, score, level, dst_state = tables.backoff_score, tables.score, tables.score_level, tables.dst_state
    mask = (1 << key_bits) - 1
    active, context, place, tag, entry = work[0], work[1], work[2], work[3], work[4]
    for begin in range(0, len(state), _BLOCK):
        num_active = 0
        for query in range(begin, min(begin + _BLOCK, len(state))):
            next_idx[query] = word_id[query]  # the arc, until it is followed
            log_prob[query] = 0.0
            if state[query] != 0:
                if not 0 <= state[query] < len(backoff_state):
                    return False
                active[num_active] = query
                context[num_active] = state[query]
                num_active += 1
        while num_active:
            if len(slot):
                for i in range(num_active):
                    key = (((context[i] << word_bits) + word_id[active[i]]) * MULTIPLIERS[0]) & mask
                    key = ((key ^ (key >> (key_bits // 2))) * MULTIPLIERS[1]) & mask
                    tag[i] = key & _TAG_MASK
                    place[i] = ((key >> (key_bits - 32)) * num_homes) >> 32
                for i in range(num_active):
                    entry[i] = slot[place[i]]
            num_left = 0
            for i in range(num_active):
                query = active[i]
                found = np.int64(-1)
                if len(slot):
                    while entry[i] >= 0 and (entry[i] >> 32) != tag[i]:
                        place[i] += 1
                        entry[i] = slot[place[i]]
                    if entry[i] >= 0:
                        found = entry[i] & 0xFFFFFFFF
                else:
                    low = np.int64(arc_begin[context[i]])
                    end = np.int64(arc_begin[context[i] + 1])
                    high = end
                    while low < high:
                        middle = (low + high) >> 1
                        if label[middle] < word_id[query]:
                            low = middle + 1
                        else:
                            high = middle
                    if low < end and label[low] == word_id[query]:
                        found = low
                if found >= 0:
                    next_idx[query] = found
                else:
                    log_prob[query] += backoff_score[context[i]]
                    shorter = np.int64(backoff_state[context[i]])
                    if shorter != 0:
                        active[num_left] = query
                        context[num_left] = shorter
                        num_left += 1
            num_active = num_left
        for query in range(begin, min(begin + _BLOCK, len(state))):
            arc = next_idx[query]
            if len(level):
                log_prob[query] += level[int(score[arc])]
            else:
                log_prob[query] += score[arc]
            next_idx[query] = dst_state[arc]
    return True


@compiled_lookup(NgramTables)
@kernel(fastmath=False)
def look_up_ngrams(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """Answers as `NgramLM.score`, for `look_up`."""
    word_map, work = tables.word_map, np.empty((5, _BLOCK), dtype=np.int64)
    if len(word_map):
        listed = np.empty(len(word_id), dtype=np.int64)
        for i in range(len(word_id)):
            listed[i] = word_map[word_id[i]]
        return score_words(context_idx, listed, tables, log_prob, next_idx, work)
    return score_words(context_idx, word_id, tables, log_prob, next_idx, work)
