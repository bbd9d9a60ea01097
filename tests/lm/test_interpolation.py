"""Interpolated and difference models against their definitions; packing and numbering of contexts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.lookup import look_up
from asr.lm import combine
from asr.lm.combine import (
    CombinedLM,
    ContextTable,
    NumberedLM,
    RemappedLM,
    difference_lm,
    interpolated_difference_lm,
    interpolated_lm,
)
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.text.symbols import SPECIAL_WORDS, Vocabulary
from tests.reference.ngram_oracle import toy_sentences

SENTENCES = ["w1 w2 w1", "w0 w0 w3 w5", "", "rare3 w1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[NgramLM]:
    """A unigram, a bigram and a trigram of the same text."""
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("\n".join(toy_sentences(0, 200)))
    stream = read_word_stream([path])
    return [NgramLM.from_trie(estimate_kneser_ney(stream, order).trie) for order in (1, 2, 3)]


def _scores(lm: LanguageModel, sentence: str) -> Tensor:
    idx = lm.start(1)
    scores = []
    for word in lm.vocabulary.ids_of(sentence.split()):
        score, idx = lm.score(idx, word[None])
        scores.append(score)
    return torch.cat([*scores, lm.final(idx)])


@pytest.mark.parametrize("sentence", SENTENCES)
def test_linear_and_log_linear(models: list[NgramLM], sentence: str) -> None:
    one, two, three = (_scores(lm, sentence) for lm in models)
    linear = interpolated_lm(models, [0.2, 0.3, 0.5])
    assert isinstance(linear, LanguageModel)
    torch.testing.assert_close(_scores(linear, sentence), (0.2 * one.exp() + 0.3 * two.exp() + 0.5 * three.exp()).log())
    log_linear = interpolated_lm(models[1:], [0.7, 0.6], "log-linear")
    torch.testing.assert_close(_scores(log_linear, sentence), 0.7 * two + 0.6 * three)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_difference_takes_the_small_model_out(models: list[NgramLM], sentence: str) -> None:
    small, large = models[1], models[2]
    difference = difference_lm(large, small)
    torch.testing.assert_close(_scores(difference, sentence) + _scores(small, sentence), _scores(large, sentence))
    nested = difference_lm(interpolated_lm([large, models[0]], [0.5, 0.5]), small)
    mixed = torch.logaddexp(_scores(large, sentence), _scores(models[0], sentence)) + torch.tensor(0.5).log()
    torch.testing.assert_close(_scores(nested, sentence) + _scores(small, sentence), mixed)


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_interpolated_difference_asks_the_small_model_once(models: list[NgramLM], sentence: str, weight: float) -> None:
    small, large = models[1], models[2]
    nested = difference_lm(interpolated_lm([large, small], [weight, 1.0 - weight]), small)
    torch.testing.assert_close(
        _scores(interpolated_difference_lm(large, small, weight), sentence), _scores(nested, sentence)
    )


def test_what_the_small_model_rules_out_stays_out(models: list[NgramLM]) -> None:
    difference = difference_lm(models[2], models[1])
    score, _ = difference.score(difference.start(2), torch.tensor([1, 4]))
    assert score[0] == -torch.inf
    assert torch.isfinite(score[1])


def test_weights_of_zero_and_one(models: list[NgramLM]) -> None:
    for kind in ("linear", "log-linear"):
        lm = interpolated_lm(models[1:], [0.0, 1.0], kind)  # type: ignore[arg-type]
        torch.testing.assert_close(_scores(lm, "w1 w2"), _scores(models[2], "w1 w2"))
        score, _ = lm.score(lm.start(1), torch.tensor([1]))
        assert score == -torch.inf


@given(st.lists(st.tuples(st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 32) - 1))))
def test_packing_is_exact(pairs: list[tuple[int, int]]) -> None:
    first = torch.tensor([pair[0] for pair in pairs], dtype=torch.int64)
    second = torch.tensor([pair[1] for pair in pairs], dtype=torch.int64)
    packed = CombinedLM.pack(first, second)
    assert len(torch.unique(packed)) == len(set(pairs))
    assert (packed >= 0).all()
    for ours, theirs in zip(CombinedLM.unpack(packed), (first, second), strict=True):
        assert torch.equal(ours, theirs)


def test_an_index_that_does_not_fit_is_an_error(models: list[NgramLM]) -> None:
    for first, second in ((1 << 31, 0), (0, 1 << 32), (-1, 0)):
        far = (mock.Mock(wraps=models[0], vocabulary=models[0].vocabulary) for _ in range(2))
        lm = difference_lm(*far)
        word = torch.tensor([5])
        for part, idx in zip((lm.first, lm.second), (first, second), strict=True):
            part.score.side_effect = lambda context, word, idx=idx: (torch.zeros(1), torch.tensor([idx]))  # type: ignore[attr-defined]
        with pytest.raises(AsrError, match="exceeds 31 bits"):
            lm.score(lm.start(1), word)
        with pytest.raises(AsrError, match="exceeds 31 bits"):
            lm.final(torch.tensor([0]))
    with pytest.raises(AsrError, match="must be positive and sum to one"):
        interpolated_lm(models[1:], [0.5, 0.6])
    with pytest.raises(AsrError, match="a weight each"):
        interpolated_lm(models, [0.5, 0.5])
    with pytest.raises(AsrError, match="no kind of interpolation"):
        interpolated_lm(models[1:], [0.5, 0.5], "geometric")  # type: ignore[arg-type]


def numbered(table: ContextTable, batch: list[int], numbers: dict[int, int]) -> tuple[Tensor, Tensor]:
    """A batch's keys and the table's numbers of them, each of which is the one that it had, if it had one."""
    key = torch.tensor(batch, dtype=torch.int64) * (1 << 50) + 3
    idx = table.index_of(key)
    for one, number in zip(key.tolist(), idx.tolist(), strict=True):
        assert numbers.setdefault(one, number) == number
    return key, idx


@given(st.lists(st.lists(st.integers(0, 50), max_size=40), max_size=10))
def test_context_table_numbers_keys_once(batches: list[list[int]]) -> None:
    table = ContextTable(num_buckets=1)
    numbers: dict[int, int] = {}
    for batch in batches:
        key, idx = numbered(table, batch, numbers)
        assert torch.equal(table.key_of(idx), key)
    assert sorted(numbers.values()) == list(range(len(table)))


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=20), min_size=10, max_size=20))
def test_context_table_gives_numbers_again_that_are_not_kept(batches: list[list[int]]) -> None:
    table = ContextTable(num_buckets=1)
    numbers: dict[int, int] = {}
    for batch in batches:
        key, idx = numbered(table, batch, numbers)
        assert len(set(numbers.values())) == len(numbers) == len(table)
        assert max(numbers.values()) < 64  # at most 40 at a time
        table.keep(idx)
        numbers = {one: numbers[one] for one in key.tolist()}
        assert len(table) == len(numbers) and torch.equal(table.key_of(idx), key)


def test_numbered_contexts_of_a_stream_without_an_end_are_bounded(
    models: list[NgramLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combine, "_FEWEST_TO_FORGET", 8)
    plain, generator = models[2], torch.Generator().manual_seed(0)
    numbered = NumberedLM(plain)
    context_idx, own_idx, most = plain.start(4), numbered.start(4), 0
    for _ in range(100):
        word_id = torch.randint(len(SPECIAL_WORDS), len(plain.vocabulary), (4,), generator=generator)
        expected, context_idx = plain.score(context_idx, word_id)
        log_prob, own_idx = numbered.score(own_idx, word_id)
        assert torch.equal(log_prob, expected)
        numbered.retain(own_idx)
        most = max(most, int(own_idx.max()))
    assert most < 16


def test_models_of_different_words(models: list[NgramLM], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Vocabulary(["w2", "unheard", "w1"])
    with pytest.raises(AsrError, match="map one to the other's with RemappedLM"):
        difference_lm(models[1], RemappedLM(models[0], other))
    mapped = RemappedLM(models[2], other)
    assert mapped.num_oov_words == 1
    assert "lacks 1 of 3 words" in caplog.text
    torch.testing.assert_close(_scores(mapped, "w1 unheard w2"), _scores(models[2], "w1 unheard w2"))
    with pytest.raises(AsrError, match=r"has none of the 2 words asked for \('W2', ...\); check .* language and case"):
        RemappedLM(models[2], Vocabulary(["W1", "W2"]))
    many = RemappedLM(models[2], Vocabulary([*models[2].vocabulary.words[4:], "unheard", "unknown", "unsaid"]))
    word_id = torch.arange(len(SPECIAL_WORDS), len(many.vocabulary))
    log_prob, _ = many.score(many.start(1).expand(len(word_id)), word_id)
    probability = log_prob.double().exp()
    ends, unheard = many.final(many.start(1)).double().exp(), models[2].vocabulary.ids_of(["unheard"])
    unknown, _ = models[2].score(models[2].start(1), unheard)
    torch.testing.assert_close(probability[-3:].sum().float(), unknown[0].exp())
    assert float(probability.sum() + ends) == pytest.approx(1.0, abs=1e-5)
    numbered = NumberedLM(mapped)
    assert torch.equal(_scores(numbered, "w1 w2"), _scores(mapped, "w1 w2"))
    assert numbered.start(3).tolist() == [0, 0, 0]
    numbered.retain(torch.empty(0, dtype=torch.int64))  # nothing is held: numbers begin anew
    _, first = numbered.score(numbered.start(1), torch.tensor([5]))
    assert first.tolist() == [1]


@pytest.mark.parametrize("kind", ["plain", "words missing", "ruled out"])
def test_a_loop_answers_as_the_difference_does(models: list[NgramLM], kind: str) -> None:
    pytest.importorskip("numba")
    _, small, large = models
    if kind == "ruled out":
        score = small.arrays.score.index_fill(0, torch.tensor([7]), -torch.inf)
        small = NgramLM(small.vocabulary, replace(small.arrays, score=score), small.order)
    words = [*small.vocabulary.words[len(SPECIAL_WORDS) :], *(["new", "newer"] if kind == "words missing" else [])]
    vocabulary = Vocabulary(words[::-1])
    lm = difference_lm(RemappedLM(large, vocabulary), RemappedLM(small, vocabulary))
    tables = lm.lookup_tables()
    assert tables is not None
    idx = lm.start(40)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        word = torch.randint(2, len(vocabulary), (40,), generator=generator)
        expected, next_idx = lm.score(idx, word)
        with np.errstate(over="ignore"):
            score, found = np.empty(40, dtype=np.float32), np.empty(40, dtype=np.int64)
            could = look_up(idx.numpy(), word.numpy(), tables, score, found)
        assert could and score.tolist() == expected.tolist() and found.tolist() == next_idx.tolist()
        idx = next_idx
    assert bool(torch.any(torch.isinf(expected))) == (kind == "ruled out")


def test_other_models_have_nothing_for_a_loop(models: list[NgramLM]) -> None:
    _, small, large = models
    uncompiled = NgramLM(large.vocabulary, large.arrays, large.order, compiled=False)
    others = [interpolated_lm([large, small], [0.5, 0.5]), difference_lm(uncompiled, small)]
    for lm in [*others, difference_lm(interpolated_lm([large, small], [0.5, 0.5]), small)]:
        assert lm.lookup_tables() is None
    assert RemappedLM(uncompiled, small.vocabulary).lookup_tables() is None
