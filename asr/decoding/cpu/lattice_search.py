"""The search over a lattice with a language model whose tables answer all queries, as one numba loop.

All utterances advance frame by frame together, so that their words are looked up together. Cache misses in the tables
of an n-gram model then overlap. Scores are rounded and ties resolved as in `asr.decoding.frame`. Uncompiled, the loop
is a slow oracle.

Shapes: N utterances, K tokens, A candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.decoding.backend import ActiveTokens, Searchable
from asr.decoding.chunk_backend import Chunk, SearchSink
from asr.decoding.cpu.arrays import (
    CandidateArrays,
    TokenArrays,
    active_tokens,
    add_frame,
    arc_arrays,
    extend,
    hand_over,
    no_backpointers,
    pruning_of,
    stream_end,
    token_arrays,
)
from asr.decoding.cpu.chunk_lm import add_word_scores, look_words_up, word_queries
from asr.decoding.cpu.frame import context_slot, count_arcs, normalize_scores, prune_winners, resolve_winners
from asr.decoding.settings import DecodingOptions
from asr.kernels.jit import jit_required, kernel
from asr.kernels.lookup import of_any_type
from asr.lm.interface import LanguageModel


@kernel(fastmath=False)
def search_lattice(
    tokens: Any, arcs: Any, num_frames: Any, score_offset: Any, pruning: Any, lm_scale: Any, tables: Any, made: Any
) -> tuple[Any, Any]:
    """Follows all paths inside the beam to the utterances' last frames.

    Args:
        tokens: `TokenArrays` before the first frame.
        arcs: arcs of the lattice, which contain all scores.
        num_frames: (N,) number of frames of each utterance.
        score_offset: (N,) float64, changed in place.
        pruning: beam and limits.
        lm_scale: float32.
        tables: tables of the language model, for `look_up`; they answer all queries.
        made: `Backpointers`.

    Returns:
        The tokens after the last frames, and `made`.
    """
    table = np.full(1024, -1, dtype=np.int32)
    finished = select_tokens(tokens, np.zeros(len(tokens.state), dtype=np.bool_))
    for frame in range(num_frames.max() + 1):
        is_over = num_frames[tokens.stream] == frame
        if is_over.any():
            finished = join_tokens(finished, select_tokens(tokens, is_over))
            tokens = select_tokens(tokens, ~is_over)
        out = expand_inside_beam(tokens, arcs, score_offset, pruning)
        extended, queries = extend(tokens, out, arcs), word_queries(tokens, out, arcs)
        if len(queries.word):
            scores, _ = look_words_up(queries, out.arc[queries.position], arcs, tables)
            add_word_scores(extended, scores, lm_scale)
            normalize_scores(extended.stream, extended.score, score_offset)
        while len(table) < 2 * len(out.arc):
            table = np.full(2 * len(table), -1, dtype=np.int32)
        survivors = keep_all_streams(extended, table, pruning)
        num_read = np.full(len(num_frames), frame + 1, dtype=np.int64)
        tokens, made = add_frame(made, tokens, out, extended, survivors, pruning.beam, num_read)
    return finished, made


@kernel(fastmath=False)
def expand_inside_beam(tokens: Any, arcs: Any, score_offset: Any, pruning: Any) -> Any:
    """The candidates inside the beams, relative to each utterance's best score, which is added to score_offset (N,)."""
    room = count_arcs(tokens.state, arcs)
    source, arc = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
    score = np.empty(room, dtype=np.float32)
    num, begin = 0, 0
    while begin < len(tokens.state):
        first, end, best = num, stream_end(tokens.stream, begin), np.float32(-np.inf)
        for token in range(begin, end):
            for position in range(arcs.begin[tokens.state[token]], arcs.begin[tokens.state[token] + 1]):
                source[num], arc[num], score[num] = token, position, tokens.score[token] + arcs.score[position]
                best = max(best, score[num])
                num += 1
        if best > -np.inf:
            score_offset[tokens.stream[begin]] += best
        kept = first
        for i in range(first, num):
            relative = score[i] - best
            beam = pruning.beam if arcs.num_words[arc[i]] == 0 else min(pruning.beam, pruning.skip_beam)
            if relative >= -beam and relative > -np.inf:
                source[kept], arc[kept], score[kept] = source[i], arc[i], relative
                kept += 1
        num, begin = kept, end
    return CandidateArrays(source[:num], arc[:num], score[:num])


@kernel(fastmath=False)
def keep_all_streams(extended: Any, table: Any, pruning: Any) -> tuple[Any, Any]:
    """Recombines and prunes the candidates of a frame, given as tokens (A,): winner (A,) and kept (K',).

    Utterances share no states, so one hash table of at least 2 A slots serves all; it is -1 before and after.
    """
    stream, state, context, score = extended.stream, extended.state, extended.context, extended.score
    winner = np.arange(len(state))
    for i in range(len(state)):
        slot = context_slot(table, state, context, i)
        other = table[slot]
        if other < 0:
            table[slot] = i
        elif score[i] > score[other]:
            winner[other], table[slot] = i, i
        else:
            winner[i] = other
    table[:] = -1
    resolve_winners(winner)
    kept, num_kept, begin = np.empty(len(state), dtype=np.int64), 0, 0
    while begin < len(state):
        end, first = stream_end(stream, begin), num_kept
        for i in range(begin, end):
            kept[num_kept] = i
            num_kept += int(winner[i] == i and score[i] > -np.inf)
        survivors = prune_winners(kept[first:num_kept], score, pruning)
        num_kept, begin = first + len(survivors), end
    return winner, kept[:num_kept]


@kernel(fastmath=False)
def select_tokens(tokens: Any, is_chosen: Any) -> Any:
    """Some of the tokens (K,)."""
    return TokenArrays(
        tokens.stream[is_chosen],
        tokens.state[is_chosen],
        tokens.context[is_chosen],
        tokens.score[is_chosen],
        tokens.lm_score[is_chosen],
        tokens.backpointer[is_chosen],
    )


@kernel(fastmath=False)
def join_tokens(one: Any, other: Any) -> Any:
    """These tokens, then those."""
    return TokenArrays(
        np.concatenate((one.stream, other.stream)),
        np.concatenate((one.state, other.state)),
        np.concatenate((one.context, other.context)),
        np.concatenate((one.score, other.score)),
        np.concatenate((one.lm_score, other.lm_score)),
        np.concatenate((one.backpointer, other.backpointer)),
    )


class NumbaLatticeSearch:
    """A `ChunkBackend` over a lattice, with a language model whose tables answer all queries.

    Args:
        graph: on the CPU, with all scores on its arcs.
        options: beams and scales.
        lm: the language model.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, lm: LanguageModel) -> None:
        self._search_lattice = jit_required(search_lattice)
        self._lm = lm
        self._emitting = graph.emitting
        self._arcs = arc_arrays(graph.emitting)
        self._pruning = pruning_of(options)
        self._lm_scale = np.float32(options.lm_scale)

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.search`; the log-probabilities must be 0, and are not read."""
        tables = self._lm.lookup_tables()
        assert tables is not None and tables.always_answers
        if not len(tokens):
            return tokens
        found, made = self._search_lattice(
            *(token_arrays(tokens), self._arcs, chunk.num_frames.numpy(), chunk.score_offset.numpy()),
            *(self._pruning, self._lm_scale, of_any_type(tables), no_backpointers(sink)),
        )
        hand_over(made, self._emitting, sink)
        return active_tokens(found)
