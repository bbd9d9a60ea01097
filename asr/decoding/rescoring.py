"""Rescoring of a lattice by a language model, frame by frame as the lattice grows.

A lattice state stands for all word histories that lead to it. Here it is split by history: what is alive at a frame
is (lattice state, context index), and the words of all utterances' next frames that have any are scored in one call.
With no bound set the result is that of scoring every path of the lattice by itself.

Shapes: N utterances, S lattice states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asr.decoding.backtrace import Backtrace, best_arcs, endings_of
from asr.decoding.cpu.lattice_search import search_by_loop
from asr.decoding.interface import DecodingOptions, Hypothesis
from asr.decoding.lattice import Lattice, LatticeRecords, join, lattice_from_lattice, prune
from asr.decoding.lattice_graph import LatticeGraph
from asr.decoding.paths import hypothesis_of_path
from asr.decoding.token_search import TokenSearch
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.interface import LanguageModel


@dataclass(frozen=True, eq=False)
class LatticePath:
    """The best path of an utterance's lattice.

    Args:
        graph_arc: (L,) int64, its arcs in the decoding graph, on the host or where that is.
        total: its scaled score.
        final_graph_score: graph score of ending there.
        lm_score: the language model's share, `final` included, unscaled.
        lattice: the lattice, where asked for; with a language model its states are split by history, and it has the
            model's scores.
    """

    graph_arc: Tensor
    total: float
    final_graph_score: float
    lm_score: float
    lattice: Lattice | None

    def hypothesis(self, graph: DecodingGraph, options: DecodingOptions, frame_of: Tensor | None) -> Hypothesis:
        """The path, spelled; arguments as of `hypothesis_of_path`."""
        scores = (self.total, self.final_graph_score, self.lm_score)
        return hypothesis_of_path(graph, options, self.graph_arc, *scores, frame_of)


def rescore_on_the_fly(
    lattices: list[Lattice],
    options: DecodingOptions,
    lm: LanguageModel,
    keep_lattice: bool = False,
) -> list[LatticePath | None]:
    """The same for lattices of one utterance each, on one device."""
    return rescore_joint(join(lattices), options, lm, keep_lattice) if lattices else []


def rescore_joint(
    joint: Lattice,
    options: DecodingOptions,
    lm: LanguageModel,
    keep_lattice: bool = False,
    held: Tensor | None = None,
) -> list[LatticePath | None]:
    """The best path of each utterance with the language model's scores in the place of those that the lattice has.

    Args:
        joint: a lattice of any number of utterances.
        options: scales; `context_beam`, `max_contexts_per_state` and `max_active_states` bound what is followed.
        lm: the language model, its words numbered as the lattice's are.
        keep_lattice: whether to return lattices too, pruned by `output_beam`.
        held: as of `TokenSearch`.

    Returns:
        For each start state the best path; None where there is none.
    """
    num_utts = joint.num_utts
    if not num_utts:
        return []
    graph = LatticeGraph(joint, options)
    device = joint.frame.device
    unpruned = replace(
        options,
        search_beam=math.inf if options.context_beam is None else options.context_beam,
        min_active_states=0,
        word_beam=None,
    )
    backtrace = Backtrace(device, collects=not keep_lattice)
    records = LatticeRecords(num_utts, unpruned) if keep_lattice else None
    alive = search_by_loop(graph, joint, unpruned, lm, backtrace) if records is None else None
    if alive is None:
        search = TokenSearch(graph, unpruned, lm, backtrace, records, held=held)
        stream = search.start(joint.start_state)
        search.advance(stream, torch.zeros(num_utts, joint.num_frames, 1, device=device), joint.frames_of_utts())
        alive = search.alive_in_all()
    endings = endings_of(graph, unpruned, lm, alive)
    rescored: list[Lattice | None] = [None] * num_utts
    if records is not None:
        parts = records.collected(backtrace, endings)
        rescored = list(prune(lattice_from_lattice(parts, joint), options, options.output_beam).split())
    graph_arc, start_score = joint.graph_arc.cpu(), graph.start_score.tolist()
    return [
        LatticePath(graph_arc[arc], before + ending.total, ending.graph_score, ending.lm_score, lattice)
        if ending.reached_final
        else None
        for ending, arc, before, lattice in zip(
            endings, best_arcs(endings, backtrace), start_score, rescored, strict=True
        )
    ]
