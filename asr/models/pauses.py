"""Long pauses, found by their loudness. There the outputs are silence, whatever the network has found.

A network that has heard only short pauses in training takes the noise of long ones for short words.

Shapes: N utterances, T frames of features, F features, T' frames of output, C tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.audio.fbank import LOG_FLOOR
from asr.models.interface import LOG_PROB_IN_NOISE, RANK, are_near, valid_frames

# A frame is quiet if its mean log energy is above the softest twentieth by less than this, and by less than a share of
# the range up to the loudest frames, which is small in noise.
_QUIET, _QUIET_SHARE = 2.0, 0.4
_SOFTEST = 0.05
# Frames with a mean log energy below this are digital silence, which says nothing about the noise of a pause.
DIGITAL_SILENCE = LOG_FLOOR + 1.0


def in_pauses(energy: Tensor, is_inside: Tensor, heard: Tensor, margin: int) -> Tensor:
    """Which frames lie in long pauses, (N, T) bool.

    Args:
        energy: (N, T) mean log energy of each frame.
        is_inside: (N, T) bool, false for padding.
        heard: (N, T'') mean log energies from which the levels of noise and speech are taken, NaN for padding.
        margin: a pause begins and ends at this distance from frames that are not quiet.
    """
    if not heard.shape[1] or 2 * margin > energy.shape[1]:
        return torch.zeros_like(is_inside)
    noise = heard.masked_fill(heard <= DIGITAL_SILENCE, torch.nan)
    softest = noise.nanquantile(_SOFTEST, dim=1, keepdim=True)
    padded = F.pad(heard.nan_to_num(nan=LOG_FLOOR), (0, RANK), value=LOG_FLOOR)  # as in a batch with longer ones
    loudest = padded.topk(RANK, dim=1).values[:, -1:]
    is_loud = is_inside & (energy > softest + ((loudest - softest) * _QUIET_SHARE).clamp(max=_QUIET))
    is_long = is_inside.sum(dim=1, keepdim=True) >= 2 * margin
    return ~are_near(is_loud, margin) & is_long


def audible(features: Tensor) -> Tensor:
    """The frames of features (T, F) that are not digital silence."""
    return features[features.mean(dim=1) > DIGITAL_SILENCE]


def with_silence_in_pauses(log_prob: Tensor, features: Tensor, num_frames: Tensor, factor: int, margin: int) -> Tensor:
    """Log-probabilities (N, T', C) of utterances with silence, token 0, in their long pauses.

    Args:
        log_prob: the network's outputs.
        features: (N, T, F) log energies.
        num_frames: (N,) frames of features.
        factor: frames of features for each frame of output.
        margin: see `in_pauses`.
    """
    if not features.shape[1]:
        return log_prob
    inside = valid_frames(num_frames.to(features.device), features.shape[1])
    energy = features.mean(dim=2)
    pauses = in_pauses(energy, inside, energy.masked_fill(~inside, torch.nan), margin)
    return silenced(log_prob, outputs_of(pauses, log_prob.shape[1], factor))


def outputs_of(frames: Tensor, num_outputs: int, factor: int) -> Tensor:
    """What is true of the middle frame of each output, (..., T') bool, from what is true of frames (..., T)."""
    middle = torch.arange(num_outputs, device=frames.device) * factor + factor // 2
    return frames[..., middle.clamp(max=frames.shape[-1] - 1)]


def silenced(log_prob: Tensor, where: Tensor) -> Tensor:
    """Log-probabilities (..., T', C) with silence where (..., T') is true."""
    silence = log_prob.new_full(log_prob.shape[-1:], LOG_PROB_IN_NOISE)
    silence[:1] = 0.0
    return torch.where(where.unsqueeze(-1), silence, log_prob)
