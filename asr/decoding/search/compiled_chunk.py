"""Reads whole chunks on a CPU, many frames to a call of numba's loops.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asr.decoding.options import DecodingOptions
from asr.decoding.search.chunk_kernel import read_frames
from asr.decoding.search.reading import Chunk, Traces
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens
from asr.lm.compiled_loop import existing_loop

# Behind so many frames what leads nowhere is dropped.
_FRAMES_AT_ONCE = 256
_NO_LOSERS = -1.0
_NO_SCORES = np.zeros(0, dtype=np.float32)


class CompiledChunk:
    """The search without a language model or arcs that read nothing; the same paths as frame by frame.

    Args:
        graph: on the CPU, without arcs that read nothing.
        options: beams.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions) -> None:
        arcs = graph.emitting
        self._loop = existing_loop(read_frames, reorders_sums=False)
        self._arcs = tuple(
            part.numpy() for part in (arcs.arc_begin, arcs.token_id, arcs.score, arcs.words.num_words, arcs.dst_state)
        )
        self._table = np.full(graph.num_states, -1, dtype=np.int32)
        # Of the chunk before, so that they need not grow again.
        self._rooms = (np.empty(0, dtype=np.int32),) * 4
        self._final_score = graph.final_score.numpy()
        self._limits = (np.float32(options.search_beam), options.min_active_states, options.max_active_states)

    def read(self, tokens: Tokens, chunk: Chunk, traces: Traces) -> Tokens:
        """As `ChunkReader.read`."""
        if not len(tokens):
            return tokens
        max_frames, num_columns = chunk.log_prob.shape[1:]
        own, num_paths = torch.unique_consecutive(tokens.stream, return_counts=True)
        parts = list(map(tokens.select, torch.arange(len(tokens)).split(num_paths.tolist())))
        for position, stream in enumerate(own.tolist()):
            begin = stream * max_frames
            frame_begin = num_columns * torch.arange(begin, begin + int(chunk.num_frames[stream]))
            for num_before in range(0, len(frame_begin), _FRAMES_AT_ONCE):
                if traces.backtrace.is_due:
                    traces.collect(parts)
                some = frame_begin[num_before : num_before + _FRAMES_AT_ONCE]
                parts[position] = self._read_some(stream, parts[position], chunk, some, num_before, traces)
        return Tokens.join(parts)

    def _read_some(
        self, stream: int, tokens: Tokens, chunk: Chunk, frame_begin: Tensor, num_before: int, traces: Traces
    ) -> Tokens:
        """Some frames of one stream, which begin at these places of the log-probabilities; so many were before."""
        backtrace, lattice = traces.backtrace, traces.lattice
        reach = np.float32(_NO_LOSERS if lattice is None else lattice.reach)
        # A lattice is of a whole utterance.
        is_end = lattice is not None and num_before + len(frame_begin) == int(chunk.num_frames[stream])
        offset = chunk.offset[stream : stream + 1].numpy()
        paths, told, self._rooms = self._loop(
            *(tokens.state.numpy(), tokens.score.numpy(), tokens.record.numpy(), self._arcs),
            *(chunk.log_prob.reshape(-1).numpy(), frame_begin.numpy(), offset, self._table, self._rooms),
            *(*self._limits, reach, self._final_score if is_end else _NO_SCORES, backtrace.num_records),
        )
        state, score, record = map(torch.from_numpy, paths)
        previous, arc, block_begin, frame, *losers = map(torch.from_numpy, told)
        if lattice is not None:
            lattice.add_frames(torch.full_like(arc, stream), frame + num_before, losers)
        backtrace.add_blocks(previous, arc, block_begin.tolist())
        no_context = torch.zeros_like(record)
        return Tokens(torch.full_like(state, stream), state, no_context, score, no_context.double(), record)
