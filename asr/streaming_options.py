"""How a stream is recognized: windows of the acoustic model, partial results, the end of an utterance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asr.am.windows import WindowSizes
from asr.decoding.endpoint import EndpointRules
from asr.errors import AsrError

PARTIALS = {
    "agreed": "words on which the best paths of two chunks in succession agree",
    "best": "the best path at each chunk; soonest, and most often taken back",
    "settled": "words that all paths share; never taken back",
}


@dataclass(frozen=True)
class StreamingOptions:
    """Seconds, unless said otherwise.

    Args:
        chunk_seconds: audio between two results.
        left_seconds: audio before a chunk that the acoustic model sees.
        right_seconds: audio behind it that the acoustic model sees. A word is told so much, and up to a chunk, after
            it was spoken, and the time that computing takes.
        memory_seconds: audio whose mean and variance the features are normalised by, at most.
        least_spread: standard deviation of the features' log energies, averaged over bands, until which a stream's
            beginning is taken for noise. Stationary noise has 0.8, clean speech 3 or more; 0 for none.
        partials: a key of `PARTIALS`.
        silence_before_words: a pause this long ends an utterance in which nothing has been said.
        silence_after_words: a pause this long ends an utterance with words.
        longest_utterance: an utterance ends here at the latest; from half of it on shorter and shorter pauses end it.
        commit_seconds: what the best path said so long ago is decided; None decides only what all paths share, which is
            exact and, as long as `longest_utterance` ends utterances, bounded. The torch pass only.
        first_pass: `torch`, with the language model inside the search, or `k2`, with the language model behind it; k2's
            cost and memory grow with an utterance, and of its partial results nothing is settled.
        cache_bytes: what the recurrent language model's histories may take.

    Raises:
        AsrError: a number is out of its range.
    """

    chunk_seconds: float = 0.64
    left_seconds: float = 4.0
    right_seconds: float = 0.64
    memory_seconds: float = 30.0
    least_spread: float = 1.25
    partials: str = "agreed"
    silence_before_words: float = 5.0
    silence_after_words: float = 1.0
    longest_utterance: float = 30.0
    commit_seconds: float | None = None
    first_pass: str = "torch"
    cache_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        for name in ("chunk_seconds", "silence_before_words", "silence_after_words", "longest_utterance"):
            if not 0 < getattr(self, name) < math.inf:
                raise AsrError(f"streaming: {name} is {getattr(self, name)}; it must be above 0, and finite.")
        if self.commit_seconds is not None and not 0 < self.commit_seconds < math.inf:
            raise AsrError(f"streaming: commit_seconds is {self.commit_seconds}; it must be above 0, or none.")
        for name in ("left_seconds", "right_seconds", "memory_seconds", "least_spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise AsrError(f"streaming: {name} is {getattr(self, name)}; it must be 0 or more, and finite.")
        if self.first_pass not in ("torch", "k2"):
            raise AsrError(f"streaming: there is no first pass {self.first_pass!r}; it is torch or k2.")
        if self.partials not in PARTIALS:
            raise AsrError(f"streaming: there are no partial results {self.partials!r}; choose {', '.join(PARTIALS)}.")

    def window_sizes(self, frame_seconds: float) -> WindowSizes:
        """In frames of output, `frame_seconds` apart."""
        chunk = max(1, round(self.chunk_seconds / frame_seconds))
        return WindowSizes(
            chunk=chunk,
            left=round(self.left_seconds / frame_seconds),
            right=round(self.right_seconds / frame_seconds),
            memory=max(chunk, round(self.memory_seconds / frame_seconds)),
            least_spread=self.least_spread,
        )

    def endpoint_rules(self, frame_seconds: float) -> EndpointRules:
        """In frames of output."""
        return EndpointRules(
            silence_before_words=max(1, round(self.silence_before_words / frame_seconds)),
            silence_after_words=max(1, round(self.silence_after_words / frame_seconds)),
            longest=max(1, round(self.longest_utterance / frame_seconds)),
        )
