"""Lattices as k2 gives them, turned into ours.

Shapes: N utterances, T frames, C tokens, S states of ours, A arcs of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asr.decoding.lattice.build import LatticeParts, lattice_from_graph
from asr.decoding.lattice.lattice import Lattice
from asr.graph.artefact import DecodingGraph

_FINAL_LABEL = -1


def lattice_from_k2(fsas: Any, order: list[int], graph: DecodingGraph, log_prob: Tensor) -> tuple[Lattice, list[int]]:
    """Takes k2's final arcs off and looks all scores up anew, each by itself.

    Args:
        fsas: FsaVec of `intersect_dense_pruned`, with the attributes `arc_idx` and `frame`.
        order: for each of its FSAs the utterance.
        graph: the graph that was searched.
        log_prob: (N, T, C) of all utterances, unscaled.

    Returns:
        the lattice of all utterances that have a complete path, and which these are, in the order of its start states.
    """
    device = log_prob.device
    values = fsas.arcs.values().to(torch.int64)
    state_begin = fsas.arcs.row_splits(1).to(torch.int64)
    num_states = int(state_begin[-1])
    src_state = fsas.arcs.row_ids(2).to(torch.int64)
    dst_state = src_state + values[:, 1] - values[:, 0]
    is_final = values[:, 2] == _FINAL_LABEL
    inner = (~is_final).nonzero().squeeze(1)
    # A state's frame is told by the arcs around it; k2's own final states go.
    frame = torch.zeros(num_states, dtype=torch.int64, device=device)
    frame[dst_state[inner]] = fsas.frame[inner].to(torch.int64) + 1
    graph_state = torch.full((num_states,), graph.start_state, dtype=torch.int64, device=device)
    graph_arc = fsas.arc_idx[inner].to(torch.int64)
    graph_state[dst_state[inner]] = graph.dst_state[graph_arc].to(torch.int64)
    stays = torch.ones(num_states, dtype=torch.bool, device=device)
    stays[dst_state[is_final]] = False
    final_score = torch.full((num_states,), -torch.inf, device=device)
    ends = src_state[is_final]
    # k2's pass in chunks lets every state end; those of the graph that may not are no ends.
    ends = ends[graph.final_score[graph_state[ends]] > -torch.inf]
    final_score[ends] = graph.final_score[graph_state[ends]]
    num_of_fsa = state_begin[1:] - state_begin[:-1]
    has_path = torch.zeros(len(order), dtype=torch.bool, device=device)
    fsa_of = fsas.arcs.row_ids(1).to(torch.int64)
    has_path[fsa_of[ends]] = True
    stays &= has_path[fsa_of]
    kept = stays.nonzero().squeeze(1)
    by_frame = kept[torch.sort(frame[kept], stable=True).indices]
    if not bool(has_path.all()):
        inner = inner[stays[src_state[inner]]]
        graph_arc = fsas.arc_idx[inner].to(torch.int64)
    number = torch.full((num_states,), -1, dtype=torch.int64, device=device)
    number[by_frame] = torch.arange(len(by_frame), device=device)
    utt_of_fsa = torch.tensor(order, dtype=torch.int64, device=device)
    used = (has_path & (num_of_fsa > 0)).nonzero().squeeze(1)
    parts = LatticeParts(
        frame=frame[by_frame],
        utt_idx=utt_of_fsa[fsa_of[by_frame]],
        start_state=number[state_begin[:-1][used]],
        src_state=number[src_state[inner]],
        dst_state=number[dst_state[inner]],
        arc=graph_arc,
        lm_score=torch.zeros(len(inner), device=device),
        final_graph_score=final_score[by_frame],
        final_lm_score=torch.zeros(len(by_frame), device=device),
    )
    return lattice_from_graph(parts, graph, log_prob), utt_of_fsa[used].tolist()
