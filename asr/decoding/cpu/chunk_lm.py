"""The token search with a language model between two of its answers, as loops for `jit`.

A stream is followed by itself up to its next frame that has words. So all streams ask together, whatever frame each
has come to, and the frames without words cost no call of their own.

Shapes: N streams, K partial paths, P paths behind the frames that have been read, A candidates, Q of them with words,
R records, B frames.


The token search with a difference of language models, which is looked up within the loop: many frames to a call.

Shapes: N streams, K partial paths, P paths behind the last frames, Q word queries, R records, B frames.


Reads whole chunks with a language model by numba's loops: one call before it is asked, one behind.

Shapes: N streams, T frames, C tokens, K partial paths.


Reads whole chunks with a language model that numba's loops ask themselves, many frames to a call.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.decoding.backend import Chunk, ChunkBackend, SearchSink
from asr.decoding.backtrace import Backtrace
from asr.decoding.cpu.chunk import ensure_capacity
from asr.decoding.cpu.frame import expand_frame, keep_frame
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import Searchable
from asr.decoding.tokens import ActiveTokens
from asr.kernels.jit import jit_required, kernel
from asr.kernels.lookup import look_up
from asr.lm.interface import LanguageModel


@kernel(fastmath=False)
def read_to_words(
    stream: Any, state: Any, score: Any, context_idx: Any, lm_score: Any, record: Any,
    arc_begin: Any, token_id: Any, arc_score: Any, num_words: Any, word_begin: Any, word_id: Any, dst_state: Any,
    log_prob: Any, frame_begin: Any, num_columns: int, num_left: Any, offset: Any,
    beam: Any, word_beam: Any, min_active: int, max_active: int, first_record: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any]:  # fmt: skip
    """Reads the frames of each stream until one has words inside the beam, which is expanded only, or none is left.

    Args:
        stream, state, score, context_idx, lm_score, record: (K,) the paths before, those of a stream side by side.
        arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state: the graph's arcs and their words.
        log_prob: scores of all frames, flat, of num_columns each.
        frame_begin, num_left: (N,) where the stream's next frame begins in them, and how many frames are to be read;
            changed in place.
        offset: (N,) float64; what scores lack is added in place.
        beam, word_beam, min_active, max_active: as of `expand_frame` and `keep_frame`.
        first_record: the number of the first record to be made.

    Returns:
        The paths behind the frames that have been read: stream, state, context_idx, score, lm_score, record (P,).
        Candidates of the frames that have words: source among these paths, arc, stream, score (A,); which have words,
        their histories and their first words (Q,).
        Records: previous and arc (R,), and the number of each frame's first one (B,).
        What offset (N,) was before the frames that are expanded only.
    """
    none = np.empty(0, dtype=np.int64)
    path_stream, path_state, path_context, path_record = none, none, none, none
    path_score, path_lm_score = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.float64)
    source, arc, candidate_stream = none, none, none
    candidate_score = np.empty(0, dtype=np.float32)
    changed, history, word = none, none, none
    previous, record_arc, block_begin = none, none, none
    num_paths, num_candidates, num_changed, num_records, num_blocks = 0, 0, 0, 0, 0
    is_complete, no_table = np.ones(1, dtype=np.bool_), np.zeros(0, dtype=np.int32)
    offset_before = offset.copy()
    zeros = np.zeros(len(state), dtype=np.int64)
    begin = 0
    while begin < len(state):
        own, end = stream[begin], begin
        while end < len(state) and stream[end] == own:
            end += 1
        own_state, own_score, own_context = state[begin:end], score[begin:end], context_idx[begin:end]
        own_lm_score, own_record = lm_score[begin:end], record[begin:end]
        own_source, own_arc, own_candidate = none, none, candidate_score[:0]
        begin = end
        while num_left[own] and len(own_state):
            if len(zeros) < len(own_state):
                zeros = np.zeros(2 * len(own_state), dtype=np.int64)
            offset_before[own] = offset[own]
            own_source, own_arc, _, own_candidate, _ = expand_frame(
                zeros[: len(own_state)], own_state, own_score, arc_begin, token_id, arc_score, num_words, log_prob,
                frame_begin[own : own + 1], offset[own : own + 1], beam, beam, word_beam, min_active, True,
            )  # fmt: skip
            frame_begin[own] += num_columns
            num_left[own] -= 1
            has_words = False
            for i in range(len(own_arc)):
                has_words = has_words or num_words[own_arc[i]] > 0
            if has_words:
                break
            num = len(own_arc)
            if len(zeros) < num:
                zeros = np.zeros(2 * num, dtype=np.int64)
            new_state, new_context = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
            for i in range(num):
                new_state[i], new_context[i] = dst_state[own_arc[i]], own_context[own_source[i]]
            _, kept, _ = keep_frame(
                zeros[:num], new_state, new_context, own_candidate, is_complete, no_table, beam, min_active, max_active
            )
            room = num_records + len(kept)
            previous, record_arc = ensure_capacity(previous, room), ensure_capacity(record_arc, room)
            block_begin = ensure_capacity(block_begin, num_blocks + 1)
            block_begin[num_blocks] = first_record + num_records
            num_blocks += 1
            own_lm_score = own_lm_score[own_source[kept]]
            for i in range(len(kept)):
                previous[num_records + i] = own_record[own_source[kept[i]]]
                record_arc[num_records + i] = own_arc[kept[i]]
            own_state, own_context, own_score = new_state[kept], new_context[kept], own_candidate[kept]
            own_record = first_record + np.arange(num_records, room)
            num_records = room
            own_source, own_arc, own_candidate = none, none, candidate_score[:0]
        room = num_paths + len(own_state)
        path_stream, path_state = ensure_capacity(path_stream, room), ensure_capacity(path_state, room)
        path_context, path_record = ensure_capacity(path_context, room), ensure_capacity(path_record, room)
        path_score, path_lm_score = ensure_capacity(path_score, room), ensure_capacity(path_lm_score, room)
        path_stream[num_paths:room] = own
        path_state[num_paths:room], path_context[num_paths:room] = own_state, own_context
        path_score[num_paths:room], path_lm_score[num_paths:room] = own_score, own_lm_score
        path_record[num_paths:room] = own_record
        room = num_candidates + len(own_arc)
        source, arc = ensure_capacity(source, room), ensure_capacity(arc, room)
        candidate_stream, candidate_score = (
            ensure_capacity(candidate_stream, room),
            ensure_capacity(candidate_score, room),
        )
        changed, history, word = (
            ensure_capacity(changed, room),
            ensure_capacity(history, room),
            ensure_capacity(word, room),
        )
        for i in range(len(own_arc)):
            at = num_candidates + i
            source[at], arc[at] = num_paths + own_source[i], own_arc[i]
            candidate_stream[at], candidate_score[at] = own, own_candidate[i]
            if num_words[own_arc[i]] > 0:
                changed[num_changed], history[num_changed] = at, own_context[own_source[i]]
                word[num_changed] = word_id[word_begin[own_arc[i]]]
                num_changed += 1
        num_paths += len(own_state)
        num_candidates = room
    return (
        path_stream[:num_paths], path_state[:num_paths], path_context[:num_paths], path_score[:num_paths],
        path_lm_score[:num_paths], path_record[:num_paths],
        source[:num_candidates], arc[:num_candidates], candidate_stream[:num_candidates],
        candidate_score[:num_candidates], changed[:num_changed], history[:num_changed], word[:num_changed],
        previous[:num_records], record_arc[:num_records], block_begin[:num_blocks], offset_before,
    )  # fmt: skip


@kernel(fastmath=False)
def keep_words(
    source: Any, arc: Any, stream: Any, score: Any, changed: Any, word_score: Any, next_idx: Any, lm_scale: Any,
    context_idx: Any, lm_score: Any, record: Any, dst_state: Any, offset: Any,
    beam: Any, min_active: int, max_active: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:  # fmt: skip
    """Adds what the language model says, recombines and prunes.

    Args:
        source, arc, stream, score: (A,) the candidates; the scores are changed in place.
        changed, word_score, next_idx: (Q,) those with words, what these score and the histories behind them.
        lm_scale: float32.
        context_idx, lm_score, record: (P,) of the paths before.
        dst_state: where the graph's arcs lead.
        offset: (N,) float64; what scores lack is added in place.
        beam, min_active, max_active: as of `keep_frame`.

    Returns:
        stream, state, context_idx, score, lm_score, the record before and the arc of what stays, (K',) each.
    """
    num = len(arc)
    state, new_context = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    new_lm_score = np.empty(num, dtype=np.float64)
    for i in range(num):
        state[i], new_context[i], new_lm_score[i] = dst_state[arc[i]], context_idx[source[i]], lm_score[source[i]]
    for i in range(len(changed)):
        at = changed[i]
        score[at] += word_score[i] * lm_scale
        new_lm_score[at] += word_score[i]
        new_context[at] = next_idx[i]
    best = np.full(len(offset), -np.inf, dtype=np.float32)
    for i in range(num):
        best[stream[i]] = max(best[stream[i]], score[i])
    for own in range(len(offset)):
        if best[own] == -np.inf:
            best[own] = 0.0
        offset[own] += best[own]
    for i in range(num):
        score[i] -= best[stream[i]]
    is_complete, no_table = np.ones(len(offset), dtype=np.bool_), np.zeros(0, dtype=np.int32)
    _, kept, _ = keep_frame(stream, state, new_context, score, is_complete, no_table, beam, min_active, max_active)
    previous = record[source[kept]]
    return stream[kept], state[kept], new_context[kept], score[kept], new_lm_score[kept], previous, arc[kept]


@kernel(fastmath=False)
def read_with_words(
    tokens: Any, arcs: Any, log_prob: Any, frame_begin: Any, num_columns: int, num_left: Any, offset: Any,
    beam: Any, word_beam: Any, lm_scale: Any, min_active: int, max_active: int,
    tables: Any, first_record: int, most_records: int,
) -> tuple[Any, Any, Any, Any, Any, bool]:  # fmt: skip
    """Reads the frames of each stream, one stream after the other, as far as the models' loops can answer.

    Args:
        tokens: stream, state, score, context_idx, lm_score, record of the paths before, (K,) each, those of a stream
            side by side.
        arcs: arc_begin, token_id, score, num_words, word_begin, word_id and dst_state of the graph's arcs.
        log_prob, frame_begin, num_columns, num_left, offset, beam, word_beam, min_active, max_active: as of
            `read_to_words`.
        lm_scale: float32.
        tables: the language model's, for `look_up`.
        first_record: the number of the first record to be made.
        most_records: how many are enough.

    Returns:
        The paths behind the last frames that were read, as `tokens`, (P,) each; the histories (Q,) that streams wait
        for, which stand before a frame that asks them; the records: previous and arc (R,), and the number of each
        frame's first one (B,). And whether all frames have been read.
    """
    arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state = arcs
    streams, states, scores, contexts, lm_scores, last_records = tokens
    none = np.empty(0, dtype=np.int64)
    all_stream, all_state, all_context, all_record = none, none, none, none
    all_score, all_lm_score = scores[:0], lm_scores[:0]
    waits_for, previous, record_arc, block_begin = none, none, none, none
    num_paths, num_waiting, num_records, num_blocks = 0, 0, 0, 0
    begin, is_over = 0, True
    while begin < len(states):
        own, end = streams[begin], begin
        while end < len(states) and streams[end] == own:
            end += 1
        stream, state, score = streams[begin:end], states[begin:end], scores[begin:end]
        context_idx, lm_score, record = contexts[begin:end], lm_scores[begin:end], last_records[begin:end]
        begin = end
        is_going = True
        while is_going:
            (
                stream, state, context_idx, score, lm_score, record, source, arc, candidate_stream, candidate_score,
                changed, history, word, before, before_arc, begins, offset_before,
            ) = read_to_words(
                stream, state, score, context_idx, lm_score, record,
                arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state,
                log_prob, frame_begin, num_columns, num_left, offset,
                beam, word_beam, min_active, max_active, first_record + num_records,
            )  # fmt: skip
            previous = _with(previous, num_records, before)
            record_arc = _with(record_arc, num_records, before_arc)
            block_begin = _with(block_begin, num_blocks, begins)
            num_records, num_blocks = num_records + len(before), num_blocks + len(begins)
            if not len(word):
                break
            word_score, next_idx, lacking = _scored(history, word, arc[changed], num_words, word_begin, word_id, tables)
            if len(lacking):
                # The frame is read again when it can be answered.
                offset[own] = offset_before[own]
                frame_begin[own] -= num_columns
                num_left[own] += 1
                waits_for = _with(waits_for, num_waiting, lacking)
                num_waiting += len(lacking)
                is_over = False
                break
            stream, state, context_idx, score, lm_score, before, before_arc = keep_words(
                source, arc, candidate_stream, candidate_score, changed, word_score, next_idx, lm_scale, context_idx,
                lm_score, record, dst_state, offset, beam, min_active, max_active,
            )  # fmt: skip
            previous = _with(previous, num_records, before)
            record_arc = _with(record_arc, num_records, before_arc)
            record = first_record + np.arange(num_records, num_records + len(before))
            block_begin = _with(block_begin, num_blocks, record[:1])
            num_records, num_blocks = num_records + len(before), num_blocks + len(record[:1])
            is_going = num_records < most_records
            is_over = is_over and is_going
        all_stream, all_state = _with(all_stream, num_paths, stream), _with(all_state, num_paths, state)
        all_context, all_record = _with(all_context, num_paths, context_idx), _with(all_record, num_paths, record)
        all_score, all_lm_score = _with(all_score, num_paths, score), _with(all_lm_score, num_paths, lm_score)
        num_paths += len(state)
    paths = (
        all_stream[:num_paths], all_state[:num_paths], all_score[:num_paths], all_context[:num_paths],
        all_lm_score[:num_paths], all_record[:num_paths],
    )  # fmt: skip
    return (
        paths, waits_for[:num_waiting], previous[:num_records], record_arc[:num_records], block_begin[:num_blocks],
        is_over,
    )  # fmt: skip


def _with(array: Any, num: int, values: Any) -> Any:
    """The first `num` of an array, and these values behind them, perhaps with more room."""
    array = ensure_capacity(array, num + len(values))
    array[num : num + len(values)] = values
    return array


def _scored(
    history: Any, word: Any, arc: Any, num_words: Any, word_begin: Any, word_id: Any, tables: Any
) -> tuple[Any, Any, Any]:
    """The scores of all words of arcs (Q,), of which `word` is the first, after their histories, and those behind them.

    Where these cannot be told, the histories that are asked come last (Q',).
    """
    word_score, next_idx = np.empty(len(word), dtype=np.float32), np.empty(len(word), dtype=np.int64)
    if not look_up(history, word, tables, word_score, next_idx):
        return word_score, next_idx, history
    more, context = np.empty(len(arc), dtype=np.int64), np.empty(len(arc), dtype=np.int64)
    further, position = np.empty(len(arc), dtype=np.int64), 1
    while True:
        num = 0
        for i in range(len(arc)):
            if num_words[arc[i]] > position:
                more[num], context[num], further[num] = i, next_idx[i], word_id[word_begin[arc[i]] + position]
                num += 1
        if not num:
            return word_score, next_idx, history[:0]
        log_prob, following = np.empty(num, dtype=np.float32), np.empty(num, dtype=np.int64)
        if not look_up(context[:num], further[:num], tables, log_prob, following):
            return word_score, next_idx, context[:num]
        for j in range(num):
            word_score[more[j]] += log_prob[j]
            next_idx[more[j]] = following[j]
        position += 1


# What is alive is told about once in so many turns.
_TURNS_BETWEEN_MARKS = 16


class NumbaChunkSearchWithLM:
    """The search where no lattice is kept, word histories have no limit and each arc reads a frame; the same paths.

    Streams wait for each other where they need words, not at each frame: the language model is asked as often as the
    stream with the most frames that have words, for more of them at a time.

    Args:
        graph: on the CPU, without arcs that read nothing.
        options: beams and scales.
        lm: the language model.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, lm: LanguageModel) -> None:
        self._read_to_words = jit_required(read_to_words)
        self._keep_words = jit_required(keep_words)
        self._lm = lm
        self._emitting = graph.emitting
        self._dst_state = graph.emitting.dst_state.numpy()
        self._arcs = graph.emitting.for_loop()
        self._beam = np.float32(options.search_beam)
        self._word_beam = np.float32(np.inf if options.word_beam is None else options.word_beam)
        self._lm_scale = np.float32(options.lm_scale)
        self._limits = (options.min_active_states, options.max_active_states)

    def read(self, tokens: ActiveTokens, chunk: Chunk, traces: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.read`, without a lattice."""
        (log_prob, num_frames, offset), backtrace = chunk, traces.backtrace
        max_frames, num_columns = log_prob.shape[1:]
        frame_begin = np.arange(len(num_frames)) * (max_frames * num_columns)
        num_left = num_frames.numpy().copy()
        flat = log_prob.reshape(-1).numpy()
        done, turn = [ActiveTokens.none(offset.device)], 0
        while len(tokens):
            if backtrace.is_due or turn % _TURNS_BETWEEN_MARKS == 0:
                traces.collect([*done, tokens])
            *found, previous, arc, block_begin, _ = self._read_to_words(
                *(tokens.stream.numpy(), tokens.state.numpy(), tokens.score.numpy(), tokens.context_idx.numpy()),
                *(tokens.lm_score.numpy(), tokens.record.numpy(), *self._arcs),
                *(flat, frame_begin, num_columns, num_left, offset.numpy(), self._beam, self._word_beam),
                *(*self._limits, backtrace.num_records),
            )
            backtrace.add_blocks(torch.from_numpy(previous), self._graph_arc(arc), block_begin.tolist())
            paths, asked = found[:6], found[6:]
            has_words = np.zeros(len(num_left), dtype=np.bool_)
            has_words[asked[2]] = True
            over = torch.from_numpy(np.flatnonzero(~has_words[paths[0]]))
            if len(over):
                stream, state, context_idx, score, lm_score, record = map(torch.from_numpy, paths)
                done.append(ActiveTokens(stream, state, context_idx, score, lm_score, record).select(over))
            tokens = self._with_words(paths, asked, offset, backtrace) if len(asked[0]) else done[0]
            turn += 1
        return ActiveTokens.join(done)

    def _with_words(self, paths: Any, asked: Any, offset: Tensor, backtrace: Backtrace) -> ActiveTokens:
        """The frames that have words, from what `read_to_words` has found."""
        _, _, context_idx, _, lm_score, record = paths
        source, arc, stream, score, changed, history, word = asked
        word_score, next_idx = self._lm.score(torch.from_numpy(history), torch.from_numpy(word))
        if self._emitting.words.max_words > 1:
            own_arc = torch.from_numpy(arc[changed])
            word_score, next_idx = self._emitting.words.score_rest(self._lm, own_arc, word_score, next_idx)
        *found, previous, kept_arc = self._keep_words(
            *(source, arc, stream, score, changed, word_score.numpy(), next_idx.numpy(), self._lm_scale, context_idx),
            *(lm_score, record, self._dst_state, offset.numpy(), self._beam, *self._limits),
        )
        new_stream, state, new_context_idx, new_score, new_lm_score = map(torch.from_numpy, found)
        new_record = backtrace.add(torch.from_numpy(previous), self._graph_arc(kept_arc))
        return ActiveTokens(new_stream, state, new_context_idx, new_score, new_lm_score, new_record)

    def _graph_arc(self, arc: Any) -> Tensor:
        return self._emitting.arc_of(torch.from_numpy(arc))


# So many records are made before back-pointers that lead nowhere may be dropped.
_RECORDS_AT_ONCE = 1 << 18


class NumbaWordSearch:
    """What `NumbaChunkSearchWithLM` does with a call for each frame that has words; the same paths and scores.

    A stream goes on by itself until its words ask a history that the model must expand first, by its hidden layer. When
    all streams have come so far, these are expanded together, and with them the histories of all that is alive, which
    over a lattice, whose scores tell how a path ends at best, are asked soon.

    Args:
        graph: on the CPU, without arcs that read nothing.
        options: beams and scales.
        lm: the language model, whose tables are for loops.
        otherwise: reads on where the model has no tables any more, having come to its bound of bytes.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, lm: LanguageModel, otherwise: ChunkBackend) -> None:
        self._loop = jit_required(read_with_words)
        self._otherwise = otherwise
        self._emitting = graph.emitting
        self._arcs = graph.emitting.for_loop()
        self._beams = tuple(
            np.float32(np.inf if beam is None else beam) for beam in (options.search_beam, options.word_beam)
        )
        self._limits = (np.float32(options.lm_scale), options.min_active_states, options.max_active_states)
        self._lm = lm

    def read(self, tokens: ActiveTokens, chunk: Chunk, traces: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.read`; a lattice cannot be kept."""
        assert traces.lattice is None
        (log_prob, num_frames, offset), backtrace = chunk, traces.backtrace
        num_streams, max_frames, num_columns = log_prob.shape
        flat = log_prob.reshape(-1).numpy()
        frame_begin = np.arange(num_streams) * (max_frames * num_columns)
        num_left = num_frames.numpy().copy()
        paths = tuple(
            part.numpy()
            for part in (tokens.stream, tokens.state, tokens.score, tokens.context_idx, tokens.lm_score, tokens.record)
        )
        is_over = False
        while not is_over:
            if backtrace.is_due:
                tokens = _tokens_of(paths)
                traces.collect([tokens])
                paths = (*paths[:-1], tokens.record.numpy())
            tables = self._lm.lookup_tables()
            if tables is None:
                return self._otherwise.read(_tokens_of(paths), _rest(chunk, num_left), traces)
            paths, waits_for, previous, arc, block_begin, is_over = self._loop(
                *(paths, self._arcs, flat, frame_begin, num_columns, num_left, offset.numpy(), *self._beams),
                *(*self._limits, tables, backtrace.num_records, _RECORDS_AT_ONCE),
            )
            graph_arc = self._emitting.arc_of(torch.from_numpy(arc))
            backtrace.add_blocks(torch.from_numpy(previous), graph_arc, block_begin.tolist())
            if len(waits_for):
                waits_for = np.concatenate([waits_for, paths[3]])
            self._lm.expand(torch.from_numpy(waits_for), torch.from_numpy(paths[3]))
        return _tokens_of(paths)


def _tokens_of(paths: tuple[Any, ...]) -> ActiveTokens:
    stream, state, score, context_idx, lm_score, record = map(torch.from_numpy, paths)
    return ActiveTokens(stream, state, context_idx, score, lm_score, record)


def _rest(chunk: Chunk, num_left: NDArray[np.int64]) -> Chunk:
    """Of each stream's frames the last ones, (N,) so many, at the beginning of its row."""
    log_prob, num_frames, offset = chunk
    rest = log_prob.new_zeros(len(num_left), int(num_left.max()), log_prob.shape[2])
    for row, frames, num, left in zip(rest, log_prob, num_frames.tolist(), num_left.tolist(), strict=True):
        row[:left] = frames[num - left : num]
    return Chunk(rest, torch.from_numpy(num_left), offset)
