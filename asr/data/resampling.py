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
    kernel, reach = _kernel(old, new)
    flat = waveform.reshape(-1, 1, num_samples).float()
    padded = torch.nn.functional.pad(flat, (reach, reach + old))
    phases = torch.nn.functional.conv1d(padded, kernel.to(waveform.device), stride=old)  # (streams, new, blocks)
    target = -(-num_samples * new // old)
    return phases.transpose(1, 2).reshape(len(flat), -1)[:, :target].reshape(*waveform.shape[:-1], target)


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
    return old, new, 0 if old == new else _kernel(old, new)[1]


@lru_cache(maxsize=32)
def _kernel(old: int, new: int) -> tuple[Tensor, int]:
    """For each of `new` output phases the weights on the inputs around it, (new, 1, 2 * reach + old), and `reach`."""
    cutoff = min(old, new) * _ROLLOFF  # in units where the input has `old` samples a unit of time
    reach = math.ceil(_ZERO_CROSSINGS * old / cutoff)
    input_time = torch.arange(-reach, reach + old, dtype=torch.float64) / old
    output_time = torch.arange(new, dtype=torch.float64) / new
    distance = ((input_time[None, :] - output_time[:, None]) * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = torch.cos(distance * math.pi / (2 * _ZERO_CROSSINGS)).square()
    return (torch.sinc(distance) * window * cutoff / old).float()[:, None, :], reach
