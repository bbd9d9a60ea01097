"""What `RnnLM.score` does without a run of the hidden layer, as loops for `compiled_loop`.

Shapes: Q queries, K contexts, M missing queries, R of them new, D distinct rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.hashing.hash_kernel import home_bucket, slot_of
from asr.lm.compiled_loop import Intrinsic
from asr.lm.rnn.gru_step import distinct_values
from asr.lm.rnn.output_kernel import FLOATS_OF_LINE, mixed_with, row_product

# Places in `counts`: nodes and edges that there are, edges that there is room for, how many were too many for that;
# answers, queries and scored edges since it was last read.
NODES, EDGES, MOST_EDGES, TOO_MANY, ANSWERS, QUERIES, SCORED = range(7)
NUM_COUNTS = 7
_TAKEN = -2  # for a moment, in the place of the row that a node lacks
_AHEAD = 16  # queries whose places in the table are asked for early

prefetch: Any = Intrinsic("asr.lm.rnn.register_block", "prefetch")


def score_known(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """Fills log_prob (Q,) and next_idx (Q,) for context_idx, word_id (Q,) -> whether that could be done.

    It cannot where a history has no hidden row, or where there is no room for the new edges; then nothing is added.

    Args:
        tables: `HistoryTables` of an engine; its arrays and counts are changed in place.
    """
    counts, hidden_row, edges = tables.counts, tables.hidden_row, tables.edges
    missing = np.empty(len(word_id), dtype=np.int64)
    missing = missing[: find_edges(context_idx, word_id, edges, log_prob, next_idx, missing)]
    for query in missing:
        if hidden_row[context_idx[query]] < 0:
            return False
    if counts[EDGES] + len(missing) > counts[MOST_EDGES]:
        counts[TOO_MANY] = len(missing)
        return False
    if len(missing):
        new_slot = np.empty(len(missing), dtype=np.int64)
        answer_missing(context_idx, word_id, missing, tables, counts[NODES], new_slot, log_prob, next_idx)
    counts[ANSWERS] += 1
    counts[QUERIES] += len(word_id)
    return True


def find_edges(context_idx: Any, word_id: Any, edges: Any, log_prob: Any, next_idx: Any, missing: Any) -> int:
    """Fills log_prob (Q,) and next_idx (Q,) of the edges that there are, and missing (Q,), from its beginning, with the
    positions of the others -> how many these are. edges is `HistoryTables.edges`."""
    table, multiplier, shift, edge_score, edge_node = edges
    num, num_missing = len(word_id), 0
    for query in range(num):
        if query + _AHEAD < num:
            _ask_for((context_idx[query + _AHEAD] << 32) + word_id[query + _AHEAD], edges)
        slot = slot_of(table, (context_idx[query] << 32) + word_id[query], multiplier, shift)
        if slot < 0:
            missing[num_missing] = query
            num_missing += 1
        else:
            log_prob[query], next_idx[query] = edge_score[slot], edge_node[slot]
    return num_missing


def answer_missing(
    context_idx: Any, word_id: Any, missing: Any, tables: Any, first: int, new_slot: Any, log_prob: Any, next_idx: Any
) -> bool:
    """Adds the edges of the missing queries (M,), which lead to nodes from `first` on -> whether all have had room.

    Then log_prob (Q,) and next_idx (Q,) of these are filled; else, begun anew in a larger table, with the same first,
    it goes on. new_slot (M,) is to work in. The contexts have their hidden rows.
    """
    table, multiplier, shift, edge_score, edge_node = tables.edges
    counts, width = tables.counts, table.shape[1]
    for which in range(len(missing)):
        if which + _AHEAD < len(missing):
            query = missing[which + _AHEAD]
            _ask_for((context_idx[query] << 32) + word_id[query], tables.edges)
        query = missing[which]
        key = (context_idx[query] << 32) + word_id[query]
        slot = slot_of(table, key, multiplier, shift)
        if slot < 0:
            if counts[EDGES] == counts[MOST_EDGES]:
                return False
            slot = -1 - slot
            node = counts[NODES]
            table[slot // width, slot % width], edge_node[slot] = key, node
            tables.parent[node], tables.last_word[node] = context_idx[query], word_id[query]
            tables.hidden_row[node] = -1
            counts[NODES] += 1
            counts[EDGES] += 1
            counts[SCORED] += 1
        next_idx[query] = edge_node[slot]
        new_slot[next_idx[query] - first] = slot
    _score_edges(first, new_slot[: counts[NODES] - first], tables)
    for query in missing:
        log_prob[query] = edge_score[new_slot[next_idx[query] - first]]
    return True


def _ask_for(key: int, edges: Any) -> None:
    """A key's bucket and what its slots hold lie anywhere in large tables: they are on their way into the cache."""
    table, multiplier, shift, edge_score, _ = edges
    bucket = home_bucket(key, multiplier, shift)
    prefetch(table[bucket], 0)
    prefetch(edge_score, 2 * table.shape[1] * bucket)  # a view of every other number


def _score_edges(first: int, new_slot: Any, tables: Any) -> None:
    """Scores the edges at new_slot (R,), which lead to nodes first, first + 1 ..., from the rows where they lie."""
    parent, last_word, hidden_row, hidden = tables.parent, tables.last_word, tables.hidden_row, tables.hidden
    edge_score = tables.edges[3]
    rows, bias, weight, order, table_size, multipliers, log_z = tables.output
    for new in range(len(new_slot)):
        node = first + new
        if new + 1 < len(new_slot):
            following = rows[last_word[node + 1]]
            for i in range(0, len(following), FLOATS_OF_LINE):
                prefetch(following, i)
        context, word = parent[node], np.int64(last_word[node])
        total = bias[word] + row_product(hidden, np.int64(hidden_row[context]), rows, word)
        mixed = 0
        for age in range(order - 1):
            mixed = mixed_with(mixed, last_word[context], age, multipliers)
            total += weight[mixed % table_size + word]
            context = parent[context]
        edge_score[new_slot[new]] = total - log_z


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
