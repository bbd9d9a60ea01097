"""Whole chunks with a language model inside the search, where the host waits once a frame for the search itself.

Frame by frame, the host would wait twice: for the number of candidates, and for the number of tokens that survive. Here
the survivors of a frame lie in arrays as long as its candidates, and only the device knows how many they are: the host
reads that together with the number of the next frame's candidates, and appends the back-pointers then.

Shapes: N streams, T frames, C tokens, K room for active tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from asr.decoding.backend import Chunk, Frame, SearchSink
from asr.decoding.backtrace import Backtrace
from asr.decoding.frame import FRAMES_BETWEEN_COLLECTIONS, extended, score_words
from asr.decoding.gpu.frame import TritonFrameBackend
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import Searchable
from asr.decoding.tokens import ActiveTokens
from asr.kernels.hash_table import marked_positions
from asr.lm.interface import LanguageModel


@dataclass
class _Counted:
    """Tokens whose number only the device knows.

    Args:
        tokens: (K,), those that count first.
        num: (1,) int64, how many count.
        graph_arc: (K,) the arcs that they took; `tokens.backpointer` is that before the arc. None where the tokens have
            back-pointers of their own.
    """

    tokens: ActiveTokens
    num: Tensor
    graph_arc: Tensor | None

    def first(self, num: int, backtrace: Backtrace) -> ActiveTokens:
        """The tokens that count, with back-pointers of their own."""
        parts = (getattr(self.tokens, field.name)[:num] for field in fields(ActiveTokens))
        tokens = ActiveTokens(*parts)
        if self.graph_arc is not None:
            tokens.backpointer = backtrace.add(tokens.backpointer, self.graph_arc[:num])
        return tokens


class TritonChunkSearchWithLM:
    """`ChunkBackend` with a language model, without a lattice, input epsilons or a limit on contexts.

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
        flat, backtrace = log_prob.reshape(-1), sink.backtrace
        row_begin = torch.arange(num_streams, device=flat.device) * (max_frames * num_columns)
        ends, finished = set(num_frames.tolist()), []
        alive = _counted(tokens)
        for frame in range(max_frames):
            if frame in ends:
                tokens, ended = _parted(alive, num_frames, frame, backtrace)
                finished.append(ended)
                if not len(tokens):
                    return ActiveTokens.join(finished)
                alive = _counted(tokens)
            if backtrace.is_due or frame % FRAMES_BETWEEN_COLLECTIONS == 0:
                tokens = alive.first(int(alive.num), backtrace)
                sink.collect([*finished, tokens])
                alive = _counted(tokens)
            following = self._advance(alive, Frame(flat, row_begin + frame * num_columns, score_offset), backtrace)
            if following is None:
                return ActiveTokens.join([*finished, ActiveTokens.empty(flat.device)])
            alive = following
        return ActiveTokens.join([*finished, alive.first(int(alive.num), backtrace)])

    def _advance(self, alive: _Counted, frame: Frame, backtrace: Backtrace) -> _Counted | None:
        """Tokens before a frame -> tokens after it; None where there were none."""
        expansion, num = self._frames.expand_counted(alive.tokens, alive.num, frame)
        tokens = alive.first(num, backtrace)
        if not num:
            return None
        candidates = score_words(self._lm, self._lm_scale, tokens, self._arcs, expansion, frame.score_offset)
        position, num_kept = self._frames.survivors_counted(candidates)
        kept = extended(tokens, candidates, position)
        return _Counted(kept, num_kept, self._arcs.arc_of(candidates.arc).index_select(0, position))


def _counted(tokens: ActiveTokens) -> _Counted:
    return _Counted(tokens, torch.full((1,), len(tokens), dtype=torch.int64, device=tokens.score.device), None)


def _parted(alive: _Counted, num_frames: Tensor, frame: int, backtrace: Backtrace) -> tuple[ActiveTokens, ActiveTokens]:
    """Tokens of streams (N,) that go on, and of those that end before this frame."""
    counts = torch.arange(len(alive.tokens), device=alive.num.device) < alive.num
    goes_on = num_frames.index_select(0, alive.tokens.stream) > frame
    num, num_going = torch.cat([alive.num, (counts & goes_on).sum(0, keepdim=True)]).tolist()
    tokens, goes_on = alive.first(num, backtrace), goes_on[:num]
    going, ending = marked_positions(goes_on, num_going), marked_positions(~goes_on, num - num_going)
    return tokens.select(going), tokens.select(ending)
