"""Sentences of a text side by side, step after step without padding: what scores a text in large batches.

Shapes: L words of the sentences, M history words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.text.vocabulary import BOS_ID, EOS_ID, EPSILON_ID


@dataclass(frozen=True)
class PackedSentences:
    """Sentences from long to short: step t has the words of the first sizes[t] ones, after those of step t - 1.

    Attributes:
        sizes: how many sentences are that long, falling.
        place: where each word stands in the text, (L,) int64.
        input_id: the word before it, `<s>` at a sentence's start, (L,).
        history: the last M words before it, newest first, `<eps>` before `<s>`, (L, M).
        word_id: the word, (L,).
    """

    sizes: list[int]
    place: Tensor
    input_id: Tensor
    history: Tensor
    word_id: Tensor

    def chunks(self, num_words: int) -> Iterator[tuple[list[int], slice]]:
        """Runs of steps of about `num_words` words, one step at least: their sizes, and their words in L."""
        begin = end = first = 0
        for step, size in enumerate(self.sizes):
            end += size
            if end - begin >= num_words or step == len(self.sizes) - 1:
                yield self.sizes[first : step + 1], slice(begin, end)
                begin, first = end, step + 1


def pack_sentences(
    token_id: NDArray[np.int32], num_history_words: int, sentences_at_once: int, words_at_once: int | None = None
) -> Iterator[PackedSentences]:
    """The sentences of a text `w1 .. wn </s> ...`, sentences of like length together; the last may lack its end.

    So many sentences at once, or, where `words_at_once` says so, fewer: up to the one that makes the words as many.
    """
    sentence_end = np.flatnonzero(token_id == EOS_ID) + 1
    if len(token_id) and token_id[-1] != EOS_ID:
        sentence_end = np.append(sentence_end, len(token_id))
    begin = np.concatenate(([0], sentence_end[:-1]))
    length = sentence_end - begin
    order = np.argsort(-length, kind="stable")
    words_before = np.concatenate(([0], np.cumsum(length[order])))
    end = 0
    while end < len(order):
        first = end
        end = min(first + sentences_at_once, len(order))
        if words_at_once is not None:
            end = min(end, int(np.searchsorted(words_before, words_before[first] + words_at_once)))
        chosen = order[first:end]
        # Of the lengths, which fall, as many exceed t as there are sentences at step t.
        sizes = np.searchsorted(-length[chosen], -np.arange(length[chosen[0]]), side="left")
        offset = np.concatenate(([0], np.cumsum(sizes)))
        step = np.repeat(np.arange(len(sizes)), sizes)
        place = begin[chosen[np.arange(offset[-1]) - offset[step]]] + step
        ages = []
        for age in range(max(1, num_history_words)):
            word = np.where(step > age, token_id[np.maximum(place - 1 - age, 0)], EPSILON_ID)
            word[step == age] = BOS_ID
            ages.append(word)
        past = torch.from_numpy(np.stack(ages, axis=1).astype(np.int64))
        word_id = torch.from_numpy(token_id[place].astype(np.int64))
        yield PackedSentences(sizes.tolist(), torch.from_numpy(place), past[:, 0], past[:, :num_history_words], word_id)
