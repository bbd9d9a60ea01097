"""What a search of whole utterances has found; paths are spelled where they are asked for.

Shapes: N utterances, T frames, L arcs of a path.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from asr.decoding.ending import Ending, best_arcs
from asr.decoding.first_pass import DecodeResult, Hypothesis
from asr.decoding.lattice.lattice import Lattice
from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.graph.artefact import DecodingGraph


@dataclass(frozen=True)
class FoundPaths:
    """The best path of each utterance, and the lattice of all.

    Args:
        graph: what was searched, on the host.
        options: scales.
        endings: of each utterance.
        backtrace: of the search.
        num_frames: (N,) int64 decoded frames, on the host.
        original_frame: (N, T) int64, where frames were left out what each decoded one was before; on the host.
        joint: the lattice of all utterances in one, where it is kept and there are any.
    """

    graph: DecodingGraph
    options: DecodingOptions
    endings: list[Ending]
    backtrace: Backtrace
    num_frames: Tensor
    original_frame: Tensor | None
    joint: Lattice | None

    def results(self) -> list[DecodeResult]:
        """One an utterance, without its part of the lattice."""
        return [self.result(utt_idx) for utt_idx in range(len(self.endings))]

    def result(self, utt_idx: int) -> DecodeResult:
        """That of one utterance, without its part of the lattice."""
        ending = self.endings[utt_idx]
        arc, frame_of = self._arcs[utt_idx], self.frame_of(utt_idx)
        return self.result_of(utt_idx, ending.hypothesis(self.graph, self.options, arc, frame_of), ending.reached_final)

    def result_of(
        self, utt_idx: int, hypothesis: Hypothesis | None, reached_final: bool, lattice: Lattice | None = None
    ) -> DecodeResult:
        """The result for an utterance with this hypothesis, or none."""
        return DecodeResult(
            hypotheses=() if hypothesis is None else (hypothesis,),
            reached_final=reached_final,
            num_frames=int(self.num_frames[utt_idx]),
            lattice=lattice,
            original_frame=self.frame_of(utt_idx),
        )

    def frame_of(self, utt_idx: int) -> Tensor | None:
        """Where frames were left out, what each decoded one of an utterance was before, (num_frames,) int64."""
        if self.original_frame is None:
            return None
        return self.original_frame[utt_idx, : int(self.num_frames[utt_idx])]

    @functools.cached_property
    def _arcs(self) -> list[Tensor]:
        """The best paths' arcs (L,), on the host."""
        return best_arcs(self.endings, self.backtrace)
