"""The worst score that survives in each stream, by radix selection over all programs at once.

Four rounds settle eight bits each of the score that is looked for, highest bits first. In a round every tile counts,
for each of its streams that needs it, how many scores that agree in the bits settled so far have each value of the
next eight. The counts of all rounds stay until the end: each program finds from those of earlier rounds what they have
settled, so that no program waits for another one, and tiles without such a stream end at once.

Shapes: A candidates, N streams, G tiles, B lanes of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUM_ROUNDS = tl.constexpr(4)
_NUM_BUCKETS = tl.constexpr(256)
_NO_STREAM = tl.constexpr(2147483647)


@triton.jit
def _wanted(
    num_inside: tl.tensor,
    range_begin: tl.tensor,
    range_end: tl.tensor,
    stream: tl.tensor,
    min_active: tl.tensor,
    max_active: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """How many of a stream are to survive, and whether there are so many that the worst of them must be looked for."""
    inside = tl.load(num_inside + stream)
    available = tl.load(range_end + stream) - tl.load(range_begin + stream)
    wanted = tl.where(inside < min_active, min_active, max_active).to(tl.int32)
    return wanted, ((inside < min_active) | (inside > max_active)) & (available >= wanted)


@triton.jit
def _settled(
    histogram: tl.tensor, num_streams: tl.tensor, stream: tl.tensor, wanted: tl.tensor, NUM_ROUNDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The highest bits of a stream's score of this rank after some rounds, and its rank among those that share them."""
    prefix = wanted * 0
    for earlier in tl.static_range(NUM_ROUNDS):
        row = (earlier * num_streams + stream) * _NUM_BUCKETS
        cumulative = tl.cumsum(tl.load(histogram + row + tl.arange(0, _NUM_BUCKETS)), 0)
        is_before = cumulative < wanted
        prefix = (prefix << 8) + tl.sum(is_before.to(tl.int32), 0)
        wanted -= tl.max(tl.where(is_before, cumulative, 0), 0)
    return prefix, wanted


@triton.jit(do_not_specialize=["num_streams", "min_active", "max_active"])
def count_buckets(
    score: tl.tensor,
    stream: tl.tensor,
    total: tl.tensor,
    capacity: tl.tensor,
    num_inside: tl.tensor,
    range_begin: tl.tensor,
    range_end: tl.tensor,
    histogram: tl.tensor,
    num_streams: tl.tensor,
    min_active: tl.tensor,
    max_active: tl.tensor,
    ROUND: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """One round: adds to histogram[ROUND] how many scores have each value of their next eight bits.

    Args:
        score: (A,) float32, at most 0, -inf where impossible: their magnitudes are ordered as integers.
        stream: (A,) ascending; total (1,), capacity A.
        num_inside, range_begin, range_end: (N,) int32, how many are inside the beam, and where each stream stands.
        histogram: (4, N, 256) int32, those of earlier rounds filled, this one's 0.
        num_streams: N.
        min_active, max_active: how many survive at least, and at most.
    """
    num = tl.minimum(tl.load(total), capacity)
    first = tl.program_id(0).to(tl.int64) * B
    if first >= num:
        return
    position = first + tl.arange(0, B)
    is_valid = position < num
    streams = tl.load(stream + position, mask=is_valid, other=0).to(tl.int32)
    bits = tl.load(score + position, mask=is_valid, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    own = tl.min(tl.where(is_valid, streams, _NO_STREAM), 0)
    last = tl.max(tl.where(is_valid, streams, -1), 0)
    while own <= last:
        wanted, is_sought = _wanted(num_inside, range_begin, range_end, own, min_active, max_active)
        if is_sought:
            prefix, _rank = _settled(histogram, num_streams, own, wanted, ROUND)
            is_counted = is_valid & (streams == own) & (((bits >> 8) >> (24 - 8 * ROUND)) == prefix)
            count = tl.histogram(tl.where(is_counted, (bits >> (24 - 8 * ROUND)) & 0xFF, 0), _NUM_BUCKETS)
            bucket = tl.arange(0, _NUM_BUCKETS)
            # Lanes that do not count stood in the first bucket.
            count -= tl.where(bucket == 0, B - tl.sum(is_counted.to(tl.int32), 0), 0)
            row = (ROUND * num_streams + own) * _NUM_BUCKETS
            tl.atomic_add(histogram + row + bucket, count, mask=count > 0, sem="relaxed")
        own += 1


@triton.jit(do_not_specialize=["num_streams", "min_active", "max_active"])
def pruning_threshold(
    num_inside: tl.tensor,
    range_begin: tl.tensor,
    range_end: tl.tensor,
    histogram: tl.tensor,
    num_streams: tl.tensor,
    threshold: tl.tensor,
    beam: tl.tensor,
    min_active: tl.tensor,
    max_active: tl.tensor,
    IS_LIMITED: tl.constexpr,
) -> None:
    """threshold (N,) float32: the worst score that survives, -inf where all that are possible do; a program a stream.

    Args:
        num_inside, range_begin, range_end, histogram, num_streams, min_active, max_active: as of `count_buckets`; what
            is not 0 in the histogram becomes 0 again.
        beam: candidates worse than the best by more are dropped.
        IS_LIMITED: whether any stream may have too few or too many inside the beam.
    """
    stream = tl.program_id(0)
    worst = -beam
    if IS_LIMITED:
        is_few = tl.load(num_inside + stream) < min_active
        wanted, is_sought = _wanted(num_inside, range_begin, range_end, stream, min_active, max_active)
        if is_sought:
            prefix, _rank = _settled(histogram, num_streams, stream, wanted, _NUM_ROUNDS)
            kth_best = -prefix.to(tl.float32, bitcast=True)
            worst = tl.where(is_few, tl.minimum(worst, kth_best), tl.maximum(worst, kth_best))
            for each in tl.static_range(_NUM_ROUNDS):
                row = (each * num_streams + stream) * _NUM_BUCKETS
                tl.store(histogram + row + tl.arange(0, _NUM_BUCKETS), tl.zeros([_NUM_BUCKETS], tl.int32))
        elif is_few:
            worst = float("-inf")
    tl.store(threshold + stream, worst)


class CutOff:
    """Pruning thresholds in fixed buffers. Nothing here waits for the device.

    Args:
        num_scores: A.
        num_streams: N.
        block: B, on a GPU at least the number of a program's threads, 128.
        device: where.

    Attributes:
        threshold: (N,) float32, the worst score that survives in each stream.
    """

    def __init__(self, num_scores: int, num_streams: int, block: int, device: torch.device) -> None:
        self._num_scores, self._num_streams, self._block = num_scores, num_streams, block
        self._histogram = torch.zeros(
            _NUM_ROUNDS.value, num_streams, _NUM_BUCKETS.value, dtype=torch.int32, device=device
        )
        self.threshold = torch.zeros(num_streams, device=device)

    def empty(self) -> None:
        """Forgets what a run has left that failed."""
        self._histogram.zero_()

    def run(
        self, scores: tuple[Tensor, Tensor, Tensor], by_stream: Tensor, beam: float, min_active: int, max_active: int
    ) -> None:
        """Fills `threshold`.

        Args:
            scores: score (A,) float32, at most 0, stream (A,) ascending, and how many there are, (1,) int64.
            by_stream: (3, N) int32, how many of each stream are inside the beam, where it begins and where it ends.
            beam: candidates worse than the best by more are dropped.
            min_active: at least this many survive.
            max_active: at most this many survive, except for ties.
        """
        is_limited = min_active > 0 or max_active < self._num_scores
        for each in range(_NUM_ROUNDS.value if is_limited else 0):
            count_buckets[triton.cdiv(self._num_scores, self._block),](
                *(*scores, self._num_scores, *by_stream, self._histogram, self._num_streams, min_active, max_active),
                ROUND=each,
                B=self._block,
            )
        pruning_threshold[self._num_streams,](
            *(*by_stream, self._histogram, self._num_streams, self.threshold, beam, min_active, max_active),
            IS_LIMITED=is_limited,
        )
