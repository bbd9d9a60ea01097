"""Output layers: sums over the vocabulary, losses against explicit loops, normalisers, MaxEnt."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from asr.kernels.jit import jit_for
from asr.lm.rnn.data import TokenBatch
from asr.lm.rnn.maxent import HashedMaxEnt, add_score_range, hashed_places
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.output_numba import add_word_scores
from asr.lm.rnn.outputs.nce import NceOutput, compiled_terms
from asr.lm.rnn.outputs.softmax import ClassSoftmaxOutput, frequency_classes
from asr.text.symbols import Vocabulary

WORDS = 40
COUNTS = torch.tensor([0, 0, 30, 2, *(2000 // (rank + 1) for rank in range(WORDS))])


def _network(output: str, maxent_order: int, **more: object) -> RNNLanguageModel:
    torch.manual_seed(3)
    config = RNNLMConfig(
        embedding_size=6, hidden_size=6, output=output, maxent_order=maxent_order, maxent_size=101, num_noise_words=50,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    network = RNNLanguageModel(Vocabulary(f"W{idx}" for idx in range(WORDS)), config)
    network.output.set_unigram(COUNTS, reset_bias=True)
    for name, parameter in network.output.named_parameters():
        if name != "log_z":
            nn.init.normal_(parameter, std=0.5)
    return network


def _queries(network: RNNLanguageModel, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    vocabulary_size = len(network.vocabulary)
    hidden = torch.randn(num, network.hidden_size, generator=generator)
    history = torch.randint(2, vocabulary_size, (num, network.num_history_words), generator=generator)
    return hidden, history, torch.randint(2, vocabulary_size, (num,), generator=generator)


@pytest.mark.parametrize("output", ["nce", "hierarchical", "class", "full"])
@pytest.mark.parametrize("maxent_order", [0, 2, 4])
@torch.no_grad()
def test_sums_to_one(output: str, maxent_order: int) -> None:
    network = _network(output, maxent_order, normalized=True)
    hidden, history, _ = _queries(network, 3)
    vocabulary_size = len(network.vocabulary)
    word_id = torch.arange(vocabulary_size).repeat(3)
    row = torch.arange(3).repeat_interleave(vocabulary_size)
    log_prob = network.log_prob(hidden[row], history[row], word_id).view(3, -1)
    # <eps> and <s>, ids 0 and 1, are never predicted.
    torch.testing.assert_close(log_prob[:, 2:].exp().sum(dim=1), torch.ones(3))


@pytest.mark.parametrize("output", ["nce", "class", "full"])
@torch.no_grad()
def test_log_prob_is_score_less_normalisers(output: str) -> None:
    network = _network(output, 3)
    query = _queries(network, 20)
    expected = network.word_score(*query) - network.history_normalizer(*query[:2])
    if output == "class":
        expected -= network.group_normalizer(*query[:2], network.group_of(query[2]))
    if output == "nce":  # not normalized
        assert (expected > 0.0).any()
        expected = expected.clamp(max=0.0)
    assert network.cacheable_terms == {"nce": "none", "class": "group", "full": "history"}[output]
    torch.testing.assert_close(network.log_prob(*query), expected)


def test_a_tree_keeps_decisions() -> None:
    assert _network("hierarchical", 2).cacheable_terms == "tree"


@pytest.mark.parametrize("output", ["hierarchical", "class", "full"])
@pytest.mark.parametrize("maxent_order", [0, 3])
def test_loss_is_negative_log_likelihood(output: str, maxent_order: int) -> None:
    network = _network(output, maxent_order)
    query = _queries(network, 20)
    query[0].requires_grad_()
    loss, expected = network.output.loss(*query, torch.Generator()), -network.log_prob(*query).sum()
    torch.testing.assert_close(loss, expected)
    if output == "full":
        return  # its log Z has no gradient
    parameters = [query[0], *network.output.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        ours, theirs = (each.to_dense() if each.is_sparse else each for each in (ours, theirs))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("maxent_order", [0, 3])
@pytest.mark.parametrize("log_z", [0.0, 2.0])
@pytest.mark.parametrize("form", ["looped", "tensors", "written for the compiler"])
def test_nce_loss_and_gradients_equal_explicit_loop(
    maxent_order: int, log_z: float, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form != "looped":
        monkeypatch.setattr("asr.lm.rnn.outputs.nce.jit_for", lambda function, tensor: None)
    if form == "written for the compiler":
        monkeypatch.setattr(torch, "compile", lambda function, dynamic: function, raising=False)
        monkeypatch.setattr("asr.lm.rnn.outputs.nce.compiled_terms", compiled_terms.__wrapped__)
    network = _network("nce", maxent_order, log_z=log_z, learn_log_z=True)
    output = network.output
    assert isinstance(output, NceOutput)
    output.num_grad_words = output.num_noise_words
    output.compile_loss = form == "written for the compiler"
    hidden, history, word_id = _queries(network, 8)
    hidden.requires_grad_()
    parameters = [hidden, *output.parameters()]

    found = output.loss(hidden, history, word_id, torch.Generator().manual_seed(9))
    found_gradients = torch.autograd.grad(found, parameters)

    uniform = torch.rand(output.num_noise_words, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    noise = [int((output.noise_cdf < value).sum()) for value in uniform]
    expected = torch.zeros(())
    for row in range(len(word_id)):
        for word, is_data in [(int(word_id[row]), True), *((word, False) for word in noise)]:
            one = hidden[row : row + 1], history[row : row + 1], torch.tensor([word])
            odds = output.word_score(*one)[0] - output.log_z - math.log(len(noise)) - output.noise_log_prob[word]
            expected = expected - torch.nn.functional.logsigmoid(odds if is_data else -odds)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found_gradients, torch.autograd.grad(expected, parameters), strict=True):
        ours, theirs = (each.to_dense() if each.is_sparse else each for each in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_subsampled_maxent_gradient_is_unbiased() -> None:
    network = _network("nce", 2)
    output = network.output
    assert isinstance(output, NceOutput) and output.maxent is not None
    hidden, history, word_id = _queries(network, 5)

    def gradient(num_grad_words: int, seed: int) -> torch.Tensor:
        output.num_grad_words = num_grad_words
        # The noise words come from the first draws, so all seeds but one share nothing; average over many.
        loss = output.loss(hidden, history, word_id, torch.Generator().manual_seed(seed))
        assert output.maxent is not None
        return torch.autograd.grad(loss, [output.maxent.weight])[0].to_dense()

    full = torch.stack([gradient(50, seed) for seed in range(200)]).mean(0)
    part = torch.stack([gradient(10, seed) for seed in range(200)]).mean(0)
    assert (full - part).abs().max() < 0.15 * full.abs().max()


@pytest.mark.parametrize("maxent_order", [0, 3])
def test_loop_over_words_equals_tensors(maxent_order: int) -> None:
    if jit_for(add_word_scores, torch.empty(0)) is None:
        pytest.skip("needs numba")
    network = _network("nce", maxent_order)
    hidden, history, word_id = _queries(network, 50)
    # A slice of wider rows, as the engine's states are.
    wide = torch.cat((torch.randn_like(hidden), hidden), dim=1)[:, hidden.shape[1] :]
    with torch.no_grad():
        looped = network.word_score(wide, history, word_id)
    torch.testing.assert_close(looped, network.word_score(hidden, history, word_id).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("output", ["nce", "hierarchical", "class", "full"])
def test_training_starts_at_the_unigram(output: str) -> None:
    network = _network(output, 0)
    network.output.set_unigram(COUNTS, reset_bias=True)
    hidden = torch.zeros(len(COUNTS) - 2, network.hidden_size)
    log_prob = network.log_prob(hidden, torch.zeros(len(hidden), 0, dtype=torch.int64), torch.arange(2, len(COUNTS)))
    smoothed = (COUNTS[2:] + 1).float()
    torch.testing.assert_close(log_prob.exp(), smoothed / smoothed.sum())


def test_classes_are_contiguous_and_cover_all() -> None:
    class_of, begin = frequency_classes(COUNTS.numpy() + 1, 6)
    assert (class_of[:2] == -1).all()
    assert np.bincount(class_of[2:], minlength=6).tolist() == np.diff(begin).tolist()
    # More frequent words never stand in a later class.
    assert (np.diff(class_of[4:]) >= 0).all()


def test_classes_have_equal_shares_of_the_roots_of_counts() -> None:
    """A word belongs to the class that the middle of its share lies in."""
    class_of, begin = frequency_classes(np.array([7, 7, *[4] * 12]), 4)
    assert class_of.tolist() == [-1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3] and begin.tolist() == [0, 3, 6, 9, 12]
    class_of, _ = frequency_classes(np.array([0, 0, 1, 16, 9]), 2)  # shares 1, 4 and 3 of 8
    assert class_of.tolist() == [-1, -1, 1, 0, 1]


def test_classes_without_words_take_no_probability() -> None:
    """Half of all words are one word: it fills the first classes' share alone."""
    output = ClassSoftmaxOutput(len(COUNTS), 4, None, num_classes=6)
    output.set_unigram(torch.tensor([0, 0, 10**6, *[1] * (len(COUNTS) - 3)]), reset_bias=True)
    assert len(output.class_rows) < 6 and output.class_rows[0] > 0
    hidden, history = torch.randn(1, 4).expand(len(COUNTS), -1), torch.zeros(len(COUNTS), 0, dtype=torch.int64)
    log_prob = output.log_prob(hidden, history, torch.arange(len(COUNTS)))
    assert log_prob[:2].tolist() == [-torch.inf] * 2
    torch.testing.assert_close(log_prob.exp().sum(), torch.tensor(1.0))
    loss = output.loss(hidden[2:], history[2:], torch.arange(2, len(COUNTS)), torch.Generator())
    torch.testing.assert_close(loss, -log_prob[2:].sum())


def test_layers_restore_tree_and_classes() -> None:
    for output in ("hierarchical", "class"):
        network, other = _network(output, 3), _network(output, 3)
        other.output.set_unigram(COUNTS.flip(0), reset_bias=True)
        other.load_state_dict(network.state_dict())
        query = _queries(network, 10)
        torch.testing.assert_close(other.log_prob(*query), network.log_prob(*query))


def test_class_normaliser_answers_mixed_groups() -> None:
    network = _network("class", 2)
    assert isinstance(network.output, ClassSoftmaxOutput)
    query = _queries(network, 30)
    group = network.group_of(query[2])
    together = network.group_normalizer(*query[:2], group)
    for row in range(30):
        alone = network.group_normalizer(query[0][row : row + 1], query[1][row : row + 1], group[row : row + 1])
        torch.testing.assert_close(together[row], alone[0])


def test_maxent_scores_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    maxent = HashedMaxEnt(30, 4, 500)
    nn.init.normal_(maxent.weight)
    history = torch.randint(0, 30, (6, 3))
    everything = maxent.score_each(history, torch.arange(30))
    for choose in (jit_for, lambda function, tensor: None):
        monkeypatch.setattr("asr.lm.rnn.maxent.jit_for", choose)
        scores = torch.ones(6, 10)
        add_score_range(scores, maxent.weight.detach(), maxent.places(history), 10)
        torch.testing.assert_close(scores, everything[:, 10:20] + 1)
        word_id, scores = torch.tensor([3, 3, 17]), torch.ones(6, 3)
        maxent.add_scores(scores, maxent.places(history), word_id)
        torch.testing.assert_close(scores, everything[:, word_id] + 1)
    torch.testing.assert_close(maxent.score(history, torch.arange(6)), everything[torch.arange(6), torch.arange(6)])
    # The bigram part depends on the newest word alone.
    places = maxent.places(torch.tensor([[7, 1, 2], [7, 3, 4], [7, 1, 5]]))
    assert places[0, 0] == places[1, 0]
    assert places[0, 1] == places[2, 1] != places[1, 1]


def test_last_words_after_the_last_place_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    maxent = HashedMaxEnt(5, 2, 1)
    nn.init.normal_(maxent.weight)
    history = torch.tensor([[3]])
    for choose in (jit_for, lambda function, tensor: None):
        monkeypatch.setattr("asr.lm.rnn.maxent.jit_for", choose)
        scores = torch.zeros(1, 2)
        add_score_range(scores, maxent.weight.detach(), maxent.places(history), 3)
        torch.testing.assert_close(scores, maxent.score_each(history, torch.tensor([3, 4])))


def test_pruned_maxent_keeps_the_largest() -> None:
    torch.manual_seed(6)
    maxent = HashedMaxEnt(30, 3, 500)
    nn.init.normal_(maxent.weight)
    dense = maxent.weight.detach().clone()
    maxent.prune(50)
    state = maxent.state_dict()
    assert state["kept_weight"].shape == (50,)
    again = HashedMaxEnt(30, 3, 500)
    again.load_state_dict(state)
    kept = again.weight.detach() != 0
    assert dense[kept].abs().min() >= dense[~kept].abs().max()
    torch.testing.assert_close(again.weight.detach()[kept], dense[kept])
    assert again.state_dict().keys() == state.keys()


def test_features_are_where_trained_networks_have_them() -> None:
    """Other hashes would take all weights of networks trained before to other histories."""
    history = torch.tensor([[4, 5, 6, 7, 8, 9], [1, 0, 0, 0, 0, 0]])
    assert hashed_places(history, 7, 1_000_003).tolist() == [
        [688987, 287145, 626283, 246412, 616439, 723842],
        [657467, 524234, 616211, 664992, 62587, 146455],
    ]


def test_features_need_an_order_of_two_and_a_table() -> None:
    assert HashedMaxEnt(5, 2, 1).weight.shape == (6,)
    for order, table_size in ((1, 8), (2, 0)):
        with pytest.raises(ValueError, match="an order of at least 2 and a table"):
            HashedMaxEnt(5, order, table_size)


@pytest.mark.parametrize("num_layers", [1, 2])
@torch.no_grad()
def test_a_batch_and_sentences_side_by_side_equal_the_network_word_by_word(num_layers: int) -> None:
    """Three sentences of 3 words, of which the first 3, 2 and 1 are read side by side."""
    network = _network("class", 3, num_layers=num_layers).eval()
    words = torch.tensor([[1, 7, 9, 5], [1, 8, 8, 6], [1, 4, 7, 3]])
    state, history, rows, losses = network.initial_state().repeat(3, 1), torch.zeros(3, 2).long(), [], []
    histories = []
    for position in range(3):
        history = torch.stack([words[:, position], history[:, 0]], dim=1)
        state = network.step(state, words[:, position])
        rows.append(state[:, -network.hidden_size :])
        losses.append(-network.log_prob(rows[-1], history, words[:, position + 1]).sum())
        histories.append(history)
    is_start = torch.zeros(3, 3, dtype=torch.bool)
    is_start[:, 0] = True
    batch = TokenBatch(words[:, :-1], words[:, 1:], torch.stack(histories, dim=1), is_start, True)
    loss, _ = network(batch, None, torch.Generator().manual_seed(0))
    torch.testing.assert_close(loss, torch.stack(losses).sum())
    sizes = [3, 2, 1]
    read = torch.cat([words[:size, position] for position, size in enumerate(sizes)])
    hidden, _ = network.hidden_packed(*network.input_gates(read), sizes, None)
    expected = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("looped", [True, False])
def test_only_the_rows_of_a_batch_have_gradients(looped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer updates these alone."""
    if not looped:
        monkeypatch.setattr("asr.lm.rnn.outputs.nce.jit_for", lambda function, tensor: None)
    network = _network("nce", 3)
    network.output.loss(*_queries(network, 8), torch.Generator().manual_seed(9)).backward()
    assert isinstance(network.output, NceOutput) and network.maxent is not None
    for weight in (network.output.rows.weight, network.output.bias.weight, network.maxent.weight):
        assert weight.grad is not None and weight.grad.is_sparse
