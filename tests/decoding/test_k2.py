"""k2's pass against the torch pass and against all paths written out; skipped where there is no k2."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.exhaustive_search import exhaustive_search
from tests.reference.lattice_paths import all_sentences
from tests.reference.table_lm import TableLM

pytest.importorskip("k2")
from asr.decoding.k2 import K2Decoder
from asr.decoding.k2_online import K2StreamingDecoder

WIDE: dict[str, Any] = {
    "search_beam": math.inf,
    "output_beam": math.inf,
    "context_beam": None,
    "min_active_states": 0,
    "max_active_states": 10**6,
}
SCALES = {"am_scale": 0.7, "graph_scale": 1.3, "lm_scale": 0.6, "word_insertion_penalty": -0.4}


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), with_lm=st.booleans())
def test_equals_exhaustive_search_and_the_torch_pass(seed: int, with_lm: bool) -> None:
    graph = random_graph(seed)
    log_prob = random_log_prob(seed, 4, 5)
    num_frames = torch.tensor([3, 5, 0, 4])
    lm = TableLM(graph.vocabulary, seed) if with_lm else None
    options = DecodingOptions(**WIDE, **SCALES)
    results = K2Decoder(graph, options).decode(log_prob, num_frames, lm)
    others = TokenPassingDecoder(graph, options).decode(log_prob, num_frames, lm)
    for utt_idx, (result, other) in enumerate(zip(results, others, strict=True)):
        expected = exhaustive_search(graph, log_prob[utt_idx, : num_frames[utt_idx]], lm, **SCALES)
        assert result.reached_final == other.reached_final == bool(expected)
        assert result.best is not None and other.best is not None
        assert result.best.word_ids == other.best.word_ids
        for name in ("am_score", "graph_score", "lm_score", "total"):
            assert getattr(result.best, name) == pytest.approx(getattr(other.best, name), abs=1e-3), name
        if expected:
            assert result.best.total == pytest.approx(expected[0].total, abs=1e-4)
            assert result.best.word_ids == expected[0].words


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), with_lm=st.booleans())
def test_lattices_of_both_passes_hold_the_same_sentences(seed: int, with_lm: bool) -> None:
    graph = random_graph(seed)
    log_prob = random_log_prob(seed, 3, 5)
    num_frames = torch.tensor([5, 3, 4])
    lm = TableLM(graph.vocabulary, seed) if with_lm else None
    options = DecodingOptions(**{**WIDE, "output_beam": 1e4}, **SCALES)
    results = K2Decoder(graph, options, keep_lattice=True).decode(log_prob, num_frames, lm)
    others = TokenPassingDecoder(graph, options, keep_lattice=True).decode(log_prob, num_frames, lm)
    for result, other in zip(results, others, strict=True):
        assert (result.lattice is None) == (other.lattice is None)
        if result.lattice is not None and other.lattice is not None:
            sentences, others_sentences = (all_sentences(part, options) for part in (result.lattice, other.lattice))
            assert sentences.keys() == others_sentences.keys()
            assert sentences == pytest.approx(others_sentences, abs=1e-4)


def test_lattices_are_pruned_by_the_output_beam_over_the_whole_utterance() -> None:
    # Two ways from the first frame to the last, which never meet.
    graph = replace(
        random_graph(0, num_states=3, num_arcs=4, num_tokens=2, max_words=0),
        arc_begin=torch.tensor([0, 2, 3, 4]),
        dst_state=torch.tensor([1, 2, 1, 2], dtype=torch.int32),
        token_id=torch.zeros(4, dtype=torch.int32),
        score=torch.tensor([0.0, -10.0, 0.0, 0.0]),
        final_score=torch.tensor([-math.inf, 0.0, 0.0]),
    )
    log_prob, num_frames = torch.zeros(3, 100, 2), torch.tensor([60, 0, 100])
    for output_beam, num_ways in ((3.0, 1), (12.0, 2)):
        options = DecodingOptions(search_beam=20.0, output_beam=output_beam, min_active_states=0)
        results = K2Decoder(graph, options, keep_lattice=True, inputs="scores").decode(log_prob, num_frames)
        lattices = [result.lattice for result in results if result.lattice is not None]
        assert [lattice.num_arcs for lattice in lattices] == [60 * num_ways, 100 * num_ways]


@pytest.mark.parametrize(("least", "most"), [(30, 30), (1, 1), (0, 2**31), (2**63 - 1, 2**63 - 1)])
def test_all_limits_on_states_that_options_allow(least: int, most: int) -> None:
    graph, log_prob = random_graph(0), random_log_prob(0, 1, 4)
    options = DecodingOptions(min_active_states=least, max_active_states=most)
    whole = K2Decoder(graph, options).decode(log_prob)[0]
    assert whole.best is not None
    decoder = K2StreamingDecoder(graph, options)
    decoder.advance(decoder.start(), log_prob, torch.tensor([4]))
    assert decoder.finalize(0).best == whole.best


def test_no_final_state_is_an_outcome() -> None:
    graph = random_graph(0)
    graph.final_score[:-1] = -math.inf
    graph.dst_state[graph.dst_state == graph.num_states - 1] = 0
    result = K2Decoder(graph).decode(random_log_prob(0, 1, 4), torch.tensor([4]))[0]
    assert not result.reached_final and result.lattice is None
    assert result.best is not None
    assert K2Decoder(graph).decode(torch.full((1, 3, 4), -math.inf), torch.tensor([3]))[0].hypotheses == ()


def test_a_graph_with_input_epsilons_is_refused() -> None:
    with pytest.raises(AsrError, match="use the decoder token-passing"):
        K2Decoder(random_graph(0, epsilons=True))
