"""Impulse responses of box-shaped rooms by the image method (Allen and Berkley, 1979)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SOUND_METERS_PER_SECOND = 343.0


def room_response(
    size: Sequence[float], source: Sequence[float], microphone: Sequence[float], seconds: float, sampling_rate: int
) -> Tensor:
    """What a microphone hears of an impulse, from the direct sound on, whose amplitude is 1.

    All walls absorb alike, so much that sound falls by 60 dB in the given time by Sabine's formula. Delays are rounded
    to samples.

    Args:
        size: length, width and height of the room in meters.
        source: position of the source, from one corner.
        microphone: position of the microphone.
        seconds: reverberation time.
        sampling_rate: in Hz.

    Returns:
        (L,) float32, as long as the reverberation time.
    """
    length, width, height = size
    surface = 2 * (length * width + length * height + width * height)
    absorbed = min(1.0, 0.161 * length * width * height / (surface * seconds))
    reflected = (1.0 - absorbed) ** 0.5
    direct = sum((a - b) ** 2 for a, b in zip(source, microphone, strict=True)) ** 0.5
    reach = direct + seconds * SOUND_METERS_PER_SECOND
    distance, bounces = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for wall, a, b in zip(size, source, microphone, strict=True):
        rooms = torch.arange(-int(reach / (2 * wall)) - 1, int(reach / (2 * wall)) + 2)
        # The images of the source in every second room are mirrored.
        offset = torch.cat([2 * rooms * wall + a, 2 * rooms * wall - a]).double() - b
        walls = torch.cat([(2 * rooms).abs(), (2 * rooms - 1).abs()])
        distance, bounces = distance.unsqueeze(-1) + offset**2, bounces.unsqueeze(-1) + walls
    distance = distance.sqrt()
    delay = ((distance - direct) / SOUND_METERS_PER_SECOND * sampling_rate).round().long()
    amplitude = direct / distance * reflected**bounces
    response = torch.zeros(round(seconds * sampling_rate), dtype=torch.float64)
    heard = delay < len(response)
    return response.index_add_(0, delay[heard], amplitude[heard]).float()
