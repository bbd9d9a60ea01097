"""Change of sampling rate, and of speed, by windowed-sinc interpolation in plain torch.

Change of sampling rate and filterbanks while the samples still come: what comes out is that of the whole recording.

Both keep the samples that outputs to come depend on, and run the whole-recording code over them. Shapes: L samples, T
frames, F features.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from asr.audio.fbank import Fbank
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


class ResampleStream:
    """`resample` in pieces.

    Args:
        old_rate, new_rate: in Hz.
    """

    def __init__(self, old_rate: int, new_rate: int) -> None:
        self._old_rate, self._new_rate = old_rate, new_rate
        self._old, self._new, reach = block_sizes(old_rate, new_rate)
        self._margin = -(-reach // self._old)
        self._held = torch.zeros(0)
        # Blocks before what is held, and blocks that have been given out.
        self._first_block = 0
        self._next_block = 0

    def push(self, samples: Tensor, is_last: bool = False) -> Tensor:
        """(L,) more samples -> (L',) all that can be said by now; after the last ones, all the rest."""
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


class FeatureStream:
    """Filterbanks in pieces.

    Args:
        fbank: what makes them; without dither, or the pieces are not those of the whole.
    """

    def __init__(self, fbank: Fbank) -> None:
        self._fbank = fbank
        # Frames recomputed before the first new one, whose window must lie in what is held.
        self._margin = -(-fbank.frame_length // fbank.frame_shift)
        self._held = torch.zeros(0)
        self._first_frame = 0
        self._next_frame = 0

    def push(self, samples: Tensor, is_last: bool = False) -> Tensor:
        """(L,) more samples -> (T, F) the frames that can be told by now; after the last ones, all the rest."""
        fbank = self._fbank
        self._held = torch.cat([self._held, samples])
        if is_last:
            num_frames = self._first_frame + int(fbank.num_frames(torch.tensor(len(self._held))))
        else:
            whole = (len(self._held) - fbank.frame_length) // fbank.frame_shift + 1
            num_frames = self._first_frame + max(0, whole)
        if num_frames <= self._next_frame:
            return torch.zeros(0, fbank.feature_dim)
        held = self._held.to(fbank.window.device)
        features = fbank(held.unsqueeze(0), torch.tensor([len(held)]))[0][0]
        new = features[self._next_frame - self._first_frame : num_frames - self._first_frame]
        self._next_frame = num_frames
        first = max(self._first_frame, num_frames - self._margin)
        self._held = self._held[(first - self._first_frame) * fbank.frame_shift :]
        self._first_frame = first
        return new
