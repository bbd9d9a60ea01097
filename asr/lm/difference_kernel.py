"""What one language model says less what another says, as a loop for `compiled_loop`. Uncompiled it is a slow oracle.

Shapes: Q queries, V words.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.lm.interpolation import CONTEXT_BITS, LOW_CONTEXT
from asr.lm.loop_answer import answer


def score_difference(context_idx: Any, word_id: Any, large: Any, small: Any) -> Any:
    """What `difference_lm(large, small).score` answers: log_prob (Q,), next_idx (Q,), and whether both models could.

    Args:
        context_idx, word_id: (Q,) the queries.
        large, small: of each model where the words stand in its list (V,), what is added to their scores (V,) or (0,),
            and its tables, see `answer`.
    """
    num = len(word_id)
    large_state, small_state = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    for i in range(num):
        large_state[i], small_state[i] = context_idx[i] >> CONTEXT_BITS, context_idx[i] & LOW_CONTEXT
    log_prob, next_idx, large_could = _looked_up(large_state, word_id, large)
    small_score, small_next, small_could = _looked_up(small_state, word_id, small)
    if not (large_could and small_could):
        return log_prob, next_idx, False
    for i in range(num):
        # As `difference_lm` has it: what the small model rules out does not come back.
        log_prob[i] = -np.inf if np.isinf(small_score[i]) else log_prob[i] - small_score[i]
        next_idx[i] = (next_idx[i] << CONTEXT_BITS) | small_next[i]
    return log_prob, next_idx, True


def _looked_up(state: Any, word_id: Any, words: Any) -> Any:
    """Scores and next states (Q,) of one of the models, and whether it could tell."""
    word_map, added, model = words
    num = len(word_id)
    listed = np.empty(num, dtype=np.int64)
    for i in range(num):
        listed[i] = word_map[word_id[i]]
    log_prob, next_idx = np.empty(num, dtype=np.float32), np.empty(num, dtype=np.int64)
    could = answer(state, listed, model, log_prob, next_idx)
    if len(added):
        for i in range(num):
            log_prob[i] += added[word_id[i]]
    return log_prob, next_idx, could
