"""The n best different word sequences of a lattice, each by its best path.

A state of the lattice keeps the n best word histories that lead to it; what follows a state does not depend on them, so
no better sequence is lost. It is the search of on-the-fly rescoring with word histories in the place of a language
model's contexts. A beam keeps it short: scores are pushed, so that a partial path outside it can only end outside it,
and the beam grows until enough sequences end inside.

Shapes: S lattice states, A lattice arcs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from asr.decoding.first_pass import Hypothesis
from asr.decoding.lattice.graph import LatticeGraph
from asr.decoding.lattice.lattice import Lattice
from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.history_tree import HistoryTree
from asr.decoding.search.path import hypothesis_of_path
from asr.decoding.search.token_search import TokenSearch
from asr.errors import AsrError
from asr.graph.artefact import DecodingGraph

_FIRST_BEAM = 4.0
_WIDEST_BEAM = 256.0


def n_best(
    lattice: Lattice,
    graph: DecodingGraph,
    options: DecodingOptions,
    num_hypotheses: int,
    original_frame: Tensor | None = None,
) -> tuple[Hypothesis, ...]:
    """The best word sequences, best first; fewer where the lattice has no more.

    Args:
        lattice: of one utterance; language model scores that it has count.
        graph: the graph that it comes from.
        options: scales.
        num_hypotheses: n.
        original_frame: (T,) int64, where frames were left out what each of the lattice's was before.

    Raises:
        AsrError: n is below 1.
    """
    if num_hypotheses < 1:
        raise AsrError(f"the number of hypotheses is {num_hypotheses}; ask for at least 1.")
    pushed = LatticeGraph(lattice, options, keep_lm_scores=True)
    beam = _FIRST_BEAM
    while True:
        found = _within(lattice, graph, options, pushed, num_hypotheses, beam, original_frame)
        if len(found) >= num_hypotheses or beam == math.inf:
            return tuple(found[:num_hypotheses])
        beam = 2.0 * beam if beam < _WIDEST_BEAM else math.inf


def _within(
    lattice: Lattice,
    graph: DecodingGraph,
    options: DecodingOptions,
    pushed: LatticeGraph,
    num_hypotheses: int,
    beam: float,
    original_frame: Tensor | None,
) -> list[Hypothesis]:
    device = lattice.frame.device
    search_options = replace(
        options,
        search_beam=beam,
        min_active_states=0,
        max_active_states=torch.iinfo(torch.int64).max,
        max_contexts_per_state=num_hypotheses,
        lm_scale=0.0,
        word_beam=None,
    )
    backtrace = Backtrace(device)
    search = TokenSearch(pushed, search_options, HistoryTree(graph.vocabulary, device), backtrace)
    stream = search.start(lattice.start_state)
    num_frames = lattice.num_frames
    search.advance(stream, torch.zeros(1, num_frames, 1, device=device), torch.tensor([num_frames], device=device))
    tokens, offset = search.alive(0)
    total = tokens.score.double() + pushed.final_score[tokens.state] + offset + pushed.start_score[0]
    hypotheses: list[Hypothesis] = []
    seen: set[int] = set()
    # Several states may end the same words; the best of them comes first.
    for position in torch.sort(total, descending=True, stable=True).indices.tolist():
        history = int(tokens.context_idx[position])
        if float(total[position]) == -math.inf or len(hypotheses) == num_hypotheses:
            break
        if history in seen:
            continue
        seen.add(history)
        arc = backtrace.path(int(tokens.record[position]))
        state = int(tokens.state[position])
        lm_score = float(lattice.lm_score[arc].sum(dtype=torch.float64)) + float(lattice.final_lm_score[state])
        final_score = float(lattice.final_graph_score[state])
        scores = float(total[position]), final_score, lm_score
        hypotheses.append(hypothesis_of_path(graph, options, lattice.graph_arc[arc], *scores, original_frame))
    return hypotheses
