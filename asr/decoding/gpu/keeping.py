"""The end of a frame: those that stay become the new partial paths, each with a record, and all counts go on.

Streams stand longest first, so that of all that stay those whose stream goes on come first. The others move behind
the room for paths, to where the paths of streams that have ended wait.

Shapes: A candidates, G tiles, K room for paths, D room for paths that have ended, N streams, R room for records.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_PATHS = tl.constexpr(0)
NUM_ENDED = tl.constexpr(1)
NUM_RECORDS = tl.constexpr(2)
FRAME = tl.constexpr(3)
NUM_GOING = tl.constexpr(4)
IS_SHORT = tl.constexpr(5)
MOST_ARCS = tl.constexpr(6)
MOST_PATHS = tl.constexpr(7)
MOST_ENDED = tl.constexpr(8)
MOST_RECORDS = tl.constexpr(9)
FIRST_RECORD = tl.constexpr(10)
NUM_COUNTS = 11
"""What stands where in the counts, (11,) int64: how many there are, and what has been needed at most. The room for
records holds those from FIRST_RECORD to NUM_RECORDS."""


@triton.jit
def keep_paths(
    stream: tl.tensor,
    state: tl.tensor,
    value: tl.tensor,
    record: tl.tensor,
    arc: tl.tensor,
    threshold: tl.tensor,
    total: tl.tensor,
    capacity: tl.tensor,
    tile_count: tl.tensor,
    tile_end: tl.tensor,
    num_frames: tl.tensor,
    counts: tl.tensor,
    path_stream: tl.tensor,
    path_state: tl.tensor,
    path_score: tl.tensor,
    path_record: tl.tensor,
    path_capacity: tl.tensor,
    ended_capacity: tl.tensor,
    previous: tl.tensor,
    record_arc: tl.tensor,
    record_capacity: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Writes paths and records.

    Args:
        stream, state, value, record, arc: (A,) of the candidates; value is -inf for those that lost.
        threshold: (N,), total (1,), capacity A, tile_count and tile_end (G,), as for `gather_candidates`.
        num_frames: (N,) int64, descending.
        counts: see above.
        path_*: (K + D,), written.
        previous, record_arc: (R,) int64, written.
    """
    tile = tl.program_id(0)
    num = tl.minimum(tl.load(total), capacity)
    if tile.to(tl.int64) * B >= num:
        return
    position = tile.to(tl.int64) * B + tl.arange(0, B)
    is_valid = position < num
    own_value = tl.load(value + position, mask=is_valid, other=float("-inf"))
    own_stream = tl.load(stream + position, mask=is_valid, other=0)
    stays = is_valid & (own_value > float("-inf"))
    stays = stays & (own_value >= tl.load(threshold + own_stream, mask=is_valid, other=0.0))
    rank = tl.load(tile_end + tile) - tl.load(tile_count + tile) + tl.cumsum(stays.to(tl.int64), 0) - 1
    is_going = tl.load(num_frames + own_stream, mask=stays, other=0) > tl.load(counts + FRAME) + 1
    ended_rank = tl.load(counts + NUM_ENDED) + rank - tl.load(counts + NUM_GOING)
    has_room = stays & tl.where(is_going, rank < path_capacity, ended_rank < ended_capacity)
    place = tl.where(is_going, rank, path_capacity + ended_rank)
    own_record = tl.load(counts + NUM_RECORDS) + rank
    tl.store(path_stream + place, own_stream, mask=has_room)
    tl.store(path_state + place, tl.load(state + position, mask=stays, other=0), mask=has_room)
    tl.store(path_score + place, own_value, mask=has_room)
    tl.store(path_record + place, own_record, mask=has_room)
    place = own_record - tl.load(counts + FIRST_RECORD)
    has_room = stays & (place < record_capacity)
    tl.store(previous + place, tl.load(record + position, mask=stays, other=0), mask=has_room)
    tl.store(record_arc + place, tl.load(arc + position, mask=stays, other=0).to(tl.int64), mask=has_room)


@triton.jit
def end_frame(
    counts: tl.tensor,
    record_begin: tl.tensor,
    arcs_end: tl.tensor,
    num_places: tl.tensor,
    tile_end: tl.tensor,
    num_tiles: tl.tensor,
    path_capacity: tl.tensor,
    ended_capacity: tl.tensor,
    record_capacity: tl.tensor,
) -> None:
    """One program: brings the counts up to date.

    Args:
        counts: see above; what had no room is counted as needed, and left out.
        record_begin: (T,) int64, where each frame's records begin; written for this frame.
        arcs_end: (num_places,) int64, prefix sums of the numbers of arcs.
        tile_end: (num_tiles,) int64, prefix sums of the numbers of paths that stay.
    """
    num_arcs = tl.load(arcs_end + num_places - 1)
    num_kept = tl.load(tile_end + num_tiles - 1)
    num_going = tl.load(counts + NUM_GOING)
    num_ended = tl.load(counts + NUM_ENDED) + num_kept - num_going
    first_record = tl.load(counts + NUM_RECORDS)
    num_records = first_record + num_kept
    before_room = tl.load(counts + FIRST_RECORD)
    frame = tl.load(counts + FRAME)
    tl.store(record_begin + frame, first_record)
    tl.store(counts + MOST_ARCS, tl.maximum(tl.load(counts + MOST_ARCS), num_arcs))
    tl.store(counts + MOST_PATHS, tl.maximum(tl.load(counts + MOST_PATHS), num_going))
    tl.store(counts + MOST_ENDED, tl.maximum(tl.load(counts + MOST_ENDED), num_ended))
    tl.store(counts + MOST_RECORDS, tl.maximum(tl.load(counts + MOST_RECORDS), num_records - before_room))
    tl.store(counts + NUM_PATHS, tl.minimum(num_going, path_capacity))
    tl.store(counts + NUM_ENDED, tl.minimum(num_ended, ended_capacity))
    tl.store(counts + NUM_RECORDS, tl.minimum(num_records, before_room + record_capacity))
    tl.store(counts + FRAME, frame + 1)
    tl.store(counts + NUM_GOING, num_going * 0)
