"""The checks of `scripts/gpu_check`, one a process: `python -m scripts.benchmarks.gpu_tasks [--simulate] NAME`.

Each prints a JSON object as its last line, with `wrong` in it where something disagrees. With --simulate the device is
simulated, the bundle is a tiny one, and everything is small: the numbers mean nothing then.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple


class Bench(NamedTuple):
    """What checks work on: the device, a bundle's folder, recordings, and whether the device is simulated."""

    device: Any
    folder: Path
    waveforms: list[Any]
    is_simulated: bool


def environment(bench: Bench) -> dict[str, Any]:
    """Versions, driver and clocks, and what copies and matrix products reach at most."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    found["device"] = torch.cuda.get_device_name(bench.device)
    if shutil.which("nvidia-smi") and not bench.is_simulated:
        fields = "name,driver_version,clocks.sm,clocks.mem,memory.total,power.limit"
        asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        found["nvidia_smi"] = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    size = 64 if bench.is_simulated else 8192
    left = torch.ones(size, size, device=bench.device)
    for name, work, amount in (
        ("copy_gb_per_s", left.clone, 2 * 4 * size**2),
        ("float32_gflop_per_s", lambda: left @ left, 2 * size**3),
        ("bfloat16_gflop_per_s", lambda: left.bfloat16() @ left.bfloat16(), 2 * size**3),
    ):
        work()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        found[name] = round(5 * amount / (time.perf_counter() - begin) / 1e9, 1)
    return found


def kernels(bench: Bench) -> dict[str, Any]:
    """Every kernel and form of the search against plain torch on the same device, five times."""
    from scripts.benchmarks.gpu_agreement import NotHere, search_checks

    sizes, found = ((2, 3) if bench.is_simulated else (32, 100)), {}
    for turn in range(1 if bench.is_simulated else 5):
        for name, compare in search_checks(bench.folder, bench.device, *sizes):
            try:
                found[name] = compare()
            except NotHere as error:
                found[name] = f"not here: {error}"
            except AssertionError as error:
                raise AssertionError(f"{name}, turn {turn}: {error}") from error
    return found


def acoustic_model(bench: Bench) -> dict[str, Any]:
    """Features and acoustic model against a CPU."""
    import torch

    from scripts.benchmarks.gpu import compare_log_prob

    return {"agrees": compare_log_prob(bench.folder, bench.waveforms, torch.device("cpu"), bench.device)}


def recognition(bench: Bench) -> dict[str, Any]:
    """Words and totals of each mode against a CPU."""
    import torch

    from asr.bundle import Bundle
    from asr.decoding.build import available_modes
    from scripts.benchmarks.gpu import compare_modes

    modes = available_modes(Bundle.load(bench.folder))
    cases = [(mode, fusion) for mode in modes for fusion in ("torch", "torch-search")][
        : 1 if bench.is_simulated else None
    ]
    cpu = torch.device("cpu")
    return {
        f"{mode}, {fusion}": compare_modes(bench.folder, mode, fusion, bench.waveforms, cpu, bench.device)
        for mode, fusion in cases
    }


def workers(bench: Bench) -> dict[str, Any]:
    """Batches one after the other, and several at a time."""
    from scripts.benchmarks.gpu import compare_workers

    return {
        "agrees": compare_workers(
            bench.folder, "ngram" if bench.is_simulated else "auto", bench.waveforms, bench.device
        )
    }


def distinct(waveforms: Sequence[Any], number: int, seed: int) -> list[Any]:
    """Recordings that have not been heard before: two halves of some, one behind the other, at chance places."""
    import random

    import torch

    chance, made = random.Random(seed), []
    for _ in range(number):
        halves = []
        for waveform in chance.choices(waveforms, k=2):
            begin = chance.randrange(max(1, len(waveform) // 2))
            halves.append(waveform[begin : begin + max(400, len(waveform) // 2)])
        made.append(torch.cat(halves))
    return made


def speed(mode: str, lm_fusion: str) -> Callable[[Bench], dict[str, Any]]:
    """A check of how fast a mode is end to end, with recordings that are new to the engine, and heard before."""

    def measured(bench: Bench) -> dict[str, Any]:
        import torch

        from asr.recognizer import Recognizer, ResourceOptions

        found: dict[str, Any] = {}
        for batch in (1,) if bench.is_simulated else (1, 32, 128, 256, 512):
            recognizer = Recognizer.from_folder(
                bench.folder,
                mode=mode,
                decoder="token-passing",
                lm_fusion=lm_fusion,
                resources=ResourceOptions(batch_seconds=1e9),
            ).to(bench.device)
            # Compiles kernels and makes room; the recordings that follow are others.
            recognizer(distinct(bench.waveforms, batch, 1))
            recordings = distinct(bench.waveforms, batch, 2)
            seconds = sum(map(len, recordings)) / recognizer.sampling_rate
            for name in ("new", "again"):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                recognizer(recordings)
                torch.cuda.synchronize()
                found[f"times_real_time_{name}_{batch}"] = round(seconds / (time.perf_counter() - begin), 1)
            if not bench.is_simulated:
                found[f"peak_gb_{batch}"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                torch.cuda.reset_peak_memory_stats()
            # What is measured so far stays in the log if a larger batch does not end.
            print(json.dumps(found), flush=True)
        return found

    return measured


def queries(bench: Bench) -> dict[str, Any]:
    """Scores of a GRU with 256 units a second."""
    from scripts.benchmarks.gpu_speed import queries as rates

    return rates(bench.device, [3] if bench.is_simulated else [3, 32, 256])


def placements(bench: Bench) -> dict[str, Any]:
    """Hidden and output layer on either side."""
    from scripts.benchmarks.gpu_speed import placements_agree

    return {"agrees": placements_agree(bench.device)}


def training(bench: Bench) -> dict[str, Any]:
    """Steps of the language model's training, forward and backward."""
    from scripts.benchmarks.gpu_speed import training as steps

    if bench.is_simulated:
        return {"not_here": "a simulated device has no gradients"}
    return steps(bench.device, 33_000, 256, 50)


def sanitizer(bench: Bench) -> dict[str, Any]:
    """compute-sanitizer over the kernels on a small scale, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or bench.is_simulated:
        return {"not_here": "compute-sanitizer is not installed" if tool is None else "the device is simulated"}
    command = [tool, "--tool", "racecheck", sys.executable, "-m", "scripts.benchmarks.gpu_tasks", "acoustic_model"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stdout.splitlines() or [""])[-1]
    return {"summary": last} if done.returncode == 0 else {"wrong": last, "code": done.returncode}


TASKS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "environment": environment,
    "kernels": kernels,
    "acoustic_model": acoustic_model,
    "recognition": recognition,
    "workers": workers,
    "speed_ngram": speed("ngram", "lattice"),
    "speed_default": speed("auto", "lattice"),
    "speed_one_pass": speed("rnn", "search"),
    "queries": queries,
    "placements": placements,
    "training": training,
    "sanitizer": sanitizer,
}


def main(arguments: Sequence[str]) -> int:
    """Runs the check that is named last."""
    name, is_simulated = arguments[-1], "--simulate" in arguments
    if is_simulated:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    with ExitStack() as stack:
        bench = _bench(stack, is_simulated)
        try:
            found = TASKS[name](bench)
        except AssertionError as error:
            found = {"wrong": str(error)}
    print(json.dumps(found))
    return 0


def _bench(stack: ExitStack, is_simulated: bool) -> Bench:
    import torch

    if not is_simulated:
        from scripts.benchmarks.gpu import demo_waveforms
        from scripts.benchmarks.inputs import AN4_BUNDLE

        return Bench(torch.device("cuda"), AN4_BUNDLE, demo_waveforms(16000), False)
    from asr.testing.simulated_gpu import simulated_gpu
    from asr.testing.tones import tiny_bundle, tones

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    tiny_bundle(folder).save(folder / "tones", half_precision=False)
    stack.enter_context(simulated_gpu())
    return Bench(torch.device("cuda"), folder / "tones", [tones(["PAT"]), tones(["KIT"])], True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
