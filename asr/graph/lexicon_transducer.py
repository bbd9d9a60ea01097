"""L: from phones to words, with the symbols that make it determinisable and with optional silence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asr.graph.transducer import EPSILON, Transducer, round_scores

LOOP_STATE = 0


@dataclass(frozen=True)
class LexiconTransducer:
    """L and its label ranges. Input labels: 0 nothing, 1..P phones, P + 1 backoff, above it disambiguation symbols.

    Attributes:
        transducer: L, closed: after a word any other may follow.
        backoff_input: the backoff symbol's input label, P + 1.
        backoff_output: the backoff symbol's output label, above all word ids.
    """

    transducer: Transducer
    backoff_input: int
    backoff_output: int


def build_lexicon_transducer(
    pronunciations: Mapping[int, Sequence[Sequence[int]]],
    num_phones: int,
    num_words: int,
    silence: int | None = None,
    silence_probability: float = 0.5,
    score_step: float = 2.0**-14,
) -> LexiconTransducer:
    """Builds L. A word stands on its first phone, so that composition meets the language model's score there.

    Args:
        pronunciations: for each word id its pronunciations, phones numbered from 1.
        num_phones: P.
        num_words: size of the vocabulary.
        silence: the phone that may stand at the start and after each word; None for no silence.
        silence_probability: how probable it is at each such place.
        score_step: scores are multiples of it.
    """
    backoff_input, backoff_output = num_phones + 1, num_words
    markers = _disambiguation(pronunciations)
    silence_marker = max(markers.values(), default=0) + 1
    states: dict[tuple[int, ...], int] = {}
    arcs: list[tuple[int, int, int, float, int]] = []
    num_states = 1

    # Where a pronunciation ends: straight into the loop, or with silence into it by one of two ways.
    endings = [(LOOP_STATE, 0.0)]
    if silence is not None:
        silence_state, marker_state, start = 1, 2, 3
        num_states = 4
        with_silence, without = math.log(silence_probability), math.log1p(-silence_probability)
        endings = [(LOOP_STATE, without), (silence_state, with_silence)]
        arcs += [(start, EPSILON, EPSILON, score, state) for state, score in endings]
        arcs.append((silence_state, silence, EPSILON, 0.0, marker_state))
        arcs.append((marker_state, backoff_input + silence_marker, EPSILON, 0.0, LOOP_STATE))
    else:
        start = LOOP_STATE

    def add_arc(src_state: int, labels: tuple[int, ...], word_id: int) -> None:
        """Spells `labels` from a state, sharing what is left with other words that end the same way."""
        nonlocal num_states
        while len(labels) > 1:
            rest = labels[1:]
            known = rest in states
            if not known:
                states[rest] = num_states
                num_states += 1
            arcs.append((src_state, labels[0], word_id, 0.0, states[rest]))
            if known:
                return
            src_state, labels, word_id = states[rest], rest, EPSILON
        arcs.extend((src_state, labels[0], word_id, score, state) for state, score in endings)

    for word_id, variants in pronunciations.items():
        for variant_idx, phones in enumerate(variants):
            marker = markers.get((word_id, variant_idx), 0)
            add_arc(LOOP_STATE, (*phones, backoff_input + marker) if marker else tuple(phones), word_id)
    arcs.append((LOOP_STATE, backoff_input, backoff_output, 0.0, LOOP_STATE))

    src_state, input_label, output_label, score, dst_state = (np.array(column) for column in zip(*arcs, strict=True))
    final_score = np.full(num_states, -np.inf)
    final_score[LOOP_STATE] = 0.0
    transducer = Transducer.from_arcs(
        start,
        src_state,
        input_label,
        output_label,
        round_scores(score, score_step),
        dst_state,
        final_score,
        sort_by="output",
    )
    return LexiconTransducer(transducer, backoff_input, backoff_output)


def _disambiguation(pronunciations: Mapping[int, Sequence[Sequence[int]]]) -> dict[tuple[int, int], int]:
    """For (word, variant) the number of its symbol: pronunciations that are equal, or another's beginning, need one."""
    all_phones = [tuple(phones) for variants in pronunciations.values() for phones in variants]
    count = Counter(all_phones)
    beginnings = {phones[:length] for phones in count for length in range(1, len(phones))}
    used: Counter[tuple[int, ...]] = Counter()
    markers: dict[tuple[int, int], int] = {}
    for word_id, variants in pronunciations.items():
        for variant_idx, variant in enumerate(variants):
            phones = tuple(variant)
            if count[phones] > 1 or phones in beginnings:
                used[phones] += 1
                markers[word_id, variant_idx] = used[phones]
    return markers
