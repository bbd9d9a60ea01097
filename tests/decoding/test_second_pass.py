"""The second pass against every sentence of the lattice, scored by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding.rescoring import _mixed, second_pass
from asr.decoding.settings import DecodingOptions, LanguageModelOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.lm.combine import SentencesLM
from asr.lm.ngram.model import NgramLM
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.lattice_paths import all_sentences
from tests.reference.table_lm import TableLM

OPTIONS = DecodingOptions(
    search_beam=math.inf, output_beam=6.0, context_beam=None, am_scale=0.7, lm_scale=0.6, word_insertion_penalty=0.3
)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["lattice", "nbest"]),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    has_first=st.booleans(),
    has_second=st.booleans(),
)
def test_the_best_sentence_by_both_models(
    seed: int, kind: str, weight: float, has_first: bool, has_second: bool
) -> None:
    graph = random_graph(seed, final_prob=1.0)
    first, second = TableLM(graph.vocabulary, seed), TableLM(graph.vocabulary, seed + 1)
    decoder = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True)
    log_prob, num_frames = random_log_prob(seed, 2, 5), torch.tensor([5, 3])
    decoded = decoder.decode(log_prob, num_frames, first if has_first else None)
    models = LanguageModelOptions(second_pass=kind, second_pass_weight=weight, second_pass_sentences=10**6)
    both = (first if has_first else None, second if has_second else None)
    found = second_pass(decoded, *both, graph, OPTIONS, models, keeps_lattice=False)
    silent = replace(OPTIONS, lm_scale=0.0)
    for one, before in zip(found, decoded, strict=True):
        assert before.lattice is not None and one.best is not None
        expected = {}
        for words, total in all_sentences(before.lattice, silent).items():
            own = first.score_sentence(words) if has_first else 0.0
            other = second.score_sentence(words) if has_second else 0.0
            expected[words] = total + OPTIONS.lm_scale * ((1 - weight) * own + weight * other)
        assert one.best.total == pytest.approx(max(expected.values()), abs=1e-3)
        assert expected[one.best.word_ids] == pytest.approx(one.best.total, abs=1e-3)
        # The parts of the score add up to it.
        parts = OPTIONS.am_scale * one.best.am_score + OPTIONS.graph_scale * one.best.graph_score
        parts += OPTIONS.lm_scale * one.best.lm_score + OPTIONS.word_insertion_penalty * len(one.best.words)
        assert one.best.total == pytest.approx(parts, abs=1e-3)
        if kind == "nbest":
            totals = [hypothesis.total for hypothesis in one.hypotheses]
            assert len(totals) == len(expected) and totals == sorted(totals, reverse=True)


def test_a_list_is_as_long_as_asked_and_an_unfinished_path_stays() -> None:
    graph = random_graph(3, final_prob=1.0)
    lm = TableLM(graph.vocabulary, 3)
    log_prob, num_frames = random_log_prob(3, 1, 5), torch.tensor([5])
    decoded = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True).decode(log_prob, num_frames, None)
    models = LanguageModelOptions(second_pass="nbest", second_pass_sentences=2)
    assert len(second_pass(decoded, None, lm, graph, OPTIONS, models, keeps_lattice=False)[0].hypotheses) == 2
    without = [replace(result, lattice=None) for result in decoded]
    assert second_pass(without, None, lm, graph, OPTIONS, models, keeps_lattice=False) == without
    over_lattice = replace(models, second_pass="lattice")
    assert second_pass(without, None, lm, graph, OPTIONS, over_lattice, keeps_lattice=True) == without
    kept = second_pass(decoded, None, lm, graph, OPTIONS, over_lattice, keeps_lattice=True)[0].lattice
    assert kept is not None and bool((kept.lm_score != 0).any())


def test_the_whole_weight_on_the_second_model_spares_the_first() -> None:
    class Unasked(TableLM):
        """Must not be asked."""

        score = final = None  # type: ignore[assignment]

    graph = random_graph(3, final_prob=1.0)
    lm = TableLM(graph.vocabulary, 3)
    log_prob, num_frames = random_log_prob(3, 1, 5), torch.tensor([5])
    decoded = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True).decode(log_prob, num_frames, None)
    models = LanguageModelOptions(second_pass="lattice", second_pass_weight=1.0)
    firsts = (Unasked(graph.vocabulary), None)
    found = [second_pass(decoded, one, lm, graph, OPTIONS, models, keeps_lattice=False) for one in firsts]
    assert found[0] == found[1]


def test_loops_look_up_a_mixture_of_models_of_several_sentences(ngram_of: Callable[..., NgramLM]) -> None:
    pytest.importorskip("numba")
    models = [SentencesLM(ngram_of(["A B", "B A A"], ["A", "B"], order)) for order in (1, 2)]
    mixed = _mixed(*models, 0.3)
    assert isinstance(mixed, SentencesLM) and mixed.lookup_tables() is not None
    start, words = mixed.start(3), torch.tensor([2, 4, 5])
    (log_prob, _), (first, _), (second, _) = (lm.score(lm.start(3), words) for lm in (mixed, *models))
    torch.testing.assert_close(log_prob, 0.7 * first + 0.3 * second)
    assert mixed.score(start, words)[1][0] == start[0]
