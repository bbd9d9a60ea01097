"""Where a call of a recognizer spends its time on a GPU: stages, kernels, launches and waits, functions of the host.

`scripts/gpu_check`'s check `profile` and `python -m scripts.benchmarks.gpu_speech --profile` print it. The same
recordings are recognized once for each of the three instruments, because an instrument makes the others' times longer.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from asr.recognizer import Recognizer
from asr.results import StageTimes

# As CUPTI calls what the host asks of the driver: kernels and graphs of all kinds, and what blocks the host. A copy to
# pageable memory blocks, too, but ends in one of these.
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
_MOST_KERNELS, _MOST_FUNCTIONS = 40, 30


def where_time_goes(recognizer: Recognizer, recordings: Sequence[Tensor], is_simulated: bool = False) -> dict[str, Any]:
    """Profiles a call; compile and make room before.

    Args:
        recognizer: on the device.
        recordings: recognized three times, so that language models know their word histories from the second time on.
        is_simulated: a simulated device has no times of its own; what runs on the host takes their place.

    Returns:
        JSON values: seconds, stages, launches and waits per frame of the longest recording and per recording, kernels
        and operations by milliseconds, and functions of the host by seconds.
    """
    begin = time.perf_counter()
    times = StageTimes()
    for result in recognizer(list(recordings)):
        times.add(result.times)
    found: dict[str, Any] = {
        "seconds": round(time.perf_counter() - begin, 4),
        "stages": {stage: round(spent, 4) for stage, spent in times.stages.items()},
        "host_functions": host_functions(recognizer, recordings),
    }
    calls, kernels = _by_kernel(recognizer, recordings, is_simulated)
    step: Any = recognizer.features.frame_shift * recognizer.acoustic_model.subsampling_factor  # type: ignore[operator]
    num_frames = max(map(len, recordings)) / float(step)
    return {**found, **launches_and_waits(calls, num_frames, len(recordings)), "kernels": kernels}


def host_functions(recognizer: Recognizer, recordings: Sequence[Tensor]) -> dict[str, Any]:
    """The functions in which the calling thread spends most of its time, waits for the device among them."""
    profiler = cProfile.Profile()
    profiler.runcall(recognizer, list(recordings))
    rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    longest = sorted(rows, key=lambda row: -row[1][2])[:_MOST_FUNCTIONS]
    return {
        f"{'/'.join(file.split('/')[-2:])}:{line} {name}": {
            "s": round(own, 4),
            "with_callees_s": round(total, 4),
            "n": num,
        }
        for (file, line, name), (_, num, own, total, _) in longest
    }


def _by_kernel(
    recognizer: Recognizer, recordings: Sequence[Tensor], is_simulated: bool
) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
    """The number of calls of everything that the profiler sees, and milliseconds and calls of the longest kernels."""
    on_host = is_simulated or recognizer.device.type == "cpu"
    own = "cpu" if on_host else "device"
    activities = [ProfilerActivity.CPU, *([] if on_host else [ProfilerActivity.CUDA])]
    with torch.profiler.profile(activities=activities) as profiler:
        recognizer(list(recordings))  # ends when all its work has ended
    calls: dict[str, int] = {}
    found: dict[str, dict[str, float]] = {}
    for event in profiler.key_averages():
        calls[event.key] = event.count
        # Newer releases speak of devices in general.
        spent = getattr(event, f"self_{own}_time_total", None)
        spent = getattr(event, "self_cuda_time_total", 0.0) if spent is None else spent
        if spent > 0:
            found[event.key[:80]] = {"ms": round(spent / 1e3, 3), "launches": event.count}
    longest = sorted(found, key=lambda name: -found[name]["ms"])
    return calls, {name: found[name] for name in longest[:_MOST_KERNELS]}


def launches_and_waits(calls: Mapping[str, int], num_frames: float, num_recordings: int) -> dict[str, Any]:
    """How often the host launches and waits in a frame and for a recording, from how often each function was called."""
    found: dict[str, Any] = {}
    for kind, names in (("launches", _LAUNCHES), ("waits", _WAITS)):
        num = sum(num for name, num in calls.items() if name.startswith(names))
        found |= {
            f"{kind}_per_frame": round(num / num_frames, 3),
            f"{kind}_per_recording": round(num / num_recordings, 2),
        }
    return found
