"""numba's loops, Triton's kernels and the tensor form of a frame keep the same partial paths, bit for bit, in order.

The kernels run in Triton's interpreter here, one program after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from asr.decoding.backend import ActiveTokens, Frame, FrameBackend, Searchable, SearchGraph
from asr.decoding.backtrace import Backtrace
from asr.decoding.chunk_backend import SearchSink
from asr.decoding.frame import FrameSearch, SplitFrameBackend, TorchFrameBackend, follow_epsilons
from asr.decoding.lattice_records import LatticeRecords
from asr.decoding.selection import frame_backend
from asr.decoding.settings import DecodingOptions
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.table_lm import TableLM

CASES = {
    "seed": st.integers(0, 10**6),
    "with_lm": st.booleans(),
    "epsilons": st.booleans(),
    "keeps_lattice": st.booleans(),
    "beam": st.sampled_from([0.5, 3.0, 8.0, float("inf")]),
    "limits": st.sampled_from([(0, 5), (4, 6), (30, 40), (0, 10**6)]),
    "skip_beam": st.sampled_from([None, 1.0]),
    "max_contexts": st.sampled_from([None, 1, 2]),
    "many_arcs": st.booleans(),
}


# Paths worse than the beam found before the best one are enough in number, and better ones were left out.
_WORSE_FIRST = {
    "seed": 975,
    "with_lm": False,
    "epsilons": False,
    "keeps_lattice": True,
    "beam": 8.0,
    "limits": (30, 40),
}


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(**CASES)
@example(**_WORSE_FIRST, skip_beam=None, max_contexts=None, many_arcs=False)
def test_loops_keep_the_same_paths(**case: Any) -> None:
    pytest.importorskip("numba")
    _check_same_paths(functools.partial(frame_backend, name="numba"), **case)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(**CASES)
def test_kernels_keep_the_same_paths(**case: Any) -> None:
    pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
    from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend

    def small(graph: Searchable, options: DecodingOptions, has_lm: bool) -> FrameBackend:
        limits = FrameLimits(options, has_lm, torch.device("cpu"))
        frame = TritonFrameBackend(graph, limits, initial_capacity=64)
        if has_lm and options.max_contexts_per_state is not None:
            return SplitFrameBackend(frame, TorchFrameBackend(graph, options, True))
        return frame

    _check_same_paths(small, **case)


def _check_same_paths(
    make_backend: Callable[[Searchable, DecodingOptions, bool], FrameBackend],
    seed: int,
    with_lm: bool,
    epsilons: bool,
    keeps_lattice: bool,
    beam: float,
    limits: tuple[int, int],
    skip_beam: float | None,
    max_contexts: int | None,
    many_arcs: bool,
) -> None:
    if many_arcs:  # 100 for each state, of which sharp frames make few likely
        graph = random_graph(seed, num_states=8, num_arcs=800, num_tokens=60, epsilons=epsilons)
    else:
        graph = random_graph(seed, num_states=40, num_arcs=200, epsilons=epsilons)
    num_utts, num_frames = 3, 8
    log_prob = random_log_prob(seed, num_utts, num_frames, len(graph.tokens), sharpness=6.0 if many_arcs else 2.0)
    log_prob[0, :, 1] = -torch.inf
    options = DecodingOptions(
        search_beam=beam,
        output_beam=2.0,
        min_active_states=limits[0],
        max_active_states=limits[1],
        skip_beam=skip_beam,
        max_contexts_per_state=max_contexts,
    )
    searched = SearchGraph(graph, options)
    lm = TableLM(graph.vocabulary, seed, num_history_words=2) if with_lm else None
    outcomes = []
    for make in (TorchFrameBackend, make_backend):
        backtrace = Backtrace(graph.device, collects=False)
        records = LatticeRecords(num_utts, options) if keeps_lattice and not epsilons else None
        sink = SearchSink(backtrace, records, lambda parts: None)
        search = FrameSearch(searched, options, lm, make(searched, options, with_lm))
        start = torch.zeros(num_utts, dtype=torch.int64)
        tokens = ActiveTokens.initial(torch.arange(num_utts), start, start if lm is None else lm.start(num_utts))
        offset = torch.zeros(num_utts, dtype=torch.float64)
        tokens = follow_epsilons(tokens, offset, backtrace, searched, options, lm)
        frames = []
        for frame in range(num_frames):
            begin = (torch.arange(num_utts) * num_frames + frame) * log_prob.shape[2]
            tokens = search.advance(tokens, Frame(log_prob.flatten(), begin, offset), sink)
            frames.append((tokens, offset.clone()))
        kept = (
            []
            if records is None
            else [part for frame_losers in records._losing_arcs for part in _in_order(frame_losers)]
        )
        outcomes.append((frames, kept))
    for (tokens, offset), (other, other_offset) in zip(outcomes[0][0], outcomes[1][0], strict=True):
        assert torch.equal(offset, other_offset)
        for field in fields(tokens):
            assert torch.equal(getattr(tokens, field.name), getattr(other, field.name)), field.name
    for part, other_part in zip(outcomes[0][1], outcomes[1][1], strict=True):
        assert torch.equal(part, other_part)


def _in_order(losing_arcs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    src_record, _, arc, _ = losing_arcs
    order = torch.argsort(arc * 10**6 + src_record, stable=True)
    return [part[order] for part in losing_arcs]
