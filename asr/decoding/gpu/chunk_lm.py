"""The search of whole chunks with a language model, in which the host waits for the device once per frame.

A search frame by frame waits twice: for the number of candidates, and for the number of survivors. Here, the survivors
of a frame are in arrays as long as those of its candidates, and at first only the device knows their number. The host
reads it together with the number of the next frame's candidates, and only then appends backpointers and the records of
a lattice. Queries to the language model may wait as well.

Shapes: N streams, T frames, C tokens, K room for active tokens, A candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from asr.decoding.backend import ActiveTokens, Candidates, Frame, Searchable
from asr.decoding.chunk_backend import Chunk, SearchSink
from asr.decoding.frame import FRAMES_BETWEEN_COLLECTIONS, extended, score_words
from asr.decoding.gpu.frame import CountedSurvivors, TritonFrameBackend, counted_positions
from asr.decoding.lattice_records import LatticeRecords
from asr.decoding.settings import DecodingOptions
from asr.kernels.hash_table import marked_positions
from asr.lm.interface import LanguageModel


class _LatticeFrame(NamedTuple):
    """The records of a frame for a lattice, (A,) each, with valid entries first.

    Attributes:
        lm_score: float64, language model scores of the survivors' arcs.
        src: the backpointer before each losing arc.
        dst: the survivor that each losing arc lost to, as an index among the survivors.
        arc, score_gap, losing_lm_score: of the losing arcs.
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
        tokens: (K,), valid ones first.
        counts: (1,) int64, the number of valid tokens; with a lattice (2,), then also the number of losing arcs.
        graph_arc: (K,) the last arc of each token, if `tokens.backpointer` is still the backpointer before that arc;
            None if the tokens have their own backpointers.
        lattice: records of the frame for a lattice, if one is kept.
    """

    tokens: ActiveTokens
    counts: Tensor
    graph_arc: Tensor | None
    lattice: _LatticeFrame | None = None

    def first(self, counts: list[int], sink: SearchSink) -> ActiveTokens:
        """The valid tokens, with their own backpointers, which are added to the sink; to be called once."""
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
    """A `ChunkBackend` with a language model, without input epsilons or a limit on contexts.

    Args:
        graph: on the device of the search.
        options: scales.
        lm: the language model.
        frames: runs the kernels; created for the same graph, with a language model.
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
        """Tokens before a frame -> tokens after it, or None if there were none."""
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
    """The records of a frame for a lattice, and the number of its losing arcs, (1,) int64."""
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
    """Splits tokens into those of streams that continue, and those of streams that end before this frame."""
    counts = torch.arange(len(alive.tokens), device=alive.counts.device) < alive.counts[0]
    goes_on = num_frames.index_select(0, alive.tokens.stream) > frame
    *own, num_going = torch.cat([alive.counts, (counts & goes_on).sum(0, keepdim=True)]).tolist()
    tokens = alive.first(own, sink)
    goes_on = goes_on[: len(tokens)]
    going, ending = marked_positions(goes_on, num_going), marked_positions(~goes_on, len(tokens) - num_going)
    return tokens.select(going), tokens.select(ending)
