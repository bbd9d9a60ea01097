"""What numba's loops take and give, as named tuples of arrays.

Shapes: N streams, K tokens, A candidates, Q candidates with words, R back-pointers, L losing arcs, B frames, S states,
E arcs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from asr.decoding.backend import SearchSink
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import ArcSet
from asr.decoding.tokens import ActiveTokens
from asr.kernels.jit import kernel

_NONE = -1
_NO_LATTICE = -1.0


class ArcArrays(NamedTuple):
    """The arcs of a graph that read a frame: `begin` (S + 1,), all others (E,), `word_begin` (E + 1,), `word` (W,)."""

    begin: Any
    token: Any
    score: Any
    num_words: Any
    word_begin: Any
    word: Any
    dst: Any


class TokenArrays(NamedTuple):
    """Active tokens (K,), those of a stream side by side."""

    stream: Any
    state: Any
    context: Any
    score: Any
    lm_score: Any
    backpointer: Any


class Frames(NamedTuple):
    """The frames of streams; `num_read` and `score_offset` are changed in place.

    Attributes:
        log_prob: of all streams and frames, flat.
        num_columns: from one frame of a stream to the next.
        max_frames: from one stream to the next.
        num_frames: (N,) how many frames are the stream's.
        num_read: (N,) how many of them have been read.
        score_offset: (N,) float64, what relative scores lack.
    """

    log_prob: Any
    num_columns: int
    max_frames: int
    num_frames: Any
    num_read: Any
    score_offset: Any


class Pruning(NamedTuple):
    """Beams, float32, and how many tokens of a stream survive a frame at least and at most (0: no limit)."""

    beam: Any
    skip_beam: Any
    min_active: int
    max_active: int


class CandidateArrays(NamedTuple):
    """Tokens extended by arcs (A,): the token's position, the arc, and the score, relative to the stream's best."""

    source: Any
    arc: Any
    score: Any


class LatticeArcs(NamedTuple):
    """What a lattice needs beside back-pointers, see `LatticeRecords.add_frames`; the arrays have room for more.

    Attributes:
        margin: float32; arcs that lose by no more belong to the lattice. Below 0 no lattice is kept.
        count: (1,) how many losing arcs there are.
        utt_idx, num_read: (R,) of the back-pointers, the stream and the frames read.
        lm_score: (R,) float64, what the language model gave the words of each back-pointer's arc.
        src, dst, arc, score_gap: (L,) of the losing arcs.
        losing_lm_score: (L,) float64, as `lm_score`.
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
    """Back-pointers made so far; the arrays have room for more.

    Attributes:
        first: the number of the first one.
        count: (2,) how many back-pointers and how many frames there are.
        previous, arc: (R,) the back-pointer before each, and its arc.
        frame_begin: (B,) the number of each frame's first one.
        lattice: what is kept for a lattice.
    """

    first: int
    count: Any
    previous: Any
    arc: Any
    frame_begin: Any
    lattice: LatticeArcs


def arc_arrays(arcs: ArcSet) -> ArcArrays:
    """Arcs on a CPU as arrays."""
    words = arcs.words
    return ArcArrays(
        begin=arcs.arc_begin.numpy(),
        token=arcs.token_id.numpy(),
        score=arcs.score.numpy(),
        num_words=words.num_words.numpy(),
        word_begin=words.word_begin.numpy(),
        word=words.word_id.numpy(),
        dst=arcs.dst_state.numpy(),
    )


def token_arrays(tokens: ActiveTokens) -> TokenArrays:
    """Tokens on a CPU as arrays."""
    parts = (tokens.stream, tokens.state, tokens.context_idx, tokens.score, tokens.lm_score, tokens.backpointer)
    return TokenArrays(*(part.numpy() for part in parts))


def active_tokens(tokens: TokenArrays) -> ActiveTokens:
    """The way back from `token_arrays`."""
    return ActiveTokens(*map(torch.from_numpy, tokens))


def pruning_of(options: DecodingOptions) -> Pruning:
    """Beams and limits of a search."""
    skip_beam = np.float32(np.inf if options.skip_beam is None else options.skip_beam)
    return Pruning(np.float32(options.search_beam), skip_beam, options.min_active_states, options.max_active_states)


def no_backpointers(sink: SearchSink) -> Backpointers:
    """None yet."""
    none, no_scores = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
    margin = np.float32(_NO_LATTICE if sink.lattice is None else sink.lattice.margin)
    losing = none, none, none, no_scores.astype(np.float32), no_scores
    lattice = LatticeArcs(margin, np.zeros(1, dtype=np.int64), none, none, no_scores, *losing)
    return Backpointers(sink.backtrace.num_records, np.zeros(2, dtype=np.int64), none, none, none, lattice)


def hand_over(made: Backpointers, arcs: ArcSet, sink: SearchSink) -> None:
    """Gives the sink the back-pointers and losing arcs that have been made."""
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
    """The candidates as tokens (A,), their words not scored yet, each with the back-pointer of the token it extends."""
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
    """Appends the back-pointers of one frame, and its losing arcs where a lattice is kept.

    Args:
        made: `Backpointers`; the tuple returned replaces it.
        tokens: before the frame.
        candidates: what they became over arcs.
        extended: the candidates as `TokenArrays` (A,), each with the back-pointer of the token that it extends.
        survivors: winner (A,) and kept (K',), see `asr.decoding.tokens.Survivors`.
        beam: the search beam, float32.
        num_read: (N,) the frames that each stream has read, this one included.

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
            lattice.src,
            lattice.dst,
            lattice.arc,
            lattice.score_gap,
            lattice.losing_lm_score,
        )
        lattice = add_losing_arcs(lattice, tokens, candidates, extended, survivors, after, beam)
    return after, Backpointers(made.first, made.count, previous, arc, frame_begin, lattice)


@kernel(fastmath=False)
def add_losing_arcs(
    lattice: Any, tokens: Any, candidates: Any, extended: Any, survivors: Any, after: Any, beam: Any
) -> Any:
    """Appends the losing arcs of one frame, as `asr.decoding.lattice.LatticeRecords.add` chooses them.

    Args:
        lattice: `LatticeArcs`; the tuple returned replaces it.
        tokens, candidates, extended, survivors, beam: as of `add_frame`.
        after: the tokens after the frame.
    """
    winner, kept = survivors
    # What falls behind the search beam is dropped, unless min_active_states let worse tokens survive.
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
    return LatticeArcs(
        lattice.margin,
        lattice.count,
        lattice.utt_idx,
        lattice.num_read,
        lattice.lm_score,
        src,
        dst,
        arc,
        score_gap,
        lm_score,
    )


@kernel(fastmath=False)
def ensure_capacity(array: Any, size: int) -> Any:
    """The array, or a larger one that begins with it."""
    if size <= len(array):
        return array
    larger = np.empty(2 * size, dtype=array.dtype)
    larger[: len(array)] = array
    return larger


@kernel(fastmath=False)
def append(array: Any, num: int, values: Any) -> Any:
    """The first `num` entries of an array and these behind them, perhaps in a larger array."""
    array = ensure_capacity(array, num + len(values))
    array[num : num + len(values)] = values
    return array


@kernel(fastmath=False)
def append_tokens(tokens: Any, num: int, more: Any) -> Any:
    """As `append` for each array of the tokens."""
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
    """Some tokens in a row."""
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
    """Where the tokens of the stream that stands at `begin` end."""
    end = begin
    while end < len(stream) and stream[end] == stream[begin]:
        end += 1
    return end
