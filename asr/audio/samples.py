"""Arrays of samples, of any type, number of channels and recordings, as float samples of one channel.

Shapes: N recordings, C channels, L samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.audio.resample import checked_rate
from asr.errors import AsrError
from asr.options import require_dense

LOUDEST = 1e9
"""Larger samples are refused as infinite ones are: their power would be infinite in float32."""

# Full scale of each integer type of samples.
_FULL_SCALE = {torch.int16: 2.0**15, torch.int32: 2.0**31}

# Channels cancel each other if their mean has less than this fraction of the power of a mean of independent channels,
# for this many seconds. The mean of opposite channels still has the noise of both.
_CANCELLED = 0.2
_JUDGED_SECONDS = 10.0


def as_piece(samples: Any, where: str) -> Tensor:
    """The samples of a piece of a stream, (L,) float32; `where` in the stream is for messages.

    Raises:
        AsrError: another type or shape, or samples that are NaN or beyond `LOUDEST`.
    """
    piece = as_samples(samples, f"{where}: the piece").float()
    if piece.dim() != 1:
        raise AsrError(f"{where}: the piece has the shape {tuple(piece.shape)}; give (samples,).")
    if not bool((piece.abs() <= LOUDEST).all()):
        raise AsrError(f"{where}: the piece has samples that are NaN, infinite or beyond 10^9; it is ignored.")
    return piece


def to_mono(block: npt.NDArray[np.float32], rate: int) -> npt.NDArray[np.float32]:
    """(L, channels) -> (L,), the mean of the channels; the first channel in those seconds in which they cancel."""
    if block.shape[1] == 1:
        return block[:, 0]
    with np.errstate(all="ignore"):  # samples that are not numbers are reported later
        mean: npt.NDArray[np.float32] = block.mean(axis=1)
        size = int(_JUDGED_SECONDS * rate)
        for begin in range(0, len(block), size):
            channels, mixed = block[begin : begin + size], mean[begin : begin + size]
            power, power_of_channels = (np.square(each, dtype=np.float64).mean() for each in (mixed, channels))
            if power < _CANCELLED * power_of_channels / block.shape[1]:
                mixed[:] = channels[:, 0]
    return mean


def as_samples(array: Any, name: str) -> Tensor:
    """A tensor or NumPy array as floating-point samples in [-1, 1], of the same shape.

    Args:
        array: floating-point samples in [-1, 1], or 16-bit or 32-bit integer PCM.
        name: what error messages call the array.

    Raises:
        AsrError: the array is of another type.
    """
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "fi" or array.dtype.itemsize > 8:
            raise _wrong_type(array.dtype, name)
        # torch supports neither the other byte order nor negative strides, and warns of arrays that are read-only.
        array = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    if not isinstance(array, Tensor):
        # Many functions return samples and their rate as a pair, which looks like two recordings.
        cure = ", and their sampling rate as an argument of its own" if isinstance(array, Real) else ""
        raise AsrError(f"{name} is of type {type(array).__name__}; give a tensor or a NumPy array of samples{cure}.")
    require_dense(array, name)
    if array.dtype in _FULL_SCALE:
        return array.float() / _FULL_SCALE[array.dtype]
    if not array.is_floating_point():
        raise _wrong_type(array.dtype, name)
    return array


def _wrong_type(dtype: object, name: str) -> AsrError:
    return AsrError(f"{name} holds {dtype}; give floating-point samples in [-1, 1], int16 or int32.")


def as_recording(waveform: Any, name: str, sampling_rate: int = 16000) -> Tensor:
    """An array (L,) or (C, L) as a float tensor (L,); the rules and errors of `as_recordings`."""
    return _mono(_row(waveform, name), name, sampling_rate)


def as_recordings(
    waveform: Any, num_samples: Tensor | Sequence[int] | None = None, sampling_rate: int = 16000
) -> list[Tensor]:
    """One float tensor (L,) for each recording.

    One rule holds for all arrays: the last dimension is time, the one before it (in a batch, the middle one) is
    channels, which are averaged; where they cancel each other, the first one is taken. More channels than samples are
    refused: they are the samples, which come first in the arrays of soundfile and SciPy.

    Args:
        waveform: a tensor or NumPy array with one recording (L,), a batch of one channel (N, L), or a batch (N, C, L);
            or a list of recordings of any length, each (L,) or (C, L). Types of samples as in `as_samples`.
        num_samples: (N,) length of each recording of a padded batch. Without them, zeros at the end of a recording of a
            batch are taken for padding, which would otherwise count as speech where features are normalized.
        sampling_rate: in Hz; whether channels cancel each other is judged every 10 s.

    Raises:
        AsrError: another type or shape, no samples, samples that are NaN or beyond `LOUDEST`, or lengths that do not
            fit. The message numbers the recording.
    """
    if isinstance(waveform, (list, tuple)):
        rows = [_row(row, f"recording {index}") for index, row in enumerate(waveform)]
    else:
        rows = _rows(waveform, num_samples)
    if num_samples is not None:
        rows = _cut_to(rows, num_samples)
    elif not isinstance(waveform, (list, tuple)) and len(rows) > 1:
        rows = [_without_padding(row) for row in rows]
    return [_mono(row, f"recording {index}", sampling_rate) for index, row in enumerate(rows)]


def _rows(waveform: Any, num_samples: Tensor | Sequence[int] | None) -> list[Tensor]:
    if not isinstance(waveform, (Tensor, np.ndarray)):
        wanted = "the path of a file, a tensor, a NumPy array, or a list of these"
        if isinstance(waveform, (bytes, bytearray, memoryview)) or hasattr(waveform, "read"):
            wanted = "the path of a file; or what soundfile.read makes of an open one, samples and their sampling rate"
        raise AsrError(f"the recording is of type {type(waveform).__name__}; give {wanted}.")
    if waveform.ndim not in (1, 2, 3):
        raise AsrError(
            f"the waveform has the shape {tuple(waveform.shape)}; give (samples,), (recordings, samples) or "
            "(recordings, channels, samples)."
        )
    if waveform.ndim == 1:
        return [_row(waveform, "recording 0")]
    if waveform.ndim == 2 and num_samples is None and waveform.shape[0] > waveform.shape[1] > 0:
        raise AsrError(
            f"the waveform has {waveform.shape[0]} recordings of {waveform.shape[1]} samples; give (recordings, "
            "samples), or [waveform.T] for one recording of (samples, channels)."
        )
    return [_row(row, f"recording {index}") for index, row in enumerate(waveform)]


def _row(array: Any, name: str) -> Tensor:
    """`as_samples` of a recording (L,) or (C, L)."""
    row = as_samples(array, name)
    if row.dim() not in (1, 2):
        raise AsrError(f"{name} has the shape {tuple(row.shape)}; give (samples,) or (channels, samples).")
    if row.dim() == 2 and row.shape[0] > row.shape[1] > 0:
        raise AsrError(
            f"{name} has {row.shape[0]} channels of {row.shape[1]} samples; give (channels, samples), such as the "
            "transpose of (samples, channels)."
        )
    return row


def _without_padding(row: Tensor) -> Tensor:
    """A recording (L,) or (C, L) without the zeros at its end; all of it if there is nothing else."""
    sounding = row.ne(0).any(0) if row.ndim == 2 else row.ne(0)
    last = sounding.nonzero()
    return row[..., : int(last[-1]) + 1] if len(last) else row


def _cut_to(rows: list[Tensor], num_samples: Tensor | Sequence[int]) -> list[Tensor]:
    try:
        lengths = [float(num) for num in num_samples]
    except (TypeError, ValueError) as error:
        raise AsrError(
            f"num_samples is {num_samples!r}; give one length for each recording, such as [16000, 12000]."
        ) from error
    if len(lengths) != len(rows):
        raise AsrError(f"there are {len(lengths)} lengths (num_samples) for {len(rows)} recordings.")
    for index, (row, num) in enumerate(zip(rows, lengths, strict=True)):
        if not 0 <= num <= row.shape[-1] or num != int(num):
            raise AsrError(f"recording {index} has {row.shape[-1]} samples, but num_samples says {num:.15g}.")
    return [row[..., : int(num)] for row, num in zip(rows, lengths, strict=True)]


def _mono(row: Tensor, name: str, sampling_rate: int) -> Tensor:
    if row.numel() == 0:
        raise AsrError(f"{name} has no samples.")
    row = row.float()
    # Padding that `num_samples` cuts off may hold anything. Extremes need no memory; what torch.isfinite needs would,
    # with hours of audio, be more than the audio itself.
    if not all(abs(float(extreme)) <= LOUDEST for extreme in torch.aminmax(row)):
        raise AsrError(f"{name} has samples that are NaN, infinite or beyond 10^9.")
    if row.dim() == 1:
        return row
    return torch.from_numpy(to_mono(row.detach().cpu().numpy().T, checked_rate(sampling_rate))).to(row.device)
