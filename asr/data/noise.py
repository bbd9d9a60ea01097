"""Noise recordings added to speech at a random signal-to-noise ratio."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch
from torch import Tensor

from asr.data.audio import find_audio_files, from_int16, read_audio, to_int16
from asr.errors import AsrError

_log = logging.getLogger(__name__)


class NoiseMixer:
    """Adds a random stretch of a random noise file to some of the utterances.

    Args:
        noise_dir: a folder of noise recordings (such as MUSAN's), searched with all folders below it.
        probability: part of the utterances that get noise.
        min_snr_db: lowest signal-to-noise ratio.
        max_snr_db: highest; between the two it is uniform in dB.
        sampling_rate: of the waveforms.

    Raises:
        AsrError: the folder is missing or holds no audio.
    """

    def __init__(
        self,
        noise_dir: str | Path,
        probability: float = 0.5,
        min_snr_db: float = 10.0,
        max_snr_db: float = 20.0,
        sampling_rate: int = 16000,
    ) -> None:
        self.files = find_audio_files(Path(noise_dir))
        if not self.files:
            raise AsrError(
                f"{noise_dir}: the noise folder is missing or holds no audio; give one with recordings of noise."
            )
        self.probability = probability
        self.min_snr_db = min_snr_db
        self.max_snr_db = max_snr_db
        self.sampling_rate = sampling_rate
        self._samples: dict[Path, Tensor] = {}

    def __call__(self, waveform: Tensor) -> Tensor:
        """(L,) float to (L,) float. Silence, and noise that is silent, leave it as it is.

        Raises:
            AsrError: the last noise file that was left cannot be read, either.
        """
        draw = torch.rand(4).tolist()
        if draw[0] >= self.probability or waveform.numel() == 0:
            return waveform
        noise = self._noise(draw[1])
        begin = int(draw[2] * len(noise))
        position = torch.arange(begin, begin + len(waveform)) % len(noise)
        stretch = from_int16(noise[position])
        snr_db = self.min_snr_db + draw[3] * (self.max_snr_db - self.min_snr_db)
        return add_noise(waveform, stretch, snr_db)

    def _noise(self, draw: float) -> Tensor:
        """The samples of the file at `draw` (in [0, 1)) of the list; a file that cannot be read leaves the list."""
        while True:
            path = self.files[int(draw * len(self.files))]
            if path in self._samples:
                return self._samples[path]
            try:
                self._samples[path] = to_int16(read_audio(path, self.sampling_rate))
            except AsrError as error:
                if len(self.files) == 1:
                    raise
                self.files.remove(path)
                _log.warning("noise: left out: %s", error)


def add_noise(waveform: Tensor, noise: Tensor, snr_db: float) -> Tensor:
    """(L,) + (L,) scaled so that the power of speech over that of noise is `snr_db`."""
    speech_power = float(waveform.square().mean())
    noise_power = float(noise.square().mean())
    if speech_power == 0.0 or noise_power == 0.0:
        return waveform
    return waveform + noise * math.sqrt(speech_power / noise_power / math.pow(10.0, snr_db / 10.0))
