"""Lattices of searches on kernels, whole chunks at a time: those of plain torch, bit for bit."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
os.environ.setdefault("TRITON_INTERPRET", "1")

from asr.decoding.backend import Searchable, SearchGraph
from asr.decoding.backtrace import Backtrace, endings_of
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.frame import FrameSearch, TokenSearch, TorchFrameBackend
from asr.decoding.gpu.chunk_lm import TritonChunkSearchWithLM
from asr.decoding.gpu.cuda_graph import CudaGraphSearch, LmInside
from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend
from asr.decoding.lattice import Lattice
from asr.decoding.lattice_records import LatticeRecords, lattice_margin
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.lm.interface import LanguageModel
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.table_lm import TableLM

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
INFINITE = float("inf")
# search beam, output beam, limits, first capacity, frames before the host looks (None: each), with a language model
CASES: list[tuple[float, float, tuple[int, int], int, int | None, bool]] = [
    (6.0, 4.0, (3, 12), 16, 4, False),
    (INFINITE, 30.0, (0, 10**6), 512, 32, False),
    (0.3, INFINITE, (6, 7), 64, 3, False),
    (6.0, 4.0, (3, 12), 64, None, True),
    (0.3, INFINITE, (6, 7), 64, None, True),
    (6.0, 4.0, (3, 12), 16, 4, True),
    (0.3, INFINITE, (6, 7), 512, 32, True),
]


def made_search(
    searched: Searchable, options: DecodingOptions, lm: LanguageModel | None, capacity: int, frames_per_call: int | None
) -> ChunkBackend:
    limits = FrameLimits(options, lm is not None, CPU, block=64)
    if frames_per_call is None:
        assert lm is not None
        return TritonChunkSearchWithLM(searched, options, lm, TritonFrameBackend(searched, limits, capacity))
    margin, inside = lattice_margin(options), None if lm is None else LmInside(lm, options.lm_scale)
    return CudaGraphSearch(searched, limits, False, frames_per_call, capacity, margin, inside=inside)


@pytest.mark.parametrize(("beam", "output_beam", "limits", "capacity", "frames_per_call", "with_lm"), CASES)
def test_the_records_are_the_same(
    beam: float, output_beam: float, limits: tuple[int, int], capacity: int, frames_per_call: int | None, with_lm: bool
) -> None:
    graph = random_graph(4, num_states=12, num_arcs=60, final_prob=0.3)
    # Buffers hold the longest stream first.
    log_prob, num_frames = random_log_prob(4, 4, 6), torch.tensor([6, 6, 3, 0])
    log_prob[0, :, 1] = -torch.inf
    log_prob[1, 4] = -torch.inf
    options = DecodingOptions(
        search_beam=beam, output_beam=output_beam, min_active_states=limits[0], max_active_states=limits[1]
    )
    searched, found = SearchGraph(graph, options), []
    for with_kernels in (False, True):
        lm = TableLM(graph.vocabulary, 4, num_history_words=1) if with_lm else None
        backend: ChunkBackend = FrameSearch(searched, options, lm, TorchFrameBackend(searched, options, with_lm))
        if with_kernels:
            backend = made_search(searched, options, lm, capacity, frames_per_call)
        backtrace, records = Backtrace(CPU, collects=False), LatticeRecords(4, options)
        search = TokenSearch(searched, options, lm, backend, backtrace, records)
        search.advance(search.start(torch.zeros(4, dtype=torch.int64)), log_prob, num_frames)
        parts = records.collected(backtrace, endings_of(searched, options, lm, *search.all_active()))
        own = [getattr(parts, field.name) for field in fields(parts)]
        own += [torch.cat(columns) for columns in zip(*records._backpointers, strict=True)]
        losing = [torch.cat(columns) for columns in zip(*records._losing_arcs, strict=True)]
        # Kernels drop what is impossible before it can lose.
        found.append((own, [column[losing[3] < torch.inf] for column in losing]))
    (expected, expected_losing), (own, losing) = found
    assert len(losing[0]) > 0 and all(map(torch.equal, losing, expected_losing))
    assert all(map(torch.equal, own, expected))


@pytest.mark.parametrize(("with_lm", "frames_per_call"), [(False, 3), (True, None), (True, 3)])
def test_the_lattices_are_the_same(with_lm: bool, frames_per_call: int | None) -> None:
    graph = random_graph(7, num_states=12, num_arcs=50, final_prob=0.3)
    log_prob, num_frames = random_log_prob(7, 3, 5), torch.tensor([2, 5, 0])
    options = DecodingOptions(search_beam=4.0, output_beam=3.0, min_active_states=2, max_active_states=30)

    def made(searched: Searchable, own: DecodingOptions, lm: LanguageModel | None, keep_lattice: bool) -> ChunkBackend:
        assert keep_lattice
        return made_search(searched, own, lm, 64, frames_per_call)

    def decoded(backend: Any) -> list[tuple[Any, Lattice | None]]:
        lm = TableLM(graph.vocabulary, 7) if with_lm else None
        decoder = TokenPassingDecoder(graph, options, keep_lattice=True, backend=backend)
        return [(result.best, result.lattice) for result in decoder.decode(log_prob, num_frames, lm)]

    for (best, lattice), (expected_best, expected) in zip(decoded(made), decoded("torch"), strict=True):
        assert best == expected_best
        assert (lattice is None) == (expected is None)
        if lattice is not None and expected is not None:
            for field in fields(lattice):
                own: Tensor = getattr(lattice, field.name)
                assert torch.equal(own, getattr(expected, field.name)), field.name
