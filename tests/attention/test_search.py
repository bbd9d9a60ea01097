"""The search of attention models against the enumeration of all texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from asr.attention import AttentionDecoder, AttentionRecognizer
from asr.ctc.interface import CTCHypothesis
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.fusion.confidences import SCALE
from asr.text.symbols import BOS_ID, Vocabulary
from tests.reference.table_lm import ForgetfulLM, TableLM
from tests.reference.texts import sentence_score, text_of
from tests.reference.toy_attention import State, ToyAttention, internal_score, text_score

WIDE = {"beam_size": 10**6, "search_beam": math.inf, "token_min_log_prob": -math.inf, "internal_lm_scale": 0.0}
PIECES = ["▁a", "b", "<blk>", "▁b"]
LETTERS = ["<blk>", "a", "|", "b"]
WORDS = Vocabulary(["a", "b", "ab"])
Score = Callable[[tuple[int, ...]], float]


def encoded_frames(num_frames: int = 5, dim: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_frames, dim, generator=torch.Generator().manual_seed(seed))


class EqualSteps(ToyAttention):
    """Each token has the same probability in every step."""

    log_prob: torch.Tensor

    def _logits(self, state: State) -> torch.Tensor:
        return self.log_prob.expand(len(state.hidden), -1)


class FixedSteps(ToyAttention):
    """Each step has its probabilities, whatever was said, and each utterance a table of them, which its frames name."""

    log_probs: torch.Tensor

    def _logits(self, state: State) -> torch.Tensor:
        return self.log_probs[state.encoded[:, 0, 0].long(), self.num_steps]


def by_enumeration(
    network: ToyAttention, encoded: torch.Tensor, gain: Score = lambda columns: 0.0, length_penalty: float = 1.0
) -> dict[str, tuple[float, float]]:
    """text -> its score and what it is compared by: all sequences of tokens that are written so, by the best one's
    length."""
    columns = [column for column in range(len(network.tokens)) if column != network.tokens.blank_id]
    found: dict[str, list[tuple[float, int]]] = {}
    for own in (each for num in range(network.max_tokens + 1) for each in itertools.product(columns, repeat=num)):
        score = text_score(network, encoded, own) + gain(own)
        if score > -math.inf:
            found.setdefault(text_of(network.tokens, own), []).append((score, len(own)))
    scores = {}
    for text, same in found.items():
        total = float(np.logaddexp.reduce([score for score, _ in same]))
        _, length = max(((score / (num + 1) ** length_penalty, num) for score, num in same))
        scores[text] = total, total / (length + 1) ** length_penalty
    return scores


def assert_as_enumerated(hypotheses: list[CTCHypothesis], expected: dict[str, tuple[float, float]]) -> None:
    assert len(expected) > 3
    assert [each.text for each in hypotheses] == sorted(expected, key=lambda text: -expected[text][1])
    for each in hypotheses:
        assert each.score == pytest.approx(expected[each.text][0], abs=1e-4)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0])
def test_all_texts_are_found(length_penalty: float) -> None:
    network, encoded = ToyAttention(PIECES), encoded_frames()
    found = AttentionDecoder(network, length_penalty=length_penalty, **WIDE)(encoded, nbest=10**6)
    assert_as_enumerated(found, by_enumeration(network, encoded, length_penalty=length_penalty))
    assert all(each.score == pytest.approx(each.am_score) for each in found)


@pytest.mark.parametrize("symbols", [PIECES, LETTERS])
def test_words_are_scored_by_the_language_model(symbols: list[str]) -> None:
    network, encoded, model = ToyAttention(symbols), encoded_frames(), TableLM(WORDS)
    settings = {"lm_scale": 0.7, "word_insertion_penalty": 0.4, "spelling_penalty": -1.5}
    found = AttentionDecoder(network, lm=model, **settings, **WIDE)(encoded, nbest=10**6)

    def gain(columns: tuple[int, ...]) -> float:
        words = text_of(network.tokens, columns).split()
        num_unlisted = sum(word not in WORDS for word in words)
        return 0.7 * sentence_score(model, " ".join(words)) + 0.4 * len(words) - 1.5 * num_unlisted

    assert_as_enumerated(found, by_enumeration(network, encoded, gain))
    for each in found:
        assert each.lm_score == pytest.approx(sentence_score(model, each.text), abs=1e-4)
        assert [word.is_spelled for word in each.words] == [word.text not in WORDS for word in each.words]


UNIGRAMS = "\\data\\\nngram 1=5\n\n\\1-grams:\n-2\t<unk>\n-99\t<s>\n-0.6\t</s>\n-0.5\ta\n-0.7\tb\n\n\\end\\\n"


def test_listed_words_may_be_unknown_to_the_ngram_model(tmp_path: Path) -> None:
    (tmp_path / "unigrams.arpa").write_text(UNIGRAMS)
    network, encoded, model = ToyAttention(PIECES), encoded_frames(), TableLM(WORDS)
    models = {"words": ["a", "b", "ab"], "ngram": tmp_path / "unigrams.arpa", "lm": model, "lm_weight": 1.0}
    found = AttentionDecoder(network, **models, **WIDE)(encoded, nbest=10**6)
    wanted = AttentionDecoder(network, lm=model, **WIDE)(encoded, nbest=10**6)
    assert any("ab" in each.text.split() for each in found)
    assert [each.text for each in found] == [each.text for each in wanted]
    assert [each.lm_score for each in found] == pytest.approx([each.lm_score for each in wanted], abs=1e-4)


def test_listed_words_only() -> None:
    network, encoded, model = ToyAttention(PIECES), encoded_frames(), TableLM(WORDS)
    settings = {"lm_scale": 0.7, "spelling_penalty": -math.inf}
    found = AttentionDecoder(network, lm=model, **settings, **WIDE)(encoded, nbest=10**6)
    expected = by_enumeration(
        network, encoded, lambda columns: 0.7 * sentence_score(model, text_of(network.tokens, columns))
    )
    listed = {text: score for text, score in expected.items() if all(word in WORDS for word in text.split())}
    assert len(listed) < len(expected)
    assert_as_enumerated(found, listed)


def test_words_in_plain_form() -> None:
    network = ToyAttention(["▁A", "b", "<blk>", "▁b", "-", ","])
    encoded, model = encoded_frames(), TableLM(WORDS)
    found = AttentionDecoder(network, lm=model, lm_scale=0.7, spelling_penalty=-1.5, **WIDE)(encoded, nbest=10**6)

    def gain(columns: tuple[int, ...]) -> float:
        words = text_of(network.tokens, columns).lower().replace(",", "").replace("-", " ").split()
        return 0.7 * sentence_score(model, " ".join(words)) - 1.5 * sum(word not in WORDS for word in words)

    assert_as_enumerated(found, by_enumeration(network, encoded, gain))


def test_internal_scores_are_subtracted() -> None:
    network, encoded = ToyAttention(PIECES), encoded_frames()
    decoder = AttentionDecoder(network, **{**WIDE, "internal_lm_scale": 0.3})
    expected = by_enumeration(network, encoded, lambda columns: -0.3 * internal_score(network, columns))
    assert_as_enumerated(decoder(encoded, nbest=10**6), expected)


def test_improbable_tokens_are_not_followed() -> None:
    network = EqualSteps(["▁a", "▁b", "<blk>"])
    network.log_prob = torch.tensor([0.5, 0.2, 0.3]).log()
    for probability, texts in ((0.19, {"", "a", "b"}), (0.21, {"", "a"})):
        network.max_tokens = 1
        decoder = AttentionDecoder(network, **{**WIDE, "token_min_log_prob": math.log(probability)})
        assert {each.text for each in decoder(encoded_frames(), nbest=9)} == texts


def test_unfinished_words_count_when_a_search_ends() -> None:
    network = FixedSteps(["▁a", "b", "<blk>"], num_prompts=0)
    network.max_tokens = 9
    # After "a", the end is less probable than "ab", which is not listed.
    network.log_probs = torch.tensor([[[0.97, 0.01, 0.02], [1e-5, 0.6, 0.4], *(7 * [[0.3, 0.4, 0.3]])]]).log()
    decoder = AttentionDecoder(network, words=["a"], spelling_penalty=-5.0, beam_size=1, length_penalty=0.0)
    assert decoder(torch.zeros(5, 6))[0].text == "a"
    assert network.num_steps == 1


def test_searches_end_beside_longer_ones() -> None:
    network = FixedSteps(["▁a", "b", "<blk>"], num_prompts=0)
    network.max_tokens = 4
    # "a a" would be better than "a" with its second word's penalty, but does not look so while the word is unfinished.
    soon, late = [[0.97, 0.01, 0.02], *(4 * [[0.1, 1e-3, 0.9]])], 5 * [[0.5, 0.499, 0.001]]
    network.log_probs = torch.tensor([soon, late]).log()
    settings = {"word_insertion_penalty": 3.0, "beam_size": 1, "length_penalty": 0.0}
    decoder = AttentionDecoder(network, words=["a"], **settings)
    utterances = torch.tensor([0.0, 1.0])[:, None, None].expand(2, 5, 6)
    alone = decoder(utterances[0])[0].text
    network.num_steps = 0
    assert decoder(utterances)[0][0].text == alone == "a"


def test_internal_scores_are_subtracted_if_there_is_a_language_model() -> None:
    pieces = TableLM(Vocabulary(["▁a", "b", "▁b"]))
    for models, scale in (
        ({}, 0.0),
        ({"words": ["a"]}, 0.0),
        ({"lm": TableLM(WORDS)}, 0.2),
        ({"token_lm": pieces}, 0.2),
    ):
        assert AttentionDecoder(ToyAttention(PIECES), **models).config.internal_lm_scale == scale


@pytest.mark.parametrize("internal_lm_scale", [0.0, 0.1])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_batch_is_its_utterances(internal_lm_scale: float, length_penalty: float) -> None:
    network, model = ToyAttention(PIECES, end_bias=-15.0, sharpness=3.0), TableLM(WORDS)
    network.max_tokens = 30
    utterances = [encoded_frames(num, seed=num) for num in (7, 0, 12, 1, 9)]
    settings = {"internal_lm_scale": internal_lm_scale, "length_penalty": length_penalty}
    decoder = AttentionDecoder(network, lm=model, beam_size=4, search_beam=6.0, **settings)
    padded = torch.nn.utils.rnn.pad_sequence(utterances, batch_first=True, padding_value=7.0)
    together = decoder(padded, [len(each) for each in utterances], nbest=5)
    for found, utterance in zip(together, utterances, strict=True):
        alone = decoder(utterance, nbest=5)
        assert [each.text for each in found] == [each.text for each in alone]
        assert [each.tokens for each in found] == [each.tokens for each in alone]
        assert [each.score for each in found] == pytest.approx([each.score for each in alone], abs=1e-4)
        confidences, wanted = ([word.confidence for each in texts for word in each.words] for texts in (found, alone))
        assert confidences == pytest.approx(wanted, abs=1e-4)
    assert max(len(each.tokens) for found in together for each in found) >= 3


def test_no_utterances() -> None:
    assert AttentionDecoder(ToyAttention(PIECES))(torch.zeros(0, 5, 6)) == []


def test_frames_of_another_network() -> None:
    with pytest.raises(AsrError, match=r"toy: the decoder cannot read frames of 7 dimensions .* network's encoder"):
        AttentionDecoder(ToyAttention(PIECES))(encoded_frames(dim=7))


def test_threads_share_a_decoder() -> None:
    decoder = AttentionDecoder(ToyAttention(PIECES), lm=TableLM(WORDS), beam_size=4)
    utterances = [encoded_frames(20, seed=seed) for seed in range(8)]
    expected = [decoder(each) for each in utterances]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(decoder, utterances)] == expected


def test_wider_beams_find_better_texts() -> None:
    network, model = ToyAttention(PIECES, end_bias=-15.0, sharpness=3.0), TableLM(WORDS)
    network.max_tokens = 10
    utterances = torch.stack([encoded_frames(8, seed=seed) for seed in range(20)])
    scores = []
    for beam in (1, 4, 64):
        decoder = AttentionDecoder(network, lm=model, beam_size=beam, length_penalty=0.0)
        scores.append(sum(found[0].score for found in decoder(utterances)))
    assert scores[0] < scores[1] < scores[2]


def test_greedy_texts_take_the_best_token_of_each_step() -> None:
    network, encoded = ToyAttention(PIECES, end_bias=-8.0), encoded_frames()
    (found,) = AttentionDecoder(network, beam_size=1)(encoded)
    columns = [network.tokens.symbols.index(token.text) for token in found.tokens]
    frames = torch.tensor([len(encoded)])
    assert len(columns) == 4
    for num in range(len(columns)):
        logits, state = network.start(encoded[None], frames, network.prompt(encoded[None], frames))
        for column in columns[:num]:
            logits, state = network.step(torch.tensor([column]), torch.tensor([0]), state)
        logits[0, network.tokens.blank_id] = -math.inf
        assert int(logits.argmax()) == columns[num]


def test_texts_end() -> None:
    network, encoded = ToyAttention(PIECES, end_bias=-50.0), torch.stack([encoded_frames(6), encoded_frames(6, seed=2)])
    network.max_tokens, network.frame_shift = 20, 1.0
    assert [len(found[0].tokens) for found in AttentionDecoder(network)(encoded)] == [20, 20]
    network.frame_shift = 0.25
    network.num_steps = 0
    found = AttentionDecoder(network, max_tokens_per_second=8)(encoded, [6, 1])
    assert [len(each[0].tokens) for each in found] == [12, 10]
    assert network.num_steps == 13
    found = AttentionDecoder(network, max_tokens_per_second=7.5)(encoded, [6, 0])
    assert [len(each[0].tokens) for each in found] == [12, 0]
    found = AttentionDecoder(network, max_tokens_per_second=math.inf)(encoded, [6, 0])
    assert [len(each[0].tokens) for each in found] == [20, 0]


def step_by_step(
    network: ToyAttention, encoded: torch.Tensor, size: int, length_penalty: float, lm_scale: float, model: TableLM
) -> tuple[list[tuple[str, float]], int]:
    """The search with listed pieces that are words each, for hypothesis after hypothesis -> texts with their scores,
    and the number of steps."""
    frames, end, limit = torch.tensor([len(encoded)]), network.tokens.blank_id, network.max_tokens

    def log_probs(columns: tuple[int, ...]) -> list[float]:
        logits, state = network.start(encoded[None], frames, network.prompt(encoded[None], frames))
        for column in columns:
            logits, state = network.step(torch.tensor([column]), torch.tensor([0]), state)
        return logits.log_softmax(1)[0].tolist()

    def words(columns: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(model.vocabulary.id_of(network.tokens.symbols[column][1:]) for column in columns)

    def total(columns: tuple[int, ...], am_score: float, is_ended: bool) -> float:
        known = words(columns)
        if is_ended:
            return am_score + lm_scale * model.score_sentence(known)
        finished = (BOS_ID, *known[:-1])
        return am_score + lm_scale * sum(model.log_prob_of(finished[:n], finished[n]) for n in range(1, len(finished)))

    beam: dict[tuple[int, ...], float] = {(): 0.0}
    ended: dict[tuple[int, ...], float] = {}

    def goes_on(beam: dict[tuple[int, ...], float], length: int) -> bool:
        ranks = sorted((score / (len(own) + 1) ** length_penalty for own, score in ended.items()), reverse=True)
        worst = ranks[size - 1] if len(ranks) >= size else -math.inf
        best = max(total(own, score, False) / (length + 1) ** length_penalty for own, score in beam.items())
        return best > worst

    for num in range(limit + 1):
        grown, ends = {}, {}
        for own, score in beam.items():
            for column, log_prob in enumerate(log_probs(own)):
                if column == end:
                    ends[own] = total(own, score + log_prob, True)
                elif num < limit:
                    grown[(*own, column)] = score + log_prob
        kept = sorted(grown, key=lambda own: -total(own, grown[own], False))[:size]
        beam = {own: grown[own] for own in kept}
        all_totals = sorted([*ends.values(), *(total(own, beam[own], False) for own in kept)], reverse=True)
        ended.update({own: score for own, score in ends.items() if score in all_totals[:size]})
        if not beam or not goes_on(beam, num + 1):
            break
    best = sorted(ended, key=lambda own: -ended[own] / (len(own) + 1) ** length_penalty)[:size]
    return [(text_of(network.tokens, own), ended[own]) for own in best], num


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("beam_size", [1, 2, 4])
@torch.no_grad()
def test_the_search_is_that_of_single_hypotheses(beam_size: int, length_penalty: float) -> None:
    model = TableLM(Vocabulary(["a", "b", "c"]))
    num_texts, all_steps = set(), set()
    for seed in range(12):
        network = ToyAttention(["▁a", "▁b", "<blk>", "▁c"], seed=seed, sharpness=2.0)
        network.max_tokens = 9
        encoded = encoded_frames(seed=seed)
        config = {**WIDE, "beam_size": beam_size, "length_penalty": length_penalty, "lm_scale": 0.3}
        decoder = AttentionDecoder(network, lm=model, **config)
        network.num_steps = 0
        found = decoder(encoded, nbest=beam_size)
        num_steps = network.num_steps - network.num_prompts
        wanted, wanted_steps = step_by_step(network, encoded, beam_size, length_penalty, 0.3, model)
        assert [each.text for each in found] == [text for text, _ in wanted]
        assert [each.score for each in found] == pytest.approx([score for _, score in wanted], abs=1e-4)
        assert num_steps == wanted_steps
        num_texts.add(len(found))
        all_steps.add(num_steps)
    assert beam_size in num_texts and len(all_steps) > 1


def test_contexts_of_the_language_model_are_kept_while_they_are_needed() -> None:
    network, model = ToyAttention(PIECES, end_bias=-50.0), ForgetfulLM(WORDS)
    network.max_tokens, network.frame_shift = 100, 1.0
    decoder = AttentionDecoder(network, lm=model, beam_size=4, max_tokens_per_second=20)
    utterances = [encoded_frames(num, seed=num) for num in (5, 1, 3)]
    padded = torch.nn.utils.rnn.pad_sequence(utterances, batch_first=True)
    decoder(padded, [len(each) for each in utterances])
    assert model.most_held < 0.5 * len(model.made)
    assert len(model.held) <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_penalty": -0.1}, "length_penalty is -0.1; it must be 0 or more"),
        ({"length_penalty": math.inf}, "length_penalty is inf; it must be 0 or more"),
        ({"max_tokens_per_second": 0.0}, "max_tokens_per_second is 0.0; it must be above 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, float], message: str) -> None:
    with pytest.raises(AsrError, match=message):
        AttentionDecoder(ToyAttention(PIECES), **settings)


def test_a_batch_ends_with_its_longest_text() -> None:
    network, encoded = ToyAttention(PIECES, end_bias=10.0), encoded_frames()
    network.max_tokens = 100
    found = AttentionDecoder(network, beam_size=2)(encoded.expand(3, -1, -1))
    assert network.num_steps < 10
    assert all(each[0].is_complete for each in found)


def test_confidences_compare_with_what_left_the_beam() -> None:
    network, encoded = ToyAttention(["▁a", "▁b", "<blk>", "▁c"], end_bias=-9.0), encoded_frames()
    (found,) = AttentionDecoder(network, beam_size=1)(encoded)
    frames = torch.tensor([len(encoded)])
    assert len(found.words) == 4
    for number, word in enumerate(found.words):
        logits, state = network.start(encoded[None], frames, network.prompt(encoded[None], frames))
        for token in found.tokens[:number]:
            column = network.tokens.symbols.index(token.text)
            logits, state = network.step(torch.tensor([column]), torch.tensor([0]), state)
        best, second = logits[0, [0, 1, 3]].sort(descending=True).values[:2].tolist()
        assert word.confidence == pytest.approx(1.0 / (1.0 + math.exp(second - best) ** SCALE), abs=1e-4)


def test_confidences_compare_with_other_texts() -> None:
    network, encoded = ToyAttention(["▁a", "▁b", "<blk>"]), encoded_frames()
    network.max_tokens = 1
    found = AttentionDecoder(network, **WIDE)(encoded, nbest=3)
    texts = {each.text: each.score for each in found}
    assert set(texts) == {"a", "b", ""}
    for own in found:
        against = sum(math.exp(score - own.score) for text, score in texts.items() if text != own.text)
        for word in own.words:
            assert word.confidence == pytest.approx(1.0 / (1.0 + against**SCALE), abs=1e-4)


@pytest.mark.parametrize(
    ("mean", "settings", "dropped"),
    [
        (-1.01, {}, [False, False, True, True]),
        (-0.99, {}, [False, False, False, False]),
        (-1.01, {"no_speech_threshold": 0.0}, [True, True, True, True]),
        (-1.01, {"no_speech_threshold": 1.0}, [False, False, False, False]),
    ],
)
def test_improbable_texts_are_dropped_where_nobody_speaks(
    mean: float, settings: dict[str, float], dropped: list[bool]
) -> None:
    probability = [0.3, 0.59, 0.61, 1.0]
    network = EqualSteps(["▁a", "b", "<blk>"], no_speech=torch.tensor(probability))
    network.max_tokens = 1
    end = 2.0 * mean + 0.5  # after the token with -0.5
    network.log_prob = torch.tensor([-0.5, math.log(1.0 - math.exp(-0.5) - math.exp(end)), end])
    found = AttentionDecoder(network, **settings)(encoded_frames().expand(4, -1, -1), nbest=2)
    assert [not any(each.text for each in texts) for texts in found] == dropped
    for texts, own, is_dropped in zip(found, probability, dropped, strict=True):
        assert texts[0].is_complete
        wanted = math.log(own) if is_dropped else 2.0 * mean
        assert texts[0].score == texts[0].am_score == pytest.approx(wanted, abs=1e-4)
        assert len(texts) == (1 if is_dropped else 2)


def test_steady_segments_are_not_decoded() -> None:
    network = ToyAttention(PIECES, end_bias=-3.0)
    recognizer = AttentionRecognizer(AttentionDecoder(network), ResourceOptions(max_segment_seconds=5.0))
    noise = 0.01 * torch.randn(4 * 16000, generator=torch.Generator().manual_seed(0))
    speech = noise * torch.linspace(0.5, 1.0, len(noise))
    alone = recognizer(speech)[0]
    num_steps = network.num_steps
    results = recognizer([noise, speech, torch.zeros(12 * 16000)], nbest=2)
    assert [each.text for each in results] == ["", alone.text, ""]
    assert network.num_steps == 2 * num_steps
    assert [each.is_complete for each in results] == 3 * [True]
    assert [each.times.audio_seconds for each in results] == pytest.approx([4.0, 4.0, 12.0])
    assert [len(each.hypotheses) for each in results] == [1, 2, 1]
    assert not recognizer(noise)[0].hypotheses
    network.num_steps = 0
    recognizer.prepare()
    assert network.num_steps


def test_recognizers_take_decoders() -> None:
    with pytest.raises(AsrError, match="decoder is of type ToyAttention; give a TransducerDecoder or an Attention"):
        AttentionRecognizer(ToyAttention(PIECES))  # type: ignore[arg-type]


def test_segments_are_no_longer_than_the_network_reads() -> None:
    network = ToyAttention(PIECES)
    network.max_seconds = 10.0
    with pytest.raises(AsrError, match=r"max_segment_seconds is 10\.5, but the network reads at most 10 s at a time"):
        AttentionRecognizer(AttentionDecoder(network), ResourceOptions(max_segment_seconds=10.5))
    recognizer = AttentionRecognizer(AttentionDecoder(network), ResourceOptions(max_segment_seconds=10.0))
    assert recognizer(encoded_frames(100).flatten())[0].words
