"""What every decoder takes and answers: options, hypotheses, results.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from asr.errors import AsrError
from asr.lm.interface import LanguageModel
from asr.options import check_options, option

if TYPE_CHECKING:
    from asr.decoding.lattice import Lattice


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
    """The result for one utterance.

    Args:
        hypotheses: best first. The search finds one; `asr.decoding.nbest` takes more from the lattice. Empty where
            nothing survived the beam, or there were no frames and the graph does not allow the empty sentence.
        reached_final: False where no complete sentence survived; the hypothesis is then the best unfinished path.
        num_frames: frames decoded, without those that `blank_skip_threshold` skipped.
        lattice: the alternatives, where the decoder keeps them and a final state was reached. That of token passing is
            on the host.
        original_frame: (num_frames,) int64, the original frame of each decoded one, where frames were skipped.
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


class Decoder(Protocol):
    """Frame log-probabilities in, hypotheses out."""

    def decode(
        self, log_prob: Tensor, num_frames: Tensor | None = None, lm: LanguageModel | None = None
    ) -> list[DecodeResult]:
        """log_prob (N, T, C) natural log, num_frames (N,) int64 -> one result for each utterance, in order.

        Without `num_frames` all utterances have T frames. No gradient is kept.

        Raises:
            AsrError: the log-probabilities hold NaN or +inf, or their width is not the graph's number of tokens.
        """


_WIDEST_BEAM = 1e30  # as good as infinite, and float32 holds it
_MAX_SCALE = 1e6
_MOST_STATES = 2**63 - 1


@dataclass(frozen=True)
class DecodingOptions:
    """Beams and scales. A path's score, higher is better, is

        total = am_scale * am_score + graph_scale * graph_score + lm_scale * lm_score
                + word_insertion_penalty * number of words

    where `lm_score` is the score of the language model given to `decode`. To replace the graph's own language model,
    give `Difference(large, small)`; to keep part of it, lower `lm_scale` as well.

    Args:
        search_beam: partial paths this much worse than the best one of their frame are dropped.
        output_beam: lattice arcs are kept whose best path is at most this much worse than the best path.
        min_active_states: at least this many partial paths of an utterance survive a frame, even outside the beam.
        max_active_states: at most this many survive, except for ties. k2 counts graph states; token passing counts
            (graph state, word history) pairs.
        am_scale: weight of the frame log-probabilities.
        graph_scale: weight of the graph's scores.
        lm_scale: weight of the language model's scores.
        word_insertion_penalty: added for each word; negative for fewer words.
        skip_beam: words whose partial path is this much worse than the best one, before the language model is asked,
            are dropped without asking it, in the search and over a lattice; None leaves that to the other beams.
        max_contexts_per_state: keep only this many word histories at a state; None keeps all (exact).
        context_beam: in on-the-fly rescoring, word histories this much worse than the best one of their frame are
            dropped; None keeps all (exact, and asks the language model many times as often).
        blank_skip_threshold: of each run of frames whose blank probability exceeds it, only the first is decoded;
            None decodes all frames (exact).
        chunk_frames: with `lm_fusion="chunks"`, the language model goes over the lattice each time that it has grown by
            so many frames.
        lookahead_frames: with `lm_fusion="chunks"`, the search is so many frames ahead of the language model.
        max_token_seconds: words whose tokens last longer than this on average are noise, and left out of the results of
            recognizers; see `asr.decoding.rejection`. None leaves nothing out.
        word_beam: the old name of `skip_beam`.

    Raises:
        AsrError: a number is out of its range.
    """

    search_beam: float = option(
        20.0, "drop partial paths that are this much worse than the best one; larger is slower and better"
    )
    output_beam: float = option(
        8.0, "drop lattice paths that are this much worse than the best one before rescoring", needs="lattice"
    )
    min_active_states: int = option(30, "minimum number of partial paths that survive a frame, even outside the beam")
    max_active_states: int = option(7000, "maximum number of partial paths that survive a frame")
    am_scale: float = option(1.0, "weight of the acoustic model")
    graph_scale: float = option(1.0, "weight of the decoding graph and its n-gram")
    lm_scale: float = option(1.0, "weight of the large language model", needs="large model")
    word_insertion_penalty: float = option(0.0, "added for each word; negative for fewer words")
    skip_beam: float | None = option(
        None,
        "do not ask the large language model about words that are this much worse than the best path without it",
        needs="large model",
        kind=float,
    )
    max_contexts_per_state: int | None = option(
        None,
        "keep only this many word histories at a state; slower on a CPU",
        needs="large model",
        kind=int,
    )
    context_beam: float | None = option(
        10.0,
        "while a lattice is rescored, drop word histories this much worse than the best; inf keeps all",
        needs="rescoring",
        optional=True,
    )
    blank_skip_threshold: float | None = option(
        None,
        "of frames in a row that are blank with a higher probability than this, decode only the first",
        kind=float,
    )
    chunk_frames: int = option(
        50, "frames after which the large language model prunes the growing lattice", needs="chunks"
    )
    lookahead_frames: int = option(12, "frames that the search is ahead of the large language model", needs="chunks")
    max_token_seconds: float | None = option(
        None,
        "leave out words whose tokens last longer than this on average, which is noise",
        kind=float,
    )
    word_beam: InitVar[float | None] = None

    def __post_init__(self, word_beam: float | None) -> None:
        if word_beam is not None:
            warnings.warn("word_beam is now skip_beam; the old name will go.", FutureWarning, stacklevel=3)
            object.__setattr__(self, "skip_beam", word_beam)
        check_options(self, "decoding options")
        for name in ("search_beam", "output_beam", "skip_beam", "context_beam", "am_scale", "max_token_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise AsrError(f"decoding options: {name} is {value}; it must be above 0.")
            if name.endswith("_beam") and value is not None and value > _WIDEST_BEAM:
                object.__setattr__(self, name, math.inf)
        for name in ("am_scale", "graph_scale", "lm_scale", "word_insertion_penalty"):
            if not abs(getattr(self, name)) <= _MAX_SCALE:  # beyond, sums of scores leave float32
                raise AsrError(
                    f"decoding options: {name} is {getattr(self, name)}; it must be a finite number, at most "
                    f"{_MAX_SCALE:.0e}."
                )
        if not 0 <= self.min_active_states <= self.max_active_states <= _MOST_STATES or self.max_active_states < 1:
            raise AsrError(
                f"decoding options: min_active_states is {self.min_active_states} and max_active_states "
                f"{self.max_active_states}; choose 0 <= min_active_states <= max_active_states, at most 2^63 - 1."
            )
        if self.chunk_frames < 1 or self.lookahead_frames < 0 or self.chunk_frames + self.lookahead_frames >= 2**31:
            raise AsrError(
                f"decoding options: chunk_frames is {self.chunk_frames} and lookahead_frames {self.lookahead_frames}; "
                "give at least 1 and 0, below 2^31 together."
            )
        if self.max_contexts_per_state is not None and self.max_contexts_per_state < 1:
            raise AsrError(
                f"decoding options: max_contexts_per_state is {self.max_contexts_per_state}; give at least 1 or none."
            )
        if self.blank_skip_threshold is not None and not 0 < self.blank_skip_threshold < 1:
            raise AsrError(
                f"decoding options: blank_skip_threshold is {self.blank_skip_threshold}; it is a probability "
                "between 0 and 1, or none."
            )
