"""When a speaker has finished."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EndpointRules:
    """Counts of frames as the acoustic model gives them. A stream ends when one of the rules holds.

    From half of `longest` on, a shorter and shorter pause is enough, so that long speech is rarely cut within a word.

    Args:
        silence_before_words: so many trailing blank frames while nothing has been said.
        silence_after_words: so many trailing blank frames after words.
        longest: so many frames in all.
    """

    silence_before_words: int = 125
    silence_after_words: int = 25
    longest: int = 750

    def apply(self, has_words: bool, num_trailing_blanks: int, num_frames: int) -> bool:
        """Whether the stream ends here.

        Args:
            has_words: whether the best path has words.
            num_trailing_blanks: frames since the best path last read something else.
            num_frames: frames read.
        """
        silence = self.silence_after_words if has_words else self.silence_before_words
        too_long = max(0.0, 2.0 * num_frames / self.longest - 1.0)
        return num_trailing_blanks >= silence * (1.0 - too_long)
