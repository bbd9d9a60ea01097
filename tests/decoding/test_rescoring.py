"""On-the-fly rescoring against every path of a tiny lattice, scored by the plain language model."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding.backtrace import hypothesis_of_path
from asr.decoding.lattice import Lattice, best_path, join, prune
from asr.decoding.rescoring import LatticeGraph, rescore_lattice
from asr.decoding.selection import select_backend
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.lm.combine import Difference, RemappedLM
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.text.symbols import Vocabulary
from tests.decoding.random_graphs import UNPRUNED, random_graph, random_log_prob
from tests.decoding.small_lattices import small_lattice
from tests.reference.lattice_paths import all_sentences
from tests.reference.ngram_oracle import toy_sentences
from tests.reference.table_lm import TableLM

OPTIONS = replace(UNPRUNED, output_beam=6.0)


def lattices_of(seed: int) -> tuple[list[Lattice], TableLM, TokenPassingDecoder]:
    graph = random_graph(seed)
    first_pass = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True)
    results = first_pass.decode(random_log_prob(seed, 3, 5), torch.tensor([5, 3, 4]))
    lattices = [result.lattice for result in results if result.lattice is not None]
    if not lattices:  # some random graphs have no path of so few frames
        return lattices_of(seed + 1)
    return lattices, TableLM(graph.vocabulary, seed), first_pass


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_equals_scoring_every_path(seed: int) -> None:
    lattices, lm, first_pass = lattices_of(seed)
    for lattice, path in zip(lattices, rescore_lattice(join(lattices), OPTIONS, lm), strict=True):
        totals = all_sentences(lattice, OPTIONS, lm)
        assert path is not None and path.lattice is None
        best_words = max(totals, key=lambda words: totals[words])
        assert path.total == pytest.approx(totals[best_words], abs=1e-4)
        hypothesis = hypothesis_of_path(
            first_pass.graph, OPTIONS, path.graph_arc, path.total, path.final_graph_score, path.lm_score
        )
        assert hypothesis.word_ids == best_words
        assert hypothesis.lm_score == pytest.approx(lm.score_sentence(best_words), abs=1e-4)


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_rescored_lattice_has_every_sentence_within_the_beam(seed: int) -> None:
    lattices, lm, _ = lattices_of(seed)
    for lattice, path in zip(lattices, rescore_lattice(join(lattices), OPTIONS, lm, keep_lattice=True), strict=True):
        assert path is not None and path.lattice is not None
        expected = all_sentences(lattice, OPTIONS, lm)
        found = all_sentences(path.lattice, OPTIONS)
        limit = max(expected.values()) - OPTIONS.output_beam
        for words, total in expected.items():
            if total > limit + 1e-3:
                assert found[words] == pytest.approx(total, abs=1e-4)


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_a_wide_context_beam_changes_nothing_and_one_context_is_no_better(seed: int) -> None:
    lattices, lm, _ = lattices_of(seed)
    exact = rescore_lattice(join(lattices), OPTIONS, lm)
    wide = rescore_lattice(join(lattices), replace(OPTIONS, context_beam=100.0), lm)
    bounded = rescore_lattice(join(lattices), replace(OPTIONS, max_contexts_per_state=1), lm)
    for best, same, worse in zip(exact, wide, bounded, strict=True):
        assert best is not None and same is not None and worse is not None
        assert same.total == pytest.approx(best.total, abs=1e-4)
        assert worse.total <= best.total + 1e-4


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_together_equals_alone(seed: int) -> None:
    lattices, lm, _ = lattices_of(seed)
    together = rescore_lattice(join(lattices), OPTIONS, lm)
    for lattice, path in zip(lattices, together, strict=True):
        alone = rescore_lattice(lattice, OPTIONS, lm)[0]
        assert alone is not None and path is not None
        assert torch.equal(alone.graph_arc, path.graph_arc)
        assert alone.total == pytest.approx(path.total, abs=1e-4)


def test_one_call_a_frame() -> None:
    graph = random_graph(5, max_words=1)
    results = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True).decode(
        random_log_prob(5, 4, 6), torch.tensor([6, 6, 6, 6])
    )
    lm = TableLM(graph.vocabulary)
    rescore_lattice(join([result.lattice for result in results if result.lattice is not None]), OPTIONS, lm)
    assert lm.num_calls <= 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "indexed", "words missing"])
@pytest.mark.parametrize(("context_beam", "max_active"), [(None, 10**6), (4.0, 10**6), (0.5, 3), (None, 4)])
def test_the_loop_over_a_lattice_finds_what_the_token_search_finds(
    kind: str, context_beam: float | None, max_active: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    path = tmp_path / "text"
    path.write_text("\n".join(toy_sentences(0, 200, 3 if kind == "words missing" else 9)))
    stream = read_word_stream([path])
    small, large = (NgramLM.from_trie(estimate_kneser_ney(stream, order).trie) for order in (2, 4))
    large = large.with_index() if kind == "indexed" else large
    options = replace(OPTIONS, context_beam=context_beam, max_active_states=max_active, min_active_states=0)
    for seed in range(6):
        graph = random_graph(seed, num_states=40, num_arcs=200)
        first_pass = TokenPassingDecoder(graph, replace(OPTIONS, output_beam=12.0), keep_lattice=True)
        joint = first_pass.search(
            random_log_prob(seed, 5, 11), torch.tensor([5, 0, 11, 11, 1]), keep_lattice=True
        ).lattice
        assert joint is not None
        lm = Difference(RemappedLM(large, graph.vocabulary), RemappedLM(small, graph.vocabulary))
        by_loop = rescore_lattice(joint, options, lm)
        by_tensors = rescore_lattice(joint, options, lm, make_backend=functools.partial(select_backend, name="torch"))
        for found, expected in zip(by_loop, by_tensors, strict=True):
            if expected is None:
                assert found is None
                continue
            assert found is not None
            assert torch.equal(found.graph_arc, expected.graph_arc)
            assert (found.total, found.lm_score) == (expected.total, expected.lm_score)
            assert found.final_graph_score == expected.final_graph_score


def test_scores_stay_numbers_where_no_end_is_reachable() -> None:
    """State 0 leads to the end 3, and over state 1 to state 2, where no path may end."""
    lattice = Lattice(
        frame=torch.tensor([0, 1, 2, 2]),
        utt_idx=torch.zeros(4, dtype=torch.int64),
        start_state=torch.tensor([0]),
        arc_begin=torch.tensor([0, 2, 3, 3, 3]),
        dst_state=torch.tensor([1, 3, 2]),
        graph_arc=torch.arange(3),
        token_id=torch.ones(3, dtype=torch.int32),
        am_score=torch.tensor([-1.0, -4.0, -2.0]),
        graph_score=torch.zeros(3),
        lm_score=torch.zeros(3),
        word_begin=torch.zeros(4, dtype=torch.int64),
        word_id=torch.zeros(0, dtype=torch.int64),
        final_graph_score=torch.tensor([-math.inf, -math.inf, -math.inf, -0.5]),
        final_lm_score=torch.zeros(4),
    )
    graph = LatticeGraph(lattice, DecodingOptions())
    assert graph.start_score.tolist() == [-4.5]
    assert graph.emitting.score.tolist() == [-math.inf, 0.0, -math.inf]
    assert graph.final_score.tolist() == [-math.inf, -math.inf, -math.inf, 0.0]


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_join_and_split_are_inverse(seed: int) -> None:
    lattices, _, _ = lattices_of(seed)
    if not lattices:
        return
    for before, after in zip(lattices, join(lattices).split(), strict=True):
        for name, value in vars(before).items():
            assert torch.equal(value, getattr(after, name)), name


def test_prune_keeps_the_best_path() -> None:
    lattices, _, _ = lattices_of(1)
    for lattice in lattices:
        found = best_path(prune(lattice, OPTIONS, 1e-3), OPTIONS)
        expected = best_path(lattice, OPTIONS)
        assert found is not None and expected is not None
        assert len(found[0]) == len(expected[0])


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_rescoring_pass_equals_the_language_model_inside_the_search(seed: int) -> None:
    graph = random_graph(seed)
    log_prob, num_frames = random_log_prob(seed, 3, 5), torch.tensor([5, 0, 4])
    lm = TableLM(graph.vocabulary, seed)
    options = replace(OPTIONS, output_beam=math.inf)
    results = TokenPassingDecoder(graph, options, lm_fusion="lattice").decode(log_prob, num_frames, lm)
    for result, other in zip(
        results, TokenPassingDecoder(graph, options).decode(log_prob, num_frames, lm), strict=True
    ):
        assert result.reached_final == other.reached_final and result.lattice is None
        if result.reached_final:
            assert result.best is not None and other.best is not None
            assert result.best.word_ids == other.best.word_ids
            assert result.best.total == pytest.approx(other.best.total, abs=1e-4)
            assert result.best.am_score == pytest.approx(other.best.am_score, abs=1e-3)


@pytest.mark.slow
def test_rescoring_pass_tells_unfinished_paths_as_the_search_does() -> None:
    graph = random_graph(11, num_states=30, num_arcs=150)
    graph.final_score[:] = -math.inf
    log_prob, num_frames = random_log_prob(11, 2, 9), torch.tensor([9, 5])
    lm = TableLM(graph.vocabulary)
    options = replace(OPTIONS, word_insertion_penalty=4.0)
    results = TokenPassingDecoder(graph, options, lm_fusion="lattice").decode(log_prob, num_frames, lm)
    assert results == TokenPassingDecoder(graph, options).decode(log_prob, num_frames, lm)
    assert not any(result.reached_final for result in results)
    assert any(result.best is not None and result.best.lm_score < 0 for result in results)


def test_rescoring_pass_without_a_language_model_is_the_torch_pass() -> None:
    graph = random_graph(1)
    log_prob, num_frames = random_log_prob(1, 2, 4), torch.tensor([4, 2])
    expected = TokenPassingDecoder(graph, OPTIONS).decode(log_prob, num_frames)
    assert TokenPassingDecoder(graph, OPTIONS, lm_fusion="lattice").decode(log_prob, num_frames) == expected
    kept = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True, lm_fusion="lattice").decode(log_prob, num_frames)
    assert [replace(result, lattice=None) for result in kept] == expected
    assert all(result.lattice is not None for result in kept)


def test_skip_beam_asks_the_language_model_less() -> None:
    graph = random_graph(11, num_states=30, num_arcs=150)
    log_prob, num_frames = random_log_prob(11, 1, 12), torch.tensor([12])
    exact, skipping, none = (CountingLM(graph.vocabulary) for _ in range(3))
    TokenPassingDecoder(graph, replace(OPTIONS, search_beam=12.0)).decode(log_prob, num_frames, exact)
    TokenPassingDecoder(graph, replace(OPTIONS, search_beam=12.0, skip_beam=4.0)).decode(log_prob, num_frames, skipping)
    TokenPassingDecoder(graph, replace(OPTIONS, search_beam=12.0, skip_beam=12.0)).decode(log_prob, num_frames, none)
    assert 0 < skipping.num_queries < exact.num_queries == none.num_queries


@pytest.mark.slow
def test_without_options_few_histories_are_asked_about() -> None:
    graph = random_graph(7, num_states=20, num_arcs=100)
    log_prob, num_frames = random_log_prob(7, 1, 12), torch.tensor([12])
    counts = []
    for options in (DecodingOptions(), DecodingOptions(context_beam=None)):
        lm = CountingLM(graph.vocabulary, 7)
        decoder = TokenPassingDecoder(graph, options, lm_fusion="lattice", backend="torch")
        assert decoder.decode(log_prob, num_frames, lm)[0].reached_final
        counts.append(lm.num_queries)
    assert 0 < 3 * counts[0] < counts[1]


class CountingLM(TableLM):
    """Counts the words that it is asked about."""

    num_queries = 0

    def score(self, context_idx: torch.Tensor, word_id: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_queries += len(word_id)
        return super().score(context_idx, word_id)


def test_a_model_may_end_where_an_earlier_one_ruled_it_out() -> None:
    lattice = small_lattice([0, 1, 2], [(0, 1, [4], -1.0), (1, 2, [5], -1.0)], [-math.inf, 0.0, 0.0])
    lm = TableLM(Vocabulary(["a", "b"]), 1)
    (expected,) = rescore_lattice(lattice, OPTIONS, lm)
    ruled_out = replace(lattice, final_lm_score=torch.tensor([0.0, -math.inf, -2.0]))
    (path,) = rescore_lattice(ruled_out, OPTIONS, lm)
    assert path is not None and expected is not None
    assert path.total == expected.total and torch.equal(path.graph_arc, expected.graph_arc)
