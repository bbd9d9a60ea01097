"""n-gram look-up as a loop over single queries: compiled by numba where it is installed, for look-ups on a CPU.

The tensor form in `NgramLM` and `ArcFinder` gives the same bits on any device; on a CPU this loop is several times
faster, since a query leaves its block of registers only for the model's own memory. Uncompiled it is the slow oracle.

Shapes: Q queries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.lm.loop_answer import answers_from

_BLOCK = 128  # queries whose memory accesses are under way together
_TAG_MASK = (1 << 31) - 1


def score_words(
    state: Any,
    word_id: Any,
    model: Any,
    log_prob: Any,
    next_idx: Any,
) -> bool:
    """Fills log_prob (Q,) and next_idx (Q,) as `NgramLM.score` does, always; `model` is `NgramArrays.for_loop`'s.

    An empty `slot` means binary search; `level` is empty where scores are not quantized.
    """
    slot, num_homes, word_bits, key_bits, first, second = model[:6]
    arc_begin, label, backoff_state, backoff_score, score, level, dst_state = model[6:]
    mask = (1 << key_bits) - 1
    active = np.empty(_BLOCK, dtype=np.int64)
    context = np.empty(_BLOCK, dtype=np.int64)
    place = np.empty(_BLOCK, dtype=np.int64)
    tag = np.empty(_BLOCK, dtype=np.int64)
    entry = np.empty(_BLOCK, dtype=np.int64)
    for begin in range(0, len(state), _BLOCK):
        num_active = 0
        for query in range(begin, min(begin + _BLOCK, len(state))):
            next_idx[query] = word_id[query]  # the arc, until it is followed
            log_prob[query] = 0.0
            if state[query] != 0:
                active[num_active] = query
                context[num_active] = state[query]
                num_active += 1
        while num_active:
            if len(slot):
                for i in range(num_active):
                    key = (((context[i] << word_bits) + word_id[active[i]]) * first) & mask
                    key = ((key ^ (key >> (key_bits // 2))) * second) & mask
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


answers_from(tuple, score_words, reorders_sums=False)
