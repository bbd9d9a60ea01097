"""Chunks with a language model inside the search, on kernels: what plain torch finds, bit for bit."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
os.environ.setdefault("TRITON_INTERPRET", "1")

from asr.decoding.backend import SearchGraph
from asr.decoding.backtrace import Backtrace
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.frame import FrameSearch, TokenSearch, TorchFrameBackend
from asr.decoding.gpu.chunk_lm import TritonChunkSearchWithLM
from asr.decoding.gpu.cuda_graph import CudaGraphSearch, LmInside
from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend
from asr.decoding.settings import DecodingOptions
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.table_lm import TableLM

pytestmark = pytest.mark.slow


class WithoutMuchRoom(TableLM):
    """Reserves so many times."""

    times = 1

    def reserve(self, num_queries: int) -> tuple[Tensor, ...] | None:
        self.times -= 1
        return () if self.times >= 0 else None


# How often calls are reserved before the search goes on frame by frame.
@pytest.mark.parametrize("times", [0, 1, 2, 100])
@pytest.mark.parametrize(
    ("seed", "beam", "limits", "collects"),
    [(1, 3.0, (0, 10**6), False), (2, 4.0, (2, 12), True), (3, 0.3, (2**63 - 1, 2**63 - 1), False)],
)
def test_chunks_find_the_same(
    seed: int,
    beam: float,
    limits: tuple[int, int],
    collects: bool,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = random_graph(seed, num_states=8, num_arcs=24)
    log_prob, num_frames = random_log_prob(seed, 4, 9), torch.tensor([9, 0, 8, 3])
    log_prob[0, 6] = -torch.inf  # nothing survives
    options = DecodingOptions(search_beam=beam, min_active_states=limits[0], max_active_states=limits[1])
    searched = SearchGraph(graph, options)
    if collects:
        monkeypatch.setattr("asr.decoding.gpu.chunk_lm.FRAMES_BETWEEN_COLLECTIONS", 2)
    outcomes = []
    for with_kernels in (False, True):
        lm = WithoutMuchRoom(graph.vocabulary, seed, num_history_words=2)
        lm.times = times
        backend: ChunkBackend = FrameSearch(searched, options, lm, TorchFrameBackend(searched, options, True))
        if with_kernels:
            own = FrameLimits(options, True, torch.device("cpu"), block=64)
            frame_by_frame = TritonChunkSearchWithLM(searched, options, lm, TritonFrameBackend(searched, own, 16))
            inside = LmInside(lm, options.lm_scale, frame_by_frame)
            # Frames that are repeated in larger buffers are reserved again.
            capacity = 16 if times == 100 else 512
            backend = CudaGraphSearch(searched, own, False, 2, capacity, inside=inside)
        backtrace = Backtrace(graph.device, collects, first_collection=16)
        search = TokenSearch(searched, options, lm, backend, backtrace)
        stream = search.start(torch.zeros(4, dtype=torch.int64))
        search.advance(stream, log_prob[:, :2], num_frames.clamp(max=2))
        search.advance(stream, log_prob[:, 2:], (num_frames - 2).clamp(min=0))
        tokens, offset = search.all_active()
        histories = [lm.history_of(context_idx) for context_idx in tokens.context_idx.tolist()]
        outcomes.append((tokens, offset, backtrace.paths(tokens.backpointer), histories))
    (tokens, offset, paths, histories), (other, other_offset, other_paths, other_histories) = outcomes
    assert torch.equal(offset, other_offset)
    assert histories == other_histories
    for field in fields(tokens):
        # Where back-pointers are collected, they are so at other frames, and numbered otherwise. Calls of a fixed size
        # have queries of their own, so that contexts are numbered otherwise, too.
        if field.name != "context_idx" and (field.name != "backpointer" or not collects):
            assert torch.equal(getattr(tokens, field.name), getattr(other, field.name)), field.name
    assert all(map(torch.equal, paths, other_paths))
