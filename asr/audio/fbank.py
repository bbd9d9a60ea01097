"""Log mel filterbanks as Kaldi computes them, and splicing of frames, in plain torch on whole batches or on streams.

Shapes: N utterances, L samples, T frames, W samples of a window, B FFT bins, M mel bins, F features.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asr.audio.resample import checked_rate
from asr.errors import AsrError
from asr.kernels.memory import to_device

WindowType = Literal["povey", "hamming", "hanning", "rectangular"]

# Kaldi works on samples in the range of 16-bit integers.
INT16_SCALE = 32768.0

_FLOOR = torch.finfo(torch.float32).eps

# The lowest log energy, that of digital silence.
LOG_FLOOR = math.log(_FLOOR)

_PREEMPHASIS = 0.97

# Filters times FFT length; it is 40,960 for 80 filters and windows of 25 ms at 16 kHz. A file from an attacker could
# otherwise fill the memory.
_LARGEST_FILTERS = 1 << 24

# Number of windows that are transformed together on a CPU.
_CHUNK = 256


class Fbank(nn.Module):
    """Log mel filterbank energies as Kaldi's `compute-fbank-feats` computes them, optionally with the log energy.

    Samples in [-1, 1] are scaled to Kaldi's integer range, in which `dither` and the floors are given. The flat
    arguments are the keys of a recipe's YAML and of a bundle's description.

    Args:
        num_mel_bins: number of mel filters, usually 40 or 80.
        use_energy: put the log energy of each frame before the filters, as another feature.
        high_freq: upper edge of the band in Hz; 0 or less is relative to half the sampling rate.
        low_freq: lower edge of the band in Hz.
        sampling_rate: of the waveforms, in Hz.
        frame_length_ms: length of a window.
        frame_shift_ms: time between two windows.
        window: shape of the window.
        dither: standard deviation of the noise that is added to the samples, in integer units; 0 for none.
        snip_edges: use only whole windows; otherwise the ends are mirrored and T = round(samples / shift).

    Raises:
        AsrError: a sampling rate that is not a whole number or out of range, windows without samples, numbers that are
            not finite, a negative dither, a band outside 0 to half the sampling rate, no or too many filters, or
            filters and windows that would take too much memory.
    """

    window: Tensor
    mel_filters: Tensor

    def __init__(
        self,
        num_mel_bins: int = 80,
        use_energy: bool = False,
        high_freq: float = 0.0,
        low_freq: float = 20.0,
        sampling_rate: int = 16000,
        frame_length_ms: float = 25.0,
        frame_shift_ms: float = 10.0,
        window: WindowType = "povey",
        dither: float = 0.0,
        snip_edges: bool = False,
    ) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {
            "num_mel_bins": num_mel_bins, "use_energy": use_energy, "high_freq": high_freq, "low_freq": low_freq,
            "sampling_rate": sampling_rate, "frame_length_ms": frame_length_ms, "frame_shift_ms": frame_shift_ms,
            "window": window, "dither": dither, "snip_edges": snip_edges,
        }  # fmt: skip
        self.num_mel_bins = num_mel_bins
        self.sampling_rate = checked_rate(sampling_rate, "Fbank: sampling_rate")
        self.low_freq = low_freq
        self.high_freq = high_freq if high_freq > 0.0 else sampling_rate / 2 + high_freq
        self.use_energy = use_energy
        self.dither = dither
        self.snip_edges = snip_edges
        if not all(map(math.isfinite, (frame_length_ms, frame_shift_ms))) or not 0.0 <= dither < math.inf:
            raise AsrError(
                f"Fbank: frame_length_ms is {frame_length_ms}, frame_shift_ms {frame_shift_ms} and dither {dither}; "
                "give finite numbers, dither 0 or more."
            )
        self.frame_length = int(sampling_rate * frame_length_ms / 1000)
        self.frame_shift = int(sampling_rate * frame_shift_ms / 1000)
        if self.frame_shift < 1 or self.frame_length < 2:
            raise AsrError(
                f"Fbank: windows of {frame_length_ms} ms every {frame_shift_ms} ms have no samples; make them longer."
            )
        self.fft_length = 1 << (self.frame_length - 1).bit_length()
        filters = mel_filters(num_mel_bins, self.fft_length, sampling_rate, low_freq, self.high_freq)
        self.register_buffer("window", window_function(window, self.frame_length), persistent=False)
        self.register_buffer("mel_filters", filters, persistent=False)

    @property
    def feature_dim(self) -> int:
        """Number of features in a frame."""
        return self.num_mel_bins + int(self.use_energy)

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Number of frames from the number of samples, both (N,) int64."""
        if self.snip_edges:
            whole = torch.div(num_samples - self.frame_length, self.frame_shift, rounding_mode="floor") + 1
            return whole.clamp(min=0)
        return torch.div(num_samples + self.frame_shift // 2, self.frame_shift, rounding_mode="floor")

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Computes features.

        Args:
            waveform: (N, L) floating-point samples in [-1, 1]; padding may hold anything.
            num_samples: (N,) int64.

        Returns:
            features (N, T, F) float32, with zeros as padding, and num_frames (N,) int64.
        """
        num_samples = num_samples.to(torch.int64)
        # If the lengths are on the host, it does not wait for a GPU.
        max_frames = int(self.num_frames(num_samples).max()) if num_samples.numel() else 0
        num_samples = to_device(num_samples, waveform.device)
        num_frames = self.num_frames(num_samples)
        if max_frames == 0:
            return waveform.new_zeros((len(waveform), 0, self.feature_dim), dtype=torch.float32), num_frames
        with torch.autocast(device_type=waveform.device.type, enabled=False):
            frames = self._frames(waveform.float() * INT16_SCALE, num_samples, max_frames)
            inside = torch.arange(max_frames, device=waveform.device) < num_frames[:, None]
            features = waveform.new_zeros((*inside.shape, self.feature_dim), dtype=torch.float32)
            if waveform.device.type == "cpu":
                # A few hundred windows fit the processor's cache, which is three times as fast as all at once.
                for stream, num in enumerate(num_frames.tolist()):
                    for begin in range(0, num, _CHUNK):
                        end = min(begin + _CHUNK, num)
                        features[stream, begin:end] = self._log_energies(frames[stream, begin:end])
            else:
                # Padding is computed, too: to leave it out, the host would have to wait for the GPU.
                energies = self._log_energies(frames.flatten(0, 1)).view_as(features)
                features = torch.where(inside.unsqueeze(2), energies, features)
        return features, num_frames

    def _frames(self, waveform: Tensor, num_samples: Tensor, max_frames: int) -> Tensor:
        """Overlapping windows: (N, L) to (N, T, W)."""
        needed = (max_frames - 1) * self.frame_shift + self.frame_length
        if self.snip_edges:
            padded = nn.functional.pad(waveform, (0, max(0, needed - waveform.shape[1])))
        else:
            padded = self._mirrored_ends(waveform, num_samples, needed)
        return padded.unfold(1, self.frame_length, self.frame_shift)[:, :max_frames]

    def _mirrored_ends(self, waveform: Tensor, num_samples: Tensor, needed: int) -> Tensor:
        """Mirrors half a window of samples at both ends of each utterance: (N, L) to (N, at least `needed`)."""
        before = self.frame_length // 2 - self.frame_shift // 2
        behind = self.frame_length
        padded = nn.functional.pad(waveform, (before, max(behind, needed - before - waveform.shape[1])))
        head = torch.arange(-before, 0, device=waveform.device).expand(len(waveform), -1)
        tail = num_samples[:, None] + torch.arange(behind, device=waveform.device)
        padded[:, :before] = waveform.gather(1, _mirrored(head, num_samples))
        return padded.scatter_(1, tail + before, waveform.gather(1, _mirrored(tail, num_samples)))

    def _log_energies(self, frames: Tensor) -> Tensor:
        """Windows (T, W) to features (T, F)."""
        if self.dither > 0.0:
            frames = frames + self.dither * torch.randn_like(frames)
        frames = frames - frames.mean(dim=1, keepdim=True)
        previous = torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
        windowed = torch.sub(frames, previous, alpha=_PREEMPHASIS).mul_(self.window)
        spectrum = torch.fft.rfft(windowed, n=self.fft_length)[:, :-1]
        power = spectrum.real.square() + spectrum.imag.square()
        features = (power @ self.mel_filters).clamp_(min=_FLOOR).log_()
        if not self.use_energy:
            return features
        log_energy = frames.square().sum(dim=1, keepdim=True).clamp_(min=_FLOOR).log_()
        return torch.cat([log_energy, features], dim=1)


def window_function(window: WindowType, length: int) -> Tensor:
    """The weights of a window, (length,) float32."""
    phase = 2.0 * math.pi * torch.arange(length, dtype=torch.float64) / (length - 1)
    hanning = 0.5 - 0.5 * torch.cos(phase)
    shapes: dict[str, Tensor] = {
        "povey": hanning**0.85,
        "hamming": 0.54 - 0.46 * torch.cos(phase),
        "hanning": hanning,
        "rectangular": torch.ones_like(phase),
    }
    if window not in shapes:
        raise AsrError(f"Fbank: the window {window!r} is unknown; choose one of {', '.join(shapes)}.")
    return shapes[window].float()


def mel_filters(num_mel_bins: int, fft_length: int, sampling_rate: int, low_freq: float, high_freq: float) -> Tensor:
    """Kaldi's triangular filters, linear in mel: (B, M) float32 with B = fft_length / 2, without the Nyquist bin."""
    if num_mel_bins < 1:
        raise AsrError(f"Fbank: num_mel_bins is {num_mel_bins}; give 1 or more.")
    nyquist = sampling_rate / 2
    if not 0.0 <= low_freq < high_freq <= nyquist:
        raise AsrError(
            f"Fbank: the band {low_freq} to {high_freq} Hz is not within 0 to {nyquist} Hz; change low_freq or "
            "high_freq."
        )
    if num_mel_bins * fft_length > _LARGEST_FILTERS:
        raise AsrError(
            "Fbank: num_mel_bins, frame_length_ms or sampling_rate is too large: the filters would fill the memory."
        )
    frequency = torch.arange(fft_length // 2, dtype=torch.float64) * sampling_rate / fft_length
    edges = mel_edges(num_mel_bins, low_freq, high_freq)
    bin_mel = mel(frequency)[:, None]
    left, center, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (bin_mel - left) / (center - left)
    falling = (right - bin_mel) / (right - center)
    filters = torch.minimum(rising, falling).clamp(min=0.0).float()
    if bool((filters.sum(dim=0) == 0).any()):
        raise AsrError(
            f"Fbank: {num_mel_bins} mel bins are too many for an FFT of {fft_length}; some would have no frequency."
        )
    return filters


def mel_edges(num_mel_bins: int, low_freq: float, high_freq: float) -> Tensor:
    """Where the triangles begin, peak and end, in mel, (M + 2,) float64; the edges of the band are in Hz."""
    low, high = mel(torch.tensor([low_freq, high_freq], dtype=torch.float64)).tolist()
    return torch.linspace(low, high, num_mel_bins + 2, dtype=torch.float64)


def mel(frequency: Tensor) -> Tensor:
    """Hz to mel, for any shape."""
    return 1127.0 * torch.log1p(frequency / 700.0)


def _mirrored(position: Tensor, num_samples: Tensor) -> Tensor:
    """Mirrors positions (N, P) outside 0..num_samples-1 back inside, repeatedly if needed."""
    length = num_samples.clamp(min=1)[:, None]
    wrapped = torch.remainder(position, 2 * length)
    return torch.minimum(wrapped, 2 * length - 1 - wrapped)


class Splice(nn.Module):
    """Concatenates each frame with its neighbors; the first and last frames of an utterance are repeated.

    Args:
        left: number of frames before.
        right: number of frames after.
    """

    def __init__(self, left: int = 5, right: int = 5) -> None:
        super().__init__()
        self.left = left
        self.right = right

    def forward(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """Splices features (N, T, F) of num_frames (N,) frames to (N, T, F * (left + 1 + right)); padding is 0."""
        num_streams, max_frames, feature_dim = features.shape
        if max_frames == 0:
            return features.new_zeros((num_streams, 0, feature_dim * (self.left + 1 + self.right)))
        frame = torch.arange(max_frames, device=features.device)
        offset = torch.arange(-self.left, self.right + 1, device=features.device)
        num_frames = num_frames.to(features.device)
        last = (num_frames - 1).clamp(min=0)[:, None, None]
        source = torch.minimum((frame[:, None] + offset).clamp(min=0)[None], last)  # (N, T, left + 1 + right)
        stream = torch.arange(num_streams, device=features.device)[:, None, None]
        spliced = features[stream, source].reshape(num_streams, max_frames, -1)
        return spliced.masked_fill((frame >= num_frames[:, None])[:, :, None], 0.0)


class FeatureStream:
    """Filterbank features for a stream, equal to those of the whole recording.

    It keeps the samples that future frames depend on, and runs `Fbank` on them.

    Args:
        fbank: computes the features; with dither they would differ from those of the whole recording.
    """

    def __init__(self, fbank: Fbank) -> None:
        self._fbank = fbank
        # Frames that are computed again before the first new one; their windows must be in the buffer.
        self._margin = -(-fbank.frame_length // fbank.frame_shift)
        self._held = torch.zeros(0, dtype=torch.float32)
        self._first_frame = 0
        self._next_frame = 0

    def push(self, samples: Tensor, is_last: bool = False) -> Tensor:
        """Takes samples (L,) and returns the frames (T, F) that are complete; after the last samples, all others."""
        fbank = self._fbank
        self._held = torch.cat([self._held, samples])
        if is_last:
            num_frames = self._first_frame + int(fbank.num_frames(torch.tensor(len(self._held))))
        else:
            whole = (len(self._held) - fbank.frame_length) // fbank.frame_shift + 1
            num_frames = self._first_frame + max(0, whole)
        if num_frames <= self._next_frame:
            return torch.zeros(0, fbank.feature_dim, dtype=torch.float32)
        held = to_device(self._held, fbank.window.device)
        features = fbank(held.unsqueeze(0), torch.tensor([len(held)]))[0][0]
        new = features[self._next_frame - self._first_frame : num_frames - self._first_frame]
        self._next_frame = num_frames
        first = max(self._first_frame, num_frames - self._margin)
        self._held = self._held[(first - self._first_frame) * fbank.frame_shift :]
        self._first_frame = first
        return new
