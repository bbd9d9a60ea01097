"""Lattices: the alternatives that a first pass kept, with every score apart.

Shapes: N utterances, S states, A arcs, W words.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from asr.decoding.options import DecodingOptions


@dataclass(frozen=True, eq=False)
class Lattice:
    """An acyclic graph for each of N utterances; every arc reads one frame. Scores are natural logs, unscaled.

    States are sorted by frame, over all utterances together, arcs by the state they leave.

    Args:
        frame: (S,) int64, frames read before the state.
        utt_idx: (S,) int64, the utterance it belongs to.
        start_state: (N,) int64.
        arc_begin: (S + 1,) int64; arcs of state s are arc_begin[s] : arc_begin[s + 1].
        dst_state: (A,) int64.
        graph_arc: (A,) int64, the decoding graph's arc.
        token_id: (A,) int32, the acoustic token.
        am_score, graph_score, lm_score: (A,) float32; lm_score is 0 before rescoring.
        word_begin: (A + 1,) int64; words of arc a are word_id[word_begin[a] : word_begin[a + 1]].
        word_id: (W,) int64.
        final_graph_score: (S,) float32, -inf where a path may not end.
        final_lm_score: (S,) float32.
    """

    frame: Tensor
    utt_idx: Tensor
    start_state: Tensor
    arc_begin: Tensor
    dst_state: Tensor
    graph_arc: Tensor
    token_id: Tensor
    am_score: Tensor
    graph_score: Tensor
    lm_score: Tensor
    word_begin: Tensor
    word_id: Tensor
    final_graph_score: Tensor
    final_lm_score: Tensor

    @property
    def num_states(self) -> int:
        return len(self.frame)

    @property
    def num_arcs(self) -> int:
        return len(self.dst_state)

    @property
    def num_utts(self) -> int:
        return len(self.start_state)

    @property
    def num_frames(self) -> int:
        """Frames of the longest utterance."""
        return int(self.frame[-1]) if len(self.frame) else 0

    def frames_of_utts(self) -> Tensor:
        """Frames of each utterance, in the order of the start states, (N,) int64."""
        utt_idx = self.utt_idx[self.start_state]
        num_frames = torch.zeros(int(utt_idx.max()) + 1, dtype=torch.int64, device=utt_idx.device)
        return num_frames.scatter_reduce_(0, self.utt_idx, self.frame, "amax")[utt_idx]

    def src_state(self) -> Tensor:
        """The state that each arc leaves, (A,) int64."""
        return torch.repeat_interleave(self.arc_begin[1:] - self.arc_begin[:-1], output_size=self.num_arcs)

    def num_words(self) -> Tensor:
        """The number of words on each arc, (A,) int64."""
        return self.word_begin[1:] - self.word_begin[:-1]

    def arc_total(self, options: DecodingOptions) -> Tensor:
        """The scaled score of each arc, (A,) float64."""
        return (
            options.am_scale * self.am_score.double()
            + options.graph_scale * self.graph_score.double()
            + options.lm_scale * self.lm_score.double()
            + options.word_insertion_penalty * self.num_words().double()
        )

    def final_total(self, options: DecodingOptions) -> Tensor:
        """The scaled score of ending at each state, (S,) float64, -inf where a path may not end."""
        may_end = self.final_graph_score > -torch.inf
        score = options.graph_scale * self.final_graph_score.double() + options.lm_scale * self.final_lm_score.double()
        return torch.where(may_end, score, torch.full_like(score, -torch.inf))

    def arc_frame_begin(self) -> list[int]:
        """For each frame its first arc, then the number of arcs: T + 1 numbers."""
        frames = torch.arange(self.num_frames + 1, device=self.frame.device)
        return [int(begin) for begin in self.arc_begin[torch.searchsorted(self.frame, frames)].tolist()]

    def to(self, device: torch.device | str) -> Lattice:
        """The same lattice on another device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def select(self, kept_state: Tensor, kept_arc: Tensor) -> Lattice:
        """Some states and arcs; start states must stay. kept_state (S,) bool, kept_arc (A,) bool."""
        state = kept_state.nonzero().squeeze(1)
        number = kept_state.cumsum(0) - 1
        src_state = self.src_state()
        kept_arc = kept_arc & kept_state[src_state] & kept_state[self.dst_state]
        arc = kept_arc.nonzero().squeeze(1)
        word_begin, position = take_ranges(self.word_begin, arc)
        num_arcs = torch.bincount(number[src_state[arc]], minlength=len(state))
        return Lattice(
            frame=self.frame[state],
            utt_idx=self.utt_idx[state],
            start_state=number[self.start_state],
            arc_begin=torch.cat([num_arcs.new_zeros(1), num_arcs.cumsum(0)]),
            dst_state=number[self.dst_state[arc]],
            graph_arc=self.graph_arc[arc],
            token_id=self.token_id[arc],
            am_score=self.am_score[arc],
            graph_score=self.graph_score[arc],
            lm_score=self.lm_score[arc],
            word_begin=word_begin,
            word_id=self.word_id[position],
            final_graph_score=self.final_graph_score[state],
            final_lm_score=self.final_lm_score[state],
        )

    def split(self) -> list[Lattice]:
        """One lattice an utterance, in the order of the start states."""
        arc_utt = self.utt_idx[self.src_state()]
        parts = []
        for position, utt_idx in enumerate(self.utt_idx[self.start_state].tolist()):
            one = replace(self, start_state=self.start_state[position : position + 1])
            part = one.select(self.utt_idx == utt_idx, arc_utt == utt_idx)
            parts.append(replace(part, utt_idx=torch.zeros_like(part.utt_idx)))
        return parts


def take_ranges(begin: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of a ragged array: begin (A + 1,), chosen (K,) -> its own begins (K + 1,) and positions (W',)."""
    first = begin.index_select(0, chosen)
    length = begin.index_select(0, chosen + 1) - first
    new_begin = torch.zeros(len(chosen) + 1, dtype=torch.int64, device=begin.device)
    new_begin[1:] = length.cumsum(0)
    row = torch.repeat_interleave(length)
    position = torch.arange(len(row), device=begin.device) - new_begin.index_select(0, row)
    return new_begin, position + first.index_select(0, row)


def join(lattices: list[Lattice]) -> Lattice:
    """Several lattices as one, utterances numbered on."""
    if len(lattices) == 1:
        return lattices[0]
    num_states = [lattice.num_states for lattice in lattices]
    state_offset = [sum(num_states[:i]) for i in range(len(lattices))]
    utt_offset = [sum(lattice.num_utts for lattice in lattices[:i]) for i in range(len(lattices))]
    frame = torch.cat([lattice.frame for lattice in lattices])
    order = torch.sort(frame, stable=True).indices
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=order.device)

    def shifted(parts: list[Tensor], offsets: list[int]) -> Tensor:
        return torch.cat([part + offset for part, offset in zip(parts, offsets, strict=True)])

    src_state = number[
        torch.cat([part.src_state() + offset for part, offset in zip(lattices, state_offset, strict=True)])
    ]
    arc = torch.sort(src_state, stable=True).indices
    num_arcs = torch.bincount(src_state, minlength=len(order))
    length = torch.cat([lattice.num_words() for lattice in lattices])
    word_begin, position = take_ranges(torch.cat([length.new_zeros(1), length.cumsum(0)]), arc)

    def joined(name: str, chosen: Tensor) -> Tensor:
        return torch.cat([getattr(lattice, name) for lattice in lattices])[chosen]

    return Lattice(
        frame=frame[order],
        utt_idx=shifted([lattice.utt_idx for lattice in lattices], utt_offset)[order],
        start_state=number[shifted([lattice.start_state for lattice in lattices], state_offset)],
        arc_begin=torch.cat([num_arcs.new_zeros(1), num_arcs.cumsum(0)]),
        dst_state=number[shifted([lattice.dst_state for lattice in lattices], state_offset)][arc],
        graph_arc=joined("graph_arc", arc),
        token_id=joined("token_id", arc),
        am_score=joined("am_score", arc),
        graph_score=joined("graph_score", arc),
        lm_score=joined("lm_score", arc),
        word_begin=word_begin,
        word_id=joined("word_id", position),
        final_graph_score=joined("final_graph_score", order),
        final_lm_score=joined("final_lm_score", order),
    )
