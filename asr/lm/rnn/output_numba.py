"""Compiled loops by which output layers score words on a CPU; the sums of a query stay in registers.

Shapes: Q queries, H hidden, M history words, V words or nodes, O histories, K nodes kept of each, R history lengths, W
the MaxEnt table.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from asr import old_paths
from asr.kernels.simd import exponential, prefetch, row_product
from asr.lm.rnn.maxent import mixed_with

FLOATS_OF_LINE = 16  # of a cache line
_NODES_AT_ONCE = 16  # nodes of a path whose exponentials are computed together
_TOO_LARGE = 30.0  # from here on 1 + exp(x) equals exp(x) in float32


def add_path_log_prob(
    order: Any, hidden: Any, places: Any, word_id: Any, path_begin: Any, path_node: Any, path_sign: Any,
    rows: Any, bias: Any, weight: Any, owner: Any, held: Any, root: int, log_prob: Any,
) -> int:  # fmt: skip
    """Adds log P of each word, by the decisions on its path; returns how many decisions were computed.

    order (Q,) is the order of the queries, fastest with those of one word together. hidden (Q, H), places (Q, R),
    word_id, owner, log_prob (Q,), rows (V, H), bias (V,), weight (W,); a word's path is path_begin[word] ..
    path_begin[word + 1] - 1. held (O, K) has 1 / P(node root - k | history) of the histories owner (Q,), NaN where it
    is not known. It is filled on the way, so that the known part of a path is not computed again.
    """
    num_places, num_held = places.shape[1], held.shape[1]
    against, powers = np.zeros(_NODES_AT_ONCE, dtype=np.float32), np.empty(_NODES_AT_ONCE, dtype=np.float32)
    num_computed = 0
    for which in range(len(order)):
        query = order[which]
        word = word_id[query]
        begin, end = path_begin[word], path_begin[word + 1]
        if which + 1 < len(order):
            following = order[which + 1]
            ask_for_path(following, word, hidden, places, word_id[following], path_begin, path_node, rows, weight)
        last = begin
        while last + 1 < end and root - path_node[last + 1] < num_held:
            last += 1
        # One logarithm of the product of all 1 + exp(-+logit), taken before the product can overflow.
        total, product = 0.0, 1.0
        at = last
        while at > begin:
            known = held[owner[query], root - path_node[at]]
            if known == known:
                product = known
                break
            at -= 1
        num_computed += end - at
        while at < end:
            count = min(_NODES_AT_ONCE, end - at)
            for k in range(count):
                node = path_node[at + k]
                logit = bias[node] + row_product(hidden, query, rows, node)
                for i in range(num_places):
                    logit += weight[places[query, i] + node]
                against[k] = -path_sign[at + k] * logit
            for k in range(_NODES_AT_ONCE):
                powers[k] = exponential(against[k])
            for k in range(count):
                if against[k] > _TOO_LARGE:
                    total += against[k]
                else:
                    product *= 1.0 + powers[k]
                if product > 1e250:
                    total += math.log(product)
                    product = 1.0
                at += 1
                if at <= last and total == 0.0 and product < 1e30:
                    held[owner[query], root - path_node[at]] = product
        log_prob[query] -= total + math.log(product)
    return num_computed


def ask_for_path(
    query: int, word_before: int, hidden: Any, places: Any, word: int, path_begin: Any, path_node: Any,
    rows: Any, weight: Any,
) -> None:  # fmt: skip
    """Prefetches a path's features and rows, which lie far apart in large tables."""
    for i in range(0, hidden.shape[1], FLOATS_OF_LINE):
        prefetch(hidden[query], i)
    for at in range(path_begin[word], path_begin[word + 1]):
        node = path_node[at]
        if word != word_before:
            for i in range(0, rows.shape[1], FLOATS_OF_LINE):
                prefetch(rows[node], i)
        for i in range(places.shape[1]):
            prefetch(weight, places[query, i] + node)


def add_word_scores(
    hidden: Any, history: Any, word_id: Any, rows: Any, bias: Any, weight: Any, order: int, table_size: int,
    scores: Any,
) -> None:  # fmt: skip
    """Adds the score of each word: hidden (Q, H), history (Q, M), word_id, scores (Q,), rows (V, H), bias (V,), weight
    (W,); the features' places are those of `hashed_places`, none where the order is 1."""
    for query in range(len(word_id)):
        word = word_id[query]
        total = bias[word] + row_product(hidden, query, rows, word)
        mixed = 0
        for age in range(order - 1):
            mixed = mixed_with(mixed, history[query, age], age)
            total += weight[mixed % table_size + word]
        scores[query] += total


old_paths.offer(__name__)
