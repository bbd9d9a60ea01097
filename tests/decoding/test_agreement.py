"""The torch pass, k2's pass and kaldi-decoder find the same path with the same score on the same graph and frames."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding.backtrace import hypothesis_of_path
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from tests.decoding.random_graphs import random_graph, random_log_prob

pytest.importorskip("kaldi_decoder")
from asr.testing.kaldi_search import KaldiSearch

OPTIONS = DecodingOptions(search_beam=1e4, min_active_states=0, max_active_states=10**6)


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), epsilons=st.booleans())
def test_same_path_and_score(seed: int, epsilons: bool) -> None:
    graph = random_graph(seed, num_states=200, num_arcs=1000, num_tokens=10, num_words=50, epsilons=epsilons)
    log_prob = random_log_prob(seed, 2, 30, num_tokens=10)
    results = TokenPassingDecoder(graph, OPTIONS).decode(log_prob, torch.tensor([30, 20]))
    passes = [results]
    if not epsilons and importlib.util.find_spec("k2") is not None:
        from asr.decoding.k2 import K2Decoder

        passes.append(K2Decoder(graph, OPTIONS).decode(log_prob, torch.tensor([30, 20])))
    for utt_idx, num_frames in enumerate((30, 20)):
        found = KaldiSearch(graph).decode(log_prob[utt_idx, :num_frames])
        for one in (results[utt_idx] for results in passes):
            assert one.reached_final == (found is not None)
            if found is None:
                continue
            arc, total = found
            assert one.best is not None
            assert one.best.total == pytest.approx(total, abs=1e-3)
            assert one.best.word_ids == hypothesis_of_path(graph, OPTIONS, arc, total, 0.0, 0.0).word_ids
