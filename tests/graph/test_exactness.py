"""The built graph against brute force: for random frames, the best score of every sentence is the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asr.graph.build import OptionalSilence, build_graph, build_phone_graph
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable
from tests.reference.graph_search import Scores, word_sequence_scores
from tests.reference.sentence_enumeration import best_backoff_score, sentence_scores

PHONES = ("a", "b", "s")
LEXICON = {"AB": ["a b"], "A": ["a"], "AY": ["a"], "BAB": ["b a b", "b b"], "B": ["b"]}
TEXT = ["A AB", "AB A B", "BAB", "AY B", "AY AY AB", "B A", "B A B", "BAB AB"]


def language_model(folder: Path, sentences: Sequence[str], order: int) -> NgramLM:
    (folder / "text").write_text("".join(f"{sentence}\n" for sentence in sentences))
    stream = read_word_stream([folder / "text"])
    return NgramLM.from_trie(estimate_kneser_ney(stream, order).trie)


def lexicon_of(pronunciations: Mapping[str, Sequence[str]]) -> Lexicon:
    return Lexicon({word: [tuple(each.split()) for each in variants] for word, variants in pronunciations.items()})


def token_table(topology: str) -> TokenTable:
    if topology in ("hmm-2", "hmm-3"):
        return TokenTable([f"{phone}_{state}" for phone in PHONES for state in range(1, int(topology[-1]) + 1)])
    return TokenTable(PHONES)


def enumerated(
    log_prob: torch.Tensor,
    lexicon: Lexicon,
    model: NgramLM,
    tokens: TokenTable,
    topology: str,
    silence: str | None = None,
    silence_probability: float = 0.5,
) -> Scores:
    vocabulary = model.vocabulary
    return sentence_scores(
        log_prob,
        {vocabulary.id_of(word): lexicon[word] for word in vocabulary.words if word in lexicon},
        best_backoff_score(model.arrays, int(model.start(1))),
        tokens,
        topology,
        silence,
        silence_probability,
    )


def random_frames(num_frames: int, num_tokens: int) -> torch.Tensor:
    return torch.randn(num_frames, num_tokens, generator=torch.Generator().manual_seed(num_frames)).log_softmax(1)


def assert_same(found: Scores, expected: Scores) -> None:
    assert found.keys() == expected.keys()
    for sentence, score in expected.items():
        assert found[sentence] == pytest.approx(score, abs=2e-3), sentence


@pytest.mark.parametrize("topology", ["ctc", "ctc-modified", "hmm-1", "hmm-2", "hmm-3"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_every_sentence_scores_as_in_brute_force(topology: str, order: int, tmp_path: Path) -> None:
    lexicon, tokens = lexicon_of(LEXICON), token_table(topology)
    model = language_model(tmp_path, TEXT, order)
    graph = build_graph(lexicon, model, tokens, topology)
    for num_frames in (0, 1, 3):
        log_prob = random_frames(num_frames, len(tokens))
        assert_same(word_sequence_scores(graph, log_prob), enumerated(log_prob, lexicon, model, tokens, topology))


pronunciations = st.lists(st.text("ab", min_size=1, max_size=3).map(" ".join), min_size=1, max_size=2)
lexicons = st.lists(pronunciations, min_size=1, max_size=4).map(lambda v: dict(zip("VWXY", v, strict=False)))


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), words=lexicons, topology=st.sampled_from(["ctc", "ctc-modified", "hmm-1"]))
def test_any_lexicon_and_any_text(
    data: st.DataObject, words: dict[str, list[str]], topology: str, tmp_path: Path
) -> None:
    sentence = st.lists(st.sampled_from(sorted(words)), min_size=1, max_size=4).map(" ".join)
    sentences = [" ".join(words), *data.draw(st.lists(sentence, min_size=1, max_size=6))]
    lexicon, tokens = lexicon_of(words), TokenTable(PHONES)
    model = language_model(tmp_path, sentences, data.draw(st.integers(1, 3)))
    phone_graph, _ = build_phone_graph(lexicon, model, tokens, topology)
    log_prob = random_frames(3, len(tokens))
    every = enumerated(log_prob, lexicon, model, tokens, topology)
    # A word that the text has only at the ends of sentences never backs off to another one.
    expected = {sentence: score for sentence, score in every.items() if score > -math.inf}
    assert_same(word_sequence_scores(phone_graph.finish(), log_prob), expected)
    phone_graph.save(tmp_path / "graph.safetensors")
    assert_same(word_sequence_scores(DecodingGraph.load(tmp_path / "graph.safetensors"), log_prob), expected)


def test_a_history_that_never_backs_off(tmp_path: Path) -> None:
    words = {"V": ["a a b"], "X": ["b"], "Y": ["a b", "a"]}
    lexicon, tokens = lexicon_of(words), TokenTable(PHONES)
    model = language_model(tmp_path, ["V W X Y", "Y W Y", "X Y Y V", "V Y W V", "Y W Y V", "Y", "V"], 2)
    assert bool(model.arrays.backoff_score.isneginf().any())
    log_prob = random_frames(4, len(tokens))
    found = word_sequence_scores(build_graph(lexicon, model, tokens), log_prob)
    expected = enumerated(log_prob, lexicon, model, tokens, "ctc")
    assert any(score == -math.inf for score in expected.values())
    assert_same(found, {sentence: score for sentence, score in expected.items() if score > -math.inf})


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["hmm-1", "ctc"])
@pytest.mark.parametrize("lexicon", [{"A": ["a"], "AB": ["a b"]}, {"A": ["a"], "S": ["s"], "AS": ["a s"]}])
def test_optional_silence(topology: str, lexicon: dict[str, list[str]], tmp_path: Path) -> None:
    tokens = TokenTable(PHONES)
    model = language_model(tmp_path, [" ".join(pair) for pair in itertools.product(lexicon, repeat=2)], 2)
    graph = build_graph(lexicon_of(lexicon), model, tokens, topology, silence=OptionalSilence("s", 0.3))
    log_prob = random_frames(4, len(tokens))
    expected = enumerated(log_prob, lexicon_of(lexicon), model, tokens, topology, "s", 0.3)
    assert_same(word_sequence_scores(graph, log_prob), expected)


@pytest.mark.slow
def test_both_homophones_come_out(tmp_path: Path) -> None:
    lexicon = lexicon_of({"A": ["a"], "TO": ["b a"], "TWO": ["b a"], "B": ["b"]})
    model = language_model(tmp_path, ["A TO B", "A TO A", "B TWO A", "B TWO B"], 3)
    tokens = TokenTable(PHONES)
    graph = build_graph(lexicon, model, tokens)
    for sentence, phones in (("A TO B", "a b a b"), ("B TWO A", "b b a a"), ("B TWO B", "b b a b")):
        columns = [column for phone in phones.split() for column in (tokens.id_of(phone), 0)]
        log_prob = torch.full((len(columns), len(tokens)), -20.0)
        log_prob[torch.arange(len(columns)), torch.tensor(columns)] = 0.0
        scores = word_sequence_scores(graph, log_prob)
        assert max(scores, key=scores.__getitem__) == tuple(map(model.vocabulary.id_of, sentence.split()))
