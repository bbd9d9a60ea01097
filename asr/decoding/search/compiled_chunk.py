"""Reads whole chunks on a CPU, many frames to a call of numba's loops.

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

# Behind so many frames what leads nowhere is dropped.
_FRAMES_AT_ONCE = 256
_NO_LOSERS = -1.0
_NO_SCORES = np.zeros(0, dtype=np.float32)


class CompiledChunk:
    """The search without a language model or arcs that read nothing; the same paths as frame by frame.

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
        # Of the chunk before, so that they need not grow again.
        self._rooms = (np.empty(0, dtype=np.int32),) * 4
        self._final_score = graph.final_score.numpy()
        self._limits = (np.float32(options.search_beam), options.min_active_states, options.max_active_states)

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
        """As `ChunkReader.read`."""
        if not len(tokens):
            return tokens
        max_frames, num_columns = log_prob.shape[1:]
        own, num_paths = torch.unique_consecutive(tokens.stream, return_counts=True)
        parts = list(map(tokens.select, torch.arange(len(tokens)).split(num_paths.tolist())))
        for position, stream in enumerate(own.tolist()):
            frame_begin = num_columns * torch.arange(stream * max_frames, stream * max_frames + int(num_frames[stream]))
            for begin in range(0, len(frame_begin), _FRAMES_AT_ONCE):
                if backtrace.is_due:
                    collect(parts)
                some = frame_begin[begin : begin + _FRAMES_AT_ONCE]
                # A lattice is of a whole utterance.
                is_end = lattice is not None and begin + len(some) == len(frame_begin)
                parts[position] = self._read_some(
                    parts[position], log_prob, some, begin, is_end, offset[stream : stream + 1], backtrace, lattice
                )
        return Tokens.join(parts)

    def _read_some(
        self,
        tokens: Tokens,
        log_prob: Tensor,
        frame_begin: Tensor,
        num_before: int,
        is_end: bool,
        offset: Tensor,
        backtrace: Backtrace,
        lattice: LatticeRecords | None,
    ) -> Tokens:
        """Some frames of one stream, which begin at these places of the log-probabilities; so many were before.

        is_end: whether the stream ends behind them.
        """
        reach = np.float32(_NO_LOSERS if lattice is None else lattice.reach)
        paths, told, self._rooms = self._kernel.read_frames(
            *(tokens.state.numpy(), tokens.score.numpy(), tokens.record.numpy(), self._arcs),
            *(log_prob.reshape(-1).numpy(), frame_begin.numpy(), offset.numpy(), self._table, self._rooms),
            *(*self._limits, reach, self._final_score if is_end else _NO_SCORES, backtrace.num_records),
        )
        state, score, record = map(torch.from_numpy, paths)
        previous, arc, block_begin, frame, *losers = map(torch.from_numpy, told)
        stream = tokens.stream[:1]
        if lattice is not None:
            lattice.add_frames(stream.expand(len(arc)), frame + num_before, losers)
        backtrace.add_blocks(previous, arc, block_begin.tolist())
        no_context = torch.zeros_like(record)
        return Tokens(stream.expand(len(state)), state, no_context, score, no_context.double(), record)
