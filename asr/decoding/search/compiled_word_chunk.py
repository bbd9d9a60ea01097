"""Reads whole chunks with a language model that numba's loops look up themselves, many frames to a call.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.decoding.lattice.records import LatticeRecords
from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens
from asr.lm.contract import LoopTables

# So many records are made before back-pointers that lead nowhere may be dropped.
_RECORDS_AT_ONCE = 1 << 18


class CompiledWordChunk:
    """What `CompiledLmChunk` does with a call for each frame that has words; the same paths and scores.

    Args:
        kernel: the module `asr.decoding.search.word_chunk_kernel`.
        graph: on the CPU, without arcs that read nothing.
        options: beams and scales.
        tables: of the language model.
    """

    def __init__(self, kernel: Any, graph: Searchable, options: DecodingOptions, tables: LoopTables) -> None:
        self._kernel = kernel
        self._emitting = graph.emitting
        self._arcs = graph.emitting.for_loop()
        self._beams = tuple(
            np.float32(np.inf if beam is None else beam) for beam in (options.search_beam, options.word_beam)
        )
        self._limits = (np.float32(options.lm_scale), options.min_active_states, options.max_active_states)
        self._tables = tables

    def read(
        self,
        tokens: Tokens,
        log_prob: Tensor,
        num_frames: Tensor,
        offset: Tensor,
        backtrace: Backtrace,
        lattice: LatticeRecords | None,
        collect: Callable[[list[Tokens]], None],
    ) -> Tokens:
        """As `ChunkReader.read`; a lattice cannot be kept."""
        assert lattice is None
        num_streams, max_frames, num_columns = log_prob.shape
        flat = log_prob.reshape(-1).numpy()
        frame_begin = np.arange(num_streams) * (max_frames * num_columns)
        num_left = num_frames.numpy().copy()
        is_over = False
        while not is_over:
            if backtrace.is_due:
                collect([tokens])
            paths = (tokens.stream, tokens.state, tokens.score, tokens.context_idx, tokens.lm_score, tokens.record)
            found, previous, arc, block_begin, is_over = self._kernel.read_with_words(
                *(tuple(part.numpy() for part in paths), self._arcs, flat, frame_begin, num_columns, num_left),
                *(offset.numpy(), *self._beams, *self._limits, *self._tables, backtrace.num_records, _RECORDS_AT_ONCE),
            )
            stream, state, score, context_idx, lm_score, record = map(torch.from_numpy, found)
            tokens = Tokens(stream, state, context_idx, score, lm_score, record)
            graph_arc = self._emitting.arc_of(torch.from_numpy(arc))
            backtrace.add_blocks(torch.from_numpy(previous), graph_arc, block_begin.tolist())
        return tokens
