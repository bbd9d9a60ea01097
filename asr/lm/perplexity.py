"""Perplexity of any language model behind the contract, sentence ends counted.

Shapes: N sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from asr.lm.contract import LanguageModel
from asr.lm.ngram.text import WordStream
from asr.text.vocabulary import BOS_ID, UNK_ID

_SENTENCES_AT_ONCE = 4096


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of a text.

    Attributes:
        num_sentences: sentences, each with its `</s>`.
        num_words: words without `</s>`, those outside the vocabulary among them.
        num_unlisted: words outside the vocabulary.
        log_prob: natural log probability of everything.
        log_prob_listed: the same without the words outside the vocabulary.
    """

    num_sentences: int
    num_words: int
    num_unlisted: int
    log_prob: float
    log_prob_listed: float

    @property
    def perplexity(self) -> float:
        """Over all words and sentence ends, words outside the vocabulary scored as `<unk>`."""
        return math.exp(-self.log_prob / (self.num_words + self.num_sentences))

    @property
    def perplexity_listed(self) -> float:
        """Words outside the vocabulary left out (as history they still count, as `<unk>`)."""
        return math.exp(-self.log_prob_listed / (self.num_words - self.num_unlisted + self.num_sentences))


@torch.no_grad()
def measure_perplexity(lm: LanguageModel, stream: WordStream) -> Perplexity:
    """Scores a text that was read with `lm.vocabulary`, many sentences at a time."""
    total, listed = 0.0, 0.0
    for words in _batches(stream):
        context_idx = lm.start(words.shape[1])
        for word_id in torch.from_numpy(words):
            present = torch.nonzero(word_id >= 0)[:, 0].to(context_idx.device)
            asked = word_id[word_id >= 0].to(context_idx.device)
            is_listed = asked < stream.num_listed
            asked = torch.where(is_listed, asked, torch.full_like(asked, UNK_ID))
            log_prob, context_idx[present] = lm.score(context_idx[present], asked)
            total += float(log_prob.sum(dtype=torch.float64))
            listed += float(log_prob[is_listed].sum(dtype=torch.float64))
    return Perplexity(stream.num_sentences, stream.num_words, stream.num_unlisted, total, listed)


def _batches(stream: WordStream) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Sentences of like length as columns, without `<s>`, -1 below each sentence's end: (length, N)."""
    begin = np.flatnonzero(stream.word_id == BOS_ID)
    length = np.diff(begin, append=len(stream.word_id)) - 1
    by_length = np.argsort(length, kind="stable")
    for first in range(0, len(begin), _SENTENCES_AT_ONCE):
        chosen = by_length[first : first + _SENTENCES_AT_ONCE]
        row = np.arange(length[chosen].max())[:, None]
        inside = row < length[chosen]
        place = np.where(inside, begin[chosen] + 1 + row, 0)
        yield np.where(inside, stream.word_id[place].astype(np.int64), -1)
