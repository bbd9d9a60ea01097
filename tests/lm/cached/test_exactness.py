"""Exact mode equals the plain network run word by word, in any order, batching, with any duplicates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.errors import AsrError
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.interface import LanguageModel
from asr.testing.plain_lm import PlainLM
from asr.text.symbols import EOS_ID
from tests.reference.toy_network import ToyClassNetwork, ToyNetwork, ToyNormalizedNetwork

NETWORKS = [ToyNetwork, ToyNormalizedNetwork, ToyClassNetwork]
WORDS = st.lists(st.integers(3, 8), min_size=1, max_size=5)


def scores_by_level(
    engine: CachedRNNLM, hypotheses: list[list[int]], order: list[int], chunk: int
) -> list[list[float]]:
    """Each hypothesis' scores, asked position by position, hypotheses in the given order, `chunk` queries a call."""
    context = dict(zip(range(len(hypotheses)), engine.start(len(hypotheses)).tolist(), strict=True))
    scores: list[list[float]] = [[] for _ in hypotheses]
    for position in range(max(len(words) for words in hypotheses)):
        active = [i for i in order if position < len(hypotheses[i])]
        for begin in range(0, len(active), chunk):
            asked = active[begin : begin + chunk]
            log_prob, next_idx = engine.score(
                torch.tensor([context[i] for i in asked]), torch.tensor([hypotheses[i][position] for i in asked])
            )
            for i, score, node in zip(asked, log_prob.tolist(), next_idx.tolist(), strict=True):
                scores[i].append(score)
                context[i] = node
    for i, score in enumerate(engine.final(torch.tensor([context[i] for i in range(len(hypotheses))])).tolist()):
        scores[i].append(score)
    return scores


@pytest.mark.slow
@pytest.mark.parametrize(
    "network_class", [NETWORKS[0], *(pytest.param(own, marks=pytest.mark.slow) for own in NETWORKS[1:])]
)
@settings(max_examples=25, deadline=None)
@given(hypotheses=st.lists(WORDS, min_size=1, max_size=12), chunk=st.integers(1, 12), data=st.data())
def test_equals_the_plain_network(network_class, hypotheses, chunk, data):
    network = network_class()
    engine = CachedRNNLM(network)
    order = data.draw(st.permutations(range(len(hypotheses))))
    plain = PlainLM(network_class())
    for _ in range(2):  # the second time all is cached
        for words, scores in zip(hypotheses, scores_by_level(engine, hypotheses, order, chunk), strict=True):
            assert scores == pytest.approx(plain.log_probs([*words, EOS_ID]), abs=1e-5)


def test_satisfies_the_contract():
    assert isinstance(CachedRNNLM(ToyNetwork()), LanguageModel)


def test_equal_histories_get_equal_contexts_and_others_do_not():
    engine = CachedRNNLM(ToyNetwork())
    _, first = engine.score(engine.start(4), torch.tensor([5, 6, 5, 7]))
    assert first[0] == first[2]
    assert len(set(first.tolist())) == 3
    _, again = engine.score(engine.start(1), torch.tensor([6]))
    assert again[0] == first[1]


def test_hidden_layer_runs_once_a_history_and_only_when_asked_for_a_successor():
    network = ToyNetwork()
    engine = CachedRNNLM(network)
    _, context = engine.score(engine.start(50), torch.arange(50) % 20)
    assert network.num_rows == 1
    asked = context[:3].repeat(4)
    for _ in range(3):
        engine.score(asked, torch.arange(12) % 6)
    assert (network.num_rows, network.num_steps) == (4, 2)


def test_normalizers_are_computed_once_a_history_and_a_group():
    network = ToyClassNetwork()
    engine = CachedRNNLM(network)
    for word_id in range(3, 20):
        engine.score(engine.start(1), torch.tensor([word_id]))
    assert network.num_normalizers == 1
    assert network.num_group_normalizers == 5


def test_empty_batch():
    engine = CachedRNNLM(ToyNetwork())
    empty = torch.empty(0, dtype=torch.int64)
    log_prob, next_idx = engine.score(empty, empty)
    assert log_prob.shape == next_idx.shape == (0,)
    assert log_prob.dtype == torch.float32
    assert next_idx.dtype == torch.int64


@pytest.mark.parametrize(("context_idx", "word_id"), [(1, 24), (1, -1), (5000, 3), (-1, 3)])
def test_queries_out_of_range_are_refused_and_leave_no_trace(context_idx, word_id):
    engine = CachedRNNLM(ToyNetwork())
    with pytest.raises(AsrError, match="not one of the"):
        engine.score(torch.tensor([context_idx]), torch.tensor([word_id]))
    assert engine.trie.edges.count == 0
