"""k2's pruned intersection in chunks, and rescoring of its growing lattice for partial results.

At each chunk boundary, `OnlineDenseIntersecter` of k2 1.23.4 drops states without a final arc, and prunes by
`output_beam` against the best path. Here, every state has a final arc. States that are not final in the graph get a
partial one, with the score 0 while the stream continues and -1e10 at its end. Nothing is pruned at boundaries, only in
the final lattice. Results therefore do not depend on the chunks, unless the search beam is so narrow that complete
paths are lost; with chunks, a few more of them are found.

The intersecter returns the lattice of the whole utterance for each chunk, so time and memory grow with its length
(0.64 s of audio took 0.02 s after 3 s of speech and 0.07 s after 15 s on AN4's graph). The endpoint rules' `longest`
limits them. `asr.decoding.online` does not have this growth. Later versions of k2 have an argument `allow_partial`,
whose default is the behavior of 1.23.4; they are not tested.

Lattice states are identified by (frame, graph state), because k2 may renumber them in the next chunk's lattice. The
rescoring can thus continue where it stopped, so that only new frames are rescored.

Shapes: N streams of a call, T frames of a chunk, C tokens, S lattice states, A lattice arcs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.decoding.backend import ActiveTokens, ArcSet, ArcWords, SearchGraph
from asr.decoding.backtrace import Backtrace, SpelledPath, hypothesis_of_path
from asr.decoding.chunk_backend import Chunk, SearchSink
from asr.decoding.interface import DecodeResult, Hypothesis, LogProbCheck, check_chunks, skip_blanks
from asr.decoding.k2 import FINAL_LABEL, WIDEST_BEAM, lattice_from_k2, require_k2, state_limits, to_k2
from asr.decoding.lattice import Lattice, best_path
from asr.decoding.online import EndpointRules
from asr.decoding.rescoring import LatticePath, rescore_lattice, rescoring_options
from asr.decoding.selection import select_backend
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.combine import mapped_to
from asr.lm.interface import LanguageModel


def state_frames(fsa: Any) -> Tensor:
    """The number of frames read before each state of a lattice of one utterance, (S,) int64; 0 for k2's final state.

    States are ordered by frame, so the last state of a frame is the last one that an arc from the previous frame leads
    to.
    """
    values = fsa.arcs.values().cpu().numpy()
    arc_begin = fsa.arcs.row_splits(2).cpu().numpy()
    dst_state = np.where(values[:, 2] == FINAL_LABEL, -1, values[:, 1])
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
    """The new part of a lattice, as a graph for the token search."""

    num_states: int
    emitting: ArcSet
    final_score: Tensor
    final_graph_score: Tensor
    epsilon: ArcSet | None = None
    is_pushed: bool = False


class OnlineLatticeRescorer:
    """The best path through a growing lattice under a language model.

    Each chunk's part of the lattice is pruned by `output_beam` against the best path so far, before its words are
    scored. Paths that later frames would prune are still followed, so this is only for partial results. The final
    result comes from the final lattice; by then the language model has already scored most of its words.

    Args:
        graph: the decoding graph.
        options: scales and beams, as in `rescore_lattice`.
        lm: the language model, or None.
    """

    def __init__(self, graph: DecodingGraph, options: DecodingOptions, lm: LanguageModel | None) -> None:
        self._graph = graph
        self._output_beam = options.output_beam
        self._options = rescoring_options(options)
        self._lm = lm
        self.backtrace = Backtrace(graph.device)
        one = torch.zeros(1, dtype=torch.int64, device=graph.device)
        self._tokens = ActiveTokens.initial(one, one, one if lm is None else lm.start(1))
        self._score_offset = torch.zeros(1, dtype=torch.float64, device=graph.device)
        self._num_frames = 0
        # The best score of all paths to each graph state at the last frame, without the language model.
        self._ahead_state = one
        self._ahead = torch.zeros(1, dtype=torch.float64, device=graph.device)

    def extend(self, fsa: Any, frame: Tensor) -> None:
        """Searches the new frames of k2's lattice (one FSA, with the attribute `arc_idx`); frame (S,) of its states."""
        values = fsa.arcs.values().to(torch.int64)
        arc = ((values[:, 2] != FINAL_LABEL) & (frame[values[:, 0]] >= self._num_frames)).nonzero().squeeze(1)
        if not len(arc):
            return
        graph_state = torch.zeros_like(frame)
        entering = (values[:, 2] != FINAL_LABEL).nonzero().squeeze(1)
        graph_arc = fsa.arc_idx.to(torch.int64)
        graph_state[values[entering, 1]] = self._graph.dst_state[graph_arc[entering]].to(torch.int64)
        # From here on, states are counted from the first state of the last known frame.
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

    def lose(self) -> None:
        """Ends the search, because no path survived in k2's lattice."""
        self._tokens = ActiveTokens.empty(self._graph.device)

    @property
    def held(self) -> Tensor:
        """The language model contexts of the active tokens, (K,)."""
        return self._tokens.context_idx

    def best(self) -> tuple[Tensor, float, float] | None:
        """Graph arcs (L,), total and language model score of the best unfinished path; None without active tokens."""
        if not len(self._tokens):
            return None
        best = int(self._tokens.score.argmax())
        arc = self.backtrace.path(int(self._tokens.backpointer[best]))
        return arc, float(self._score_offset + self._tokens.score[best]), float(self._tokens.lm_score[best])

    def _pruned(
        self, frame: Tensor, graph_state: Tensor, src_state: Tensor, dst_state: Tensor, score: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The arcs (A',) within the beam, and the best score of the paths to each state (S,)."""
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
            ahead.scatter_reduce_(0, dst_state[one:two], reached, "amax")
        for one, two in reversed(list(itertools.pairwise(begin))):
            reached = behind[dst_state[one:two]] + score[one:two]
            behind.scatter_reduce_(0, src_state[one:two], reached, "amax")
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
            dst_state.int(),
            torch.zeros_like(dst_state, dtype=torch.int32),
            score.float(),
            graph_arc,
            ArcWords.of_arcs(graph.word_begin, graph.word_id, graph_arc),
        )
        no_end = torch.full((num_states,), -torch.inf, dtype=torch.float32, device=score.device)
        return _NewFrames(num_states, emitting, no_end, no_end)

    def _follow(self, part: _NewFrames, start_state: Tensor, num_frames: int) -> None:
        """Advances the tokens over the new frames; start_state (S',) are the graph states at the first frame."""
        known, order = start_state.sort()
        place = torch.searchsorted(known, self._tokens.state).clamp(max=len(known) - 1)
        stays = (known[place] == self._tokens.state).nonzero().squeeze(1)
        tokens = self._tokens.select(stays)
        tokens.state = order[place[stays]]
        search = select_backend(part, self._options, self._lm)
        log_prob = torch.zeros(1, num_frames, 1, dtype=torch.float32, device=tokens.state.device)
        chunk = Chunk(log_prob, torch.tensor([num_frames], device=log_prob.device), self._score_offset)
        # The backpointers of a lattice are few, and are never collected.
        self._tokens = search.search(tokens, chunk, SearchSink(self.backtrace, None, lambda parts: None))


_NOT_AN_END = -1e10


@dataclass
class _Stream:
    """State of a stream.

    Args:
        follower: the search for partial results.
        state: k2's state; None before the first chunk.
        log_prob: kept frames, (T, C) each. k2 gets the last one only at the end, because it must know that it is last.
        num_given: number of these frames that k2 has processed.
        is_lost: whether no path survived, so that k2 gets no further frames.
        frames: their numbers before skipping.
        num_frames: total number of frames read.
        after_blank: as for `skip_blanks`.
    """

    follower: OnlineLatticeRescorer
    state: Any = None
    log_prob: list[Tensor] = field(default_factory=list)
    num_given: int = 0
    is_lost: bool = False
    frames: list[Tensor] = field(default_factory=list)
    num_frames: int = 0
    after_blank: bool = False


class K2StreamingDecoder:
    """As `asr.decoding.online.StreamingDecoder`, but k2 does the search, and a language model rescores its lattice.

    Args:
        graph: decoding graph without input epsilons.
        options: beams and scales.
        lm: language model that rescores the growing lattice, or None.
        endpoint_rules: rules for when a speaker has finished; `longest` also limits time and memory.
        keep_lattice: whether final results have a lattice, if k2 found a complete path.
        inputs: kind of the input of `advance`, a key of `asr.decoding.interface.INPUTS`.

    Raises:
        AsrError: k2 cannot be imported, the graph has input epsilons, or `inputs` is not a key of `INPUTS`.
    """

    def __init__(
        self,
        graph: DecodingGraph,
        options: DecodingOptions | None = None,
        lm: LanguageModel | None = None,
        endpoint_rules: EndpointRules | None = None,
        keep_lattice: bool = False,
        *,
        inputs: str = "log_probs",
    ) -> None:
        self._k2 = k2 = require_k2(graph)
        self.graph = graph
        self.options = options if options is not None else DecodingOptions()
        self._rules = endpoint_rules if endpoint_rules is not None else EndpointRules()
        self._lm = None if lm is None else mapped_to(lm, graph.vocabulary)
        self._keep_lattice = keep_lattice
        self._check = LogProbCheck(len(graph.tokens), inputs)
        self._fallback = TokenPassingDecoder(graph, self.options, inputs="scores")
        prepared = SearchGraph(graph, self.options)
        is_partial = prepared.final_score == -math.inf
        final_score = prepared.final_score.masked_fill(is_partial, 0.0)
        fsa = to_k2(replace(graph, score=prepared.emitting.score, final_score=final_score))
        self._fsa = k2.create_fsa_vec([fsa])
        # k2 keeps no copy, so changes of scores here affect the intersecter.
        self._arcs = self._fsa.arcs.values()
        self._partial = ((self._arcs[:, 2] == FINAL_LABEL) & is_partial[self._arcs[:, 0].long()]).nonzero().squeeze(1)
        self._intersecter = k2.OnlineDenseIntersecter(
            self._fsa,
            1,
            min(self.options.search_beam, WIDEST_BEAM),
            WIDEST_BEAM,
            **state_limits(graph, self.options),
        )
        self._streams: dict[int, _Stream] = {}

    def start(self, num_streams: int = 1) -> list[int]:
        """Opens streams and returns their numbers."""
        streams: list[int] = []
        while len(streams) < num_streams:
            number = next(number for number in range(len(self._streams) + 1) if number not in self._streams)
            self._streams[number] = _Stream(OnlineLatticeRescorer(self.graph, self.options, self._lm))
            streams.append(number)
        return streams

    def advance(self, streams: Sequence[int], log_prob: Tensor, num_frames: Tensor) -> None:
        """Reads one chunk for each of some open streams; arguments as for `StreamingDecoder.advance`.

        Raises:
            AsrError: a stream is not open or occurs twice, or the log-probabilities are invalid.
        """
        check_chunks(streams, num_frames)
        opened = [self._open(stream) for stream in streams]
        self._check(log_prob, num_frames)
        log_prob = log_prob.detach().to(self.graph.device, torch.float32)
        for row, one in enumerate(opened):
            self._take(one, log_prob[row, : int(num_frames[row])])
            num_ready = sum(map(len, one.log_prob)) - 1
            if num_ready > one.num_given and (found := self._intersect(one, num_ready)) is not None:
                one.follower.extend(*found)

    def partial(self, stream: int) -> Hypothesis | None:
        """The best path so far, without the last frame; None without active tokens."""
        found = self._open(stream).follower.best()
        if found is None:
            return None
        arc, total, lm_score = found
        frame_of = self._frame_of(self._open(stream))
        return hypothesis_of_path(self.graph, self.options, arc, total, 0.0, lm_score, frame_of)

    def num_settled_words(self, stream: int) -> int:
        """Always 0, because no word is certain before the end."""
        self._open(stream)
        return 0

    def is_endpoint(self, stream: int) -> bool:
        """Whether the speaker seems to have finished."""
        one = self._open(stream)
        found = one.follower.best()
        path = SpelledPath()
        if found is not None:
            path = path.followed_by(self.graph, found[0], self._frame_of(one))
        return self._rules.ends(path, one.num_frames)

    def finalize(self, stream: int) -> DecodeResult:
        """Ends a stream -> its best complete path, or the best unfinished one if none is complete."""
        one = self._open(stream)
        del self._streams[stream]
        frame_of = self._frame_of(one)
        num_kept = sum(map(len, one.log_prob))
        path = self._best(one) if num_kept else None
        if path is not None:
            hypothesis = path.hypothesis(self.graph, self.options, frame_of)
            return DecodeResult((hypothesis,), True, num_kept, path.lattice, frame_of)
        empty = torch.zeros(0, len(self.graph.tokens), dtype=torch.float32, device=self.graph.device)
        log_prob = torch.cat([empty, *one.log_prob])
        found = self._fallback.search(log_prob[None], torch.tensor([num_kept]), self._lm, held=self._held())
        # Blanks have been skipped already, so the fallback has skipped no more frames.
        return replace(found, original_frame=None if frame_of is None else frame_of[None].cpu()).result(0)

    def _open(self, stream: int) -> _Stream:
        if stream not in self._streams:
            raise AsrError(f"stream {stream} is not open; `start` opens streams and `finalize` closes them.")
        return self._streams[stream]

    def _take(self, one: _Stream, log_prob: Tensor) -> None:
        """Stores a chunk (T, C), without the frames to be skipped."""
        num_frames = len(log_prob)
        if self.options.blank_skip_threshold is not None:
            after_blank = torch.tensor([one.after_blank], device=log_prob.device)
            counts = torch.tensor([num_frames], device=log_prob.device)
            kept, _, frame, ends_blank = skip_blanks(
                log_prob[None], counts, self.options.blank_skip_threshold, after_blank
            )
            log_prob, one.after_blank = kept[0], bool(ends_blank[0])
            one.frames.append(frame[0] + one.num_frames)
        one.num_frames += num_frames
        one.log_prob.append(log_prob)

    def _frame_of(self, one: _Stream) -> Tensor | None:
        return torch.cat(one.frames) if one.frames else None

    def _intersect(self, one: _Stream, end: int) -> tuple[Any, Tensor] | None:
        """Passes the frames up to `end` to k2 -> its lattice of all frames, and the frame of each state.

        None if no path survived. k2 then continues from states of earlier frames, or from the start.
        """
        if one.is_lost:
            return None
        log_prob = torch.cat(one.log_prob)
        chunk = log_prob[None, one.num_given : end] * self.options.am_scale
        segment = torch.tensor([[0, 0, end - one.num_given]], dtype=torch.int32)
        fsa, (one.state,) = self._intersecter.decode(self._k2.DenseFsaVec(chunk.contiguous(), segment), [one.state])
        one.num_given = end
        frame = state_frames(fsa)
        if not len(frame) or int(frame.max()) < end:
            one.is_lost = True
            one.follower.lose()
            return None
        return fsa, frame

    def _final_lattice(self, one: _Stream) -> Lattice | None:
        """Passes the last frame to k2 -> the pruned lattice of the stream."""
        scores = self._arcs[self._partial, 3].clone()
        self._arcs[self._partial, 3] = torch.tensor([_NOT_AN_END]).view(torch.int32).to(scores.device)
        try:
            found = self._intersect(one, sum(map(len, one.log_prob)))
        finally:
            self._arcs[self._partial, 3] = scores
        if found is None:
            return None
        fsa, frame = found
        fsa.frame = frame[fsa.arcs.values()[:, 0].long()]
        lattice, used = lattice_from_k2(fsa, [0], self.graph, torch.cat(one.log_prob)[None], self.options)
        return lattice if used else None

    def _held(self) -> Tensor | None:
        """The contexts in use by open streams."""
        held = [one.follower.held for one in self._streams.values()]
        return torch.cat(held) if held else None

    def _best(self, one: _Stream) -> LatticePath | None:
        """Passes the last frame to k2 -> the best complete path of the stream."""
        lattice = self._final_lattice(one)
        if lattice is None:
            return None
        if self._lm is not None:
            return rescore_lattice(lattice, self.options, self._lm, self._keep_lattice, held=self._held())[0]
        found = best_path(lattice, self.options)
        if found is None:
            return None
        arc, state = found
        total = float(lattice.arc_total(self.options)[arc].sum() + lattice.final_total(self.options)[state])
        final_score = float(lattice.final_graph_score[state])
        return LatticePath(lattice.graph_arc[arc], total, final_score, 0.0, lattice if self._keep_lattice else None)
