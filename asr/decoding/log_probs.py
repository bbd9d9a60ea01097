"""Checks of frame log-probabilities before a search, and blank skipping.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from asr.errors import AsrError

# Replaces -inf in sums; the sum of many such values is still finite in float32.
_LOW = -1e20
# Permitted distance from 0 of the logarithm of a sum of probabilities: half precision, thousands of tokens.
TOLERANCE = 0.1
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


def whole(log_prob: Tensor, num_frames: Tensor | None) -> tuple[Tensor, Tensor]:
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
        self._has_looked = inputs == "scores"

    def __call__(self, log_prob: Tensor, num_frames: Tensor) -> None:
        """Checks log_prob (N, T, C) with num_frames (N,).

        Raises:
            AsrError: as for `check_log_prob`.
        """
        is_first = not self._has_looked and bool(log_prob.numel())
        check_log_prob(log_prob, num_frames, self._num_tokens, looks=is_first)
        self._has_looked |= is_first


def check_log_prob(log_prob: Tensor, num_frames: Tensor, num_tokens: int, *, looks: bool = False) -> None:
    """Checks that log-probabilities can be searched.

    Args:
        log_prob: (N, T, C).
        num_frames: (N,).
        num_tokens: the graph's C.
        looks: whether to look at one frame of each utterance too, and warn if its probabilities do not sum to 1. This
            is not an error, because log-likelihoods (posteriors over priors) do not either.

    Raises:
        AsrError: the shape or a frame count is wrong, a valid frame has NaN or +inf, or values are probabilities.
    """
    if log_prob.dim() != 3 or num_frames.shape != log_prob.shape[:1]:
        raise AsrError(
            f"log-probabilities of shape {tuple(log_prob.shape)} with frame counts of shape "
            f"{tuple(num_frames.shape)}: give (utterances, frames, tokens) and (utterances,)."
        )
    if log_prob.shape[2] != num_tokens:
        raise AsrError(
            f"the log-probabilities have {log_prob.shape[2]} columns but the graph was built for {num_tokens} tokens; "
            "use the graph that belongs to this acoustic model."
        )
    if not len(num_frames):
        return
    # One transfer for all values, so that the host waits for a GPU once; counts are exact in float64.
    looks = looks and log_prob.numel() > 0
    facts = [_are_finite(log_prob), *(_facts_of_frames(log_prob, num_frames) if looks else ())]
    bounds = torch.stack([num_frames.min(), num_frames.max()]).to(torch.float64)
    told = torch.stack([fact.to(torch.float64) for fact in facts])
    are_finite, *looked_at, low, high = torch.cat([told.to(bounds.device), bounds]).tolist()
    if low < 0 or high > log_prob.shape[1]:
        raise AsrError(
            f"frame counts range from {low:.0f} to {high:.0f}, but the log-probabilities have {log_prob.shape[1]} "
            "frames; give the number of output frames of each utterance."
        )
    if not are_finite:
        _refuse_numbers(log_prob, num_frames)
    if looked_at:
        _judge_frames(*looked_at)


def _facts_of_frames(log_prob: Tensor, num_frames: Tensor) -> tuple[Tensor, ...]:
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


def _judge_frames(log_sum: float, lowest: float, from_one: float) -> None:
    """Raises or warns if values are not log-probabilities; arguments as `_facts_of_frames` returns them."""
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
