"""Interpolated, difference and remapped models against their definitions, in tensors and in loops."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.jit import jit_required
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.checks import CheckedLM, require_language_model
from asr.lm.combine import (
    CombinedLM,
    Difference,
    Interpolated,
    NumberedLM,
    RemappedLM,
    SentencesLM,
    WordMapper,
    look_up_combined,
    look_up_sentences,
    mapped_to,
)
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import EOS_ID, SPECIAL_WORDS, UNK_ID, Vocabulary
from tests.reference.ngram_oracle import toy_sentences
from tests.reference.table_lm import TableLM

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
    linear = Interpolated(models, [0.2, 0.3, 0.5])
    assert isinstance(linear, LanguageModel)
    torch.testing.assert_close(_scores(linear, sentence), (0.2 * one.exp() + 0.3 * two.exp() + 0.5 * three.exp()).log())
    log_linear = Interpolated(models[1:], [0.7, 0.6], "log-linear")
    torch.testing.assert_close(_scores(log_linear, sentence), 0.7 * two + 0.6 * three)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_difference_takes_the_small_model_out(models: list[NgramLM], sentence: str) -> None:
    small, large = models[1], models[2]
    difference = Difference(large, small)
    torch.testing.assert_close(_scores(difference, sentence) + _scores(small, sentence), _scores(large, sentence))
    nested = Difference(Interpolated([large, models[0]], [0.5, 0.5]), small)
    mixed = torch.logaddexp(_scores(large, sentence), _scores(models[0], sentence)) + torch.tensor(0.5).log()
    torch.testing.assert_close(_scores(nested, sentence) + _scores(small, sentence), mixed)


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_interpolated_with_the_small_model_itself(models: list[NgramLM], sentence: str, weight: float) -> None:
    small, large = models[1], models[2]
    lm = Difference(Interpolated([large, small], [weight, 1.0 - weight]), small)
    assert lm.models == [large, small]
    one, other = _scores(large, sentence), _scores(small, sentence)
    torch.testing.assert_close(_scores(lm, sentence), (weight * one.exp() + (1 - weight) * other.exp()).log() - other)


def test_what_the_small_model_rules_out_stays_out(models: list[NgramLM]) -> None:
    difference = Difference(models[2], models[1])
    score, _ = difference.score(difference.start(2), torch.tensor([1, 4]))
    assert score[0] == -torch.inf
    assert torch.isfinite(score[1])


def test_weights_of_zero_and_one(models: list[NgramLM]) -> None:
    for kind in ("linear", "log-linear"):
        lm = Interpolated(models[1:], [0.0, 1.0], kind)  # type: ignore[arg-type]
        torch.testing.assert_close(_scores(lm, "w1 w2"), _scores(models[2], "w1 w2"))
        score, _ = lm.score(lm.start(1), torch.tensor([1]))
        assert score == -torch.inf


def test_invalid_weights(models: list[NgramLM]) -> None:
    for weights in ([0.5, 0.6], [1.5, -0.5], [0.5, float("nan")]):
        with pytest.raises(AsrError, match="must be 0 or more, and sum to one"):
            Interpolated(models[1:], weights)
    with pytest.raises(AsrError, match="a weight each"):
        Interpolated(models, [0.5, 0.5])
    with pytest.raises(AsrError, match="not a kind of interpolation"):
        Interpolated(models[1:], [0.5, 0.5], "geometric")  # type: ignore[arg-type]


def test_a_model_that_occurs_twice_is_asked_once(models: list[NgramLM]) -> None:
    unigram, small, large = models
    lm = Difference(Interpolated([Difference(large, unigram), small, unigram], [0.5, 0.25, 0.25], "log-linear"), small)
    assert lm.models == [large, unigram, small]
    one, two, three = (_scores(model, "w1 w2") for model in models)
    torch.testing.assert_close(_scores(lm, "w1 w2"), 0.5 * (three - one) + 0.25 * two + 0.25 * one - two)


def test_models_of_different_words(models: list[NgramLM], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Vocabulary(["w2", "unheard", "w1"])
    with pytest.raises(AsrError, match="map them to one with RemappedLM"):
        Difference(models[1], RemappedLM(models[0], other))
    mapped = RemappedLM(models[2], other)
    assert mapped.num_oov_words == 1
    assert "lacks 1 of 3 words" in caplog.text
    caplog.clear()
    RemappedLM(models[2], other, warn=False)
    assert not caplog.text
    torch.testing.assert_close(_scores(mapped, "w1 unheard w2"), _scores(models[2], "w1 unheard w2"))
    for words in (["W1", "W2"], ["W2"]):
        known = re.escape(repr(models[2].vocabulary.words[-1]))
        message = rf"model \({known}, ...\) has none of the {len(words)} words asked for \('W2', ...\); check .* case"
        with pytest.raises(AsrError, match=message):
            RemappedLM(models[2], Vocabulary(words))
    caplog.clear()
    assert [RemappedLM(models[2], Vocabulary(words)).num_oov_words for words in ([], ["w1"])] == [0, 0]
    assert not caplog.text
    many = mapped_to(models[2], Vocabulary([*models[2].vocabulary.words[4:], "unheard", "unknown", "unsaid"]))
    assert "lacks 3 of" in caplog.text
    word_id = torch.arange(len(SPECIAL_WORDS), len(many.vocabulary))
    log_prob, _ = many.score(many.start(1).expand(len(word_id)), word_id)
    probability = log_prob.double().exp()
    ends, unheard = many.final(many.start(1)).double().exp(), models[2].vocabulary.ids_of(["unheard"])
    unknown, _ = models[2].score(models[2].start(1), unheard)
    torch.testing.assert_close(probability[-3:].sum().float(), unknown[0].exp())
    assert float(probability.sum() + ends) == pytest.approx(1.0, abs=1e-5)
    for others in (["unheard", "unknown", "unsaid"], ["unheard"]):
        words = Vocabulary([*models[2].vocabulary.words[4:], *others])
        quarter = RemappedLM(models[2], words, unknown_share=0.25)
        word_id = torch.arange(len(SPECIAL_WORDS), len(words))
        score, _ = quarter.score(quarter.start(1).expand(len(word_id)), word_id)
        torch.testing.assert_close(score[-len(others) :].exp().sum(), unknown[0].exp() / 4)
        assert torch.equal(score[: -len(others)], log_prob[: len(score) - len(others)])
    two = RemappedLM(models[2], Vocabulary([*models[2].vocabulary.words[4:], "unheard", "unknown"]))
    both, _ = two.score(two.start(1).expand(2), two.vocabulary.ids_of(["unheard", "unknown"]))
    torch.testing.assert_close(both, unknown.expand(2) - math.log(2.0))
    # Special words are what they are in the model: they get no share of another word.
    special = torch.arange(UNK_ID + 1)
    own, _ = models[2].score(models[2].start(1).expand(len(special)), special)
    assert torch.equal(many.score(many.start(1).expand(len(special)), special)[0], own)


def test_a_model_is_mapped_only_to_other_words_and_only_once(models: list[NgramLM]) -> None:
    mapper = WordMapper(models[0].vocabulary)
    assert mapper.mapped(None) is None and mapper.mapped(models[1]) is models[1]
    other = Vocabulary(["w2", "w1"])
    mapper = WordMapper(other)
    mapped = mapper.mapped(models[1])
    assert isinstance(mapped, RemappedLM) and mapped.vocabulary == other
    assert mapper.mapped(models[2]) is not mapped and mapper.mapped(models[1]) is mapped


def _ruled_out(lm: NgramLM) -> NgramLM:
    """The same model, one word impossible."""
    score = lm.arrays.score.index_fill(0, torch.tensor([7]), -torch.inf)
    return NgramLM(lm.vocabulary, replace(lm.arrays, score=score), lm.order)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["difference", "interpolated", "with the small one", "nested", "log-linear"])
@pytest.mark.parametrize("kind", ["plain", "words missing", "ruled out"])
def test_a_loop_answers_as_the_combination_does(models: list[NgramLM], kind: str, form: str, compiled: bool) -> None:
    pytest.importorskip("numba")
    loop: Any = jit_required(look_up_combined) if compiled else look_up_combined
    unigram, small, large = models
    if kind == "ruled out":
        small = _ruled_out(small)
    words = [*small.vocabulary.words[len(SPECIAL_WORDS) :], *(["new", "newer"] if kind == "words missing" else [])]
    vocabulary = Vocabulary(words[::-1])
    first, second, third = (RemappedLM(lm, vocabulary) for lm in (large, small, unigram))
    lm: CombinedLM = {
        "difference": Difference(first, second),
        "interpolated": Interpolated([first, second], [0.3, 0.7]),
        "with the small one": Difference(Interpolated([first, second], [0.3, 0.7]), second),
        "nested": Difference(Interpolated([first, third], [0.7, 0.3]), second),
        "log-linear": Interpolated([first, second, third], [0.7, 0.0, 0.4], "log-linear"),
    }[form]
    idx = lm.start(40)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        word = torch.randint(2, len(vocabulary), (40,), generator=generator)
        tables = lm.lookup_tables()
        assert tables is not None and tables.always_answers == (len(lm.models) == 2)
        score, found = np.empty(40, dtype=np.float32), np.empty(40, dtype=np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            assert loop(idx.numpy(), word.numpy(), tables, score, found)
        lm.expand(idx[:0], idx)
        expected, next_idx = lm.score(idx, word)
        exact = form == "difference"
        torch.testing.assert_close(torch.from_numpy(score), expected, rtol=0, atol=0 if exact else 2e-6)
        assert found.tolist() == next_idx.tolist()
        idx = next_idx
    assert bool(torch.any(torch.isinf(expected))) == (
        kind == "ruled out" and form not in ("interpolated", "log-linear")
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_models", [1, 2, 3])
def test_after_the_end_of_a_sentence_the_next_one_begins(
    models: list[NgramLM], num_models: int, compiled: bool
) -> None:
    pytest.importorskip("numba")
    loop: Any = jit_required(look_up_sentences) if compiled else look_up_sentences
    unigram, small, large = models
    plain = [large, Difference(large, small), Difference(Interpolated([large, unigram], [0.3, 0.7]), small)][
        num_models - 1
    ]
    lm = SentencesLM(plain)
    first, second = (lm.vocabulary.ids_of(sentence.split()) for sentence in SENTENCES[:2])
    words = torch.cat([first, torch.tensor([EOS_ID]), second, torch.tensor([EOS_ID, EOS_ID])])
    idx, scores = lm.start(1), []
    for word in words:
        score, found = np.empty(1, dtype=np.float32), np.empty(1, dtype=np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            assert loop(idx.numpy(), word[None].numpy(), lm.lookup_tables(), score, found)
        lm.expand(idx[:0], idx)
        expected, idx = lm.score(idx, word[None])
        assert score.item() == pytest.approx(expected.item(), abs=2e-6) and found.tolist() == idx.tolist()
        scores.append(expected)
        if word == EOS_ID:
            assert idx.tolist() == plain.start(1).tolist()
    alone = [_scores(plain, sentence) for sentence in (*SENTENCES[:2], "")]
    torch.testing.assert_close(torch.cat(scores), torch.cat(alone))
    assert lm.lookup_tables().always_answers == (num_models < 3) and lm.inner is plain


def test_the_next_sentence_begins_where_contexts_were_forgotten() -> None:
    class Renumbered(TableLM):
        """Gives its contexts other numbers when it forgets."""

        def retain(self, live: Tensor) -> None:
            self._histories, self._idx_of = [(99,)] * (len(self._histories) + 5), {}

    vocabulary = Vocabulary(["A", "B"])
    plain = Renumbered(vocabulary)
    lm = SentencesLM(plain)
    ends = torch.full((1,), EOS_ID)
    assert torch.equal(lm.score(lm.start(1), ends)[1], plain.start(1))
    lm.retain(torch.empty(0, dtype=torch.int64))
    assert torch.equal(lm.score(lm.start(1), ends)[1], plain.start(1)) and int(plain.start(1)) > 4


def test_a_users_model_need_not_score_the_end_of_a_sentence_as_a_word() -> None:
    class Strict(TableLM):
        def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
            assert len(word_id) and not (word_id == EOS_ID).any()
            return super().score(context_idx, word_id)

    vocabulary = Vocabulary(["A", "B"])
    plain, lm = TableLM(vocabulary), SentencesLM(CheckedLM(Strict(vocabulary)))
    (a, b) = vocabulary.ids_of(["A", "B"]).tolist()
    assert plain.start(3).tolist() == lm.start(3).tolist()
    word_id = torch.tensor([a, EOS_ID, b])
    log_prob, context_idx = lm.score(lm.start(3), word_id)
    assert log_prob[[0, 2]].tolist() == plain.score(plain.start(2), word_id[[0, 2]])[0].tolist()
    assert log_prob[1].item() == plain.final(plain.start(1)).item()
    again, _ = lm.score(context_idx, torch.full((3,), b))
    assert again[1].item() == plain.score(plain.start(1), word_id[2:])[0].item()
    only, _ = lm.score(lm.start(2), torch.full((2,), EOS_ID))
    assert only.tolist() == plain.final(plain.start(2)).tolist()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda lm: pickle.loads(pickle.dumps(lm))])
def test_a_copy_of_a_combination_looks_up_its_own_arrays(
    models: list[NgramLM], copied: Callable[[CombinedLM], CombinedLM]
) -> None:
    pytest.importorskip("numba")
    vocabulary = Vocabulary(models[1].vocabulary.words[: len(SPECIAL_WORDS) - 1 : -1])
    lm = Difference(RemappedLM(models[1], vocabulary), RemappedLM(models[0], vocabulary))
    before = lm.lookup_tables()
    other = copied(lm).lookup_tables()
    assert before is not None and other is not None and lm.lookup_tables().models[0] is before.models[0]
    for own, theirs in zip(before.models, other.models, strict=True):
        assert own.lookup == theirs.lookup and not np.array_equal(own.values, theirs.values)


def test_copies_take_no_compiled_code_along(models: list[NgramLM]) -> None:
    network = RNNLanguageModel(models[0].vocabulary, RNNLMConfig(embedding_size=4, hidden_size=4)).eval()
    lm = Difference(Interpolated([CachedRNNLM(network), models[2]], [0.5, 0.5]), models[0])
    lm.score(lm.start(2), torch.tensor([UNK_ID, 5]))
    assert b"numba.core" not in pickle.dumps(lm), "another process would compile it again"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda lm: pickle.loads(pickle.dumps(lm))])
def test_copies_have_their_numbers_once(models: list[NgramLM], copied: Callable[[Any], Any]) -> None:
    pytest.importorskip("numba")
    ngram = copied(models[2])
    assert np.shares_memory(ngram.lookup_tables().label, ngram.arrays.label.numpy())
    assert ngram.name == models[2].name
    network = RNNLanguageModel(models[0].vocabulary, RNNLMConfig(embedding_size=4, hidden_size=4)).eval()
    engine = CachedRNNLM(network)
    engine.lookup_tables()
    engine = copied(engine)
    assert np.shares_memory(engine.lookup_tables().output[0], engine.network.embedding.weight.detach().numpy())


def test_a_loop_stops_where_there_is_no_room_to_number_contexts(models: list[NgramLM]) -> None:
    lm = Difference(Interpolated(models[1:], [0.5, 0.5]), models[0])
    num = 5000
    idx, word = lm.start(num).numpy(), np.full(num, 5)
    score, found = np.empty(num, dtype=np.float32), np.empty(num, dtype=np.int64)
    nothing = torch.empty(0, dtype=torch.int64)
    assert not look_up_combined(idx, word, lm.lookup_tables(), score, found)
    lm.expand(nothing, nothing)
    with np.errstate(over="ignore"):
        assert look_up_combined(idx, word, lm.lookup_tables(), score, found)
    lm.expand(nothing, nothing)
    assert torch.equal(torch.from_numpy(found), lm.score(lm.start(num), torch.from_numpy(word))[1])


class _Told(NgramLM):
    """Remembers the contexts that it is given."""

    told: tuple[Tensor, ...] = ()

    def expand(self, context_idx: Tensor, live: Tensor) -> None:
        self.told = (context_idx, live)

    def retain(self, live: Tensor) -> None:
        self.told = (live,)


def test_models_are_told_of_their_own_contexts(models: list[NgramLM]) -> None:
    one, two = (_Told(lm.vocabulary, lm.arrays, lm.order) for lm in models[1:])
    mapped = RemappedLM(two, Vocabulary(["w2", "w1"]))
    lm = Difference(RemappedLM(one, mapped.vocabulary), mapped)
    _, packed = lm.score(lm.start(2), torch.tensor([5, 4]))
    own = [model.score(model.start(2), model.vocabulary.ids_of(["w1", "w2"]))[1] for model in (one, two)]
    lm.expand(packed, packed[:1])
    for model, contexts in zip((one, two), own, strict=True):
        assert [told.tolist() for told in model.told] == [contexts.tolist(), contexts[:1].tolist()]
    lm.retain(packed)
    for model, contexts in zip((one, two), own, strict=True):
        assert [told.tolist() for told in model.told] == [contexts.tolist()]


def test_a_combination_forgets_the_numbers_of_contexts_that_are_not_held(models: list[NgramLM]) -> None:
    unigram, small, large = models
    lm = Difference(Interpolated([large, unigram], [0.5, 0.5]), small, forget_from=4)
    word_id = torch.arange(len(SPECIAL_WORDS), len(lm.vocabulary))
    _, context_idx = lm.score(lm.start(1).expand(len(word_id)), word_id)
    held = context_idx[5:7]
    expected = lm.score(held, word_id[:2])[0]
    assert len(lm.contexts) > 4
    lm.retain(held)
    assert len(lm.contexts) == 2
    assert torch.equal(lm.score(held, word_id[:2])[0], expected)


@pytest.mark.parametrize("wrap", [CheckedLM, lambda lm: RemappedLM(lm, Vocabulary([*lm.vocabulary.ordinary, "new"]))])
def test_a_combination_within_a_wrapper_is_a_part_like_others(
    models: list[NgramLM], wrap: Callable[[LanguageModel], LanguageModel]
) -> None:
    """As a user's interpolation is in a recognizer."""
    unigram, small, large = models
    mixed = Interpolated([large, small], [0.5, 0.5])
    wrapped = wrap(mixed)
    lm = Difference(wrapped, mapped_to(unigram, wrapped.vocabulary))
    for sentence in SENTENCES:
        torch.testing.assert_close(_scores(lm, sentence), _scores(Difference(mixed, unigram), sentence))
    word_id = torch.arange(len(SPECIAL_WORDS), len(mixed.vocabulary))
    _, context_idx = lm.score(lm.start(1).expand(len(word_id)), word_id)
    held = context_idx[5:7]
    expected = lm.score(held, word_id[:2])[0]
    (numbered,) = (model for model in lm.models if isinstance(model, NumberedLM))
    numbered._forget_at = 4
    lm.retain(held)
    assert len(numbered._numbers) == 2
    assert torch.equal(lm.score(held, word_id[:2])[0], expected)
    lm.retain(held[:0])
    assert len(numbered._numbers) == 0


def test_other_models_have_nothing_for_a_loop(models: list[NgramLM]) -> None:
    _, small, large = models
    uncompiled = NgramLM(large.vocabulary, large.arrays, large.order, compiled=False)
    assert Difference(Interpolated([uncompiled, small], [0.5, 0.5]), small).lookup_tables() is None
    assert RemappedLM(uncompiled, small.vocabulary).lookup_tables() is None


class _Spoiled(TableLM):
    """Has a value that is not a probability for one word after one word, and for the end of that sentence."""

    value = math.nan

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, next_idx = super().score(context_idx, word_id)
        return log_prob.masked_fill((context_idx == 1) & (word_id == 6), self.value), next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        return super().final(context_idx).masked_fill(context_idx == 1, self.value)


class _Misshapen(TableLM):
    """Gives the answers that `wrong` makes of the right ones, to all but two queries."""

    method = "score"

    def wrong(self, answer: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _made(self, method: str, answer: torch.Tensor) -> torch.Tensor:
        return self.wrong(answer) if method == self.method and len(answer) != 2 else answer

    def start(self, num_streams: int) -> torch.Tensor:
        return self._made("start", super().start(num_streams))

    def score(self, context_idx: torch.Tensor, word_id: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_prob, next_idx = super().score(context_idx, word_id)
        return self._made("score, log_prob", log_prob), self._made("score, next_idx", next_idx)

    def final(self, context_idx: torch.Tensor) -> torch.Tensor:
        return self._made("final", super().final(context_idx))


@pytest.mark.parametrize(
    ("method", "wrong", "shown"),
    [
        (
            "start",
            lambda answer: answer[1:],
            r"the shape \(2,\) and the type torch.int64; expected a tensor of as",
        ),
        ("score, log_prob", lambda answer: answer[:1], r"the shape \(1,\)"),
        ("score, log_prob", lambda answer: answer[:, None], r"the shape \(3, 1\)"),
        ("score, log_prob", torch.Tensor.long, "torch.int64; expected a tensor of as many log-probabilities, floats"),
        ("score, next_idx", torch.Tensor.int, "torch.int32; expected a tensor of as many contexts, torch.int64"),
        ("final", torch.Tensor.sum, r"the shape \(\)"),
        ("final", torch.Tensor.tolist, "is a list; expected a tensor of as many log-probabilities"),
        ("score, next_idx", lambda answer: None, "is a NoneType; expected a tensor of as many contexts"),
    ],
)
def test_answers_of_a_users_model_must_have_the_right_shapes(method: str, wrong: Any, shown: str) -> None:
    vocabulary = Vocabulary(["A", "B", "C"])
    model = _Misshapen(vocabulary)
    model.method, model.wrong = method, wrong  # type: ignore[method-assign]
    require_language_model(model)  # two queries are answered well
    checked, word_id = CheckedLM(model), vocabulary.ids_of(["A", "B", "C"])
    with pytest.raises(AsrError, match=rf"_Misshapen.{method}: for 3 queries it .*{shown}"):
        checked.final(checked.score(checked.start(3), word_id)[1])


def test_a_users_model_that_returns_nothing_later_is_told() -> None:
    model = TableLM(Vocabulary(["A", "B", "C"]))
    checked = CheckedLM(model)
    model.score = lambda context_idx, word_id: None  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(AsrError, match=r"TableLM.score: it returns a NoneType; expected a tuple of two"):
        checked.score(checked.start(3), model.vocabulary.ids_of(["A", "B", "C"]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0])
def test_scores_of_a_users_model_must_be_numbers(value: float) -> None:
    vocabulary = Vocabulary(["A", "B", "C"])
    plain, spoiled = TableLM(vocabulary), _Spoiled(vocabulary)
    spoiled.value = value
    checked = CheckedLM(spoiled)
    word_id = vocabulary.ids_of(["A", "B", "C"])
    assert word_id.tolist() == [4, 5, 6]
    context_idx = checked.start(3)
    for lm in (plain, checked):
        assert lm.start(3).tolist() == context_idx.tolist()
        log_prob, next_idx = lm.score(context_idx, word_id)
    assert torch.equal(log_prob, plain.score(context_idx, word_id)[0])
    after_first = next_idx[:1].expand(3)
    assert after_first.tolist() == [1, 1, 1]
    if value == 1.0 or value == -math.inf:  # unnormalized scores and impossible words are allowed
        assert checked.score(after_first, word_id)[0][2] == checked.final(after_first)[0] == value
        return
    with pytest.raises(AsrError, match=rf"_Spoiled.score: log P\(C \| context 1\) is {value}; give a number, or -inf"):
        checked.score(after_first, word_id)
    with pytest.raises(AsrError, match=rf"_Spoiled.final: log P\(</s> \| context 1\) is {value}"):
        checked.final(torch.stack([context_idx[0], after_first[0]]))
