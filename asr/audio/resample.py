"""Resampling and change of speed by windowed-sinc interpolation in plain torch.

Resampling of a stream keeps the samples that future outputs depend on, and runs the offline code on them, so that its
outputs equal those for the whole recording.

Shapes: L samples.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from asr import old_paths
from asr.errors import AsrError

_ZERO_CROSSINGS = 6
_ROLLOFF = 0.99

# A kernel covers the inputs of a whole block of outputs. For rates with a small common divisor (44099 Hz) that would be
# gigabytes, nearly all of them zeros.
LARGEST_KERNEL = 1 << 22

_LOWEST_RATE, _HIGHEST_RATE = 1000, 1_000_000
OUTPUTS_AT_ONCE = 1 << 16


def checked_rate(sampling_rate: float, what: str = "the sampling rate") -> int:
    """The sampling rate as an integer, in Hz.

    Args:
        sampling_rate: the rate.
        what: its name in the error message.

    Raises:
        AsrError: it is not a whole number, or not between 1 kHz and 1 MHz.
    """
    try:
        rate = int(sampling_rate)
    except (TypeError, ValueError, OverflowError):
        rate = 0
    if rate == sampling_rate and _LOWEST_RATE <= rate <= _HIGHEST_RATE:
        return rate
    raise AsrError(f"{what} is {sampling_rate!r}; give a whole number of Hz from {_LOWEST_RATE} to {_HIGHEST_RATE}.")


def resample(
    waveform: Tensor,
    old_rate: int,
    new_rate: int,
    largest_kernel: int = LARGEST_KERNEL,
    outputs_at_once: int = OUTPUTS_AT_ONCE,
) -> Tensor:
    """Resamples with a low-pass filter at the lower of the two Nyquist frequencies.

    Args:
        waveform: (..., L).
        old_rate: in Hz.
        new_rate: in Hz.
        largest_kernel: up to this number of weights, outputs are computed in blocks; otherwise each by itself.
        outputs_at_once: number of outputs that are computed together, each by itself.

    Returns:
        (..., ceil(L * new_rate / old_rate)).

    Raises:
        AsrError: a rate is not positive.
    """
    if old_rate <= 0 or new_rate <= 0:
        raise AsrError(f"resampling from {old_rate} Hz to {new_rate} Hz: both rates must be greater than 0.")
    old, new, margin = block_sizes(old_rate, new_rate)
    num_samples = waveform.shape[-1]
    if old == new or num_samples == 0:
        return waveform
    flat = waveform.reshape(-1, num_samples).float()
    target = -(-num_samples * new // old)
    by_block = new * (2 * margin + old) <= largest_kernel
    result = _by_block(flat, old, new)[:, :target] if by_block else _by_output(flat, old, new, target, outputs_at_once)
    return result.reshape(*waveform.shape[:-1], target)


def _by_block(flat: Tensor, old: int, new: int) -> Tensor:
    """(streams, L) -> at least as many outputs as needed: a convolution turns `old` inputs into `new` outputs."""
    kernel, margin = _kernel(old, new), _margin(old, new)
    padded = torch.nn.functional.pad(flat.unsqueeze(1), (margin, margin + old))
    phases = torch.nn.functional.conv1d(padded, kernel.to(flat.device), stride=old)  # (streams, new, blocks)
    return phases.transpose(1, 2).reshape(len(flat), -1)


def _by_output(flat: Tensor, old: int, new: int, target: int, outputs_at_once: int) -> Tensor:
    """(streams, L) -> (streams, target): each output from the inputs around it, weighted by its phase."""
    weights, margin = _taps(old, new).to(flat.device), _margin(old, new)
    padded = torch.nn.functional.pad(flat, (margin, margin))
    windows = padded.unfold(1, 2 * margin, 1)  # (streams, L + 1, 2 * margin), a view
    parts = []
    for begin in range(0, target, outputs_at_once):
        output = torch.arange(begin, min(target, begin + outputs_at_once), device=flat.device)
        # Window i + 1 has the inputs i - margin + 1 to i + margin.
        around = windows.index_select(1, output * old // new + 1)
        parts.append((around * weights.index_select(0, output % new)).sum(dim=2))
    return torch.cat(parts, dim=1)


def change_speed(waveform: Tensor, factor: float) -> Tensor:
    """Changes tempo and pitch together, like a tape played `factor` times as fast: (..., L) -> (..., L / factor).

    Raises:
        AsrError: the factor is not between 0.1 and 10.
    """
    if not 0.1 <= factor <= 10.0:
        raise AsrError(f"the speed factor {factor} is out of range; choose one between 0.1 and 10, such as 0.9.")
    ratio = Fraction(factor).limit_denominator(1000)
    return resample(waveform, ratio.numerator, ratio.denominator)


def block_sizes(old_rate: int, new_rate: int) -> tuple[int, int, int]:
    """(old, new, margin): `old` input samples become `new`, which depend on `margin` more inputs on each side."""
    common = math.gcd(old_rate, new_rate)
    old, new = old_rate // common, new_rate // common
    return old, new, 0 if old == new else _margin(old, new)


def _cutoff(old: int, new: int) -> float:
    """The cutoff frequency, where `old` input samples are one unit of time."""
    return min(old, new) * _ROLLOFF


def _margin(old: int, new: int) -> int:
    """The number of inputs on each side that contribute to an output."""
    return math.ceil(_ZERO_CROSSINGS * old / _cutoff(old, new))


def _sinc(distance: Tensor, old: int, new: int) -> Tensor:
    """Weights of inputs at distances from an output, where `old` input samples are one unit of time."""
    cutoff = _cutoff(old, new)
    distance = (distance * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = torch.cos(distance * math.pi / (2 * _ZERO_CROSSINGS)).square()
    return (torch.sinc(distance) * window * cutoff / old).float()


@lru_cache(maxsize=32)
def _kernel(old: int, new: int) -> Tensor:
    """Weights of the inputs for each of the `new` output phases, (new, 1, 2 * margin + old)."""
    margin = _margin(old, new)
    input_time = torch.arange(-margin, margin + old, dtype=torch.float64) / old
    output_time = torch.arange(new, dtype=torch.float64) / new
    return _sinc(input_time[None, :] - output_time[:, None], old, new)[:, None, :]


@lru_cache(maxsize=32)
def _taps(old: int, new: int) -> Tensor:
    """Weights of the nearest 2 * margin inputs for each of the `new` output phases, (new, 2 * margin)."""
    margin = _margin(old, new)
    fraction = (torch.arange(new) * old % new).double() / new  # of an input sample, after the nearest earlier one
    input_place = torch.arange(1 - margin, margin + 1, dtype=torch.float64)
    return _sinc((input_place[None, :] - fraction[:, None]) / old, old, new)


class ResampleStream:
    """`resample` for a stream.

    Args:
        old_rate, new_rate: in Hz.
    """

    def __init__(self, old_rate: int, new_rate: int) -> None:
        self._old_rate, self._new_rate = old_rate, new_rate
        self._old, self._new, margin = block_sizes(old_rate, new_rate)
        self._margin = -(-margin // self._old)
        self._held = torch.zeros(0, dtype=torch.float32)
        # The block at which the buffer begins, and the next block to be output.
        self._first_block = 0
        self._next_block = 0

    def push(self, samples: Tensor, is_last: bool = False) -> Tensor:
        """Takes samples (L,) and returns the outputs (L',) that are complete; after the last samples, all others."""
        if self._old == self._new:
            return samples
        self._held = torch.cat([self._held, samples])
        num_blocks = self._first_block + len(self._held) // self._old - self._margin
        if not is_last and num_blocks <= self._next_block:
            return samples[:0]
        out = resample(self._held, self._old_rate, self._new_rate)
        begin = (self._next_block - self._first_block) * self._new
        ready = out[begin:] if is_last else out[begin : (num_blocks - self._first_block) * self._new]
        self._next_block = max(self._next_block, num_blocks)
        first = max(self._first_block, self._next_block - self._margin)
        self._held = self._held[(first - self._first_block) * self._old :]
        self._first_block = first
        return ready


old_paths.offer(__name__)
