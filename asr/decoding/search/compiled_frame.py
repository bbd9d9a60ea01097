"""The two halves of a frame, by numba's loops, with tensors in and out.

Shapes: N streams, K partial paths, A candidates, S states.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.decoding.options import DecodingOptions
from asr.decoding.search.frame_kernel import expand_frame, keep_frame
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens
from asr.lm.compiled_loop import existing_loop

_EMPTY = np.zeros(0, dtype=np.int64)
_NO_TABLE = np.zeros(0, dtype=np.int32)


class CompiledFrame:
    """What `FrameStep` does by tensor operations, with the same outcome.

    Args:
        graph: on the CPU.
        options: beams.
        has_lm: whether a language model takes part.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, has_lm: bool) -> None:
        arcs = graph.emitting
        self._expand = existing_loop(expand_frame, reorders_sums=False)
        self._keep = existing_loop(keep_frame, reorders_sums=False)
        self._arc_begin = arcs.arc_begin.numpy()
        self._token_id = arcs.token_id.numpy()
        self._arc_score = arcs.score.numpy()
        self._num_words = arcs.words.num_words.numpy()
        self._beam = np.float32(options.search_beam)
        self._word_beam = np.float32(np.inf if options.word_beam is None else options.word_beam)
        self._limits = (options.min_active_states, options.max_active_states)
        self._has_lm = has_lm
        self._num_states = graph.num_states
        self._table: NDArray[np.int32] | None = _NO_TABLE if has_lm else None

    def expand(
        self, tokens: Tokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor, everything: bool = False
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], NDArray[np.bool_]]:
        """As `FrameHalves.expand`."""
        *candidates, is_complete = self._expand(
            tokens.stream.numpy(),
            tokens.state.numpy(),
            tokens.score.numpy(),
            self._arc_begin,
            self._token_id,
            self._arc_score,
            self._num_words,
            log_prob.numpy(),
            frame_begin.numpy(),
            offset.numpy(),
            np.float32(np.inf) if everything else self._beam,
            self._beam,
            self._word_beam,
            self._limits[0],
            self._has_lm,
        )
        source, arc, stream, score = map(torch.from_numpy, candidates)
        return (source, arc, stream, score), is_complete

    def keep(
        self,
        stream: Tensor,
        state: Tensor,
        context_idx: Tensor | None,
        score: Tensor,
        is_complete: NDArray[np.bool_],
    ) -> tuple[Tensor, Tensor, bool]:
        """As `FrameHalves.keep`."""
        if self._table is None:
            self._table = np.full(self._num_states, -1, dtype=np.int32)
        winner, position, is_enough = self._keep(
            stream.numpy(),
            state.numpy(),
            _EMPTY if context_idx is None else context_idx.numpy(),
            score.numpy(),
            is_complete,
            self._table,
            self._beam,
            *self._limits,
        )
        return torch.from_numpy(winner), torch.from_numpy(position), is_enough
