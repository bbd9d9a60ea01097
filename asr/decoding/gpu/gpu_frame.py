"""The two halves of a frame by Triton kernels, with tensors in and out, as `CompiledFrame` has them for CPUs.

Shapes: N streams, K partial paths, A candidates.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from asr.decoding.gpu import expansion
from asr.decoding.gpu.arc_expansion import ArcExpansion
from asr.decoding.gpu.limits import FrameLimits
from asr.decoding.gpu.recombined import Recombined
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens

_FIRST_ROOM = 1 << 12


class GpuFrame:
    """What `FrameStep` does by tensor operations, with the same outcome; the host reads one number in each half.

    Args:
        graph: where the search runs.
        limits: beams.
    """

    def __init__(self, graph: Searchable, limits: FrameLimits) -> None:
        self._arcs = graph.emitting
        self._limits = limits
        self._device = graph.final_score.device
        self._expansion = ArcExpansion(graph.emitting, limits, _FIRST_ROOM, _FIRST_ROOM, 1)
        self._recombined = Recombined(limits, _FIRST_ROOM, 1, self._device)
        self._num_paths = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._first_frame = torch.zeros_like(self._num_paths)
        self._num_candidates = torch.zeros_like(self._num_paths)
        self._is_short = torch.zeros_like(self._num_paths)

    def expand(
        self, tokens: Tokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor, everything: bool = False
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """As `FrameHalves.expand`."""
        num_streams, num_arcs = len(offset), self._expansion.num_arcs
        self._num_paths.fill_(len(tokens))
        while True:
            self._expansion = self._with_room(len(tokens), num_arcs, num_streams)
            room = self._expansion
            paths = (tokens.stream, tokens.state, tokens.score, tokens.record)
            room.run(paths, self._num_paths, log_prob, frame_begin, self._first_frame, 0, everything)
            num_arcs, num_kept = torch.cat([room.needed, room.num_kept]).tolist()
            if num_arcs <= room.num_arcs:
                break
        block = self._limits.block
        expansion.shift_offsets[triton.cdiv(num_streams, block),](
            *(room.best, offset, room.num_inside, room.threshold, self._is_short, 0, num_streams), B=block
        )
        source, arc, stream = (part[:num_kept].long() for part in (room.source, room.arc, room.stream))
        is_complete = room.threshold[:num_streams] == -torch.inf
        return (source, arc, stream, room.score[:num_kept].clone()), is_complete

    def keep(
        self, stream: Tensor, state: Tensor, context_idx: Tensor | None, score: Tensor, is_complete: Tensor
    ) -> tuple[Tensor, Tensor, bool]:
        """As `FrameHalves.keep`."""
        num, num_streams = len(stream), len(is_complete)
        if num > self._recombined.num_candidates or num_streams > self._recombined.num_streams:
            room = max(2 * num, self._recombined.num_candidates)
            self._recombined = Recombined(self._limits, room, num_streams, self._device)
        found = self._recombined
        self._num_candidates.fill_(num)
        found.run(stream, state, context_idx, score, self._num_candidates)
        value, winner = found.value[:num], found.winner[:num].long()
        stays = (value > -torch.inf) & (value >= found.threshold.index_select(0, stream))
        is_enough = True
        if not self._limits.has_lm:
            is_enough = bool(((found.num_inside[:num_streams] >= self._limits.min_active) | is_complete).all())
        return winner, stays.nonzero().squeeze(1), is_enough

    def _with_room(self, num_paths: int, num_arcs: int, num_streams: int) -> ArcExpansion:
        room = self._expansion
        if num_paths <= room.num_paths and num_arcs <= room.num_arcs and num_streams <= room.num_streams:
            return room
        if num_paths > room.num_paths:
            num_paths *= 2
        if num_arcs > room.num_arcs:
            num_arcs *= 2
        return ArcExpansion(
            self._arcs,
            self._limits,
            max(num_paths, room.num_paths),
            max(num_arcs, room.num_arcs),
            max(num_streams, room.num_streams),
        )
