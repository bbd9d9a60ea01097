"""Augmentation in training: noise, SpecAugment, vocal tract length perturbation, and acoustic conditions.

A condition is a version of a whole corpus, with the same speech recorded in another way.

Shapes: N utterances, L samples, T frames, F features, B mel bins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.audio.fbank import Fbank, mel, mel_edges
from asr.audio.io import find_audio_files, from_int16, read_audio, to_int16
from asr.audio.resample import change_speed, resample
from asr.distributed import draw_rows
from asr.errors import AsrError, require_at_least, require_below_one, require_between

_LOGGER = logging.getLogger(__name__)


class NoiseMixer:
    """Adds noise to some of the utterances, from a random position in a random noise recording.

    Where a recording cannot be read, the next one is taken.

    Args:
        noise_dir: folder of noise recordings, such as MUSAN's; subfolders are searched as well.
        probability: fraction of the utterances that get noise.
        min_snr_db: lowest signal-to-noise ratio.
        max_snr_db: highest signal-to-noise ratio; it is drawn uniformly in dB.
        sampling_rate: of the waveforms, in Hz.
        memory_gb: maximum memory for decoded recordings, in GiB; further ones are decoded each time.

    Raises:
        AsrError: the folder cannot be read or has no audio in it, or a number is outside its range.
    """

    def __init__(
        self,
        noise_dir: str | Path,
        probability: float = 0.5,
        min_snr_db: float = 10.0,
        max_snr_db: float = 20.0,
        sampling_rate: int = 16000,
        memory_gb: float = 1.0,
    ) -> None:
        require_between(0, 1, probability=probability)
        if not min_snr_db <= max_snr_db:
            raise AsrError(f"noise: min_snr_db is {min_snr_db} and max_snr_db {max_snr_db}; give the lower one first.")
        self.files = find_audio_files(Path(noise_dir))
        if not self.files:
            raise AsrError(f"{noise_dir}: the noise folder has no audio in it; give a folder with recordings of noise.")
        self.probability = probability
        self.min_snr_db = min_snr_db
        self.max_snr_db = max_snr_db
        self.sampling_rate = sampling_rate
        self._room = int(memory_gb * 2**30)
        self._samples: dict[Path, Tensor] = {}
        self._unreadable: dict[Path, AsrError] = {}

    def draw(self) -> list[float]:
        """The random numbers of one utterance."""
        numbers: list[float] = torch.rand(4).tolist()
        return numbers

    def __call__(self, waveform: Tensor, draw: Sequence[float] | None = None) -> Tensor:
        """Adds noise to (L,), or not, as drawn. Silent speech or noise leaves the waveform unchanged.

        Args:
            waveform: (L,).
            draw: what `draw` returned; None to draw now.

        Raises:
            AsrError: none of the noise recordings can be read.
        """
        draw = self.draw() if draw is None else draw
        if draw[0] >= self.probability or waveform.numel() == 0:
            return waveform
        noise = self._noise(draw[1])
        begin = int(draw[2] * len(noise))
        position = torch.arange(begin, begin + len(waveform)) % len(noise)
        stretch = from_int16(noise[position])
        snr_db = self.min_snr_db + draw[3] * (self.max_snr_db - self.min_snr_db)
        return add_noise(waveform, stretch, snr_db)

    def _noise(self, draw: float) -> Tensor:
        """The recording at fraction `draw` (in [0, 1)) of the list, int16, or the next one that can be read."""
        first = int(draw * len(self.files))
        for path in (*self.files[first:], *self.files[:first]):
            if path not in self._unreadable:
                try:
                    return self._read(path)
                except AsrError as error:
                    self._unreadable[path] = error
                    _LOGGER.warning("noise: skipped: %s", error)
        raise self._unreadable[self.files[first]]

    def _read(self, path: Path) -> Tensor:
        if path in self._samples:
            return self._samples[path]
        samples = to_int16(read_audio(path, self.sampling_rate))
        size = samples.numel() * samples.element_size()
        if size <= self._room:
            self._samples[path] = samples
            self._room -= size
        return samples


def add_noise(waveform: Tensor, noise: Tensor, snr_db: float) -> Tensor:
    """Adds noise (L,) to a waveform (L,), scaled to a signal-to-noise ratio of `snr_db`."""
    speech_power = float(waveform.square().mean())
    noise_power = float(noise.square().mean())
    if speech_power == 0.0 or noise_power == 0.0:
        return waveform
    return waveform + noise * math.sqrt(speech_power / noise_power / math.pow(10.0, snr_db / 10.0))


class SpecAugment(nn.Module):
    """SpecAugment (Park et al., 2019): masks random bands of frames and of features.

    Masked values become the mean of the feature over the utterance rather than zero, so that the result is the same
    before and after mean normalization. In evaluation mode nothing is masked.

    Args:
        num_time_masks: number of bands of frames in each utterance.
        max_time_mask_frames: their maximum width.
        max_time_mask_fraction: their maximum width as a fraction of the utterance.
        num_frequency_masks: number of bands of features in each utterance.
        max_frequency_mask_bins: their maximum width.

    Raises:
        AsrError: a number is below 0, or the fraction is above 1.
    """

    def __init__(
        self,
        num_time_masks: int = 2,
        max_time_mask_frames: int = 50,
        max_time_mask_fraction: float = 0.15,
        num_frequency_masks: int = 2,
        max_frequency_mask_bins: int = 27,
    ) -> None:
        super().__init__()
        require_at_least(0, num_time_masks=num_time_masks, max_time_mask_frames=max_time_mask_frames)
        require_between(0, 1, max_time_mask_fraction=max_time_mask_fraction)
        require_at_least(0, num_frequency_masks=num_frequency_masks, max_frequency_mask_bins=max_frequency_mask_bins)
        self.num_time_masks = num_time_masks
        self.max_time_mask_frames = max_time_mask_frames
        self.max_time_mask_fraction = max_time_mask_fraction
        self.num_frequency_masks = num_frequency_masks
        self.max_frequency_mask_bins = max_frequency_mask_bins

    def forward(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """Masks features (N, T, F) of num_frames (N,) frames; padding is not changed."""
        if not self.training or features.shape[1] == 0:
            return features
        _, max_frames, feature_dim = features.shape
        num_frames = num_frames.to(features.device)
        inside = torch.arange(max_frames, device=features.device) < num_frames[:, None]
        width = (num_frames * self.max_time_mask_fraction).long().clamp(max=self.max_time_mask_frames)
        bins = torch.full_like(num_frames, feature_dim)
        time_mask = _bands(num_frames, width, max_frames, self.num_time_masks)
        frequency_width = torch.full_like(num_frames, min(self.max_frequency_mask_bins, feature_dim))
        frequency_mask = _bands(bins, frequency_width, feature_dim, self.num_frequency_masks)
        hidden = (time_mask[:, :, None] | frequency_mask[:, None, :]) & inside[:, :, None]
        count = num_frames.clamp(min=1)[:, None, None]
        mean = features.masked_fill(~inside[:, :, None], 0.0).sum(dim=1, keepdim=True) / count
        return torch.where(hidden, mean, features)


def _bands(length: Tensor, max_width: Tensor, size: int, num_bands: int) -> Tensor:
    """Positions in any of `num_bands` random bands within 0..length-1, each 0..max_width wide, (N, size) bool."""
    device = length.device
    draw = draw_rows(lambda num: torch.rand((2, num, num_bands), device=device), len(length), dim=1)
    width = (draw[0] * (max_width + 1)[:, None]).long()
    begin = (draw[1] * (length[:, None] - width + 1)).long()
    position = torch.arange(size, device=device)
    band = (position >= begin[:, :, None]) & (position < (begin + width)[:, :, None])
    return band.any(dim=1)


# Fraction of the band that is scaled uniformly; the rest is stretched or compressed so that the upper edge stays.
_KEPT_BAND = 0.8


class VocalTractPerturbation(nn.Module):
    """Vocal tract length perturbation (Jaitly and Hinton, 2013): warps the frequency axis of each utterance.

    The factor is drawn from 1 - `max_warp` to 1 + `max_warp`. Filterbanks are interpolated at the warped center
    frequencies. Unlike speed perturbation it does not change the tempo. In evaluation mode nothing is warped.

    Args:
        max_warp: the largest change of the factor, such as 0.1.
        fbank: the filterbank. Its filters are the last columns of the features; an energy before them is not changed.

    Raises:
        AsrError: `max_warp` is below 0, or not below 1.
    """

    frequency: Tensor  # (B,) center frequencies in Hz

    def __init__(self, max_warp: float, fbank: Fbank) -> None:
        super().__init__()
        require_below_one(max_warp=max_warp)
        self.max_warp = max_warp
        self.high_freq = fbank.high_freq
        edges = mel_edges(fbank.num_mel_bins, fbank.low_freq, fbank.high_freq)
        self.first_mel = float(edges[1])
        self.mel_step = float(edges[1] - edges[0])
        self.register_buffer("frequency", _hertz(edges[1:-1]).float(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Warps features (N, T, F) by random factors."""
        if not self.training or self.max_warp == 0.0:
            return features
        draw = draw_rows(lambda num: torch.rand(num, device=features.device), len(features))
        factor = 1.0 + self.max_warp * (2.0 * draw - 1.0)
        return self.warp(features, factor)

    def warp(self, features: Tensor, factor: Tensor) -> Tensor:
        """Warps features (N, T, F) by factors (N,); above 1 frequencies rise, as in a shorter vocal tract."""
        num_bins = len(self.frequency)
        position = ((mel(self._source(factor[:, None])) - self.first_mel) / self.mel_step).clamp(0, num_bins - 1)
        below = position.floor().long().clamp(max=num_bins - 2)
        share = (position - below)[:, None, :]
        shape = (*features.shape[:2], num_bins)
        bands = features[..., -num_bins:]
        low, high = (bands.gather(2, index[:, None, :].expand(shape)) for index in (below, below + 1))
        return torch.cat((features[..., :-num_bins], torch.lerp(low, high, share.expand(shape))), dim=2)

    def _source(self, factor: Tensor) -> Tensor:
        """The frequency in Hz that each filter takes its value from, (N, B), piecewise linear; the upper edge stays."""
        bend = _KEPT_BAND * self.high_freq * factor.clamp(max=1.0)
        scaled = self.frequency / factor
        rest = (self.high_freq - bend / factor) / (self.high_freq - bend)
        return torch.where(self.frequency <= bend, scaled, self.high_freq - (self.high_freq - self.frequency) * rest)


def _hertz(mel: Tensor) -> Tensor:
    return 700.0 * torch.expm1(mel / 1127.0)


_TELEPHONE_RATE = 8000
_SNR_DB = (5.0, 20.0)
_FAR_SNR_DB = (10.0, 25.0)
# Powers of frequency in the noise's spectrum: from white to the rumble of rooms, and for noise that is nearly white.
_SPECTRAL_SLOPE = (-1.0, 0.0)
_WHITE_SLOPE = (-0.25, 0.0)
# The noise's level rises and falls, by up to this many dB, between points half a second apart.
_LEVEL_RANGE_DB = 6.0
_LEVELS_PER_SECOND = 2.0

_NUM_VOICES = (3, 8)

# Of a room: the time in which its reverberation falls by 60 dB, how much stronger than all of it the direct sound is,
# and how its spectrum falls with frequency. The first echo arrives a few milliseconds after the direct sound.
_REVERBERATION_SECONDS = (0.15, 0.9)
_DIRECT_DB = (-4.0, 10.0)
_ROOM_SLOPE = (-0.4, 0.0)
_FIRST_ECHO_SECONDS = (0.001, 0.006)

Change = Callable[[Tensor, torch.Generator, Sequence[Tensor]], Tensor]
"""Changes a waveform (L,) at 16 kHz. The generator draws all random numbers; the others are recordings (L',) of other
speech."""


class Condition(NamedTuple):
    """One way to record speech.

    Attributes:
        speed: factor of tempo and pitch (Ko et al. 2015).
        weight: how often training draws this condition, relative to the others.
        change: applied to the waveform after the speed.
    """

    speed: float
    weight: float
    change: Change | None = None

    def apply(self, waveform: Tensor, generator: torch.Generator, others: Sequence[Tensor] = ()) -> Tensor:
        """Converts a waveform (L,) at 16 kHz to this condition, (L / speed,)."""
        if self.speed != 1.0:
            waveform = change_speed(waveform, self.speed)
        return waveform if self.change is None else self.change(waveform, generator, others)


def through_telephone(waveform: Tensor, generator: torch.Generator, others: Sequence[Tensor]) -> Tensor:
    """Speech as over a telephone line, sampled at 8 kHz with 8 bits of mu-law."""
    narrow = resample(waveform, 16000, _TELEPHONE_RATE).clamp(-1.0, 1.0)
    code = (narrow.sign() * torch.log1p(255.0 * narrow.abs()) / math.log(256.0) * 127.0).round() / 127.0
    narrow = code.sign() * torch.expm1(code.abs() * math.log(256.0)) / 255.0
    return resample(narrow, _TELEPHONE_RATE, 16000)[: len(waveform)]


def with_noise(
    waveform: Tensor,
    generator: torch.Generator,
    others: Sequence[Tensor],
    slopes: tuple[float, float] = _SPECTRAL_SLOPE,
    snr_db: tuple[float, float] = _SNR_DB,
) -> Tensor:
    """Speech with noise of a random color and a varying level, at a signal-to-noise ratio of 5 to 20 dB."""
    ratio, slope = _uniform(snr_db, generator), _uniform(slopes, generator)
    return add_noise(waveform, colored_noise(len(waveform), slope, generator), ratio)


def colored_noise(num_samples: int, slope: float, generator: torch.Generator) -> Tensor:
    """Noise (L,) at 16 kHz with an amplitude proportional to frequency ** slope and a varying level."""
    noise = _colored(torch.randn(num_samples, generator=generator), slope)
    num_levels = 2 + int(num_samples / 16000 * _LEVELS_PER_SECOND)
    level = _LEVEL_RANGE_DB * (torch.rand(1, 1, num_levels, generator=generator) - 0.5)
    level = torch.nn.functional.interpolate(level, size=num_samples, mode="linear", align_corners=True)[0, 0]
    return noise * 10.0 ** (level / 20.0)


def with_babble(waveform: Tensor, generator: torch.Generator, others: Sequence[Tensor]) -> Tensor:
    """Speech among several other voices of equal power, at a signal-to-noise ratio of 5 to 20 dB."""
    babble = torch.zeros_like(waveform)
    for _ in range(_below(_NUM_VOICES[1] - _NUM_VOICES[0] + 1, generator) + _NUM_VOICES[0]):
        voice = others[_below(len(others), generator)]
        begin = _below(len(voice), generator)
        stretch = voice[(begin + torch.arange(len(waveform))) % len(voice)]
        babble += stretch / stretch.square().mean().sqrt().clamp(min=1e-4)
    return add_noise(waveform, babble, _uniform(_SNR_DB, generator))


def in_room(waveform: Tensor, generator: torch.Generator, others: Sequence[Tensor]) -> Tensor:
    """Speech as a microphone hears it from a distance: with reverberation that decays exponentially (Polack, 1988).

    The direct sound keeps its time and its level.
    """
    seconds, direct_db = _uniform(_REVERBERATION_SECONDS, generator), _uniform(_DIRECT_DB, generator)
    slope, first_echo = _uniform(_ROOM_SLOPE, generator), _uniform(_FIRST_ECHO_SECONDS, generator)
    response = _colored(torch.randn(int(16000 * seconds), generator=generator), slope)
    response *= 10.0 ** (-3.0 / (16000 * seconds) * torch.arange(len(response)))
    response[: int(16000 * first_echo)] = 0.0
    response *= 10.0 ** (-direct_db / 20.0) / response.square().sum().sqrt()
    response[0] = 1.0
    return reverberated(waveform, response)


def reverberated(waveform: Tensor, response: Tensor) -> Tensor:
    """A waveform (L,) as heard with an impulse response (M,), (L,)."""
    size = len(waveform) + len(response)
    return torch.fft.irfft(torch.fft.rfft(waveform, size) * torch.fft.rfft(response, size), size)[: len(waveform)]


def far_away(waveform: Tensor, generator: torch.Generator, others: Sequence[Tensor]) -> Tensor:
    """Speech in a room with noise, at a signal-to-noise ratio of 10 to 25 dB."""
    return with_noise(in_room(waveform, generator, others), generator, others, snr_db=_FAR_SNR_DB)


def _colored(noise: Tensor, slope: float) -> Tensor:
    """White noise (L,) at 16 kHz, filtered to an amplitude proportional to frequency ** slope."""
    spectrum = torch.fft.rfft(noise)
    hertz = torch.linspace(0.0, 8000.0, len(spectrum)).clamp(min=50.0)
    return torch.fft.irfft(spectrum * hertz**slope, n=len(noise))


def _uniform(limits: tuple[float, float], generator: torch.Generator) -> float:
    low, high = limits
    return low + (high - low) * float(torch.rand((), generator=generator))


def _below(number: int, generator: torch.Generator) -> int:
    """A random number from 0 to `number` - 1."""
    return int(torch.randint(number, (), generator=generator))


CONDITIONS = {
    "1": Condition(1.0, 2.0),
    "0.9": Condition(0.9, 2.0),
    "1.1": Condition(1.1, 2.0),
    "telephone": Condition(1.0, 1.0, through_telephone),
    "noise": Condition(1.0, 1.0, with_noise),
    "white": Condition(1.0, 1.0, partial(with_noise, slopes=_WHITE_SLOPE)),
    "room": Condition(1.0, 2.0, in_room),
    "babble": Condition(1.0, 1.0, with_babble),
    "far": Condition(1.0, 1.0, far_away),
}
"""The conditions of a prepared corpus. A new one goes to the end, since an utterance's random numbers are drawn in this
order."""
