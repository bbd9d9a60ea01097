"""k2's lattice as it grows, and the search that follows it frame by frame for partial results.

A lattice state is named by (frame, graph state), whatever number k2 gives it in the next chunk's lattice. So the search
goes on where it stopped: only frames that are new are rescored.

Shapes: S lattice states, A lattice arcs, T frames.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.frame_form import lm_chunk_reader
from asr.decoding.search.frame_step import FrameStep
from asr.decoding.search.reading import Chunk, Traces
from asr.decoding.search.search_graph import ArcSet
from asr.decoding.search.token_step import ArcWords
from asr.decoding.search.tokens import Tokens
from asr.graph.artefact import DecodingGraph
from asr.lm.contract import LanguageModel

_FINAL_LABEL = -1


def state_frames(fsa: Any) -> Tensor:
    """How many frames are read before each state of a lattice of one utterance, (S,) int64; k2's own end has 0.

    States come in the order of frames, so that those of a frame end with the last that an arc of the frame before
    leads to.
    """
    values = fsa.arcs.values().cpu().numpy()
    arc_begin = fsa.arcs.row_splits(2).cpu().numpy()
    dst_state = np.where(values[:, 2] == _FINAL_LABEL, -1, values[:, 1])
    frame = np.zeros(len(arc_begin) - 1, dtype=np.int64)
    begin, end, num_frames = 0, min(1, len(frame)), 0
    while begin < end:
        leads_to = dst_state[arc_begin[begin] : arc_begin[end]]
        begin, end = end, max(end, int(leads_to.max()) + 1 if len(leads_to) else end)
        num_frames += 1
        frame[begin:end] = num_frames
    return torch.from_numpy(frame).to(fsa.device)


@dataclass(eq=False)
class _NewFrames:
    """The part of a lattice that was not there before, as the token search walks it."""

    num_states: int
    emitting: ArcSet
    final_score: Tensor
    final_graph_score: Tensor
    epsilon: ArcSet | None = None
    is_pushed: bool = False


class LatticeFollower:
    """The best path through a growing lattice under a language model.

    Each chunk's part of the lattice is pruned by `output_beam` against the best path so far before its words are
    scored. What later frames would have pruned is still followed, so that this is for partial results; the final one
    comes from the final lattice, most of whose words the language model then knows already.

    Args:
        graph: the decoding graph.
        options: scales and beams, as in `rescore_on_the_fly`.
        lm: the language model, or None.
    """

    def __init__(self, graph: DecodingGraph, options: DecodingOptions, lm: LanguageModel | None) -> None:
        self._graph = graph
        self._output_beam = options.output_beam
        self._options = replace(
            options,
            search_beam=math.inf if options.context_beam is None else options.context_beam,
            min_active_states=0,
            word_beam=None,
        )
        self._lm = lm
        self.backtrace = Backtrace(graph.device)
        one = torch.zeros(1, dtype=torch.int64, device=graph.device)
        self._tokens = Tokens.starting(one, one, one if lm is None else lm.start(1))
        self._offset = torch.zeros(1, dtype=torch.float64, device=graph.device)
        self._num_frames = 0
        # The best score of any way to each graph state at the last frame, without the language model.
        self._ahead_state = one
        self._ahead = torch.zeros(1, dtype=torch.float64, device=graph.device)

    def extend(self, fsa: Any) -> None:
        """Follows the frames that are new in k2's lattice (one FSA, with the attribute `arc_idx`)."""
        frame = state_frames(fsa)
        values = fsa.arcs.values().to(torch.int64)
        arc = ((values[:, 2] != _FINAL_LABEL) & (frame[values[:, 0]] >= self._num_frames)).nonzero().squeeze(1)
        if not len(arc):
            return
        graph_state = torch.zeros_like(frame)
        entering = (values[:, 2] != _FINAL_LABEL).nonzero().squeeze(1)
        graph_arc = fsa.arc_idx.to(torch.int64)
        graph_state[values[entering, 1]] = self._graph.dst_state[graph_arc[entering]].to(torch.int64)
        # From here on states are numbered from the first of the last known frame.
        first = int(torch.searchsorted(frame[:-1], self._num_frames))
        src_state, dst_state = values[arc, 0] - first, values[arc, 1] - first
        frame, graph_state = frame[first:-1] - self._num_frames, graph_state[first:-1]
        score = fsa.scores.detach()[arc].double()
        kept, ahead = self._pruned(frame, graph_state, src_state, dst_state, score)
        part = self._searchable(len(frame), src_state[kept], dst_state[kept], score[kept], graph_arc[arc[kept]])
        self._follow(part, graph_state[frame == 0], int(frame[-1]))
        last = (frame == frame[-1]).nonzero().squeeze(1)
        self._tokens.state = graph_state[self._tokens.state]
        self._ahead_state, self._ahead = graph_state[last], ahead[last]
        self._num_frames += int(frame[-1])

    @property
    def held(self) -> Tensor:
        """The language model's contexts that it goes on from, (K,)."""
        return self._tokens.context_idx

    def best(self) -> tuple[Tensor, float, float] | None:
        """Graph arcs (L,), total and language model score of the best unfinished path; None where none is alive."""
        if not len(self._tokens):
            return None
        best = int(self._tokens.score.argmax())
        arc = self.backtrace.path(int(self._tokens.record[best]))
        return arc, float(self._offset + self._tokens.score[best]), float(self._tokens.lm_score[best])

    def _pruned(
        self, frame: Tensor, graph_state: Tensor, src_state: Tensor, dst_state: Tensor, score: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The arcs (A',) within the beam, and the best score to each state (S,)."""
        ahead = torch.full((len(frame),), -torch.inf, dtype=torch.float64, device=score.device)
        starts = (frame == 0).nonzero().squeeze(1)
        known, order = self._ahead_state.sort()
        place = torch.searchsorted(known, graph_state[starts]).clamp(max=len(known) - 1)
        is_known = known[place] == graph_state[starts]
        ahead[starts[is_known]] = self._ahead[order[place[is_known]]]
        behind = torch.where(frame == frame[-1], torch.zeros_like(ahead), torch.full_like(ahead, -torch.inf))
        steps = torch.arange(int(frame[-1]) + 1, device=score.device)
        begin = torch.searchsorted(frame[src_state], steps).tolist()
        for one, two in itertools.pairwise(begin):
            reached = ahead[src_state[one:two]] + score[one:two]
            ahead.scatter_reduce_(0, dst_state[one:two], reached, "amax", include_self=True)
        for one, two in reversed(list(itertools.pairwise(begin))):
            reached = behind[dst_state[one:two]] + score[one:two]
            behind.scatter_reduce_(0, src_state[one:two], reached, "amax", include_self=True)
        through = ahead[src_state] + score + behind[dst_state]
        return (through >= through.max() - self._output_beam).nonzero().squeeze(1), ahead

    def _searchable(
        self,
        num_states: int,
        src_state: Tensor,
        dst_state: Tensor,
        score: Tensor,
        graph_arc: Tensor,
    ) -> _NewFrames:
        graph = self._graph
        num_arcs = torch.bincount(src_state, minlength=num_states)
        emitting = ArcSet(
            torch.cat([num_arcs.new_zeros(1), num_arcs.cumsum(0)]),
            dst_state,
            torch.zeros_like(dst_state),
            score.float(),
            graph_arc,
            ArcWords.of_arcs(graph.word_begin, graph.word_id, graph_arc),
        )
        no_end = torch.full((num_states,), -torch.inf, device=score.device)
        return _NewFrames(num_states, emitting, no_end, no_end)

    def _follow(self, part: _NewFrames, start_state: Tensor, num_frames: int) -> None:
        """Moves the tokens over the new frames; the states of the first one are named by graph states (S',)."""
        known, order = start_state.sort()
        place = torch.searchsorted(known, self._tokens.state).clamp(max=len(known) - 1)
        stays = (known[place] == self._tokens.state).nonzero().squeeze(1)
        tokens = self._tokens.select(stays)
        tokens.state = order[place[stays]]
        reader = None if self._lm is None else lm_chunk_reader("auto", part, self._options, self._lm, False)
        if reader is not None:
            chunk = Chunk(torch.zeros(1, num_frames, 1), torch.tensor([num_frames]), self._offset)
            self._tokens = reader.read(tokens, chunk, Traces(self.backtrace, None, lambda alive: None))
            return
        step = FrameStep(part, self._options, self._lm, self.backtrace, None)
        zero = torch.zeros(1, dtype=torch.int64, device=tokens.state.device)
        for _ in range(num_frames):
            tokens = step.read(tokens, torch.zeros(1, device=zero.device), zero, self._offset)
        self._tokens = tokens
