"""What output layers do most on a CPU, as loops for `compiled_loop`: a query's sums stay in registers.

Shapes: Q queries, H hidden, V words or nodes, K words or nodes, R history lengths, W the MaxEnt table.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from asr.lm.compiled_loop import Intrinsic
from asr.lm.rnn.tile_kernel import exponential

_NEAR_NODES = 6  # of a path, which so many words share that a cache has their rows
_FLOATS_OF_LINE = 16  # of a cache

prefetch: Any = Intrinsic("asr.lm.rnn.register_block", "prefetch")


def add_path_log_prob(
    hidden: Any, places: Any, word_id: Any, path_begin: Any, path_node: Any, path_sign: Any,
    rows: Any, bias: Any, weight: Any, owner: Any, held: Any, root: int, log_prob: Any,
) -> int:  # fmt: skip
    """Adds log P of each word by the decisions on its path -> how many have been computed.

    hidden (Q, H), places (Q, R), word_id, owner, log_prob (Q,), rows (V, H), bias (V,), weight (W,); a word's path is
    path_begin[word] .. path_begin[word + 1] - 1. held (O, K) has 1 / P(node root - k | history) of the histories
    owner (Q,), NaN where not known, and is filled on the way: what is known of a path is not computed again.
    """
    size, num_places, num_held = hidden.shape[1], places.shape[1], held.shape[1]
    num_computed = 0
    for query in range(len(word_id)):
        word = word_id[query]
        begin, end = path_begin[word], path_begin[word + 1]
        # A path's features and its nodes far from the root lie all over tables that no near cache holds: those of the
        # next word are asked for meanwhile.
        if query + 1 < len(word_id):
            following = word_id[query + 1]
            for at in range(path_begin[following], path_begin[following + 1]):
                node = path_node[at]
                if at >= path_begin[following] + _NEAR_NODES:
                    for i in range(0, size, _FLOATS_OF_LINE):
                        prefetch(rows[node], i)
                for i in range(num_places):
                    prefetch(weight, places[query + 1, i] + node)
        last = begin
        while last + 1 < end and root - path_node[last + 1] < num_held:
            last += 1
        # Of the product of all 1 + exp(-+logit) one logarithm is taken, before it overflows more than one.
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
            node = path_node[at]
            logit = bias[node]
            for i in range(size):
                logit += hidden[query, i] * rows[node, i]
            for i in range(num_places):
                logit += weight[places[query, i] + node]
            against = -path_sign[at] * logit
            if against > 30.0:
                total += against
            else:
                product *= 1.0 + exponential(np.float32(against))
            if product > 1e250:
                total += math.log(product)
                product = 1.0
            at += 1
            if at <= last and total == 0.0 and product < 1e30:
                held[owner[query], root - path_node[at]] = product
        log_prob[query] -= total + math.log(product)
    return num_computed


def add_word_scores(
    hidden: Any, history: Any, word_id: Any, row_idx: Any, rows: Any, bias: Any, weight: Any, order: int,
    table_size: int, multipliers: Any, scores: Any,
) -> None:  # fmt: skip
    """Adds the score of each word: hidden (Q, H), history (Q, M), word_id, row_idx (its row), scores (Q,), rows (V, H),
    bias (V,), weight (W,); the features' places are those of `hashed_places`, none where the order is 1."""
    size = hidden.shape[1]
    for query in range(len(word_id)):
        word, row = word_id[query], row_idx[query]
        total = bias[row]
        for i in range(size):
            total += hidden[query, i] * rows[row, i]
        mixed = 0
        for age in range(order - 1):
            mixed = (mixed ^ history[query, age]) * multipliers[age % len(multipliers)] + age + 1
            mixed = mixed ^ (mixed >> 29)
            total += weight[mixed % table_size + word]
        scores[query] += total


def add_slices(scores: Any, weight: Any, places: Any, begin: int) -> None:
    """scores (Q, K) += weight of the words begin .. begin + K - 1 after the histories at places (Q, R)."""
    for query in range(scores.shape[0]):
        for i in range(places.shape[1]):
            first = places[query, i] + begin
            for column in range(scores.shape[1]):
                scores[query, column] += weight[first + column]


def add_gathered(scores: Any, weight: Any, places: Any, word_id: Any) -> None:
    """scores (Q, K) += weight of the words word_id (K,) after the histories at places (Q, R)."""
    for query in range(scores.shape[0]):
        for column in range(scores.shape[1]):
            word = word_id[column]
            total = scores[query, column]
            for i in range(places.shape[1]):
                total += weight[places[query, i] + word]
            scores[query, column] = total
