"""Reads formats that libsndfile does not: m4a, mp4, webm and other containers, with FFmpeg through PyAV (optional).

The container is chosen by the first bytes of the file. FFmpeg may not guess it: playlists and other formats that refer
to other files or addresses are never opened.

Shapes: L samples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asr.errors import AsrError

MEDIA_SUFFIXES = (".m4a", ".mp4", ".webm", ".mka", ".mkv", ".mov", ".aac", ".wma", ".amr", ".caf", ".3gp", ".avi")

# Position and bytes -> FFmpeg's name of the container.
_CONTAINERS = (
    (4, b"ftyp", "mov"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf"),
    (0, b"#!AMR", "amr"),
    (0, b"caff", "caf"),
    (8, b"AVI ", "avi"),
    (0, b"\xff\xf1", "aac"),
    (0, b"\xff\xf9", "aac"),
)
INSTALL = "pip install 'onepass-asr[media]'"


def container_of(path: Path) -> str | None:
    """FFmpeg's name of the container, by the file's first bytes; None if this module does not read it."""
    with path.open("rb") as file:
        head = file.read(16)
    return next((name for place, magic, name in _CONTAINERS if head[place:].startswith(magic)), None)


def open_media(path: Path) -> tuple[int, Iterator[np.ndarray[Any, Any]]]:
    """Opens the first audio track of a file.

    Args:
        path: a file for which `container_of` has a name.

    Returns:
        the sampling rate, and blocks (L, channels) float32 in [-1, 1], decoded as they are taken.

    Raises:
        AsrError: PyAV is not installed, or the file has no audio or cannot be decoded; also while blocks are taken.
    """
    container_name = container_of(path)
    if container_name is None:
        raise AsrError(f"{path}: the audio cannot be decoded; it is damaged or not audio.")
    if importlib.util.find_spec("av") is None:
        raise AsrError(f"{path}: reading this kind of file needs FFmpeg's libraries; {INSTALL}.")
    import av

    try:
        container: Any = av.open(str(path), format=container_name, options={"protocol_whitelist": "file"})
    except (av.FFmpegError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if not container.streams.audio:
        container.close()
        raise AsrError(f"{path}: there is no sound in this file.")
    rate = int(container.streams.audio[0].rate or 0)
    return rate, _blocks(path, container, rate)


def _blocks(path: Path, container: Any, rate: int) -> Iterator[np.ndarray[Any, Any]]:
    import av

    with container:
        try:
            # To float samples, one row for each channel, without a change of the rate.
            resampler = av.AudioResampler(format="fltp", rate=rate)
            for frame in container.decode(container.streams.audio[0]):
                for converted in resampler.resample(frame):
                    yield converted.to_ndarray().T
            for converted in resampler.resample(None):
                yield converted.to_ndarray().T
        except (av.FFmpegError, OSError, ValueError) as error:
            raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> AsrError:
    reason = str(getattr(error, "strerror", None) or error).partition("\n")[0].rstrip(".")
    return AsrError(f"{path}: the audio cannot be decoded ({reason}); it is damaged or not audio.")
