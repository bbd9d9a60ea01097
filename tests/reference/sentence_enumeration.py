"""Brute force over lexicon, language model and topology: every sentence, pronunciation, silence and alignment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from asr.lm.ngram.model import NgramArrays
from asr.text.symbols import EOS_ID, TokenTable
from tests.reference.graph_search import Scores

NEVER = float("-inf")


def sentence_scores(
    log_prob: torch.Tensor,
    pronunciations: Mapping[int, Sequence[Sequence[str]]],
    language_score: Callable[[tuple[int, ...]], float],
    tokens: TokenTable,
    topology: str,
    silence: str | None = None,
    silence_probability: float = 0.5,
) -> Scores:
    """For each sentence that fits the frames its best score: language model, silences and best alignment.

    Args:
        log_prob: (T, C).
        pronunciations: for each word id its pronunciations.
        language_score: log P of a whole sentence, its end included.
        tokens: names the columns.
        topology: as in `asr.graph.topology.TOPOLOGIES`.
        silence: the optional silence phone.
        silence_probability: its probability at each place.
    """
    result: Scores = {}
    frames = log_prob.tolist()
    agenda: list[tuple[int, ...]] = [()]
    for sentence in agenda:
        best = max(
            score + _best_alignment(frames, phones, tokens, topology)
            for phones, score in _spoken(sentence, pronunciations, silence, silence_probability)
        )
        if best > NEVER:
            result[sentence] = best + language_score(sentence)
        num_phones = sum(min(map(len, pronunciations[word])) for word in sentence)
        if num_phones < len(frames):
            agenda += [(*sentence, word) for word in pronunciations]
    return result


def best_backoff_score(arrays: NgramArrays, start: int) -> Callable[[tuple[int, ...]], float]:
    """Scores a sentence as a graph with backoff arcs does: it may back off wherever that pays, not only where it must.

    Args:
        arrays: the model.
        start: the state after `<s>`.
    """
    begin, label = arrays.arc_begin.tolist(), arrays.label.tolist()
    score = arrays.arc_score(torch.arange(len(label))).tolist()
    dst_state, shorter, weight = arrays.dst_state.tolist(), arrays.backoff_state.tolist(), arrays.backoff_score.tolist()

    def best(words: tuple[int, ...], state: int) -> float:
        arc = next((arc for arc in range(begin[state], begin[state + 1]) if label[arc] == words[0]), None)
        total = NEVER
        if arc is not None:
            total = score[arc] + (best(words[1:], dst_state[arc]) if len(words) > 1 else 0.0)
        return max(total, weight[state] + best(words, shorter[state])) if state != 0 else total

    return lambda sentence: best((*sentence, EOS_ID), start)


def _spoken(
    sentence: tuple[int, ...],
    pronunciations: Mapping[int, Sequence[Sequence[str]]],
    silence: str | None,
    silence_probability: float,
) -> Iterator[tuple[list[str], float]]:
    for variant in itertools.product(*(pronunciations[word] for word in sentence)):
        if silence is None:
            yield [phone for word in variant for phone in word], 0.0
            continue
        for pauses in itertools.product((False, True), repeat=len(sentence) + 1):
            phones = [silence] if pauses[0] else []
            for word, pause in zip(variant, pauses[1:], strict=True):
                phones += [*word, silence] if pause else word
            score = sum(math.log(silence_probability if pause else 1 - silence_probability) for pause in pauses)
            yield phones, score


def _best_alignment(frames: list[list[float]], phones: list[str], tokens: TokenTable, topology: str) -> float:
    """The best path through the phones' states; `follows[s]` are the states that state s may come from."""
    if topology.startswith("ctc"):
        columns = [0]
        for phone in phones:
            columns += [tokens.id_of(phone), 0]
        follows = [{state, state - 1} for state in range(len(columns))]
        for state in range(3, len(columns), 2):
            if topology == "ctc-modified" or columns[state] != columns[state - 2]:
                follows[state].add(state - 2)
        starts, ends = {0, 1}, {len(columns) - 1, len(columns) - 2}
    else:
        num_states = int(topology[-1])
        states = range(1, num_states + 1)
        names = phones if num_states == 1 else [f"{phone}_{state}" for phone in phones for state in states]
        columns = [tokens.id_of(name) for name in names]
        follows = [{state, state - 1} for state in range(len(columns))]
        starts, ends = {0}, {len(columns) - 1}
        if not columns:
            return 0.0 if not frames else NEVER
    if not frames:
        return 0.0 if not phones else NEVER
    best = [frames[0][column] if state in starts else NEVER for state, column in enumerate(columns)]
    for frame in frames[1:]:
        best = [
            max((best[before] for before in follows[state] if before >= 0), default=NEVER) + frame[column]
            for state, column in enumerate(columns)
        ]
    return max((best[state] for state in ends if 0 <= state < len(columns)), default=NEVER)
