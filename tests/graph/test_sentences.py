"""Graphs of several sentences in a row, against all ways to divide the frames into sentences and silence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asr.decoding.nbest import n_best
from asr.decoding.rescoring import second_pass
from asr.decoding.settings import DecodingOptions, LanguageModelOptions
from asr.decoding.slf import read_slf, read_slf_lattice, write_slf
from asr.decoding.token_passing import LM_FUSIONS, TokenPassingDecoder
from asr.decoding.word_lattice import Candidate, RescoringScales, rescore_lattice, rescore_list
from asr.graph.build import OptionalSilence, build_graph
from asr.graph.context import TiedStates
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.combine import SentencesLM
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.text.lexicon import Lexicon
from asr.text.symbols import EOS_ID, TokenTable
from tests.decoding.random_graphs import UNPRUNED
from tests.reference.exhaustive_search import exhaustive_search
from tests.reference.table_lm import TableLM

PHONES = ("SIL", "a", "b")
NUM_FRAMES = 7
Scores = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> DecodingGraph:
    """Two words, one of which may end or not where the other one begins."""
    pytest.importorskip("kaldifst")
    path: Path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("A\nAB\nA AB\nAB A A\n")
    model = NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), 2).trie)
    entry = np.array([[0, 1, 3], [0, 1, 5], [0, 1, 3]])
    states = TiedStates(PHONES, entry, np.array([[0, 2, 4], [0, 2, 4], [0, 2, 4]]))
    lexicon = Lexicon({"A": [("a",)], "AB": [("a", "b")]})
    return build_graph(lexicon, model, TokenTable(states.column_names()), states, silence=OptionalSilence("SIL", 0.3))


def log_prob_of(seed: int, num_frames: int = NUM_FRAMES) -> Tensor:
    values = torch.randn(num_frames, 6, generator=torch.Generator().manual_seed(seed))
    values[2:5, 0] += 3.0
    return values.log_softmax(1)


def spoken_to_the_end(graph: DecodingGraph) -> DecodingGraph:
    """The graph without paths that end in silence, or have no words."""
    final_score = graph.final_score.clone()
    final_score[graph.dst_state[graph.token_id == 0].long()] = -math.inf
    final_score[0] = -math.inf
    return replace(graph, final_score=final_score)


def sentences(
    graph: DecodingGraph, log_prob: Tensor, num_silent: int, am_scale: float = 1.0, **scales: float
) -> Scores:
    """The best score of each row of sentences, with all divisions of the frames."""
    penalty = scales.get("word_insertion_penalty", 0.0)
    best = {found.words: found.total for found in exhaustive_search(graph, log_prob, None, am_scale, **scales)}
    for end in range(1, len(log_prob) - num_silent + 1):
        begin = end + num_silent - 1
        rest = log_prob[begin:].clone()
        rest[0, 1:] = -math.inf  # the next sentence begins with the last frame of silence
        silence = penalty + am_scale * float(log_prob[end:begin, 0].sum())
        following = sentences(graph, rest, num_silent, am_scale, **scales)
        for first in exhaustive_search(spoken_to_the_end(graph), log_prob[:end], None, am_scale, **scales):
            for words, total in following.items():
                row = (*first.words, EOS_ID, *words)
                best[row] = max(best.get(row, -math.inf), first.total + silence + total)
    return {words: total for words, total in best.items() if total > -math.inf}


def scored(
    graph: DecodingGraph,
    log_prob: Tensor,
    options: DecodingOptions,
    score_sentence: Callable[[tuple[int, ...]], float],
) -> Scores:
    """`sentences` with two frames of silence between them, each also scored by a language model."""
    scales = {name: getattr(options, name) for name in ("am_scale", "graph_scale", "word_insertion_penalty")}
    found = {}
    for words, total in sentences(graph, log_prob, 2, **scales).items():
        begins = [0, *(place + 1 for place, word in enumerate(words) if word == EOS_ID), len(words) + 1]
        parts = [words[begin : following - 1] for begin, following in itertools.pairwise(begins)]
        found[words] = total + options.lm_scale * sum(map(score_sentence, parts))
    return found


@pytest.mark.parametrize("num_silent", [2, 3, 4])
def test_the_graph_has_all_rows_of_sentences_with_enough_silence_between_them(
    graph: DecodingGraph, num_silent: int
) -> None:
    joined = graph.with_sentence_ends(num_silent)
    joined.validate()
    assert joined.num_states == graph.num_states + num_silent - 1
    assert joined.can_join_sentences and joined.vocabulary is graph.vocabulary
    log_prob = log_prob_of(num_silent)
    found = {one.words: one.total for one in exhaustive_search(joined, log_prob) if one.total > -math.inf}
    expected = sentences(graph, log_prob, num_silent)
    assert any(words.count(EOS_ID) == 1 for words in expected)
    assert found == pytest.approx(expected, abs=1e-4) and found.keys() == expected.keys()


def test_the_arcs_of_each_state_stay_in_order_of_their_scores(graph: DecodingGraph) -> None:
    joined = graph.with_sentence_ends(3)
    src_state = joined.src_state()
    is_ordered = (src_state[1:] != src_state[:-1]) | (joined.score[1:] <= joined.score[:-1])
    assert bool(is_ordered.all())


@pytest.mark.parametrize("lm_fusion", LM_FUSIONS)
def test_each_sentence_is_scored_by_itself(graph: DecodingGraph, lm_fusion: str) -> None:
    lm = TableLM(graph.vocabulary, seed=1)
    options = replace(UNPRUNED, output_beam=1e4)
    joined = graph.with_sentence_ends(2)
    decoder = TokenPassingDecoder(joined, options, lm_fusion=lm_fusion, keep_lattice=True)
    for seed in range(6):
        log_prob = log_prob_of(seed)
        expected = scored(graph, log_prob, options, lm.score_sentence)
        (result,) = decoder.decode(log_prob[None], lm=SentencesLM(lm))
        best = max(expected, key=lambda words: expected[words])
        assert result.best is not None and result.lattice is not None
        assert result.best.word_ids == best and result.best.total == pytest.approx(expected[best], abs=1e-3)
        every = n_best(result.lattice, joined, options, 10**6)
        assert {one.word_ids: one.total for one in every} == pytest.approx(expected, abs=1e-3)
        # Without `</s>`, the same scores; rows of sentences with the same words are one sentence.
        plain = result.lattice.without_sentence_ends(options)
        merged: Scores = {}
        for words, total in expected.items():
            spoken = tuple(word for word in words if word != EOS_ID)
            merged[spoken] = max(merged.get(spoken, -math.inf), total)
        found = n_best(plain, joined, options, 10**6)
        assert {one.word_ids: one.total for one in found} == pytest.approx(merged, abs=1e-3)
        for one in found:
            weighted = options.am_scale * one.am_score + options.graph_scale * one.graph_score
            weighted += options.lm_scale * one.lm_score + options.word_insertion_penalty * len(one.word_ids)
            assert weighted == pytest.approx(one.total, abs=1e-3)
        assert plain.without_sentence_ends(options) is plain
        assert any(EOS_ID in words for words in expected)


def ends_of(words: tuple[int, ...]) -> tuple[int, ...]:
    """The number of words before each `</s>`, which is none itself."""
    places = [place for place, word in enumerate(words) if word == EOS_ID]
    return tuple(place - number for number, place in enumerate(places))


def test_lattices_and_lists_say_where_sentences_end(graph: DecodingGraph, tmp_path: Path) -> None:
    """Rescoring either with a language model gives the best of all rows of sentences, each scored by itself."""
    lm = TableLM(graph.vocabulary, seed=1)
    options = replace(UNPRUNED, output_beam=1e4, word_insertion_penalty=2.0)
    scales = RescoringScales(options.am_scale, options.lm_scale, options.lm_scale, options.word_insertion_penalty)
    joined = graph.with_sentence_ends(2)
    decoder = TokenPassingDecoder(joined, options, lm_fusion="lattice", keep_lattice=True)
    found_ends = set[tuple[int, ...]]()
    for seed in range(6):
        log_prob = log_prob_of(seed)
        (result,) = decoder.decode(log_prob[None])
        assert result.lattice is not None
        plain = result.lattice.without_sentence_ends(options)
        marked = plain.with_sentence_ends(joined)
        assert torch.equal(marked.word_begin, result.lattice.word_begin)
        assert torch.equal(marked.word_id, result.lattice.word_id)
        assert torch.equal(marked.am_score, plain.am_score)
        assert marked.with_sentence_ends(joined) is marked
        with (tmp_path / "a.slf").open("w") as file:
            write_slf(file, "a", marked, joined.vocabulary, joined.tokens, options, 0.03)
        assert EOS_ID not in read_slf(tmp_path / "a.slf", joined.vocabulary, joined.tokens).word_id.tolist()
        found = rescore_lattice(read_slf_lattice(tmp_path / "a.slf"), lm, scales, 10**6)
        expected = scored(graph, log_prob, options, lm.score_sentence)
        best = max(expected, key=lambda words: expected[words])
        assert found is not None and found.total == pytest.approx(expected[best], abs=1e-3)
        assert found.sentence_ends == ends_of(best) and "</s>" not in found.text
        assert found.text.split() == [joined.vocabulary.words[word] for word in best if word != EOS_ID]
        found_ends.add(found.sentence_ends)
        # Of the rows of sentences with the same words, a list has the best one.
        rows = scored(graph, log_prob, options, lambda _: 0.0)
        for one in n_best(plain, joined, options, 10**6):
            same = [row for row in rows if tuple(word for word in row if word != EOS_ID) == one.word_ids]
            assert one.sentence_ends == ends_of(max(same, key=lambda row: rows[row]))
            old_score = one.graph_score * options.graph_scale / options.lm_scale
            candidate = Candidate(one.words, one.am_score, old_score, sentence_ends=one.sentence_ends)
            (again,) = rescore_list([candidate], lm, scales)
            row = next(row for row in same if ends_of(row) == one.sentence_ends)
            assert again.total == pytest.approx(expected[row], abs=1e-3)
    assert len(found_ends) > 1


@pytest.mark.parametrize("kind", ["lattice", "nbest"])
def test_a_second_pass_scores_each_sentence_by_itself(graph: DecodingGraph, kind: str) -> None:
    options = replace(UNPRUNED, output_beam=1e4)
    first, second = (TableLM(graph.vocabulary, seed=seed) for seed in (1, 2))
    joined = graph.with_sentence_ends(2)
    decoder = TokenPassingDecoder(joined, options, lm_fusion="lattice", keep_lattice=True)
    models = LanguageModelOptions(second_pass=kind, second_pass_weight=0.3, second_pass_sentences=10**6)

    def mixed(words: tuple[int, ...]) -> float:
        return 0.7 * first.score_sentence(words) + 0.3 * second.score_sentence(words)

    for seed in range(6):
        log_prob = log_prob_of(seed)
        expected = scored(graph, log_prob, options, mixed)
        both = SentencesLM(first), SentencesLM(second)
        (result,) = second_pass(
            decoder.decode(log_prob[None], lm=both[0]), *both, joined, options, models, keeps_lattice=True
        )
        assert result.lattice is not None and any(EOS_ID in words for words in expected)
        every = result.hypotheses if kind == "nbest" else n_best(result.lattice, joined, options, 10**6)
        assert {one.word_ids: one.total for one in every} == pytest.approx(expected, abs=1e-3)
        assert result.best is not None and result.best.total == pytest.approx(max(expected.values()), abs=1e-3)


def test_graphs_without_silence_or_tied_states_cannot(graph: DecodingGraph) -> None:
    assert not replace(graph, meta={**graph.meta, "silence": None}).can_join_sentences
    assert not replace(graph, meta={**graph.meta, "topology": "ctc"}).can_join_sentences
