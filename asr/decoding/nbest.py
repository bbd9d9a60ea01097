"""n-best lists: the best distinct sentences of a lattice, and their rescoring with a prefix tree.

Rescoring computes each distinct prefix once, one level of the tree at a time. A level consists of all prefixes of one
length, of all lists, which the language model gets in one call.

Shapes: K sentences, L arcs of paths, P prefixes of a level, E sentences that end there, S lattice states, A lattice
arcs, R runs of equal tokens.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asr.decoding.backend import expand
from asr.decoding.cpu.nbest import SentenceLattice, best_sentences
from asr.decoding.interface import Hypothesis
from asr.decoding.lattice import Lattice, best_to_end
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import jit
from asr.lm.interface import LanguageModel
from asr.text.symbols import EPSILON_ID


def n_best(
    lattice: Lattice,
    graph: DecodingGraph,
    options: DecodingOptions,
    num_hypotheses: int,
    original_frame: Tensor | None = None,
) -> tuple[Hypothesis, ...]:
    """The best distinct word sequences, best first, each with its best path; fewer if the lattice has no more.

    Follows Mohri and Riley (2002), see `best_sentences`.

    Args:
        lattice: of one utterance; its language model scores, if any, count.
        graph: the graph that was searched.
        options: scales.
        num_hypotheses: n.
        original_frame: (T,) int64, the original frame of each decoded one; None if no frames were skipped.

    Raises:
        AsrError: n is below 1.
    """
    if num_hypotheses < 1:
        raise AsrError(f"the number of hypotheses is {num_hypotheses}; ask for at least 1.")
    lattice = lattice.to("cpu")
    arc_total, final_total = lattice.arc_total(options), lattice.final_total(options)
    searched = _one_word_an_arc(lattice, arc_total, final_total, best_to_end(lattice, arc_total, final_total))
    search = jit(best_sentences) or best_sentences
    total, *paths = search(searched, int(lattice.start_state[0]), min(num_hypotheses, sys.maxsize))
    path_begin, arc = map(torch.from_numpy, paths)
    num_arcs = path_begin[1:] - path_begin[:-1]
    return hypotheses_of_lattice(lattice, graph, options, (arc, num_arcs), torch.from_numpy(total), original_frame)


def hypotheses_of_lattice(
    lattice: Lattice,
    graph: DecodingGraph,
    options: DecodingOptions,
    paths: tuple[Tensor, Tensor],
    total: Tensor,
    original_frame: Tensor | None = None,
) -> tuple[Hypothesis, ...]:
    """The hypotheses of K paths of a lattice, all at once; `hypothesis_of_path` makes one.

    Args:
        lattice: of one utterance, on the CPU.
        graph: the graph that was searched.
        options: scales.
        paths: arc (L,) int64, the concatenated arcs of all paths, and the number of each path's, (K,) int64.
        total: (K,) float64, the scores of the paths.
        original_frame: (T,) int64, the original frame of each decoded one; None if no frames were skipped.
    """
    arc, num_arcs = paths
    graph = graph.to("cpu")
    begin = num_arcs.cumsum(0) - num_arcs
    path = torch.repeat_interleave(num_arcs)
    position = torch.arange(len(arc))

    def frame(place: Tensor) -> Tensor:
        own = place - begin.index_select(0, path.index_select(0, place))
        if original_frame is None or not len(original_frame):
            return own
        return original_frame.index_select(0, own.clamp(max=len(original_frame) - 1))

    # The start state, and then the state after each arc.
    state = torch.cat([lattice.start_state, lattice.dst_state.index_select(0, arc)])
    end_state = state[torch.where(num_arcs > 0, num_arcs.cumsum(0), 0)]
    lm_score = torch.zeros(len(total), dtype=torch.float64)
    lm_score.index_add_(0, path, lattice.lm_score.index_select(0, arc).double())
    lm_score += lattice.final_lm_score[end_state].double()
    owner, word = expand(lattice.word_begin, arc)
    ends = lattice.sentence_ends(graph)[arc].nonzero().squeeze(1)
    words_before = torch.searchsorted(owner, ends) - torch.searchsorted(owner, begin[path[ends]])
    sentence_ends, num_ends = words_before.tolist(), torch.bincount(path[ends], minlength=len(num_arcs)).tolist()
    arc = lattice.graph_arc.index_select(0, arc)  # from here on, the arcs of the graph
    token_id = graph.token_id.index_select(0, arc).to(torch.int64)
    # A word ends with the last token that is not blank before the next word or the end of the path.
    next_owner = torch.cat([owner[1:], owner.new_full((1,), len(arc))])[: len(owner)]
    next_owner = torch.minimum(next_owner, (begin + num_arcs)[path[owner]])
    last_spoken = torch.where(token_id > 0, position, torch.full_like(position, -1))
    last_spoken = last_spoken.cummax(0).values if len(arc) else last_spoken
    end = torch.where(next_owner > owner, last_spoken[next_owner - 1], owner)
    start_frames, end_frames = frame(owner).tolist(), (frame(torch.maximum(owner, end)) + 1).tolist()
    num_words = torch.bincount(path[owner], minlength=len(num_arcs)).tolist()
    # The path is part of the key, so that no run extends over two paths.
    _, run_length = torch.unique_consecutive(path * (len(graph.tokens) + 1) + token_id, return_counts=True)
    run_last = run_length.cumsum(0) - 1
    spoken = (token_id.index_select(0, run_last) > 0).nonzero().squeeze(1)
    run_last, run_length = run_last.index_select(0, spoken), run_length.index_select(0, spoken)
    runs = _shared_runs(token_id.index_select(0, run_last), frame(run_last - run_length + 1), frame(run_last) + 1)
    num_runs = torch.bincount(path.index_select(0, run_last), minlength=len(num_arcs)).tolist()
    graph_score = lattice.final_graph_score[end_state].double()
    graph_score.index_add_(0, path, graph.score.index_select(0, arc).double())
    rest = options.graph_scale * graph_score + options.lm_scale * lm_score
    rest = rest + options.word_insertion_penalty * torch.tensor(num_words, dtype=torch.float64)
    am_score = (total - rest) / options.am_scale
    word_ids = lattice.word_id[word].tolist()
    words = [graph.vocabulary.words[word_id] for word_id in word_ids]
    columns = (am_score, graph_score, lm_score, total)
    hypotheses: list[Hypothesis] = []
    first, first_run, first_end = 0, 0, 0
    for am, of_graph, lm, own_total, own_words, own_runs, own_ends in zip(
        *(column.tolist() for column in columns), num_words, num_runs, num_ends, strict=True
    ):
        own = slice(first, first + own_words)
        hypotheses.append(
            Hypothesis(
                word_ids=tuple(word_ids[own]),
                words=tuple(words[own]),
                am_score=am,
                graph_score=of_graph,
                lm_score=lm,
                total=own_total,
                start_frames=tuple(start_frames[own]),
                end_frames=tuple(end_frames[own]),
                phones=tuple(runs[first_run : first_run + own_runs]),
                sentence_ends=tuple(sentence_ends[first_end : first_end + own_ends]),
            )
        )
        first, first_run, first_end = first + own_words, first_run + own_runs, first_end + own_ends
    return tuple(hypotheses)


def _shared_runs(token: Tensor, begin: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    """Runs (R,) as tuples. Equal runs are one object, as few differ, and making objects takes most of the time."""
    base = int(end.max()) + 1 if len(end) else 1
    distinct, number = torch.unique((token * base + begin) * base + end, return_inverse=True)
    objects = np.empty(len(distinct), dtype=object)
    objects[:] = [(key // base // base, key // base % base, key % base) for key in distinct.tolist()]
    runs: list[tuple[int, int, int]] = objects[number.numpy()].tolist()
    return runs


def _one_word_an_arc(lattice: Lattice, arc_total: Tensor, final_total: Tensor, ahead: Tensor) -> SentenceLattice:
    """Converts a lattice so that each arc has at most one word.

    An arc with several words becomes a chain of arcs over new states, the first of which has its score.
    """
    num_words = lattice.num_words()
    extra = (num_words - 1).clamp(min=0)
    num_extra, num_states, num_arcs = int(extra.sum()), lattice.num_states, lattice.num_arcs
    word = torch.full((num_arcs,), -1, dtype=torch.int64)
    has_words = num_words > 0
    word[has_words] = lattice.word_id[lattice.word_begin[:-1][has_words]]
    arc_begin, dst_state = lattice.arc_begin, lattice.dst_state
    arc_of = torch.arange(num_arcs)
    if num_extra:
        # The new states of an arc are adjacent, in the order of its words; each has one arc.
        owner = torch.repeat_interleave(extra)
        first = extra.cumsum(0) - extra
        position = torch.arange(num_extra) - first[owner]
        is_last = position == extra[owner] - 1
        new_dst = torch.where(is_last, dst_state[owner], num_states + torch.arange(num_extra) + 1)
        new_word = lattice.word_id[lattice.word_begin[owner] + position + 1]
        # The chain's score is on its first arc, so ahead of a new state is what is ahead of the whole arc's end.
        ahead = torch.cat([ahead, ahead[dst_state[owner]]])
        dst_state = torch.cat([torch.where(extra > 0, num_states + first, dst_state), new_dst])
        word, arc_of = torch.cat([word, new_word]), torch.cat([arc_of, torch.full((num_extra,), -1)])
        arc_begin = torch.cat([arc_begin, num_arcs + 1 + torch.arange(num_extra)])
        arc_total = torch.cat([arc_total, arc_total.new_zeros(num_extra)])
        final_total = torch.cat([final_total, torch.full((num_extra,), -torch.inf, dtype=torch.float64)])
    arrays = (arc_begin, dst_state, word, arc_total, final_total, ahead, arc_of)
    return SentenceLattice(*(part.contiguous().numpy() for part in arrays))


@dataclass(frozen=True, eq=False)
class Level:
    """The prefixes of one length.

    Args:
        parent: (P,) int64, ascending, the prefix one word shorter, on the previous level.
        word_id: (P,) int64, the last word.
        ends: (E,) int64, for each sentence of this length, its prefix.
        sentence: (E,) int64, the numbers of these sentences.
    """

    parent: Tensor
    word_id: Tensor
    ends: Tensor
    sentence: Tensor


class PrefixTree:
    """The prefix tree of sentences; level 0 is the empty prefix.

    Args:
        sentences: word ids without `<s>` and `</s>`.
        device: device of the tree.
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
        """Number of distinct prefixes including the empty one; a network's hidden layer runs once for each."""
        return sum(len(level.parent) for level in self.levels)


def score_tree(tree: PrefixTree, lm: LanguageModel) -> Tensor:
    """The score of each sentence including `</s>`, with one language model call per level; (K,) float64."""
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


def rescore_n_best(
    lists: Sequence[Sequence[Hypothesis]], lm: LanguageModel | None, options: DecodingOptions, weight: float = 1.0
) -> list[tuple[Hypothesis, ...]]:
    """Interpolates the language model score of every hypothesis with that of `lm`, and sorts each list.

    Args:
        lists: n-best lists, one per utterance.
        lm: the language model, with the word ids of the hypotheses; None scores all sentences 0.
        options: scales.
        weight: weight of `lm`'s score; the hypothesis's own score has the weight 1 - `weight`.
    """
    flat = [hypothesis for hypotheses in lists for hypothesis in hypotheses]
    if not flat:
        return [() for _ in lists]
    scores = [0.0] * len(flat)
    if lm is not None and weight:  # 0 * -inf would be nan
        tree = PrefixTree([hypothesis.word_ids for hypothesis in flat], lm.start(1).device)
        scores = score_tree(tree, lm).tolist()
    rescored = []
    for hypothesis, score in zip(flat, scores, strict=True):
        lm_score = (1.0 - weight) * hypothesis.lm_score + weight * score
        total = hypothesis.total + options.lm_scale * (lm_score - hypothesis.lm_score)
        rescored.append(replace(hypothesis, lm_score=lm_score, total=total))
    results = []
    begin = 0
    for hypotheses in lists:
        part = rescored[begin : begin + len(hypotheses)]
        begin += len(hypotheses)
        results.append(tuple(sorted(part, key=lambda hypothesis: -hypothesis.total)))
    return results
