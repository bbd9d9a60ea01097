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
from torch import Tensor

from asr.decoding.backend import Chunk, SearchSink
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
    stream: Any, state: Any, score: Any, context_idx: Any, lm_score: Any, backpointer: Any,
    arc_begin: Any, token_id: Any, arc_score: Any, num_words: Any, word_begin: Any, word_id: Any, dst_state: Any,
    log_prob: Any, frame_begin: Any, num_columns: int, num_left: Any, score_offset: Any,
    beam: Any, word_beam: Any, min_active: int, max_active: int, first_record: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any]:  # fmt: skip
    """Reads the frames of each stream until one has words inside the beam, which is expanded only, or none is left.

    Args:
        stream, state, score, context_idx, lm_score, backpointer: (K,) the paths before, those of a stream side by side.
        arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state: the graph's arcs and their words.
        log_prob: scores of all frames, flat, of num_columns each.
        frame_begin, num_left: (N,) where the stream's next frame begins in them, and how many frames are to be read;
            changed in place.
        score_offset: (N,) float64; what scores lack is added in place.
        beam, word_beam, min_active, max_active: as of `expand_frame` and `keep_frame`.
        first_record: the number of the first backpointer to be made.

    Returns:
        The paths behind the frames that have been read: stream, state, context_idx, score, lm_score, backpointer (P,).
        Candidates of the frames that have words: source among these paths, arc, stream, score (A,); which have words,
        their histories and their first words (Q,).
        Records: previous and arc (R,), and the number of each frame's first one (B,).
        What score_offset (N,) was before the frames that are expanded only.
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
    score_offset_before = score_offset.copy()
    zeros = np.zeros(len(state), dtype=np.int64)
    begin = 0
    while begin < len(state):
        own, end = stream[begin], begin
        while end < len(state) and stream[end] == own:
            end += 1
        own_state, own_score, own_context = state[begin:end], score[begin:end], context_idx[begin:end]
        own_lm_score, own_record = lm_score[begin:end], backpointer[begin:end]
        own_source, own_arc, own_candidate = none, none, candidate_score[:0]
        begin = end
        while num_left[own] and len(own_state):
            if len(zeros) < len(own_state):
                zeros = np.zeros(2 * len(own_state), dtype=np.int64)
            score_offset_before[own] = score_offset[own]
            own_source, own_arc, _, own_candidate, _ = expand_frame(
                zeros[: len(own_state)], own_state, own_score, arc_begin, token_id, arc_score, num_words, log_prob,
                frame_begin[own : own + 1], score_offset[own : own + 1], beam, beam, word_beam, min_active, True,
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
        previous[:num_records], record_arc[:num_records], block_begin[:num_blocks], score_offset_before,
    )  # fmt: skip


@kernel(fastmath=False)
def keep_words(
    source: Any, arc: Any, stream: Any, score: Any, changed: Any, word_score: Any, next_idx: Any, lm_scale: Any,
    context_idx: Any, lm_score: Any, backpointer: Any, dst_state: Any, score_offset: Any,
    beam: Any, min_active: int, max_active: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:  # fmt: skip
    """Adds what the language model says, recombines and prunes.

    Args:
        source, arc, stream, score: (A,) the candidates; the scores are changed in place.
        changed, word_score, next_idx: (Q,) those with words, what these score and the histories behind them.
        lm_scale: float32.
        context_idx, lm_score, backpointer: (P,) of the paths before.
        dst_state: where the graph's arcs lead.
        score_offset: (N,) float64; what scores lack is added in place.
        beam, min_active, max_active: as of `keep_frame`.

    Returns:
        stream, state, context_idx, score, lm_score, the backpointer before and the arc of what stays, (K',) each.
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
    best = np.full(len(score_offset), -np.inf, dtype=np.float32)
    for i in range(num):
        best[stream[i]] = max(best[stream[i]], score[i])
    for own in range(len(score_offset)):
        if best[own] == -np.inf:
            best[own] = 0.0
        score_offset[own] += best[own]
    for i in range(num):
        score[i] -= best[stream[i]]
    is_complete, no_table = np.ones(len(score_offset), dtype=np.bool_), np.zeros(0, dtype=np.int32)
    _, kept, _ = keep_frame(stream, state, new_context, score, is_complete, no_table, beam, min_active, max_active)
    previous = backpointer[source[kept]]
    return stream[kept], state[kept], new_context[kept], score[kept], new_lm_score[kept], previous, arc[kept]


@kernel(fastmath=False)
def read_with_words(
    tokens: Any, arcs: Any, log_prob: Any, frame_begin: Any, num_columns: int, num_left: Any, score_offset: Any,
    beam: Any, word_beam: Any, lm_scale: Any, min_active: int, max_active: int,
    tables: Any, first_record: int, most_records: int,
) -> tuple[Any, Any, Any, Any, Any, bool]:  # fmt: skip
    """Reads the frames of each stream, one stream after the other, as far as the models' loops can answer.

    Args:
        tokens: stream, state, score, context_idx, lm_score, backpointer of the paths before, (K,) each.
        arcs: arc_begin, token_id, score, num_words, word_begin, word_id and dst_state of the graph's arcs.
        log_prob, frame_begin, num_columns, num_left, score_offset, beam, word_beam, min_active, max_active: as of
            `read_to_words`.
        lm_scale: float32.
        tables: the language model's, for `look_up`.
        first_record: the number of the first backpointer to be made.
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
        context_idx, lm_score, backpointer = contexts[begin:end], lm_scores[begin:end], last_records[begin:end]
        begin = end
        is_going = True
        while is_going:
            (
                stream, state, context_idx, score, lm_score, backpointer, source, arc, candidate_stream,
                candidate_score, changed, history, word, before, before_arc, begins, score_offset_before,
            ) = read_to_words(
                stream, state, score, context_idx, lm_score, backpointer,
                arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state,
                log_prob, frame_begin, num_columns, num_left, score_offset,
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
                score_offset[own] = score_offset_before[own]
                frame_begin[own] -= num_columns
                num_left[own] += 1
                waits_for = _with(waits_for, num_waiting, lacking)
                num_waiting += len(lacking)
                is_over = False
                break
            stream, state, context_idx, score, lm_score, before, before_arc = keep_words(
                source, arc, candidate_stream, candidate_score, changed, word_score, next_idx, lm_scale, context_idx,
                lm_score, backpointer, dst_state, score_offset, beam, min_active, max_active,
            )  # fmt: skip
            previous = _with(previous, num_records, before)
            record_arc = _with(record_arc, num_records, before_arc)
            backpointer = first_record + np.arange(num_records, num_records + len(before))
            block_begin = _with(block_begin, num_blocks, backpointer[:1])
            num_records, num_blocks = num_records + len(before), num_blocks + len(backpointer[:1])
            is_going = num_records < most_records
            is_over = is_over and is_going
        all_stream, all_state = _with(all_stream, num_paths, stream), _with(all_state, num_paths, state)
        all_context, all_record = _with(all_context, num_paths, context_idx), _with(all_record, num_paths, backpointer)
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


@kernel(fastmath=False)
def _with(array: Any, num: int, values: Any) -> Any:
    """The first `num` of an array, and these values behind them, perhaps with more room."""
    array = ensure_capacity(array, num + len(values))
    array[num : num + len(values)] = values
    return array


@kernel(fastmath=False)
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


_TURNS_BETWEEN_COLLECTIONS = 16


class NumbaChunkSearchWithLM:
    """The search with a language model, without a lattice or a limit on contexts, where each arc reads a frame.

    A stream runs on by itself to its next frame that has words, so that frames without words cost no call. Then either

    * all streams stop there, and their words are scored by one call of `lm.score`, or
    * the loop looks the words up in the language model's tables and stops only where the model must first expand a
      history (run its hidden layer). When all streams have stopped, one call of `lm.expand` expands what they wait for,
      and with it the histories of all tokens, which over a lattice are asked for soon.

    Args:
        graph: on the CPU, without arcs that read nothing.
        options: beams and scales.
        lm: the language model.
        looks_up: whether the loop looks words up, as long as the model has tables.
        backpointers_per_call: after this many back-pointers a lookup loop stops, so that they can be collected.
    """

    def __init__(
        self,
        graph: Searchable,
        options: DecodingOptions,
        lm: LanguageModel,
        looks_up: bool = False,
        backpointers_per_call: int = 1 << 18,
    ) -> None:
        self._read_to_words = jit_required(read_to_words)
        self._keep_words = jit_required(keep_words)
        self._read_with_words = jit_required(read_with_words)
        self._lm = lm
        self._looks_up = looks_up
        self._backpointers_per_call = backpointers_per_call
        self._emitting = graph.emitting
        self._arcs = graph.emitting.for_loop()
        self._beam = np.float32(options.search_beam)
        self._word_beam = np.float32(np.inf if options.word_beam is None else options.word_beam)
        self._lm_scale = np.float32(options.lm_scale)
        self._limits = (options.min_active_states, options.max_active_states)

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.search`, without a lattice."""
        assert sink.lattice is None
        (log_prob, num_frames, score_offset), backtrace = chunk, sink.backtrace
        num_streams, max_frames, num_columns = log_prob.shape
        frames = (
            *(log_prob.reshape(-1).numpy(), np.arange(num_streams) * (max_frames * num_columns), num_columns),
            *(num_frames.numpy().copy(), score_offset.numpy()),
        )
        finished, turn, looks_up = [ActiveTokens.empty(score_offset.device)], 0, self._looks_up
        while len(tokens):
            tables = self._lm.lookup_tables() if looks_up else None
            looks_up = tables is not None
            # Where words are looked up, `expand` says which contexts are held.
            if backtrace.is_due or (not looks_up and turn % _TURNS_BETWEEN_COLLECTIONS == 0):
                sink.collect([*finished, tokens])
            if tables is None:
                tokens, done = self._score_next_words(tokens, frames, backtrace)
                finished.append(done)
            else:
                tokens, is_over = self._look_words_up(tokens, frames, tables, backtrace)
                if is_over:
                    finished.append(tokens)
                    break
            turn += 1
        return ActiveTokens.join(finished)

    def _score_next_words(
        self, tokens: ActiveTokens, frames: Any, backtrace: Backtrace
    ) -> tuple[ActiveTokens, ActiveTokens]:
        """Runs each stream over its next frame with words -> tokens after it, and those of streams without one."""
        *found, previous, arc, block_begin, _ = self._read_to_words(
            *(tokens.stream.numpy(), tokens.state.numpy(), tokens.score.numpy(), tokens.context_idx.numpy()),
            *(tokens.lm_score.numpy(), tokens.backpointer.numpy(), *self._arcs),
            *(*frames, self._beam, self._word_beam, *self._limits, backtrace.num_records),
        )
        backtrace.add_blocks(torch.from_numpy(previous), self._graph_arc(arc), block_begin.tolist())
        (source, arc, stream, score, changed, history, word), score_offset = found[6:], frames[-1]
        has_words = np.zeros(len(score_offset), dtype=np.bool_)
        has_words[stream] = True
        before = ActiveTokens(*map(torch.from_numpy, found[:6]))
        done = before.select(torch.from_numpy(np.flatnonzero(~has_words[found[0]])))
        if not len(source):
            return ActiveTokens.empty(done.state.device), done
        word_score, next_idx = self._lm.score(torch.from_numpy(history), torch.from_numpy(word))
        if self._emitting.words.max_words > 1:
            own_arc = torch.from_numpy(arc[changed])
            word_score, next_idx = self._emitting.words.score_rest(self._lm, own_arc, word_score, next_idx)
        *kept, previous, kept_arc = self._keep_words(
            *(source, arc, stream, score, changed, word_score.numpy(), next_idx.numpy(), self._lm_scale, found[2]),
            *(found[4], found[5], self._arcs[-1], score_offset, self._beam, *self._limits),
        )
        backpointer = backtrace.add(torch.from_numpy(previous), self._graph_arc(kept_arc))
        kept_stream, state, context_idx, new_score, lm_score = map(torch.from_numpy, kept)
        return ActiveTokens(kept_stream, state, context_idx, new_score, lm_score, backpointer), done

    def _look_words_up(
        self, tokens: ActiveTokens, frames: Any, tables: Any, backtrace: Backtrace
    ) -> tuple[ActiveTokens, bool]:
        """Runs all streams as far as the tables answer -> the tokens there, and whether no frames are left."""
        paths = (tokens.stream, tokens.state, tokens.score, tokens.context_idx, tokens.lm_score, tokens.backpointer)
        found, pending, previous, arc, block_begin, is_over = self._read_with_words(
            *(tuple(part.numpy() for part in paths), self._arcs, *frames, self._beam, self._word_beam),
            *(self._lm_scale, *self._limits, tables, backtrace.num_records, self._backpointers_per_call),
        )
        backtrace.add_blocks(torch.from_numpy(previous), self._graph_arc(arc), block_begin.tolist())
        stream, state, score, context_idx, lm_score, backpointer = map(torch.from_numpy, found)
        asked = torch.from_numpy(pending)
        if len(pending):
            asked = torch.cat([asked, context_idx])
        self._lm.expand(asked, context_idx)
        return ActiveTokens(stream, state, context_idx, score, lm_score, backpointer), bool(is_over)

    def _graph_arc(self, arc: Any) -> Tensor:
        return self._emitting.arc_of(torch.from_numpy(arc))
