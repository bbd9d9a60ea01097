"""Counts start at 0, add up and give ratios; stages take time."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
import torch

from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.cached.states import QueryStatistics
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import EOS_ID, Vocabulary
from tests.reference.toy_network import ToyClassNetwork


def test_nothing_is_counted_before_the_first_query() -> None:
    found = QueryStatistics().as_dict()
    # Of no queries, none needed a new score or the hidden layer.
    assert {name for name, value in found.items() if value} == {"hit_ratio", "answered_without_hidden"}
    assert found["hit_ratio"] == found["answered_without_hidden"] == 1.0


def test_ratios_are_of_queries_runs_contexts_and_seconds() -> None:
    found = QueryStatistics(
        num_queries=40, num_edge_hits=10, num_edges=8, num_hidden_rows=6, num_hidden_calls=4, num_contexts=5,
        bytes_held=1000, seconds_total=0.5,
    ).as_dict()  # fmt: skip
    expected = {
        "edge_hit_ratio": 0.25, "hit_ratio": 0.8, "answered_without_hidden": 0.85, "mean_hidden_batch": 1.5,
        "bytes_per_context": 200.0, "queries_per_s": 80.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_ratios_of_one() -> None:
    names = "num_queries", "num_edge_hits", "num_edges", "num_hidden_rows", "num_hidden_calls", "num_contexts"
    found = QueryStatistics(**dict.fromkeys(names, 1), bytes_held=7)
    assert (found.edge_hit_ratio, found.mean_hidden_batch, found.bytes_per_context) == (1.0, 1.0, 7.0)
    assert (found.hit_ratio, found.answered_without_hidden) == (0.0, 0.0)


def test_counts_of_two_engines_add_up_and_the_largest_batch_is_the_larger() -> None:
    names = [field.name for field in fields(QueryStatistics)]
    one = QueryStatistics(**{name: position for position, name in enumerate(names)})
    other = QueryStatistics(**dict.fromkeys(names, 3))
    for total in (one + other, other + one):
        found = [getattr(total, name) for name in names]
        expected = [position + 3 for position in range(len(names))]
        expected[names.index("largest_hidden_batch")] = names.index("largest_hidden_batch")
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_stages_take_time_and_no_more_than_the_whole(compiled: bool) -> None:
    """Each query finds, some run the hidden and the output layer; a capacity of so few bytes evicts."""
    engine = CachedRNNLM(ToyClassNetwork(), CacheOptions(capacity_bytes=20_000, compiled=compiled))
    generator = torch.Generator().manual_seed(0)
    context = engine.start(8)
    for _ in range(60):
        engine.retain(context)
        _, context = engine.score(context, torch.randint(3, 24, (8,), generator=generator))
        engine.final(context)
    counts = engine.statistics()
    stages = [counts.seconds_find, counts.seconds_hidden, counts.seconds_output, counts.seconds_evict]
    assert counts.num_evictions > 0 and min(stages) > 0.0
    assert sum(stages) < 1.5 * counts.seconds_total and max(stages) < counts.seconds_total
    assert counts.queries_per_s == pytest.approx(counts.num_queries / counts.seconds_total)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("output", ["toy", "nce", "hierarchical"])
def test_every_query_is_counted_once(output: str, compiled: bool) -> None:
    """Two words after `<s>`; one word after each of them, after one twice; a sentence's end; and the second call again.

    So three histories are asked, in two runs, for five words in all.
    """
    torch.manual_seed(0)
    config = RNNLMConfig(8, 8, output="nce" if output == "toy" else output)
    network = RNNLanguageModel(Vocabulary([f"w{i}" for i in range(20)]), config).eval()
    engine = CachedRNNLM(ToyClassNetwork() if output == "toy" else network, CacheOptions(compiled=compiled))
    _, context_idx = engine.score(engine.start(2), torch.tensor([5, 6]))
    again = context_idx[[0, 1, 0]], torch.tensor([7, 7, 7])
    engine.score(*again)
    engine.final(context_idx[:1])
    engine.score(*again)
    counts = engine.statistics()
    assert (counts.num_calls, counts.num_queries, counts.num_edge_hits, counts.num_edges) == (4, 9, 3, 5)
    assert (counts.num_hidden_rows, counts.num_hidden_calls, counts.largest_hidden_batch) == (3, 2, 2)
    assert counts.num_outputs == 5 and counts.num_contexts == 2 + 5 and counts.num_hidden_held == 1 + 3
    assert counts.bytes_held == counts.peak_bytes > 0
    assert (counts.num_transfers, counts.num_shared_rows, counts.num_evictions, counts.num_dropped_rows) == (0,) * 4
    groups = {(place, int(engine.network.group_of(torch.tensor([word])))) for place, word in (
        (0, 5), (0, 6), (1, 7), (1, EOS_ID), (2, 7)
    )} if output == "toy" else set()  # fmt: skip
    assert (counts.num_history_normalizers, counts.num_group_normalizers) == (3 if output == "toy" else 0, len(groups))
    assert (counts.num_tree_decisions > 0) == (output == "hierarchical")


def test_what_is_forgotten_between_utterances_counts() -> None:
    pytest.importorskip("numba")
    network = RNNLanguageModel(Vocabulary([f"w{i}" for i in range(20)]), RNNLMConfig(8, 8)).eval()
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=30_000))
    assert engine.capacity is not None
    context_idx = engine.start(20)
    while not engine.capacity.is_half_used():
        _, context_idx = engine.score(context_idx, torch.arange(4, 24))
    num_contexts = engine.statistics().num_contexts
    engine.retain(context_idx[:0])
    counts = engine.statistics()
    assert (counts.num_evictions, counts.num_evicted_contexts) == (1, num_contexts)
    assert counts.num_contexts == 2


def test_all_stages_are_timed_by_the_clock_that_was_given() -> None:
    """One that ticks once whenever it is read: with compiled loops or without, all times are whole numbers."""
    vocabulary = Vocabulary([f"W{i}" for i in range(30)])
    for compiled in (True, False):
        network = RNNLanguageModel(vocabulary, RNNLMConfig(6, 9, maxent_order=0, log_z=0.3))
        engine = CachedRNNLM(network, CacheOptions(compiled=compiled), clock=map(float, itertools.count()).__next__)
        engine.score(engine.start(4), torch.tensor([5, 6, 7, 8]))
        counts = engine.statistics()
        stages = (counts.seconds_find, counts.seconds_hidden, counts.seconds_output, counts.seconds_total)
        assert all(seconds >= 1.0 and seconds.is_integer() for seconds in stages)
