"""Whole chunks with a language model inside the search, where the host waits once a frame for the search itself.

Frame by frame, the host would wait twice: for the number of candidates, and for the number of tokens that survive. Here
the survivors of a frame lie in arrays as long as its candidates, and only the device knows how many they are: the host
reads that together with the number of the next frame's candidates, and appends the back-pointers then. So it is with
what a lattice needs.

Shapes: N streams, T frames, C tokens, K room for active tokens, A candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from asr.decoding.backend import Chunk, Frame, SearchSink
from asr.decoding.frame import FRAMES_BETWEEN_COLLECTIONS, extended, score_words
from asr.decoding.gpu.frame import CountedSurvivors, TritonFrameBackend, counted_positions
from asr.decoding.interface import DecodingOptions
from asr.decoding.lattice import LatticeRecords
from asr.decoding.search_graph import Searchable
from asr.decoding.tokens import ActiveTokens, Candidates
from asr.kernels.hash_table import marked_positions
from asr.lm.interface import LanguageModel


class _LatticeFrame(NamedTuple):
    """What a lattice needs of a frame, (A,) each, as much of it as counts first.

    Attributes:
        lm_score: float64, the language model's share of the survivors' arcs.
        src: of the losing arcs, the back-pointer before.
        dst: the survivor that each lost to, by its number among them.
        arc, score_gap, losing_lm_score: theirs.
    """

    lm_score: Tensor
    src: Tensor
    dst: Tensor
    arc: Tensor
    score_gap: Tensor
    losing_lm_score: Tensor


@dataclass
class _Counted:
    """Tokens whose number only the device knows.

    Args:
        tokens: (K,), those that count first.
        counts: (1,) int64, how many count; with a lattice (2,), and how many losing arcs.
        graph_arc: (K,) the arcs that they took; `tokens.backpointer` is that before the arc. None where the tokens have
            back-pointers of their own.
        lattice: of the frame that they come from, where one is kept.
    """

    tokens: ActiveTokens
    counts: Tensor
    graph_arc: Tensor | None
    lattice: _LatticeFrame | None = None

    def first(self, counts: list[int], sink: SearchSink) -> ActiveTokens:
        """The tokens that count, with back-pointers of their own; to be called once."""
        num = counts[0]
        parts = (getattr(self.tokens, field.name)[:num] for field in fields(ActiveTokens))
        tokens = ActiveTokens(*parts)
        if self.graph_arc is not None:
            begin = sink.backtrace.num_records
            tokens.backpointer = sink.backtrace.add(tokens.backpointer, self.graph_arc[:num])
            if self.lattice is not None and sink.lattice is not None:
                lm_score, *losing = self.lattice
                src, dst, arc, score_gap, losing_lm_score = (part[: counts[1]] for part in losing)
                lm_scores = lm_score[:num], losing_lm_score
                sink.lattice.add_frame(tokens.stream, (src, begin + dst, arc, score_gap), lm_scores)
        return tokens


class TritonChunkSearchWithLM:
    """`ChunkBackend` with a language model, without input epsilons or a limit on contexts.

    Args:
        graph: on the device of the search.
        options: scales.
        lm: the language model.
        frames: runs the kernels; made for the same graph, with a language model.
    """

    def __init__(
        self, graph: Searchable, options: DecodingOptions, lm: LanguageModel, frames: TritonFrameBackend
    ) -> None:
        self._arcs = graph.emitting
        self._lm_scale = options.lm_scale
        self._lm = lm
        self._frames = frames

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.search`."""
        # Triton launches on the current device.
        with torch.cuda.device_of(chunk.log_prob):
            return self._search(tokens, chunk, sink)

    def _search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        log_prob, num_frames, score_offset = chunk
        num_streams, max_frames, num_columns = log_prob.shape
        flat = log_prob.reshape(-1)
        row_begin = torch.arange(num_streams, device=flat.device) * (max_frames * num_columns)
        ends, finished = set(num_frames.tolist()), []
        alive = _counted(tokens)
        for frame in range(max_frames):
            if frame in ends:
                tokens, ended = _parted(alive, num_frames, frame, sink)
                finished.append(ended)
                if not len(tokens):
                    return ActiveTokens.join(finished)
                alive = _counted(tokens)
            if sink.backtrace.is_due or frame % FRAMES_BETWEEN_COLLECTIONS == 0:
                tokens = alive.first(alive.counts.tolist(), sink)
                sink.collect([*finished, tokens])
                alive = _counted(tokens)
            following = self._advance(alive, Frame(flat, row_begin + frame * num_columns, score_offset), sink)
            if following is None:
                return ActiveTokens.join([*finished, ActiveTokens.empty(flat.device)])
            alive = following
        return ActiveTokens.join([*finished, alive.first(alive.counts.tolist(), sink)])

    def _advance(self, alive: _Counted, frame: Frame, sink: SearchSink) -> _Counted | None:
        """Tokens before a frame -> tokens after it; None where there were none."""
        expansion, counts = self._frames.expand_counted(alive.tokens, alive.counts, frame)
        tokens = alive.first(counts, sink)
        if not len(tokens):
            return None
        candidates = score_words(self._lm, self._lm_scale, tokens, self._arcs, expansion, frame.score_offset)
        survivors = self._frames.survivors_counted(candidates)
        kept = extended(tokens, candidates, survivors.position)
        graph_arc = self._arcs.arc_of(candidates.arc)
        kept_arc = graph_arc.index_select(0, survivors.position)
        if sink.lattice is None:
            return _Counted(kept, survivors.num, kept_arc)
        lattice, num_losing = _lattice_frame(sink.lattice, tokens, candidates, graph_arc, survivors)
        return _Counted(kept, torch.cat([survivors.num, num_losing]), kept_arc, lattice)


def _lattice_frame(
    lattice: LatticeRecords,
    tokens: ActiveTokens,
    candidates: Candidates,
    graph_arc: Tensor,
    survivors: CountedSurvivors,
) -> tuple[_LatticeFrame, Tensor]:
    """What a lattice needs of a frame, and the number of its losing arcs, (1,) int64."""
    assert candidates.lm_score is not None
    winner = survivors.winner.long()
    losing, num_losing = counted_positions(lattice.losing(candidates, winner, survivors.survives))
    won, number = winner.index_select(0, losing), survivors.survives.cumsum(0) - 1
    lm_score = candidates.lm_score - tokens.lm_score.index_select(0, candidates.source)
    score = candidates.score
    frame = _LatticeFrame(
        lm_score.index_select(0, survivors.position),
        tokens.backpointer.index_select(0, candidates.source.index_select(0, losing)),
        number.index_select(0, won),
        graph_arc.index_select(0, losing),
        score.index_select(0, won) - score.index_select(0, losing),
        lm_score.index_select(0, losing),
    )
    return frame, num_losing


def _counted(tokens: ActiveTokens) -> _Counted:
    return _Counted(tokens, torch.full((1,), len(tokens), dtype=torch.int64, device=tokens.score.device), None)


def _parted(alive: _Counted, num_frames: Tensor, frame: int, sink: SearchSink) -> tuple[ActiveTokens, ActiveTokens]:
    """Tokens of streams (N,) that go on, and of those that end before this frame."""
    counts = torch.arange(len(alive.tokens), device=alive.counts.device) < alive.counts[0]
    goes_on = num_frames.index_select(0, alive.tokens.stream) > frame
    *own, num_going = torch.cat([alive.counts, (counts & goes_on).sum(0, keepdim=True)]).tolist()
    tokens = alive.first(own, sink)
    goes_on = goes_on[: len(tokens)]
    going, ending = marked_positions(goes_on, num_going), marked_positions(~goes_on, len(tokens) - num_going)
    return tokens.select(going), tokens.select(ending)
