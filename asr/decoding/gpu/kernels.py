"""Triton kernels of the search: expansion, recombination, compaction.

* Expansion: each token is extended over each arc that leaves its state, one lane per candidate. Lanes find their token
  by binary search in the prefix sums of the numbers of arcs, so that the work of states with many arcs is spread.
* Recombination: a hash table without stored keys. A slot holds the index of a candidate, which has the slot's key. A
  lane takes an empty slot by compare-and-swap; if the slot has another key, it tries the next one. Which of several
  equal candidates takes a slot depends on timing, but the winner does not: it is the one with the smallest (negated
  score, index), packed into 64 bits.
* Pruning: `asr.decoding.gpu.cut_off` finds the lowest score that survives in each stream.
* Compaction: survivors are moved together in order. Each tile counts its survivors; prefix sums of the counts give
  their places. Streams are sorted by length, longest first, so that survivors of streams that continue come first.
  The others are moved to the places of ended streams, after the capacity for active tokens.
* Values per stream are reduced over the lanes of a tile first. Streams are in order, so that a tile needs one atomic
  operation for each of its streams.

Shapes: A candidates, K tokens, D tokens of ended streams, N streams, B lanes of a tile, G tiles, M slots,
R backpointers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stays(
    score: tl.tensor, stream: tl.tensor, threshold: tl.tensor, position: tl.tensor, is_valid: tl.tensor
) -> tl.tensor:
    """Whether each lane's candidate is possible and not below its stream's threshold."""
    value = tl.load(score + position, mask=is_valid, other=float("-inf"))
    own = tl.load(stream + position, mask=is_valid, other=0)
    return is_valid & (value > float("-inf")) & (value >= tl.load(threshold + own, mask=is_valid, other=0.0))


@triton.jit
def _has_words(arc: tl.tensor, num_words: tl.tensor, position: tl.tensor, is_valid: tl.tensor) -> tl.tensor:
    """Whether each lane's arc has words."""
    own_arc = tl.load(arc + position, mask=is_valid, other=0)
    return is_valid & (tl.load(num_words + own_arc, mask=is_valid, other=0) > 0)


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
    arc: tl.tensor,
    num_words: tl.tensor,
    HAS_ENDS: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Counts the candidates that stay, and with HAS_WORDS also those of them with words.

    Args:
        score, stream: (A,), threshold (N,), total (1,), capacity A.
        tile_count: (G,) int64, number of each tile that stay; written. With HAS_WORDS (2, G), the second row is the
            number of these with words.
        arc, num_words: (A,) int32, and of the graph's arcs; used only if HAS_WORDS.
        num_frames: (N,) int64 of the streams; frame: (1,) int64, the current one.
        num_going: (1,) int64, increased by the number whose stream continues. These three are used only if HAS_ENDS.
    """
    tile = tl.program_id(0)
    num = tl.minimum(tl.load(total), capacity)
    position = tile.to(tl.int64) * B + tl.arange(0, B)
    num_staying = 0
    num_with_words = 0
    if tile.to(tl.int64) * B < num:
        stays = _stays(score, stream, threshold, position, position < num)
        num_staying = tl.sum(stays.to(tl.int32), 0)
        if HAS_ENDS:
            own = tl.load(stream + position, mask=stays, other=0)
            is_going = stays & (tl.load(num_frames + own, mask=stays, other=0) > tl.load(frame) + 1)
            tl.atomic_add(num_going, tl.sum(is_going.to(tl.int64), 0), sem="relaxed")
        if HAS_WORDS:
            num_with_words = tl.sum(_has_words(arc, num_words, position, stays).to(tl.int32), 0)
    tl.store(tile_count + tile, num_staying)
    if HAS_WORDS:
        tl.store(tile_count + tl.num_programs(0) + tile, num_with_words)


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
    num_words: tl.tensor,
    with_words: tl.tensor,
    HAS_WORDS: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Copies the candidates that stay, with their destination state and the backpointer that they extend.

    Args:
        source, arc, stream, score: (A,) all candidates; threshold (N,), total (1,), capacity A.
        tile_count, tile_end: (G,) int64, number of each tile that stay, and inclusive prefix sums; with HAS_WORDS
            (2, G), the second row is for those with words.
        dst_state, num_words: of the graph's arcs.
        path_record: (K,) backpointers of the paths.
        kept_*: (A,) written.
        with_words: (A,) int64, indices of those with words among those that stay; written if HAS_WORDS.
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
    if HAS_WORDS:
        row = tl.num_programs(0) + tile
        is_word = _has_words(arc, num_words, position, stays)
        rank = tl.load(tile_end + row) - tl.load(tile_count + row) + tl.cumsum(is_word.to(tl.int64), 0) - 1
        tl.store(with_words + rank, place, mask=is_word)


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
NUM_LOSING = tl.constexpr(11)
MOST_LOSING = tl.constexpr(12)
MOST_WORDS = tl.constexpr(13)
NUM_QUERIES = tl.constexpr(14)
NUM_COUNTS = 15
"""Length of the counts, int64, whose indices are above: current numbers (NUM_), and the maximum numbers needed (MOST_).
The buffer for backpointers holds those from FIRST_RECORD to NUM_RECORDS. NUM_QUERIES are all words that the language
model was asked for."""


@triton.jit
def compact_tokens(
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
    record_stream: tl.tensor,
    number: tl.tensor,
    context_idx: tl.tensor,
    lm_score: tl.tensor,
    arc_score: tl.tensor,
    path_context: tl.tensor,
    path_lm_score: tl.tensor,
    record_score: tl.tensor,
    KEEPS_LATTICE: tl.constexpr,
    HAS_LM: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Writes the surviving tokens and their backpointers.

    Args:
        stream, state, value, record, arc: (A,) of the candidates; value is -inf for those that lost.
        threshold: (N,), total (1,), capacity A, tile_count and tile_end (G,), as for `gather_candidates`.
        num_frames: (N,) int64, descending.
        counts: see NUM_COUNTS.
        path_*: (K + D,), written.
        previous, record_arc: (R,) int64, written.
        record_stream: (R,) int32, the stream of each backpointer, and number (A,) int64, the backpointer of each
            survivor; written only if KEEPS_LATTICE.
        context_idx, lm_score, arc_score: (A,) of the candidates; path_context int64, path_lm_score float64 (K + D,),
            written; used only if HAS_LM. record_score (R,) float64 are the words' scores; written if both.
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
    if HAS_LM:
        tl.store(path_context + place, tl.load(context_idx + position, mask=has_room, other=0), mask=has_room)
        tl.store(path_lm_score + place, tl.load(lm_score + position, mask=has_room, other=0.0), mask=has_room)
    place = own_record - tl.load(counts + FIRST_RECORD)
    has_room = stays & (place < record_capacity)
    tl.store(previous + place, tl.load(record + position, mask=stays, other=0), mask=has_room)
    tl.store(record_arc + place, tl.load(arc + position, mask=stays, other=0).to(tl.int64), mask=has_room)
    if KEEPS_LATTICE:
        tl.store(record_stream + place, own_stream, mask=has_room)
        tl.store(number + position, own_record, mask=stays)
        if HAS_LM:
            tl.store(record_score + place, tl.load(arc_score + position, mask=has_room, other=0.0), mask=has_room)


@triton.jit(do_not_specialize=["num_tiles"])
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
    """Updates the counts after a frame; one program.

    Args:
        counts: see NUM_COUNTS; entries that do not fit are dropped, but counted as needed.
        record_begin: (T,) int64, where each frame's records begin; written for this frame.
        arcs_end: (num_places,) int64, prefix sums of the numbers of arcs of the paths.
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


LOWEST = tl.constexpr(-2139095041)
"""`ordered` of minus infinity."""


_NO_STREAM = tl.constexpr(2147483647)


@triton.jit
def ordered(score: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order, because atomic maxima need integers."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key: tl.tensor) -> tl.tensor:
    """The inverse of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def raise_to_max(best: tl.tensor, stream: tl.tensor, key: tl.tensor, is_valid: tl.tensor) -> None:
    """Raises best (N,) int32 to the largest key (B,) int32 of each stream; stream (B,) is ascending."""
    own = tl.min(tl.where(is_valid, stream, _NO_STREAM), 0)
    last = tl.max(tl.where(is_valid, stream, -1), 0)
    while own <= last:
        tl.atomic_max(best + own, tl.max(tl.where(is_valid & (stream == own), key, LOWEST), 0), sem="relaxed")
        own += 1


@triton.jit
def add_count(count: tl.tensor, stream: tl.tensor, is_counted: tl.tensor) -> None:
    """Adds the number of counted lanes (B,) of each stream to count (N,) int32; stream (B,) is ascending."""
    own = tl.min(tl.where(is_counted, stream, _NO_STREAM), 0)
    last = tl.max(tl.where(is_counted, stream, -1), 0)
    while own <= last:
        tl.atomic_add(count + own, tl.sum((is_counted & (stream == own)).to(tl.int32), 0), sem="relaxed")
        own += 1


@triton.jit
def mark_range(
    range_begin: tl.tensor,
    range_end: tl.tensor,
    stream: tl.tensor,
    before: tl.tensor,
    position: tl.tensor,
    total: tl.tensor,
) -> None:
    """Stores where each stream begins and ends.

    Args:
        range_begin, range_end: (N,) int32, written; unchanged for streams that do not occur.
        stream: (B,) stream at each position, ascending; before (B,) at the previous position, -1 at the first.
        position: (B,).
        total: number of positions.
    """
    is_valid = position < total
    differs = is_valid & (stream != before)
    tl.store(range_begin + stream, position.to(tl.int32), mask=differs)
    tl.store(range_end + before, position.to(tl.int32), mask=differs & (before >= 0))
    tl.store(range_end + stream, total.to(tl.int32), mask=position == total - 1)


@triton.jit
def count_arcs(
    state: tl.tensor,
    num_paths: tl.tensor,
    arc_begin: tl.tensor,
    num_arcs: tl.tensor,
    capacity: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Writes num_arcs (K,) int64 of the paths' states (K,), 0 after the last path; num_paths (1,)."""
    path = tl.program_id(0) * B + tl.arange(0, B)
    is_path = path < tl.load(num_paths)
    own = tl.load(state + path, mask=is_path, other=0)
    first = tl.load(arc_begin + own, mask=is_path, other=0)
    end = tl.load(arc_begin + own + 1, mask=is_path, other=0)
    tl.store(num_arcs + path, end - first, mask=path < capacity)


@triton.jit(do_not_specialize=["num_columns", "num_steps"])
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
    num_steps: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Writes the candidates, and the best score of each stream.

    Args:
        path_stream, path_state, path_score: (K,).
        arcs_end: (K,) int64, inclusive prefix sums of the paths' numbers of arcs.
        num_places: K.
        arc_begin, token_id, arc_score: the graph's arcs.
        log_prob, frame_begin: flattened, and where each stream's frame 0 begins in it (N,) int64.
        frame: (1,) int64, the frame that is read; frames are num_columns apart.
        source, arc, stream: (A,) int32 and score (A,) float32, written.
        best: (N,) int32, raised to `ordered` best scores.
        capacity: A; further candidates are dropped.
        num_steps: steps of the binary search; 2 to this power is greater than K.
    """
    total = tl.minimum(tl.load(arcs_end + num_places - 1), capacity)
    first = tl.program_id(0).to(tl.int64) * B
    if first >= total:
        return
    position = first + tl.arange(0, B)
    is_valid = position < total
    # Binary search: the number of paths whose arcs all come before this position.
    path = tl.zeros([B], tl.int32)
    for step in range(num_steps):
        probe = path + (1 << (num_steps - 1 - step))
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
def normalize_scores(
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
    skip_beam: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Makes scores relative to the best of their stream, in place, and counts candidates inside the beam.

    Args:
        stream, arc, score: (A,) the candidates.
        arcs_end, num_places, capacity, best: as `expand_arcs` left them.
        num_words: of the graph's arcs, int32; candidates with words outside `skip_beam` become impossible.
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
    value = tl.where(has_words & (value < -skip_beam), float("-inf"), value)
    tl.store(score + position, value, mask=is_valid)
    add_count(num_inside, own, is_valid & (value >= -beam) & (value > float("-inf")))


@triton.jit(do_not_specialize=["min_active", "num_streams"])
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
    """Adds the best score of each stream to its offset, and finds out whether dropped candidates were needed.

    Args:
        best: (N,) int32, `ordered` best scores of the candidates.
        offset: (N,) float64, changed in place.
        num_inside: (N,) int32, number of winners inside the beam after recombination.
        threshold: (N,) float32, lowest score of candidates that were kept; -inf if none were dropped.
        is_short: (1,) int64, set to 1 if a stream has fewer than min_active of them and some were dropped.
    """
    stream = tl.program_id(0) * B + tl.arange(0, B)
    is_valid = stream < num_streams
    own_best = unordered(tl.load(best + stream, mask=is_valid, other=0))
    own_offset = tl.load(offset + stream, mask=is_valid, other=0.0)
    own_offset += tl.where(own_best > float("-inf"), own_best, 0.0).to(tl.float64)
    tl.store(offset + stream, own_offset, mask=is_valid)
    is_few = tl.load(num_inside + stream, mask=is_valid, other=0) < min_active
    left_out = tl.load(threshold + stream, mask=is_valid, other=float("-inf")) > float("-inf")
    tl.atomic_max(is_short, tl.max((is_valid & is_few & left_out).to(tl.int64), 0), sem="relaxed")


EMPTY = tl.constexpr(-1)
UNBEATEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def insert(
    stream: tl.tensor,
    state: tl.tensor,
    context_idx: tl.tensor,
    score: tl.tensor,
    num_candidates: tl.tensor,
    capacity: tl.tensor,
    owner: tl.tensor,
    best: tl.tensor,
    slot: tl.tensor,
    last_slot: tl.tensor,
    HAS_CONTEXT: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Assigns a slot to each candidate.

    Args:
        stream, state, context_idx, score: (A,); context_idx is not read unless HAS_CONTEXT.
        num_candidates: (1,), and capacity, A; further candidates are ignored.
        owner: (M,) int32, EMPTY, and best (M,) int64, UNBEATEN; filled.
        slot: (A,) int32, written.
        last_slot: M - 1; M is a power of 2.
        B: at least the number of threads of a program.
    """
    total = tl.minimum(tl.load(num_candidates), capacity)
    first = tl.program_id(0) * B
    if first >= total:
        return
    # Lanes after the last candidate repeat it, which changes nothing.
    position = tl.minimum(first + tl.arange(0, B), total - 1).to(tl.int32)
    own_stream, own_state = tl.load(stream + position), tl.load(state + position)
    mixed = own_state.to(tl.int64) * 0x1E3779B97F4A7C15 + own_stream.to(tl.int64) * 0x3F58476D1CE4E5B9
    if HAS_CONTEXT:
        own_context = tl.load(context_idx + position)
        mixed ^= own_context * 0x14D049BB133111EB
    mixed ^= mixed >> 31
    mixed *= 0x2545F4914F6CDD1D
    own_slot = ((mixed >> 24) & last_slot).to(tl.int32)
    is_pending = tl.full([B], 1, tl.int1)
    while tl.max(is_pending.to(tl.int32), 0) > 0:
        # A lane that is done finds its slot taken, and leaves it unchanged.
        holder = tl.atomic_cas(owner + own_slot, tl.full([B], EMPTY, tl.int32), position, sem="relaxed")
        other = tl.where(holder < 0, position, holder)
        is_equal = (tl.load(stream + other) == own_stream) & (tl.load(state + other) == own_state)
        if HAS_CONTEXT:
            is_equal &= tl.load(context_idx + other) == own_context
        is_pending = is_pending & (is_equal == 0)
        own_slot = tl.where(is_pending, (own_slot + 1) & last_slot, own_slot).to(tl.int32)
    # Scores are at most 0, so the smallest magnitude is the best score.
    bits = tl.load(score + position).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_min(best + own_slot, (bits.to(tl.int64) << 32) | position.to(tl.int64), sem="relaxed")
    tl.store(slot + position, own_slot)


@triton.jit
def resolve(
    stream: tl.tensor,
    score: tl.tensor,
    num_candidates: tl.tensor,
    capacity: tl.tensor,
    best: tl.tensor,
    slot: tl.tensor,
    winner: tl.tensor,
    value: tl.tensor,
    num_inside: tl.tensor,
    range_begin: tl.tensor,
    range_end: tl.tensor,
    beam: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Finds the winner of each candidate, and counts the winners of each stream inside the beam.

    Args:
        stream, score: (A,); num_candidates (1,), capacity A.
        best, slot: as `insert` left them.
        winner: (A,) int32, index of the winner, written.
        value: (A,) float32, written: the scores of winners, -inf for all others.
        num_inside, range_begin, range_end: (N,) int32, all 0, filled.
    """
    total = tl.minimum(tl.load(num_candidates), capacity)
    first = tl.program_id(0) * B
    if first >= total:
        return
    position = first + tl.arange(0, B)
    is_valid = position < total
    own = tl.load(stream + position, mask=is_valid, other=0).to(tl.int32)
    before = tl.load(stream + position - 1, mask=is_valid & (position > 0), other=-1).to(tl.int32)
    mark_range(range_begin, range_end, own, before, position, total)
    own_slot = tl.load(slot + position, mask=is_valid, other=0)
    own_winner = (tl.load(best + own_slot, mask=is_valid, other=0) & 0xFFFFFFFF).to(tl.int32)
    own_value = tl.load(score + position, mask=is_valid, other=float("-inf"))
    own_value = tl.where(own_winner == position, own_value, float("-inf"))
    tl.store(winner + position, own_winner, mask=is_valid)
    tl.store(value + position, own_value, mask=is_valid)
    add_count(num_inside, own, is_valid & (own_value >= -beam) & (own_value > float("-inf")))


@triton.jit
def clear(
    num_candidates: tl.tensor, capacity: tl.tensor, owner: tl.tensor, best: tl.tensor, slot: tl.tensor, B: tl.constexpr
) -> None:
    """Empties the slots that were taken, for the next frame."""
    total = tl.minimum(tl.load(num_candidates), capacity)
    first = tl.program_id(0) * B
    if first >= total:
        return
    position = first + tl.arange(0, B)
    is_valid = position < total
    own_slot = tl.load(slot + position, mask=is_valid, other=0)
    tl.store(owner + own_slot, tl.full([B], EMPTY, tl.int32), mask=is_valid)
    tl.store(best + own_slot, tl.full([B], UNBEATEN, tl.int64), mask=is_valid)
