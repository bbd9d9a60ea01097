"""A day of audio in one process: what is held in memory as the hours pass, and whether the words stay the same.

    scripts/bench endurance --hours 24 --output curve.jsonl

Recordings of all corpora are used in turn, at another speed in each round, so that no two are the same. Every fortieth
goes into one live stream that never ends; the others are recognized in batches. After each hour of audio a line reports
what is held in memory, by class. Some recordings are then recognized again, and their words must not have changed.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.audio.io import read_audio
from asr.audio.resample import change_speed
from asr.bundle import bundle_folder
from asr.cli.recordings import audio_files
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.streaming import StreamingRecognizer
from scripts.benchmarks.inputs import argument_parser, default_corpora, required_corpora
from scripts.benchmarks.speech import evenly

_SPEEDS = (1.0, 0.95, 1.05, 0.9, 1.1, 0.925, 1.075, 0.975, 1.025)
_STREAMED = 40  # one of this many recordings goes into the stream, whose chunks cost more than batches
_PROBES = 10
_PARTS = ("librispeech", "an4", "ljspeech", "speechocean762")


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("endurance", __doc__)
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="folder of the corpora")
    parser.add_argument("--bundle", default="librispeech", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--hours", type=float, default=24.0, help="hours of audio (default: %(default)s)")
    parser.add_argument("--every", type=float, default=0.5, help="hours of audio between lines (default: %(default)s)")
    parser.add_argument("--cache-mb", type=int, default=128, help="size of the recurrent model's caches")
    parser.add_argument("--output", type=Path, help="file for the lines")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    paths = _recordings(required_corpora(args.corpora))
    resources = ResourceOptions(batch_seconds=60.0, cache_bytes=args.cache_mb << 20)
    recognizer = Recognizer.from_folder(bundle_folder(args.bundle), resources=resources)
    streams = StreamingRecognizer(recognizer)
    run = _Run(recognizer, streams, [read_audio(path, recognizer.sampling_rate) for path in evenly(paths, _PROBES)])
    lines = []
    for samples in _waveforms(paths, recognizer.sampling_rate):
        run.hear(samples)
        if run.hours < args.every * (len(lines) + 1):
            continue
        lines.append(run.line())
        print(json.dumps(lines[-1]), flush=True)
        if args.output is not None:
            with args.output.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
        if run.hours >= args.hours:
            break
    print(json.dumps(summary(lines)))
    return 0


def _recordings(corpora: Path) -> list[Path]:
    """All recordings, those of different corpora and speakers mixed."""
    found = audio_files([str(corpora / part) for part in _PARTS if (corpora / part).is_dir()])
    if not found:
        raise AsrError(f"{corpora}: there are no recordings here; name the folder of the corpora with --corpora.")
    step = next(step for step in (1009, 1013, 1019) if len(found) % step)
    return [found[position * step % len(found)] for position in range(len(found))]


def _waveforms(paths: Sequence[Path], sampling_rate: int) -> Iterator[Tensor]:
    for speed in _SPEEDS:
        for path in paths:
            yield change_speed(read_audio(path, sampling_rate), speed)
    raise AsrError("the recordings do not last as long as --hours, even at all speeds; give fewer hours.")


class _Run:
    """Recognizes recordings and counts."""

    def __init__(self, recognizer: Recognizer, streams: StreamingRecognizer, probes: list[Tensor]) -> None:
        self._recognizer = recognizer
        self._streams = streams
        self._stream = streams.open()
        self._probes = probes
        self._expected = self._texts()
        self._begin = time.monotonic()
        self._cpu_begin = time.process_time()
        self._waiting: list[Tensor] = []
        self._cache: dict[str, int | float] = {}
        self._samples = Counter[str]()
        self._num = Counter[str]()

    @property
    def hours(self) -> float:
        return sum(self._samples.values()) / self._recognizer.sampling_rate / 3600

    def hear(self, samples: Tensor) -> None:
        """Recognizes a recording in the stream at once, or in a batch of up to a minute."""
        is_streamed = sum(self._num[name] for name in ("recordings", "streamed")) % _STREAMED == 0
        name = "streamed" if is_streamed else "recordings"
        self._num[name] += 1
        self._samples[name] += len(samples)
        if is_streamed:
            for piece in samples.split(self._recognizer.sampling_rate // 5):
                self._streams.push(self._stream, piece)
                while self._streams.is_ready:
                    self._num["streamed_words"] += sum(
                        len(result.words) for result in self._streams.step() if result.is_final
                    )
            return
        self._waiting.append(samples)
        if sum(map(len, self._waiting)) >= 60 * self._recognizer.sampling_rate:
            for result in self._recognizer(self._waiting):
                self._num["words"] += len(result.words)
                self._cache = result.cache
            self._waiting = []

    def line(self) -> dict[str, Any]:
        """The memory held now, and how many probes have other words than at the beginning."""
        changed = sum(now != then for now, then in zip(self._texts(), self._expected, strict=True))
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        shown = ("num_contexts", "num_hidden_held", "bytes_held", "num_evictions", "num_evicted_contexts")
        return {
            "audio_hours": round(self.hours, 3),
            "wall_s": round(time.monotonic() - self._begin, 1),
            "cpu_s": round(time.process_time() - self._cpu_begin, 1),
            "resident_mb": round(pages * resource.getpagesize() / 1e6, 1),
            "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
            "python_objects": len(gc.get_objects()),
            "open_files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            **self._num,
            "words_changed": changed,
            "cache": {name: self._cache.get(name, 0) for name in shown},
            "held_mb": held_megabytes([self._recognizer, self._streams]),
        }

    def _texts(self) -> list[str]:
        return [result.text for result in self._recognizer(self._probes)]


def held_megabytes(roots: Sequence[Any]) -> dict[str, float]:
    """Megabytes of tensors and arrays that can be reached from these objects, by the class of ours that holds them."""
    held = Counter[str]()
    seen: set[int] = set()
    stored: set[int] = set()
    todo = [(root, type(root).__name__) for root in roots]
    while todo:
        value, owner = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage() if hasattr(value, "untyped_storage") else value.storage()
            if value.numel() and storage.data_ptr() not in stored:
                stored.add(storage.data_ptr())
                held[owner] += storage.nbytes()
        elif isinstance(value, np.ndarray):
            base = value
            while isinstance(base.base, np.ndarray):
                base = base.base
            if base.ctypes.data not in stored:
                stored.add(base.ctypes.data)
                held[owner] += base.nbytes
        elif isinstance(value, dict):
            todo += [(inner, owner) for inner in value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            todo += [(inner, owner) for inner in value]
        elif type(value).__module__.startswith(("asr.", "torch.nn.")):
            owner = type(value).__name__ if type(value).__module__.startswith("asr.") else owner
            todo += [(inner, owner) for inner in getattr(value, "__dict__", {}).values()]
            todo += [(getattr(value, slot), owner) for slot in getattr(value, "__slots__", ()) if hasattr(value, slot)]
    return {name: round(count / 1e6, 2) for name, count in sorted(held.items()) if count >= 5000}


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Growth from the second quarter of the time to the last, by medians, in megabytes an hour of audio."""
    quarter = max(1, len(lines) // 4)
    early, late = lines[quarter : 2 * quarter] or lines, lines[-quarter:]

    def growth(name: str) -> float | None:
        hours = statistics.median(line["audio_hours"] for line in late) - statistics.median(
            line["audio_hours"] for line in early
        )
        values = [statistics.median(line[name] for line in part) for part in (early, late)]
        return round((values[1] - values[0]) / hours, 3) if hours > 0 else None

    last = lines[-1]
    return {
        "audio_hours": last["audio_hours"],
        "recordings": last["recordings"] + last["streamed"],
        "streamed": last["streamed"],
        "real_time_factor": round(last["cpu_s"] / last["audio_hours"] / 3600, 4),
        "resident_mb": last["resident_mb"],
        "peak_mb": last["peak_mb"],
        "memory_growth_mb_per_hour": growth("resident_mb"),
        "python_objects_per_hour": growth("python_objects"),
        "open_files": last["open_files"],
        "num_evictions": last["cache"]["num_evictions"],
        "words_changed": max(line["words_changed"] for line in lines),
    }
