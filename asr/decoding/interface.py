"""The interface of all decoders: options, hypotheses, results.

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
        words: the words as text.
        am_score: sum of the frame log-probabilities along the path.
        graph_score: sum of the graph's scores, including the final score.
        lm_score: sum of the language model's scores, including `final`; 0 without a language model.
        total: see `DecodingOptions`.
        start_frames: the first frame (after subsampling) of each word.
        end_frames: the frame after the last one of each word.
        phones: runs of equal tokens without blanks, each as (token, first frame, frame after the last).
        confidences: the posterior probability of each word in the lattice; empty if not computed.
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
        hypotheses: best first. The search finds one; `asr.decoding.nbest` extracts more from the lattice. Empty if
            nothing survived the beam, or if there were no frames and the graph does not accept the empty sentence.
        reached_final: False if no complete sentence survived; the hypothesis is then the best unfinished path.
        num_frames: number of decoded frames, without those that `blank_skip_threshold` skipped.
        lattice: the alternatives, if the decoder keeps a lattice and a final state was reached. The lattice of token
            passing is in host memory.
        original_frame: (num_frames,) int64, the original frame of each decoded one; None if no frames were skipped.
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
    """Turns frame log-probabilities into hypotheses."""

    def decode(
        self, log_prob: Tensor, num_frames: Tensor | None = None, lm: LanguageModel | None = None
    ) -> list[DecodeResult]:
        """Decodes log_prob (N, T, C), natural logs, num_frames (N,) int64 -> one result per utterance, in order.

        Without `num_frames`, all utterances have T frames. No gradient is kept.

        Raises:
            AsrError: the log-probabilities contain NaN or +inf, or their width is not the graph's number of tokens.
        """


_WIDEST_BEAM = 1e30  # wider beams become infinite: float32 cannot hold much more
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
        search_beam: partial paths whose score is this far below the best one of their frame are pruned.
        output_beam: lattice arcs are pruned if the best path through them is this far below the best path.
        min_active_states: minimum number of partial paths of an utterance that survive a frame, even outside the beam.
        max_active_states: maximum number of partial paths that survive, except for ties. k2 counts graph states; token
            passing counts (graph state, word history) pairs.
        am_scale: weight of the frame log-probabilities.
        graph_scale: weight of the graph's scores.
        lm_scale: weight of the language model's scores.
        word_insertion_penalty: added for each word; negative values give fewer words.
        skip_beam: words whose partial path, without their language model score, is this far below the best one are
            pruned before the language model is queried, in the search and in rescoring. None queries it for all.
        max_contexts_per_state: maximum number of word histories at a state; None keeps all (exact).
        context_beam: in lattice rescoring, word histories whose score is this far below the best one of their frame are
            pruned; None keeps all (exact, but with many times as many language model queries).
        blank_skip_threshold: of consecutive frames whose blank probability exceeds this, only the first is decoded;
            None decodes all frames (exact).
        chunk_frames: with `lm_fusion="chunks"`, number of frames by which the lattice grows between two rescorings.
        lookahead_frames: with `lm_fusion="chunks"`, number of frames that the search is ahead of the language model.
        max_token_seconds: words whose tokens last longer than this on average count as noise and are left out of a
            recognizer's results; see `asr.decoding.confidence`. None leaves nothing out.
        word_beam: the old name of `skip_beam`.

    Raises:
        AsrError: a value is out of range.
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
        100, "frames after which the large language model prunes the growing lattice", needs="chunks"
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
            if not abs(getattr(self, name)) <= _MAX_SCALE:  # with larger scales, sums of scores overflow float32
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
                f"decoding options: blank_skip_threshold is {self.blank_skip_threshold}; it must be a probability "
                "between 0 and 1, or none."
            )
