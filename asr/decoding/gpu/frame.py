"""The beams of a frame as the kernels take them.

The first half of a frame in room of a fixed size: from partial paths to the candidates worth going on with.

Shapes: K room for partial paths, A room for candidates, N room for streams, G tiles.


The second half of a frame in room of a fixed size: which candidates win, and where each stream is cut off.

Shapes: A room for candidates, N room for streams, M slots.


The two halves of a frame by Triton kernels, with tensors in and out, as `NumbaFrameBackend` has them for CPUs.

Shapes: N streams, K partial paths, A candidates.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from asr.decoding.gpu import kernels
from asr.decoding.gpu.kernels import LOWEST
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import ArcSet, Searchable
from asr.decoding.tokens import ActiveTokens

# More than the rounding of a difference of two scores can be.
_SLACK = 0.01


# Without a language model several candidates may recombine into one.
_RECOMBINED = 8


NO_LIMIT = 0x7FFFFFFF


class FrameLimits:
    """What survives a frame.

    Args:
        options: beams.
        has_lm: whether a language model takes part.
        device: where the search runs.
        block: candidates of a program; on a GPU at least its threads, 128.
    """

    def __init__(self, options: DecodingOptions, has_lm: bool, device: torch.device, block: int = 256) -> None:
        self.beam = options.search_beam
        self.word_beam = options.word_beam if has_lm and options.word_beam is not None else float("inf")
        self.min_active = options.min_active_states
        self.max_active = options.max_active_states
        self.enough_inside = _RECOMBINED * options.min_active_states
        self.has_lm = has_lm
        self.block = block
        self.selection_block = 2 * block

        def scalar(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float32, device=device)

        self.reach_score, self.lowest_score = scalar(-options.search_beam - _SLACK), scalar(-torch.inf)


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
        kernels.count_arcs[triton.cdiv(self.num_paths, block),](
            state, num_paths, arcs.arc_begin, self._arcs_of_path, self.num_paths, B=block
        )
        torch.cumsum(self._arcs_of_path, 0, out=self.arcs_end)
        grid = (self.num_tiles,)
        kernels.expand_arcs[grid](
            *(stream, state, score),
            *(self.arcs_end, self.num_paths, arcs.arc_begin, arcs.token_id, arcs.score),
            *(log_prob, frame_begin, frame, num_columns),
            *(self._source, self._arc, self._stream, self._score, self.best, self.num_arcs),
            NUM_STEPS=self.num_paths.bit_length(),
            B=block,
        )
        kernels.normalize_scores[grid](
            *(self._stream, self._arc, self._score, self.arcs_end, self.num_paths, self.num_arcs),
            *(self.best, arcs.words.num_words, *self._by_stream[1:]),
            *(limits.beam, limits.word_beam),
            B=block,
        )
        if keeps_all:
            self.threshold.fill_(-torch.inf)
        elif limits.has_lm:
            kernels.pruning_threshold[self.num_streams,](
                *(self._score, *self._by_stream[2:], self.num_inside, self.threshold),
                *(limits.beam, limits.min_active, NO_LIMIT),
                B=limits.selection_block,
            )
        else:
            is_many = self.num_inside >= limits.enough_inside
            torch.where(is_many, limits.reach_score, limits.lowest_score, out=self.threshold)
        kernels.count_stays[grid](
            *(self._score, self._stream, self.threshold, self.needed, self.num_arcs, self._tile_count),
            *(frame, frame, frame),
            HAS_ENDS=False,
            B=block,
        )
        torch.cumsum(self._tile_count, 0, out=self._tile_end)
        kernels.gather_candidates[grid](
            *(self._source, self._arc, self._stream, self._score, self.threshold, self.needed, self.num_arcs),
            *(self._tile_count, self._tile_end, arcs.dst_state, record),
            *(self.source, self.arc, self.stream, self.state, self.score, self.record),
            B=block,
        )


class Recombined:
    """Room for what is found out about candidates, and the kernels that do. Nothing here waits for the device.

    Args:
        limits: beams.
        num_candidates: A.
        num_streams: N.
        device: where.
    """

    def __init__(self, limits: FrameLimits, num_candidates: int, num_streams: int, device: torch.device) -> None:
        self._limits = limits
        self.num_candidates, self.num_streams = num_candidates, num_streams
        num_slots = 1 << max(4, (2 * num_candidates - 1).bit_length())
        self._owner = torch.full((num_slots,), kernels.EMPTY.value, dtype=torch.int32, device=device)
        self._best = torch.full((num_slots,), kernels.UNBEATEN.value, dtype=torch.int64, device=device)
        self._slot = torch.zeros(num_candidates, dtype=torch.int32, device=device)
        self.winner = torch.zeros_like(self._slot)
        self.value = torch.zeros(num_candidates, device=device)
        self._by_stream = torch.zeros(3, num_streams, dtype=torch.int32, device=device)
        self.num_inside = self._by_stream[0]
        self.threshold = torch.zeros(num_streams, device=device)

    def run(
        self, stream: Tensor, state: Tensor, context_idx: Tensor | None, score: Tensor, num_candidates: Tensor
    ) -> None:
        """Fills winner (A,), value (A,), -inf for losers, num_inside (N,) and threshold (N,).

        Args:
            stream, state, context_idx, score: (A,), streams ascending.
            num_candidates: (1,) int64, how many there are.
        """
        limits = self._limits
        block, grid = limits.block, (triton.cdiv(self.num_candidates, limits.block),)
        counted = (num_candidates, self.num_candidates)
        self._by_stream.zero_()
        kernels.enter[grid](
            *(stream, state, state if context_idx is None else context_idx, score),
            *(*counted, self._owner, self._best, self._slot, len(self._owner) - 1),
            HAS_CONTEXT=context_idx is not None,
            B=block,
        )
        kernels.settle[grid](
            *(stream, score, *counted, self._best, self._slot, self.winner, self.value, *self._by_stream),
            limits.beam,
            B=block,
        )
        kernels.pruning_threshold[self.num_streams,](
            *(self.value, *self._by_stream[1:], self.num_inside, self.threshold),
            *(limits.beam, limits.min_active, limits.max_active),
            B=limits.selection_block,
        )
        kernels.leave[grid](*counted, self._owner, self._best, self._slot, B=block)


_FIRST_ROOM = 1 << 12


class TritonFrameBackend:
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
        self, tokens: ActiveTokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor, everything: bool = False
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """As `FrameBackend.expand`."""
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
        kernels.shift_offsets[triton.cdiv(num_streams, block),](
            *(room.best, offset, room.num_inside, room.threshold, self._is_short, 0, num_streams), B=block
        )
        source, arc, stream = (part[:num_kept].long() for part in (room.source, room.arc, room.stream))
        is_complete = room.threshold[:num_streams] == -torch.inf
        return (source, arc, stream, room.score[:num_kept].clone()), is_complete

    def keep(
        self, stream: Tensor, state: Tensor, context_idx: Tensor | None, score: Tensor, is_complete: Tensor
    ) -> tuple[Tensor, Tensor, bool]:
        """As `FrameBackend.keep`."""
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
