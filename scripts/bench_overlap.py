"""Acoustic model, first pass and rescoring one after the other, and with one to four workers at the same time.

    OMP_NUM_THREADS=1 python scripts/bench_overlap.py an4/wav/test --bundle an4 --every 2

Prints a line for each number of workers and first pass, and one JSON line at the end. The words must not depend on it.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch

from asr.cli.bundle_choice import bundle_folder
from asr.cli.transcription import audio_files
from asr.data.audio import read_audio
from asr.recognizer import Recognizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("audio", nargs="+", help="files or folders")
    parser.add_argument("--bundle", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--every", type=int, default=1, help="take every n-th file")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--first-pass", nargs="+", default=["torch", "k2"])
    parser.add_argument("--batch-seconds", type=float, default=15.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    waveforms = [read_audio(path) for path in audio_files(args.audio)[:: args.every]]
    seconds = sum(map(len, waveforms)) / 16000
    print(f"{len(waveforms)} recordings, {seconds:.0f} s; {len(os.sched_getaffinity(0))} processors, 1 thread each")
    summary: dict[str, object] = {"audio_seconds": round(seconds, 1)}
    for name in args.first_pass:
        expected: list[str] | None = None
        alone = 0.0
        for num_workers in args.workers:
            recognizer = Recognizer.from_folder(
                bundle_folder(args.bundle), first_pass=name, num_workers=num_workers, batch_seconds=args.batch_seconds
            )
            recognizer(waveforms[:2])
            begin, begin_cpu = time.perf_counter(), time.process_time()
            results = recognizer(waveforms)
            took, took_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
            words = [result.text for result in results]
            expected, alone = (words, took) if expected is None else (expected, alone)
            print(
                f"{name:5} {num_workers} workers: {took:6.2f} s ({took / seconds:.4f} of real time, {alone / took:.2f} "
                f"times as fast), {took_cpu:6.2f} s of processors; same words: {words == expected}",
                flush=True,
            )
            summary[f"{name}_{num_workers}_workers_s"] = round(took, 2)
            summary[f"{name}_{num_workers}_workers_same"] = words == expected
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
