"""A first pass without the language model, whose lattice is then rescored frame by frame: what k2's pass does, for any.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.decoding.first_pass import DecodeResult
from asr.decoding.on_the_fly import rescore_joint
from asr.decoding.options import DecodingOptions
from asr.decoding.torch_pass import TorchFirstPass
from asr.decoding.word_map import WordMapper
from asr.graph.artefact import DecodingGraph
from asr.lm.contract import LanguageModel


class RescoringPass:
    """The torch pass by the graph's scores, its lattice rescored on the fly.

    Against the language model inside the search, it is asked about fewer words and slows nothing else down, but cannot
    save what the graph's own model has pruned.

    Args:
        graph: decoding graph without arcs that read nothing.
        options: beams and scales; `output_beam` decides what is rescored.
        keep_lattice: whether results carry a lattice.
    """

    def __init__(
        self, graph: DecodingGraph, options: DecodingOptions | None = None, keep_lattice: bool = False
    ) -> None:
        self.options = options if options is not None else DecodingOptions()
        self._keep_lattice = keep_lattice
        self._mapper = WordMapper(graph.vocabulary)
        self._search = TorchFirstPass(graph, self.options, keep_lattice=True)

    def decode(self, log_prob: Tensor, num_frames: Tensor, lm: LanguageModel | None = None) -> list[DecodeResult]:
        """log_prob (N, T, C) natural log, num_frames (N,) int64 -> one result an utterance, in order.

        An utterance that has no lattice, since no complete path survived, is decoded by the torch pass with the
        language model inside, which tells the best unfinished path or finds a complete one.

        Raises:
            AsrError: the log-probabilities have NaN in them or another width than the graph's tokens.
        """
        lm = self._mapper.mapped(lm)
        if lm is None and not self._keep_lattice:
            return self._search.search(log_prob, num_frames, keep_lattice=False).results()
        if lm is None:
            return self._search.decode(log_prob, num_frames)
        found = self._search.search(log_prob, num_frames)
        if found.joint is None:
            return []
        results = []
        for utt_idx, path in enumerate(rescore_joint(found.joint, self.options, lm, self._keep_lattice)):
            if path is None:
                results.append(found.result(utt_idx))
                continue
            hypothesis = path.hypothesis(found.graph, self.options, found.frame_of(utt_idx))
            results.append(found.result_of(utt_idx, hypothesis, True, path.lattice))
        unfinished = [utt_idx for utt_idx, result in enumerate(results) if not result.reached_final]
        if unfinished:
            rest = torch.tensor(unfinished)
            instead = self._search.search(log_prob[rest], num_frames[rest], lm, keep_lattice=False)
            for utt_idx, result in zip(unfinished, instead.results(), strict=True):
                results[utt_idx] = result
        return results
