"""Lasting changes of level within a recording, which are undone before its features are normalized.

With one mean and variance for both, the speech of somebody who has turned away lies far below all that the network has
been trained on.

Shapes: N utterances, T frames of features, F features, B blocks of frames, W blocks of a window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.models.interface import valid_frames
from asr.models.pauses import DIGITAL_SILENCE

_BLOCK = 10  # frames
# A level is the mean of these blocks, so that no click counts; in a window of 3 s, speech has a loud syllable.
_MEAN, _WINDOW = 5, 30
# Natural log of the smallest change that counts: 15 dB. Levels of a sentence differ by up to 13 dB.
_LEAST = 3.5
# In a window with speech, levels differ by this share of the range of all levels.
_SPEECH_SHARE = 0.3
# And so many of them are in the upper half of the window's range: the end of a word before a pause does not count.
_LOUD_SHARE = 0.5


def with_equal_levels(features: Tensor, num_frames: Tensor) -> Tensor:
    """Log energies of utterances, raised so that speech is everywhere as loud as where it is loudest.

    A window of 3 s is as loud as its loudest half second. At each time, the softest window of speech around it counts,
    so that the level falls right after the last loud syllable, but not in a pause. Utterances whose level changes by
    less than 15 dB, and those shorter than a window, stay as they are.

    Args:
        features: (N, T, F).
        num_frames: (N,) frames of features.
    """
    num_blocks = -(-features.shape[1] // _BLOCK)
    if num_blocks < _WINDOW:
        return features
    num_frames = num_frames.to(features.device)
    inside = valid_frames(num_frames, features.shape[1])
    energy = features.mean(dim=2)
    level, is_heard = _levels(energy, inside & (energy > DIGITAL_SILENCE), num_blocks)
    loudest = _largest(level.masked_fill(~is_heard, -torch.inf))
    softest = -_largest((-level).masked_fill(~is_heard, -torch.inf))
    last = torch.div(num_frames + _BLOCK - 1, _BLOCK, rounding_mode="floor") - _WINDOW
    is_whole = valid_frames(last + 1, loudest.shape[1]) & loudest.isfinite()
    highest = loudest.masked_fill(~is_whole, -torch.inf).amax(dim=1, keepdim=True)
    lowest = softest.masked_fill(~is_whole, torch.inf).amin(dim=1, keepdim=True)
    is_loud = level.unfold(1, _WINDOW, 1) > ((loudest + softest) / 2).unsqueeze(2)
    has_speech = is_whole & (loudest - softest >= _SPEECH_SHARE * (highest - lowest))
    has_speech &= is_loud.float().mean(dim=2) >= _LOUD_SHARE
    target = loudest.masked_fill(~has_speech, -torch.inf).amax(dim=1, keepdim=True)
    lowered = F.pad((-loudest).masked_fill(~has_speech, -torch.inf), (_WINDOW - 1, _WINDOW - 1), value=-torch.inf)
    gain = (target + _largest(lowered)).clamp(min=0.0)
    gain = gain.masked_fill(gain.amax(dim=1, keepdim=True) <= _LEAST, 0.0)
    of_frames = gain.repeat_interleave(_BLOCK, dim=1)[:, : features.shape[1]].masked_fill(~inside, 0.0)
    return features + of_frames.unsqueeze(2)


def _levels(energy: Tensor, is_heard: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """The level around each block (N, B) of frames (N, T), and whether there is anything to hear."""
    behind = (0, num_blocks * _BLOCK - energy.shape[1])
    sums, counts = (
        F.avg_pool1d(F.pad(part, behind).unsqueeze(1), _MEAN * _BLOCK, _BLOCK, _MEAN // 2 * _BLOCK).squeeze(1)
        for part in (energy.masked_fill(~is_heard, 0.0), is_heard.to(energy))
    )
    return sums / counts, counts > 0.0


def _largest(values: Tensor) -> Tensor:
    """The largest value of each window, (N, B) -> (N, B - W + 1)."""
    return F.max_pool1d(values.unsqueeze(1), _WINDOW, 1).squeeze(1)
