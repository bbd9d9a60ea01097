"""n-best lists, confidences and oracle errors against every path written out; prefix trees against single sentences."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding.backtrace import hypothesis_of_path
from asr.decoding.cpu.nbest import SentenceLattice, best_sentences
from asr.decoding.interface import DecodeResult, skip_blanks
from asr.decoding.lattice import Lattice, best_to_end
from asr.decoding.mbr import PartPosteriors, PathPosteriors
from asr.decoding.nbest import (
    PrefixTree,
    _one_word_an_arc,
    hypotheses_of_lattice,
    n_best,
    rescore_n_best,
    score_tree,
)
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.decoding.words import with_final_words, with_posteriors
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import jit_required
from asr.lm.cached.engine import CachedRNNLM
from asr.results import StageTimes, as_result
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.decoding.small_lattices import lattice_of_all_sorts, small_lattice
from tests.reference.lattice_oracle import oracle_errors
from tests.reference.lattice_paths import all_sentences
from tests.reference.minimum_risk import arc_posteriors
from tests.reference.table_lm import TableLM
from tests.reference.toy_network import ToyNetwork

OPTIONS = DecodingOptions(
    search_beam=math.inf, output_beam=6.0, context_beam=None, am_scale=0.7, lm_scale=0.6, word_insertion_penalty=0.3
)


def decoded(seed: int, with_lm: bool) -> tuple[DecodingGraph, DecodeResult]:
    graph = random_graph(seed, final_prob=1.0)
    lm = TableLM(graph.vocabulary, seed) if with_lm else None
    return graph, TokenPassingDecoder(graph, OPTIONS, keep_lattice=True).decode(
        random_log_prob(seed, 1, 5), torch.tensor([5]), lm
    )[0]


@pytest.mark.slow
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


def searched(lattice: Lattice) -> SentenceLattice:
    """As `n_best` makes it, all scales 1."""
    options = DecodingOptions()
    arc_total, final_total = lattice.arc_total(options), lattice.final_total(options)
    return _one_word_an_arc(lattice, arc_total, final_total, best_to_end(lattice, arc_total, final_total))


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_any_lattice_gives_its_best_sentences_and_their_paths(is_compiled: bool) -> None:
    if is_compiled:
        pytest.importorskip("numba")
    search = jit_required(best_sentences) if is_compiled else best_sentences
    options, generator = DecodingOptions(), random.Random(0)
    sizes, num_empty, num_cut = [], 0, 0
    for seed in range(400):
        lattice = lattice_of_all_sorts(seed)
        best = all_sentences(lattice, options)
        arc_total, final_total = lattice.arc_total(options), lattice.final_total(options)
        num = generator.choice((1, 2, 5, 20, len(best) + 1))
        total, path_begin, arc = search(searched(lattice), 0, num)
        assert total.tolist() == pytest.approx(sorted(best.values(), reverse=True)[:num])
        found = set()
        for own, (begin, end) in zip(total, itertools.pairwise(path_begin.tolist()), strict=True):
            state, words, reached = 0, [], 0.0
            for one in arc[begin:end].tolist():
                assert lattice.arc_begin[state] <= one < lattice.arc_begin[state + 1]
                words += lattice.word_id[lattice.word_begin[one] : lattice.word_begin[one + 1]].tolist()
                state, reached = int(lattice.dst_state[one]), reached + float(arc_total[one])
            assert reached + float(final_total[state]) == pytest.approx(own) == pytest.approx(best[tuple(words)])
            found.add(tuple(words))
        assert len(found) == len(total) == min(num, len(best))
        sizes.append(len(best))
        num_empty += () in found
        num_cut += num < len(best)
    assert min(sizes) == 0 and max(sizes) > 100 and num_empty > 50 and num_cut > 100


def test_prefixes_whose_states_differ_only_in_score_stay_apart() -> None:
    """After A or B (4, 5), state 1 is better than 2; after C (6), the other way round. 7 follows 1, and 8 follows 2."""
    scores = [(4, -1.0, -2.0), (5, -1.5, -2.5), (6, -4.0, -3.0)]
    arcs = [(0, state + 1, [word], both[state]) for word, *both in scores for state in (0, 1)]
    lattice = small_lattice([0, 1, 1, 2], [*arcs, (1, 3, [7], 0.0), (2, 3, [8], -0.25)])
    found, _, arc = best_sentences(searched(lattice), 0, 10)
    assert found.tolist() == [-1.0, -1.5, -2.25, -2.75, -3.25, -4.0]
    assert arc.reshape(-1, 2).tolist() == [[0, 6], [2, 6], [1, 7], [3, 7], [5, 7], [4, 6]]


def test_a_later_prefix_with_the_same_states_keeps_its_own_path() -> None:
    """After A or B (4, 5), states 1 and 3, and the arc without words from 1 to 3 is better than the other way to 3."""
    first, later = [(0, 1, [4], -1.0), (0, 1, [5], -1.5), (0, 2, [], 0.0)], [(2, 3, [4], -5.0), (2, 3, [5], -5.5)]
    lattice = small_lattice([0, 1, 1, 2, 3], [*first, (1, 3, [], 0.0), *later, (3, 4, [6], 0.0)])
    found, path_begin, arc = best_sentences(searched(lattice), 0, 10)
    assert found.tolist() == [-1.0, -1.5] and path_begin.tolist() == [0, 3, 6]
    assert arc.tolist() == [0, 3, 6, 1, 3, 6]


def test_no_hypotheses_asked_for() -> None:
    graph, result = decoded(0, False)
    assert result.lattice is not None
    with pytest.raises(AsrError, match="at least 1"):
        n_best(result.lattice, graph, OPTIONS, 0)


def test_more_hypotheses_asked_for_than_a_loop_can_count() -> None:
    graph, result = decoded(0, False)
    assert result.lattice is not None
    assert n_best(result.lattice, graph, OPTIONS, 10**30) == n_best(result.lattice, graph, OPTIONS, 10**6)


@pytest.mark.slow
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
    together = score_tree(tree, CachedRNNLM(network))
    assert network.num_rows == len(prefixes)
    assert together.tolist() == pytest.approx([word_by_word(sentence, network) for sentence in sentences], abs=1e-4)


def word_by_word(sentence: list[int], network: ToyNetwork) -> float:
    """The score of a sentence, `</s>` included, by a step of the network for each word and nothing else."""
    state, history, total = network.initial_state().unsqueeze(0), [BOS_ID, EPSILON_ID], 0.0
    for word, following in itertools.pairwise([BOS_ID, *sentence, EOS_ID]):
        state = network.step(state, torch.tensor([word]))
        hidden, words = state[:, -network.hidden_size :], torch.tensor([history[: network.num_history_words]])
        total += float(network.log_prob(hidden, words, torch.tensor([following])).detach())
        history = [following, *history]
    return total


def test_rescored_lists_are_sorted_by_the_new_total() -> None:
    graph, result = decoded(4, True)
    assert result.lattice is not None
    before = n_best(result.lattice, graph, OPTIONS, 20)
    assert len(before) > 5 and all(one.lm_score < 0 for one in before)
    lm = TableLM(graph.vocabulary, 9)
    after, empty = rescore_n_best([before, ()], lm, OPTIONS)
    assert empty == ()
    assert {one.word_ids for one in after} == {one.word_ids for one in before}
    for one in after:
        assert one.lm_score == pytest.approx(lm.score_sentence(one.word_ids), abs=1e-4)
        rest = 0.7 * one.am_score + one.graph_score + 0.3 * len(one.words)
        assert one.total == pytest.approx(rest + 0.6 * one.lm_score, abs=1e-3)
    assert [one.total for one in after] == sorted((one.total for one in after), reverse=True)
    assert [one.word_ids for one in after] != [one.word_ids for one in before]
    lm.log_prob_of = lambda *_: -math.inf  # type: ignore[method-assign]
    assert rescore_n_best([before], lm, OPTIONS, weight=0.0) == [before]


@pytest.mark.slow
@pytest.mark.parametrize("frame_of", [None, torch.tensor([0, 2, 3, 7, 8])])
def test_many_paths_are_spelled_as_each_by_itself(frame_of: torch.Tensor | None) -> None:
    """Random walks through lattices, spelled together; some end early."""
    generator, num_words = random.Random(0), 0
    for seed in range(8):
        graph, result = decoded(seed, False)
        lattice = result.lattice
        assert lattice is not None
        final_scores = torch.randn(2, lattice.num_states)  # a path may end anywhere
        lm_score = torch.randn(lattice.num_arcs)
        lattice = replace(lattice, lm_score=lm_score, final_graph_score=final_scores[0], final_lm_score=final_scores[1])
        paths, ends = [list[int]()], [int(lattice.start_state[0])]
        for _ in range(12):
            state, path = int(lattice.start_state[0]), []
            for _ in range(generator.randrange(6)):
                begin, end = lattice.arc_begin[state : state + 2].tolist()
                if begin < end:
                    path.append(generator.randrange(begin, end))
                    state = int(lattice.dst_state[path[-1]])
            paths.append(path)
            ends.append(state)
        flat, total = torch.tensor([arc for path in paths for arc in path]), torch.randn(len(paths)).double()
        num_arcs = torch.tensor([len(path) for path in paths])
        together = hypotheses_of_lattice(lattice, graph, OPTIONS, (flat, num_arcs), total, frame_of)
        for one, path, end, own_total in zip(together, paths, ends, total.tolist(), strict=True):
            final_score, lm_score_of_end = final_scores[:, end].tolist()
            own_lm_score = float(lm_score[path].sum()) + lm_score_of_end
            scores = (own_total, final_score, own_lm_score)
            alone = hypothesis_of_path(graph, OPTIONS, lattice.graph_arc[path], *scores, frame_of)
            assert (one.word_ids, one.words, one.phones) == (alone.word_ids, alone.words, alone.phones)
            assert (one.start_frames, one.end_frames) == (alone.start_frames, alone.end_frames)
            for name in ("am_score", "graph_score", "lm_score", "total"):
                assert getattr(one, name) == pytest.approx(getattr(alone, name), abs=1e-5)
            num_words += len(one.words)
    assert num_words > 50


def test_arcs_with_several_words_are_one_sentence_however_they_are_cut() -> None:
    """A then B on two arcs, and A B on one: the same sentence, once, by its better path; A alone ends there, too."""
    arcs = [(0, 1, [4], -1.0), (0, 2, [4, 5], -0.5), (1, 3, [5], -1.0), (2, 3, [], -1.0), (2, 3, [6], -3.0)]
    found, path_begin, arc = best_sentences(searched(small_lattice([0, 1, 1, 2], arcs)), 0, 10)
    assert found.tolist() == pytest.approx([-1.5, -3.5])
    assert [arc[begin:end].tolist() for begin, end in itertools.pairwise(path_begin.tolist())] == [[1, 3], [1, 4]]


def test_arcs_of_many_words_become_chains_of_their_words() -> None:
    _, result = decoded(0, False)
    assert result.lattice is not None
    num_words = torch.arange(result.lattice.num_arcs) % 5
    begin = torch.cat([num_words.new_zeros(1), num_words.cumsum(0)])
    lattice = replace(result.lattice, word_begin=begin, word_id=torch.arange(int(begin[-1])))
    total, final_total = lattice.arc_total(OPTIONS), lattice.final_total(OPTIONS)
    chains = _one_word_an_arc(lattice, total, final_total, best_to_end(lattice, total, final_total))
    assert int(num_words.max()) == 4 and chains.arc_of[: lattice.num_arcs].tolist() == list(range(lattice.num_arcs))
    assert set(chains.arc_of[lattice.num_arcs :]) == {-1}
    for arc in range(lattice.num_arcs):
        found, at = [int(chains.word[arc])], arc
        while (state := int(chains.dst_state[at])) >= lattice.num_states:
            at = int(chains.arc_begin[state])
            found.append(int(chains.word[at]))
        assert found == (list(range(int(begin[arc]), int(begin[arc + 1]))) or [-1])
        assert state == int(lattice.dst_state[arc])


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_posteriors_sum_to_one_at_each_frame(seed: int) -> None:
    _, result = decoded(seed, False)
    lattice = result.lattice
    assert lattice is not None and result.best is not None
    posterior = PartPosteriors(lattice, OPTIONS).at(1.0).posterior
    begin = lattice.arc_frame_begin
    for first, last in itertools.pairwise(begin):
        assert float(posterior[first:last].sum()) == pytest.approx(1.0, abs=1e-6)
    confidences = with_posteriors(result.best, PathPosteriors(lattice, OPTIONS), 1.0).confidences
    assert len(confidences) == len(result.best.words) and all(0.0 < one <= 1.0 for one in confidences)


@pytest.mark.parametrize("seed", range(4))
def test_the_loop_and_tensors_give_the_same_posteriors(seed: int) -> None:
    lattice = decoded(seed, True)[1].lattice
    assert lattice is not None
    found = torch.from_numpy(PartPosteriors(lattice, OPTIONS).at(0.4).posterior)
    torch.testing.assert_close(found, arc_posteriors(lattice, OPTIONS, 0.4))


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
    plain = with_posteriors(expected.best, PathPosteriors(expected.lattice, OPTIONS), 1.0)
    moved = with_posteriors(result.best, PathPosteriors(result.lattice, OPTIONS), 1.0)
    assert moved.confidences == pytest.approx(plain.confidences)
    final = with_final_words(result, graph, options, None, 1 / 0.7)
    told = as_result(final, 0.01, StageTimes(audio_seconds=0.3), options, None, {}).words
    scaled = with_posteriors(result.best, PathPosteriors(result.lattice, options), 1 / 0.7)
    assert tuple(word.confidence for word in told) == scaled.confidences != moved.confidences
    (of_list,) = n_best(result.lattice, graph, OPTIONS, 1, result.original_frame)
    assert of_list.start_frames == moved.start_frames == tuple(frame_of[0, list(plain.start_frames)].tolist())


@pytest.mark.slow
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
