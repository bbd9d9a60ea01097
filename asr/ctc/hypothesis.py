"""What a CTC decoder answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CTCToken:
    """A token of a hypothesis: a run of equal frames.

    Args:
        text: the symbol.
        start_frame: its first frame.
        end_frame: the frame after its last.
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
        start: `start_frame` in seconds, or None where the decoder was not told the frame shift.
        end: `end_frame` in seconds, or None.
        confidence: its posterior probability, or None where not asked for.
        is_spelled: whether it was spelled, being outside the word list.
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
    """A text for an utterance. Scores are natural logs, see `CTCDecodingConfig` for how `score` is put together.

    Args:
        words: the words.
        tokens: the tokens, blanks left out.
        score: the sum that hypotheses are ranked by.
        am_score: the network's part: the best path's where words are listed, the sum over all paths where not.
        lm_score: the language model's part, unscaled.
        is_complete: whether it may end here; an unfinished word may be missing from `words` where not.
    """

    words: tuple[CTCWord, ...]
    tokens: tuple[CTCToken, ...]
    score: float
    am_score: float
    lm_score: float
    is_complete: bool = True

    @property
    def text(self) -> str:
        """The words with blanks between them."""
        return " ".join(word.text for word in self.words)
