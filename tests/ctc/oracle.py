"""CTC decoding by enumeration: every path of a few frames, every word sequence of a few words.

Shapes: T frames, C tokens, the blank being column 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asr.ctc.language_models import StatefulModel
from asr.lm.ngram.model import NgramLM

Score = Callable[[Sequence[int]], float]


def collapsed(path: Sequence[int]) -> tuple[int, ...]:
    """A path's tokens: runs of equal ones once, without blanks."""
    return tuple(token for token, _ in itertools.groupby(path) if token)


def sum_of_paths(log_prob: np.ndarray) -> dict[tuple[int, ...], float]:
    """For each sequence of tokens the log of the sum over all its paths."""
    num_frames, num_tokens = log_prob.shape
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(num_tokens), repeat=num_frames):
        score = float(sum(log_prob[frame, token] for frame, token in enumerate(path)))
        tokens = collapsed(path)
        found[tokens] = float(np.logaddexp(found[tokens], score)) if tokens in found else score
    return found


def without_idle_boundaries(tokens: Sequence[int], boundary: int | None) -> tuple[int, ...]:
    """Leaves out boundaries at the beginning and after another one."""
    before = (boundary, *tokens)
    return tuple(token for last, token in zip(before, tokens, strict=False) if not token == last == boundary)


def best_of_paths(log_prob: np.ndarray) -> dict[tuple[int, ...], float]:
    """For each sequence of tokens the score of its best path."""
    num_frames, num_tokens = log_prob.shape
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(num_tokens), repeat=num_frames):
        score = float(sum(log_prob[frame, token] for frame, token in enumerate(path)))
        found[collapsed(path)] = max(score, found.get(collapsed(path), -math.inf))
    return found


def best_token_sequences(
    log_prob: np.ndarray, lm_score: Score, lm_scale: float, insertion: float, boundary: int | None
) -> list[tuple[float, tuple[int, ...]]]:
    """All sequences by the sum of their paths and a language model's score of the whole sequence, best first.

    Boundaries at the beginning and after another one are left out; with None none are, so that a language model reads
    each sequence as it is.
    """
    sums: dict[tuple[int, ...], float] = {}
    for path, score in sum_of_paths(log_prob).items():
        tokens = without_idle_boundaries(path, boundary)
        sums[tokens] = float(np.logaddexp(sums.get(tokens, -math.inf), score))
    scored = [(score + lm_scale * lm_score(tokens) + insertion * len(tokens), tokens) for tokens, score in sums.items()]
    return sorted(scored, reverse=True)


def sums_of_texts(
    sequences: Sequence[tuple[float, tuple[int, ...]]], text_of: Callable[[Sequence[int]], str]
) -> dict[str, float]:
    """For each text the log of the sum over all sequences of tokens with this text, and so over all its paths.

    With a language model, each sequence's own score of it weighs that sequence's paths.
    """
    found: dict[str, float] = {}
    for score, tokens in sequences:
        text = text_of(tokens)
        found[text] = float(np.logaddexp(found.get(text, -math.inf), score))
    return found


def best_word_sequences(
    log_prob: np.ndarray,
    spellings: Mapping[str, Sequence[tuple[int, ...]]],
    lm_score: Callable[[Sequence[str]], float],
    lm_scale: float,
    insertion: float,
    boundary: int | None,
    max_words: int,
) -> list[tuple[float, tuple[str, ...]]]:
    """All word sequences by their best path, best first.

    Spellings do not hold the boundary. Between words it stands once or more often, at the beginning and at the end any
    number of times.
    """
    by_tokens = best_of_paths(log_prob)
    by_core: dict[tuple[int, ...], float] = {}
    for tokens, score in by_tokens.items():
        core = tokens
        if boundary is not None:
            runs = [list(group) for is_boundary, group in itertools.groupby(tokens, lambda t: t == boundary) if True]
            words = [tuple(run) for run in runs if run[0] != boundary]
            core = tuple(itertools.chain.from_iterable((*word, boundary) for word in words))
        by_core[core] = max(score, by_core.get(core, -math.inf))
    found: list[tuple[float, tuple[str, ...]]] = []
    for num_words in range(max_words + 1):
        for words in itertools.product(spellings, repeat=num_words):
            best = -math.inf
            for ways in itertools.product(*(spellings[word] for word in words)):
                end = () if boundary is None else (boundary,)
                best = max(best, by_core.get(tuple(itertools.chain.from_iterable((*w, *end) for w in ways)), -math.inf))
            if best > -math.inf:
                found.append((best + lm_scale * lm_score(words) + insertion * num_words, words))
    return sorted(found, reverse=True)


class ForgetfulNgram(StatefulModel):
    """An n-gram model without tables for the search's loops, which forgets all contexts that are not retained."""

    def __init__(self, lm: NgramLM) -> None:
        super().__init__(lm.vocabulary, lm.start(1))
        self._lm = lm

    def after(self, state: Any, word_id: int) -> tuple[float, Any]:
        score, following = self._lm.score(state, torch.tensor([word_id]))
        return float(score), following

    def at_end(self, state: Any) -> float:
        return float(self._lm.final(state))

    def retain(self, live: torch.Tensor) -> None:
        self._forget_at = 0
        super().retain(live)
