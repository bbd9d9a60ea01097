"""Runs yandex/faster-rnnlm for `scripts/bench lm` and parses its output. Build it yourself:

    g++ -Ofast -march=native -funroll-loops -std=gnu++11 -D__STDC_FORMAT_MACROS -DEIGEN_DONT_PARALLELIZE -DNOCUDA \\
        -pthread -I.. -o rnnlm *.cc layers/*.cc -lrt          (in its folder faster-rnnlm, with Eigen's headers)

It trains on as many threads as it is given, without locks, and always scores on one.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.clock import processor_seconds

MAXENT = "--direct 4 --direct-order 4".split()


@dataclass(frozen=True)
class PeerTraining:
    """(seconds of training so far by the clock, of the processor, validation perplexity) after each epoch."""

    curve: list[tuple[float, float, float]]
    words_per_s: int
    words_per_cpu_s: int


def train(
    binary: Path,
    model: Path,
    options: list[str],
    train_text: Path,
    valid_text: Path,
    threads: int = 1,
    more: tuple[str, ...] = (),
) -> PeerTraining:
    """Trains until its own stopping rule; the validation in between is true (normalised), and not counted."""
    command = [str(binary), "--rnnlm", str(model), *options, *MAXENT, "--show-progress", "0", *more]
    command += ["--threads", str(threads), "--train", str(train_text), "--valid", str(valid_text)]
    curve: list[tuple[float, float, float]] = []
    seconds = cpu_seconds = before = 0.0
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            found = re.search(r"valid:\s+(\S+)  elapsed: ([\d.]+)(.)\+([\d.]+)", line)
            if found:
                now = processor_seconds(process.pid)
                unit = {"s": 1, "m": 60, "h": 3600}[found[3]]
                training, validation = unit * float(found[2]), unit * float(found[4])
                seconds += training
                # Validation runs on one thread. The clock, which counts no loading, bounds the first epoch's share.
                busy = threads * training + validation
                cpu_seconds += min(now - before, busy) * threads * training / max(1e-9, busy)
                curve.append((round(seconds, 2), round(cpu_seconds, 2), round(2 ** float(found[1]), 2)))
                before = now
    if process.returncode or not curve:
        raise SystemExit(f"{binary}: training failed")
    num_words = sum(len(line.split()) + 1 for line in train_text.open(encoding="utf-8"))
    num_words *= len(curve)
    return PeerTraining(curve, round(num_words / seconds), round(num_words / cpu_seconds))


@dataclass(frozen=True)
class PeerScoring:
    """Perplexity (of use where normalised, or for a tree) and seconds, those of loading the model aside."""

    perplexity: float
    processor_seconds: float
    clock_seconds: float


def score(binary: Path, model: Path, text: Path, *, normalised: bool) -> PeerScoring:
    """Scores a text."""
    seconds = []
    for part in (Path(os.devnull), text):
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [str(binary), "--rnnlm", str(model), "--test", str(part)]
        command += ["--nce-accurate-test", str(int(normalised))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        clock = time.monotonic() - begin
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, clock))
    entropy = re.search(r"Test entropy (\S+)", done.stderr)
    perplexity = 2 ** float(entropy[1]) if entropy else float("nan")
    return PeerScoring(perplexity, seconds[1][0] - seconds[0][0], seconds[1][1] - seconds[0][1])
