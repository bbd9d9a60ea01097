"""The search of transducers against the enumeration of all token sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from asr.ctc.interface import CTCHypothesis
from asr.models.transducers.base import State
from asr.text.symbols import Vocabulary
from asr.transducer import TransducerDecoder
from tests.reference.table_lm import ForgetfulLM, TableLM
from tests.reference.texts import sentence_score, text_of
from tests.reference.toy_transducer import ToyTransducer, internal_score, sum_over_paths

WIDE = {"beam_size": 10**6, "search_beam": math.inf, "token_min_log_prob": -math.inf, "internal_lm_scale": 0.0}
PIECES = ["▁a", "b", "<blk>", "▁b"]
LETTERS = ["<blk>", "a", "|", "b"]
WORDS = Vocabulary(["a", "b", "ab"])
LONGEST = 4  # tokens of an utterance: two frames with up to two tokens each
Score = Callable[[tuple[int, ...]], float]


def encoded_frames(num_frames: int = 2, dim: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_frames, dim, generator=torch.Generator().manual_seed(seed))


def by_enumeration(
    network: ToyTransducer, encoded: torch.Tensor, gain: Score = lambda columns: 0.0
) -> dict[str, float]:
    """text -> its score: the log of the sum over all sequences of tokens that are written so."""
    columns = [column for column in range(len(network.tokens)) if column != network.tokens.blank_id]
    found: dict[str, float] = {}
    for own in (each for num in range(LONGEST + 1) for each in itertools.product(columns, repeat=num)):
        score = sum_over_paths(network, encoded, own, max_symbols=2) + gain(own)
        if score > -math.inf:
            text = text_of(network.tokens, own)
            found[text] = float(np.logaddexp(found.get(text, -math.inf), score))
    return found


def assert_as_enumerated(hypotheses: list[CTCHypothesis], expected: dict[str, float]) -> None:
    assert len(expected) > 3
    assert [each.text for each in hypotheses] == sorted(expected, key=lambda text: -expected[text])
    for each in hypotheses:
        assert each.score == pytest.approx(expected[each.text], abs=1e-4)


@pytest.mark.parametrize("durations", [(), (0, 1, 2), (1, 3)])
def test_sums_over_all_paths(durations: tuple[int, ...]) -> None:
    network, encoded = ToyTransducer(PIECES, durations), encoded_frames()
    decoder = TransducerDecoder(network, max_symbols_per_frame=2, **WIDE)
    found = decoder(encoded, nbest=10**6)
    assert_as_enumerated(found, by_enumeration(network, encoded))
    assert all(each.score == pytest.approx(each.am_score) for each in found)


@pytest.mark.parametrize(("symbols", "durations"), [(PIECES, ()), (LETTERS, ()), (PIECES, (0, 1, 2))])
def test_words_are_scored_by_the_language_model(symbols: list[str], durations: tuple[int, ...]) -> None:
    network, encoded, model = ToyTransducer(symbols, durations), encoded_frames(), TableLM(WORDS)
    settings = {"lm_scale": 0.7, "word_insertion_penalty": 0.4, "spelling_penalty": -1.5, "max_symbols_per_frame": 2}
    found = TransducerDecoder(network, lm=model, **settings, **WIDE)(encoded, nbest=10**6)

    def gain(columns: tuple[int, ...]) -> float:
        words = text_of(network.tokens, columns).split()
        num_unlisted = sum(word not in WORDS for word in words)
        return 0.7 * sentence_score(model, " ".join(words)) + 0.4 * len(words) - 1.5 * num_unlisted

    assert_as_enumerated(found, by_enumeration(network, encoded, gain))
    for each in found:
        assert each.lm_score == pytest.approx(sentence_score(model, each.text), abs=1e-4)
        assert [word.is_spelled for word in each.words] == [word.text not in WORDS for word in each.words]


def test_listed_words_only() -> None:
    network, encoded, model = ToyTransducer(PIECES), encoded_frames(), TableLM(WORDS)
    settings = {"lm_scale": 0.7, "spelling_penalty": -math.inf, "max_symbols_per_frame": 2}
    found = TransducerDecoder(network, lm=model, **settings, **WIDE)(encoded, nbest=10**6)
    expected = by_enumeration(
        network, encoded, lambda columns: 0.7 * sentence_score(model, text_of(network.tokens, columns))
    )
    listed = {text: score for text, score in expected.items() if all(word in WORDS for word in text.split())}
    assert len(listed) < len(expected)
    assert_as_enumerated(found, listed)


@pytest.mark.one_stack
def test_words_in_plain_form() -> None:
    network = ToyTransducer(["▁A", "b", "<blk>", "▁b", "-", ",", "▁“"])
    encoded, model = encoded_frames(), TableLM(WORDS)
    settings = {"lm_scale": 0.7, "word_insertion_penalty": 0.4, "spelling_penalty": -1.5, "max_symbols_per_frame": 2}
    found = TransducerDecoder(network, lm=model, **settings, **WIDE)(encoded, nbest=10**6)

    def gain(columns: tuple[int, ...]) -> float:
        words = text_of(network.tokens, columns).lower().replace(",", "").replace("“", "").replace("-", " ").split()
        num_unlisted = sum(word not in WORDS for word in words)
        return 0.7 * sentence_score(model, " ".join(words)) + 0.4 * len(words) - 1.5 * num_unlisted

    assert_as_enumerated(found, by_enumeration(network, encoded, gain))
    written = {word.text: word.is_spelled for each in found for word in each.words}
    assert {"A,", "“b", "b-b", "Ab"} <= {text for text, is_spelled in written.items() if not is_spelled}
    assert {"bb", "A,bb"} <= {text for text, is_spelled in written.items() if is_spelled}


def test_words_without_a_language_model() -> None:
    network, encoded = ToyTransducer(PIECES), encoded_frames()
    decoder = TransducerDecoder(network, words=WORDS.ordinary, max_symbols_per_frame=2, spelling_penalty=-2.0, **WIDE)

    def gain(columns: tuple[int, ...]) -> float:
        return -2.0 * sum(word not in WORDS for word in text_of(network.tokens, columns).split())

    assert_as_enumerated(decoder(encoded, nbest=10**6), by_enumeration(network, encoded, gain))


def test_tokens_are_scored_by_a_model_of_tokens() -> None:
    network, encoded = ToyTransducer(PIECES), encoded_frames()
    model = TableLM(Vocabulary(["b", "▁b", "▁a"]))
    decoder = TransducerDecoder(network, token_lm=model, max_symbols_per_frame=2, lm_scale=0.6, **WIDE)

    def gain(columns: tuple[int, ...]) -> float:
        ids = tuple(model.vocabulary.id_of(network.tokens.symbols[column]) for column in columns)
        return 0.6 * model.score_sentence(ids)

    assert_as_enumerated(decoder(encoded, nbest=10**6), by_enumeration(network, encoded, gain))


def test_internal_scores_are_subtracted() -> None:
    network, encoded = ToyTransducer(PIECES), encoded_frames()
    decoder = TransducerDecoder(network, max_symbols_per_frame=2, **{**WIDE, "internal_lm_scale": 0.3})
    expected = by_enumeration(network, encoded, lambda columns: -0.3 * internal_score(network, 6, columns))
    assert_as_enumerated(decoder(encoded, nbest=10**6), expected)


def test_hot_words_gain() -> None:
    network, encoded = ToyTransducer(PIECES), encoded_frames()
    settings = {"words": WORDS.ordinary, "max_symbols_per_frame": 2, "lm_scale": 0.5, **WIDE}
    found = TransducerDecoder(network, hot_words={"ab": 3.0, "a b": 2.0}, **settings)(encoded, nbest=10**6)

    def gain(columns: tuple[int, ...]) -> float:
        words = text_of(network.tokens, columns).split()
        num_phrases = list(itertools.pairwise(words)).count(("a", "b"))
        hot = 3.0 * words.count("ab") + 2.0 * 2 * num_phrases
        return 0.5 * hot - 5.0 * sum(word not in WORDS for word in words)

    assert_as_enumerated(found, by_enumeration(network, encoded, gain))


def test_hot_words_alone() -> None:
    network, encoded = ToyTransducer(["▁A", "b", "<blk>", "▁b", ","]), encoded_frames()
    decoder = TransducerDecoder(network, hot_words={"ab": 3.0, "A B": 2.0}, max_symbols_per_frame=2, **WIDE)

    def gain(columns: tuple[int, ...]) -> float:
        words = text_of(network.tokens, columns).lower().replace(",", "").split()
        return 3.0 * words.count("ab") + 2.0 * 2 * list(itertools.pairwise(words)).count(("a", "b"))

    assert_as_enumerated(decoder(encoded, nbest=10**6), by_enumeration(network, encoded, gain))


def test_a_limit_of_tokens_in_a_frame() -> None:
    network, encoded = ToyTransducer(PIECES), encoded_frames(3)
    found = TransducerDecoder(network, max_symbols_per_frame=1, **WIDE)(encoded, nbest=10**6)
    for each in found:
        columns = [network.tokens.symbols.index(token.text) for token in each.tokens]
        own = sum_over_paths(network, encoded, columns, max_symbols=1)
        assert each.score >= own - 1e-4  # other tokens may have the same text
        assert len(columns) <= 3


@pytest.mark.parametrize("durations", [(), (0, 1, 2, 4)])
def test_a_batch_is_its_utterances(durations: tuple[int, ...]) -> None:
    network, model = ToyTransducer(PIECES, durations), TableLM(WORDS)
    utterances = [encoded_frames(num, seed=num) for num in (7, 0, 12, 1, 9)]
    decoder = TransducerDecoder(network, lm=model, beam_size=4, search_beam=6.0, internal_lm_scale=0.1)
    padded = torch.nn.utils.rnn.pad_sequence(utterances, batch_first=True)
    together = decoder(padded, [len(each) for each in utterances], nbest=5)
    for found, utterance in zip(together, utterances, strict=True):
        alone = decoder(utterance, nbest=5)
        assert [each.text for each in found] == [each.text for each in alone]
        assert [each.tokens for each in found] == [each.tokens for each in alone]
        assert [each.score for each in found] == pytest.approx([each.score for each in alone], abs=1e-4)
    assert [each.text for each in together[1]] == [""]
    assert max(len(each.text) for found in together for each in found) > 4


def test_threads_share_a_decoder() -> None:
    network = ToyTransducer(PIECES)
    decoder = TransducerDecoder(network, lm=TableLM(WORDS), beam_size=4)
    utterances = [encoded_frames(20, seed=seed) for seed in range(8)]
    expected = [decoder(each) for each in utterances]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(decoder, utterances)] == expected


def test_a_beam_of_one_prefix_sums_its_own_paths_only() -> None:
    network, encoded = ToyTransducer(PIECES, sharpness=6.0), encoded_frames(6)
    (found,) = TransducerDecoder(network, beam_size=1)(encoded)
    columns = [network.tokens.symbols.index(token.text) for token in found.tokens]
    assert columns
    assert found.score <= sum_over_paths(network, encoded, columns, max_symbols=5) + 1e-4


def test_wider_beams_find_better_texts() -> None:
    network, model = ToyTransducer(PIECES), TableLM(WORDS)
    utterances = torch.stack([encoded_frames(8, seed=seed) for seed in range(10)])
    scores = []
    for beam in (1, 4, 64):
        decoder = TransducerDecoder(network, lm=model, beam_size=beam)
        scores.append(sum(found[0].score for found in decoder(utterances)))
    assert scores[0] < scores[1] < scores[2]


def test_frames_of_tokens_and_times_of_words() -> None:
    network = ToyTransducer(PIECES, sharpness=3.0, blank_bias=1.0)
    (found,) = TransducerDecoder(network)(encoded_frames(12, seed=3))
    frames = [token.start_frame for token in found.tokens]
    assert frames == sorted(frames)
    assert len(set(frames)) > 2
    for word in found.words:
        assert word.start == pytest.approx(word.start_frame * network.frame_shift)
        assert word.end == pytest.approx(word.end_frame * network.frame_shift)
        assert word.start_frame < word.end_frame <= 12
    spans = [(word.start_frame, word.end_frame) for word in found.words]
    assert spans[0][0] == frames[0]
    assert spans[-1][1] == frames[-1] + 1


@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
def test_tokens_are_in_the_order_of_their_frames(durations: tuple[int, ...]) -> None:
    for seed in range(30):
        network = ToyTransducer(PIECES, durations, seed=seed)
        for found in TransducerDecoder(network)(encoded_frames(8, seed=seed), nbest=8):
            frames = [token.start_frame for token in found.tokens]
            assert frames == sorted(frames)
            assert all(word.end_frame > word.start_frame for word in found.words)


def test_each_prefix_is_predicted_once_while_it_is_needed() -> None:
    network = ToyTransducer(PIECES, sharpness=3.0, blank_bias=3.0)
    decoder = TransducerDecoder(network, beam_size=4)
    decoder(encoded_frames(200))
    num_distinct = len(network.predicted)
    assert num_distinct > 100
    assert sum(network.predicted.values()) < 1.25 * num_distinct  # one that leaves the beam may come back


def test_hypotheses_that_cannot_survive_are_not_extended() -> None:
    network = ToyTransducer(PIECES, blank_bias=8.0)
    decoder = TransducerDecoder(network, beam_size=4)
    decoder(encoded_frames(100))
    assert sum(network.predicted.values()) < 200


def test_unfinished_words_are_pruned_by_their_unigrams(tmp_path: Path) -> None:
    unigrams = {"<unk>": -3.0, "<s>": -99.0, "</s>": -0.8, "ab": -3.0, "b": -0.3, "abb": -3.0, "bb": -1.0}
    lines = "".join(f"{score}\t{word}\n" for word, score in unigrams.items())
    path = tmp_path / "unigrams.arpa"
    path.write_text(f"\\data\\\nngram 1={len(unigrams)}\n\n\\1-grams:\n{lines}\n\\end\\\n")

    settings = {"lm_scale": 1.0, "internal_lm_scale": 0.0, "max_symbols_per_frame": 3}

    def total(beam_size: int) -> float:
        scores = []
        for seed in range(40):
            network = ToyTransducer(PIECES, blank_bias=2.0, seed=seed)
            decoder = TransducerDecoder(network, ngram=path, beam_size=beam_size, **settings)
            scores.append(decoder(encoded_frames(12, seed=seed))[0].score)
        return sum(scores)

    # The average loss is 0.85; it would be 0.94 without them.
    assert total(200) - total(2) < 0.9 * 40


def test_long_utterances() -> None:
    network = ToyTransducer(PIECES, blank_bias=1.0)
    (found,) = TransducerDecoder(network, beam_size=4)(encoded_frames(500))
    assert found.is_complete
    assert -math.inf < found.score < -1000.0


def test_contexts_of_the_language_model_are_kept_while_they_are_needed() -> None:
    model = ForgetfulLM(WORDS)
    decoder = TransducerDecoder(ToyTransducer(PIECES), lm=model, beam_size=4)
    utterances = [encoded_frames(num, seed=num) for num in (120, 5, 60)]
    padded = torch.nn.utils.rnn.pad_sequence(utterances, batch_first=True)
    decoder(padded, [len(each) for each in utterances])
    assert model.most_held < 0.5 * len(model.made)
    assert len(model.held) <= 1


class FixedTransducer(ToyTransducer):
    """Probabilities (T, C, C) of the next column by the frame, which is its number, and the last column."""

    table: torch.Tensor

    def start(self) -> tuple[torch.Tensor, State]:
        return torch.tensor([[self.tokens.blank_id]]), ()

    def predict(self, token: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        return token[:, None], ()

    def join(self, encoded: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        return self.table[encoded[:, 0].long(), predicted[:, 0]].log()


def test_unfinished_words_count_when_they_leave_a_frame() -> None:
    network = FixedTransducer(["<blk>", "▁a", "b"])
    blank = [0.98, 0.01, 0.01]
    # "b" is not listed, which costs as much whether it ends by a next word in this frame or stays unfinished.
    network.table = torch.tensor([[[0.01, 0.01, 0.98], blank, blank], [blank, blank, [0.3, 0.6, 0.1]]])
    decoder = TransducerDecoder(network, words=["a"], spelling_penalty=-2.0, beam_size=1)
    assert decoder(torch.tensor([[0.0], [1.0]]))[0].text == "b a"
