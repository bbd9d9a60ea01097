"""The words of a hypothesis: when they were said, and which can be trusted.

Words lie where their phones are. Calibrated confidences: what the fit finds, what it refuses, and what reaches the
words of a result. Noise: words whose tokens last for seconds are rejected.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr.decoding.backtrace import hypothesis_of_path
from asr.decoding.interface import DecodeResult, Hypothesis
from asr.decoding.mbr import PathPosteriors
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.decoding.words import (
    FEATURES,
    SCALES,
    Calibration,
    WordAligner,
    calibrated,
    confidence_features,
    fit_calibration,
    lexicon_of_graph,
    only_words,
    spoken,
    without_sentence_ends,
)
from asr.errors import AsrError
from asr.metrics import normalized_cross_entropy
from asr.recognizer import Recognizer
from asr.testing.tones import PRONUNCIATIONS, tones
from asr.text.lexicon import Lexicon, word_ends
from asr.text.symbols import EOS_ID, UNK_ID
from tests.decoding.random_graphs import UNPRUNED, random_graph, random_log_prob


@given(seed=st.integers(0, 10**6), cut=st.integers(0, 2))
def test_words_explain_their_phones(seed: int, cut: int) -> None:
    chooser = random.Random(seed)
    lexicon = [[tuple(chooser.choices(range(1, 4), k=chooser.randint(1, 3))) for _ in range(2)] for _ in range(4)]
    words = chooser.choices(range(4), k=chooser.randint(1, 6))
    chosen = [chooser.choice(lexicon[word]) for word in words]
    phones = [phone for variant in chosen for phone in variant]
    # The last word may not have been spoken to its end.
    cut = min(cut, len(chosen[-1]) - 1)
    phones = phones[: len(phones) - cut]
    ends = word_ends(phones, [lexicon[word] for word in words])
    assert ends is not None and len(ends) == len(words) and ends[-1] == len(phones)
    begin = 0
    for word, end in zip(words, ends, strict=True):
        spoken = tuple(phones[begin:end])
        assert any(spoken == variant[: len(spoken)] for variant in lexicon[word])
        begin = end


def test_what_cannot_be_explained() -> None:
    assert word_ends([1, 2], [[(1, 3)]]) is None
    assert word_ends([1, 2], []) is None
    assert word_ends([1, 2, 3], [[(1,)], [(2,)]]) == [1, 2]


def test_a_word_of_any_phones_begins_where_it_is_said_to() -> None:
    # The first word may be (1, 2) or (1,), the last (3, 4) or (4,).
    known, last = [(1, 2), (1,)], [(3, 4), (4,)]
    assert word_ends([1, 2, 5, 5, 6, 4], [known, 1, last]) == [1, 5, 6]
    assert word_ends([1, 2, 5, 5, 6, 4], [known, 2, last]) == [2, 5, 6]
    assert word_ends([1, 2, 3, 4], [known, 2]) == [2, 4]
    assert word_ends([1, 2, 3, 4], [known, 1, 3]) == [1, 3, 4]
    assert word_ends([1, 2, 3, 4], [known, 3]) is None
    assert word_ends([1, 2], [known, 2]) is None


def test_runs_of_a_path() -> None:
    graph = random_graph(0)
    graph.token_id[:7] = torch.tensor([0, 2, 2, 0, 2, 3, 0])
    arc = torch.arange(7)
    found = hypothesis_of_path(graph, DecodingOptions(), arc, 0.0, 0.0, 0.0)
    assert found.phones == ((2, 1, 3), (2, 4, 5), (3, 5, 6))
    found = hypothesis_of_path(graph, DecodingOptions(), arc, 0.0, 0.0, 0.0, 2 * arc)
    assert found.phones == ((2, 2, 5), (2, 8, 9), (3, 10, 11))


def test_silence_between_words_belongs_to_none() -> None:
    graph = random_graph(0)
    _, first, silence, last = graph.tokens.tokens
    word, other = graph.vocabulary.words[4:6]
    aligner = WordAligner(
        Lexicon({word: [(first, last)], other: [(last,), (silence, first)]}), replace(graph, meta={"silence": silence})
    )
    found = Hypothesis(
        (4, 5), (word, other), 0.0, 0.0, 0.0, 0.0, (0, 5), (5, 9),
        phones=((2, 0, 1), (1, 1, 3), (2, 3, 4), (3, 4, 5), (2, 5, 7), (1, 7, 8), (2, 8, 9)),
    )  # fmt: skip
    aligned = aligner.aligned(found)
    assert (aligned.start_frames, aligned.end_frames) == ((1, 7), (5, 8))


def test_a_word_of_silence_alone_leaves_the_times_as_they_are() -> None:
    graph = random_graph(0)
    _, first, silence, _ = graph.tokens.tokens
    word, other = graph.vocabulary.words[4:6]
    aligner = WordAligner(Lexicon({word: [(first,)], other: [(silence,)]}), replace(graph, meta={"silence": silence}))
    found = Hypothesis(
        (4, 5), (word, other), 0.0, 0.0, 0.0, 0.0, (0, 5), (5, 9), phones=((1, 1, 3), (2, 5, 9))
    )  # fmt: skip
    assert aligner.aligned(found) == found


def test_unk_has_the_phones_that_the_lexicon_gives_it_and_variants_with_other_phones_are_left_out() -> None:
    graph = random_graph(0)
    _, first, silence, last = graph.tokens.tokens
    word = graph.vocabulary.words[4]
    lexicon = Lexicon({"<unk>": [(first, last)], word: [(last, "elsewhere"), (last,)]})
    aligner = WordAligner(lexicon, replace(graph, meta={"silence": silence}))
    found = Hypothesis(
        (UNK_ID, 4), ("<unk>", word), 0.0, 0.0, 0.0, 0.0, (5, 6), (6, 9), phones=((1, 0, 1), (3, 1, 3), (3, 5, 9))
    )  # fmt: skip
    aligned = aligner.aligned(found)
    assert (aligned.start_frames, aligned.end_frames) == ((0, 5), (3, 9))


@pytest.mark.slow
def test_a_recognizer_with_a_lexicon(tiny_bundle_folder, tmp_path, caplog) -> None:
    words = ["SKIP", "PAT", "TWO"]
    recognizer = Recognizer.from_folder(tiny_bundle_folder, lexicon=Lexicon(PRONUNCIATIONS))
    (result,) = recognizer(tones(words))
    assert result.text.split() == words
    spans = [(word.start, word.end) for word in result.words]
    assert spans == [pytest.approx(span, abs=0.03) for span in [(0.1, 0.46), (0.56, 0.8), (0.9, 1.02)]]
    recognizer.bundle.lexicon = Lexicon({**PRONUNCIATIONS, "OTHER": [("P",)]})
    recognizer.bundle.save(tmp_path / "with_lexicon", half_precision=False)
    (same,) = Recognizer.from_folder(tmp_path / "with_lexicon")(tones(words))
    assert same.words == result.words
    graph = recognizer.bundle.graph
    with pytest.raises(AsrError, match="need a graph of the topology ctc, not hmm-1"):
        WordAligner(Lexicon(PRONUNCIATIONS), replace(graph, meta={**graph.meta, "topology": "hmm-1"}))
    word = graph.vocabulary.ordinary[0]
    for other in ({"ELSE": PRONUNCIATIONS[word]}, {word: [("a", "phone", "of", "others")]}):
        with pytest.raises(AsrError, match=f"list: the lexicon has none of the graph's .* words \\('{word}', ...\\)"):
            lexicon_of_graph(Lexicon(other, "list"), graph)
    lexicon_of_graph(Lexicon(PRONUNCIATIONS), graph)
    assert not caplog.records
    lexicon_of_graph(Lexicon({word: PRONUNCIATIONS[word]}, "list"), graph)
    (warning,) = caplog.messages
    num, lacking = len(graph.vocabulary.ordinary), graph.vocabulary.ordinary[1]
    assert f"list: the lexicon lacks {num - 1} of the graph's {num} words ({lacking!r}, ...)" in warning


def simulated(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of words, and whether each is right: far less often than its posterior says."""
    generator = np.random.default_rng(seed)
    sure = generator.uniform(0.0, 1.0, (num, len(SCALES)))
    features = confidence_features(sure)
    return features, generator.uniform(size=num) < 0.2 + 0.6 * sure[:, 0] ** 3


def test_a_fit_tells_how_often_words_are_right() -> None:
    features, is_right = simulated(20_000, 1)
    told = fit_calibration(features, is_right).probabilities(features)
    for low in np.arange(0.2, 0.8, 0.1):
        bin_ = (told >= low) & (told < low + 0.1)
        if bin_.sum() > 500:
            assert is_right[bin_].mean() == pytest.approx(told[bin_].mean(), abs=0.04)
    others, right_there = simulated(5000, 2)
    posterior = 1 / (1 + np.exp(-others[:, 0]))
    fitted = fit_calibration(features, is_right).probabilities(others)
    entropies = [
        normalized_cross_entropy(list(zip(right_there.tolist(), told.tolist(), strict=True)))
        for told in (fitted, posterior)
    ]
    assert entropies[0] > 0.1 > 0 > entropies[1]


def test_a_calibration_survives_being_written_and_is_constant_beyond_its_knots() -> None:
    features, is_right = simulated(1000, 3)
    fitted = fit_calibration(features, is_right)
    read = Calibration.from_dict(fitted.as_dict(), "bundle")
    np.testing.assert_allclose(read.probabilities(features), fitted.probabilities(features), atol=1e-4)
    beyond = np.full((1, len(FEATURES)), 1e9)
    at_last = np.array([[fitted.knots[name][-1] for name in FEATURES]])
    assert read.probabilities(beyond) == pytest.approx(read.probabilities(at_last))


def test_features_are_log_odds_of_each_word_and_of_the_mean() -> None:
    """Odds of 1:3 and 3:1, whose mean is even; nothing is quite sure."""
    found = confidence_features(np.array([[0.25, 0.5], [0.75, 1.0]]))
    np.testing.assert_allclose(found, [[np.log(1 / 3), 0.0, 0.0], [np.log(3.0), np.log(9999.0), 0.0]], atol=1e-9)
    assert confidence_features(np.zeros((1, 2))) == pytest.approx(-np.log(9999.0))
    assert confidence_features(np.zeros((0, 2))).shape == (0, len(FEATURES))


def test_probabilities_follow_from_the_bias_and_lines_between_knots() -> None:
    told = Calibration(np.log(3.0), {"flat_word_posterior": [0.0, 2.0]}, {"flat_word_posterior": [0.0, np.log(4.0)]})
    features = np.array([[9.0, -5.0, 9.0], [9.0, 0.0, 9.0], [9.0, 1.0, 9.0], [9.0, 7.0, 9.0]])
    np.testing.assert_allclose(told.probabilities(features), [3 / 4, 3 / 4, 6 / 7, 12 / 13])


def test_no_other_values_at_the_knots_are_more_likely() -> None:
    """The likelihood with the penalties on steps between knots and on values; every value is moved both ways."""
    features, is_right = simulated(300, 5)
    penalty = 2.0
    fitted = fit_calibration(features, is_right, penalty)

    def cost(told: Calibration) -> float:
        probability = told.probabilities(features)
        likelihood = np.log(np.where(is_right, probability, 1 - probability)).sum()
        values = [np.array(told.values[name]) for name in FEATURES]
        rough = sum(penalty * (np.diff(one) ** 2).sum() + 1e-2 * (one**2).sum() for one in values)
        return float(rough / 2 - likelihood)

    least = cost(fitted)
    for step in (-0.01, 0.01):
        assert cost(replace(fitted, bias=fitted.bias + step)) > least
        for name in FEATURES:
            for place in range(len(fitted.values[name])):
                values = list(fitted.values[name])
                values[place] += step
                assert cost(replace(fitted, values={**fitted.values, name: values})) > least
    assert all(len(fitted.knots[name]) == len(fitted.values[name]) == 6 for name in FEATURES[:2])
    first, _, _, middle, _, last = fitted.knots["word_posterior"]
    assert middle == pytest.approx(np.median(features[:, 0]), abs=1e-3)
    assert (features[:, 0] < first).mean() == pytest.approx(0.02, abs=0.004)
    assert (features[:, 0] > last).mean() == pytest.approx(0.02, abs=0.004)


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"bias": 0.0},
        {"bias": 0.0, "terms": {"word_posterior": {"knots": [1.0, 0.0], "values": [0.0, 1.0]}}},
        {"bias": 0.0, "terms": {"word_posterior": {"knots": [0.0], "values": [0.0, 1.0]}}},
        {"bias": float("nan"), "terms": {}},
        {"bias": 0.0, "terms": {"loudness": {"knots": [0.0], "values": [0.0]}}},
        {"bias": 0.0, "terms": {"word_posterior": {"knots": ["a"], "values": [0.0]}}},
    ],
)
def test_a_damaged_calibration_is_refused(record: object) -> None:
    with pytest.raises(AsrError, match="bundle x: this is not a calibration"):
        Calibration.from_dict(record, "bundle x")


@pytest.mark.parametrize(
    ("terms", "is_outdated"),
    [
        (("posterior", "utterance_posterior"), True),
        (("posterior", "word_posterior"), False),
        (FEATURES, False),
        ((), False),
    ],
)
def test_a_calibration_of_an_earlier_version_is_told_from_a_damaged_one(
    terms: tuple[str, ...], is_outdated: bool
) -> None:
    record = {"bias": 0.0, "terms": {name: {"knots": [0.0], "values": [0.0]} for name in terms}}
    assert Calibration.is_outdated(record) is is_outdated
    assert not any(Calibration.is_outdated(one) for one in (None, [], {"terms": ["posterior"]}, {"bias": 0.0}))


def test_too_few_words_and_words_that_are_all_right_are_refused() -> None:
    features, is_right = simulated(1000, 4)
    with pytest.raises(AsrError, match="at least 100 words"):
        fit_calibration(features[:99], is_right[:99])
    fit_calibration(features[:100], is_right[:100])
    with pytest.raises(AsrError, match="1000 of 1000"):
        fit_calibration(features, np.ones(1000, dtype=bool))


def test_calibrated_confidences_are_those_of_the_posteriors() -> None:
    graph = random_graph(1, final_prob=1.0)
    result = TokenPassingDecoder(graph, UNPRUNED, keep_lattice=True).decode(
        random_log_prob(1, 1, 5), torch.tensor([5])
    )[0]
    lattice, best = result.lattice, result.best
    assert lattice is not None and best is not None and best.words
    line = Calibration(0.0, {"word_posterior": [-20.0, 20.0]}, {"word_posterior": [-20.0, 20.0]})
    posteriors = PathPosteriors(lattice, UNPRUNED)
    posterior = posteriors.of_hypothesis(SCALES[0], best)
    assert posterior.min() > 1e-4 and posterior.max() < 1 - 1e-4
    found = calibrated(best, posteriors, line)
    assert found.confidences == pytest.approx(posterior, abs=1e-9)
    assert replace(found, confidences=best.confidences) == best
    assert calibrated(best, None, line).confidences == pytest.approx([1e-4] * len(best.words))


# Two words of 3 frames a token, a silence of a second, then a word of two tokens of 20 frames each.
SPEECH_THEN_NOISE = Hypothesis(
    (1, 2, 3), ("YES", "NO", "HUM"), -1.0, -2.0, -3.0, -6.0, (0, 6, 46), (6, 12, 86), (0.9, 0.8, 0.3),
    ((4, 0, 3), (5, 3, 6), (6, 6, 9), (7, 9, 12), (8, 46, 66), (9, 66, 86)),
)  # fmt: skip


def test_ends_of_sentences_are_counted_in_the_words_that_stay() -> None:
    words = (4, 5, EOS_ID, 6, EOS_ID, 7)
    names = tuple(map(str, words))
    hypothesis = Hypothesis(words, names, 0.0, 0.0, 0.0, 0.0, tuple(range(6)), tuple(range(1, 7)))
    found = without_sentence_ends(DecodeResult((hypothesis,), True, 6), DecodingOptions()).best
    assert found is not None and found.word_ids == (4, 5, 6, 7) and found.sentence_ends == (2, 3)
    assert only_words(found, [False, True, True, True]).sentence_ends == (1, 2)
    assert only_words(found, [True, True, False, True]).sentence_ends == (2, 2)
    assert only_words(found, [True] * 4) is found


def test_words_of_long_tokens_are_noise() -> None:
    assert spoken(SPEECH_THEN_NOISE, 0.03, 0.25) == [True, True, False]
    left = only_words(SPEECH_THEN_NOISE, spoken(SPEECH_THEN_NOISE, 0.03, 0.25))
    assert left.words == ("YES", "NO") and left.word_ids == (1, 2) and left.end_frames == (6, 12)
    assert left.confidences == (0.9, 0.8) and left.total == -6.0


def test_the_limit_is_a_mean_in_seconds() -> None:
    assert spoken(SPEECH_THEN_NOISE, 0.03, 0.601) == [True, True, True]
    assert spoken(SPEECH_THEN_NOISE, 0.01, 0.25) == [True, True, True]
    assert spoken(SPEECH_THEN_NOISE, 0.03, 0.08) == [False, False, False]
    assert spoken(SPEECH_THEN_NOISE, 0.03, None) == [True, True, True]


def test_few_words_that_are_improbable_are_noise() -> None:
    quick = replace(SPEECH_THEN_NOISE, phones=((4, 0, 3), (5, 3, 6), (6, 6, 9), (7, 9, 12), (8, 46, 49)))
    assert spoken(quick, 0.03, 0.25) == [True] * 3
    assert spoken(replace(quick, confidences=(0.3, 0.3, 0.1)), 0.03, 0.25) == [False] * 3
    assert spoken(replace(quick, confidences=(0.3, 0.3, 0.1)), 0.03, None) == [True] * 3
    assert spoken(replace(quick, confidences=(0.3, 0.3, 0.2)), 0.03, 0.25) == [True] * 3
    four = replace(quick, words=("A",) * 4, start_frames=(0, 6, 46, 47), end_frames=(6, 12, 47, 49))
    assert spoken(replace(four, confidences=(0.1,) * 4), 0.03, 0.25) == [True] * 4


def test_words_without_a_silence_between_them_are_judged_together() -> None:
    # 0.2 s of silence: four tokens of 3 frames and two of 20 have a mean of 0.26 s.
    near = Hypothesis(
        (1, 2, 3), ("YES", "NO", "HUM"), 0.0, 0.0, 0.0, 0.0, (0, 6, 18), (6, 12, 58), (),
        ((4, 0, 3), (5, 3, 6), (6, 6, 9), (7, 9, 12), (8, 18, 38), (9, 38, 58)),
    )  # fmt: skip
    assert spoken(near, 0.03, 0.25) == [False, False, False]
    assert spoken(near, 0.03, 0.27) == [True, True, True]
    assert only_words(near, [False] * 3).words == ()
