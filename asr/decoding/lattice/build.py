"""Lattices from the states and arcs that a search went through.

Shapes: N utterances, T frames, C tokens, S lattice states, A lattice arcs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from asr.decoding.lattice.build_kernel import build_pruned
from asr.decoding.lattice.kernel import order_by_source
from asr.decoding.lattice.lattice import Lattice, take_ranges
from asr.decoding.lattice.scores import prune
from asr.decoding.options import DecodingOptions
from asr.graph.artefact import DecodingGraph
from asr.lm.compiled_loop import compiled_loop


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


def pruned_lattice(
    parts: LatticeParts, graph: DecodingGraph, log_prob: Tensor, options: DecodingOptions, compiled: bool
) -> Lattice:
    """`lattice_from_graph`, pruned by the output beam; by a loop, if `compiled`, where numba is and on a CPU."""
    loop = compiled_loop(build_pruned, reorders_sums=False) if compiled and log_prob.device.type == "cpu" else None
    if loop is None or not log_prob.numel():
        return prune(lattice_from_graph(parts, graph, log_prob), options, options.output_beam)
    found = loop(
        tuple(getattr(parts, field.name).numpy() for field in fields(parts)),
        tuple(part.numpy() for part in (graph.token_id, graph.score, graph.word_begin, graph.word_id)),
        log_prob.numpy(),
        (options.am_scale, options.graph_scale, options.lm_scale, options.word_insertion_penalty),
        options.output_beam,
    )
    return Lattice(*map(torch.from_numpy, found))


def lattice_from_graph(parts: LatticeParts, graph: DecodingGraph, log_prob: Tensor) -> Lattice:
    """The lattice of a search through `graph`; log_prob (N, T, C) as the search read them, unscaled."""
    order, arc_begin = _by_source(parts)
    src_state, graph_arc = parts.src_state[order], parts.arc[order]
    token_id = graph.token_id[graph_arc]
    am_score = log_prob[parts.utt_idx[src_state], parts.frame[src_state], token_id.long()]
    words = take_ranges(graph.word_begin, graph_arc)
    graph_score = graph.score[graph_arc]
    return _assemble(parts, order, arc_begin, graph_arc, token_id, am_score, graph_score, words, graph.word_id)


def lattice_from_lattice(parts: LatticeParts, source: Lattice) -> Lattice:
    """The lattice of a search through another, some of whose arcs it has several times."""
    order, arc_begin = _by_source(parts)
    arc = parts.arc[order]
    words = take_ranges(source.word_begin, arc)
    graph_arc, token_id = source.graph_arc[arc], source.token_id[arc]
    am_score, graph_score = source.am_score[arc], source.graph_score[arc]
    return _assemble(parts, order, arc_begin, graph_arc, token_id, am_score, graph_score, words, source.word_id)


def _by_source(parts: LatticeParts) -> tuple[Tensor, Tensor]:
    """The arcs (A,) in the order of the states that they leave, and arc_begin (S + 1,)."""
    src_state, num_states = parts.src_state, len(parts.frame)
    loop = compiled_loop(order_by_source, reorders_sums=False) if src_state.device.type == "cpu" else None
    if loop is not None:
        order, arc_begin = loop(src_state.numpy(), num_states)
        return torch.from_numpy(order), torch.from_numpy(arc_begin)
    num_arcs = torch.bincount(src_state, minlength=num_states)
    return torch.sort(src_state, stable=True).indices, torch.cat([num_arcs.new_zeros(1), num_arcs.cumsum(0)])


def _assemble(
    parts: LatticeParts,
    order: Tensor,
    arc_begin: Tensor,
    graph_arc: Tensor,
    token_id: Tensor,
    am_score: Tensor,
    graph_score: Tensor,
    words: tuple[Tensor, Tensor],
    word_id: Tensor,
) -> Lattice:
    word_begin, position = words
    return Lattice(
        frame=parts.frame,
        utt_idx=parts.utt_idx,
        start_state=parts.start_state,
        arc_begin=arc_begin,
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
