"""Minimum-Bayes-risk decoding: the sentence with the least expected errors instead of the most probable one; and how
probable the words of a sentence are.

Many paths of a lattice may agree on a word that the best path does not have. The sentence that is expected to be
nearest to what was said, by the posteriors of all paths, therefore has fewer word errors (Stolcke et al. 1997, Mangu et
al. 2000, Xu et al. 2011).

Each word of a sentence is compared with each state of the lattice, so that time and memory grow with the square of the
length. Recordings of many minutes are therefore cut where all paths meet.

Shapes: S states, A arcs, V distinct words of the lattice, W words of a sentence.
"""

from __future__ import annotations

import bisect
import functools
import itertools
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
from asr.decoding.interface import Hypothesis
from asr.decoding.lattice import Lattice
from asr.decoding.nbest import hypotheses_of_lattice
from asr.decoding.settings import DecodingOptions
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
        original_frame: (T,) int64, the original frame of each decoded one; None if no frames were skipped.
        frames_at_least: a longer lattice is cut into parts of at least so many frames, where it has a frame with a
            single state. Words are then not compared across such a frame.
    """

    def __init__(
        self,
        lattice: Lattice,
        options: DecodingOptions,
        original_frame: Tensor | None = None,
        frames_at_least: int = 2000,
    ) -> None:
        self._lattice = lattice.to("cpu")
        self._options = options
        self._original_frame = original_frame
        self._cuts = _cuts(self._lattice, frames_at_least)
        bounds = itertools.pairwise([0, *self._cuts, self._lattice.num_frames])
        self._parts = [PartPosteriors(self._lattice.between(*bound), options) for bound in bounds]

    def of_hypothesis(self, scale: float, hypothesis: Hypothesis) -> NDArray[np.float64]:
        """The share of the paths that have each word of a hypothesis in its place, (W,), from 0 to 1.

        Every path is aligned to the sentence, so that words count as the same although their times differ.

        Args:
            scale: of the total scores whose posteriors count.
            hypothesis: a path, with its own times.
        """
        sentences = self._divided(hypothesis)
        return np.concatenate(
            [part.of_sentence(scale, words) for part, words in zip(self._parts, sentences, strict=True)]
        )

    def path_of_least_risk(self, graph: DecodingGraph, scale: float, best: Hypothesis) -> Hypothesis:
        """The path whose words are nearest to the sentence of least expected errors; the best one of such paths.

        Args:
            graph: the graph that was searched.
            scale: of the total scores whose posteriors count.
            best: the best path, where the search for the sentence begins. It is returned if its sentence is the one.
        """
        sentences = self._divided(best)
        found = [part.sentence_of_least_risk(scale, words) for part, words in zip(self._parts, sentences, strict=True)]
        if found == sentences:
            return best
        paths = [part.nearest_path(scale, words) for part, words in zip(self._parts, found, strict=True)]
        arc_of_frame = self._lattice.arc_frame_begin
        arc = torch.cat([arcs + arc_of_frame[cut] for (arcs, _), cut in zip(paths, [0, *self._cuts], strict=True)])
        total = torch.tensor([sum(total for _, total in paths)], dtype=torch.float64)
        path = arc, torch.tensor([len(arc)])
        return hypotheses_of_lattice(self._lattice, graph, self._options, path, total, self._original_frame)[0]

    def _divided(self, hypothesis: Hypothesis) -> list[tuple[int, ...]]:
        """The word ids of a hypothesis in each part."""
        cuts = self._cuts if self._original_frame is None else self._original_frame[self._cuts].tolist()
        places = [bisect.bisect_left(hypothesis.start_frames, cut) for cut in cuts]
        bounds = itertools.pairwise([0, *places, len(hypothesis.word_ids)])
        return [hypothesis.word_ids[begin:end] for begin, end in bounds]


def _cuts(lattice: Lattice, frames_at_least: int) -> list[int]:
    """The frames at which a lattice is cut: all paths pass their only state."""
    if lattice.num_frames <= frames_at_least:
        return []
    frame, num_states = torch.unique_consecutive(lattice.frame, return_counts=True)
    cuts, last = [], 0
    for candidate in frame[num_states == 1].tolist():
        if min(candidate - last, lattice.num_frames - candidate) >= frames_at_least:
            cuts.append(candidate)
            last = candidate
    return cuts


class PartPosteriors:
    """`PathPosteriors` of a lattice that is not cut, or of one of its parts.

    Args:
        lattice: on the CPU.
        options: see `PathPosteriors`.
    """

    def __init__(self, lattice: Lattice, options: DecodingOptions) -> None:
        self._lattice = lattice
        self._options = options
        self._at_scale: dict[float, Weighted] = {}
        self._shares: dict[tuple[float, tuple[int, ...]], NDArray[np.float64]] = {}

    def of_sentence(self, scale: float, word_ids: Sequence[int]) -> NDArray[np.float64]:
        """As `PathPosteriors.of_hypothesis`, (W,)."""
        key = scale, tuple(word_ids)
        if key not in self._shares:
            distinct = self.scored[1]
            number, num_words = self._numbers(word_ids), len(distinct)
            is_known = np.append(distinct, -1)[number] == word_ids
            loop = jit(sentence_posteriors) or sentence_posteriors
            self._shares[key] = loop(self.at(scale).rows, np.where(is_known, number, num_words), num_words)
        return self._shares[key].clip(0.0, 1.0)

    def sentence_of_least_risk(self, scale: float, word_ids: Sequence[int]) -> tuple[int, ...]:
        """The word ids of the sentence of least expected errors; word_ids are the sentence to begin with."""
        distinct = self.scored[1]
        if not len(distinct):
            return tuple(word_ids)
        # The path of a search can have a word that the pruned lattice lacks; any other word may then stand for it.
        begin = self._numbers(word_ids).clip(max=len(distinct) - 1)
        loop = jit(least_risk) or least_risk
        sentence, _, shares = loop(self.at(scale).rows, begin, len(distinct), _MAX_ROUNDS)
        found = tuple(distinct[sentence].tolist())
        # They are often asked for next.
        self._shares[scale, found] = shares
        return found

    def nearest_path(self, scale: float, word_ids: Sequence[int]) -> tuple[Tensor, float]:
        """The arcs (L,) of the path nearest to a sentence of words of the lattice, and its total score."""
        loop = jit(nearest_path) or nearest_path
        path, total = loop(self.scored[0], self.at(scale).posterior, self._numbers(word_ids))
        return torch.from_numpy(path), total

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
        *others, distinct = loop(arcs[3], word_id, tuple(scores), tuple(final_scores), scales)
        return ScoredLattice(*arcs, *others), distinct

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
    posteriors = PartPosteriors(lattice, DecodingOptions())
    posteriors.nearest_path(1.0, posteriors.sentence_of_least_risk(1.0, [4]))
    posteriors.of_sentence(1.0, [5])
