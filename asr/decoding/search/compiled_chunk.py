"""Reads whole chunks on a CPU, many frames to a call of numba's loops.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens

# Now and then the records are looked at, whether any can be dropped.
_FRAMES_AT_ONCE = 32


class CompiledChunk:
    """The search without a language model, lattice or arcs that read nothing; the same paths as frame by frame.

    Args:
        kernel: the module `asr.decoding.search.chunk_kernel`.
        graph: on the CPU, without arcs that read nothing.
        options: beams.
    """

    def __init__(self, kernel: Any, graph: Searchable, options: DecodingOptions) -> None:
        arcs = graph.emitting
        self._kernel = kernel
        self._arcs = tuple(
            part.numpy() for part in (arcs.arc_begin, arcs.token_id, arcs.score, arcs.words.num_words, arcs.dst_state)
        )
        self._table = np.full(graph.num_states, -1, dtype=np.int32)
        self._limits = (np.float32(options.search_beam), options.min_active_states, options.max_active_states)

    def read(
        self,
        tokens: Tokens,
        log_prob: Tensor,
        num_frames: Tensor,
        offset: Tensor,
        backtrace: Backtrace,
        collect: Callable[[Tokens], None],
    ) -> Tokens:
        """As `ChunkReader.read`."""
        _, max_frames, num_columns = log_prob.shape
        flat = log_prob.reshape(-1)
        row_begin = torch.arange(len(num_frames)) * (max_frames * num_columns)
        ended = Tokens.none(flat.device)
        ends = sorted({*num_frames.tolist(), *range(0, max_frames, _FRAMES_AT_ONCE), max_frames})
        for begin, end in zip(ends, [*ends[1:], max_frames], strict=True):
            is_going = num_frames.index_select(0, tokens.stream) > begin
            ended = Tokens.join([ended, tokens.select((~is_going).nonzero().squeeze(1))])
            tokens = tokens.select(is_going.nonzero().squeeze(1))
            if not len(tokens):
                break
            if backtrace.is_due:
                both = Tokens.join([tokens, ended])
                collect(both)
                tokens.record, ended.record = both.record.split([len(tokens), len(ended)])
            tokens = self._read_at_once(
                tokens, flat, row_begin + begin * num_columns, end - begin, num_columns, offset, backtrace
            )
        return Tokens.join([ended, tokens])

    def _read_at_once(
        self,
        tokens: Tokens,
        log_prob: Tensor,
        frame_begin: Tensor,
        num_frames: int,
        num_columns: int,
        offset: Tensor,
        backtrace: Backtrace,
    ) -> Tokens:
        """So many frames, of which every path's stream has as many."""
        paths = (part.numpy() for part in (tokens.stream, tokens.state, tokens.score, tokens.record))
        *found, block_begin = self._kernel.read_frames(
            *(*paths, *self._arcs, log_prob.numpy(), frame_begin.numpy(), num_frames, num_columns),
            *(offset.numpy(), self._table, *self._limits, backtrace.num_records),
        )
        stream, state, score, record, previous, arc = map(torch.from_numpy, found)
        backtrace.add_blocks(previous, arc, block_begin.tolist())
        no_context = torch.zeros_like(record)
        return Tokens(stream, state, no_context, score, no_context.double(), record)
