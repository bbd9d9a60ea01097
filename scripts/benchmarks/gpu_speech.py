"""Real speech on a GPU: word errors and speed, by where the language model acts and where it runs.

    python -m scripts.benchmarks.gpu_speech --bundle librispeech --corpora FOLDER [--modes ngram rnn] [--threads 1]
        [--profile]

Recognizes dev-clean-2, or the demo's clips if the corpora are missing, once in a single call and once recording by
recording. Before each measurement, the same recordings are recognized backwards: that compiles and makes room, but the
language model sees few of the word histories that follow. Each row of results is printed as a line of JSON.

With --profile, a row says instead where a single call spends its time (`scripts.benchmarks.gpu_profile`), for the first
way to run each mode on the first device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.audio.io import read_audio
from asr.bundle import Bundle, bundle_folder
from asr.decoding.settings import ResourceOptions
from asr.metrics import NO_ERRORS, count_errors
from asr.recognizer import Recognizer
from asr.results import StageTimes
from scripts.benchmarks.gpu_profile import where_time_goes
from scripts.benchmarks.inputs import default_corpora
from scripts.benchmarks.speech import Recording, evenly, recordings


class System(NamedTuple):
    """What is measured: mode and fusion, the language model's device, workers, and seconds of audio in a batch."""

    mode: str
    lm_fusion: str = "lattice"
    lm_device: str | None = None
    num_workers: int = 0
    batch_seconds: float | None = None

    def recognizer(self, bundle: Bundle, device: str) -> Recognizer:
        """The recognizer on a device."""
        resources = ResourceOptions(
            num_workers=self.num_workers, batch_seconds=self.batch_seconds, lm_output_device=self.lm_device
        )
        choices: dict[str, Any] = {"decoder": "token-passing", "lm_fusion": self.lm_fusion, "resources": resources}
        return Recognizer(bundle, self.mode, **choices).to(device)


def systems(mode: str, device: str) -> Iterator[System]:
    """The ways to run a mode on a device."""
    if mode == "ngram":
        yield System(mode)
        return
    workers = min(16, os.cpu_count() or 1)
    yield System(mode, "lattice", "cpu")
    yield System(mode, "lattice", "cpu", workers // 2, 200.0)
    yield System(mode, "lattice", "cpu", workers, 100.0)
    if device != "cpu":
        yield System(mode, "lattice", device)
        yield System(mode, "search", device)
    yield System(mode, "search", "cpu")


def measured(recognizer: Recognizer, speech: Sequence[Recording], waveforms: Sequence[Tensor]) -> dict[str, Any]:
    """Word errors and speed, all recordings in one call."""
    recognizer([waveform.flip(0) for waveform in waveforms])
    is_gpu = recognizer.device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    results = recognizer(list(waveforms))
    seconds = time.perf_counter() - begin
    counts, times = NO_ERRORS, StageTimes()
    for one, result in zip(speech, results, strict=True):
        times.add(result.times)
        counts += count_errors(one.words, [word.text for word in result.words])
    found: dict[str, Any] = {
        "wer": round(100 * counts.rate, 2),
        "times_real_time": round(sum(map(len, waveforms)) / recognizer.sampling_rate / seconds, 1),
        "seconds": round(seconds, 3),
        "stages": {stage: round(spent, 3) for stage, spent in times.stages.items()},
    }
    if is_gpu:
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def one_by_one(recognizer: Recognizer, waveforms: Sequence[Tensor]) -> dict[str, Any]:
    """Seconds that a recording takes alone, as a share of its length."""
    recognizer([waveforms[0].flip(0)])
    seconds = []
    for waveform in waveforms:
        begin = time.perf_counter()
        recognizer([waveform])
        seconds.append((time.perf_counter() - begin) * recognizer.sampling_rate / len(waveform))
    return {"alone_times_real_time": round(len(seconds) / sum(seconds), 1)}


def main(arguments: Sequence[str]) -> int:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="(default: %(default)s)")
    parser.add_argument("--modes", nargs="+", default=["ngram", "rnn"])
    parser.add_argument("--devices", nargs="+", default=["cuda", "cpu"])
    parser.add_argument("--recordings", type=int, help="how many; all if not given")
    parser.add_argument("--alone", type=int, default=16, help="how many are also recognized one by one")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, which share lattices (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead of errors and speed")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    bundle = Bundle.load(bundle_folder(args.bundle))
    name, speech = recordings(args.corpora, args.recordings)
    waveforms = [read_audio(one.path, bundle.sampling_rate) for one in speech]
    torch.set_grad_enabled(False)
    if args.profile:
        for mode in args.modes:
            system = next(systems(mode, args.devices[0]))
            recognizer = system.recognizer(bundle, args.devices[0])
            recognizer([waveform.flip(0) for waveform in waveforms])
            row = {"device": args.devices[0], "speech": name, **system._asdict()}
            print(json.dumps(row | where_time_goes(recognizer, waveforms)), flush=True)
        return 0
    for device in args.devices:
        for mode in args.modes:
            for system in systems(mode, device):
                row = {"device": device, "speech": name, **system._asdict()}
                recognizer = system.recognizer(bundle, device)
                row |= measured(recognizer, speech, waveforms)
                if not system.num_workers:
                    row |= one_by_one(recognizer, evenly(waveforms, args.alone))
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
