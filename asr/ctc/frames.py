"""Converts and checks users' log-probabilities: arrays or tensors, one utterance or a batch.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from asr.decoding.interface import TOLERANCE, check_numbers
from asr.errors import AsrError
from asr.kernels.memory import on_cpu_by_default
from asr.options import require_dense
from asr.text.ctc_tokens import CTCTokens

FrameInput = Literal["log_probs", "logits", "probabilities", "scores"]
FRAME_INPUTS = get_args(FrameInput)
_FRAMES_LOOKED_AT = 64  # at least, if there are as many
_SHARE_OF_A_BLANK = 0.5
# Many utterances of few frames are probably few utterances of many frames.
_FRAMES_OF_SHORT = 64
_UTTERANCES_OF_SHORT = 4  # for each frame


class Frames(NamedTuple):
    """A batch in the form that the searches read.

    Attributes:
        log_prob: (N, T, C) float32 natural logs, the blank in column 0.
        num_frames: (N,) int64, on the host.
        is_single: whether the user gave one utterance without a batch dimension.
    """

    log_prob: Tensor
    num_frames: Tensor
    is_single: bool


@on_cpu_by_default()
def as_frames(
    log_probs: Any, lengths: Any, tokens: CTCTokens, kind: FrameInput, device: torch.device, checks_blank: bool = True
) -> Frames:
    """Converts log-probabilities to the form that the searches read.

    Args:
        log_probs: (N, T, C) or (T, C), a tensor on any device, with or without gradients, or an array; or a list with
            one (T, C) per utterance.
        lengths: (N,) number of frames of each utterance; None for all T.
        tokens: the tokens of the columns.
        kind: the values: `log_probs`; `logits`, which are normalized here; `probabilities`; or `scores`, used as they
            are, without a check of their sums.
        device: where the search runs.
        checks_blank: whether to warn if another column looks like the blank.

    Raises:
        AsrError: the shape or width is wrong, values are NaN, not numbers, or not of the given kind, or a frame rules
            out every token.
    """
    if isinstance(log_probs, (list, tuple)) and log_probs and not _is_nested_numbers(log_probs):
        log_probs, lengths = _padded([as_tensor(each) for each in log_probs], lengths)
    log_prob = as_tensor(log_probs).detach()
    shape = tuple(log_prob.shape)
    is_single = log_prob.dim() == 2
    if is_single:
        log_prob = log_prob.unsqueeze(0)
    if log_prob.dim() != 3:
        raise AsrError(
            f"the log-probabilities have the shape {shape}; give (utterances, frames, tokens) or (frames, tokens)."
        )
    num_frames = as_lengths(lengths, *log_prob.shape[:2])
    if log_prob.shape[2] != len(tokens):
        raise AsrError(
            f"the log-probabilities have {log_prob.shape[2]} columns but there are {len(tokens)} tokens; "
            f"{_width_advice(shape, len(tokens))}"
        )
    if lengths is None and checks_blank:
        _warn_of_frames_first(*log_prob.shape[:2])
    log_prob = log_prob.to(torch.float32)
    sample = _sampled(log_prob, num_frames)
    if kind == "probabilities":
        check_numbers(log_prob, num_frames)
        _require_probabilities(sample)
        log_prob = log_prob.log()
    else:
        _check_every_frame(log_prob, num_frames)
        if kind == "logits":
            log_prob = torch.log_softmax(log_prob, dim=2)
        elif kind == "log_probs":
            _require_log_probs(sample)
    if checks_blank:
        _warn_of_other_blank(sample, tokens)
    return Frames(tokens.in_order_of_table(log_prob).to(device), num_frames, is_single)


def _is_nested_numbers(value: Any) -> bool:
    """Whether a list is nested down to numbers, so that it is an array rather than a list of arrays."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (int, float))


def as_tensor(value: Any, what: str = "log-probabilities") -> Tensor:
    """A tensor of a tensor or an array, which is called `what` in messages.

    Raises:
        AsrError: the value is neither, or its numbers are not real or not all in memory.
    """
    if isinstance(value, Tensor):
        require_dense(value, what)
        return value
    try:
        # Arrays of NumPy, and of libraries such as JAX, which torch would read number by number if at all.
        if hasattr(value, "__array__"):
            value = np.asarray(value)
            if value.dtype.kind == "V":  # bfloat16, which is not a type of NumPy's own
                value = value.astype(np.float32)
            # torch supports neither the other byte order nor negative strides, and warns of arrays that are read-only.
            value = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise AsrError(
            f"{what} of type {type(value).__name__} cannot be read; give a tensor or an array of numbers."
        ) from error
    require_dense(tensor, what)
    return tensor


def _padded(utterances: list[Tensor], lengths: Any) -> tuple[Tensor, Tensor]:
    """Utterances of different lengths as one batch."""
    shapes = {tuple(each.shape[1:]) for each in utterances}
    if lengths is not None or len(shapes) > 1 or any(each.dim() != 2 for each in utterances):
        raise AsrError(
            "a list of utterances must hold arrays of (frames, tokens) of equal width; leave out the lengths."
        )
    num_frames = torch.tensor([len(each) for each in utterances])
    padded = torch.nn.utils.rnn.pad_sequence([each.detach().float() for each in utterances], batch_first=True)
    return padded, num_frames


def as_lengths(lengths: Any, num_utts: int, max_frames: int) -> Tensor:
    """The numbers of frames (N,) int64 on the host; all T if None.

    Raises:
        AsrError: they are not whole numbers, or fractions or a mask, not one for each utterance, or out of range.
    """
    if lengths is None:
        return torch.full((num_utts,), max_frames, dtype=torch.int64)
    num_frames = as_tensor(lengths, "lengths").detach().reshape(-1).cpu()
    if num_frames.dtype == torch.bool:
        raise AsrError("the lengths are true or false; give the number of frames of each utterance, not a mask.")
    if num_frames.is_floating_point():
        # Ones are fractions, too, if all utterances are as long as the longest one.
        are_ones = max_frames > 1 and num_utts > 0 and bool((num_frames == 1).all())
        if are_ones or not bool((num_frames == num_frames.round()).all()):
            raise AsrError("the lengths are not whole numbers; give frames, not fractions of the longest utterance.")
    num_frames = num_frames.to(torch.int64)
    if len(num_frames) != num_utts:
        is_swapped = len(num_frames) == max_frames
        cure = "transpose (frames, utterances, tokens)" if is_swapped else "give one per utterance"
        raise AsrError(f"there are {len(num_frames)} lengths for {num_utts} utterances; {cure}.")
    if num_utts and (int(num_frames.min()) < 0 or int(num_frames.max()) > max_frames):
        raise AsrError(
            f"the lengths range from {int(num_frames.min())} to {int(num_frames.max())}, but there are "
            f"{max_frames} frames; count lengths in frames of the network's output."
        )
    return num_frames


def _width_advice(shape: tuple[int, ...], num_tokens: int) -> str:
    if shape[-2] == num_tokens:
        return f"the last dimension of the shape {shape} must be that of the tokens, so transpose it."
    if shape[-1] == num_tokens + 1:
        return f"if the list lacks a blank at the end, give blank={num_tokens}."
    return "give the token list of this network."


def _sampled(log_prob: Tensor, num_frames: Tensor) -> Tensor:
    """A sample of frames of all utterances, without padding, (S, C)."""
    lengths = num_frames.tolist()
    step = max(1, sum(lengths) // _FRAMES_LOOKED_AT)
    parts = [utterance[:length:step] for utterance, length in zip(log_prob, lengths, strict=True)]
    return torch.cat(parts) if parts else log_prob.flatten(0, 1)


def _check_every_frame(log_prob: Tensor, num_frames: Tensor) -> None:
    """Refuses NaN, +inf and frames that allow no token: one of these takes all words from its utterance."""
    highest = log_prob.amax(dim=2)  # NaN if one value is
    if bool(torch.isfinite(highest).all()):
        return
    check_numbers(log_prob, num_frames)
    is_used = torch.arange(log_prob.shape[1]) < num_frames.unsqueeze(1)
    where = ((highest == -torch.inf).cpu() & is_used).nonzero()
    if len(where):
        utt_idx, frame = where[0].tolist()
        raise AsrError(
            f"utterance {utt_idx}, frame {frame}: all values are -inf, so no token is possible; give the lengths "
            "if it is padding, or check the network's output."
        )


def _require_log_probs(row: Tensor) -> None:
    if not len(row):
        return
    excess = float(row.exp().sum(1).log().abs().max())
    if excess <= TOLERANCE:
        return
    if float(row.min()) >= 0.0 and float((row.sum(1) - 1.0).abs().max()) <= TOLERANCE:
        raise AsrError(
            'the values are probabilities, not log-probabilities; give their logarithms, or inputs="probabilities".'
        )
    raise AsrError(
        f"the values are not log-probabilities (the probabilities of a frame sum to {_shown_sum(row)}, not to 1); for "
        'logits, apply log_softmax or give inputs="logits"; inputs="scores" uses the values as they are.'
    )


def _shown_sum(row: Tensor) -> str:
    total = torch.logsumexp(row.double(), dim=1)
    return f"{float(total[total.abs().argmax()].exp()):.3g}"


def _require_probabilities(row: Tensor) -> None:
    if len(row) and (float(row.min()) < 0.0 or float((row.sum(1) - 1.0).abs().max()) > TOLERANCE):
        raise AsrError('inputs is "probabilities", but values of a frame are negative or do not sum to 1.')


def _warn_of_frames_first(num_utts: int, num_frames: int) -> None:
    """Warns if there are far more utterances than frames, which are hardly enough for a word."""
    if 0 < num_frames < _FRAMES_OF_SHORT and num_utts >= _UTTERANCES_OF_SHORT * num_frames:
        warnings.warn(
            f"there are {num_utts} utterances of {num_frames} frames; if the log-probabilities are (frames, "
            "utterances, tokens), transpose them: log_probs.transpose(0, 1).",
            stacklevel=4,
        )


def _warn_of_other_blank(row: Tensor, tokens: CTCTokens) -> None:
    """Warns if the blank is never the best token but another column often is, as only a blank should be."""
    if len(row) < _FRAMES_LOOKED_AT:
        return
    best = row.argmax(1)
    if bool((best == tokens.blank_id).any()):
        return
    share = torch.bincount(best, minlength=len(tokens)).double() / len(row)
    column = int(share.argmax())
    if float(share[column]) > _SHARE_OF_A_BLANK:
        symbol = tokens.symbols[column]
        if symbol in (tokens.word_boundary, " "):
            return
        warnings.warn(
            f"column {column} ({symbol!r}) is the best in {share[column]:.0%} of the frames, but the blank, column "
            f"{tokens.blank_id}, in none; check the blank's column.",
            stacklevel=4,
        )
