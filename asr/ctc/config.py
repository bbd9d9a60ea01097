"""Every number that a CTC decoder can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from asr.decoding.interface import DecodingOptions
from asr.errors import AsrError


@dataclass(frozen=True)
class CTCDecodingConfig:
    """Scales and beams. A hypothesis' score, higher is better, is

        score = am_score + lm_scale * lm_score + word_insertion_penalty * number of words

    with natural logs throughout. Where no words are listed, tokens take the place of words.

    Args:
        lm_scale: weight of the language model. Frames of a CTC network are not independent, so that its scores are too
            sure of themselves: 1 to 2.5 is usual.
        word_insertion_penalty: added for each word; negative for fewer words.
        search_beam: a partial path this much worse than the best one of its frame is dropped.
        max_active_states: so many partial paths survive a frame at most.
        output_beam: what a lattice keeps; n-best lists, confidences and a second language model see nothing beyond it.
        context_beam: of the lattice's partial paths with a second language model, those this much worse are dropped.
        blank_skip_threshold: of frames in a row whose blank is more probable than this, the first alone is searched;
            None for all frames.
        lm_fusion: where the second language model acts, `lattice` (over what the graph's own has kept) or `search`
            (inside, deciding what is pruned: slower).
        beam_size: partial hypotheses that survive a frame, where no words are listed.
        token_min_log_prob: there, tokens below it are not followed, the frame's best excepted.

    Raises:
        AsrError: a number is out of its range.
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
        for field in fields(self):
            value = getattr(self, field.name)
            is_left_out = value is None and field.default is None
            if field.name in ("lm_fusion",) or is_left_out or (field.name == "context_beam" and value is None):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise AsrError(f"decoding: {field.name} is {value!r}; it must be a number.")
        if self.lm_fusion not in ("lattice", "search"):
            raise AsrError(f"decoding: lm_fusion is {self.lm_fusion!r}; it is lattice or search.")
        if not math.isfinite(self.lm_scale) or self.lm_scale < 0:
            raise AsrError(f"decoding: lm_scale is {self.lm_scale}; it must not be negative.")
        if self.beam_size < 1 or int(self.beam_size) != self.beam_size:
            raise AsrError(f"decoding: beam_size is {self.beam_size}; it must be 1 or more.")
        if not self.token_min_log_prob <= 0:
            raise AsrError(f"decoding: token_min_log_prob is {self.token_min_log_prob}; it must not be above 0.")
        self.options()

    def options(self, output_beam: float | None = None) -> DecodingOptions:
        """The same for the search over a graph."""
        return DecodingOptions(
            search_beam=self.search_beam,
            output_beam=self.output_beam if output_beam is None else output_beam,
            max_active_states=self.max_active_states,
            min_active_states=min(30, self.max_active_states),
            graph_scale=self.lm_scale,
            lm_scale=self.lm_scale,
            word_insertion_penalty=self.word_insertion_penalty,
            context_beam=self.context_beam,
            blank_skip_threshold=self.blank_skip_threshold,
        )
