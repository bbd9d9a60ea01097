"""Minimum-Bayes-risk decoding: the sentence with the least expected errors instead of the most probable one; and how
probable the words of a sentence are.

Many paths of a lattice may agree on a word that the best path does not have. The sentence that is expected to be
nearest to what was said, by the posteriors of all paths, therefore has fewer word errors (Stolcke et al. 1997, Mangu et
al. 2000, Xu et al. 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.decoding.cpu.mbr import WeightedLattice, least_risk, nearest_path, sentence_posteriors
from asr.decoding.interface import DecodeResult, DecodingOptions, Hypothesis
from asr.decoding.lattice import Lattice, arc_posteriors
from asr.decoding.nbest import hypotheses_of_lattice
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import jit

_MAX_ROUNDS = 20


def with_least_risk(decoded: DecodeResult, graph: DecodingGraph, options: DecodingOptions) -> DecodeResult:
    """The result with the path of least expected errors as its best; unchanged without `mbr_scale` or a lattice.

    Args:
        decoded: of an utterance.
        graph: the graph that was searched.
        options: scales.
    """
    if options.mbr_scale is None or decoded.lattice is None or decoded.best is None:
        return decoded
    found = path_of_least_risk(decoded.lattice, graph, options, options.mbr_scale, decoded.best, decoded.original_frame)
    return replace(decoded, hypotheses=(found, *decoded.hypotheses[1:]))


def path_of_least_risk(
    lattice: Lattice,
    graph: DecodingGraph,
    options: DecodingOptions,
    scale: float,
    best: Hypothesis,
    original_frame: Tensor | None = None,
) -> Hypothesis:
    """The path whose words are nearest to the sentence of least expected errors; the best one of such paths.

    Args:
        lattice: of one utterance; its language model scores, if any, count.
        graph: the graph that was searched.
        options: scales of the parts of a score.
        scale: of the total scores whose posteriors count.
        best: the best path, where the search for the sentence begins. It is returned if its sentence is the one.
        original_frame: (T,) int64, the original frame of each decoded one; None if no frames were skipped.
    """
    lattice = lattice.to("cpu")
    weighted, distinct = weighted_lattice(lattice, options, scale)
    if not len(distinct):
        return best
    # The path of a search can have a word that the pruned lattice lacks; any other word may then stand for it.
    sentence = np.searchsorted(distinct.numpy(), best.word_ids).clip(max=len(distinct) - 1)
    found, _ = (jit(least_risk) or least_risk)(weighted, sentence, len(distinct), _MAX_ROUNDS)
    if distinct[torch.from_numpy(found)].tolist() == list(best.word_ids):
        return best
    totals = (lattice.arc_total(options), lattice.final_total(options))
    path, total = (jit(nearest_path) or nearest_path)(weighted, found, *(part.numpy() for part in totals))
    arc, num_arcs = torch.from_numpy(path), torch.tensor([len(path)])
    total = torch.tensor([total], dtype=torch.float64)
    return hypotheses_of_lattice(lattice, graph, options, (arc, num_arcs), total, original_frame)[0]


def posteriors_of_sentences(
    lattice: Lattice, options: DecodingOptions, scale: float, sentences: Sequence[Sequence[int]]
) -> list[NDArray[np.float64]]:
    """The share of a lattice's paths that have each word of a sentence in its place.

    Every path is aligned to the sentence, so that words count as the same although their times differ.

    Args:
        lattice: of one utterance.
        options: scales of the parts of a score.
        scale: of the total scores whose posteriors count.
        sentences: word ids (W,) of each.

    Returns:
        (W,) of each sentence, from 0 to 1.
    """
    weighted, distinct = weighted_lattice(lattice.to("cpu"), options, scale)
    place = {word_id: number for number, word_id in enumerate(distinct.tolist())}
    loop = jit(sentence_posteriors) or sentence_posteriors
    numbers = (np.array([place.get(word_id, len(place)) for word_id in one], np.int64) for one in sentences)
    return [loop(weighted, one, len(place)).clip(0.0, 1.0) for one in numbers]


def weighted_lattice(lattice: Lattice, options: DecodingOptions, scale: float) -> tuple[WeightedLattice, Tensor]:
    """The lattice of one utterance, on the CPU, with posteriors at a scale, and its distinct words (V,), ascending."""
    distinct, word = torch.unique(lattice.word_id, return_inverse=True)
    posterior = arc_posteriors(lattice, options, scale)
    reached = torch.zeros(lattice.num_states, dtype=torch.float64)
    reached.index_add_(0, lattice.dst_state, posterior)
    reached[lattice.start_state] = 1.0
    leaving = torch.zeros_like(reached).index_add_(0, lattice.src_state(), posterior)
    ending = (reached - leaving).clamp(min=0.0)
    arrays = (lattice.arc_begin, lattice.dst_state, lattice.word_begin, word, posterior, reached, ending)
    return WeightedLattice(int(lattice.start_state[0]), *(part.numpy() for part in arrays)), distinct


def warm_up() -> None:
    """Compiles or loads the loops, with a lattice of two paths."""
    arrays = (torch.tensor(part).numpy() for part in ([0, 2, 2], [1, 1], [0, 1, 2], [0, 1]))
    weights = (torch.tensor(part, dtype=torch.float64).numpy() for part in ([0.4, 0.6], [1.0, 1.0], [0.0, 1.0]))
    lattice, sentence = WeightedLattice(0, *arrays, *weights), torch.tensor([0]).numpy()
    scores = (torch.zeros(2, dtype=torch.float64).numpy() for _ in range(2))
    for function, arguments in (
        (least_risk, (2, _MAX_ROUNDS)),
        (nearest_path, scores),
        (sentence_posteriors, (2,)),
    ):
        if (loop := jit(function)) is not None:
            loop(lattice, sentence, *arguments)
