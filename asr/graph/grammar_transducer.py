"""G: a backoff n-gram model as an acceptor of words.

Shapes: S states, A arcs.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from asr.graph.transducer import EPSILON, Transducer, round_scores
from asr.lm.ngram.arrays import ROOT_STATE, NgramArrays
from asr.text.vocabulary import BOS_ID, EOS_ID


def build_grammar_transducer(
    arrays: NgramArrays,
    usable_words: Collection[int],
    backoff_label: int,
    score_step: float = 2.0**-14,
) -> Transducer:
    """Builds G: n-grams are arcs, backing off is an arc that reads `backoff_label` and writes nothing.

    Args:
        arrays: the model.
        usable_words: ids of the words that can be pronounced; n-grams that end in others have no arc.
        backoff_label: the backoff symbol on the side of the words.
        score_step: scores are rounded to multiples of it.
    """
    label = arrays.label.cpu().numpy()
    score = arrays.arc_score(torch.arange(len(label), device=arrays.label.device)).cpu().numpy()
    arc_begin = arrays.arc_begin.cpu().numpy()
    num_states = len(arc_begin) - 1
    src_state = np.repeat(np.arange(num_states), np.diff(arc_begin))
    dst_state = arrays.dst_state.cpu().numpy()

    usable = np.zeros(len(arrays.word_map), dtype=bool)
    usable[np.fromiter(usable_words, np.int64, len(usable_words))] = True
    possible = score > -np.inf
    final_score = np.full(num_states, -np.inf)
    ends = possible & (label == EOS_ID)
    final_score[src_state[ends]] = score[ends]

    kept = possible & usable[label] & (label != EOS_ID) & (label != BOS_ID)
    can_back_off = np.arange(num_states)[np.arange(num_states) != ROOT_STATE]
    num_backoffs = len(can_back_off)
    backoff_state = arrays.backoff_state.cpu().numpy()[can_back_off]
    backoff_score = arrays.backoff_score.cpu().numpy()[can_back_off]
    return Transducer.from_arcs(
        start=int(dst_state[BOS_ID]),
        src_state=np.concatenate([src_state[kept], can_back_off]),
        input_label=np.concatenate([label[kept], np.full(num_backoffs, backoff_label)]),
        output_label=np.concatenate([label[kept], np.full(num_backoffs, EPSILON)]),
        score=np.concatenate([round_scores(score[kept], score_step), round_scores(backoff_score, score_step)]),
        dst_state=np.concatenate([dst_state[kept], backoff_state]),
        final_score=round_scores(final_score, score_step),
        sort_by="input",
    )
