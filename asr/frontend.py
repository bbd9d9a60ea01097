"""From what users hand in to utterances that the acoustic model can take: checks, mono, sampling rate, pauses.

Shapes: N utterances, L samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.data.resampling import checked_rate, resample
from asr.errors import AsrError

_WINDOW_SECONDS = 0.2


def as_utterances(waveform: Tensor | Sequence[Tensor], num_samples: Tensor | None = None) -> list[Tensor]:
    """One float tensor (L,) an utterance.

    Args:
        waveform: (L,), a batch (N, L), or a list of (L,); a list's entries may be (channels, L), which are averaged.
        num_samples: (N,) of a batch whose rows are padded.

    Raises:
        AsrError: no tensors, another shape, no samples, integers, NaN or infinite samples, lengths that are not those
            of the rows; the utterance is numbered.
    """
    if isinstance(waveform, Tensor):
        rows = [waveform] if waveform.dim() == 1 else list(waveform) if waveform.dim() == 2 else None
        if rows is None:
            raise AsrError(
                f"the waveform has the shape {tuple(waveform.shape)}; give (samples,) or (utterances, samples)."
            )
    elif isinstance(waveform, (list, tuple)) and all(isinstance(row, Tensor) for row in waveform):
        rows = list(waveform)
    else:
        raise AsrError(
            f"the waveform is a {type(waveform).__name__}; give a tensor or a list of tensors, of numpy's arrays "
            "torch.from_numpy(array)."
        )
    if num_samples is not None:
        if len(num_samples) != len(rows):
            raise AsrError(f"there are {len(num_samples)} lengths (num_samples) for {len(rows)} utterances.")
        for index, (row, num) in enumerate(zip(rows, num_samples.tolist(), strict=True)):
            if not 0 <= num <= row.shape[-1]:
                raise AsrError(f"utterance {index} has {row.shape[-1]} samples, and num_samples says {num}.")
        rows = [row[: int(num)] for row, num in zip(rows, num_samples, strict=True)]
    return [_checked(row, f"utterance {index}") for index, row in enumerate(rows)]


def _checked(row: Tensor, name: str) -> Tensor:
    if row.dim() == 2:
        row = row.float().mean(dim=0)
    if row.dim() != 1:
        raise AsrError(f"{name} has the shape {tuple(row.shape)}; give (samples,), or (channels, samples) in a list.")
    if row.numel() == 0:
        raise AsrError(f"{name} has no samples.")
    if not row.is_floating_point():
        raise AsrError(f"{name} holds {row.dtype}; give floating-point samples in [-1, 1] (16-bit samples / 32768).")
    if not bool(torch.isfinite(row).all()):
        raise AsrError(f"{name} has samples that are NaN or infinite.")
    return row.float()


def at_rate(waveform: Tensor, old_rate: int, new_rate: int) -> Tensor:
    """(L,) brought to another sampling rate.

    Raises:
        AsrError: as `checked_rate`.
    """
    old_rate = checked_rate(old_rate)
    return waveform if old_rate == new_rate else resample(waveform, old_rate, new_rate)


def split_at_pauses(waveform: Tensor, sampling_rate: int, max_seconds: float) -> list[tuple[int, int]]:
    """Cuts a long recording where it is quietest, so that no piece is longer than `max_seconds`.

    Each cut lies in the later half of the longest piece allowed, in the middle of the 0.2 s with the least energy.

    Args:
        waveform: (L,).
        sampling_rate: in Hz.
        max_seconds: at least one second.

    Returns:
        (begin, end) of each piece in samples; together they are the whole recording.
    """
    if max_seconds < 1.0:
        raise AsrError(f"pieces of at most {max_seconds} s are too short to recognize; allow one second or more.")
    longest = int(max_seconds * sampling_rate)
    window = int(_WINDOW_SECONDS * sampling_rate)
    cumulative = torch.cat([waveform.new_zeros(1, dtype=torch.float64), waveform.double().square().cumsum(0)])
    pieces = []
    begin, num_samples = 0, waveform.numel()
    while num_samples - begin > longest:
        first, last = begin + longest // 2, begin + longest - window
        energy = cumulative[first + window : last + window] - cumulative[first:last]
        cut = first + int(energy.argmin()) + window // 2
        pieces.append((begin, cut))
        begin = cut
    return [*pieces, (begin, num_samples)]


def like_length_batches(lengths: Sequence[int], max_padded: int) -> list[list[int]]:
    """Groups positions of like length so that each group's padded size stays below `max_padded`; one at least."""
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= max_padded:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches
