"""n-best lists, confidences and oracle errors against every path written out; prefix trees against single sentences."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding.interface import DecodeResult, DecodingOptions
from asr.decoding.lattice import arc_posteriors, with_confidences
from asr.decoding.log_probs import skip_blanks
from asr.decoding.nbest import PrefixTree, n_best, rescore_n_best, score_tree, score_tree_by_network
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.results import StageTimes, as_result
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.lattice_oracle import oracle_errors
from tests.reference.lattice_paths import all_sentences
from tests.reference.table_lm import TableLM
from tests.reference.toy_network import ToyNetwork

OPTIONS = DecodingOptions(search_beam=math.inf, output_beam=6.0, am_scale=0.7, lm_scale=0.6, word_insertion_penalty=0.3)


def decoded(seed: int, with_lm: bool) -> tuple[DecodingGraph, DecodeResult]:
    graph = random_graph(seed, final_prob=1.0)
    lm = TableLM(graph.vocabulary, seed) if with_lm else None
    return graph, TokenPassingDecoder(graph, OPTIONS, keep_lattice=True).decode(
        random_log_prob(seed, 1, 5), torch.tensor([5]), lm
    )[0]


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), with_lm=st.booleans(), num=st.integers(1, 40))
def test_n_best_are_the_best_sentences(seed: int, with_lm: bool, num: int) -> None:
    graph, result = decoded(seed, with_lm)
    assert result.lattice is not None and result.best is not None
    expected = sorted(all_sentences(result.lattice, OPTIONS).items(), key=lambda item: -item[1])
    found = n_best(result.lattice, graph, OPTIONS, num)
    assert len(found) == min(num, len(expected))
    assert [one.total for one in found] == pytest.approx([total for _, total in expected[:num]], abs=1e-4)
    assert len({one.word_ids for one in found}) == len(found)
    assert found[0].word_ids == result.best.word_ids
    for name in ("am_score", "graph_score", "lm_score"):
        assert getattr(found[0], name) == pytest.approx(getattr(result.best, name), abs=1e-3), name


def test_no_hypotheses_asked_for() -> None:
    graph, result = decoded(0, False)
    assert result.lattice is not None
    with pytest.raises(AsrError, match="at least 1"):
        n_best(result.lattice, graph, OPTIONS, 0)


@settings(max_examples=8)
@given(sentences=st.lists(st.lists(st.integers(4, 7), max_size=5), max_size=12))
def test_prefix_tree_equals_sentence_by_sentence(sentences: list[list[int]]) -> None:
    network = ToyNetwork(num_words=4)
    lm = TableLM(network.vocabulary)
    tree = PrefixTree(sentences)
    prefixes = {tuple(sentence[:i]) for sentence in sentences for i in range(len(sentence) + 1)}
    assert tree.num_prefixes == max(1, len(prefixes))
    expected = [lm.score_sentence(tuple(sentence)) for sentence in sentences]
    assert score_tree(tree, lm).tolist() == pytest.approx(expected, abs=1e-4)
    together = score_tree_by_network(tree, network)
    assert network.num_rows == tree.num_prefixes
    for sentence, score in zip(sentences, together.tolist(), strict=True):
        alone = score_tree_by_network(PrefixTree([sentence]), network)
        assert score == pytest.approx(float(alone), abs=1e-4)


def test_rescored_lists_are_sorted_by_the_new_total() -> None:
    graph, result = decoded(4, False)
    assert result.lattice is not None
    before = n_best(result.lattice, graph, OPTIONS, 20)
    lm = TableLM(graph.vocabulary, 9)
    after, empty = rescore_n_best([before, ()], lm, OPTIONS)
    assert empty == ()
    assert {one.word_ids for one in after} == {one.word_ids for one in before}
    for one in after:
        assert one.lm_score == pytest.approx(lm.score_sentence(one.word_ids), abs=1e-4)
        rest = 0.7 * one.am_score + one.graph_score + 0.3 * len(one.words)
        assert one.total == pytest.approx(rest + 0.6 * one.lm_score, abs=1e-3)
    assert [one.total for one in after] == sorted((one.total for one in after), reverse=True)


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_posteriors_sum_to_one_at_each_frame(seed: int) -> None:
    _, result = decoded(seed, False)
    lattice = result.lattice
    assert lattice is not None and result.best is not None
    posterior = arc_posteriors(lattice, OPTIONS)
    begin = lattice.arc_frame_begin()
    for first, last in itertools.pairwise(begin):
        assert float(posterior[first:last].sum()) == pytest.approx(1.0, abs=1e-6)
    confidences = with_confidences(result.best, lattice, OPTIONS).confidences
    assert len(confidences) == len(result.best.words) and all(0.0 < one <= 1.0 for one in confidences)


@pytest.mark.parametrize("seed", range(3, 6))
def test_frames_that_were_left_out_move_words_and_change_no_confidence(seed: int) -> None:
    graph, log_prob, num_frames = random_graph(seed, final_prob=1.0), random_log_prob(seed, 1, 30), torch.tensor([30])
    log_prob[0, 5:15] = torch.tensor([5.0, 0.0, 0.0, 0.0]).log_softmax(0)
    options = replace(OPTIONS, blank_skip_threshold=0.3)
    short, num_kept, frame_of, _ = skip_blanks(log_prob, num_frames, 0.3)
    assert int(num_kept) < 22
    (expected,) = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True).decode(short, num_kept)
    (result,) = TokenPassingDecoder(graph, options, keep_lattice=True).decode(log_prob, num_frames)
    assert expected.best is not None and expected.lattice is not None and len(expected.best.words) > 1
    assert result.best is not None and result.lattice is not None
    plain = with_confidences(expected.best, expected.lattice, OPTIONS, num_frames_apart=0)
    moved = with_confidences(result.best, result.lattice, OPTIONS, 1.0, 0, result.original_frame)
    assert moved.confidences == pytest.approx(plain.confidences)
    told = as_result(result, 0.01, StageTimes(audio_seconds=0.3), options, None, {}).words
    near = with_confidences(result.best, result.lattice, options, 1 / 0.7, original_frame=result.original_frame)
    assert tuple(word.confidence for word in told) == near.confidences
    assert near.confidences != with_confidences(result.best, result.lattice, options, 1 / 0.7).confidences
    (of_list,) = n_best(result.lattice, graph, OPTIONS, 1, result.original_frame)
    assert of_list.start_frames == moved.start_frames == tuple(frame_of[0, list(plain.start_frames)].tolist())


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), reference=st.lists(st.integers(4, 8), max_size=5))
def test_oracle_is_the_nearest_sentence(seed: int, reference: list[int]) -> None:
    _, result = decoded(seed, False)
    assert result.lattice is not None
    expected = min(_edits(words, reference) for words in all_sentences(result.lattice, OPTIONS))
    assert oracle_errors(result.lattice, reference) == expected


def _edits(words: tuple[int, ...], reference: list[int]) -> int:
    row = list(range(len(reference) + 1))
    for i, word in enumerate(words, 1):
        previous = row
        row = [i]
        for j, other in enumerate(reference, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (word != other)))
    return row[-1]
