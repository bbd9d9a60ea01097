"""The token search over a lattice with a difference of n-gram models, as one loop for `jit`.

All utterances go through a frame together, so that their words are looked up together: a model that no cache holds
answers many queries in the time of one. Scores are rounded as in `FrameStep`, and of equally good paths the same stays.

Shapes: N utterances, A lattice arcs, K partial paths, C candidates, Q of them with words, R records, F final paths.


Searches a lattice with a language model that numba's loop looks up itself.

Shapes: N utterances, K partial paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asr.decoding.backend import Chunk, SearchSink
from asr.decoding.cpu.chunk import ensure_capacity
from asr.decoding.cpu.frame import pruning_threshold
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import Searchable
from asr.decoding.tokens import ActiveTokens
from asr.kernels.jit import jit_required, kernel
from asr.kernels.lookup import look_up
from asr.lm.interface import LanguageModel

_FIRST_MULTIPLIER = 0x1E3779B97F4A7C15


_SECOND_MULTIPLIER = 0x3F58476D1CE4E5B9


@kernel(fastmath=False)
def search_lattice(
    paths: Any, arcs: Any, num_frames: Any, score_offset: Any, beam: Any, max_active: int, lm_scale: Any,
    tables: Any, first: int,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Follows all paths inside the beam to the utterances' last frames.

    Args:
        paths: stream, state, context_idx, score, lm_score, backpointer (K,) of the paths before.
        arcs: arc_begin, score, num_words, word_begin, word_id and dst_state of the lattice's arcs.
        num_frames: (N,) of each utterance.
        score_offset: (N,) float64; what scores lack is added in place.
        beam, max_active: what stays, as of `pruning_threshold`.
        lm_scale: float32.
        tables: the language model's, for `look_up`, which always answers.

    Returns:
        The paths behind the last frames, as `paths` (F,), those of a stream side by side; the back-pointers, previous
        and arc (R,), and the number of each frame's first one.
    """
    arc_begin, arc_score, num_words, word_begin, word_id, dst_state = arcs
    block_begin = np.empty(num_frames.max() if len(num_frames) else 0, dtype=np.int64)
    table = np.full(1024, -1, dtype=np.int32)
    previous, record_arc, num_records = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), 0
    done = _chosen(paths, np.zeros(len(paths[0]), dtype=np.bool_))
    for frame in range(len(block_begin) + 1):
        is_over = num_frames[paths[0]] == frame
        if is_over.any():
            done = _joined(done, _chosen(paths, is_over))
            paths = _chosen(paths, ~is_over)
        stream, state, context_idx, score, lm_score, backpointer = paths
        source, arc, value = _expanded(stream, state, score, arc_begin, arc_score, score_offset, beam)
        num = len(source)
        own, dst = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
        next_idx, new_lm_score = np.empty(num, dtype=np.int64), np.empty(num)
        changed, num_changed = np.empty(num, dtype=np.int64), 0
        for i in range(num):
            own[i], dst[i] = stream[source[i]], dst_state[arc[i]]
            next_idx[i], new_lm_score[i] = context_idx[source[i]], lm_score[source[i]]
            if num_words[arc[i]] > 0:
                changed[num_changed] = i
                num_changed += 1
        if num_changed:
            changed = changed[:num_changed]
            word_score = _scored(changed, arc, next_idx, num_words, word_begin, word_id, tables)
            for j in range(num_changed):
                value[changed[j]] += word_score[j] * lm_scale
                new_lm_score[changed[j]] += word_score[j]
            _make_relative(own, value, score_offset)
        while len(table) < 2 * num:
            table = np.full(2 * len(table), -1, dtype=np.int32)
        kept = _kept(own, dst, next_idx, value, table, beam, max_active)
        room = num_records + len(kept)
        previous, record_arc = ensure_capacity(previous, room), ensure_capacity(record_arc, room)
        paths = (
            own[kept],
            dst[kept],
            next_idx[kept],
            value[kept],
            new_lm_score[kept],
            first + np.arange(num_records, room),
        )
        for k in range(len(kept)):
            previous[num_records + k], record_arc[num_records + k] = backpointer[source[kept[k]]], arc[kept[k]]
        if frame < len(block_begin):
            block_begin[frame] = first + num_records
        num_records = room
    return done, previous[:num_records], record_arc[:num_records], block_begin


@kernel(fastmath=False)
def _expanded(
    stream: Any, state: Any, score: Any, arc_begin: Any, arc_score: Any, score_offset: Any, beam: Any
) -> tuple[Any, Any, Any]:
    """The source, the arc and the score, relative to the stream's best, of what is inside the beam (C,)."""
    most = 0
    for path in range(len(state)):
        most += arc_begin[state[path] + 1] - arc_begin[state[path]]
    source, arc, value = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64), np.empty(most, score.dtype)
    num, begin = 0, 0
    while begin < len(state):
        first, path, best = num, begin, np.float32(-np.inf)
        while path < len(state) and stream[path] == stream[begin]:
            for position in range(arc_begin[state[path]], arc_begin[state[path] + 1]):
                source[num], arc[num], value[num] = path, position, score[path] + arc_score[position]
                best = max(best, value[num])
                num += 1
            path += 1
        if best > -np.inf:
            score_offset[stream[begin]] += best
        stay = first
        for i in range(first, num):
            relative = value[i] - best
            if relative >= -beam and relative > -np.inf:
                source[stay], arc[stay], value[stay] = source[i], arc[i], relative
                stay += 1
        num, begin = stay, path
    return source[:num], arc[:num], value[:num]


@kernel(fastmath=False)
def _scored(changed: Any, arc: Any, next_idx: Any, num_words: Any, word_begin: Any, word_id: Any, tables: Any) -> Any:
    """What the words of candidates (Q,) score, float32; next_idx (C,), the histories before, is moved behind them."""
    total = np.zeros(len(changed), dtype=np.float32)
    asked, position = np.arange(len(changed)), 0
    while len(asked):
        history, word = np.empty(len(asked), dtype=np.int64), np.empty(len(asked), dtype=np.int64)
        for j in range(len(asked)):
            at = changed[asked[j]]
            history[j], word[j] = next_idx[at], word_id[word_begin[arc[at]] + position]
        log_prob, following = np.empty(len(asked), dtype=np.float32), np.empty(len(asked), dtype=np.int64)
        look_up(history, word, tables, log_prob, following)
        position += 1
        num_left = 0
        for j in range(len(asked)):
            at = changed[asked[j]]
            total[asked[j]] += log_prob[j]
            next_idx[at] = following[j]
            if num_words[arc[at]] > position:
                asked[num_left] = asked[j]
                num_left += 1
        asked = asked[:num_left]
    return total


@kernel(fastmath=False)
def _make_relative(stream: Any, score: Any, score_offset: Any) -> None:
    """Takes from scores (C,) the best of their stream, which is added to the score_offset (N,)."""
    best = np.full(len(score_offset), -np.inf, dtype=np.float32)
    for i in range(len(score)):
        best[stream[i]] = max(best[stream[i]], score[i])
    for own in range(len(score_offset)):
        if best[own] == -np.inf:
            best[own] = 0.0
        score_offset[own] += best[own]
    for i in range(len(score)):
        score[i] -= best[stream[i]]


@kernel(fastmath=False)
def _kept(stream: Any, state: Any, context_idx: Any, score: Any, table: Any, beam: Any, max_active: int) -> Any:
    """Recombines candidates (C,) and prunes them: the places of those that stay; the table is all -1, as afterwards."""
    stays, mask = np.ones(len(state), dtype=np.bool_), len(table) - 1
    for i in range(len(state)):
        slot = (state[i] * _FIRST_MULTIPLIER) ^ (context_idx[i] * _SECOND_MULTIPLIER)
        slot = (slot ^ (slot >> 29)) & mask
        while table[slot] >= 0 and (state[table[slot]] != state[i] or context_idx[table[slot]] != context_idx[i]):
            slot = (slot + 1) & mask
        other = table[slot]
        if other < 0:
            table[slot] = i
        elif score[i] > score[other]:
            stays[other], table[slot] = False, i
        else:
            stays[i] = False
    table[:] = -1
    kept, num_kept, begin = np.empty(len(state), dtype=np.int64), 0, 0
    while begin < len(state):
        first, i = num_kept, begin
        while i < len(state) and stream[i] == stream[begin]:
            kept[num_kept] = i
            num_kept += int(stays[i] and score[i] >= -beam and score[i] > -np.inf)
            i += 1
        if max_active and num_kept - first > max_active:
            threshold = pruning_threshold(score[kept[first:num_kept]], beam, 0, max_active)
            num_inside, num_kept = num_kept, first
            for k in range(first, num_inside):
                kept[num_kept] = kept[k]
                num_kept += int(score[kept[k]] >= threshold)
        begin = i
    return kept[:num_kept]


@kernel(fastmath=False)
def _chosen(paths: Any, is_chosen: Any) -> Any:
    """Some of the paths (K,)."""
    stream, state, context_idx, score, lm_score, backpointer = paths
    return (
        stream[is_chosen], state[is_chosen], context_idx[is_chosen], score[is_chosen], lm_score[is_chosen],
        backpointer[is_chosen],
    )  # fmt: skip


@kernel(fastmath=False)
def _joined(one: Any, other: Any) -> Any:
    """These paths, then those."""
    return (
        np.concatenate((one[0], other[0])), np.concatenate((one[1], other[1])), np.concatenate((one[2], other[2])),
        np.concatenate((one[3], other[3])), np.concatenate((one[4], other[4])), np.concatenate((one[5], other[5])),
    )  # fmt: skip


class NumbaLatticeSearch:
    """A search over a lattice whose language model is a difference of n-gram models, without a lattice of its own.

    Args:
        graph: on the CPU, all its scores on the arcs.
        options: beams and scales.
        lm: its tables answer every query.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, lm: LanguageModel) -> None:
        self._loop = jit_required(search_lattice)
        self._lm = lm
        arc_begin, _, *arcs = graph.emitting.for_loop()
        self._arcs = (arc_begin, *arcs)
        self._limits = np.float32(options.search_beam), options.max_active_states, np.float32(options.lm_scale)

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.search`; the log-probabilities are zeros."""
        tables = self._lm.lookup_tables()
        assert tables is not None and sink.lattice is None
        paths = (tokens.stream, tokens.state, tokens.context_idx, tokens.score, tokens.lm_score, tokens.backpointer)
        found, previous, arc, block_begin = self._loop(
            *(tuple(part.numpy() for part in paths), self._arcs, chunk.num_frames.numpy(), chunk.score_offset.numpy()),
            *(*self._limits, tables, sink.backtrace.num_records),
        )
        sink.backtrace.add_blocks(torch.from_numpy(previous), torch.from_numpy(arc), block_begin.tolist())
        return ActiveTokens(*map(torch.from_numpy, found))
