"""Confidences of words, against a plain search that remembers everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr.fusion.confidences import ConfidenceEstimator, written_tokens
from asr.fusion.interface import Pruned
from asr.transducer import TransducerDecoder
from tests.reference.toy_transducer import ToyTransducer, scores_of

PIECES = ["▁a", "b", "<blk>", "▁b"]
WORDS = st.lists(st.text("ab", min_size=1, max_size=3), max_size=4)
MAX_SYMBOLS = 3
Prefix = tuple[int, ...]  # columns


def frames(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, 6, generator=torch.Generator().manual_seed(seed))


def first_other_word(words: Sequence[str], others: Sequence[str], is_finished: bool) -> int | None:
    """The first word that is another one in another text, whose last word may be unfinished."""
    for place, (word, other) in enumerate(zip(words, others, strict=False)):
        is_last = place + 1 == len(others) and not is_finished
        if word != other and not (is_last and word.startswith(other)):
            return place
    return len(others) if is_finished and len(others) < len(words) else None


@given(WORDS, WORDS, st.booleans())
def test_texts_are_followed_to_the_first_other_word(words: list[str], others: list[str], is_finished: bool) -> None:
    estimator, place = ConfidenceEstimator(words), 0
    for letter in " ".join(others).replace(" ", " |").split("|"):
        place = estimator.follow(place, letter)
    place = estimator.end(place) if is_finished else place
    estimator.add(place, math.log(9.0))
    expected = [1.0] * len(words)
    if (wrong := first_other_word(words, others, is_finished)) is not None:
        expected[wrong] = 0.25
    assert estimator.confidences() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("symbols", "kind"),
    [
        (["<blk>", "<unk>", "▁", "▁a", "b", "▁ab", "é"], "pieces"),
        (["<blk>", "a", "|", "b", "'"], "letters"),
        (["<blk>", "ab", "a", "##a", "##ba"], "pieces"),
        (["<blk>", "AH", "B", "SIL"], "phones"),
        (["<blk>", "▁你", "好", "▁a"], "pieces"),
    ],
)
@given(data=st.data())
def test_tokens_write_the_words_of_a_text(symbols: list[str], kind: str, data: st.DataObject) -> None:
    decoder = TransducerDecoder(ToyTransducer(symbols))
    tokens = decoder.network.tokens
    assert tokens.kind == kind
    entries = data.draw(st.lists(st.integers(1, len(tokens) - 1), max_size=6))
    written = written_tokens(tokens)
    spans = decoder.spans(entries)
    words = [b"".join(map(tokens.bytes_of, entries[begin:end])).decode("latin-1") for begin, end in spans]
    assert [word for word in "".join(written[entry] for entry in entries).split(" ") if word] == words


def test_by_hand() -> None:
    written = ["", " THE", " CAT", "S", " A", "<end>"]
    estimator = ConfidenceEstimator(["THE", "CAT", "SAT"])
    # Nodes: (root), THE, THE CAT, THE CAT S, A, A CAT
    parent, entry = [-1, 0, 1, 2, 0, 4], [0, 1, 2, 3, 4, 2]
    log_weight = [math.log(weight) for weight in (0.04, 0.05, 0.5, 0.3, 7.0)]
    estimator.add_pruned(Pruned(parent, entry, [3, 2, 5, 4, 2], [-1, 3, 3, -1, -1], log_weight), written)
    estimator.add(estimator.end(estimator.follow(0, " THE CAT")), math.log(0.25))
    first, second, last = estimator.confidences()
    assert first == pytest.approx(1 / (1 + math.sqrt(0.8)))
    assert second == pytest.approx(1 / (1 + math.sqrt(0.09)))
    assert last == pytest.approx(1 / (1 + math.sqrt(0.25)))
    assert ConfidenceEstimator([]).confidences() == []


def best(candidates: list[tuple[Prefix, float]], others: list[float], num: int, beam: float) -> list[int]:
    totals = sorted([score for _, score in candidates] + others, reverse=True)[:num]
    return [place for place, (_, score) in enumerate(candidates) if score >= totals[-1] and score >= totals[0] - beam]


class PlainSearch:
    """Time-synchronous search with dictionaries; `steps` are all hypotheses that take part, and whether they leave."""

    def __init__(self, network: ToyTransducer, encoded: torch.Tensor, beam_size: int, beam: float) -> None:
        self.steps: list[
            tuple[int, Prefix, float, bool, bool]
        ] = []  # frame, prefix, score, is at its beginning, leaves
        arriving: dict[Prefix, float] = {(): 0.0}
        blank = network.tokens.blank_id
        for number, frame in enumerate(encoded):
            current = list(arriving.items())
            kept = best(current, [], beam_size, beam)
            self.steps += [(number, *each, True, place not in kept) for place, each in enumerate(current)]
            current, arriving, left = [current[place] for place in kept], {}, list[float]()
            for step in range(MAX_SYMBOLS + 1):
                extended = list[tuple[Prefix, float]]()
                for prefix, score in current:
                    scores = scores_of(network, frame, prefix)[0].tolist()
                    stay = score + scores[blank]
                    arriving[prefix] = float(np.logaddexp(arriving.get(prefix, -math.inf), stay))
                    left.append(stay)
                    extended += [
                        ((*prefix, column), score + own)
                        for column, own in enumerate(scores)
                        if column != blank and own >= -8.0
                    ]
                if step == MAX_SYMBOLS:
                    break
                extended = [extended[place] for place in best(extended, left, 2 * beam_size, beam)]
                kept = best(extended, left, beam_size, beam)
                self.steps += [(number, *each, False, True) for place, each in enumerate(extended) if place not in kept]
                current = [extended[place] for place in kept]
                if not current:
                    break
        self.finished = sorted(arriving.items(), key=lambda item: -item[1])


def text_of(network: ToyTransducer, columns: Prefix) -> list[str]:
    return "".join(network.tokens.symbols[column] for column in columns).replace("▁", " ").split()


def plain_confidences(network: ToyTransducer, search: PlainSearch) -> list[float]:
    texts: dict[tuple[str, ...], float] = {}
    for prefix, score in search.finished:
        text = tuple(text_of(network, prefix))
        texts[text] = float(np.logaddexp(texts.get(text, -math.inf), score))
    words = max(texts, key=lambda text: texts[text])
    own = next(prefix for prefix, _ in search.finished if tuple(text_of(network, prefix)) == words)
    against = [0.0] * len(words)
    for text, score in texts.items():
        if (wrong := first_other_word(words, text, is_finished=True)) is not None:
            against[wrong] += math.exp(score - texts[words])
    for number, prefix, score, _, leaves in search.steps:
        mass = [
            other
            for at, begun, other, is_beginning, _ in search.steps
            if at == number and is_beginning and own[: len(begun)] == begun
        ]
        weight = math.exp(score) / sum(map(math.exp, mass))
        wrong = first_other_word(words, text_of(network, prefix), is_finished=False)
        if leaves and wrong is not None and weight >= math.exp(-8.0):
            against[wrong] += weight
    return [1.0 / (1.0 + math.sqrt(weight)) for weight in against]


@pytest.mark.parametrize(("beam_size", "beam"), [(1, 16.0), (2, 16.0), (3, 2.0), (50, 16.0)])
def test_words_of_a_transducer(beam_size: int, beam: float) -> None:
    num_unsure = 0
    for seed in range(6):
        network = ToyTransducer(PIECES, seed=seed, blank_bias=0.5)
        settings = {"beam_size": beam_size, "search_beam": beam, "max_symbols_per_frame": MAX_SYMBOLS}
        decoder = TransducerDecoder(network, **settings)
        (found,) = decoder(frames(5, seed))
        expected = plain_confidences(network, PlainSearch(network, frames(5, seed), beam_size, beam))
        assert [word.confidence for word in found.words] == pytest.approx(expected, abs=1e-4)
        num_unsure += sum(0.05 < each < 0.95 for each in expected)
        several = decoder(frames(5, seed), nbest=4)
        assert several[0] == found
        assert all(0.0 < (word.confidence or 0.0) <= 1.0 for each in several for word in each.words)
    assert num_unsure > 5


def test_a_network_without_alternatives_has_none() -> None:
    network = ToyTransducer(PIECES, sharpness=200.0)
    (found,) = TransducerDecoder(network)(frames(8))
    assert {word.confidence for word in found.words} == {1.0}


@pytest.mark.parametrize("durations", [(0, 1, 2), (1, 3)])
def test_frames_may_be_passed_over(durations: tuple[int, ...]) -> None:
    for seed in range(10):
        decoder = TransducerDecoder(ToyTransducer(PIECES, durations, seed=seed), beam_size=3)
        batch = torch.stack([frames(9, seed), frames(9, seed + 1)])
        for found in (decoder(batch, [9, 5]), [decoder(batch[0]), decoder(batch[1, :5])]):
            confidences = [word.confidence or 0.0 for each in found for word in each[0].words]
            assert all(0.0 < each <= 1.0 for each in confidences)
            assert min(confidences) < 0.99


def test_words_of_streams() -> None:
    decoder = TransducerDecoder(ToyTransducer(PIECES, seed=2), beam_size=3)
    (whole,) = decoder(frames(20))
    for confidences in (False, True):
        stream = decoder.stream(confidences)
        for part in frames(20).split(3):
            stream.accept(part)
        assert {word.confidence for word in stream.partial().words} == {None}
        found = [word.confidence for word in stream.finish().words]
        wanted = [word.confidence if confidences else None for word in whole.words]
        assert found == pytest.approx(wanted, abs=1e-5)
