"""A frame with a language model by numba's loops: one call before it is asked, and one behind.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens
from asr.lm.contract import LanguageModel


class CompiledLmFrame:
    """What `FrameStep` does in a frame, where no lattice is kept and word histories have no limit; the same outcome.

    Args:
        kernel: the module `asr.decoding.search.lm_frame_kernel`.
        graph: on the CPU.
        options: beams and scales.
        lm: the language model.
        backtrace: takes the records.
    """

    def __init__(
        self, kernel: Any, graph: Searchable, options: DecodingOptions, lm: LanguageModel, backtrace: Backtrace
    ) -> None:
        arcs = graph.emitting
        self._kernel = kernel
        self._lm = lm
        self._backtrace = backtrace
        self._emitting = arcs
        self._arcs = tuple(
            part.numpy()
            for part in (
                *(arcs.arc_begin, arcs.token_id, arcs.score, arcs.words.num_words),
                *(arcs.words.word_begin, arcs.words.word_id),
            )
        )
        self._dst_state = arcs.dst_state.numpy()
        self._beam = np.float32(options.search_beam)
        self._word_beam = np.float32(np.inf if options.word_beam is None else options.word_beam)
        self._lm_scale = np.float32(options.lm_scale)
        self._limits = (options.min_active_states, options.max_active_states)

    def read(self, tokens: Tokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor) -> Tokens:
        """As `FrameStep.read`, but for arcs that read nothing."""
        context_idx = tokens.context_idx.numpy()
        source, arc, stream, score, changed, history, word = self._kernel.expand_words(
            *(tokens.stream.numpy(), tokens.state.numpy(), tokens.score.numpy(), context_idx, *self._arcs),
            *(log_prob.numpy(), frame_begin.numpy(), offset.numpy(), self._beam, self._word_beam, self._limits[0]),
        )
        word_score, next_idx = torch.zeros(0), torch.from_numpy(history)
        if len(changed):
            word_score, next_idx = self._lm.score(next_idx, torch.from_numpy(word))
            own_arc = torch.from_numpy(arc[changed])
            word_score, next_idx = self._emitting.words.score_rest(self._lm, own_arc, word_score, next_idx)
        *found, previous, arc = self._kernel.keep_words(
            *(source, arc, stream, score, changed, word_score.numpy(), next_idx.numpy(), self._lm_scale, context_idx),
            *(tokens.lm_score.numpy(), tokens.record.numpy(), self._dst_state, offset.numpy(), self._beam),
            *self._limits,
        )
        graph_arc = self._emitting.arc_of(torch.from_numpy(arc))
        new_stream, state, new_context_idx, new_score, lm_score = map(torch.from_numpy, found)
        record = self._backtrace.add(torch.from_numpy(previous), graph_arc)
        return Tokens(new_stream, state, new_context_idx, new_score, lm_score, record)
