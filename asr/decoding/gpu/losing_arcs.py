"""Kernels that store arcs that lost in recombination, which lattices need, in buffers of a fixed size.

The arcs are those of `asr.decoding.lattice_records.LatticeRecords`, in the same order. The host does not wait for the
device.

Shapes: A candidates, N streams, G tiles, B lanes of a tile, L losing arcs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asr.decoding.gpu.frame import ArcExpansion, FrameLimits, Recombination
from asr.decoding.gpu.kernels import LOWEST, MOST_LOSING, NUM_LOSING, ordered, raise_to_max, unordered


@triton.jit
def find_worst(
    value: tl.tensor,
    stream: tl.tensor,
    threshold: tl.tensor,
    total: tl.tensor,
    capacity: tl.tensor,
    worst: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Raises worst (N,) int32 to the largest `ordered` negated score of each stream's survivors.

    Args:
        value, stream: (A,) of the candidates; value is -inf for those that lost. threshold (N,).
        total: (1,), capacity A.
    """
    num = tl.minimum(tl.load(total), capacity)
    first = tl.program_id(0).to(tl.int64) * B
    if first >= num:
        return
    position = first + tl.arange(0, B)
    is_valid = position < num
    own_value = tl.load(value + position, mask=is_valid, other=float("-inf"))
    own_stream = tl.load(stream + position, mask=is_valid, other=0).to(tl.int32)
    survives = is_valid & (own_value > float("-inf"))
    survives = survives & (own_value >= tl.load(threshold + own_stream, mask=is_valid, other=0.0))
    raise_to_max(worst, own_stream, ordered(-own_value), survives)


@triton.jit
def _loses(
    score: tl.tensor,
    value: tl.tensor,
    stream: tl.tensor,
    winner: tl.tensor,
    threshold: tl.tensor,
    worst: tl.tensor,
    beam: tl.tensor,
    margin: tl.tensor,
    position: tl.tensor,
    is_valid: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Whether each lane lost to a survivor and belongs to the lattice, the survivor, and the score gap."""
    own = tl.load(score + position, mask=is_valid, other=float("-inf"))
    own_stream = tl.load(stream + position, mask=is_valid, other=0)
    own_winner = tl.load(winner + position, mask=is_valid, other=0)
    best = tl.load(value + own_winner, mask=is_valid, other=float("-inf"))
    survives = (best > float("-inf")) & (best >= tl.load(threshold + own_stream, mask=is_valid, other=0.0))
    # Arcs outside the search beam are dropped, unless min_active let worse tokens survive.
    lowest = tl.minimum(-beam, -unordered(tl.load(worst + own_stream, mask=is_valid, other=0)))
    gap = tl.where(survives, best, 0.0) - own
    return is_valid & survives & (own_winner != position) & (gap <= margin) & (own >= lowest), own_winner, gap


@triton.jit
def count_losing(
    score: tl.tensor,
    value: tl.tensor,
    stream: tl.tensor,
    winner: tl.tensor,
    threshold: tl.tensor,
    worst: tl.tensor,
    beam: tl.tensor,
    margin: tl.tensor,
    total: tl.tensor,
    capacity: tl.tensor,
    tile_count: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Writes tile_count (G,) int64: the number of losing candidates of each tile that belong to the lattice.

    Args:
        score, value, stream, winner: (A,), as recombination leaves them; threshold (N,).
        worst: (N,), as `find_worst` leaves it.
        beam, margin: the search beam, and the maximum score gap of a losing arc.
        total: (1,), capacity A.
    """
    tile = tl.program_id(0)
    num = tl.minimum(tl.load(total), capacity)
    num_losing = 0
    if tile.to(tl.int64) * B < num:
        position = tile.to(tl.int64) * B + tl.arange(0, B)
        loses, _winner, _gap = _loses(
            score, value, stream, winner, threshold, worst, beam, margin, position, position < num
        )  # fmt: skip
        num_losing = tl.sum(loses.to(tl.int32), 0)
    tl.store(tile_count + tile, num_losing)


@triton.jit
def write_losing(
    score: tl.tensor,
    value: tl.tensor,
    stream: tl.tensor,
    winner: tl.tensor,
    threshold: tl.tensor,
    worst: tl.tensor,
    beam: tl.tensor,
    margin: tl.tensor,
    total: tl.tensor,
    capacity: tl.tensor,
    tile_count: tl.tensor,
    tile_end: tl.tensor,
    record: tl.tensor,
    arc: tl.tensor,
    number: tl.tensor,
    counts: tl.tensor,
    src: tl.tensor,
    dst: tl.tensor,
    losing_arc: tl.tensor,
    score_gap: tl.tensor,
    arc_score: tl.tensor,
    losing_score: tl.tensor,
    num_places: tl.tensor,
    HAS_LM: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Writes the losing arcs of a frame after those of earlier frames.

    Args:
        score to tile_count: as for `count_losing`; tile_end (G,) int64, inclusive prefix sums of tile_count.
        record, arc: (A,) the backpointer that each candidate extends, and its arc.
        number: (A,) int64, the backpointer of each survivor.
        counts: see `kernels.NUM_COUNTS`.
        src, dst, losing_arc: (L,) int64 and score_gap (L,) float32, written.
        arc_score: (A,) float64, the language model's scores of the candidates' words, and losing_score (L,) float64,
            written; used only if HAS_LM.
        num_places: L; arcs that do not fit are dropped.
    """
    tile = tl.program_id(0)
    num = tl.minimum(tl.load(total), capacity)
    if tile.to(tl.int64) * B >= num:
        return
    position = tile.to(tl.int64) * B + tl.arange(0, B)
    loses, own_winner, gap = _loses(
        score, value, stream, winner, threshold, worst, beam, margin, position, position < num
    )  # fmt: skip
    rank = tl.load(tile_end + tile) - tl.load(tile_count + tile) + tl.cumsum(loses.to(tl.int64), 0) - 1
    place = tl.load(counts + NUM_LOSING) + rank
    has_room = loses & (place < num_places)
    tl.store(src + place, tl.load(record + position, mask=has_room, other=0), mask=has_room)
    tl.store(dst + place, tl.load(number + own_winner, mask=has_room, other=0), mask=has_room)
    tl.store(losing_arc + place, tl.load(arc + position, mask=has_room, other=0).to(tl.int64), mask=has_room)
    tl.store(score_gap + place, gap, mask=has_room)
    if HAS_LM:
        tl.store(losing_score + place, tl.load(arc_score + position, mask=has_room, other=0.0), mask=has_room)


@triton.jit(do_not_specialize=["num_tiles"])
def end_losing(counts: tl.tensor, tile_end: tl.tensor, num_tiles: tl.tensor, num_places: tl.tensor) -> None:
    """Updates the counts of losing arcs after a frame; one program."""
    needed = tl.load(counts + NUM_LOSING) + tl.load(tile_end + num_tiles - 1)
    tl.store(counts + MOST_LOSING, tl.maximum(tl.load(counts + MOST_LOSING), needed))
    tl.store(counts + NUM_LOSING, tl.minimum(needed, num_places))


class LosingArcBuffers:
    """Buffers for the losing arcs of several frames.

    Args:
        limits: beams and limits.
        margin: maximum score gap of a losing arc.
        found: buffers of the candidates.
        num_losing: L.

    Attributes:
        number: (A,) int64, the backpointer of each survivor of a frame; filled by the caller.
        src, dst, arc: (L,) int64, score_gap (L,) float32, lm_score (L,) float64, which is used with a language model
            only; see `LatticeRecords.add_frames`.
    """

    def __init__(self, limits: FrameLimits, margin: float, found: ArcExpansion, num_losing: int) -> None:
        self._limits = limits
        self._margin = margin
        self._num_losing = num_losing
        device = found.score.device

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.number = zeros(found.num_arcs)
        self.src, self.dst, self.arc = zeros(num_losing), zeros(num_losing), zeros(num_losing)
        self.score_gap = torch.zeros(num_losing, dtype=torch.float32, device=device)
        self.lm_score = torch.zeros(num_losing if limits.has_lm else 0, dtype=torch.float64, device=device)
        self._worst = torch.zeros(found.num_streams, dtype=torch.int32, device=device)
        self._tile_count, self._tile_end = zeros(found.num_tiles), zeros(found.num_tiles)

    def run(
        self, found: ArcExpansion, recombined: Recombination, counts: Tensor, arc_score: Tensor | None = None
    ) -> None:
        """Adds the losing arcs of the frame that has just been recombined, and updates `counts` (NUM_COUNTS,).

        arc_score (A,) float64 are the scores of the candidates' words, None without a language model.
        """
        limits, grid = self._limits, (found.num_tiles,)
        counted = (found.num_kept, found.num_arcs)
        self._worst.fill_(LOWEST.value)
        find_worst[grid](recombined.value, found.stream, recombined.threshold, *counted, self._worst, B=limits.block)
        asked = (
            *(found.score, recombined.value, found.stream, recombined.winner, recombined.threshold, self._worst),
            *(limits.beam, self._margin, *counted, self._tile_count),
        )
        count_losing[grid](*asked, B=limits.block)
        torch.cumsum(self._tile_count, 0, out=self._tile_end)
        write_losing[grid](
            *(*asked, self._tile_end, found.backpointer, found.arc, self.number, counts),
            *(self.src, self.dst, self.arc, self.score_gap),
            *(self.lm_score if arc_score is None else arc_score, self.lm_score, self._num_losing),
            HAS_LM=arc_score is not None,
            B=limits.block,
        )
        end_losing[(1,)](counts, self._tile_end, found.num_tiles, self._num_losing)
