"""Log mel filterbanks for NeMo's networks, in plain torch.

Hann windows of 25 ms centered every 10 ms, filters of area one on Slaney's mel scale (as in librosa), the logarithm of
the energies plus 2^-24, and each feature of an utterance normalized to mean 0 and variance 1.

Shapes: N utterances, L samples, T frames, F features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asr.errors import AsrError

_PREEMPHASIS = 0.97
_FFT_LENGTH = 512
_FLOOR = 2.0**-24
_VARIANCE_FLOOR = 1e-5


class NemoFeatures:
    """NeMo's `AudioToMelSpectrogramPreprocessor` without dither.

    Args:
        num_mel_bins: F.
        sampling_rate: in Hz.
        normalize_type: `per_feature`, or "" or `NA` for none.

    Raises:
        AsrError: there is no such normalization, or windows of this sampling rate are empty or longer than the FFT.
    """

    def __init__(self, num_mel_bins: int, sampling_rate: int, normalize_type: str) -> None:
        if normalize_type not in ("per_feature", "", "NA", "None"):
            raise AsrError(f"the normalization {normalize_type!r} is unknown; only per_feature is supported.")
        self._normalizes = normalize_type == "per_feature"
        self.feature_dim = num_mel_bins
        self._length, self._shift = sampling_rate * 25 // 1000, sampling_rate // 100
        if self._shift < 1 or self._length > _FFT_LENGTH:
            raise AsrError(
                f"NeMo's windows of 25 ms cannot be used at {sampling_rate} Hz, only from 100 to "
                f"{_FFT_LENGTH * 40} Hz; give a network for 16000 Hz."
            )
        self._window = torch.hann_window(self._length, periodic=False)
        self._filters = slaney_filters(num_mel_bins, _FFT_LENGTH, sampling_rate)

    def __call__(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L) in [-1, 1] and (N,) -> features (N, T, F), 0 after each utterance's end, and (N,) int64."""
        num_frames = torch.div(num_samples, self._shift, rounding_mode="floor").long() + 1
        parts = [self._of_one(each[:num]) for each, num in zip(waveform, num_samples.tolist(), strict=True)]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), num_frames

    def _of_one(self, waveform: Tensor) -> Tensor:
        emphasized = torch.cat([waveform[:1], waveform[1:] - _PREEMPHASIS * waveform[:-1]])
        spectrum = torch.stft(
            emphasized, _FFT_LENGTH, self._shift, self._length, self._window, pad_mode="constant", return_complex=True
        )
        features = (self._filters @ spectrum.abs().square() + _FLOOR).log().T
        if not self._normalizes:
            return features
        deviation = features.std(0, keepdim=True) if len(features) > 1 else torch.zeros(1, self.feature_dim)
        return (features - features.mean(0, keepdim=True)) / (deviation + _VARIANCE_FLOOR)


def slaney_filters(num_mel_bins: int, fft_length: int, sampling_rate: int) -> Tensor:
    """Triangles of area one on Slaney's mel scale, linear below 1 kHz, logarithmic above; (F, fft_length / 2 + 1)."""
    step, log_step = 200.0 / 3.0, math.log(6.4) / 27.0
    highest = 15.0 + math.log(sampling_rate / 2 / 1000.0) / log_step
    mel = torch.linspace(0.0, highest, num_mel_bins + 2, dtype=torch.float64)
    hertz = torch.where(mel < 15.0, mel * step, 1000.0 * torch.exp(log_step * (mel - 15.0)))
    frequency = torch.linspace(0.0, sampling_rate / 2, fft_length // 2 + 1, dtype=torch.float64)
    low, middle, high = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    rising, falling = (frequency - low) / (middle - low), (high - frequency) / (high - middle)
    return (torch.minimum(rising, falling).clamp(min=0.0) * 2.0 / (high - low)).float()
