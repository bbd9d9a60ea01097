"""Kernels whose programs run interleaved give what plain torch gives, and broken kernels are noticed."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
os.environ.setdefault("TRITON_INTERPRET", "1")

from scripts.benchmarks.interleaving import interleaved_programs
from scripts.benchmarks.kernel_checks import (
    MUTANTS,
    Mutant,
    check_search,
    is_caught,
    shared_memory_checks,
)
from tests.decoding.random_graphs import random_graph

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_interleaved_programs_find_what_torch_finds(seed: int, block: int) -> None:
    with interleaved_programs(seed) as counts:
        for check in shared_memory_checks(seed, block):
            check()
    assert counts.switches > counts.programs > counts.launches > 0


@pytest.mark.parametrize("in_buffers", [False, True])
def test_an_interleaved_search_finds_what_torch_finds(in_buffers: bool) -> None:
    graph = random_graph(5, num_states=16, num_arcs=50)
    with interleaved_programs(5) as counts:
        check_search(graph, 5, 16, in_buffers)
    assert counts.switches > counts.programs


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_noticed(mutant: Mutant) -> None:
    assert is_caught(mutant, range(6), 4)
