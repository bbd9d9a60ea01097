"""Counts start at 0, add up and give ratios; stages take time."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.cached.states import QueryStatistics
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


def test_counts_of_two_engines_add_up_and_the_largest_batch_is_the_larger() -> None:
    names = [field.name for field in fields(QueryStatistics)]
    one = QueryStatistics(**{name: position for position, name in enumerate(names)})
    other = QueryStatistics(**dict.fromkeys(names, 3))
    for total in (one + other, other + one):
        found = [getattr(total, name) for name in names]
        expected = [position + 3 for position in range(len(names))]
        expected[names.index("largest_hidden_batch")] = names.index("largest_hidden_batch")
        assert found == expected


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
