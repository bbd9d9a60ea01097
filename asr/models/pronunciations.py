"""Probabilities of pronunciations, by how often alignments chose them (after Chen et al. 2015)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from asr.models.chain_corpus import SILENCE, Alignment, PreparedCorpus
from asr.text.lexicon import Lexicon, word_ends

_PRIOR_COUNT = 2.0


def pronunciation_scores(
    corpus: PreparedCorpus, alignment: Alignment, utterances: Sequence[int], lexicon: Lexicon
) -> dict[str, list[float]]:
    """The log probability of each pronunciation, relative to the word's most probable one.

    The probabilities of rare words are smoothed by the shares of first, second, ... pronunciations over all words.

    Args:
        corpus: the prepared corpus.
        alignment: with the best pronunciation of each word.
        utterances: the utterances to count.
        lexicon: all pronunciations, the preferred one first.

    Returns:
        word -> scores (at most 0), in the lexicon's order; words with one pronunciation are left out.
    """
    number = {phone: index for index, phone in enumerate(alignment.phones)}
    silence = number[SILENCE]
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    by_rank: Counter[tuple[int, int]] = Counter()
    for utterance in utterances:
        words = corpus.utterances[utterance].text.split()
        phones = [phone for phone in alignment.of(utterance)[0].tolist() if phone != silence]
        variants = [[tuple(number[phone] for phone in each) for each in lexicon[word]] for word in words]
        ends = word_ends(phones, variants)
        if ends is None:
            continue
        for word, choices, begin, end in zip(words, variants, [0, *ends[:-1]], ends, strict=True):
            spoken = tuple(phones[begin:end])
            if spoken in choices:
                counts[word][choices.index(spoken)] += 1
                by_rank[len(choices), choices.index(spoken)] += 1
    scores: dict[str, list[float]] = {}
    for word, choices_of_word in lexicon.pronunciations.items():
        size = len(choices_of_word)
        if size == 1:
            continue
        prior = np.array([by_rank[size, rank] + 1.0 for rank in range(size)])
        share = np.array([counts[word][rank] for rank in range(size)]) + _PRIOR_COUNT * prior / prior.sum()
        scores[word] = np.log(share / share.max()).tolist()
    return scores
