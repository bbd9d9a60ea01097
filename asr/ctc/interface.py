"""The interface of a CTC decoder: its scales, beams and thresholds, and the hypotheses that it returns."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError

_Config = TypeVar("_Config")


def require_number(name: str, value: Any) -> None:
    """Checks an argument.

    Raises:
        AsrError: it is not a number, or is NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise AsrError(f"{name} is {value!r}; it must be a number.")


def require_weight(name: str, value: Any) -> None:
    """Checks a weight in an interpolation.

    Raises:
        AsrError: it is not a number from 0 to 1.
    """
    require_number(name, value)
    if not 0.0 <= value <= 1.0:
        raise AsrError(f"{name} is {value}; it must be between 0 and 1.")


def require_nbest(nbest: Any) -> None:
    """Checks how many hypotheses are asked for.

    Raises:
        AsrError: it is not a whole number of 1 or more.
    """
    if isinstance(nbest, bool) or not isinstance(nbest, Integral) or nbest < 1:
        raise AsrError(f"nbest is {nbest!r}; ask for 1 hypothesis or more.")


def refuse_given(arguments: Mapping[str, Any], why: str, names: Collection[str] | None = None) -> None:
    """Refuses arguments that have no effect.

    Args:
        arguments: the arguments by name; None for one that is not given.
        why: why they have no effect.
        names: which of them have none; None for all.

    Raises:
        AsrError: one of them is given.
    """
    for name in arguments if names is None else names:
        if arguments.get(name) is not None:
            raise AsrError(f"{name} has no effect here: {why}; leave it out.")


def settings_of(config: type[_Config], settings: Mapping[str, Any]) -> _Config:
    """A dataclass of settings with the given fields.

    Raises:
        AsrError: there is no such setting, or as for the class.
    """
    known = [field.name for field in fields(config)]  # type: ignore[arg-type]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise AsrError(f"there is no argument or setting {unknown[0]!r}; settings are {', '.join(known)}.")
    return config(**settings)


@dataclass(frozen=True)
class CTCDecodingConfig:
    """Scales and beams. A hypothesis' score, higher is better, is

        score = am_score + lm_scale * lm_score + word_insertion_penalty * number of words

    with natural logs throughout. Without a word list, tokens take the place of words.

    Args:
        lm_scale: weight of the language model. Usual values are 1 to 2.5, because a CTC network is overconfident: its
            frames are not independent.
        word_insertion_penalty: added for each word; negative values give fewer words.
        search_beam: a partial path is pruned if its score is this far below the best one of its frame.
        max_active_states: maximum number of partial paths that survive a frame.
        output_beam: beam of the lattice; n-best lists, confidences and a second language model see nothing beyond it.
        context_beam: beam for partial paths of the lattice when a second language model rescores it.
        blank_skip_threshold: of consecutive frames whose blank probability is above this, only the first is searched;
            None searches all frames.
        lm_fusion: where the second language model acts: `lattice` rescores the lattice of the first pass; `search`
            applies the model inside the search, where it also decides what is pruned (slower).
        beam_size: number of partial hypotheses that survive a frame; only without a word list.
        token_min_log_prob: tokens with a lower log-probability are not followed, except the frame's best; only without
            a word list.

    Raises:
        AsrError: a value is out of range.
    """

    lm_scale: float = 1.25
    word_insertion_penalty: float = 0.0
    search_beam: float = 16.0
    max_active_states: int = 2000
    output_beam: float = 8.0
    context_beam: float | None = 6.0
    blank_skip_threshold: float | None = None
    lm_fusion: str = "lattice"
    beam_size: int = 50
    token_min_log_prob: float = -8.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_none = name in ("context_beam", "blank_skip_threshold")
            if name != "lm_fusion" and not (value is None and may_be_none):
                require_number(f"decoding: {name}", value)
        if self.lm_fusion not in ("lattice", "search"):
            raise AsrError(f"decoding: lm_fusion is {self.lm_fusion!r}; it must be lattice or search.")
        if not math.isfinite(self.lm_scale) or self.lm_scale < 0:
            raise AsrError(f"decoding: lm_scale is {self.lm_scale}; it must not be negative.")
        for name in ("beam_size", "max_active_states"):
            value = getattr(self, name)
            if not 1 <= value < 2**63 or value % 1 != 0:
                raise AsrError(f"decoding: {name} is {value}; it must be a whole number of 1 or more, below 2^63.")
        if not self.token_min_log_prob <= 0:
            raise AsrError(f"decoding: token_min_log_prob is {self.token_min_log_prob}; it must not be above 0.")
        self.options()

    def options(self) -> DecodingOptions:
        """The decoding options of the graph search."""
        return DecodingOptions(
            search_beam=self.search_beam,
            output_beam=self.output_beam,
            max_active_states=int(self.max_active_states),
            min_active_states=int(min(30, self.max_active_states)),
            graph_scale=self.lm_scale,
            lm_scale=self.lm_scale,
            word_insertion_penalty=self.word_insertion_penalty,
            context_beam=self.context_beam,
            blank_skip_threshold=self.blank_skip_threshold,
        )


@dataclass(frozen=True)
class CTCToken:
    """A token of a hypothesis: consecutive frames with the same symbol.

    Args:
        text: the symbol.
        start_frame: its first frame.
        end_frame: the frame after its last one.
    """

    text: str
    start_frame: int
    end_frame: int


@dataclass(frozen=True)
class CTCWord:
    """A word of a hypothesis.

    Args:
        text: the word.
        start_frame: the first frame of its first token.
        end_frame: the frame after its last token.
        start: `start_frame` in seconds, or None if the decoder has no frame shift.
        end: `end_frame` in seconds, or None.
        confidence: its posterior probability, or None if not requested.
        is_spelled: whether it is a spelled out-of-vocabulary word.
    """

    text: str
    start_frame: int
    end_frame: int
    start: float | None = None
    end: float | None = None
    confidence: float | None = None
    is_spelled: bool = False


@dataclass(frozen=True)
class CTCHypothesis:
    """A transcription of an utterance. Scores are natural logs; `CTCDecodingConfig` has the formula of `score`.

    Args:
        words: the words.
        tokens: the tokens without blanks.
        score: the combined score by which hypotheses are ranked.
        am_score: the network's score of the best path with a word list. Without one, that of all paths with these
            tokens; other tokens with the same text, such as other pieces, add to it what they add to `score`.
        lm_score: the language model's score of the words, or of the tokens without a word list, unscaled.
        is_complete: whether the utterance may end here; if not, `words` may lack an unfinished word.
    """

    words: tuple[CTCWord, ...]
    tokens: tuple[CTCToken, ...]
    score: float
    am_score: float
    lm_score: float
    is_complete: bool = True

    @property
    def text(self) -> str:
        """The words, separated by spaces."""
        return " ".join(word.text for word in self.words)


def no_hypothesis() -> CTCHypothesis:
    """The result if nothing survived the beam."""
    return CTCHypothesis((), (), -math.inf, -math.inf, 0.0, is_complete=False)
