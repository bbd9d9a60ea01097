"""Minimum-Bayes-risk decoding: the sentence with the least expected errors instead of the most probable one; and how
probable the words of a sentence are.

Many paths of a lattice may agree on a word that the best path does not have. The sentence that is expected to be
nearest to what was said, by the posteriors of all paths, therefore has fewer word errors (Stolcke et al. 1997, Mangu et
al. 2000, Xu et al. 2011).

Shapes: S states, A arcs, V distinct words of the lattice, W words of a sentence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.decoding.cpu.mbr import (
    Rows,
    ScoredLattice,
    least_risk,
    nearest_path,
    rows_of,
    score_lattice,
    sentence_posteriors,
)
from asr.decoding.interface import DecodingOptions, Hypothesis
from asr.decoding.lattice import Lattice
from asr.decoding.nbest import hypotheses_of_lattice
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import arrays_of, jit

_MAX_ROUNDS = 20


class Weighted(NamedTuple):
    """A lattice at a scale: the posteriors of its arcs (A,), and its rows."""

    posterior: NDArray[np.float64]
    rows: Rows


class PathPosteriors:
    """The posteriors of the paths of a lattice. What several scales and sentences have in common is computed once.

    Args:
        lattice: of one utterance; its language model scores, if any, count.
        options: scales of the parts of a score.
    """

    def __init__(self, lattice: Lattice, options: DecodingOptions) -> None:
        self._lattice = lattice.to("cpu")
        self._options = options
        self._at_scale: dict[float, Weighted] = {}
        self._shares: dict[tuple[float, tuple[int, ...]], NDArray[np.float64]] = {}

    def of_sentence(self, scale: float, word_ids: Sequence[int]) -> NDArray[np.float64]:
        """The share of the paths that have each word of a sentence in its place, (W,), from 0 to 1.

        Every path is aligned to the sentence, so that words count as the same although their times differ.

        Args:
            scale: of the total scores whose posteriors count.
            word_ids: the sentence.
        """
        key = scale, tuple(word_ids)
        if key not in self._shares:
            distinct = self.scored[1]
            number, num_words = self._numbers(word_ids), len(distinct)
            is_known = np.append(distinct, -1)[number] == word_ids
            loop = jit(sentence_posteriors) or sentence_posteriors
            self._shares[key] = loop(self.at(scale).rows, np.where(is_known, number, num_words), num_words)
        return self._shares[key].clip(0.0, 1.0)

    def path_of_least_risk(
        self, graph: DecodingGraph, scale: float, best: Hypothesis, original_frame: Tensor | None = None
    ) -> Hypothesis:
        """The path whose words are nearest to the sentence of least expected errors; the best one of such paths.

        Args:
            graph: the graph that was searched.
            scale: of the total scores whose posteriors count.
            best: the best path, where the search for the sentence begins. It is returned if its sentence is the one.
            original_frame: (T,) int64, the original frame of each decoded one; None if no frames were skipped.
        """
        distinct = self.scored[1]
        if not len(distinct):
            return best
        sentence = self._sentence_of_least_risk(scale, best.word_ids)
        if tuple(distinct[sentence].tolist()) == best.word_ids:
            return best
        arc, total = self._nearest_path(scale, sentence)
        paths = arc, torch.tensor([len(arc)])
        return hypotheses_of_lattice(self._lattice, graph, self._options, paths, total, original_frame)[0]

    def at(self, scale: float) -> Weighted:
        """The lattice with posteriors by the total scores times a scale."""
        if scale not in self._at_scale:
            posterior, *rows = (jit(rows_of) or rows_of)(self.scored[0], float(scale))
            self._at_scale[scale] = Weighted(posterior, Rows(*rows))
        return self._at_scale[scale]

    @functools.cached_property
    def scored(self) -> tuple[ScoredLattice, NDArray[np.int64]]:
        """The lattice with total scores, and its distinct words (V,), ascending."""
        lattice, options = self._lattice, self._options
        arcs = arrays_of(lattice.start_state, lattice.arc_begin, lattice.dst_state, lattice.word_begin)
        word_id, *scores = arrays_of(lattice.word_id, lattice.am_score, lattice.graph_score, lattice.lm_score)
        final_scores = arrays_of(lattice.final_graph_score, lattice.final_lm_score)
        scales = options.am_scale, options.graph_scale, options.lm_scale, options.word_insertion_penalty
        loop: Any = jit(score_lattice) or score_lattice
        arguments = tuple(scores), tuple(final_scores), tuple(map(float, scales))
        *others, distinct = loop(arcs[3], word_id, *arguments)
        return ScoredLattice(*arcs, *others), distinct

    def _sentence_of_least_risk(self, scale: float, word_ids: Sequence[int]) -> NDArray[np.int64]:
        """The numbers of the words, (W,); word_ids are the sentence to begin with."""
        distinct = self.scored[1]
        # The path of a search can have a word that the pruned lattice lacks; any other word may then stand for it.
        begin = self._numbers(word_ids).clip(max=len(distinct) - 1)
        loop = jit(least_risk) or least_risk
        sentence, _, shares = loop(self.at(scale).rows, begin, len(distinct), _MAX_ROUNDS)
        # They are often asked for next.
        self._shares[scale, tuple(distinct[sentence].tolist())] = shares
        found: NDArray[np.int64] = sentence
        return found

    def _nearest_path(self, scale: float, sentence: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The arcs (L,) of the path nearest to the numbers of a sentence (W,), and its total score, (1,) float64."""
        loop = jit(nearest_path) or nearest_path
        path, total = loop(self.scored[0], self.at(scale).posterior, sentence)
        return torch.from_numpy(path), torch.tensor([total], dtype=torch.float64)

    def _numbers(self, word_ids: Sequence[int]) -> NDArray[np.int64]:
        """The number of each word among the distinct ones of the lattice; of others, that of the next larger word."""
        return np.searchsorted(self.scored[1], np.asarray(word_ids, np.int64))


def warm_up() -> None:
    """Compiles or loads the loops, with a lattice of two paths."""
    none = torch.zeros(2)
    lattice = Lattice(
        frame=torch.tensor([0, 1]),
        utt_idx=torch.tensor([0, 0]),
        start_state=torch.tensor([0]),
        arc_begin=torch.tensor([0, 2, 2]),
        dst_state=torch.tensor([1, 1]),
        graph_arc=torch.tensor([0, 1]),
        token_id=torch.tensor([1, 1], dtype=torch.int32),
        am_score=none,
        graph_score=none,
        lm_score=none,
        word_begin=torch.tensor([0, 1, 2]),
        word_id=torch.tensor([4, 5]),
        final_graph_score=torch.tensor([-torch.inf, 0.0]),
        final_lm_score=none,
    )
    posteriors = PathPosteriors(lattice, DecodingOptions())
    posteriors._nearest_path(1.0, posteriors._sentence_of_least_risk(1.0, [4]))
    posteriors.of_sentence(1.0, [5])
