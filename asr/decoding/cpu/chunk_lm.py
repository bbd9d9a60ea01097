"""The search with a language model, for whole chunks, with numba loops.

Each stream advances by itself to its next frame with words. Frames without words thus need no call of their own, and
all streams query the language model together even if they are at different frames. Uncompiled, the loops are slow
oracles.

Shapes: N streams, K tokens, A candidates, Q candidates with words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from asr.decoding.backend import ActiveTokens, Searchable
from asr.decoding.chunk_backend import Chunk, SearchSink
from asr.decoding.cpu.arrays import (
    CandidateArrays,
    Frames,
    active_tokens,
    add_frame,
    append,
    append_tokens,
    arc_arrays,
    extend,
    hand_over,
    no_backpointers,
    pruning_of,
    slice_tokens,
    stream_end,
    token_arrays,
)
from asr.decoding.cpu.frame import expand_stream, keep_frame, keep_stream, normalize_scores, room_for_candidates
from asr.decoding.settings import DecodingOptions
from asr.kernels.jit import jit_required, kernel
from asr.kernels.lookup import expand, look_up, of_any_type
from asr.lm.interface import LanguageModel


class WordQueries(NamedTuple):
    """The candidates with words (Q,): their indices among all candidates, their histories, and their first words."""

    position: Any
    history: Any
    word: Any


class WordScores(NamedTuple):
    """Results of queries (Q,): the candidates' indices, the scores of their words, and the next histories."""

    position: Any
    log_prob: Any
    next: Any


class LookupLimits(NamedTuple):
    """How far `advance_with_lookup` goes: it stops after about `num_backpointers`.

    With `expands_all`, it expands the histories of all tokens together with those that streams wait for. A search over
    a lattice will query nearly all of them soon, a search in a decoding graph a few.
    """

    num_backpointers: int
    expands_all: bool


@kernel(fastmath=False)
def advance_until_words(tokens: Any, arcs: Any, frames: Any, pruning: Any, made: Any) -> tuple[Any, Any, Any, Any]:
    """Advances each stream to its end, or to its next frame with words inside the beam, which is only expanded.

    Args:
        tokens: `TokenArrays` before.
        arcs: arcs of the graph.
        frames: `Frames`, changed in place.
        pruning: beams and limits.
        made: `Backpointers`, to which those of the frames without words are appended.

    Returns:
        The tokens where streams stopped; the candidates of the frames with words; their queries; `made`.
    """
    none = np.empty(0, dtype=np.int64)
    stopped, num_tokens = slice_tokens(tokens, 0, 0), 0
    source, arc, score, num_candidates = none, none, tokens.score[:0], 0
    position, history, word, num_queries = none, none, none, 0
    begin = 0
    while begin < len(tokens.state):
        end = stream_end(tokens.stream, begin)
        own, candidates, made, _ = advance_stream(slice_tokens(tokens, begin, end), arcs, frames, pruning, made)
        queries = word_queries(own, candidates, arcs)
        stopped = append_tokens(stopped, num_tokens, own)
        position = append(position, num_queries, queries.position + num_candidates)
        history = append(history, num_queries, queries.history)
        word = append(word, num_queries, queries.word)
        source = append(source, num_candidates, candidates.source + num_tokens)
        arc = append(arc, num_candidates, candidates.arc)
        score = append(score, num_candidates, candidates.score)
        num_tokens, num_candidates = num_tokens + len(own.state), num_candidates + len(candidates.arc)
        num_queries, begin = num_queries + len(queries.word), end
    return (
        slice_tokens(stopped, 0, num_tokens),
        CandidateArrays(source[:num_candidates], arc[:num_candidates], score[:num_candidates]),
        WordQueries(position[:num_queries], history[:num_queries], word[:num_queries]),
        made,
    )


@kernel(fastmath=False)
def advance_with_lookup(
    tokens: Any, arcs: Any, frames: Any, pruning: Any, lm_scale: Any, tables: Any, made: Any, limits: Any
) -> tuple[Any, Any, Any, bool]:
    """Advances each stream until the language model's tables cannot answer a query and cannot be expanded either.

    Args:
        tokens, arcs, frames, pruning, made: as for `advance_until_words`.
        lm_scale: float32.
        tables: tables of the language model, for `look_up`.
        limits: `LookupLimits`.

    Returns:
        As `advance_as_answered`.
    """
    while True:
        tokens, pending, made, is_over = advance_as_answered(
            tokens, arcs, frames, pruning, lm_scale, tables, made, limits.num_backpointers
        )
        if is_over or not len(pending):
            return tokens, pending, made, is_over
        if limits.expands_all:
            pending = np.concatenate((pending, tokens.context))
        if expand(pending, tables) <= 0:
            return tokens, pending, made, is_over


@kernel(fastmath=False)
def advance_as_answered(
    tokens: Any, arcs: Any, frames: Any, pruning: Any, lm_scale: Any, tables: Any, made: Any, enough: int
) -> tuple[Any, Any, Any, bool]:
    """Advances each stream until a lookup has no answer, or to about `enough` backpointers.

    The other arguments are those of `advance_with_lookup`.

    Returns:
        The tokens where streams stopped; the histories (Q',) that must be expanded before their streams can search the
        next frame; `made`; and whether all frames have been read.
    """
    stopped, num_tokens = slice_tokens(tokens, 0, 0), 0
    pending, num_pending = np.empty(0, dtype=np.int64), 0
    begin, is_over = 0, True
    while begin < len(tokens.state):
        end = stream_end(tokens.stream, begin)
        own, stream = slice_tokens(tokens, begin, end), tokens.stream[begin]
        begin, goes_on = end, True
        while goes_on:
            own, candidates, made, offset_before = advance_stream(own, arcs, frames, pruning, made)
            queries = word_queries(own, candidates, arcs)
            if not len(queries.word):
                break
            scores, unknown = look_words_up(queries, candidates.arc[queries.position], arcs, tables)
            if len(unknown):
                # Undoes the frame, which is expanded again when its histories have been expanded.
                frames.score_offset[stream] = offset_before
                frames.num_read[stream] -= 1
                pending = append(pending, num_pending, unknown)
                num_pending += len(unknown)
                is_over = False
                break
            own, made = finish_frame(own, candidates, scores, lm_scale, arcs, frames, pruning, made)
            goes_on = made.count[0] < enough
            is_over = is_over and goes_on
        stopped = append_tokens(stopped, num_tokens, own)
        num_tokens += len(own.state)
    return slice_tokens(stopped, 0, num_tokens), pending[:num_pending], made, is_over


@kernel(fastmath=False)
def advance_stream(tokens: Any, arcs: Any, frames: Any, pruning: Any, made: Any) -> tuple[Any, Any, Any, Any]:
    """As `advance_until_words`, for one stream.

    Returns:
        The tokens where the stream stopped; the candidates of the frame with words, none at the stream's end; `made`;
        and `score_offset` before that frame.
    """
    empty = np.empty(0, dtype=np.int64)
    nothing = CandidateArrays(empty, empty, tokens.score[:0])
    offset_before = 0.0
    while len(tokens.state) and frames.num_read[tokens.stream[0]] < frames.num_frames[tokens.stream[0]]:
        own = tokens.stream[0]
        offset_before = frames.score_offset[own]
        room = room_for_candidates(tokens.state, arcs)
        source, arc = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
        out = CandidateArrays(source, arc, np.empty(room, dtype=np.float32))
        log_prob = frames.log_prob[(own * frames.max_frames + frames.num_read[own]) * frames.num_columns :]
        peak = frames.peak[own, frames.num_read[own]]
        num, best, _ = expand_stream(tokens.state, tokens.score, arcs, log_prob, peak, pruning, pruning.beam, True, out)
        if best > -np.inf:
            frames.score_offset[own] += best
        frames.num_read[own] += 1
        candidates = CandidateArrays(out.source[:num], out.arc[:num], out.score[:num])
        has_words = False
        for i in range(num):
            has_words = has_words or arcs.num_words[candidates.arc[i]] > 0
        if has_words:
            return tokens, candidates, made, offset_before
        extended = extend(tokens, candidates, arcs)
        winner, no_table = np.empty(num, dtype=np.int64), np.empty(0, dtype=np.int32)
        kept, _ = keep_stream(extended.state, extended.context, extended.score, no_table, pruning, winner)
        tokens, made = add_frame(made, tokens, candidates, extended, (winner, kept), pruning.beam, frames.num_read)
    return tokens, nothing, made, offset_before


@kernel(fastmath=False)
def word_queries(tokens: Any, candidates: Any, arcs: Any) -> Any:
    """The candidates with words, their histories and their first words, as `WordQueries`."""
    num = 0
    for i in range(len(candidates.arc)):
        num += int(arcs.num_words[candidates.arc[i]] > 0)
    position, history = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    word, num = np.empty(num, dtype=np.int64), 0
    for i in range(len(candidates.arc)):
        arc = candidates.arc[i]
        if arcs.num_words[arc] > 0:
            position[num], history[num] = i, tokens.context[candidates.source[i]]
            word[num] = arcs.word[arcs.word_begin[arc]]
            num += 1
    return WordQueries(position, history, word)


@kernel(fastmath=False)
def look_words_up(queries: Any, arc: Any, arcs: Any, tables: Any) -> tuple[Any, Any]:
    """The scores of all words of the queries' arcs (Q,), and the histories (Q',) that must be expanded first.

    The scores are valid only if there are no such histories.
    """
    num = len(arc)
    log_prob, following = np.empty(num, dtype=np.float32), np.empty(num, dtype=np.int64)
    if not look_up(queries.history, queries.word, tables, log_prob, following):
        return WordScores(queries.position, log_prob, following), queries.history
    more, context, word = (np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64))
    position = 1
    while True:
        # The j-th words of all arcs are looked up together.
        num_more = 0
        for i in range(num):
            if arcs.num_words[arc[i]] > position:
                more[num_more], context[num_more] = i, following[i]
                word[num_more] = arcs.word[arcs.word_begin[arc[i]] + position]
                num_more += 1
        if not num_more:
            return WordScores(queries.position, log_prob, following), queries.history[:0]
        own_log_prob, own_next = np.empty(num_more, dtype=np.float32), np.empty(num_more, dtype=np.int64)
        if not look_up(context[:num_more], word[:num_more], tables, own_log_prob, own_next):
            return WordScores(queries.position, log_prob, following), context[:num_more]
        for j in range(num_more):
            log_prob[more[j]] += own_log_prob[j]
            following[more[j]] = own_next[j]
        position += 1


@kernel(fastmath=False)
def finish_frame(
    tokens: Any, candidates: Any, scores: Any, lm_scale: Any, arcs: Any, frames: Any, pruning: Any, made: Any
) -> tuple[Any, Any]:
    """Adds the language model's scores, recombines and prunes.

    Args:
        tokens: tokens before the frame.
        candidates: candidates of the frame; their scores are changed in place.
        scores: `WordScores`.
        lm_scale: float32.
        arcs: arcs of the graph.
        frames: `Frames`, whose `num_read` includes this frame; the score offsets are changed in place.
        pruning: beams and limits.
        made: `Backpointers`, to which those of the frame are appended.

    Returns:
        The tokens after the frame, and `made`.
    """
    extended = extend(tokens, candidates, arcs)
    add_word_scores(extended, scores, lm_scale)
    normalize_scores(extended.stream, extended.score, frames.score_offset)
    is_complete, no_table = np.ones(len(frames.score_offset), dtype=np.bool_), np.empty(0, dtype=np.int32)
    winner, kept, _ = keep_frame(
        extended.stream, extended.state, extended.context, extended.score, is_complete, no_table, pruning
    )
    return add_frame(made, tokens, candidates, extended, (winner, kept), pruning.beam, frames.num_read)


@kernel(fastmath=False)
def add_word_scores(extended: Any, scores: Any, lm_scale: Any) -> None:
    """Adds `WordScores` to candidates, given as tokens (A,), in place."""
    for i in range(len(scores.position)):
        at = scores.position[i]
        extended.score[at] += scores.log_prob[i] * lm_scale
        extended.lm_score[at] += scores.log_prob[i]
        extended.context[at] = scores.next[i]


_TURNS_BETWEEN_COLLECTIONS = 16


class NumbaChunkSearchWithLM:
    """A `ChunkBackend` with a language model, without input epsilons or a limit on contexts.

    Words are scored in one of two ways:

    * Streams stop at frames with words, and one call of `lm.score` scores the words of all streams.
    * The loop looks words up in the language model's tables. It also expands histories (runs the hidden layer), all
      those that streams wait for together, as far as the tables have room. It stops only if they have none, or if the
      model has no loop for this; one call of `lm.expand` then does the same.

    Args:
        graph: on the CPU, without input epsilons.
        options: beams and scales.
        lm: the language model.
        looks_up: whether the loop looks words up, as long as the model has tables.
        backpointers_per_call: number of backpointers after which a lookup loop stops, so that they can be collected.
    """

    def __init__(
        self,
        graph: Searchable,
        options: DecodingOptions,
        lm: LanguageModel,
        looks_up: bool = True,
        backpointers_per_call: int = 1 << 18,
    ) -> None:
        self._advance_until_words = jit_required(advance_until_words)
        self._advance_with_lookup = jit_required(advance_with_lookup)
        self._finish_frame = jit_required(finish_frame)
        self._lm = lm
        self._looks_up = looks_up
        self._limits = LookupLimits(backpointers_per_call, graph.is_pushed)
        self._emitting = graph.emitting
        self._arcs = arc_arrays(graph.emitting)
        self._pruning = pruning_of(options)
        self._lm_scale = np.float32(options.lm_scale)

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.search`."""
        num_streams, max_frames, num_columns = chunk.log_prob.shape
        frames = Frames(
            chunk.log_prob.reshape(-1).numpy(),
            chunk.log_prob.amax(2).numpy(),
            num_columns,
            max_frames,
            chunk.num_frames.numpy(),
            np.zeros(num_streams, dtype=np.int64),
            chunk.score_offset.numpy(),
        )
        finished, turn, looks_up = [ActiveTokens.empty(tokens.state.device)], 0, self._looks_up
        while len(tokens):
            # With lookup, `expand` tells the model which contexts are in use.
            if sink.backtrace.is_due or (not looks_up and turn % _TURNS_BETWEEN_COLLECTIONS == 0):
                sink.collect([*finished, tokens])
            # Tables may change when contexts are forgotten. A model that has reached its memory limit has none.
            tables = self._lm.lookup_tables() if looks_up else None
            looks_up = tables is not None
            if looks_up:
                tokens, is_over = self._look_words_up(tokens, frames, tables, sink)
                if is_over:
                    return ActiveTokens.join([*finished, tokens])
            else:
                tokens, done = self._score_next_words(tokens, frames, sink)
                finished.append(done)
            turn += 1
        return ActiveTokens.join(finished)

    def _score_next_words(
        self, tokens: ActiveTokens, frames: Frames, sink: SearchSink
    ) -> tuple[ActiveTokens, ActiveTokens]:
        """Advances streams past their next frame with words -> tokens after it, and tokens of streams without one."""
        before, candidates, queries, made = self._advance_until_words(
            token_arrays(tokens), self._arcs, frames, self._pruning, no_backpointers(sink)
        )
        hand_over(made, self._emitting, sink)
        has_words = np.zeros(len(frames.num_read), dtype=np.bool_)
        has_words[before.stream[candidates.source]] = True
        done = active_tokens(before).select(torch.from_numpy(np.flatnonzero(~has_words[before.stream])))
        if not len(queries.word):
            return ActiveTokens.empty(tokens.state.device), done
        log_prob, following = self._lm.score(torch.from_numpy(queries.history), torch.from_numpy(queries.word))
        if self._emitting.words.max_words > 1:
            own_arc = torch.from_numpy(candidates.arc[queries.position])
            log_prob, following = self._emitting.words.score_rest(self._lm, own_arc, log_prob, following)
        scores = WordScores(queries.position, log_prob.float().numpy(), following.numpy())
        after, made = self._finish_frame(
            *(before, candidates, scores, self._lm_scale),
            *(self._arcs, frames, self._pruning, no_backpointers(sink)),
        )
        hand_over(made, self._emitting, sink)
        return active_tokens(after), done

    def _look_words_up(
        self, tokens: ActiveTokens, frames: Frames, tables: Any, sink: SearchSink
    ) -> tuple[ActiveTokens, bool]:
        """Advances all streams as far as the tables answer -> the tokens there, and whether no frames are left."""
        after, pending, made, is_over = self._advance_with_lookup(
            *(token_arrays(tokens), self._arcs, frames, self._pruning, self._lm_scale, of_any_type(tables)),
            *(no_backpointers(sink), self._limits),
        )
        hand_over(made, self._emitting, sink)
        tokens = active_tokens(after)
        self._lm.expand(torch.from_numpy(pending), tokens.context_idx)
        return tokens, bool(is_over)
