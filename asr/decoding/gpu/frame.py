"""One frame of the search with Triton kernels: `TritonFrameBackend`, and its two halves in fixed buffers.

Shapes are capacities: K tokens, A candidates, N streams, G tiles, M slots of the hash table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from asr.decoding.backend import ActiveTokens, ArcSet, Candidates, Expansion, Frame, Searchable, Survivors
from asr.decoding.frame import ROUNDING_SLACK
from asr.decoding.gpu import kernels
from asr.decoding.gpu.cut_off import CutOff
from asr.decoding.gpu.kernels import LOWEST
from asr.decoding.settings import DecodingOptions
from asr.kernels.hash_table import marked_positions

NO_LIMIT = 0x7FFFFFFF
"""Kernels count in int32; more than this cannot be active, so larger limits mean the same."""

# Without a language model, several candidates may recombine into one. Therefore, candidates are left out only if at
# least this many times `min_active_states` are inside the beam.
_CANDIDATES_PER_WINNER = 8

FIRST_CAPACITY = 1 << 12
"""Initial capacity for tokens and candidates."""


class FrameLimits:
    """The beams and limits of a frame, in the form that kernels take.

    Args:
        options: beams and limits.
        has_lm: whether there is a language model.
        device: where the search runs.
        block: number of candidates per program; on a GPU, at least its number of threads, 128.
    """

    def __init__(self, options: DecodingOptions, has_lm: bool, device: torch.device, block: int = 256) -> None:
        self.beam = options.search_beam
        self.skip_beam = options.skip_beam if has_lm and options.skip_beam is not None else float("inf")
        self.min_active = min(options.min_active_states, NO_LIMIT)
        self.max_active = min(options.max_active_states, NO_LIMIT)
        self.enough_inside = min(_CANDIDATES_PER_WINNER * options.min_active_states, NO_LIMIT)
        self.has_lm = has_lm
        self.block = block
        self.selection_block = 2 * block

        def scalar(value: float) -> Tensor:
            return torch.full((), value, dtype=torch.float32, device=device)

        self.margin_score, self.lowest_score = scalar(-options.search_beam - ROUNDING_SLACK), scalar(-torch.inf)


class ArcExpansion:
    """Buffers for a frame's candidates, and the kernels that fill them; the host does not wait for the device.

    Args:
        arcs: the graph's arcs that read a frame.
        limits: beams and limits.
        num_paths: K.
        num_arcs: A, the maximum total number of arcs that leave the tokens' states.
        num_streams: N.
    """

    def __init__(self, arcs: ArcSet, limits: FrameLimits, num_paths: int, num_arcs: int, num_streams: int) -> None:
        device = arcs.score.device
        self._arcs = arcs
        self._limits = limits
        self.num_paths, self.num_arcs, self.num_streams = num_paths, num_arcs, num_streams
        self.num_tiles = triton.cdiv(num_arcs, limits.block)

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._arcs_of_path = zeros(num_paths, torch.int64)
        self.arcs_end = zeros(num_paths, torch.int64)
        self._source, self._arc, self._stream = (zeros(num_arcs, torch.int32) for _ in range(3))
        self._score = zeros(num_arcs, torch.float32)
        self._cleared = torch.zeros(4, num_streams, dtype=torch.int32, device=device)
        self._cleared[0] = LOWEST.value
        self._by_stream = self._cleared.clone()
        self.best, self.num_inside = self._by_stream[0], self._by_stream[1]
        self._cut_off = CutOff(num_arcs, num_streams, limits.selection_block, device)
        self.threshold = self._cut_off.threshold
        # The second row counts candidates with words, which the language model must score.
        num_rows = 2 if limits.has_lm else 1
        self._tile_count = torch.zeros(num_rows, self.num_tiles, dtype=torch.int64, device=device)
        self._tile_end = torch.zeros_like(self._tile_count)
        self.with_words = zeros(num_arcs if limits.has_lm else 0, torch.int64)
        # The candidates that are kept.
        self.source, self.arc, self.stream, self.state = (zeros(num_arcs, torch.int32) for _ in range(4))
        self.score, self.backpointer = zeros(num_arcs, torch.float32), zeros(num_arcs, torch.int64)
        self.needed, self.num_kept, self.num_with_words = (
            self.arcs_end[-1:],
            self._tile_end[0, -1:],
            self._tile_end[-1, -1:],
        )

    def empty(self) -> None:
        """Empties the tables, which a run leaves empty unless it fails."""
        self._cut_off.empty()

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
        """Fills source, arc, stream, state, score, backpointer (A,) up to num_kept (1,), in order; scores are relative.

        With a language model, also fills with_words (A,) up to num_with_words (1,): indices of candidates with words.

        Args:
            paths: stream, state, score, backpointer (K,) of the tokens, streams ascending.
            num_paths: (1,) int64, number of tokens.
            log_prob: flattened; frame_begin (N,) int64, where each stream's frame 0 begins in it.
            frame: (1,) int64, the frame to search; frames are num_columns apart.
            keeps_all: whether to drop only impossible candidates. Otherwise, with a language model, exactly the pruning
                before its queries is done; without one, streams with enough candidates inside the beam drop the others.
        """
        arcs, limits, block = self._arcs, self._limits, self._limits.block
        stream, state, score, backpointer = paths
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
            self.num_paths.bit_length(),
            B=block,
        )
        kernels.normalize_scores[grid](
            *(self._stream, self._arc, self._score, self.arcs_end, self.num_paths, self.num_arcs),
            *(self.best, arcs.words.num_words, *self._by_stream[1:]),
            *(limits.beam, limits.skip_beam),
            B=block,
        )
        if keeps_all:
            self.threshold.fill_(-torch.inf)
        elif limits.has_lm:
            scores = (self._score, self._stream, self.needed)
            self._cut_off.run(scores, self._by_stream[1:], limits.beam, limits.min_active, NO_LIMIT)
        else:
            is_many = self.num_inside >= limits.enough_inside
            torch.where(is_many, limits.margin_score, limits.lowest_score, out=self.threshold)
        kernels.count_stays[grid](
            *(self._score, self._stream, self.threshold, self.needed, self.num_arcs, self._tile_count),
            *(frame, frame, frame, self._arc, arcs.words.num_words),
            HAS_ENDS=False,
            HAS_WORDS=limits.has_lm,
            B=block,
        )
        torch.cumsum(self._tile_count, 1, out=self._tile_end)
        kernels.gather_candidates[grid](
            *(self._source, self._arc, self._stream, self._score, self.threshold, self.needed, self.num_arcs),
            *(self._tile_count, self._tile_end, arcs.dst_state, backpointer),
            *(self.source, self.arc, self.stream, self.state, self.score, self.backpointer),
            *(arcs.words.num_words, self.with_words),
            HAS_WORDS=limits.has_lm,
            B=block,
        )


class Recombination:
    """Recombination and pruning thresholds in fixed buffers; the host does not wait for the device.

    Args:
        limits: beams and limits.
        num_candidates: A.
        num_streams: N.
        device: device of the buffers.
    """

    def __init__(self, limits: FrameLimits, num_candidates: int, num_streams: int, device: torch.device) -> None:
        self._limits = limits
        self.num_candidates, self.num_streams = num_candidates, num_streams
        num_slots = 1 << max(4, (2 * num_candidates - 1).bit_length())
        self._owner = torch.full((num_slots,), kernels.EMPTY.value, dtype=torch.int32, device=device)
        self._best = torch.full((num_slots,), kernels.UNBEATEN.value, dtype=torch.int64, device=device)
        self._slot = torch.zeros(num_candidates, dtype=torch.int32, device=device)
        self.winner = torch.zeros_like(self._slot)
        self.value = torch.zeros(num_candidates, dtype=torch.float32, device=device)
        self._by_stream = torch.zeros(3, num_streams, dtype=torch.int32, device=device)
        self.num_inside = self._by_stream[0]
        self._cut_off = CutOff(num_candidates, num_streams, limits.selection_block, device)
        self.threshold = self._cut_off.threshold

    def empty(self) -> None:
        """Empties the tables, which a run leaves empty unless it fails."""
        self._cut_off.empty()
        self._owner.fill_(kernels.EMPTY.value)
        self._best.fill_(kernels.UNBEATEN.value)

    def run(
        self, stream: Tensor, state: Tensor, context_idx: Tensor | None, score: Tensor, num_candidates: Tensor
    ) -> None:
        """Fills winner (A,), value (A,), which is -inf for candidates that lost, num_inside (N,) and threshold (N,).

        Args:
            stream, state, context_idx, score: (A,), streams ascending.
            num_candidates: (1,) int64, number of candidates.
        """
        limits = self._limits
        block, grid = limits.block, (triton.cdiv(self.num_candidates, limits.block),)
        counted = (num_candidates, self.num_candidates)
        self._by_stream.zero_()
        kernels.insert[grid](
            *(stream, state, state if context_idx is None else context_idx, score),
            *(*counted, self._owner, self._best, self._slot, len(self._owner) - 1),
            HAS_CONTEXT=context_idx is not None,
            B=block,
        )
        kernels.resolve[grid](
            *(stream, score, *counted, self._best, self._slot, self.winner, self.value, *self._by_stream),
            limits.beam,
            B=block,
        )
        scores = (self.value, stream, num_candidates)
        self._cut_off.run(scores, self._by_stream, limits.beam, limits.min_active, limits.max_active)
        kernels.clear[grid](*counted, self._owner, self._best, self._slot, B=block)


class CountedSurvivors(NamedTuple):
    """`Survivors` whose number only the device knows.

    Attributes:
        winner: (A,) int32, the index of the candidate that each lost to, or its own if it won.
        survives: (A,) bool, whether each candidate survives.
        position: (A,) int64, indices of the survivors, ascending, then 0.
        num: (1,) int64, number of survivors.
    """

    winner: Tensor
    survives: Tensor
    position: Tensor
    num: Tensor


def counted_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Indices where a mask (A,) bool is true, ascending, then 0, (A,) int64; and their number, (1,), on its device."""
    end = mask.cumsum(0)
    place = torch.where(mask, end - 1, len(mask))
    position = torch.zeros(len(mask) + 1, dtype=torch.int64, device=mask.device)
    position.scatter_(0, place, torch.arange(len(mask), device=mask.device))
    # Not the last prefix sum, which does not exist without candidates.
    return position[:-1], mask.sum(0, keepdim=True)


class TritonFrameBackend:
    """A `FrameBackend` with Triton kernels; the host waits once in each of its two methods.

    Args:
        graph: on the device of the search.
        limits: beams and limits.
        initial_capacity: first capacity for tokens and candidates, `FIRST_CAPACITY` if None; it grows as needed.
    """

    def __init__(self, graph: Searchable, limits: FrameLimits, initial_capacity: int | None = None) -> None:
        initial_capacity = initial_capacity or FIRST_CAPACITY
        self._arcs = graph.emitting
        self._limits = limits
        self._device = graph.final_score.device
        self._expansion = ArcExpansion(graph.emitting, limits, initial_capacity, initial_capacity, 1)
        self._recombination = Recombination(limits, initial_capacity, 1, self._device)
        self._num_paths = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._first_frame = torch.zeros_like(self._num_paths)
        self._num_candidates = torch.zeros_like(self._num_paths)
        self._is_short = torch.zeros_like(self._num_paths)

    def expand(self, tokens: ActiveTokens, frame: Frame, *, prune: bool = True) -> Expansion:
        """As `FrameBackend.expand`."""
        # Triton launches on the current device.
        with torch.cuda.device_of(frame.log_prob):
            self._num_paths.fill_(len(tokens))
            return self.expand_counted(tokens, self._num_paths, frame, prune)[0]

    def expand_counted(
        self, tokens: ActiveTokens, counts: Tensor, frame: Frame, prune: bool = True
    ) -> tuple[Expansion, list[int]]:
        """As `expand`, for tokens of which only the first ones are valid.

        Args:
            tokens: (K,).
            counts: int64, first the number of valid tokens, then any other values that the host needs.
            frame, prune: as for `expand`.

        Returns:
            The candidates, and `counts` on the host.
        """
        num_streams, num_arcs = len(frame.begin), self._expansion.num_arcs
        paths = (tokens.stream, tokens.state, tokens.score, tokens.backpointer)
        while True:
            found = self._expansion = self._ensure_capacity(len(tokens), num_arcs, num_streams)
            found.run(paths, counts, frame.log_prob, frame.begin, self._first_frame, 0, not prune)
            known = torch.cat([found.needed, found.num_kept, found.num_with_words, counts])
            num_arcs, num_kept, num_with_words, *host_counts = known.tolist()
            if num_arcs <= found.num_arcs:
                break
        block = self._limits.block
        kernels.shift_offsets[triton.cdiv(num_streams, block),](
            *(found.best, frame.score_offset, found.num_inside, found.threshold, self._is_short, 0, num_streams),
            B=block,
        )
        source, arc, stream = (part[:num_kept].long() for part in (found.source, found.arc, found.stream))
        is_complete = found.threshold[:num_streams] == -torch.inf
        with_words = found.with_words[:num_with_words].clone() if self._limits.has_lm else None
        return Expansion(source, arc, stream, found.score[:num_kept].clone(), is_complete, with_words), host_counts

    def recombine_and_prune(self, candidates: Candidates) -> Survivors:
        """As `FrameBackend.recombine_and_prune`."""
        with torch.cuda.device_of(candidates.score):
            found, stays = self._recombined(candidates)
        is_enough = torch.ones((), dtype=torch.bool, device=stays.device)
        if not self._limits.has_lm:
            num_inside = self.num_inside(len(candidates.is_complete))
            is_enough = ((num_inside >= self._limits.min_active) | candidates.is_complete).all()
        num, enough = torch.stack([stays.sum(), is_enough.to(torch.int64)]).tolist()
        return Survivors(found.winner[: len(stays)].long(), marked_positions(stays, num), bool(enough))

    def num_inside(self, num_streams: int) -> Tensor:
        """The number of winners of each stream inside the beam after the last recombination, (N,) int64."""
        return self._recombination.num_inside[:num_streams].long()

    def survivors_counted(self, candidates: Candidates) -> CountedSurvivors:
        """Recombines and prunes with a language model, without waiting for the device."""
        found, stays = self._recombined(candidates)
        return CountedSurvivors(found.winner[: len(stays)], stays, *counted_positions(stays))

    def _recombined(self, candidates: Candidates) -> tuple[Recombination, Tensor]:
        """The buffers after recombination, and whether each candidate survives (A,)."""
        stream, num_streams = candidates.stream, len(candidates.is_complete)
        num, found = len(stream), self._recombination
        if num > found.num_candidates or num_streams > found.num_streams:
            capacity = _grown(found.num_candidates, num)
            found = self._recombination = Recombination(self._limits, capacity, num_streams, self._device)
        self._num_candidates.fill_(num)
        found.run(stream, candidates.state, candidates.context_idx, candidates.score, self._num_candidates)
        value = found.value[:num]
        return found, (value > -torch.inf) & (value >= found.threshold.index_select(0, stream))

    def _ensure_capacity(self, num_paths: int, num_arcs: int, num_streams: int) -> ArcExpansion:
        held = self._expansion
        if num_paths <= held.num_paths and num_arcs <= held.num_arcs and num_streams <= held.num_streams:
            return held
        return ArcExpansion(
            self._arcs,
            self._limits,
            _grown(held.num_paths, num_paths),
            _grown(held.num_arcs, num_arcs),
            max(num_streams, held.num_streams),
        )


def _grown(capacity: int, needed: int) -> int:
    """The capacity itself if it suffices, or a larger one with room to spare.

    It is a power of two, for which Triton compiles kernels once: multiples of 16 have code of their own.
    """
    return capacity if needed <= capacity else triton.next_power_of_2(2 * needed)
