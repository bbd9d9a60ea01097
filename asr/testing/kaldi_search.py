"""kaldi-decoder on this program's decoding graphs, as the reference for token passing."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from asr.graph.decoding_graph import DecodingGraph
from asr.graph.fst import Transducer
from asr.graph.openfst import to_openfst


class KaldiSearch:
    """Kaldi's FasterDecoder. Its output labels are arc numbers, so that its best path is a sequence of arcs.

    Args:
        graph: with or without epsilon arcs.
        beam, max_active, min_active: as in Kaldi.

    Attributes:
        fst: the graph as kaldifst's transducer.

    Raises:
        ImportError: kaldi-decoder or kaldifst is not installed.
    """

    def __init__(
        self, graph: DecodingGraph, beam: float = 1e4, max_active: int = 2**31 - 1, min_active: int = 0
    ) -> None:
        import kaldi_decoder
        import kaldifst

        self._kaldi_decoder, self._kaldifst = kaldi_decoder, kaldifst
        self._graph = graph
        self.fst = to_openfst(
            Transducer(
                start=graph.start_state,
                arc_begin=graph.arc_begin.numpy(),
                dst_state=graph.dst_state.numpy(),
                # 0 is epsilon; tokens begin at 1, as `DecodableCtc` expects.
                input_label=graph.token_id.numpy() + 1,
                output_label=np.arange(1, graph.num_arcs + 1, dtype=np.int32),
                score=graph.score.numpy(),
                final_score=graph.final_score.numpy(),
            )
        )
        self._options = kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active, min_active=min_active)

    def with_beams(self, beam: float, max_active: int, min_active: int) -> KaldiSearch:
        """The same graph with other beams."""
        other = copy.copy(self)
        other._options = self._kaldi_decoder.FasterDecoderOptions(
            beam=beam, max_active=max_active, min_active=min_active
        )
        return other

    def decode(self, log_prob: Tensor) -> tuple[Tensor, float] | None:
        """log_prob (T, C) -> the arcs of the best complete path and its score; None if no path is complete."""
        decoder = self._kaldi_decoder.FasterDecoder(self.fst, self._options)
        decoder.decode(self._kaldi_decoder.DecodableCtc(log_prob.numpy()))
        if not decoder.reached_final():
            return None
        found, path = decoder.get_best_path()
        if not found:
            return None
        _, _, labels, weight = self._kaldifst.get_linear_symbol_sequence(path)
        return torch.tensor(labels, dtype=torch.int64) - 1, -(weight.value1 + weight.value2)
