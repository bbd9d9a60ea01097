"""The lowest score that survives in each stream, by radix selection in which all programs take part.

Each of four rounds determines eight bits of that score, highest bits first. In a round, each tile computes a histogram
for each of its streams that needs one: of the scores that agree in the bits known so far, how many have each value of
the next eight bits. The histograms are kept until the end. Each program derives the known bits from those of earlier
rounds, so that no program waits for another one, and tiles without such a stream end at once.

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
    """How many scores of a stream are to survive, and whether the lowest of them must be searched for."""
    inside = tl.load(num_inside + stream)
    available = tl.load(range_end + stream) - tl.load(range_begin + stream)
    wanted = tl.where(inside < min_active, min_active, max_active).to(tl.int32)
    return wanted, ((inside < min_active) | (inside > max_active)) & (available >= wanted)


@triton.jit
def _settled(
    histogram: tl.tensor, num_streams: tl.tensor, stream: tl.tensor, wanted: tl.tensor, NUM_ROUNDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The bits known after some rounds of the score of rank `wanted`, and its rank among scores with these bits."""
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
    """One round: adds to histogram[ROUND] the numbers of scores with each value of the next eight bits.

    Args:
        score: (A,) float32, at most 0, -inf if impossible. The bits of their magnitudes are ordered like integers.
        stream: (A,) ascending; total (1,), capacity A.
        num_inside, range_begin, range_end: (N,) int32, number inside the beam, and range of positions of each stream.
        histogram: (4, N, 256) int32; earlier rounds are filled, this one is 0.
        num_streams: N.
        min_active, max_active: minimum and maximum number that survive.
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
            # Lanes that do not count are in the first bucket.
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
    """threshold (N,) float32: the lowest score that survives, -inf if all possible ones do; one program per stream.

    Args:
        num_inside, range_begin, range_end, histogram, num_streams, min_active, max_active: as for `count_buckets`; the
            histogram is reset to 0.
        beam: candidates further below the best are dropped.
        IS_LIMITED: whether any stream may have too few or too many candidates inside the beam.
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
    """Pruning thresholds in fixed buffers; the host does not wait for the device.

    Args:
        num_scores: A.
        num_streams: N.
        block: B; on a GPU, at least the number of threads of a program, 128.
        device: device of the buffers.

    Attributes:
        threshold: (N,) float32, the lowest score that survives in each stream.
    """

    def __init__(self, num_scores: int, num_streams: int, block: int, device: torch.device) -> None:
        self._num_scores, self._num_streams, self._block = num_scores, num_streams, block
        self._histogram = torch.zeros(
            _NUM_ROUNDS.value, num_streams, _NUM_BUCKETS.value, dtype=torch.int32, device=device
        )
        self.threshold = torch.zeros(num_streams, dtype=torch.float32, device=device)

    def empty(self) -> None:
        """Clears what a failed run has left."""
        self._histogram.zero_()

    def run(
        self, scores: tuple[Tensor, Tensor, Tensor], by_stream: Tensor, beam: float, min_active: int, max_active: int
    ) -> None:
        """Fills `threshold`.

        Args:
            scores: score (A,) float32, at most 0, stream (A,) ascending, and their number, (1,) int64.
            by_stream: (3, N) int32, number inside the beam, begin and end of each stream.
            beam: candidates further below the best are dropped.
            min_active: minimum number that survive.
            max_active: maximum number that survive, except for ties.
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
