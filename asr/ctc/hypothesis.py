"""Results of a CTC decoder."""

from __future__ import annotations

from dataclasses import dataclass


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
        am_score: the network's score: of the best path with a word list, summed over all paths without one.
        lm_score: the language model's score, unscaled.
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
