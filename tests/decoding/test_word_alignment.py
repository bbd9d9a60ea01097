"""Words lie where their phones are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr.decoding.backtrace import hypothesis_of_path
from asr.decoding.interface import DecodingOptions, Hypothesis
from asr.decoding.words import WordAligner
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.testing.tones import PRONUNCIATIONS, tones
from asr.text.lexicon import Lexicon, word_ends
from tests.decoding.random_graphs import random_graph


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


def test_a_recognizer_with_a_lexicon(tiny_bundle_folder, tmp_path) -> None:
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
