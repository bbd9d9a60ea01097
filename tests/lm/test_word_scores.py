"""Scores of texts: batched equal to word by word; interpolation weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr.lm.corpus import read_word_stream
from asr.lm.evaluate import (
    log_linear_log_prob,
    measure_perplexity,
    network_distributions,
    network_word_scores,
    perplexity,
    tune_linear_weights,
    tune_log_linear_weights,
)
from asr.lm.ngram.arpa import LN_10
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.data import pack_sentences
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID, Vocabulary
from scripts.benchmarks.lm import measure_collisions
from tests.reference.tiny_arpa import TINY


def _network() -> RNNLanguageModel:
    torch.manual_seed(1)
    config = RNNLMConfig(
        embedding_size=6, hidden_size=5, num_layers=2, maxent_order=3, maxent_size=97, num_noise_words=8
    )
    network = RNNLanguageModel(Vocabulary(["A", "B", "C"]), config).eval()
    assert network.maxent is not None
    torch.nn.init.normal_(network.maxent.weight)
    return network


class _StepsOnly:
    """What the contract asks of a network, and nothing else of an `RNNLanguageModel`."""

    def __init__(self, network: RNNLanguageModel) -> None:
        for name in ("num_history_words", "hidden_size", "state_size", "initial_state", "step", "project", "log_prob"):
            setattr(self, name, getattr(network, name))


NETWORK = _network()


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(3, 6), max_size=6), min_size=1, max_size=8), st.integers(1, 9))
@torch.no_grad()
def test_equal_to_one_word_after_the_other(sentences: list[list[int]], sentences_at_once: int) -> None:
    token_id = np.array([word for sentence in sentences for word in [*sentence, EOS_ID]], dtype=np.int32)
    found, excess = network_word_scores(NETWORK, token_id, sentences_at_once=sentences_at_once)
    normalized, excess = network_word_scores(NETWORK, token_id, normalized=True, sentences_at_once=sentences_at_once)
    assert excess is not None
    torch.testing.assert_close((normalized + excess).clamp(max=0.0), found)  # no score exceeds probability 1
    place = 0
    for sentence in sentences:
        state = NETWORK.initial_state()[None]
        past = [BOS_ID]
        for word in [*sentence, EOS_ID]:
            state = NETWORK.step(state, torch.tensor([past[0]]))
            history = torch.tensor([[*past, EPSILON_ID, EPSILON_ID][:2]])
            score = NETWORK.log_prob(NETWORK.project(state), history, torch.tensor([word]))
            torch.testing.assert_close(found[place], score[0])
            past.insert(0, word)
            place += 1


@pytest.mark.slow
@pytest.mark.parametrize("output", ["nce", "hierarchical"])
@torch.no_grad()
def test_any_number_of_threads_gives_the_same_numbers(output: Literal["nce", "hierarchical"]) -> None:
    torch.manual_seed(5)
    config = RNNLMConfig(embedding_size=5, hidden_size=5, output=output, maxent_order=3, maxent_size=97)
    network = RNNLanguageModel(Vocabulary([f"W{number}" for number in range(30)]), config).eval()
    assert network.maxent is not None
    torch.nn.init.normal_(network.maxent.weight)
    token_id = np.random.default_rng(1).integers(EOS_ID, 32, 25_000).astype(np.int32)  # a sentence end in thirty
    num_threads, scores = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        scores.append(
            torch.stack([network_word_scores(network, token_id, normalized=each)[0] for each in (False, True)])
        )
    torch.set_num_threads(num_threads)
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


@torch.no_grad()
def test_training_and_scoring_see_the_same_hidden_layer() -> None:
    from asr.lm.rnn.data import TokenStreams

    token_id = np.array([3, 4, 5, EOS_ID, 6, EOS_ID, 3, 3, EOS_ID], dtype=np.int32)
    batch = TokenStreams(token_id, 1, 9, NETWORK.num_history_words)[0]
    hidden, _ = NETWORK.hidden_sequence(batch, None)
    trained = NETWORK.log_prob(hidden[:, 0], batch.history[0], batch.target_id[0])
    torch.testing.assert_close(trained, network_word_scores(NETWORK, token_id)[0])


@pytest.mark.slow
@torch.no_grad()
def test_a_carried_state_goes_through_the_whole_text() -> None:
    torch.manual_seed(3)
    config = RNNLMConfig(embedding_size=6, hidden_size=5, maxent_order=3, maxent_size=97, carry_state=True)
    network = RNNLanguageModel(Vocabulary(["A", "B", "C"]), config).eval()
    sentence = [3, 4, 5, EOS_ID, 6, EOS_ID, 3, 3, EOS_ID]
    token_id = np.array(sentence * 150, dtype=np.int32)  # more than a window
    found, _ = network_word_scores(network, token_id)
    state, past = network.initial_state()[None], [BOS_ID, EPSILON_ID]
    for place, word in enumerate(token_id.tolist()):
        state = network.step(state, torch.tensor([past[0]]))
        score = network.log_prob(network.project(state), torch.tensor([past]), torch.tensor([word]))
        torch.testing.assert_close(found[place], score[0])
        past = [BOS_ID, EPSILON_ID] if word == EOS_ID else [word, past[0]]


def test_the_last_sentence_may_be_cut() -> None:
    token_id = np.array([3, 4, EOS_ID, 5, 6, EOS_ID], dtype=np.int32)
    whole, _ = network_word_scores(NETWORK, token_id)
    torch.testing.assert_close(network_word_scores(NETWORK, token_id[:-1])[0], whole[:-1])


def test_groups_of_sentences_have_about_as_many_words() -> None:
    length = np.arange(1, 40)
    token_id = np.concatenate([np.append(np.full(n - 1, 3), EOS_ID) for n in length]).astype(np.int32)
    groups = list(pack_sentences(token_id, 2, sentences_at_once=30, words_at_once=100))
    sizes = [len(group.word_id) for group in groups]
    assert all(100 <= size < 140 for size in sizes[:-1])
    assert sorted(np.concatenate([group.place for group in groups])) == list(range(len(token_id)))
    assert [group.sizes[0] for group in pack_sentences(token_id, 2, 30)] == [30, 9]


@torch.no_grad()
def test_a_network_of_ones_own_is_scored_alike() -> None:
    token_id = np.array([3, 4, 5, EOS_ID, 6, EOS_ID, 3, 3, EOS_ID], dtype=np.int32)
    found, _ = network_word_scores(_StepsOnly(NETWORK), token_id)  # type: ignore[arg-type]
    torch.testing.assert_close(found, network_word_scores(NETWORK, token_id)[0])


def test_weights_of_a_mixture() -> None:
    # Two experts, each right on its part of the text: three quarters to one quarter.
    log_prob = torch.log(torch.tensor([[0.9, 0.9, 0.9, 0.001], [0.001, 0.001, 0.001, 0.9]])).repeat(1, 50)
    weight, mixed = tune_linear_weights(log_prob)
    torch.testing.assert_close(weight.float(), torch.tensor([0.75, 0.25]), rtol=0, atol=2e-3)
    grid = [torch.logsumexp(log_prob.double() + torch.tensor([[w], [1 - w]]).log(), 0).mean() for w in (0.7, 0.8)]
    assert mixed.mean() >= max(grid)
    assert perplexity(mixed) < perplexity(log_prob[0])


def test_log_linear_weights_make_the_text_likeliest() -> None:
    torch.manual_seed(5)
    num_places, num_words = 400, 12
    models = torch.randn(2, num_places, num_words).log_softmax(dim=2)
    models[:, :, 0] = -torch.inf
    # The text is drawn from a mixture whose weights do not sum to one.
    truth = torch.tensor([1.3, 0.4])
    prob = torch.tensordot(truth, models.nan_to_num(neginf=0.0), dims=1).masked_fill(models[0].isinf(), -torch.inf)
    word_id = torch.multinomial(prob.softmax(dim=1), 1)[:, 0]
    weight = tune_log_linear_weights(models, word_id)
    torch.testing.assert_close(weight.float(), truth, rtol=0, atol=0.3)
    best = log_linear_log_prob(models, word_id, weight).sum()
    for change in ([0.05, 0.0], [-0.05, 0.0], [0.0, 0.05], [0.0, -0.05]):
        assert best >= log_linear_log_prob(models, word_id, weight + torch.tensor(change)).sum()


def test_distributions_hold_the_normalised_scores() -> None:
    token_id = np.array([3, 4, 5, EOS_ID, 6, EOS_ID, 3, 3, EOS_ID], dtype=np.int32)
    distributions = network_distributions(NETWORK, token_id)
    torch.testing.assert_close(distributions.exp().sum(dim=1), torch.ones(9))
    found = distributions.gather(1, torch.from_numpy(token_id.astype(np.int64))[:, None])[:, 0]
    torch.testing.assert_close(found, network_word_scores(NETWORK, token_id, normalized=True)[0])


@pytest.mark.parametrize("words", [None, ["y", "b", "z", "a"]])
@pytest.mark.parametrize("sentences_at_once", [1, 2, 9])
def test_perplexity_with_and_without_words_that_are_not_listed(
    sentences_at_once: int, words: list[str] | None, tmp_path: Path
) -> None:
    """By the hand-worked trigram: "a b" is known, and "a z b" has a word that is not, even if it has a number."""
    (tmp_path / "lm.arpa").write_text(TINY)
    (tmp_path / "text.txt").write_text("a z b\n\na b\n")
    lm = NgramLM.from_arpa(tmp_path / "lm.arpa", None if words is None else Vocabulary(words))
    found = measure_perplexity(lm, read_word_stream([tmp_path / "text.txt"], lm.vocabulary), sentences_at_once)
    assert (found.num_sentences, found.num_words, found.num_unlisted) == (2, 5, 1)
    listed, unlisted = (-0.2 - 0.05 - 0.3) + (-0.2 - 0.7 - 0.3), -0.1 - 0.3 - 1.0
    assert found.log_prob_listed == pytest.approx(listed * LN_10, rel=1e-5)
    assert found.log_prob == pytest.approx((listed + unlisted) * LN_10, rel=1e-5)
    assert found.perplexity == pytest.approx(10 ** (-(listed + unlisted) / 7), rel=1e-5)
    assert found.perplexity_listed == pytest.approx(10 ** (-listed / 6), rel=1e-5)


def test_collisions_are_counted() -> None:
    token_id = np.array([3, 4, EOS_ID, 3, 4, 5, EOS_ID], dtype=np.int32)
    # <s> 3, 3 4, 4 </s>, 4 5, 5 </s>; and with the word before: <s>, <s> 3 4, 3 4 </s>, 3 4 5, 4 5 </s>.
    roomy = measure_collisions(HashedMaxEnt(7, 3, 1 << 20), token_id)
    assert roomy == [(2, 5, 0), (3, 5, 0)]
    # With one place the word alone decides, and each comes after a history of either length.
    assert measure_collisions(HashedMaxEnt(7, 3, 1), token_id) == [(2, 5, 5), (3, 5, 5)]
