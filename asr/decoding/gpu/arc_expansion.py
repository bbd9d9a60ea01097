"""The first half of a frame in room of a fixed size: from partial paths to the candidates worth going on with.

Shapes: K room for partial paths, A room for candidates, N room for streams, G tiles.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from asr.decoding.gpu import compaction, expansion, selection
from asr.decoding.gpu.by_stream import LOWEST
from asr.decoding.gpu.limits import NO_LIMIT, FrameLimits
from asr.decoding.search.search_graph import ArcSet


class ArcExpansion:
    """Room for a frame's candidates, and the kernels that fill it. Nothing here waits for the device.

    Args:
        arcs: the graph's arcs that read a frame.
        limits: beams.
        num_paths: K.
        num_arcs: A, so many arcs leave all paths together at most.
        num_streams: N.
    """

    def __init__(self, arcs: ArcSet, limits: FrameLimits, num_paths: int, num_arcs: int, num_streams: int) -> None:
        device = arcs.score.device
        self._arcs = arcs
        self._limits = limits
        self.num_paths, self.num_arcs, self.num_streams = num_paths, num_arcs, num_streams
        self.num_tiles = triton.cdiv(num_arcs, limits.block)

        def room(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._arcs_of_path = room(num_paths, torch.int64)
        self.arcs_end = room(num_paths, torch.int64)
        self._source, self._arc, self._stream = (room(num_arcs, torch.int32) for _ in range(3))
        self._score = room(num_arcs, torch.float32)
        self._cleared = torch.zeros(4, num_streams, dtype=torch.int32, device=device)
        self._cleared[0] = LOWEST.value
        self._by_stream = self._cleared.clone()
        self.best, self.num_inside = self._by_stream[0], self._by_stream[1]
        self.threshold = room(num_streams, torch.float32)
        self._tile_count, self._tile_end = room(self.num_tiles, torch.int64), room(self.num_tiles, torch.int64)
        # What is kept of them.
        self.source, self.arc, self.stream, self.state = (room(num_arcs, torch.int32) for _ in range(4))
        self.score, self.record = room(num_arcs, torch.float32), room(num_arcs, torch.int64)
        self.needed, self.num_kept = self.arcs_end[-1:], self._tile_end[-1:]

    def run(
        self,
        paths: tuple[Tensor, Tensor, Tensor, Tensor],
        num_paths: Tensor,
        log_prob: Tensor,
        frame_begin: Tensor,
        frame: Tensor,
        num_columns: int,
        keeps_all: bool = False,
    ) -> None:
        """Fills source, arc, stream, state, score, record (A,) up to num_kept (1,), in order; score is relative.

        Args:
            paths: stream, state, score, record (K,), those of a stream side by side, streams ascending.
            num_paths: (1,) int64, how many there are.
            log_prob: flat; frame_begin (N,) int64, where each stream's frame 0 begins in it.
            frame: (1,) int64, the frame that is read; num_columns from one to the next.
            keeps_all: leave out only what is impossible. Else, without a language model, streams with many inside the
                beam keep what is in reach; with one, all keep exactly what it is to be asked about.
        """
        arcs, limits, block = self._arcs, self._limits, self._limits.block
        stream, state, score, record = paths
        self._by_stream.copy_(self._cleared)
        expansion.count_arcs[triton.cdiv(self.num_paths, block),](
            state, num_paths, arcs.arc_begin, self._arcs_of_path, self.num_paths, B=block
        )
        torch.cumsum(self._arcs_of_path, 0, out=self.arcs_end)
        grid = (self.num_tiles,)
        expansion.expand_arcs[grid](
            *(stream, state, score),
            *(self.arcs_end, self.num_paths, arcs.arc_begin, arcs.token_id, arcs.score),
            *(log_prob, frame_begin, frame, num_columns),
            *(self._source, self._arc, self._stream, self._score, self.best, self.num_arcs),
            NUM_STEPS=self.num_paths.bit_length(),
            B=block,
        )
        expansion.relate_to_best[grid](
            *(self._stream, self._arc, self._score, self.arcs_end, self.num_paths, self.num_arcs),
            *(self.best, arcs.words.num_words, *self._by_stream[1:]),
            *(limits.beam, limits.word_beam),
            B=block,
        )
        if keeps_all:
            self.threshold.fill_(-torch.inf)
        elif limits.has_lm:
            selection.cut_off[self.num_streams,](
                *(self._score, *self._by_stream[2:], self.num_inside, self.threshold),
                *(limits.beam, limits.min_active, NO_LIMIT),
                B=limits.selection_block,
            )
        else:
            is_many = self.num_inside >= limits.enough_inside
            torch.where(is_many, limits.reach_score, limits.lowest_score, out=self.threshold)
        compaction.count_stays[grid](
            *(self._score, self._stream, self.threshold, self.needed, self.num_arcs, self._tile_count),
            *(frame, frame, frame),
            HAS_ENDS=False,
            B=block,
        )
        torch.cumsum(self._tile_count, 0, out=self._tile_end)
        compaction.gather_candidates[grid](
            *(self._source, self._arc, self._stream, self._score, self.threshold, self.needed, self.num_arcs),
            *(self._tile_count, self._tile_end, arcs.dst_state, record),
            *(self.source, self.arc, self.stream, self.state, self.score, self.record),
            B=block,
        )
