"""Moves together what stays, in its order: each tile counts, prefix sums of the counts say where its part begins.

Shapes: A candidates, K partial paths, N streams, B lanes of a tile, G tiles, R records.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stays(
    score: tl.tensor, stream: tl.tensor, threshold: tl.tensor, position: tl.tensor, is_valid: tl.tensor
) -> tl.tensor:
    """Which lanes are possible and not below their stream's threshold."""
    value = tl.load(score + position, mask=is_valid, other=float("-inf"))
    own = tl.load(stream + position, mask=is_valid, other=0)
    return is_valid & (value > float("-inf")) & (value >= tl.load(threshold + own, mask=is_valid, other=0.0))


@triton.jit
def count_stays(
    score: tl.tensor,
    stream: tl.tensor,
    threshold: tl.tensor,
    total: tl.tensor,
    capacity: tl.tensor,
    tile_count: tl.tensor,
    num_frames: tl.tensor,
    frame: tl.tensor,
    num_going: tl.tensor,
    HAS_ENDS: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Counts what stays.

    Args:
        score, stream: (A,), threshold (N,), total (1,), capacity A.
        tile_count: (G,) int64, how many of each tile stay; written.
        num_frames: (N,) int64 of the streams, and frame (1,) int64, the one that is read.
        num_going: (1,) int64, raised by those whose stream goes on. All three are not touched unless HAS_ENDS.
    """
    tile = tl.program_id(0)
    num = tl.minimum(tl.load(total), capacity)
    position = tile.to(tl.int64) * B + tl.arange(0, B)
    num_staying = 0
    if tile.to(tl.int64) * B < num:
        stays = _stays(score, stream, threshold, position, position < num)
        num_staying = tl.sum(stays.to(tl.int32), 0)
        if HAS_ENDS:
            own = tl.load(stream + position, mask=stays, other=0)
            is_going = stays & (tl.load(num_frames + own, mask=stays, other=0) > tl.load(frame) + 1)
            tl.atomic_add(num_going, tl.sum(is_going.to(tl.int64), 0))
    tl.store(tile_count + tile, num_staying)


@triton.jit
def gather_candidates(
    source: tl.tensor,
    arc: tl.tensor,
    stream: tl.tensor,
    score: tl.tensor,
    threshold: tl.tensor,
    total: tl.tensor,
    capacity: tl.tensor,
    tile_count: tl.tensor,
    tile_end: tl.tensor,
    dst_state: tl.tensor,
    path_record: tl.tensor,
    kept_source: tl.tensor,
    kept_arc: tl.tensor,
    kept_stream: tl.tensor,
    kept_state: tl.tensor,
    kept_score: tl.tensor,
    kept_record: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Copies the candidates that stay, with the state that they lead to and the record that they go on from.

    Args:
        source, arc, stream, score: (A,) all candidates; threshold (N,), total (1,), capacity A.
        tile_count, tile_end: (G,) int64, how many stay of each tile, and prefix sums of it, the tile included.
        dst_state: of the graph's arcs.
        path_record: (K,) of the paths.
        kept_*: (A,) written.
    """
    tile = tl.program_id(0)
    num = tl.minimum(tl.load(total), capacity)
    if tile.to(tl.int64) * B >= num:
        return
    position = tile.to(tl.int64) * B + tl.arange(0, B)
    stays = _stays(score, stream, threshold, position, position < num)
    place = tl.load(tile_end + tile) - tl.load(tile_count + tile) + tl.cumsum(stays.to(tl.int64), 0) - 1
    own_source = tl.load(source + position, mask=stays, other=0)
    own_arc = tl.load(arc + position, mask=stays, other=0)
    tl.store(kept_source + place, own_source, mask=stays)
    tl.store(kept_arc + place, own_arc, mask=stays)
    tl.store(kept_stream + place, tl.load(stream + position, mask=stays, other=0), mask=stays)
    tl.store(kept_state + place, tl.load(dst_state + own_arc, mask=stays, other=0), mask=stays)
    tl.store(kept_score + place, tl.load(score + position, mask=stays, other=0.0), mask=stays)
    tl.store(kept_record + place, tl.load(path_record + own_source, mask=stays, other=0), mask=stays)
