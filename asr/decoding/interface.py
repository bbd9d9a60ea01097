"""The interface of all decoders: language models, options, input and its checks, hypotheses and results.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.interface import LanguageModel
from asr.options import check_options, option

if TYPE_CHECKING:
    from asr.decoding.lattice import Lattice
    from asr.lm.cached.engine import CachedRNNLM
    from asr.lm.cached.states import QueryStatistics


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
        num_frames: number of decoded frames, without those that `blank_skip_threshold` skipped; of a stream, of all.
        lattice: the alternatives, if the decoder keeps a lattice and a final state was reached. The lattice of token
            passing is in host memory.
        original_frame: (num_frames,) int64, the original frame of each decoded one; None if no frames were skipped, and
            for a stream of token passing, which keeps no lattice.
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
        self,
        log_prob: Tensor,
        num_frames: Tensor | None = None,
        lm: LanguageModel | None = None,
        lm_state: Tensor | None = None,
    ) -> list[DecodeResult]:
        """Decodes a batch. No gradient is kept.

        Args:
            log_prob: (N, T, C), natural logs.
            num_frames: (N,) int64; T for all utterances if None.
            lm: the language model, or None.
            lm_state: (N, D), what `lm` carries over from earlier sentences (`LanguageModel.state_after`), or None.

        Returns:
            One result per utterance, in order.

        Raises:
            AsrError: the log-probabilities contain NaN or +inf, or their width is not the graph's number of tokens.
        """


_WIDEST_BEAM = 1e30  # wider beams become infinite: float32 cannot hold much more
_MAX_SCALE = 1e6


@dataclass
class LanguageModels:
    """A mode's language model in the form that the decoder queries.

    Args:
        model: the large model minus the graph's own; None if the graph's own model decides.
        engine: the recurrent model's query engine inside `model`, for its statistics; None without a recurrent model.
        second: the language models of the second pass, or None.
    """

    model: LanguageModel | None
    engine: CachedRNNLM | None
    second: LanguageModels | None = None

    def statistics(self) -> QueryStatistics | None:
        """Combined statistics of the recurrent models of all passes; None without one."""
        counts = [None if self.engine is None else self.engine.statistics()]
        counts.append(None if self.second is None else self.second.statistics())
        known = [one for one in counts if one is not None]
        return sum(known[1:], known[0]) if known else None

    def forget_contexts(self) -> None:
        """Tells the models that none of their contexts are in use any more."""
        for models in (self, self.second):
            if models is not None and models.model is not None:
                models.model.retain(models.model.start(0))


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
        max_active_states: maximum number of partial paths that survive, except for ties. Token passing counts (graph
            state, word history) pairs. k2 counts graph states, and keeps within both limits only roughly: where a frame
            is outside of them, it makes the beam of the next ones narrower or wider.
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
            recognizer's results; see `asr.decoding.words`. None leaves nothing out.
        mbr_scale: scale of the total scores by whose posteriors the words with the least expected errors are chosen
            from the lattice (minimum-Bayes-risk decoding, `asr.decoding.mbr`); 1 is that of the search. None, or inf,
            takes the words of the best path.
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
    mbr_scale: float | None = option(
        None,
        "choose the words with the least expected errors from the lattice, by posteriors of its scores at this scale "
        "(minimum-Bayes-risk decoding; try 1; inf: those of the best path)",
        needs="rescored lattice",
        kind=float,
    )
    word_beam: InitVar[float | None] = None

    def __post_init__(self, word_beam: float | None) -> None:
        if word_beam is not None:
            warnings.warn("word_beam is now skip_beam; the old name will go.", FutureWarning, stacklevel=3)
            object.__setattr__(self, "skip_beam", word_beam)
        check_options(self, "decoding options")
        beams = ("search_beam", "output_beam", "skip_beam", "context_beam")
        for name in (*beams, "am_scale", "max_token_seconds", "mbr_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise AsrError(f"decoding options: {name} is {value}; it must be above 0.")
            if name in beams and value is not None and value > _WIDEST_BEAM:
                object.__setattr__(self, name, math.inf)
        # On a command line nothing else turns off what the bundle sets; total scores times such a scale may overflow.
        if self.mbr_scale is not None and self.mbr_scale > _WIDEST_BEAM:
            object.__setattr__(self, "mbr_scale", None)
        for name in ("am_scale", "graph_scale", "lm_scale", "word_insertion_penalty"):
            if not abs(getattr(self, name)) <= _MAX_SCALE:  # with larger scales, sums of scores overflow float32
                raise AsrError(
                    f"decoding options: {name} is {getattr(self, name)}; it must be a finite number, at most "
                    f"{_MAX_SCALE:.0e}."
                )
        for name in ("graph_scale", "lm_scale"):  # a negative one would make what is impossible the best
            if getattr(self, name) < 0:
                raise AsrError(f"decoding options: {name} is {getattr(self, name)}; it must be 0 or more.")
        if not 0 <= self.min_active_states <= self.max_active_states or self.max_active_states < 1:
            raise AsrError(
                f"decoding options: min_active_states is {self.min_active_states} and max_active_states "
                f"{self.max_active_states}; choose 0 <= min_active_states <= max_active_states."
            )
        if self.chunk_frames < 1 or self.lookahead_frames < 0 or self.chunk_frames + self.lookahead_frames >= 2**31:
            raise AsrError(
                f"decoding options: chunk_frames is {self.chunk_frames} and lookahead_frames {self.lookahead_frames}; "
                "give at least 1 and 0, below 2^31 together."
            )
        if self.max_contexts_per_state is not None and self.max_contexts_per_state < 1:
            raise AsrError(
                f"decoding options: max_contexts_per_state is {self.max_contexts_per_state}; give at least 1."
            )
        if self.blank_skip_threshold is not None and not 0 < self.blank_skip_threshold < 1:
            raise AsrError(
                f"decoding options: blank_skip_threshold is {self.blank_skip_threshold}; it must be above 0 and "
                "below 1."
            )


# Replaces -inf in sums; the sum of many such values is still finite in float32.
_LOW = -1e20
TOLERANCE = 0.1
"""Permitted error of a sum of probabilities, or of its logarithm: half precision, thousands of tokens."""
_LARGEST_EXP = 20.0

INPUTS = {
    "log_probs": "natural logarithms of probabilities; the first batch is checked",
    "scores": "any scores, such as log-likelihoods (posteriors over priors), used as they are",
}
"""Kind of a decoder's input -> its description."""


def check_chunks(streams: Sequence[int], num_frames: Tensor) -> None:
    """Checks that each stream gets exactly one chunk; num_frames (N,).

    Raises:
        AsrError: a stream occurs twice, or there are more or fewer chunks than streams.
    """
    if len(set(streams)) != len(streams) or len(streams) != len(num_frames):
        raise AsrError(f"streams {list(streams)} with {len(num_frames)} chunks: give each stream one chunk.")


def with_num_frames(log_prob: Tensor, num_frames: Tensor | None) -> tuple[Tensor, Tensor]:
    """Detaches log-probabilities (N, T, C), and fills in the numbers of their frames (N,), T each, if None.

    Raises:
        AsrError: the log-probabilities are not a tensor.
    """
    if not isinstance(log_prob, Tensor):
        raise AsrError(
            f"the log-probabilities are of type {type(log_prob).__name__}; give a tensor, as from torch.as_tensor."
        )
    if num_frames is None:
        num_frames = torch.full(log_prob.shape[:1], log_prob.shape[1] if log_prob.dim() > 1 else 0, dtype=torch.int64)
    return log_prob.detach(), num_frames


class LogProbCheck:
    """Checks a decoder's input, and in its first batch also that the values are log-probabilities.

    The check of values looks at the middle frame of each utterance. Later batches come from the same network, so their
    values are not checked.

    Args:
        num_tokens: the graph's C.
        inputs: a key of `INPUTS`.

    Raises:
        AsrError: `inputs` is not a key of `INPUTS`.
    """

    def __init__(self, num_tokens: int, inputs: str = "log_probs") -> None:
        if inputs not in INPUTS:
            raise AsrError(f"there are no inputs {inputs!r}; give one of {', '.join(INPUTS)}.")
        self._num_tokens = num_tokens
        self._has_checked_values = inputs == "scores"

    def __call__(self, log_prob: Tensor, num_frames: Tensor) -> None:
        """Checks log_prob (N, T, C) with num_frames (N,).

        Raises:
            AsrError: as for `check_log_prob`.
        """
        is_first = not self._has_checked_values and bool(log_prob.numel())
        check_log_prob(log_prob, num_frames, self._num_tokens, checks_values=is_first)
        self._has_checked_values |= is_first


def check_log_prob(log_prob: Tensor, num_frames: Tensor, num_tokens: int, *, checks_values: bool = False) -> None:
    """Checks that log-probabilities can be searched.

    Args:
        log_prob: (N, T, C).
        num_frames: (N,).
        num_tokens: the graph's C.
        checks_values: whether to warn if the probabilities of a frame do not sum to 1; one frame of each utterance is
            checked. This is not an error, because log-likelihoods (posteriors over priors) do not either.

    Raises:
        AsrError: the shape or a frame count is wrong, frame counts are not integers, a valid frame has NaN or +inf, or
            values are probabilities.
    """
    if log_prob.dim() != 3 or num_frames.shape != log_prob.shape[:1]:
        raise AsrError(
            f"log-probabilities of shape {tuple(log_prob.shape)} with frame counts of shape "
            f"{tuple(num_frames.shape)}: give (utterances, frames, tokens) and (utterances,)."
        )
    if num_frames.is_floating_point():
        raise AsrError(f"the frame counts are {num_frames.dtype}; give whole numbers, not shares of the longest.")
    if log_prob.shape[2] != num_tokens:
        raise AsrError(
            f"the log-probabilities have {log_prob.shape[2]} columns but the graph was built for {num_tokens} tokens; "
            "use the graph that belongs to this acoustic model."
        )
    if not len(num_frames):
        return
    # One transfer for all values, so that the host waits for a GPU once; counts are exact in float64.
    checks_values = checks_values and log_prob.numel() > 0
    facts = [_are_finite(log_prob), *(_summary_of_frames(log_prob, num_frames) if checks_values else ())]
    bounds = torch.stack([num_frames.min(), num_frames.max()]).to(torch.float64)
    numbers = torch.stack([fact.to(torch.float64) for fact in facts])
    are_finite, *summary, low, high = torch.cat([numbers.to(bounds.device), bounds]).tolist()
    if low < 0 or high > log_prob.shape[1]:
        raise AsrError(
            f"frame counts range from {low:.0f} to {high:.0f}, but the log-probabilities have {log_prob.shape[1]} "
            "frames; give the number of output frames of each utterance."
        )
    if not are_finite:
        _refuse_numbers(log_prob, num_frames)
    if summary:
        _require_log_probs(*summary)


def _summary_of_frames(log_prob: Tensor, num_frames: Tensor) -> tuple[Tensor, ...]:
    """Summarizes the middle frames of all utterances that have frames.

    Returns:
        The logarithm of a sum of probabilities that is furthest from 0, the lowest value, and the largest distance from
        1 of a sum of values.
    """
    middle = (num_frames // 2).clamp(0, log_prob.shape[1] - 1).to(log_prob.device)
    row = log_prob[torch.arange(len(log_prob), device=log_prob.device), middle].float()
    is_used = (num_frames > 0).to(log_prob.device)
    log_sum = torch.where(is_used, row.logsumexp(1), torch.zeros_like(row[:, 0]))
    furthest = log_sum.gather(0, log_sum.abs().argmax(0, keepdim=True))[0]
    from_one = torch.where(is_used, (row.sum(1) - 1.0).abs(), torch.zeros_like(log_sum)).max()
    return furthest, torch.where(is_used.unsqueeze(1), row, torch.zeros_like(row)).min(), from_one


def _require_log_probs(log_sum: float, lowest: float, from_one: float) -> None:
    """Raises or warns if values are not log-probabilities; arguments as `_summary_of_frames` returns them."""
    if not abs(log_sum) > TOLERANCE:
        return
    if lowest >= 0.0 and from_one <= TOLERANCE:
        raise AsrError("the values are probabilities, not log-probabilities: give their natural logarithm.")
    warnings.warn(
        f"the values are not log-probabilities (the probabilities of a frame sum to {_shown_exp(log_sum)}, not to 1); "
        'for logits, apply log_softmax; for log-likelihoods, give inputs="scores".',
        stacklevel=6,
    )


def _shown_exp(value: float) -> str:
    return f"{math.exp(value):.3g}" if value < _LARGEST_EXP else f"e^{value:.0f}"


def check_numbers(log_prob: Tensor, num_frames: Tensor) -> None:
    """Checks that valid frames have neither NaN nor +inf; -inf is a probability of 0.

    Args:
        log_prob: (N, T, C).
        num_frames: (N,).

    Raises:
        AsrError: a valid frame has one; the message says where.
    """
    if not bool(_are_finite(log_prob)):
        _refuse_numbers(log_prob, num_frames)


def _are_finite(log_prob: Tensor) -> Tensor:
    """Whether no value is NaN or +inf, in one pass: the sum would be NaN or infinite, too.

    The sum is in float32, because half precision can hold neither it nor the substitute for -inf.
    """
    return torch.isfinite(log_prob.float().clamp(min=_LOW).sum())


def _refuse_numbers(log_prob: Tensor, num_frames: Tensor) -> None:
    """Raises AsrError if a valid frame has NaN or +inf."""
    bad = torch.isnan(log_prob) | (log_prob == torch.inf)
    used = torch.arange(log_prob.shape[1], device=log_prob.device) < num_frames.to(log_prob.device).unsqueeze(1)
    where = (bad.any(2) & used).nonzero()
    if len(where):
        utt_idx, frame = where[0].tolist()
        raise AsrError(
            f"utterance {utt_idx}, frame {frame}: the acoustic model gave NaN or infinity instead of a "
            "log-probability; check its input and its weights."
        )


def skip_blanks(
    log_prob: Tensor, num_frames: Tensor, threshold: float, after_blank: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of consecutive frames whose blank (token 0) is more probable than `threshold`, keeps only the first.

    Args:
        log_prob: (N, T, C).
        num_frames: (N,) int64.
        threshold: a probability.
        after_blank: (N,) bool, whether the frame before the first one was such a frame; None for all False.

    Returns:
        log_prob (N, T', C), num_frames (N,), the original frame of each kept one (N, T') int64, and `after_blank` (N,)
        bool for the next chunk.
    """
    num_utts, max_frames, num_tokens = log_prob.shape
    used = torch.arange(max_frames, device=log_prob.device) < num_frames.unsqueeze(1)
    if after_blank is None:
        after_blank = torch.zeros(num_utts, dtype=torch.bool, device=log_prob.device)
    blank = log_prob[:, :, 0] > math.log(threshold)
    with_before = torch.cat([after_blank.unsqueeze(1), blank], dim=1)
    kept = used & ~(blank & with_before[:, :-1])
    num_kept = kept.sum(1)
    # A stable sort brings the kept frames to the front in their order.
    longest = int(num_kept.max()) if num_utts else 0
    frame = torch.sort((~kept).to(torch.int8), dim=1, stable=True).indices[:, :longest]
    short = log_prob.gather(1, frame.unsqueeze(2).expand(-1, -1, num_tokens))
    return short, num_kept, frame, with_before.gather(1, num_frames.unsqueeze(1)).squeeze(1)
