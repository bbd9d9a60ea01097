"""Acoustic model, first pass and rescoring one after the other, and overlapped by one to four workers.

    scripts/bench overlap an4/wav/test --bundle an4 --every 2

Prints a line for each number of workers and first pass, and one JSON line at the end. The words must not depend on it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from asr.audio.io import read_audio
from asr.bundle import bundle_folder
from asr.cli.recordings import audio_files
from asr.decoding.build import OLD_FIRST_PASSES
from asr.decoding.settings import ResourceOptions
from asr.recognizer import Recognizer
from scripts.benchmarks.inputs import argument_parser


def _timed(recognizer: Recognizer, waveforms: list[Tensor]) -> tuple[float, float, list[str]]:
    """Seconds on the clock and of processors, and the words."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    results = recognizer(waveforms)
    return time.perf_counter() - begin, time.process_time() - begin_cpu, [result.text for result in results]


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("overlap", __doc__)
    parser.add_argument("audio", nargs="+", help="files or folders")
    parser.add_argument("--bundle", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--every", type=int, default=1, help="take every n-th file")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--first-pass", nargs="+", default=["torch", "torch-search", "k2"])
    parser.add_argument("--rounds", type=int, default=3, help="number of times that each is measured, in turn")
    parser.add_argument("--batch-seconds", type=float, default=15.0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    waveforms = [read_audio(path) for path in audio_files(args.audio)[:: args.every]]
    seconds = sum(map(len, waveforms)) / 16000
    print(f"{len(waveforms)} recordings, {seconds:.0f} s; {len(os.sched_getaffinity(0))} processors, 1 thread each")
    summary: dict[str, object] = {"audio_seconds": round(seconds, 1)}
    for name in args.first_pass:
        recognizers = [
            Recognizer.from_folder(
                bundle_folder(args.bundle),
                decoder=OLD_FIRST_PASSES[name][0],
                lm_fusion=OLD_FIRST_PASSES[name][1],
                resources=ResourceOptions(num_workers=number, batch_seconds=args.batch_seconds),
            )
            for number in args.workers
        ]
        for recognizer in recognizers:
            recognizer(waveforms[:2])
        rounds = [[_timed(recognizer, waveforms) for recognizer in recognizers] for _ in range(args.rounds)]
        # Others may be at work on the machine: the fastest round of each counts.
        best = [min(times, key=lambda one: one[0]) for times in zip(*rounds, strict=True)]
        for number, (took, took_cpu, words) in zip(args.workers, best, strict=True):
            is_same = words == best[0][2]
            print(
                f"{name:5} {number} workers: {took:6.2f} s ({took / seconds:.4f} of real time, {best[0][0] / took:.2f} "
                f"times as fast), {took_cpu:6.2f} s of processors; same words: {is_same}"
            )
            summary[f"{name}_{number}_workers_s"] = round(took, 2)
            summary[f"{name}_{number}_workers_same"] = is_same
    print(json.dumps(summary))
    return 0
