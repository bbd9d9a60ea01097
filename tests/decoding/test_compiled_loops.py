"""On a CPU with numba, loops are compiled. The uncompiled ones give the same results, a hundred times more slowly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from asr.decoding.nbest import n_best
from asr.decoding.token_passing import TokenPassingDecoder
from asr.decoding.words import with_final_words
from asr.kernels.jit import jit
from tests.decoding.random_graphs import UNPRUNED, random_graph, random_log_prob
from tests.reference.table_lm import TableLM

pytest.importorskip("numba")
LOOPS = {
    "chunks": {"connect_chunk", "add_losses"},
    "lattice": {"order_by_source", "build_pruned", "spread_forward", "spread_backward"},
    "lattice_records": {"add_losses", "kept_within"},
    "nbest": {"best_sentences"},
    "mbr": {"score_lattice", "rows_of", "least_risk", "nearest_path", "sentence_posteriors"},
}
SEED = 4


@pytest.mark.slow
def test_each_loop_is_called_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, set[str]] = {name: set() for name in LOOPS}

    def noting(module: str) -> Callable[..., Any]:
        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            loop = jit(function)
            assert loop is not None

            def call(*arguments: Any) -> Any:
                called[module].add(function.__name__)
                return loop(*arguments)

            return call

        return compiled

    for module in LOOPS:
        monkeypatch.setattr(f"asr.decoding.{module}.jit", noting(module))
    options = replace(UNPRUNED, output_beam=8.0, mbr_scale=0.2, chunk_frames=3)
    graph, log_prob = random_graph(SEED, final_prob=1.0), random_log_prob(SEED, 1, 6)
    for lm_fusion in ("lattice", "chunks"):
        decoder = TokenPassingDecoder(graph, options, lm_fusion=lm_fusion, keep_lattice=True)
        (result,) = decoder.decode(log_prob, torch.tensor([6]), TableLM(graph.vocabulary, SEED))
    assert result.lattice is not None
    assert len(n_best(result.lattice, graph, options, 3)) == 3
    with_final_words(result, graph, options, None, 0.5)
    assert called == LOOPS
