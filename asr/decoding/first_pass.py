"""What every first pass answers: hypotheses, best first, and a lattice.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from asr.lm.contract import LanguageModel

if TYPE_CHECKING:
    from asr.decoding.lattice.lattice import Lattice


@dataclass(frozen=True)
class Hypothesis:
    """One word sequence for an utterance. Scores are natural logs and unscaled; `total` is the scaled sum.

    Args:
        word_ids: ids in the graph's vocabulary.
        words: the same, spelled.
        am_score: sum of the frame log-probabilities along the path.
        graph_score: sum of the graph's scores, the final one included.
        lm_score: sum of the language model's scores, `final` included; 0 without one.
        total: see `DecodingOptions`.
        start_frames: for each word the frame (after subsampling) where it begins.
        end_frames: for each word the frame after its last one.
        phones: runs of equal tokens, blanks left out: (token, first frame, frame after the last) each.
        confidences: for each word its posterior probability in the lattice, or empty where not computed.
    """

    word_ids: tuple[int, ...]
    words: tuple[str, ...]
    am_score: float
    graph_score: float
    lm_score: float
    total: float
    start_frames: tuple[int, ...]
    end_frames: tuple[int, ...]
    confidences: tuple[float, ...] = ()
    phones: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class DecodeResult:
    """The outcome for one utterance.

    Args:
        hypotheses: best first. One from the search itself; `asr.decoding.lattice.nbest` takes more from the lattice.
            Empty where nothing survived the beam, or there were no frames and the empty sentence is not allowed.
        reached_final: False where no complete sentence survived; a hypothesis then is the best unfinished path.
        num_frames: frames decoded, those that `blank_skip_threshold` left out not counted.
        lattice: the alternatives, where the pass was asked to keep them and a final state was reached.
        original_frame: (num_frames,) int64, where frames were left out: what each decoded one was before.
    """

    hypotheses: tuple[Hypothesis, ...]
    reached_final: bool
    num_frames: int
    lattice: Lattice | None = None
    original_frame: Tensor | None = None

    @property
    def best(self) -> Hypothesis | None:
        """The best hypothesis, or None."""
        return self.hypotheses[0] if self.hypotheses else None


class FirstPass(Protocol):
    """Frame log-probabilities in, hypotheses out."""

    def decode(self, log_prob: Tensor, num_frames: Tensor, lm: LanguageModel | None = None) -> list[DecodeResult]:
        """log_prob (N, T, C) natural log, num_frames (N,) int64 -> one result an utterance, in order.

        Raises:
            AsrError: the log-probabilities have NaN in them or another width than the graph's tokens.
        """
