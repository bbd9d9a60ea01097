"""The memory of a search on a GPU, counted on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the buffers are those of Triton's kernels")

from asr.bundle import Bundle
from scripts.benchmarks.gpu_memory import buffer_megabytes, part_of, search_megabytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]


def test_parts_of_the_program() -> None:
    assert part_of("here/asr/decoding/backtrace.py") == "back-pointers"
    assert part_of("here/asr/decoding/lattice.py") == part_of("here/asr/decoding/gpu/lattice.py") == "lattices"
    assert part_of("here/asr/decoding/frame.py") == "tokens of a frame"
    assert part_of("here/asr/lm/cached/trie.py") == "others"


def test_more_streams_take_more(tiny_bundle_folder: Path) -> None:
    needed = {"arcs": 3000, "paths": 1000, "ended": 10, "records": 20_000, "losing": 5000}
    few, many = (buffer_megabytes(Bundle.load(tiny_bundle_folder), num, needed) for num in (4, 64))
    assert 8 * few < many < 32 * few
    short, long = (search_megabytes(Bundle.load(tiny_bundle_folder), 1, seconds) for seconds in (0.1, 0.4))
    assert short["back-pointers"] < long["back-pointers"]
    assert 0 < short["all together"] < long["all together"] <= sum(long.values()) - long["all together"]
