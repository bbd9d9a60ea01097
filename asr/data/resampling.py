"""Change of sampling rate, and of speed, by windowed-sinc interpolation in plain torch."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from asr.errors import AsrError

_ZERO_CROSSINGS = 6
_ROLLOFF = 0.99
# A kernel holds the inputs of a whole block of outputs. Of rates with hardly a common divisor (44099 Hz) that would be
# gigabytes, nearly all of them zeros.
_LARGEST_KERNEL = 1 << 22
_LOWEST_RATE, _HIGHEST_RATE = 1000, 1_000_000
_OUTPUTS_AT_ONCE = 1 << 16


def checked_rate(sampling_rate: float) -> int:
    """The sampling rate of speech, in Hz.

    Raises:
        AsrError: it is no whole number, or so low or high that no recording has it.
    """
    try:
        rate = int(sampling_rate)
    except (TypeError, ValueError, OverflowError):
        rate = 0
    if rate == sampling_rate and _LOWEST_RATE <= rate <= _HIGHEST_RATE:
        return rate
    raise AsrError(
        f"the sampling rate is {sampling_rate!r}; give a whole number of Hz from {_LOWEST_RATE} to {_HIGHEST_RATE}."
    )


def resample(waveform: Tensor, old_rate: int, new_rate: int) -> Tensor:
    """(..., L) at `old_rate` to (..., ceil(L * new_rate / old_rate)) at `new_rate`, band-limited to the lower one.

    Raises:
        AsrError: a rate is not positive.
    """
    if old_rate <= 0 or new_rate <= 0:
        raise AsrError(f"Resampling from {old_rate} Hz to {new_rate} Hz: both rates must be greater than 0.")
    common = math.gcd(old_rate, new_rate)
    old, new = old_rate // common, new_rate // common
    num_samples = waveform.shape[-1]
    if old == new or num_samples == 0:
        return waveform
    flat = waveform.reshape(-1, num_samples).float()
    target = -(-num_samples * new // old)
    by_block = new * (2 * _reach(old, new) + old) <= _LARGEST_KERNEL
    result = _by_block(flat, old, new)[:, :target] if by_block else _by_output(flat, old, new, target)
    return result.reshape(*waveform.shape[:-1], target)


def _by_block(flat: Tensor, old: int, new: int) -> Tensor:
    """(streams, L) to at least as many outputs as wanted: every `old` inputs give `new` outputs by one convolution."""
    kernel, reach = _kernel(old, new), _reach(old, new)
    padded = torch.nn.functional.pad(flat.unsqueeze(1), (reach, reach + old))
    phases = torch.nn.functional.conv1d(padded, kernel.to(flat.device), stride=old)  # (streams, new, blocks)
    return phases.transpose(1, 2).reshape(len(flat), -1)


def _by_output(flat: Tensor, old: int, new: int, target: int) -> Tensor:
    """(streams, L) to (streams, target): each output from the few inputs around it, whose weights are its phase's."""
    weights, reach = _taps(old, new).to(flat.device), _reach(old, new)
    padded = torch.nn.functional.pad(flat, (reach, reach))
    windows = padded.unfold(1, 2 * reach, 1)  # (streams, L + 1, 2 * reach), a view
    parts = []
    for begin in range(0, target, _OUTPUTS_AT_ONCE):
        output = torch.arange(begin, min(target, begin + _OUTPUTS_AT_ONCE), device=flat.device)
        # Window i + 1 holds the inputs i - reach + 1 to i + reach.
        around = windows.index_select(1, output * old // new + 1)
        parts.append((around * weights.index_select(0, output % new)).sum(dim=2))
    return torch.cat(parts, dim=1)


def change_speed(waveform: Tensor, factor: float) -> Tensor:
    """(..., L) to (..., about L / factor): tempo and pitch change together, as when a tape runs `factor` times as fast.

    Raises:
        AsrError: the factor is not between 0.1 and 10.
    """
    if not 0.1 <= factor <= 10.0:
        raise AsrError(f"The speed factor {factor} is out of range; take one between 0.1 and 10, such as 0.9.")
    ratio = Fraction(factor).limit_denominator(1000)
    return resample(waveform, ratio.numerator, ratio.denominator)


def block_sizes(old_rate: int, new_rate: int) -> tuple[int, int, int]:
    """(old, new, reach): every `old` input samples become `new`, which depend on `reach` more of them on each side."""
    common = math.gcd(old_rate, new_rate)
    old, new = old_rate // common, new_rate // common
    return old, new, 0 if old == new else _reach(old, new)


def _cutoff(old: int, new: int) -> float:
    """In units where the input has `old` samples a unit of time."""
    return min(old, new) * _ROLLOFF


def _reach(old: int, new: int) -> int:
    """So many inputs on each side have a part in an output."""
    return math.ceil(_ZERO_CROSSINGS * old / _cutoff(old, new))


def _sinc(distance: Tensor, old: int, new: int) -> Tensor:
    """Weights of inputs so far from an output, in float64, in units where the input has `old` samples."""
    cutoff = _cutoff(old, new)
    distance = (distance * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = torch.cos(distance * math.pi / (2 * _ZERO_CROSSINGS)).square()
    return (torch.sinc(distance) * window * cutoff / old).float()


@lru_cache(maxsize=32)
def _kernel(old: int, new: int) -> Tensor:
    """For each of `new` output phases the weights on the inputs around it, (new, 1, 2 * reach + old)."""
    reach = _reach(old, new)
    input_time = torch.arange(-reach, reach + old, dtype=torch.float64) / old
    output_time = torch.arange(new, dtype=torch.float64) / new
    return _sinc(input_time[None, :] - output_time[:, None], old, new)[:, None, :]


@lru_cache(maxsize=32)
def _taps(old: int, new: int) -> Tensor:
    """For each of `new` output phases the weights on the 2 * reach inputs around it, (new, 2 * reach)."""
    reach = _reach(old, new)
    fraction = (torch.arange(new) * old % new).double() / new  # of an input sample, behind the nearest one before
    input_place = torch.arange(1 - reach, reach + 1, dtype=torch.float64)
    return _sinc((input_place[None, :] - fraction[:, None]) / old, old, new)
