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

# In the place of -inf in sums; many of them together are still finite in float32.
_LOW = -1e20
# What the logarithm of a sum of probabilities may differ from 0: half precision, thousands of tokens.
TOLERANCE = 0.1
_LARGEST_EXP = 20.0

INPUTS = {
    "log_probs": "natural logarithms of probabilities; anything else in the first batch is told",
    "scores": "any scores, such as log-likelihoods (posteriors over priors), taken as they are",
}
"""What a decoder may be given -> what that means."""


def check_chunks(streams: Sequence[int], num_frames: Tensor) -> None:
    """Checks that each of some streams gets one chunk; num_frames (N,).

    Raises:
        AsrError: a stream is named twice, or there are more or fewer chunks than streams.
    """
    if len(set(streams)) != len(streams) or len(streams) != len(num_frames):
        raise AsrError(f"streams {list(streams)} with {len(num_frames)} chunks: give each stream one chunk.")


def whole(log_prob: Tensor, num_frames: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, T, C) that take no gradient, and the number of their frames (N,); all of them if None.

    Raises:
        AsrError: the log-probabilities are no tensor.
    """
    if not isinstance(log_prob, Tensor):
        raise AsrError(f"log-probabilities of type {type(log_prob).__name__}: give a tensor, as of torch.as_tensor.")
    if num_frames is None:
        num_frames = torch.full(log_prob.shape[:1], log_prob.shape[1] if log_prob.dim() > 1 else 0, dtype=torch.int64)
    return log_prob.detach(), num_frames


class LogProbCheck:
    """Checks what a decoder is given, and in its first batch also that these are log-probabilities.

    That look is at one frame of each utterance, the middle one. Later batches are from the same network, so that their
    values are left alone.

    Args:
        num_tokens: the graph's C.
        inputs: one of `INPUTS`.

    Raises:
        AsrError: there are no such inputs.
    """

    def __init__(self, num_tokens: int, inputs: str = "log_probs") -> None:
        if inputs not in INPUTS:
            raise AsrError(f"there are no inputs {inputs!r}; give one of {', '.join(INPUTS)}.")
        self._num_tokens = num_tokens
        self._has_looked = inputs == "scores"

    def __call__(self, log_prob: Tensor, num_frames: Tensor) -> None:
        """Checks log_prob (N, T, C) with num_frames (N,).

        Raises:
            AsrError: as of `check_log_prob`.
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
        looks: whether to look at one frame of each utterance, too, and warn if its probabilities do not sum to 1. That
            is no error, since log-likelihoods (posteriors over priors) do not either.

    Raises:
        AsrError: wrong number of dimensions or columns, frame counts that do not fit, NaN or +inf in a used frame, or
            probabilities.
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
    # Read together, so that a GPU is waited for once; counts are exact in float64.
    looks = looks and log_prob.numel() > 0
    facts = [_are_finite(log_prob), *(_facts_of_frames(log_prob, num_frames) if looks else ())]
    bounds = torch.stack([num_frames.min(), num_frames.max()]).to(torch.float64)
    told = torch.stack([fact.to(torch.float64) for fact in facts])
    are_finite, *looked_at, low, high = torch.cat([told.to(bounds.device), bounds]).tolist()
    if low < 0 or high > log_prob.shape[1]:
        raise AsrError(
            f"frame counts run from {low:.0f} to {high:.0f} but the log-probabilities have {log_prob.shape[1]} frames."
        )
    if not are_finite:
        _refuse_numbers(log_prob, num_frames)
    if looked_at:
        _judge_frames(*looked_at)


def _facts_of_frames(log_prob: Tensor, num_frames: Tensor) -> tuple[Tensor, ...]:
    """Of the middle frames of all utterances: the furthest logarithm of a sum of probabilities, the lowest value, and
    how far values sum from 1. Utterances without frames do not count."""
    middle = (num_frames // 2).clamp(0, log_prob.shape[1] - 1).to(log_prob.device)
    row = log_prob[torch.arange(len(log_prob), device=log_prob.device), middle].float()
    is_used = (num_frames > 0).to(log_prob.device)
    log_sum = torch.where(is_used, row.logsumexp(1), torch.zeros_like(row[:, 0]))
    furthest = log_sum.gather(0, log_sum.abs().argmax(0, keepdim=True))[0]
    from_one = torch.where(is_used, (row.sum(1) - 1.0).abs(), torch.zeros_like(log_sum)).max()
    return furthest, torch.where(is_used.unsqueeze(1), row, torch.zeros_like(row)).min(), from_one


def _judge_frames(log_sum: float, lowest: float, from_one: float) -> None:
    """Says what the values seem to be; arguments as `_facts_of_frames` gives them."""
    if not abs(log_sum) > TOLERANCE:
        return
    if lowest >= 0.0 and from_one <= TOLERANCE:
        raise AsrError("the values are probabilities, not log-probabilities: give their natural logarithm.")
    warnings.warn(
        f"the values are no log-probabilities (the probabilities of a frame sum to {_shown_exp(log_sum)}, not to 1); "
        'if they are logits, give log_softmax of them; if they are log-likelihoods, say inputs="scores".',
        stacklevel=6,
    )


def _shown_exp(value: float) -> str:
    return f"{math.exp(value):.3g}" if value < _LARGEST_EXP else f"e^{value:.0f}"


def check_numbers(log_prob: Tensor, num_frames: Tensor) -> None:
    """Checks that there is neither NaN nor +inf in frames that are used; -inf is a probability of 0.

    Args:
        log_prob: (N, T, C).
        num_frames: (N,).

    Raises:
        AsrError: there is; the sentence says where.
    """
    if not bool(_are_finite(log_prob)):
        _refuse_numbers(log_prob, num_frames)


def _are_finite(log_prob: Tensor) -> Tensor:
    """Whether there is neither NaN nor +inf anywhere, in one pass: either would make the sum one.

    In float32, since half precision has neither room for the sum nor for what stands in the place of -inf.
    """
    return torch.isfinite(log_prob.float().clamp(min=_LOW).sum())


def _refuse_numbers(log_prob: Tensor, num_frames: Tensor) -> None:
    """Raises AsrError if what is not finite is in frames that are used."""
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
    """Keeps only the first frame of each run of frames whose blank (token 0) is more probable than `threshold`.

    Args:
        log_prob: (N, T, C).
        num_frames: (N,) int64.
        threshold: a probability.
        after_blank: (N,) bool, whether the frame before the first was such a frame; None for no.

    Returns:
        log_prob (N, T', C), num_frames (N,), frame (N, T') int64, the original frame of each kept one, and after_blank
        (N,) bool for the next chunk.
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
