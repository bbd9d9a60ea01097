"""`NgramLM` against a hand-worked model, KenLM and its own invariants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asr.lm.interface import LanguageModel
from asr.lm.ngram.arpa import LN_10
from asr.lm.ngram.model import NgramLM, is_narrow, narrow
from asr.text.symbols import Vocabulary
from tests.reference.tiny_arpa import TINY


@pytest.fixture
def arpa_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.arpa"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize(
    ("sentence", "log10"),
    [
        ("a b", [-0.2, -0.05, -0.3]),
        ("b b", [-0.5 - 0.7, -0.2 - 0.7, -0.3]),
        ("a a", [-0.2, -0.1 - 0.3 - 0.5, -0.3 - 0.6]),
        ("never b", [-0.5 - 1.0, -0.7, -0.3]),
        ("", [-0.5 - 0.6]),
    ],
)
def test_hand_worked_scores(arpa_path: Path, sentence: str, log10: list[float]) -> None:
    scores = NgramLM.from_arpa(arpa_path).score_sentence(sentence.split())
    torch.testing.assert_close(scores / LN_10, torch.tensor(log10))


def test_histories_with_equal_futures_are_one_state(arpa_path: Path) -> None:
    lm = NgramLM.from_arpa(arpa_path)
    assert isinstance(lm, LanguageModel)
    # no history, <s>, a, b, <s> a; "a b", though listed, has the future of "b"
    assert lm.num_states == 5
    a, b = lm.vocabulary.ids_of(["a", "b"])
    after_a = lm.score(lm.start(1), a[None])[1]
    after_ab = lm.score(after_a, b[None])[1]
    after_b = lm.score(lm.start(1), b[None])[1]
    assert after_ab == after_b
    assert after_a != lm.score(after_b, a[None])[1]


def test_queries_come_in_any_order_and_repeat(arpa_path: Path) -> None:
    lm = NgramLM.from_arpa(arpa_path)
    state = torch.arange(lm.num_states).repeat_interleave(len(lm.vocabulary))
    word = torch.arange(len(lm.vocabulary)).repeat(lm.num_states)
    score, next_state = lm.score(state, word)
    mixed = torch.randperm(3 * len(state)) % len(state)
    mixed_score, mixed_next = lm.score(state[mixed], word[mixed])
    assert torch.equal(mixed_score, score[mixed])
    assert torch.equal(mixed_next, next_state[mixed])
    one_by_one = torch.cat([lm.score(s[None], w[None])[0] for s, w in zip(state, word, strict=True)])
    assert torch.equal(one_by_one, score)


def test_words_without_unigram_are_scored_as_unknown(arpa_path: Path) -> None:
    lm = NgramLM.from_arpa(arpa_path, Vocabulary(["c", "b", "a", "d"]))
    assert lm.num_oov_words == 2
    scores = lm.score_sentence(["a", "c", "b"])
    torch.testing.assert_close(scores / LN_10, torch.tensor([-0.2, -0.1 - 0.3 - 1.0, -0.7, -0.3]))
    assert torch.equal(lm.final(lm.start(2)), lm.score(lm.start(2), torch.tensor([2, 2]))[0])


def test_no_query_and_start_twice(arpa_path: Path) -> None:
    lm = NgramLM.from_arpa(arpa_path)
    score, next_state = lm.score(lm.start(0), torch.zeros(0, dtype=torch.int64))
    assert score.shape == next_state.shape == (0,)
    assert lm.start(2)[0] == lm.start(2)[1]


def test_scores_equal_kenlm(arpa_path: Path) -> None:
    kenlm = pytest.importorskip("kenlm")
    model = kenlm.Model(str(arpa_path))
    lm = NgramLM.from_arpa(arpa_path)
    for sentence in ("a b a b b a", "b a z a a b", "a", "z z"):
        theirs = torch.tensor([score for score, _, _ in model.full_scores(sentence)])
        torch.testing.assert_close(lm.score_sentence(sentence.split()) / LN_10, theirs)


def test_labels_in_16_bits_keep_their_order_up_to_65536_words() -> None:
    label = torch.arange(1 << 16)
    found = narrow(label)
    assert found.dtype == torch.int16 and torch.equal(found.to(torch.int64) - int(found[0]), label)
    assert is_narrow(1 << 16) and not is_narrow((1 << 16) + 1)
