"""A bound on bytes changes no score: live contexts stay, hidden rows are computed again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.query.capacity import Limits
from asr.query.engine import RnnLM
from tests.reference.plain_lm import PlainLM
from tests.reference.toy_network import ToyClassNetwork, ToyNetwork


def beam_search(engine, network, num_steps, width, seed, marks):
    """A beam over random continuations; scores are compared with the plain network's."""
    plain = PlainLM(network)
    generator = torch.Generator().manual_seed(seed)
    context, histories = engine.start(1), [[]]
    for step in range(num_steps):
        choice = torch.randint(3, 24, (len(histories), 4), generator=generator)
        log_prob, next_idx = engine.score(context.repeat_interleave(4), choice.view(-1))
        extended = [[*words, word] for words, row in zip(histories, choice.tolist(), strict=True) for word in row]
        if step % 4 == 0 or step == num_steps - 1:
            for words, score in zip(extended, log_prob.tolist(), strict=True):
                assert score == pytest.approx(plain.last_log_prob(words), abs=1e-5)
        kept = torch.randperm(len(extended), generator=generator)[:width]
        context, histories = next_idx[kept], [extended[i] for i in kept.tolist()]
        if marks:
            engine.mark_live(context)


@given(
    capacity=st.sampled_from([1, 10_000, 20_000, 40_000, 1_000_000]),
    width=st.integers(1, 8),
    marks=st.booleans(),
    num_steps=st.integers(1, 25),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12)
@pytest.mark.parametrize("network_class", [ToyNetwork, ToyClassNetwork])
def test_any_capacity_gives_the_plain_scores(network_class, capacity, width, marks, num_steps, seed):
    network = network_class()
    engine = RnnLM(network, capacity_bytes=capacity)
    beam_search(engine, network, num_steps, width, seed, marks)


def test_small_capacities_do_evict_and_stay_bounded():
    engine = RnnLM(ToyNetwork(hidden_size=128), capacity_bytes=100_000)
    beam_search(engine, engine.network, 150, 8, 0, marks=True)
    counts = engine.statistics()
    assert counts.num_evictions > 0
    assert counts.peak_bytes <= 100_000


def test_without_marks_only_hidden_rows_leave():
    engine = RnnLM(ToyNetwork(hidden_size=128), capacity_bytes=20_000)
    beam_search(engine, engine.network, 20, 8, 0, marks=False)
    counts = engine.statistics()
    assert counts.num_dropped_rows > 0
    assert counts.num_evicted_contexts == 0


def test_a_long_stream_stays_bounded_although_its_history_does_not():
    network = ToyNetwork()
    engine = RnnLM(network, capacity_bytes=40_000)
    context, words = engine.start(1), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        choice = torch.randint(3, 24, (3,), generator=generator)
        log_prob, next_idx = engine.score(context.repeat(3), choice)
        context = next_idx[:1]
        words.append(int(choice[0]))
        engine.mark_live(context)
    assert log_prob[0].item() == pytest.approx(PlainLM(network).last_log_prob(words), abs=1e-5)
    assert engine.statistics().peak_bytes <= 40_000


def test_live_contexts_keep_their_numbers():
    network = ToyNetwork()
    engine = RnnLM(network, capacity_bytes=10_000)
    held: dict[int, list[int]] = {}
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        word_id = torch.randint(3, 24, (10,), generator=generator)
        _, node = engine.score(engine.start(10), word_id)
        next_word = torch.randint(3, 24, (10,), generator=generator)
        _, deeper = engine.score(node, next_word)
        if len(held) < 20:
            held[int(deeper[0])] = [int(word_id[0]), int(next_word[0])]
        engine.mark_live(torch.tensor(sorted(held)))
    assert engine.statistics().num_evictions > 0
    for node, words in held.items():
        log_prob, _ = engine.score(torch.tensor([node]), torch.tensor([7]))
        assert log_prob.item() == pytest.approx(PlainLM(network).last_log_prob([*words, 7]), abs=1e-5)


def test_least_used_leaves_go_first():
    engine = RnnLM(ToyNetwork(num_words=400), capacity_bytes=1)
    often = torch.arange(10, 20)
    engine.mark_live(engine.start(1))
    for first in range(20, 320, 30):
        for _ in range(3):
            engine.score(engine.start(10), often)
        engine.score(engine.start(30), torch.arange(first, first + 30))
        engine.mark_live(engine.start(1))
    before = engine.statistics().num_edges
    assert engine.statistics().num_evictions > 0
    engine.score(engine.start(10), often)
    assert engine.statistics().num_edges == before


def test_limits_fit_into_the_capacity():
    for capacity in (100_000, 1_000_000, 50_000_000):
        limits = Limits.of(capacity, bytes_per_row=1032)
        assert capacity / 2 < 52 * limits.max_edges + 1032 * limits.max_rows <= capacity
