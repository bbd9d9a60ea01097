"""What `RnnLM.score` answers without a run of the hidden layer, as a loop for `compiled_loop`. Uncompiled it is slow.

Shapes: Q queries, K contexts, R of them without a hidden row, D distinct rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.hashing.hash_kernel import find_keys, insert_keys
from asr.lm.rnn.gru_step import distinct_values
from asr.lm.rnn.output_kernel import add_word_scores

# Places in `counts`: nodes and edges that there are, edges that there is room for, how many were too many for that;
# answers, queries and scored edges since it was last read.
NODES, EDGES, MOST_EDGES, TOO_MANY, ANSWERS, QUERIES, SCORED = range(7)
NUM_COUNTS = 7
_WORD_MASK = (1 << 32) - 1
_TAKEN = -2  # for a moment, in the place of the row that a node lacks


def score_known(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """Fills log_prob (Q,) and next_idx (Q,) for context_idx, word_id (Q,) -> whether that could be done.

    It cannot where a history has no hidden row, or where there is no room for the new edges; then nothing is added.

    Args:
        tables: `HistoryTables` of an engine; its arrays and counts are changed in place.
    """
    (
        table, multiplier, shift, edge_score, edge_node, parent, last_word, hidden_row, state, first_column, counts,
        num_history_words, output,
    ) = tables  # fmt: skip
    num = len(word_id)
    key, slot, missing = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    for query in range(num):
        key[query] = (context_idx[query] << 32) + word_id[query]
    num_missing = find_keys(table, key, multiplier, shift, slot, missing)
    for i in range(num_missing):
        if hidden_row[context_idx[missing[i]]] < 0:
            return False
    if counts[EDGES] + num_missing > counts[MOST_EDGES]:
        counts[TOO_MANY] = num_missing
        return False
    if num_missing:
        absent = key[missing[:num_missing]]
        place, one = np.empty(num_missing, dtype=np.int64), np.empty(num_missing, dtype=np.int64)
        num_new = insert_keys(table, absent, multiplier, shift, place, one, 0, num_missing)
        rows, bias, weight, order, table_size, multipliers, log_z = output
        hidden = np.empty((num_new, state.shape[1] - first_column), dtype=np.float32)
        history, word = np.empty((num_new, num_history_words), dtype=np.int64), np.empty(num_new, dtype=np.int64)
        for new in range(num_new):
            context = absent[one[new]] >> 32
            word[new] = absent[one[new]] & _WORD_MASK
            row = hidden_row[context]
            for i in range(hidden.shape[1]):
                hidden[new, i] = state[row, first_column + i]
            node = context
            for age in range(num_history_words):
                history[new, age] = last_word[node]
                node = np.int64(parent[node])
        score = np.zeros(num_new, dtype=np.float32)
        add_word_scores(hidden, history, word, word, rows, bias, weight, order, table_size, multipliers, score)
        for new in range(num_new):
            node, at = counts[NODES] + new, place[one[new]]
            edge_score[at], edge_node[at] = score[new] - log_z, node
            parent[node], last_word[node], hidden_row[node] = absent[one[new]] >> 32, word[new], -1
        counts[NODES] += num_new
        counts[EDGES] += num_new
        counts[SCORED] += num_new
        for i in range(num_missing):
            slot[missing[i]] = place[i]
    counts[ANSWERS] += 1
    counts[QUERIES] += num
    for query in range(num):
        log_prob[query], next_idx[query] = edge_score[slot[query]], edge_node[slot[query]]
    return True


def waiting_nodes(context_idx: Any, parent: Any, last_word: Any, hidden_row: Any) -> Any:
    """Of contexts (K,) the distinct ones that have no hidden row (R,), and what their rows follow.

    That is the rows before (D,), which of these each follows (R,), and the word of each (R,).
    """
    node, num = np.empty(len(context_idx), dtype=np.int64), 0
    for context in context_idx:
        if hidden_row[context] == -1:
            hidden_row[context] = _TAKEN
            node[num] = context
            num += 1
    before, word = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    for i in range(num):
        hidden_row[node[i]] = -1
        before[i], word[i] = hidden_row[parent[node[i]]], last_word[node[i]]
    row, which = distinct_values(before)
    return node[:num], row, which, word
