"""Reads whole chunks with a language model that numba's loops ask themselves, many frames to a call.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asr.decoding.options import DecodingOptions
from asr.decoding.search.reading import Chunk, ChunkReader, Traces
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens
from asr.decoding.search.word_chunk_kernel import read_with_words
from asr.lm.compiled_loop import existing_loop
from asr.lm.interpolation import CombinedLM

# So many records are made before back-pointers that lead nowhere may be dropped.
_RECORDS_AT_ONCE = 1 << 18


class CompiledWordChunk:
    """What `CompiledLmChunk` does with a call for each frame that has words; the same paths and scores.

    A stream goes on by itself until its words ask a history that the model must expand first, by its hidden layer. When
    all streams have come so far, these are expanded together, and with them the histories of all that is alive, which
    over a lattice, whose scores tell how a path ends at best, are asked soon.

    Args:
        graph: on the CPU, without arcs that read nothing.
        options: beams and scales.
        lm: the language model, whose tables are for loops.
        otherwise: reads on where the model has no tables any more, having come to its bound of bytes.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, lm: CombinedLM, otherwise: ChunkReader) -> None:
        self._loop = existing_loop(read_with_words, reorders_sums=False)
        self._otherwise = otherwise
        self._emitting = graph.emitting
        self._arcs = graph.emitting.for_loop()
        self._beams = tuple(
            np.float32(np.inf if beam is None else beam) for beam in (options.search_beam, options.word_beam)
        )
        self._limits = (np.float32(options.lm_scale), options.min_active_states, options.max_active_states)
        self._lm = lm

    def read(self, tokens: Tokens, chunk: Chunk, traces: Traces) -> Tokens:
        """As `ChunkReader.read`; a lattice cannot be kept."""
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
            tables = self._lm.for_difference_loop()
            if tables is None:
                return self._otherwise.read(_tokens_of(paths), _rest(chunk, num_left), traces)
            paths, waits_for, previous, arc, block_begin, is_over = self._loop(
                *(paths, self._arcs, flat, frame_begin, num_columns, num_left, offset.numpy(), *self._beams),
                *(*self._limits, *tables, backtrace.num_records, _RECORDS_AT_ONCE),
            )
            graph_arc = self._emitting.arc_of(torch.from_numpy(arc))
            backtrace.add_blocks(torch.from_numpy(previous), graph_arc, block_begin.tolist())
            if len(waits_for):
                waits_for = np.concatenate([waits_for, paths[3]])
            self._lm.expand(torch.from_numpy(waits_for), torch.from_numpy(paths[3]))
        return _tokens_of(paths)


def _tokens_of(paths: tuple[Any, ...]) -> Tokens:
    stream, state, score, context_idx, lm_score, record = map(torch.from_numpy, paths)
    return Tokens(stream, state, context_idx, score, lm_score, record)


def _rest(chunk: Chunk, num_left: NDArray[np.int64]) -> Chunk:
    """Of each stream's frames the last ones, (N,) so many, at the beginning of its row."""
    log_prob, num_frames, offset = chunk
    rest = log_prob.new_zeros(len(num_left), int(num_left.max()), log_prob.shape[2])
    for row, frames, num, left in zip(rest, log_prob, num_frames.tolist(), num_left.tolist(), strict=True):
        row[:left] = frames[num - left : num]
    return Chunk(rest, torch.from_numpy(num_left), offset)
