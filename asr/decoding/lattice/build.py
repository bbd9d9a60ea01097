"""Lattices from the states and arcs that a search went through.

Shapes: N utterances, T frames, C tokens, S lattice states, A lattice arcs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asr.decoding.lattice.lattice import Lattice, take_ranges
from asr.graph.artefact import DecodingGraph


@dataclass(frozen=True, eq=False)
class LatticeParts:
    """A lattice before its arcs' scores and words are looked up in what was searched.

    Args:
        frame: (S,) int64, ascending.
        utt_idx: (S,) int64.
        start_state: (N,) int64.
        src_state, dst_state: (A,) int64, in any order.
        arc: (A,) int64, the arc of what was searched.
        lm_score: (A,) float32.
        final_graph_score: (S,) float32, -inf where a path may not end.
        final_lm_score: (S,) float32.
    """

    frame: Tensor
    utt_idx: Tensor
    start_state: Tensor
    src_state: Tensor
    dst_state: Tensor
    arc: Tensor
    lm_score: Tensor
    final_graph_score: Tensor
    final_lm_score: Tensor


def lattice_from_graph(parts: LatticeParts, graph: DecodingGraph, log_prob: Tensor) -> Lattice:
    """The lattice of a search through `graph`; log_prob (N, T, C) as the search read them, unscaled."""
    order = torch.sort(parts.src_state, stable=True).indices
    src_state, graph_arc = parts.src_state[order], parts.arc[order]
    token_id = graph.token_id[graph_arc]
    am_score = log_prob[parts.utt_idx[src_state], parts.frame[src_state], token_id.long()]
    words = take_ranges(graph.word_begin, graph_arc)
    return _assemble(parts, order, graph_arc, token_id, am_score, graph.score[graph_arc], words, graph.word_id)


def lattice_from_lattice(parts: LatticeParts, source: Lattice) -> Lattice:
    """The lattice of a search through another, some of whose arcs it has several times."""
    order = torch.sort(parts.src_state, stable=True).indices
    arc = parts.arc[order]
    words = take_ranges(source.word_begin, arc)
    graph_arc, token_id = source.graph_arc[arc], source.token_id[arc]
    return _assemble(
        parts, order, graph_arc, token_id, source.am_score[arc], source.graph_score[arc], words, source.word_id
    )


def _assemble(
    parts: LatticeParts,
    order: Tensor,
    graph_arc: Tensor,
    token_id: Tensor,
    am_score: Tensor,
    graph_score: Tensor,
    words: tuple[Tensor, Tensor],
    word_id: Tensor,
) -> Lattice:
    num_arcs = torch.bincount(parts.src_state, minlength=len(parts.frame))
    word_begin, position = words
    return Lattice(
        frame=parts.frame,
        utt_idx=parts.utt_idx,
        start_state=parts.start_state,
        arc_begin=torch.cat([num_arcs.new_zeros(1), num_arcs.cumsum(0)]),
        dst_state=parts.dst_state[order],
        graph_arc=graph_arc,
        token_id=token_id,
        am_score=am_score,
        graph_score=graph_score,
        lm_score=parts.lm_score[order],
        word_begin=word_begin,
        word_id=word_id[position].to(torch.int64),
        final_graph_score=parts.final_graph_score,
        final_lm_score=parts.final_lm_score,
    )
