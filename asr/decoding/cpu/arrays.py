"""Arguments and results of the numba loops, as named tuples of arrays.

Shapes: N streams, K tokens, A candidates, Q candidates with words, R backpointers, L losing arcs, B frames, S states,
E arcs.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from asr.decoding.backend import ActiveTokens, ArcSet
from asr.decoding.chunk_backend import SearchSink
from asr.decoding.settings import DecodingOptions
from asr.kernels.jit import jit_required, kernel

_NONE = -1


class ArcArrays(NamedTuple):
    """The arcs of a graph that read a frame.

    Attributes:
        begin: (S + 1,) where the arcs of each state begin.
        token, score, num_words, dst: (E,).
        word_begin, word: (E + 1,) and (W,) the words of the arcs.
        excess: float32, by how much an arc's score may exceed that of an earlier arc of its state. It is 0 if the arcs
            of each state are sorted by score.
    """

    begin: Any
    token: Any
    score: Any
    num_words: Any
    word_begin: Any
    word: Any
    dst: Any
    excess: Any


class TokenArrays(NamedTuple):
    """Active tokens (K,), grouped by stream."""

    stream: Any
    state: Any
    context: Any
    score: Any
    lm_score: Any
    backpointer: Any


class Frames(NamedTuple):
    """Frames of all streams; `num_read` and `score_offset` are changed in place.

    Attributes:
        log_prob: scaled log-probabilities of all streams and frames, flattened.
        peak: (N, T) the highest log-probability of each frame.
        num_columns: number of columns of a frame.
        max_frames: number of frames of a stream, padding included.
        num_frames: (N,) number of valid frames of each stream.
        num_read: (N,) number of frames that have been read.
        score_offset: (N,) float64, added to relative scores to give absolute ones.
    """

    log_prob: Any
    peak: Any
    num_columns: int
    max_frames: int
    num_frames: Any
    num_read: Any
    score_offset: Any


class Pruning(NamedTuple):
    """Beams, float32, and the minimum and maximum number of tokens that survive a frame (maximum 0: no limit)."""

    beam: Any
    skip_beam: Any
    min_active: int
    max_active: int


class CandidateArrays(NamedTuple):
    """Tokens extended over arcs (A,): the token's index, the arc, and the score relative to the stream's best."""

    source: Any
    arc: Any
    score: Any


class LatticeArcs(NamedTuple):
    """Records for a lattice, see `LatticeRecords.add_frames`; the arrays may be longer than what is in use.

    Attributes:
        margin: float32, losing arcs with a score gap up to this are kept; below 0, no lattice is kept.
        count: (1,) number of losing arcs.
        utt_idx, num_read: (R,) stream of each backpointer, and number of frames read.
        lm_score: (R,) float64, language model score of the words of each backpointer's arc.
        src, dst, arc, score_gap: (L,) the losing arcs.
        losing_lm_score: (L,) float64, language model score of the words of each losing arc.
    """

    margin: Any
    count: Any
    utt_idx: Any
    num_read: Any
    lm_score: Any
    src: Any
    dst: Any
    arc: Any
    score_gap: Any
    losing_lm_score: Any


class Backpointers(NamedTuple):
    """The backpointers created so far; the arrays may be longer than what is in use.

    Attributes:
        first: number of the first backpointer.
        count: (2,) number of backpointers, and number of frames.
        previous, arc: (R,) the previous backpointer and the arc of each.
        frame_begin: (B,) number of the first backpointer of each frame.
        lattice: records for a lattice.
    """

    first: int
    count: Any
    previous: Any
    arc: Any
    frame_begin: Any
    lattice: LatticeArcs


# To find `excess` of a large graph takes 13 ms, and some backends are made for each search.
_KNOWN_ARRAYS: WeakKeyDictionary[ArcSet, ArcArrays] = WeakKeyDictionary()


def arc_arrays(arcs: ArcSet) -> ArcArrays:
    """Converts arcs on the CPU to arrays."""
    known = _KNOWN_ARRAYS.get(arcs)
    if known is None:
        known = _KNOWN_ARRAYS[arcs] = _arrays_of(arcs)
    return known


def _arrays_of(arcs: ArcSet) -> ArcArrays:
    words = arcs.words
    begin, score = arcs.arc_begin.numpy(), arcs.score.numpy()
    return ArcArrays(
        begin=begin,
        token=arcs.token_id.numpy(),
        score=score,
        num_words=words.num_words.numpy(),
        word_begin=words.word_begin.numpy(),
        word=words.word_id.numpy(),
        dst=arcs.dst_state.numpy(),
        excess=jit_required(largest_excess)(begin, score),
    )


@kernel(fastmath=False)
def largest_excess(begin: Any, score: Any) -> Any:
    """The `excess` of arcs with these scores (E,); infinite if a score is."""
    largest = np.float32(0.0)
    for state in range(len(begin) - 1):
        lowest = np.float32(np.inf)
        for arc in range(begin[state], begin[state + 1]):
            largest = max(largest, score[arc] - lowest)
            lowest = min(lowest, score[arc])
    return largest


def token_arrays(tokens: ActiveTokens) -> TokenArrays:
    """Converts tokens on the CPU to arrays."""
    parts = (tokens.stream, tokens.state, tokens.context_idx, tokens.score, tokens.lm_score, tokens.backpointer)
    return TokenArrays(*(part.numpy() for part in parts))


def active_tokens(tokens: TokenArrays) -> ActiveTokens:
    """The inverse of `token_arrays`."""
    return ActiveTokens(*map(torch.from_numpy, tokens))


def pruning_of(options: DecodingOptions) -> Pruning:
    """Beams and limits of a search."""
    skip_beam = np.float32(np.inf if options.skip_beam is None else options.skip_beam)
    return Pruning(np.float32(options.search_beam), skip_beam, options.min_active_states, options.max_active_states)


def margin_of(sink: SearchSink) -> Any:
    """The score gap up to which losing arcs are kept, float32; below 0 if no lattice is kept."""
    return np.float32(-1.0 if sink.lattice is None else sink.lattice.margin)


def no_backpointers(sink: SearchSink) -> Backpointers:
    """Empty arrays, to which a search appends."""
    none, no_scores = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
    losing = none, none, none, no_scores.astype(np.float32), no_scores
    lattice = LatticeArcs(margin_of(sink), np.zeros(1, dtype=np.int64), none, none, no_scores, *losing)
    return Backpointers(sink.backtrace.num_records, np.zeros(2, dtype=np.int64), none, none, none, lattice)


def hand_over(made: Backpointers, arcs: ArcSet, sink: SearchSink) -> None:
    """Passes backpointers and losing arcs to the sink."""
    num, num_frames = made.count.tolist()
    previous, arc = torch.from_numpy(made.previous[:num]), torch.from_numpy(made.arc[:num])
    sink.backtrace.add_blocks(previous, arcs.arc_of(arc), made.frame_begin[:num_frames].tolist())
    if sink.lattice is not None:
        kept, losing = made.lattice, slice(0, int(made.lattice.count[0]))
        utt_idx, num_read, lm_score = (torch.from_numpy(part[:num]) for part in kept[2:5])
        src, dst, losing_arc, score_gap, losing_lm_score = (torch.from_numpy(part[losing]) for part in kept[5:])
        losing_arcs = (src, dst, arcs.arc_of(losing_arc), score_gap)
        sink.lattice.add_frames(utt_idx, num_read, losing_arcs, (lm_score, losing_lm_score))


@kernel(fastmath=False)
def extend(tokens: Any, candidates: Any, arcs: Any) -> Any:
    """Candidates as tokens (A,) without the scores of their words, with the backpointers of the tokens they extend."""
    num, source = len(candidates.arc), candidates.source
    stream, state, context = (
        np.empty(num, dtype=np.int64),
        np.empty(num, dtype=np.int64),
        np.empty(num, dtype=np.int64),
    )
    lm_score, backpointer = np.empty(num, dtype=np.float64), np.empty(num, dtype=np.int64)
    for i in range(num):
        stream[i], state[i] = tokens.stream[source[i]], arcs.dst[candidates.arc[i]]
        context[i], lm_score[i] = tokens.context[source[i]], tokens.lm_score[source[i]]
        backpointer[i] = tokens.backpointer[source[i]]
    return TokenArrays(stream, state, context, candidates.score, lm_score, backpointer)


@kernel(fastmath=False)
def add_frame(made: Any, tokens: Any, candidates: Any, extended: Any, survivors: Any, beam: Any, num_read: Any) -> Any:
    """Appends the backpointers of one frame, and its losing arcs if a lattice is kept.

    Args:
        made: `Backpointers`; replaced by the returned tuple.
        tokens: tokens before the frame.
        candidates: their extensions over arcs.
        extended: the candidates as `TokenArrays` (A,), each with the backpointer of the token that it extends.
        survivors: winner (A,) and kept (K',), see `asr.decoding.backend.Survivors`.
        beam: the search beam, float32.
        num_read: (N,) number of frames that each stream has read, this one included.

    Returns:
        The tokens after the frame, and `made`.
    """
    kept = survivors[1]
    num, num_frames = made.count[0], made.count[1]
    previous = append(made.previous, num, extended.backpointer[kept])
    arc, frame_begin = append(made.arc, num, candidates.arc[kept]), ensure_capacity(made.frame_begin, num_frames + 1)
    frame_begin[num_frames] = made.first + num
    made.count[0] += len(kept)
    made.count[1] += 1
    after = TokenArrays(
        extended.stream[kept],
        extended.state[kept],
        extended.context[kept],
        extended.score[kept],
        extended.lm_score[kept],
        made.first + np.arange(num, num + len(kept)),
    )
    lattice = made.lattice
    if lattice.margin >= 0:
        lm_score = after.lm_score - tokens.lm_score[candidates.source[kept]]
        lattice = LatticeArcs(
            lattice.margin,
            lattice.count,
            append(lattice.utt_idx, num, after.stream),
            append(lattice.num_read, num, num_read[after.stream]),
            append(lattice.lm_score, num, lm_score),
            *losing_arcs(lattice, tokens, candidates, extended, survivors, after, beam),
        )
    return after, Backpointers(made.first, made.count, previous, arc, frame_begin, lattice)


@kernel(fastmath=False)
def losing_arcs(
    lattice: Any, tokens: Any, candidates: Any, extended: Any, survivors: Any, after: Any, beam: Any
) -> Any:
    """Appends the losing arcs of one frame, chosen as by `asr.decoding.lattice_records.LatticeRecords.add`.

    Args:
        lattice: `LatticeArcs`, of which `count` is changed in place.
        tokens, candidates, extended, survivors, beam: as for `add_frame`.
        after: tokens after the frame.

    Returns:
        src, dst, arc, score_gap and losing_lm_score of `LatticeArcs`, with these arcs.
    """
    winner, kept = survivors
    # Arcs outside the search beam are dropped, unless min_active_states let worse tokens survive.
    lowest = np.full(after.stream.max() + 1 if len(kept) else 0, -beam, dtype=np.float32)
    number = np.full(len(winner), _NONE, dtype=np.int64)
    for k in range(len(kept)):
        lowest[after.stream[k]] = min(lowest[after.stream[k]], after.score[k])
        number[kept[k]] = after.backpointer[k]
    first = num = lattice.count[0]
    room = num + len(winner)
    src, dst = ensure_capacity(lattice.src, room), ensure_capacity(lattice.dst, room)
    arc, score_gap = ensure_capacity(lattice.arc, room), ensure_capacity(lattice.score_gap, room)
    lm_score = ensure_capacity(lattice.losing_lm_score, room)
    for i in range(len(winner)):
        won = winner[i]
        gap = extended.score[won] - extended.score[i]
        if won == i or number[won] < 0 or not gap <= lattice.margin or extended.score[i] < lowest[extended.stream[i]]:
            continue
        src[num], dst[num], arc[num], score_gap[num] = extended.backpointer[i], number[won], candidates.arc[i], gap
        lm_score[num] = extended.lm_score[i] - tokens.lm_score[candidates.source[i]]
        num += 1
    lattice.count[0] += num - first
    return src, dst, arc, score_gap, lm_score


@kernel(fastmath=False)
def ensure_capacity(array: Any, size: int) -> Any:
    """The array if it has `size` entries, else a larger array that begins with it."""
    if size <= len(array):
        return array
    larger = np.empty(2 * size, dtype=array.dtype)
    larger[: len(array)] = array
    return larger


@kernel(fastmath=False)
def append(array: Any, num: int, values: Any) -> Any:
    """Writes values after the first `num` entries of an array, in a larger array if necessary."""
    array = ensure_capacity(array, num + len(values))
    array[num : num + len(values)] = values
    return array


@kernel(fastmath=False)
def append_tokens(tokens: Any, num: int, more: Any) -> Any:
    """Does `append` for each array of the tokens."""
    return TokenArrays(
        append(tokens.stream, num, more.stream),
        append(tokens.state, num, more.state),
        append(tokens.context, num, more.context),
        append(tokens.score, num, more.score),
        append(tokens.lm_score, num, more.lm_score),
        append(tokens.backpointer, num, more.backpointer),
    )


@kernel(fastmath=False)
def slice_tokens(tokens: Any, begin: int, end: int) -> Any:
    """The tokens from `begin` to `end`."""
    return TokenArrays(
        tokens.stream[begin:end],
        tokens.state[begin:end],
        tokens.context[begin:end],
        tokens.score[begin:end],
        tokens.lm_score[begin:end],
        tokens.backpointer[begin:end],
    )


@kernel(fastmath=False)
def stream_end(stream: Any, begin: int) -> int:
    """Where the tokens of the stream end that begin at `begin`."""
    end = begin
    while end < len(stream) and stream[end] == stream[begin]:
        end += 1
    return end
