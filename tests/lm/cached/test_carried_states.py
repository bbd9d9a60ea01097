"""States carried from sentence to sentence, against the network run over the whole text of each session."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import Difference, Interpolated, RemappedLM
from asr.lm.evaluate import network_word_scores
from asr.lm.interface import LanguageModel
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import EOS_ID, Vocabulary
from tests.reference.table_lm import TableLM

NUM_WORDS = 20
WORDS = Vocabulary([f"w{i}" for i in range(NUM_WORDS)])
# Each must give plain scores; some leave room for few histories, or none for compiled loops.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "tensors": {"compiled": False},
    "no rows": {"cache_hidden": False},
    "no scores": {"cache_scores": False},
    "small": {"capacity_bytes": 12_000},
    "small tensors": {"capacity_bytes": 12_000, "compiled": False},
    "tiny": {"capacity_bytes": 1},
    "fine history": {"history_precision": "round-2"},
    "long recombination": {"recombination_length": 12},
    "long recombination of tensors": {"recombination_length": 12, "compiled": False},
}


@functools.cache
def network(num_layers: int = 1, embedding_size: int = 6) -> RNNLanguageModel:
    torch.manual_seed(4)
    config = RNNLMConfig(
        embedding_size=embedding_size,
        hidden_size=6,
        num_layers=num_layers,
        maxent_order=3,
        maxent_size=500,
        log_z=5.0,  # scores are at most 0, and few are
        carry_state=True,
    )
    made = RNNLanguageModel(WORDS, config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return made.eval()


def expected(sentences: list[list[int]], of: RNNLanguageModel) -> list[float]:
    """The score of each sentence of a session, from one run over all of them."""
    text = [[*sentence, EOS_ID] for sentence in sentences]
    scores, _ = network_word_scores(of, np.concatenate(text).astype(np.int32))
    return [float(part.sum()) for part in scores.split([len(part) for part in text])]


def scored(lm: LanguageModel, sessions: list[list[list[int]]], is_marked: bool = False) -> list[list[float]]:
    """The scores of sessions side by side: one sentence of each at a time, word by word."""
    state = lm.first_state(len(sessions))
    found: list[list[float]] = [[] for _ in sessions]
    for turn in range(max(map(len, sessions))):
        alive = [place for place, session in enumerate(sessions) if len(session) > turn]
        sentences = [sessions[place][turn] for place in alive]
        context_idx = lm.start_from(state[alive])
        total = torch.zeros(len(alive))
        for depth in range(max(map(len, sentences)) + 1):
            at_end = torch.tensor([row for row, words in enumerate(sentences) if len(words) == depth], dtype=torch.long)
            total[at_end] += lm.final(context_idx[at_end])
            inner = torch.tensor([row for row, words in enumerate(sentences) if len(words) > depth], dtype=torch.long)
            word_id = torch.tensor([sentences[row][depth] for row in inner], dtype=torch.long)
            log_prob, context_idx[inner] = lm.score(context_idx[inner], word_id)
            total[inner] += log_prob
            if is_marked:
                lm.retain(context_idx)
        state[alive] = lm.state_after(state[alive], sentences)
        if is_marked:
            lm.retain(lm.start(0))
        for place, score in zip(alive, total.tolist(), strict=True):
            found[place].append(score)
    return found


SESSIONS = st.lists(
    st.lists(st.lists(st.integers(EOS_ID + 2, NUM_WORDS + 3), min_size=1, max_size=6), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=8)
@given(sessions=SESSIONS, is_marked=st.booleans())
def test_scores_are_those_of_the_whole_text(name: str, sessions: list[list[list[int]]], is_marked: bool) -> None:
    engine = CachedRNNLM(network(), CacheOptions(**OPTIONS[name]))
    tolerance = 0.05 if name == "fine history" else 1e-4
    for found, session in zip(scored(engine, sessions, is_marked), sessions, strict=True):
        assert found == pytest.approx(expected(session, network()), abs=tolerance)


@pytest.mark.parametrize("shape", [(2, 6), (1, 4), (2, 4)])
def test_layers_and_projections_are_carried(shape: tuple[int, int]) -> None:
    sessions = [[[5, 6], [7], [5, 6, 8]], [[9], [10, 11]]]
    for found, session in zip(scored(CachedRNNLM(network(*shape)), sessions), sessions, strict=True):
        assert found == pytest.approx(expected(session, network(*shape)), abs=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_recombination_keeps_sessions_apart_up_to_the_start(compiled: bool) -> None:
    """With k = 3, the first two words of a sentence still belong to its session, whoever said them before."""
    sessions = [[[5, 6, 7], [9, 10]], [[8], [9, 10]], [[9, 10], [9, 10]]]
    engine = CachedRNNLM(network(), CacheOptions(recombination_length=3, compiled=compiled))
    for session, found in zip(sessions, scored(engine, sessions), strict=True):
        last = expected([*session[:-1], session[-1][:1]], network())[-1]  # its </s> follows two words, `<s>` included
        assert scored(engine, [[*session[:-1], session[-1][:1]]])[0][-1] == pytest.approx(last, abs=1e-4)
        assert found[0] == pytest.approx(expected(session, network())[0], abs=1e-4)


def test_a_sentence_without_words_changes_nothing() -> None:
    engine = CachedRNNLM(network())
    state = engine.state_after(engine.first_state(2), [[5, 6], []])
    assert torch.equal(state[1:], engine.first_state(1))
    assert torch.equal(engine.state_after(state, [[], []]), state)
    assert engine.start_from(state)[1] == engine.start(1)[0] != engine.start_from(state)[0]


def test_the_first_state_is_a_copy() -> None:
    engine = CachedRNNLM(network())
    state = engine.first_state(2)
    before = state.clone()
    engine.state_after(state, [[5], [6]])
    assert torch.equal(state, before) and torch.equal(state[0], network().initial_state())


@pytest.mark.slow
def test_memory_is_bounded_over_many_sentences() -> None:
    """Hundreds of starts, each with histories of its own, stay within the capacity and right."""
    engine = CachedRNNLM(network(), CacheOptions(capacity_bytes=30_000))
    generator = torch.Generator().manual_seed(1)
    session = [torch.randint(4, NUM_WORDS + 4, (8,), generator=generator).tolist() for _ in range(300)]
    (found,) = scored(engine, [session], is_marked=True)
    assert found == pytest.approx(expected(session, network()), abs=1e-3)
    assert engine.statistics().num_evictions > 0
    assert engine.statistics().peak_bytes <= 30_000


@torch.no_grad()
def test_a_combination_carries_in_the_parts_that_can() -> None:
    graph_words = Vocabulary([*reversed(WORDS.words[4:]), "odd"])
    one, other = (CachedRNNLM(network(*shape)) for shape in ((1, 6), (2, 4)))
    small = TableLM(graph_words, num_history_words=2)
    mapped = [RemappedLM(lm, graph_words, 1.0, warn=False) for lm in (one, other)]
    model = Difference(Interpolated(mapped, [0.5, 0.5], "log-linear"), small)
    assert model.first_state(3).shape == (3, one.first_state(1).shape[1] + other.first_state(1).shape[1])
    sessions = [[[5, 6], [7], [5, 6, 8]], [[9], [10, 11]]]
    for found, session in zip(scored(model, sessions), sessions, strict=True):
        in_model = [[int(mapped[0]._word_map[word]) for word in sentence] for sentence in session]
        parts = [expected(in_model, network(1, 6)), expected(in_model, network(2, 4))]
        of_small = [small.score_sentence(tuple(sentence)) for sentence in session]
        assert found == pytest.approx(
            [0.5 * left + 0.5 * right - less for left, right, less in zip(*parts, of_small, strict=True)], abs=1e-3
        )


def test_a_model_that_carries_nothing_starts_every_sentence_anew() -> None:
    lm = TableLM(WORDS)
    state = lm.state_after(lm.first_state(2), [[5], [6, 7]])
    assert state.shape == (2, 0)
    assert torch.equal(lm.start_from(state), lm.start(2))
