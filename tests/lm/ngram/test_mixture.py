"""Static interpolation against the definition: what is listed is the weighted sum, and every history sums to one."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asr.cli.main import run
from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.arpa import read_arpa, write_arpa
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.ngram.transform import mix_linearly
from asr.lm.ngram.trie import NgramTrie
from asr.text.symbols import Vocabulary
from tests.reference.ngram_oracle import BackoffModel, toy_sentences

WORDS = ["a", "b", "c", "d", "e"]


def _trie(folder: Path, sentences: list[str], order: int, vocabulary: Vocabulary) -> NgramTrie:
    """A model that lists the sentences' own words only, read with the vocabulary given."""
    text, arpa = folder / "text", folder / "lm.arpa"
    text.write_text("\n".join(sentences) + "\n")
    write_arpa(estimate_kneser_ney(read_word_stream([text]), order).trie, arpa)
    return read_arpa(arpa, vocabulary)


@pytest.mark.slow
@settings(max_examples=12)
# The backoff weight of `b` is zero here.
@example([["a"]], [["b"], ["b", "c"], ["b", "d", "c"]], 1, 0.5, False)
@given(
    st.lists(st.lists(st.sampled_from(WORDS[:4]), min_size=1, max_size=6), min_size=1, max_size=8),
    st.lists(st.lists(st.sampled_from(WORDS[1:]), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 3),
    st.floats(0.05, 0.95),
    st.booleans(),
)
def test_listed_ngrams_are_interpolated_and_histories_sum_to_one(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[list[str]],
    second: list[list[str]],
    order: int,
    weight: float,
    by_history: bool,
) -> None:
    folder = tmp_path_factory.mktemp("mix")
    vocabulary = Vocabulary(WORDS)
    tries = [
        _trie(folder, [" ".join(words) for words in text], own_order, vocabulary)
        for text, own_order in ((first, order), (second, 2))
    ]
    mixed = mix_linearly(tries, [weight, 1 - weight], by_history)
    assert mixed.order == max(order, 2)
    models, mixture = [BackoffModel(trie) for trie in tries], BackoffModel(mixed)
    listed = set(models[0].score) | set(models[1].score)
    assert set(mixture.score) == listed
    for ngram in listed - {("<s>",)}:
        history, word = ngram[:-1], ngram[-1]
        shares, expected = [], 0.0
        for share, model in zip((weight, 1 - weight), models, strict=True):
            shares.append(share * _explained(model, history) if by_history else share)
            known = tuple(old if (old,) in model.score else "<unk>" for old in history)
            expected += shares[-1] * math.exp(model.log_prob(known, word)) if (word,) in model.score else 0.0
        assert math.exp(mixture.score[ngram]) == pytest.approx(expected / sum(shares), rel=1e-4), ngram
    lm = NgramLM.from_trie(mixed)
    for history in itertools.chain([()], itertools.product(WORDS, repeat=2)):
        state = lm.start(1)
        for word_id in lm.vocabulary.ids_of(history):
            state = lm.score(state, word_id[None])[1]
        listed_id = torch.from_numpy(mixed.listed().nonzero()[0])
        total = lm.score(state.expand(len(listed_id)), listed_id)[0].exp().sum()
        assert float(total) == pytest.approx(1.0, abs=1e-4)


def _explained(model: BackoffModel, history: tuple[str, ...]) -> float:
    """The probability of a history's words; that of `<s>` is one."""
    probability = 1.0
    for position, word in enumerate(history):
        if word != "<s>":
            probability *= math.exp(model.log_prob(history[:position], word)) if (word,) in model.score else 0.0
    return probability


@pytest.mark.parametrize("by_history", [False, True])
def test_a_mixture_of_equals_is_the_model(tmp_path: Path, by_history: bool) -> None:
    text = tmp_path / "text"
    text.write_text("\n".join(toy_sentences(2, 200)))
    trie = estimate_kneser_ney(read_word_stream([text]), 3).trie
    mixed = mix_linearly([trie, trie, trie], [0.2, 0.3, 0.5], by_history)
    assert mixed.order_begin == trie.order_begin
    torch.testing.assert_close(torch.from_numpy(mixed.score), torch.from_numpy(trie.score), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.from_numpy(mixed.backoff), torch.from_numpy(trie.backoff), atol=1e-4, rtol=0)


def test_command_line_and_bad_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("one.arpa", "two.arpa", "mixed.arpa")]
    for path, sentences in zip(paths, (["a b", "a c a"], ["c d", "d d c"]), strict=False):
        write_arpa(_trie(tmp_path, sentences, 2, Vocabulary(sorted(set(" ".join(sentences).split())))), Path(path))
    command = ["lm", "ngram", "--from-arpa", *paths[:2], "--arpa", paths[2]]
    assert run([*command, "--weights", "0.25", "0.75"]) == 0
    assert json.loads(capsys.readouterr().out)["ngrams"][0] == len("abcd") + 3
    assert read_arpa(paths[2]).vocabulary.words[4:] == ("a", "b", "c", "d")
    with pytest.raises(AsrError, match="--by-history mixes several models"):
        run(["lm", "ngram", "--from-arpa", paths[0], "--by-history", "--arpa", paths[2]])
    with pytest.raises(AsrError, match="--from-arpa names 2 models; give --weights with as many numbers"):
        run(command)
    with pytest.raises(AsrError, match=r"weights 0\.5 0\.6: give each of the 2 models one above 0, with the sum 1"):
        run([*command, "--weights", "0.5", "0.6"])
    with pytest.raises(AsrError, match="weights nan nan: give each of the 2 models one above 0"):
        run([*command, "--weights", "nan", "nan"])
    with pytest.raises(AsrError, match="different word lists"):
        mix_linearly([read_arpa(paths[0]), read_arpa(paths[1])], [0.5, 0.5])
    for source in (["--text", str(tmp_path / "text")], ["--from-arpa", paths[0]]):
        with pytest.raises(AsrError, match="--weights mixes several models"):
            run(["lm", "ngram", *source, "--weights", "1", "--arpa", paths[2]])
