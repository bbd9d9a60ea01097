"""What numba's loops take and give, as named tuples of arrays.

Shapes: N streams, K tokens, A candidates, Q candidates with words, R back-pointers, B frames, S states, E arcs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import ArcSet
from asr.decoding.tokens import ActiveTokens
from asr.kernels.jit import kernel


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
    """The frames that streams have still to read; `begin`, `num_left` and `score_offset` are changed in place.

    Attributes:
        log_prob: of all streams and frames, flat.
        num_columns: from one frame of a stream to the next.
        begin: (N,) where the stream's next frame begins in `log_prob`.
        num_left: (N,) how many frames are left.
        score_offset: (N,) float64, what relative scores lack.
    """

    log_prob: Any
    num_columns: int
    begin: Any
    num_left: Any
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


class Backpointers(NamedTuple):
    """Back-pointers made so far; the arrays have room for more.

    Attributes:
        first: the number of the first one.
        count: (2,) how many back-pointers and how many frames there are.
        previous, arc: (R,) the back-pointer before each, and its arc.
        frame_begin: (B,) the number of each frame's first one.
    """

    first: int
    count: Any
    previous: Any
    arc: Any
    frame_begin: Any

    def made(self) -> tuple[Any, Any, list[int]]:
        """Those made: previous (R,), arc (R,), and the number of each frame's first one."""
        num, num_frames = self.count.tolist()
        return self.previous[:num], self.arc[:num], self.frame_begin[:num_frames].tolist()


def arc_arrays(arcs: ArcSet) -> ArcArrays:
    """Arcs on a CPU as arrays."""
    words = arcs.words
    of_words = words.num_words, words.word_begin, words.word_id
    parts = (arcs.arc_begin, arcs.token_id, arcs.score, *of_words, arcs.dst_state)
    return ArcArrays(*(part.numpy() for part in parts))


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


def no_backpointers(first: int) -> Backpointers:
    """None yet."""
    none = np.empty(0, dtype=np.int64)
    return Backpointers(first, np.zeros(2, dtype=np.int64), none, none, none)


@kernel(fastmath=False)
def add_backpointers(made: Any, previous: Any, arc: Any) -> Any:
    """Appends the back-pointers of one frame (R',); the tuple returned replaces `made`."""
    num, num_frames = made.count[0], made.count[1]
    made = Backpointers(
        made.first,
        made.count,
        append(made.previous, num, previous),
        append(made.arc, num, arc),
        ensure_capacity(made.frame_begin, num_frames + 1),
    )
    made.frame_begin[num_frames] = made.first + num
    made.count[0] += len(arc)
    made.count[1] += 1
    return made


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
