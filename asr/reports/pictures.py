"""Draws an utterance: its spectrogram, reference, recognized words and lattice."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.reports.charts import svg
from asr.reports.clips import RATE
from asr.reports.evaluation import HeardWord
from asr.reports.word_graph import END, START, WordGraph

_SECOND = 150.0  # width of a second
_LANE = 30.0
_SPECTROGRAM = 130.0
_SLACK = 0.08  # seconds that words in a lane may overlap
# Dark blue to pale yellow; each step is lighter than the one before, so that it is legible in gray, too.
_ANCHORS = ((13, 8, 60), (84, 15, 109), (159, 42, 99), (212, 72, 66), (245, 125, 21), (250, 193, 39), (252, 255, 190))
_NUM_COLORS = 64  # with 256, files would be twice as large


def png(values: NDArray[np.uint8], palette: Sequence[tuple[int, int, int]]) -> bytes:
    """Encodes indices (height, width) into a palette of at most 256 colors as a PNG."""
    height, width = values.shape
    rows = np.pad(values, ((0, 0), (1, 0)))  # each row begins with its filter type, 0 for none

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    colors = b"".join(bytes(color) for color in palette)
    body = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), chunk(b"PLTE", colors), chunk(b"IDAT", body), chunk(b"IEND", b""))
    )


def spectrogram(samples: Tensor) -> bytes | None:
    """A PNG of the log mel energies of samples (L,) at 16 kHz, 10 ms per column, low frequencies at the bottom.

    None if there are too few samples for a frame, as where a recording is cut short.
    """
    energy = Fbank(sampling_rate=RATE)(samples[None], torch.tensor([len(samples)]))[0][0]
    if not len(energy):
        return None
    low, high = (float(energy.quantile(share)) for share in (0.05, 0.995))
    scaled = ((energy - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return png((scaled.T.flip(0) * (_NUM_COLORS - 1)).round().byte().numpy(), _palette())


def _palette() -> list[tuple[int, int, int]]:
    places = np.linspace(0, len(_ANCHORS) - 1, _NUM_COLORS)
    channels = [np.interp(places, range(len(_ANCHORS)), [color[c] for color in _ANCHORS]) for c in range(3)]
    return [(int(r), int(g), int(b)) for r, g, b in zip(*channels, strict=True)]


def picture(
    samples: Tensor | None, duration: float, words: Sequence[HeardWord], wrong: Sequence[bool], graph: WordGraph | None
) -> str:
    """Draws an utterance; the width is proportional to its duration.

    Args:
        samples: (L,) at 16 kHz; None to draw no spectrogram.
        duration: duration in seconds.
        words: the recognized words; those without times are left out.
        wrong: whether each recognized word is an error.
        graph: the words of its lattice, or None.
    """
    width = max(duration * _SECOND, _SECOND)
    parts, y = list[str](), 0.0
    image = None if samples is None else spectrogram(samples)
    if image is not None:
        parts.append(
            f'<image href="data:image/png;base64,{base64.b64encode(image).decode()}" '
            f'width="{duration * _SECOND:.1f}" height="{_SPECTROGRAM}" preserveAspectRatio="none"/>'
        )
        y = _SPECTROGRAM
    timed = [
        (word, bad) for word, bad in zip(words, wrong, strict=True) if word.start is not None and word.end is not None
    ]
    for word, bad in timed:
        x, end = (word.start or 0.0) * _SECOND, (word.end or 0.0) * _SECOND
        if image is not None:
            parts.append(f'<line class="cut" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y}"/>')
            parts.append(f'<line class="cut" x1="{end:.1f}" y1="0" x2="{end:.1f}" y2="{y}"/>')
        parts.append(_box(word.text, x, y + 4, end - x, "bad" if bad else "good", 1.0, ""))
    y += 4 + _LANE
    y = _time_axis(parts, duration, y)
    if graph is not None:
        y = _lattice(parts, graph, duration, y + 8)
    return svg("spectrogram with the recognized words, and the words of the lattice", width, y, parts).replace(
        "<svg ", f'<svg width="{width:.0f}" height="{y:.0f}" ', 1
    )


def _box(text: str, x: float, y: float, width: float, kind: str, opacity: float, hint: str) -> str:
    width = max(width - 2, 6.0)
    shown = f"<title>{escape(hint)}</title>" if hint else ""
    # Words that are too long for their boxes are compressed, not cut off.
    fit = f' textLength="{width - 4:.1f}" lengthAdjust="spacingAndGlyphs"' if len(text) * 8.0 > width - 4 else ""
    return (
        f'<g class="{kind}">{shown}<rect x="{x + 1:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_LANE - 6}" rx="4" '
        f'fill-opacity="{0.15 + 0.85 * opacity:.2f}"/><text x="{x + 1 + width / 2:.1f}" y="{y + 17:.1f}" '
        f'text-anchor="middle"{fit}>{escape(text)}</text></g>'
    )


def _time_axis(parts: list[str], duration: float, y: float) -> float:
    for tenth in range(int(duration * 2) + 1):
        x = tenth * _SECOND / 2
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}"/>')
        if tenth % 2 == 0 and x + 20 < duration * _SECOND:
            parts.append(f'<text x="{x + 3:.1f}" y="{y + 16}">{tenth // 2} s</text>')
    return y + 20


def _lattice(parts: list[str], graph: WordGraph, duration: float, top: float) -> float:
    """Draws words as boxes in lanes, the most probable ones on top, with lines between consecutive words."""
    lanes: list[list[tuple[float, float]]] = []
    lane_of: dict[int, int] = {}
    for number in sorted(range(len(graph.words)), key=lambda one: -graph.words[one].probability):
        start, end = _span(graph, number, duration)
        fits = (all(end <= a + _SLACK or start >= b - _SLACK for a, b in taken) for taken in lanes)
        lane = next((i for i, is_free in enumerate(fits) if is_free), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((start, end))
        lane_of[number] = lane
    middle = _LANE / 2 - 3
    for link in graph.links:
        if link.src in (START, END) or link.dst in (START, END):
            continue
        x1, x2 = _span(graph, link.src, duration)[1] * _SECOND, _span(graph, link.dst, duration)[0] * _SECOND
        y1, y2 = (top + lane_of[one] * _LANE + middle for one in (link.src, link.dst))
        parts.append(
            f'<path class="link" stroke-opacity="{0.2 + 0.8 * link.probability:.2f}" '
            f'd="M{x1 - 2:.1f} {y1:.1f} C{x1 + 12:.1f} {y1:.1f} {x2 - 12:.1f} {y2:.1f} {x2 + 2:.1f} {y2:.1f}"/>'
        )
    for number, word in enumerate(graph.words):
        start, end = _span(graph, number, duration)
        hint = f"{word.text}: {word.probability:.0%}, from {word.start:.2f} s"
        y = top + lane_of[number] * _LANE
        parts.append(_box(word.text, start * _SECOND, y, (end - start) * _SECOND, "maybe", word.probability, hint))
    return top + max(1, len(lanes)) * _LANE


def _span(graph: WordGraph, number: int, duration: float) -> tuple[float, float]:
    """The span in which a word is drawn: up to the next word, within limits that depend on its length."""
    word = graph.words[number]
    return word.start, max(min(word.end, duration, word.start + 0.2 + 0.1 * len(word.text)), word.start + 0.1)
