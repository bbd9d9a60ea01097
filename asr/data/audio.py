"""Audio files to mono waveforms at one sampling rate, with a clear word on each file that cannot be used."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from asr.data.resampling import checked_rate, resample
from asr.errors import AsrError

AUDIO_SUFFIXES = (".flac", ".wav", ".mp3", ".sph", ".ogg", ".opus", ".aiff", ".aif", ".au")
"""In order of preference where one utterance has several files."""

_SHORTER_THAN_HEADER = re.compile(r"should be (\d+)")


def read_audio(path: str | Path, sampling_rate: int = 16000) -> Tensor:
    """A file's samples (L,) float32 in [-1, 1]: channels averaged, brought to `sampling_rate`.

    Raises:
        AsrError: the file is missing, cannot be decoded, is cut short, has no samples, or some that are not numbers.
    """
    samples, file_rate = _decode(Path(path))
    waveform = torch.from_numpy(samples.mean(axis=1) if samples.shape[1] > 1 else samples[:, 0])
    return resample(waveform, file_rate, sampling_rate)


def inspect_audio(path: str | Path) -> tuple[int, int, int]:
    """Decodes a whole file and gives (samples, sampling rate, channels); raises what `read_audio` raises."""
    samples, rate = _decode(Path(path))
    return samples.shape[0], rate, samples.shape[1]


def find_audio_files(folder: Path) -> list[Path]:
    """All audio files below a folder, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in AUDIO_SUFFIXES and not path.name.startswith(".") and not path.is_dir()
    )


def is_cut_short(file: soundfile.SoundFile) -> bool:
    """Whether a WAV header announces more samples than there are: libsndfile silently believes the file's size."""
    return file.format in ("WAV", "WAVEX", "NIST") and _SHORTER_THAN_HEADER.search(file.extra_info) is not None


def to_int16(waveform: Tensor) -> Tensor:
    """[-1, 1] float to int16, what lies outside is clipped: half the memory, nothing lost of 16-bit audio."""
    return (waveform * 32768.0).round_().clamp_(-32768, 32767).to(torch.int16)


def from_int16(samples: Tensor) -> Tensor:
    """int16 to float32 in [-1, 1]."""
    return samples.float() / 32768.0


def _decode(path: Path) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float32]], int]:
    if not path.is_file():
        raise AsrError(f"{path}: there is no such audio file.")
    if path.stat().st_size == 0:
        raise AsrError(f"{path}: the audio file is empty (0 bytes); fetch it again.")
    try:
        with soundfile.SoundFile(os.fsencode(path)) as file:
            announced = file.frames
            cut_short = is_cut_short(file)
            samples = file.read(dtype="float32", always_2d=True)
            rate = int(file.samplerate)
        checked_rate(rate)
    except AsrError as error:
        raise AsrError(f"{path}: the header is damaged: {error}") from error
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise AsrError(f"{path}: the audio cannot be decoded{_reason(error)}; it is damaged or not audio.") from error
    if len(samples) == 0:
        raise AsrError(f"{path}: the audio has no samples (zero length).")
    if cut_short or (0 < announced < 2**62 and len(samples) < announced):
        raise AsrError(
            f"{path}: the audio is cut short: its header announces more than the {len(samples)} samples there are."
        )
    if not np.isfinite(samples).all():
        num = int((~np.isfinite(samples)).any(axis=1).sum())
        raise AsrError(
            f"{path}: {num} of {len(samples)} samples are not numbers (NaN or infinite); make the file anew."
        )
    return samples, rate


def _reason(error: Exception) -> str:
    """libsndfile's own words in brackets, where they say something that is true and not said already."""
    words = str(error).rsplit(": ", 1)[-1].strip().rstrip(".")
    return "" if not words or "does not exist" in words or "internal error" in words else f" ({words})"
