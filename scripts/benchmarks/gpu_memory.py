"""Memory that recognition needs on a GPU, counted on the simulated device: `python -m scripts.benchmarks.gpu_memory`.

Recordings made of halves of the demo's clips are searched concurrently, with lattices. The script counts the bytes of
all tensors on the device, in total and by the part of the program that allocated them. For each part, the peaks of its
files are added, although they may occur at different times. Work memory inside an operation and memory held by the
allocator are not counted.

Triton's interpreter would take hours for so many tokens. The search therefore runs in tensor operations, which give the
same tokens, backpointers and lattices. The buffers of the kernels are allocated at the size that they reach when a part
of the recordings is searched by kernels, scaled to the number of streams.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import partialmethod
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch

from asr.bundle import Bundle, bundle_folder
from asr.decoding.backend import SearchGraph
from asr.decoding.build import recognition_settings
from asr.decoding.gpu import cuda_graph, frame
from asr.decoding.gpu.frame import FrameLimits
from asr.decoding.lattice_records import lattice_margin
from asr.decoding.settings import ResourceOptions
from asr.recognizer import Recognizer
from asr.testing.simulated_gpu import simulated_gpu
from scripts.benchmarks.gpu_expected import clips
from scripts.benchmarks.gpu_tasks import distinct

_SHORT_SECONDS = 2.5
# The interpreter runs one program after the other: few large ones end sooner.
_BLOCK = 2048
_FRAMES_PER_CALL = 32
# Files by the part of the program, the first that fits.
_PARTS = (
    ("back-pointers", ("decoding/backtrace",)),
    ("lattices", ("decoding/lattice", "gpu/lattice", "gpu/losing_arcs")),
    ("graph", ("asr/graph/",)),
    ("tokens of a frame", ("asr/decoding/",)),
    ("samples to log-probabilities", ("asr/audio/", "asr/models/", "asr/pipeline", "asr/kernels/linear", "recognizer")),
)


def part_of(file: str) -> str:
    """The part of the program that a file belongs to."""
    return next((part for part, names in _PARTS if any(name in file for name in names)), "others")


def search_megabytes(bundle: Bundle, num_streams: int, seconds: float) -> dict[str, float]:
    """The peak of each part and of the total, in MB; the search runs in tensor operations."""
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(simulated_gpu())
        for module in ("asr.kernels.jit", "asr.decoding.selection"):
            stack.enter_context(mock.patch(f"{module}.triton_available", lambda device: False))
        # Compiling loops for the CPU runs a search of its own.
        stack.enter_context(mock.patch("asr.recognizer.needs_warm_up", lambda *_: False))
        _recognize(bundle, num_streams, seconds)
        most: Counter[str] = Counter()
        for file, num_bytes in device.streams.most_held.items():
            most[part_of(file)] += num_bytes
        return {part: _megabytes(num) for part, num in most.most_common()} | {
            "all together": _megabytes(device.streams.peak_bytes)
        }


def needed_per_stream(bundle: Bundle) -> dict[str, int]:
    """What a stream needs at most of each of the kernels' buffers, see `BufferSizes`."""
    needed: Counter[str] = Counter()
    ensure_capacity = cuda_graph._ensure_capacity

    def noted(sizes: Any, **numbers: int) -> Any:
        for name, number in numbers.items():
            needed[name] = max(needed[name], number)
        return ensure_capacity(sizes, **numbers)

    large = partialmethod(FrameLimits.__init__, block=_BLOCK)
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated_gpu())
        stack.enter_context(mock.patch.object(cuda_graph, "_ensure_capacity", noted))
        stack.enter_context(mock.patch.object(FrameLimits, "__init__", large))
        _recognize(bundle, 1, _SHORT_SECONDS)
    return dict(needed)


def buffer_megabytes(bundle: Bundle, num_streams: int, needed: dict[str, int]) -> float:
    """The kernels' buffers for this many streams, in MB."""
    options = recognition_settings(bundle, "ngram", {}).decoding
    room = 1 << (num_streams - 1).bit_length()
    sizes = cuda_graph.BufferSizes(room, _FRAMES_PER_CALL, len(bundle.graph.tokens), *(5 * (frame.FIRST_CAPACITY,)))
    numbers = {name: num_streams * number for name, number in needed.items()}
    sizes = cuda_graph._ensure_capacity(sizes, **numbers)
    with simulated_gpu() as device:
        cuda = torch.device("cuda", 0)
        arcs = SearchGraph(bundle.graph.to(cuda), options).emitting
        before = device.streams.bytes_held.total()
        buffers = cuda_graph.FrameBuffers(
            arcs, FrameLimits(options, False, cuda), sizes, False, lattice_margin(options)
        )
        held = device.streams.bytes_held.total() - before
        del buffers
    return _megabytes(held)


def _recognize(bundle: Bundle, num_streams: int, seconds: float) -> None:
    resources = ResourceOptions(batch_seconds=1e9, max_segment_seconds=seconds + 1.0)
    recognizer = Recognizer(bundle, "ngram", decoder="token-passing", keep_lattices=True, resources=resources)
    with torch.no_grad():
        recognizer.to("cuda")(distinct(clips(), num_streams, 1, int(seconds * recognizer.sampling_rate)))


def _megabytes(num_bytes: int) -> float:
    return round(num_bytes / 1e6, 3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a JSON object for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32], help="that are searched")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each stream")
    parser.add_argument("--buffers", type=int, nargs="*", default=[1, 32, 256], help="streams of the kernels' buffers")
    args = parser.parse_args(arguments)

    def bundle() -> Bundle:
        return Bundle.load(bundle_folder(args.bundle))

    if args.buffers:
        needed = needed_per_stream(bundle())
        print(json.dumps({"needed_per_stream": needed}), flush=True)
        for num_streams in args.buffers:
            told = {"streams": num_streams, "buffers_mb": buffer_megabytes(bundle(), num_streams, needed)}
            print(json.dumps(told), flush=True)
    for num_streams in args.streams:
        begin = time.process_time()
        found = search_megabytes(bundle(), num_streams, args.seconds)
        told = {"streams": num_streams, "seconds": args.seconds, "mb": found}
        print(json.dumps({**told, "processor_seconds": round(time.process_time() - begin)}), flush=True)


if __name__ == "__main__":
    main()
