"""Projections of hidden rows that loops keep: computed when needed, overwritten by later ones, computed again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.cached.outputs import ProjectionCache
from asr.lm.cached.states import HiddenLayer, HiddenStore, QueryStatistics
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary

WORDS = 30


class CountingNetwork(RNNLanguageModel):
    """A network that counts the rows that it projects."""

    def __init__(self, embedding_size: int = 4) -> None:
        torch.manual_seed(0)
        super().__init__(Vocabulary([f"W{i}" for i in range(WORDS)]), RNNLMConfig(embedding_size, 9))
        self.num_projected = 0

    def project(self, state: Tensor) -> Tensor:
        self.num_projected += len(state)
        return super().project(state)


def cache(
    num_rows: int, most_places: int, capacity_bytes: int | None = None
) -> tuple[ProjectionCache, HiddenStore, CountingNetwork]:
    network = CountingNetwork()
    store = HiddenStore(9, None, "float32", torch.device("cpu"))
    store.append(torch.randn(num_rows, 9))
    layer = HiddenLayer([network], network, "frame", "float32", QueryStatistics(), lambda: 0.0)
    return ProjectionCache(store, layer, 4, most_places, capacity_bytes), store, network


def assert_held(projections: ProjectionCache, store: HiddenStore, row: Tensor, network: CountingNetwork) -> None:
    number, num = store.projected[row, 0], int(projections.num_computed)
    assert bool((num - number <= len(projections.hidden)).all())
    expected = RNNLanguageModel.project(network, store.state[row])
    torch.testing.assert_close(projections.hidden[number % len(projections.hidden)], expected)


def test_all_rows_of_a_call_are_held_whatever_was_held_before() -> None:
    projections, store, network = cache(40, most_places=16)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        row = torch.randint(40, (int(torch.randint(1, 24, (1,), generator=generator)),), generator=generator)
        assert projections.hold(row)
        assert_held(projections, store, row, network)
    assert len(projections.hidden) == 20  # a fourth more, for calls with more than 16 rows
    assert int(projections.num_computed) == network.num_projected > 200


def test_what_is_held_is_not_computed_again_even_if_the_cache_grows() -> None:
    projections, store, network = cache(300, most_places=256)
    first = torch.arange(60)
    assert projections.hold(first) and projections.hold(first.flip(0))
    assert network.num_projected == 60 and len(projections.hidden) == 64
    projections.grow(300)
    assert len(projections.hidden) == 256
    assert projections.hold(first) and network.num_projected == 60
    assert_held(projections, store, first, network)
    assert projections.hold(torch.arange(60, 190)) and network.num_projected == 190
    projections.grow(10_000)
    assert len(projections.hidden) == 256


def test_overwritten_projections_do_not_count_as_held_once_the_cache_has_grown() -> None:
    projections, store, network = cache(100, most_places=64)
    for begin in range(0, 100, 10):
        projections.hold(torch.arange(begin, begin + 10))
    assert projections.grow(0, 106) and len(projections.hidden) == 106
    row = torch.arange(70)  # 36 of them were overwritten
    assert projections.hold(row) and network.num_projected == 136
    assert_held(projections, store, row, network)


def test_rows_with_other_states_are_projected_again() -> None:
    projections, store, network = cache(10, most_places=64)
    row = torch.arange(10)
    projections.hold(row)
    store.write(row[3:5], torch.randn(2, 9))
    assert projections.hold(row) and network.num_projected == 12
    assert_held(projections, store, row, network)
    store.rows.give_back(row[:4])
    assert store.compact(6).tolist() == [4, 5, 6, 7, 8, 9]
    assert projections.hold(row[:6]) and network.num_projected == 12  # they have moved with their rows
    assert_held(projections, store, row[:6], network)


def test_limited_memory_limits_the_rows_of_a_call() -> None:
    projections, store, network = cache(40, most_places=64, capacity_bytes=16 * 4 * 4 * 20)
    assert projections.max_bytes == 4 * 4 * 20
    assert projections.hold(torch.arange(20)) and not projections.hold(torch.arange(21))
    assert projections.num_bytes == projections.max_bytes
    assert_held(projections, store, torch.arange(20), network)
    full = projections.hidden
    assert projections.grow(40) and projections.grow(40, 20) and not projections.grow(40, 21)
    assert projections.hidden is full  # nothing is copied again where there is no more room


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("options", [{}, {"compiled": False}, {"held_projections": 3}])
def test_hidden_rows_hold_the_state_alone(dtype: str, options: dict[str, int]) -> None:
    network = CountingNetwork()
    engine = CachedRNNLM(network, CacheOptions(hidden_dtype=dtype, **options))  # type: ignore[arg-type]
    words = torch.arange(5, 25)
    _, context_idx = engine.score(engine.start(20), words)
    engine.score(context_idx, words)
    assert engine.hidden.state.shape[1] == network.state_size == 9
    per_row = 9 * 4 if dtype == "float32" else 9 + 4
    assert engine.hidden.bytes_per_row == per_row + 8 + 4  # the last use, and the number of the projection
    held = 0 if engine.projections is None else engine.projections.num_bytes
    others = engine.trie.num_bytes + engine.output.num_bytes
    assert engine.statistics().bytes_held == engine.hidden.num_bytes + others + held
    assert (held > 0) == (options.get("compiled", True) is True)
    engine.reset()
    network.num_projected = 0
    again, _ = engine.score(engine.start(20), words)
    assert network.num_projected == (20 if "compiled" in options else 1)
    torch.testing.assert_close(again, engine.score(engine.start(20), words)[0])


def test_a_reset_frees_projections() -> None:
    engine, words = CachedRNNLM(CountingNetwork()), torch.arange(5, 25)
    assert engine.projections is not None
    before, context_idx = engine.projections.num_bytes, engine.start(20)
    for _ in range(10):
        context_idx = engine.score(context_idx, words)[1]
    assert engine.projections.num_bytes > before
    engine.reset()
    assert engine.projections.num_bytes == before


def test_states_that_are_not_kept_are_projected_as_well() -> None:
    network, words = CountingNetwork(), torch.arange(5, 25)
    found, expected = (CachedRNNLM(network, options) for options in (CacheOptions(cache_hidden=False), None))
    contexts = [engine.score(engine.start(20), words)[1] for engine in (found, expected)]
    torch.testing.assert_close(found.score(contexts[0], words)[0], expected.score(contexts[1], words)[0])


def test_the_bound_on_memory_includes_projections() -> None:
    engine, generator = (
        CachedRNNLM(CountingNetwork(64), CacheOptions(capacity_bytes=100_000, loop_room=8)),
        torch.Generator(),
    )
    assert engine.projections is not None and engine.capacity is not None
    context_idx = engine.start(20)
    for _ in range(60):
        context_idx = engine.score(context_idx, torch.randint(5, WORDS, (20,), generator=generator))[1]
        engine.retain(context_idx)
    assert engine.projections.num_bytes > 5_000 and engine.statistics().num_evictions > 0
    assert engine.statistics().peak_bytes <= 100_000


def test_an_engine_without_room_for_the_projections_of_a_call_uses_no_loops() -> None:
    network, words = CountingNetwork(64), torch.arange(5, 25)
    bound = CachedRNNLM(network, CacheOptions(capacity_bytes=16 * 4 * 64 * 19, loop_room=8))
    plain = CachedRNNLM(network, CacheOptions(compiled=False))
    contexts = []
    for engine in (bound, plain):
        _, context_idx = engine.score(engine.start(20), words)
        contexts.append(context_idx)
    assert bound.lookup_tables() is not None
    found, expected = bound.score(contexts[0], words)[0], plain.score(contexts[1], words)[0]
    torch.testing.assert_close(found, expected)
    assert bound.lookup_tables() is None
