"""Hot words: the scores that phrases add, against a plain scan of the words."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from asr.decoding.nbest import n_best
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.lm.hot_words import HotWords, read_hot_words, with_phrases
from asr.lm.ngram.model import NgramLM
from asr.text.symbols import Vocabulary
from tests.decoding.random_graphs import UNPRUNED, random_graph, random_log_prob
from tests.reference.table_lm import TableLM

LETTERS = Vocabulary("abc")


def occurrences(words: Sequence[str], scores: Mapping[tuple[str, ...], float]) -> list[tuple[int, int, float]]:
    """Begin, end and gain of each phrase among the words."""
    places = ((phrase, begin) for phrase in scores for begin in range(len(words) - len(phrase) + 1))
    return [
        (begin, begin + len(phrase), len(phrase) * scores[phrase])
        for phrase, begin in places
        if tuple(words[begin : begin + len(phrase)]) == phrase
    ]


def most_without_overlap(words: Sequence[str], scores: Mapping[tuple[str, ...], float]) -> float:
    most, found = [0.0], occurrences(words, scores)
    for end in range(1, len(words) + 1):
        most.append(max([most[-1], *(most[begin] + gain for begin, last, gain in found if last == end)]))
    return most[-1]


def are_apart(found: Sequence[tuple[int, int, float]]) -> bool:
    return all(end <= begin for (_, end, _), (begin, _, _) in pairwise(sorted(found)))


def gains(sentences: Sequence[Sequence[str]], hot: HotWords) -> list[float]:
    """What the graph and the model add to each of some sentences of the same length."""
    word_id = torch.stack([LETTERS.ids_of(words) for words in sentences])
    total = hot.gain(LETTERS)[word_id].sum(1)
    model = hot.model(LETTERS)
    if model is not None:
        context = model.start(len(sentences))
        for column in word_id.unbind(1):
            score, context = model.score(context, column)
            total += score
        total += model.final(context)
    return [float(gain) for gain in total]


def test_sentences_gain_the_scores_of_their_phrases() -> None:
    num_apart = num_overlapping = 0
    sentences = list(product("abc", repeat=5))
    for seed in range(40):
        generator = random.Random(seed)
        phrases = {
            " ".join(generator.choice("abc") for _ in range(generator.choice((1, 2, 2, 3, 4)))): generator.choice(
                (1, 3)
            )
            for _ in range(generator.randint(1, 4))
        }
        hot = HotWords(phrases, LETTERS)
        for words, gain in zip(sentences, gains(sentences, hot), strict=True):
            found = occurrences(words, hot.scores)
            total, least = sum(each for _, _, each in found), most_without_overlap(words, hot.scores)
            if are_apart(found):
                assert gain == pytest.approx(total, abs=1e-4), (phrases, words)
                num_apart += bool(found)
            else:
                assert least - 1e-4 <= gain <= total + 1e-4, (phrases, words)
                num_overlapping += 1
    assert num_apart > 500 and num_overlapping > 500


def test_the_beginning_of_a_phrase_gains_while_the_phrase_may_follow() -> None:
    hot = HotWords({"a b c": 2.0, "b a": 1.0}, LETTERS)
    model, gain = hot.model(LETTERS), hot.gain(LETTERS)
    assert model is not None
    context, total, after_each = model.start(1), 0.0, []
    for word in ("a", "b", "a", "c"):
        score, context = model.score(context, torch.tensor([LETTERS.id_of(word)]))
        total += float(score) + float(gain[LETTERS.id_of(word)])
        after_each.append(round(total, 4))
    # "a b" lends 2 each; then "b a" is complete, and its "a" may begin the longer phrase again, but does not.
    assert after_each == [2.0, 4.0, 4.0, 2.0]


def test_single_words_need_no_model() -> None:
    hot = HotWords({"b": 2.5, "c": None}, LETTERS, score=1.5)
    assert hot.model(LETTERS) is None
    assert hot.gain(LETTERS).tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 2.5, 1.5]
    assert HotWords("b", LETTERS).scores == {("b",): 4.0}
    for phrases in ({"a b": 3.0, "a c": 1.0}, {"a c": 1.0, "a b": 3.0}):  # a word of several phrases has the most
        assert HotWords(phrases, LETTERS).gain(LETTERS).tolist() == [0.0, 0.0, 0.0, 0.0, 3.0, 3.0, 1.0]


def test_words_that_repeat_themselves_gain_no_more_than_their_probability_allows(
    ngram_of: Callable[..., NgramLM], caplog: pytest.LogCaptureFixture
) -> None:
    ngram = ngram_of(["a a a a a", "b a", "c b"], list("abc"), order=3)
    likely, rare = (-float(ngram.score_sentence([word] * 3)[2]) for word in "ab")
    assert 0.0 < likely < 1.0 < 1.5 < rare
    with caplog.at_level(logging.WARNING):
        hot = HotWords({"a": 1.5, "b": 1.5, "a a": 0.1, "a b": 1.0}, LETTERS, ngram=ngram)
    assert hot.scores == {("a",): pytest.approx(likely), ("b",): 1.5, ("a", "a"): 0.1, ("a", "b"): 1.0}
    assert "lower scores: 'a'." in caplog.text
    assert hot.gain(LETTERS).tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, likely, 1.5, 0.0])
    # A phrase as a whole gains all of its score, although its first word gains less in the graph.
    phrase = HotWords({"a b": 1.4}, LETTERS, ngram=ngram)
    assert float(phrase.gain(LETTERS)[LETTERS.id_of("a")]) == pytest.approx(likely)
    assert gains([list("cab"), list("cac")], phrase) == pytest.approx([2.8, 0.0], abs=1e-4)
    halved = phrase.scaled(0.5)
    assert float(halved.gain(LETTERS)[LETTERS.id_of("a")]) == pytest.approx(likely / 2)
    assert gains([list("cab"), list("cac")], halved) == pytest.approx([1.4, 0.0], abs=1e-4)


@pytest.mark.parametrize("fusion", ["lattice", "chunks", "search"])
@pytest.mark.parametrize("has_lm", [False, True])
def test_searches_add_the_gain_of_each_sentence(has_lm: bool, fusion: str) -> None:
    num_gained = 0
    options = replace(UNPRUNED, output_beam=1e9)
    for seed in range(6):
        graph = random_graph(seed, num_words=3, final_prob=1.0)
        lm = TableLM(graph.vocabulary, seed) if has_lm else None
        hot = HotWords({"w0 w1": 1.5, "w2": 0.5, "w1 w2 w0": 2.0}, graph.vocabulary)
        phrases = hot.scaled(options.graph_scale / options.lm_scale).model(graph.vocabulary)
        assert phrases is not None
        raised = graph.with_gain(hot.gain(graph.vocabulary))
        order = raised.score.diff() * (raised.src_state().diff() == 0)
        assert (order <= 0).all(), "the best arc of each state comes first"
        found = []
        for searched, model in ((graph, lm), (raised, with_phrases(lm, phrases))):
            decoder = TokenPassingDecoder(searched, options, lm_fusion=fusion, keep_lattice=True)
            (result,) = decoder.decode(random_log_prob(seed, 1, 4), torch.tensor([4]), model)
            assert result.lattice is not None
            listed = n_best(result.lattice, searched, options, 10**4)
            found.append({one.words: one.total for one in listed})
        before, after = found
        assert set(before) == set(after)
        for words, total in before.items():
            places = occurrences(words, hot.scores)
            if are_apart(places):
                gain = sum(each for _, _, each in places)
                assert after[words] == pytest.approx(total + options.graph_scale * gain, abs=1e-3)
                num_gained += gain > 0
    assert num_gained > 50


def test_words_are_taken_in_the_case_of_the_vocabulary(caplog: pytest.LogCaptureFixture) -> None:
    vocabulary = Vocabulary(["NEW", "YORK", "York", "tea"])
    with caplog.at_level(logging.WARNING):
        hot = HotWords(["New York", "york", "TEA", "new ZEALAND", "<unk>", ""], vocabulary)
    assert list(hot.scores) == [("NEW", "York"), ("YORK",), ("tea",)]
    assert "left out: 'new ZEALAND', '<unk>', ''." in caplog.text


def test_wrong_hot_words_are_one_sentence() -> None:
    for phrases, message in (
        ([], "give words of the vocabulary. A decoder takes others as its words"),
        (["d", "a d"], "it does not have 'd', 'a d'. A decoder"),
        (list("defghij"), "'d', 'e', 'f', 'g', 'h' and 2 more. A decoder"),
        ([3], "hot_words is of type int; give words or phrases"),
        (3, "hot_words is of type int; give words or phrases"),
        ({"a": -1.0}, "the score of hot words is -1.0; give a number from 0 to 1000"),
        ({"a": float("nan")}, "the score of hot words is nan"),
        ({"a": True}, "the score of hot words is True"),
    ):
        with pytest.raises(AsrError) as error:
            HotWords(phrases, LETTERS)  # type: ignore[arg-type]
        assert message in str(error.value)
    with pytest.raises(AsrError, match="the score of hot words is 'high'"):
        HotWords(["a"], LETTERS, score="high")  # type: ignore[arg-type]


def test_files_have_a_phrase_and_perhaps_a_score_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "hot.txt"
    path.write_text("NEW  YORK :3.5\n\nKENSHO\n A:B \n", encoding="utf-8")
    assert read_hot_words(path) == {"NEW YORK": 3.5, "KENSHO": None, "A:B": None}
    path.write_text("A\nB :high\n", encoding="utf-8")
    with pytest.raises(AsrError, match=r"hot\.txt, line 2: 'high' is not a score; write `WORDS :4\.0`\."):
        read_hot_words(path)
    with pytest.raises(AsrError, match="hot words"):
        read_hot_words(tmp_path / "none.txt")


@pytest.mark.parametrize("content", ["", "\n"])
def test_a_file_without_hot_words_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    path = tmp_path / "hot.txt"
    path.write_text(content)
    assert read_hot_words(path) == {}
    assert caplog.messages == [f"{path}: there are no hot words in this file; write one word or phrase per line."]
