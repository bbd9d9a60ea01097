"""Expands arcs: every partial path goes on over every arc that leaves its state, one lane a candidate.

Lanes find their path in the prefix sums of the numbers of arcs, so that states with many arcs hold nobody up.

Shapes: K partial paths, of which the first `num_paths` are there, A candidates, N streams, B lanes of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asr.decoding.gpu.by_stream import add_count, mark_range, ordered, raise_to_max, unordered


@triton.jit
def count_arcs(
    state: tl.tensor,
    num_paths: tl.tensor,
    arc_begin: tl.tensor,
    num_arcs: tl.tensor,
    capacity: tl.tensor,
    B: tl.constexpr,
) -> None:
    """num_arcs (K,) int64 of the paths' states (K,), 0 behind the last path; num_paths (1,)."""
    path = tl.program_id(0) * B + tl.arange(0, B)
    is_path = path < tl.load(num_paths)
    own = tl.load(state + path, mask=is_path, other=0)
    first = tl.load(arc_begin + own, mask=is_path, other=0)
    end = tl.load(arc_begin + own + 1, mask=is_path, other=0)
    tl.store(num_arcs + path, end - first, mask=path < capacity)


@triton.jit
def expand_arcs(
    path_stream: tl.tensor,
    path_state: tl.tensor,
    path_score: tl.tensor,
    arcs_end: tl.tensor,
    num_places: tl.tensor,
    arc_begin: tl.tensor,
    token_id: tl.tensor,
    arc_score: tl.tensor,
    log_prob: tl.tensor,
    frame_begin: tl.tensor,
    frame: tl.tensor,
    num_columns: tl.tensor,
    source: tl.tensor,
    arc: tl.tensor,
    stream: tl.tensor,
    score: tl.tensor,
    best: tl.tensor,
    capacity: tl.tensor,
    NUM_STEPS: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Writes the candidates and the best score of each stream.

    Args:
        path_stream, path_state, path_score: (K,).
        arcs_end: (K,) int64, prefix sums of the paths' numbers of arcs, the path itself included.
        num_places: K.
        arc_begin, token_id, arc_score: the graph's arcs.
        log_prob, frame_begin: flat, and where each stream's frame 0 begins in it (N,) int64.
        frame: (1,) int64, the frame that is read, and num_columns from one to the next.
        source, arc, stream: (A,) int32 and score (A,) float32, written.
        best: (N,) int32, raised to `ordered` best scores.
        capacity: A; candidates behind it are left out.
        NUM_STEPS: 2 to this power is above K.
    """
    total = tl.minimum(tl.load(arcs_end + num_places - 1), capacity)
    first = tl.program_id(0).to(tl.int64) * B
    if first >= total:
        return
    position = first + tl.arange(0, B)
    is_valid = position < total
    path = tl.zeros([B], tl.int32)
    for step in tl.static_range(NUM_STEPS):
        probe = path + (1 << (NUM_STEPS - 1 - step))
        is_place = is_valid & (probe <= num_places)
        is_behind = tl.load(arcs_end + probe - 1, mask=is_place, other=0) <= position
        path = tl.where(is_place & is_behind, probe, path)
    state = tl.load(path_state + path, mask=is_valid, other=0)
    left = tl.load(arcs_end + path, mask=is_valid, other=0) - position
    own_arc = tl.load(arc_begin + state + 1, mask=is_valid, other=0) - left
    own_stream = tl.load(path_stream + path, mask=is_valid, other=0).to(tl.int32)
    column = tl.load(frame_begin + own_stream, mask=is_valid, other=0) + tl.load(frame) * num_columns
    column += tl.load(token_id + own_arc, mask=is_valid, other=0)
    value = tl.load(path_score + path, mask=is_valid, other=0.0)
    value += tl.load(arc_score + own_arc, mask=is_valid, other=0.0)
    value += tl.load(log_prob + column, mask=is_valid, other=0.0)
    tl.store(source + position, path, mask=is_valid)
    tl.store(arc + position, own_arc.to(tl.int32), mask=is_valid)
    tl.store(stream + position, own_stream, mask=is_valid)
    tl.store(score + position, value, mask=is_valid)
    raise_to_max(best, own_stream, ordered(value), is_valid)


@triton.jit
def relate_to_best(
    stream: tl.tensor,
    arc: tl.tensor,
    score: tl.tensor,
    arcs_end: tl.tensor,
    num_places: tl.tensor,
    capacity: tl.tensor,
    best: tl.tensor,
    num_words: tl.tensor,
    num_inside: tl.tensor,
    range_begin: tl.tensor,
    range_end: tl.tensor,
    beam: tl.tensor,
    word_beam: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Makes scores relative to the best of their stream, in place, and counts who is inside the beam.

    Args:
        stream, arc, score: (A,) the candidates.
        arcs_end, num_places, capacity, best: as `expand_arcs` left them.
        num_words: of the graph's arcs, int32; candidates with words outside `word_beam` become impossible.
        num_inside, range_begin, range_end: (N,) int32, all 0, filled.
    """
    total = tl.minimum(tl.load(arcs_end + num_places - 1), capacity)
    first = tl.program_id(0).to(tl.int64) * B
    if first >= total:
        return
    position = first + tl.arange(0, B)
    is_valid = position < total
    own = tl.load(stream + position, mask=is_valid, other=0)
    before = tl.load(stream + position - 1, mask=is_valid & (position > 0), other=-1)
    mark_range(range_begin, range_end, own, before, position, total)
    own_best = unordered(tl.load(best + own, mask=is_valid, other=0))
    value = tl.load(score + position, mask=is_valid, other=float("-inf"))
    value -= tl.where(own_best > float("-inf"), own_best, 0.0)
    has_words = tl.load(num_words + tl.load(arc + position, mask=is_valid, other=0), mask=is_valid, other=0) > 0
    value = tl.where(has_words & (value < -word_beam), float("-inf"), value)
    tl.store(score + position, value, mask=is_valid)
    add_count(num_inside, own, is_valid & (value >= -beam) & (value > float("-inf")))


@triton.jit
def shift_offsets(
    best: tl.tensor,
    offset: tl.tensor,
    num_inside: tl.tensor,
    threshold: tl.tensor,
    is_short: tl.tensor,
    min_active: tl.tensor,
    num_streams: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Adds the best of each stream to its offset, and notes whether candidates that were left out may be missed.

    Args:
        best: (N,) int32, `ordered`, of the candidates.
        offset: (N,) float64, changed in place.
        num_inside: (N,) int32, how many are inside the beam after recombination.
        threshold: (N,) float32, what candidates had to reach; -inf where none were left out.
        is_short: (1,) int64, set to 1 where a stream has fewer than min_active of them and some were left out.
    """
    stream = tl.program_id(0) * B + tl.arange(0, B)
    is_valid = stream < num_streams
    own_best = unordered(tl.load(best + stream, mask=is_valid, other=0))
    own_offset = tl.load(offset + stream, mask=is_valid, other=0.0)
    own_offset += tl.where(own_best > float("-inf"), own_best, 0.0).to(tl.float64)
    tl.store(offset + stream, own_offset, mask=is_valid)
    is_few = tl.load(num_inside + stream, mask=is_valid, other=0) < min_active
    left_out = tl.load(threshold + stream, mask=is_valid, other=float("-inf")) > float("-inf")
    tl.atomic_max(is_short, tl.max((is_valid & is_few & left_out).to(tl.int64), 0))
