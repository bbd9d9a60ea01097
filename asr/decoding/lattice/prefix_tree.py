"""Rescoring n-best lists over their prefix tree: each distinct prefix is computed once, a level of the tree at a time.

A level is all prefixes of one length, of all lists; its hidden rows are one batch, and are freed as soon as the next
level's have been computed from them.

Shapes: K sentences, L levels, P prefixes of a level, S state width, M history words.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asr.decoding.first_pass import Hypothesis
from asr.decoding.options import DecodingOptions
from asr.lm.contract import LanguageModel, StatefulNetwork, branched
from asr.lm.rnn.few_words import for_words
from asr.text.vocabulary import BOS_ID, EOS_ID, EPSILON_ID


@dataclass(frozen=True, eq=False)
class Level:
    """The prefixes of one length.

    Args:
        parent: (P,) int64, ascending, the prefix one word shorter, on the level before.
        word_id: (P,) int64, the last word.
        ends: (E,) int64, prefixes that are whole sentences, one entry for each sentence.
        sentence: (E,) int64, these sentences.
    """

    parent: Tensor
    word_id: Tensor
    ends: Tensor
    sentence: Tensor


class PrefixTree:
    """The tree of some sentences; level 0 is the empty prefix.

    Args:
        sentences: word ids, `<s>` and `</s>` left out.
        device: where to work.
    """

    def __init__(self, sentences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        self.num_sentences = len(sentences)
        num_words = np.fromiter(map(len, sentences), np.int64, len(sentences))
        all_words = np.fromiter(itertools.chain.from_iterable(sentences), np.int64, int(num_words.sum()))
        lengths, flat = (torch.from_numpy(numbers).to(device) for numbers in (num_words, all_words))
        longest = int(lengths.max()) if len(sentences) else 0
        words = torch.full((len(sentences), longest), -1, dtype=torch.int64, device=device)
        words[torch.arange(longest, device=device) < lengths.unsqueeze(1)] = flat
        prefix = torch.zeros(len(sentences), dtype=torch.int64, device=device)
        root = torch.zeros(1, dtype=torch.int64, device=device)
        done = (lengths == 0).nonzero().squeeze(1)
        self.levels = [Level(root, root + EPSILON_ID, prefix[done], done)]
        vocabulary_size = int(words.max()) + 1 if words.numel() else 1
        for position in range(longest):
            going = (lengths > position).nonzero().squeeze(1)
            key = prefix[going] * vocabulary_size + words[going, position]
            distinct, inverse = torch.unique(key, return_inverse=True)
            prefix[going] = inverse
            done = (lengths == position + 1).nonzero().squeeze(1)
            parent = torch.div(distinct, vocabulary_size, rounding_mode="floor")
            self.levels.append(Level(parent, distinct % vocabulary_size, prefix[done], done))

    @property
    def num_prefixes(self) -> int:
        """Distinct prefixes, the empty one included: the hidden layer runs once for each."""
        return sum(len(level.parent) for level in self.levels)

    def words(self) -> Tensor:
        """The distinct words, ascending, `</s>` among them, which ends each sentence; (W,)."""
        ids = [level.word_id for level in self.levels[1:]]
        return torch.unique(torch.cat([*ids, torch.full_like(self.levels[0].parent, EOS_ID)]))

    @property
    def most_held(self) -> int:
        """The most prefixes of two levels in a row: so many hidden rows are held at a time."""
        sizes = [len(level.parent) for level in self.levels]
        return max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))


def score_tree(tree: PrefixTree, lm: LanguageModel) -> Tensor:
    """The score of each sentence, `</s>` included, by any language model, one call a level; (K,) float64."""
    device = tree.levels[0].parent.device
    context_idx = lm.start(1)
    score = torch.zeros(1, dtype=torch.float64, device=device)
    total = torch.zeros(tree.num_sentences, dtype=torch.float64, device=device)
    for depth, level in enumerate(tree.levels):
        if depth:
            log_prob, context_idx = lm.score(context_idx[level.parent], level.word_id)
            score = score[level.parent] + log_prob
        if len(level.ends):
            distinct, inverse = torch.unique(level.ends, return_inverse=True)
            total[level.sentence] = (score[distinct] + lm.final(context_idx[distinct]))[inverse]
    return total


@torch.no_grad()
def score_tree_by_network(tree: PrefixTree, network: StatefulNetwork) -> Tensor:
    """The same by a bare network, with no cache at all: two levels of hidden rows are held at a time; (K,) float64."""
    device = tree.levels[0].parent.device
    bos = torch.full((1,), BOS_ID, dtype=torch.int64, device=device)
    network = for_words(network, torch.cat([bos, tree.words()]).unique())
    state = network.step(network.initial_state().unsqueeze(0), bos)
    history = torch.full((1, network.num_history_words), EPSILON_ID, dtype=torch.int64, device=device)
    history[:, :1] = BOS_ID
    score = torch.zeros(1, dtype=torch.float64, device=device)
    total = torch.zeros(tree.num_sentences, dtype=torch.float64, device=device)
    for depth, level in enumerate(tree.levels):
        if depth:
            hidden = state[:, -network.hidden_size :]
            word = level.word_id
            score = score[level.parent] + network.log_prob(hidden[level.parent], history[level.parent], word)
            # Not all prefixes go on, and those that do may go on in many ways.
            inner, before = torch.unique_consecutive(level.parent, return_inverse=True)
            state = branched(network, state.index_select(0, inner), before, word)
            history = torch.cat([word.unsqueeze(1), history[level.parent]], dim=1)[:, : network.num_history_words]
        if len(level.ends):
            distinct, inverse = torch.unique(level.ends, return_inverse=True)
            eos = torch.full_like(distinct, EOS_ID)
            hidden = state[distinct, -network.hidden_size :]
            final = network.log_prob(hidden, history[distinct], eos)
            total[level.sentence] = (score[distinct] + final)[inverse]
    return total


def rescore_n_best(
    lists: Sequence[Sequence[Hypothesis]], lm: LanguageModel, options: DecodingOptions
) -> list[tuple[Hypothesis, ...]]:
    """Gives every hypothesis of every list the language model's score in the place of its own, and sorts each list.

    Args:
        lists: n-best lists, one an utterance.
        lm: the language model, its words numbered as the hypotheses' are.
        options: scales.
    """
    flat = [hypothesis for hypotheses in lists for hypothesis in hypotheses]
    if not flat:
        return [() for _ in lists]
    tree = PrefixTree([hypothesis.word_ids for hypothesis in flat], lm.start(1).device)
    rescored = []
    for hypothesis, lm_score in zip(flat, score_tree(tree, lm).tolist(), strict=True):
        total = hypothesis.total + options.lm_scale * (lm_score - hypothesis.lm_score)
        rescored.append(replace(hypothesis, lm_score=lm_score, total=total))
    results = []
    begin = 0
    for hypotheses in lists:
        part = rescored[begin : begin + len(hypotheses)]
        begin += len(hypotheses)
        results.append(tuple(sorted(part, key=lambda hypothesis: -hypothesis.total)))
    return results
