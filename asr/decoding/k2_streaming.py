"""k2's pass fed in chunks.

`OnlineDenseIntersecter` of k2 1.23.4 lets only states with a final arc live on to the next chunk, and prunes at each
boundary by `output_beam` against the best path there. Here every state has a final arc: where the graph has none, one
that is marked partial, without score while the stream goes on and with -1e10 at its end; and nothing is pruned at
boundaries, but the lattice at the end. So what is found does not depend on the chunks, unless the search beam is so
narrow that complete paths are lost: with chunks a few more are found then.

The intersecter returns the lattice of the whole utterance at each chunk. A chunk's cost and the memory therefore grow
with the utterance (on AN4's graph, 0.64 s of audio take 0.02 s after 3 s of speech, 0.07 s after 15 s); the endpoint
rules' `longest` bounds them. The torch pass of `asr.decoding.streaming` has neither.
Later versions of k2 have an argument `allow_partial` more, whose default is what 1.23.4 does; they are not tested.

Shapes: N streams of a call, T frames of a chunk, C tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from asr.decoding.endpoint import EndpointRules
from asr.decoding.first_pass import DecodeResult, Hypothesis
from asr.decoding.frame_scores import check_chunks, check_log_prob, skip_blanks
from asr.decoding.growing_lattice import LatticeFollower, state_frames
from asr.decoding.k2_pass import WIDEST_BEAM, require_k2
from asr.decoding.lattice.k2_lattice import lattice_from_k2
from asr.decoding.lattice.lattice import Lattice
from asr.decoding.lattice.scores import best_path, prune
from asr.decoding.on_the_fly import LatticePath, rescore_joint
from asr.decoding.options import DecodingOptions
from asr.decoding.search.path import SpelledPath, hypothesis_of_path
from asr.decoding.search.search_graph import SearchGraph
from asr.decoding.torch_pass import TorchFirstPass
from asr.decoding.word_map import WordMapper
from asr.errors import AsrError
from asr.graph.artefact import DecodingGraph
from asr.graph.k2_conversion import to_k2
from asr.lm.contract import LanguageModel

_NOT_AN_END = -1e10


@dataclass
class _Stream:
    """What a stream has read.

    Args:
        follower: the search for partial results.
        state: k2's, None before the first chunk.
        log_prob: kept frames, (T, C) each; the last one is held back, for k2 must know when it is the last.
        num_given: of these, how many k2 has had.
        frames: their numbers before skipping.
        num_frames: read in all.
        after_blank: whether the last was skipped or would have been.
    """

    follower: LatticeFollower
    state: Any = None
    log_prob: list[Tensor] = field(default_factory=list)
    num_given: int = 0
    frames: list[Tensor] = field(default_factory=list)
    num_frames: int = 0
    after_blank: bool = False


class K2StreamingDecoder:
    """As `asr.decoding.streaming.StreamingDecoder`, with k2 searching and the language model behind it.

    Args:
        graph: decoding graph without arcs that read nothing.
        options: beams and scales.
        lm: language model that rescores the growing lattice, or None.
        endpoint_rules: when a speaker has finished; `longest` bounds cost and memory, too.
        keep_lattice: whether final results carry a lattice.

    Raises:
        AsrError: k2 is not there, or the graph has arcs that read nothing.
    """

    def __init__(
        self,
        graph: DecodingGraph,
        options: DecodingOptions | None = None,
        lm: LanguageModel | None = None,
        endpoint_rules: EndpointRules | None = None,
        keep_lattice: bool = False,
    ) -> None:
        self._k2 = k2 = require_k2(graph)
        self.graph = graph
        self.options = options if options is not None else DecodingOptions()
        self._rules = endpoint_rules if endpoint_rules is not None else EndpointRules()
        self._lm = WordMapper(graph.vocabulary).mapped(lm)
        self._keep_lattice = keep_lattice
        self._fallback = TorchFirstPass(graph, self.options)
        prepared = SearchGraph(graph, self.options)
        is_partial = prepared.final_score == -math.inf
        final_score = prepared.final_score.masked_fill(is_partial, 0.0)
        fsa = to_k2(replace(graph, score=prepared.emitting.score, final_score=final_score))
        self._fsa = k2.create_fsa_vec([fsa])
        # k2 keeps no copy: a score that is changed here is changed for the intersecter.
        self._arcs = self._fsa.arcs.values()
        self._partial = ((self._arcs[:, 2] == -1) & is_partial[self._arcs[:, 0].long()]).nonzero().squeeze(1)
        self._intersecter = k2.OnlineDenseIntersecter(
            self._fsa,
            1,
            min(self.options.search_beam, WIDEST_BEAM),
            WIDEST_BEAM,
            self.options.min_active_states,
            self.options.max_active_states,
        )
        self._streams: dict[int, _Stream] = {}

    def start(self, num_streams: int = 1) -> list[int]:
        """Opens streams and gives their numbers."""
        streams: list[int] = []
        while len(streams) < num_streams:
            number = next(number for number in range(len(self._streams) + 1) if number not in self._streams)
            self._streams[number] = _Stream(LatticeFollower(self.graph, self.options, self._lm))
            streams.append(number)
        return streams

    def advance(self, streams: Sequence[int], log_prob: Tensor, num_frames: Tensor) -> None:
        """Reads a chunk of each of some open streams; arguments as of `StreamingDecoder.advance`.

        Raises:
            AsrError: a stream is not open or stands twice, or the log-probabilities are bad.
        """
        check_chunks(streams, num_frames)
        opened = [self._open(stream) for stream in streams]
        check_log_prob(log_prob, num_frames, len(self.graph.tokens))
        log_prob = log_prob.to(self.graph.device, torch.float32)
        for row, one in enumerate(opened):
            self._take(one, log_prob[row, : int(num_frames[row])])
            num_ready = sum(map(len, one.log_prob)) - 1
            if num_ready > one.num_given:
                one.follower.extend(self._intersect(one, num_ready))

    def partial(self, stream: int) -> Hypothesis | None:
        """The best path so far; None where nothing is alive. The last frame is not in it yet."""
        found = self._open(stream).follower.best()
        if found is None:
            return None
        arc, total, lm_score = found
        frame_of = self._frame_of(self._open(stream))
        return hypothesis_of_path(self.graph, self.options, arc, total, 0.0, lm_score, frame_of)

    def num_settled_words(self, stream: int) -> int:
        """None is certain before the end."""
        self._open(stream)
        return 0

    def is_endpoint(self, stream: int) -> bool:
        """Whether the speaker seems to have finished."""
        one = self._open(stream)
        found = one.follower.best()
        path = SpelledPath()
        if found is not None:
            path = path.followed_by(self.graph, found[0], self._frame_of(one))
        return self._rules.apply(len(path.word_ids) > 0, one.num_frames - path.spoken_end, one.num_frames)

    def finalize(self, stream: int) -> DecodeResult:
        """Ends a stream: its best complete path, or the best unfinished one where none is complete."""
        one = self._open(stream)
        del self._streams[stream]
        frame_of = self._frame_of(one)
        num_kept = sum(map(len, one.log_prob))
        path = self._best(one) if num_kept else None
        if path is not None:
            hypothesis = path.hypothesis(self.graph, self.options, frame_of)
            return DecodeResult((hypothesis,), True, num_kept, path.lattice, frame_of)
        empty = torch.zeros(0, len(self.graph.tokens), device=self.graph.device)
        log_prob = torch.cat([empty, *one.log_prob])
        found = self._fallback.search(log_prob[None], torch.tensor([num_kept]), self._lm, False, self._held())
        # What was to be skipped is gone already: nothing more has been.
        return replace(found, original_frame=None if frame_of is None else frame_of[None].cpu()).result(0)

    def _open(self, stream: int) -> _Stream:
        if stream not in self._streams:
            raise AsrError(f"stream {stream} is not open; `start` opens streams and `finalize` closes them.")
        return self._streams[stream]

    def _take(self, one: _Stream, log_prob: Tensor) -> None:
        """Remembers a chunk (T, C), what is to be skipped left out."""
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

    def _intersect(self, one: _Stream, end: int) -> Any:
        """Gives k2 the frames up to `end`; returns its lattice of all."""
        log_prob = torch.cat(one.log_prob)
        chunk = log_prob[None, one.num_given : end] * self.options.am_scale
        segment = torch.tensor([[0, 0, end - one.num_given]], dtype=torch.int32)
        fsa, (one.state,) = self._intersecter.decode(self._k2.DenseFsaVec(chunk.contiguous(), segment), [one.state])
        one.num_given = end
        return fsa

    def _final_lattice(self, one: _Stream) -> Lattice | None:
        """The pruned lattice of the stream, whose last frame k2 gets now."""
        scores = self._arcs[self._partial, 3].clone()
        self._arcs[self._partial, 3] = torch.tensor([_NOT_AN_END]).view(torch.int32).to(scores.device)
        try:
            fsa = self._intersect(one, sum(map(len, one.log_prob)))
        finally:
            self._arcs[self._partial, 3] = scores
        if not fsa.num_arcs:
            return None
        fsa.frame = state_frames(fsa)[fsa.arcs.values()[:, 0].long()]
        lattice, used = lattice_from_k2(fsa, [0], self.graph, torch.cat(one.log_prob)[None])
        return prune(lattice, self.options, self.options.output_beam) if used else None

    def _held(self) -> Tensor | None:
        """The contexts that streams go on from."""
        held = [one.follower.held for one in self._streams.values()]
        return torch.cat(held) if held else None

    def _best(self, one: _Stream) -> LatticePath | None:
        """The best complete path of the stream, whose last frame k2 gets now."""
        lattice = self._final_lattice(one)
        if lattice is None:
            return None
        if self._lm is not None:
            return rescore_joint(lattice, self.options, self._lm, self._keep_lattice, self._held())[0]
        found = best_path(lattice, self.options)
        if found is None:
            return None
        arc, state = found
        total = float(lattice.arc_total(self.options)[arc].sum() + lattice.final_total(self.options)[state])
        final_score = float(lattice.final_graph_score[state])
        return LatticePath(lattice.graph_arc[arc], total, final_score, 0.0, lattice if self._keep_lattice else None)
