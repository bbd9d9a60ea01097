"""The interface of all decoders: language models, input and its checks, hypotheses and results.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from asr import old_paths
from asr.errors import AsrError
from asr.lm.interface import LanguageModel

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
        total: see `asr.decoding.settings.DecodingOptions`.
        start_frames: the first frame (after subsampling) of each word.
        end_frames: the frame after the last one of each word.
        phones: runs of equal tokens without blanks, each as (token, first frame, frame after the last).
        confidences: the posterior probability of each word in the lattice; empty if not computed.
        sentence_ends: the number of words before each end of a sentence within the utterance, if `</s>` is not a word.
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
    sentence_ends: tuple[int, ...] = ()


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
        engines = [models.engine for models in (self, self.second) if models is not None]
        known = [engine.statistics() for engine in engines if engine is not None]
        return sum(known[1:], known[0]) if known else None

    def forget_contexts(self) -> None:
        """Tells the models that none of their contexts are in use any more."""
        for models in (self, self.second):
            if models is not None and models.model is not None:
                models.model.retain(models.model.start(0))


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
    """Checks a decoder's input, and in the first batch that has frames also that the values are log-probabilities.

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
        is_first = not self._has_checked_values and bool((num_frames > 0).any())
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


old_paths.offer(__name__)
