"""A frame that cannot be captured leaves nothing behind, whatever the failure is called."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
os.environ.setdefault("TRITON_INTERPRET", "1")

from asr.decoding.gpu import kernels
from asr.decoding.gpu.cuda_graph import BufferSizes, FrameBuffers, FrameReplay
from asr.decoding.gpu.frame import FrameLimits
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import SearchGraph
from asr.testing.simulated_gpu import simulated_gpu
from tests.decoding.random_graphs import random_graph

pytestmark = pytest.mark.slow


def test_tables_are_clean_after_a_failure() -> None:
    def dirty(owner: torch.Tensor, histogram: torch.Tensor) -> Any:
        class Kernel:
            def __getitem__(self, grid: Any) -> Any:
                return self

            def __call__(self, *_: Any, **__: Any) -> None:
                owner[0] = 5
                histogram[0, 0, 3] = 7
                raise OSError("no driver")

        return Kernel()

    with simulated_gpu():
        cuda, options = torch.device("cuda", 0), DecodingOptions()
        graph = SearchGraph(random_graph(1, num_states=8, num_arcs=24).to(cuda), options)
        sizes = BufferSizes(streams=1, frames=2, columns=4, paths=64, ended=64, arcs=64, records=64, losing=64)
        buffers = FrameBuffers(graph.emitting, FrameLimits(options, False, cuda, block=64), sizes, False)
        buffers.counts += 1
        owner, histogram = buffers._recombined._owner, buffers._recombined._cut_off._histogram
        with mock.patch.object(kernels, "clear", dirty(owner, histogram)), pytest.warns(UserWarning, match="no driver"):
            FrameReplay(buffers, capture=True)
        assert set(owner.tolist()) == {kernels.EMPTY.value}
        assert set(buffers.counts.tolist()) == set(histogram.flatten().tolist()) == {0}
