"""Reads whole chunks with a language model by numba's loops: one call before it is asked, one behind.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.lm_chunk_kernel import keep_words, read_to_words
from asr.decoding.search.reading import Chunk, Traces
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens
from asr.lm.compiled_loop import existing_loop
from asr.lm.contract import LanguageModel

# What is alive is told about once in so many turns.
_TURNS_BETWEEN_MARKS = 16


class CompiledLmChunk:
    """The search where no lattice is kept, word histories have no limit and each arc reads a frame; the same paths.

    Streams wait for each other where they need words, not at each frame: the language model is asked as often as the
    stream with the most frames that have words, for more of them at a time.

    Args:
        graph: on the CPU, without arcs that read nothing.
        options: beams and scales.
        lm: the language model.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, lm: LanguageModel) -> None:
        self._read_to_words = existing_loop(read_to_words, reorders_sums=False)
        self._keep_words = existing_loop(keep_words, reorders_sums=False)
        self._lm = lm
        self._emitting = graph.emitting
        self._dst_state = graph.emitting.dst_state.numpy()
        self._arcs = graph.emitting.for_loop()
        self._beam = np.float32(options.search_beam)
        self._word_beam = np.float32(np.inf if options.word_beam is None else options.word_beam)
        self._lm_scale = np.float32(options.lm_scale)
        self._limits = (options.min_active_states, options.max_active_states)

    def read(self, tokens: Tokens, chunk: Chunk, traces: Traces) -> Tokens:
        """As `ChunkReader.read`, without a lattice."""
        (log_prob, num_frames, offset), backtrace = chunk, traces.backtrace
        max_frames, num_columns = log_prob.shape[1:]
        frame_begin = np.arange(len(num_frames)) * (max_frames * num_columns)
        num_left = num_frames.numpy().copy()
        flat = log_prob.reshape(-1).numpy()
        done, turn = [Tokens.none(offset.device)], 0
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
                done.append(Tokens(stream, state, context_idx, score, lm_score, record).select(over))
            tokens = self._with_words(paths, asked, offset, backtrace) if len(asked[0]) else done[0]
            turn += 1
        return Tokens.join(done)

    def _with_words(self, paths: Any, asked: Any, offset: Tensor, backtrace: Backtrace) -> Tokens:
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
        return Tokens(new_stream, state, new_context_idx, new_score, new_lm_score, new_record)

    def _graph_arc(self, arc: Any) -> Tensor:
        return self._emitting.arc_of(torch.from_numpy(arc))
