"""The torch pass against all paths written out, alone and in batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asr.decoding import token_passing
from asr.decoding.interface import Decoder
from asr.decoding.lattice import best_path
from asr.decoding.online import StreamingDecoder
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.text.symbols import BOS_ID, EOS_ID, TokenTable, Vocabulary
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.exhaustive_search import exhaustive_search
from tests.reference.table_lm import TableLM

WIDE: dict[str, Any] = {
    "search_beam": math.inf,
    "output_beam": math.inf,
    "context_beam": None,
    "min_active_states": 0,
    "max_active_states": 10**6,
}
SCALES = {"am_scale": 0.7, "graph_scale": 1.3, "lm_scale": 0.6, "word_insertion_penalty": -0.4}


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), epsilons=st.booleans(), with_lm=st.booleans())
def test_equals_exhaustive_search(seed: int, epsilons: bool, with_lm: bool) -> None:
    graph = random_graph(seed, epsilons=epsilons)
    log_prob = random_log_prob(seed, 2, 5)
    num_frames = torch.tensor([5, 3])
    lm = TableLM(graph.vocabulary, seed) if with_lm else None
    results = TokenPassingDecoder(graph, DecodingOptions(**WIDE, **SCALES)).decode(log_prob, num_frames, lm)
    for utt_idx, result in enumerate(results):
        expected = exhaustive_search(graph, log_prob[utt_idx, : num_frames[utt_idx]], lm, **SCALES)
        assert result.reached_final == bool(expected)
        if not expected:
            continue
        assert result.best is not None
        assert result.best.total == pytest.approx(expected[0].total, abs=1e-4)
        assert result.best.word_ids == expected[0].words
        best = result.best
        assert best.total == pytest.approx(
            0.7 * best.am_score + 1.3 * best.graph_score + 0.6 * best.lm_score - 0.4 * len(best.words), abs=1e-6
        )
        if lm is not None:
            assert best.lm_score == pytest.approx(lm.score_sentence(best.word_ids), abs=1e-4)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), with_lm=st.booleans())
def test_batched_equals_single(seed: int, with_lm: bool) -> None:
    graph = random_graph(seed, num_states=30, num_arcs=120)
    log_prob = random_log_prob(seed, 5, 12)
    num_frames = torch.tensor([12, 0, 7, 12, 1])
    lm = TableLM(graph.vocabulary, seed, num_history_words=2) if with_lm else None
    first_pass = TokenPassingDecoder(graph, DecodingOptions(search_beam=4.0, min_active_states=3, max_active_states=9))
    together = first_pass.decode(log_prob, num_frames, lm)
    for utt_idx, result in enumerate(together):
        num = int(num_frames[utt_idx])
        alone = first_pass.decode(log_prob[utt_idx : utt_idx + 1, :num], torch.tensor([num]), lm)[0]
        assert result.reached_final == alone.reached_final
        assert result.best is not None and alone.best is not None
        assert result.best.word_ids == alone.best.word_ids
        assert result.best.total == pytest.approx(alone.best.total, abs=1e-4)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), with_lm=st.booleans())
def test_lattice_holds_the_best_path_with_its_scores(seed: int, with_lm: bool) -> None:
    graph = random_graph(seed)
    log_prob = random_log_prob(seed, 2, 6)
    lm = TableLM(graph.vocabulary, seed) if with_lm else None
    options = DecodingOptions(**{**WIDE, "output_beam": 3.0}, **SCALES)
    for result in TokenPassingDecoder(graph, options, keep_lattice=True).decode(log_prob, torch.tensor([6, 4]), lm):
        if not result.reached_final:
            assert result.lattice is None
            continue
        assert result.lattice is not None and result.best is not None
        found = best_path(result.lattice, options)
        assert found is not None
        arc, last_state = found
        total = result.lattice.arc_total(options)[arc].sum() + result.lattice.final_total(options)[last_state]
        assert float(total) == pytest.approx(result.best.total, abs=1e-4)
        assert float(result.lattice.am_score[arc].sum()) == pytest.approx(result.best.am_score, abs=1e-3)


def best_with_one_history_a_state(graph: DecodingGraph, log_prob: Tensor, lm: TableLM) -> float:
    """The total of the best path if, of the paths to a state, only the best one goes on; log_prob (T, C)."""
    alive: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (BOS_ID,))}
    for scores in log_prob.tolist():
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for state, (before, history) in alive.items():
            for arc in range(int(graph.arc_begin[state]), int(graph.arc_begin[state + 1])):
                total, words = before + scores[graph.token_id[arc]] + float(graph.score[arc]), history
                for word in graph.word_id[graph.word_begin[arc] : graph.word_begin[arc + 1]].tolist():
                    total, words = total + lm.log_prob_of(words, word), (*words, word)
                dst = int(graph.dst_state[arc])
                reached[dst] = max(reached.get(dst, (-math.inf, ())), (total, words))
        alive = reached
    return max(
        total + float(graph.final_score[state]) + lm.log_prob_of(history, EOS_ID)
        for state, (total, history) in alive.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_one_context_per_state_is_the_best_one(backend: str) -> None:
    num_worse = 0
    for seed in range(8):
        graph, log_prob = random_graph(seed), random_log_prob(seed, 1, 6)
        lm, options = TableLM(graph.vocabulary, seed), DecodingOptions(**WIDE, max_contexts_per_state=1)
        bounded = TokenPassingDecoder(graph, options, backend=backend).decode(log_prob, torch.tensor([6]), lm)[0]
        exact = exhaustive_search(graph, log_prob[0], lm)
        assert bounded.best is not None
        assert bounded.best.total == pytest.approx(best_with_one_history_a_state(graph, log_prob[0], lm), abs=1e-4)
        num_worse += bounded.best.total < exact[0].total - 1e-3
    assert num_worse > 0


def test_zero_frames_end_where_the_graph_starts() -> None:
    graph = random_graph(0)
    graph.final_score[0] = -0.25
    result = TokenPassingDecoder(graph).decode(torch.zeros(1, 0, 4), torch.tensor([0]))[0]
    assert result.reached_final and result.best is not None
    assert result.best.words == () and result.best.total == pytest.approx(-0.25)
    graph.final_score[0] = -math.inf
    result = TokenPassingDecoder(graph).decode(torch.zeros(1, 0, 4), torch.tensor([0]))[0]
    assert not result.reached_final and result.best is not None and result.best.words == ()


def test_impossible_frames_leave_no_hypothesis() -> None:
    graph = random_graph(0)
    results = TokenPassingDecoder(graph).decode(torch.full((2, 3, 4), -torch.inf), torch.tensor([3, 0]))
    assert results[0].hypotheses == () and not results[0].reached_final
    assert results[1].best is not None


@pytest.mark.parametrize("lm_fusion", ["search", "lattice", "chunks"])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_no_sentence_is_complete_that_the_language_model_rules_out(backend: str, lm_fusion: str) -> None:
    """The graph prefers the first word by more than the output beam. The language model rules it out, or all ends."""
    graph = replace(
        random_graph(0, num_states=1, num_arcs=2, num_tokens=2, num_words=2),
        token_id=torch.tensor([0, 1], dtype=torch.int32),
        score=torch.tensor([0.0, -10.0]),
        word_begin=torch.arange(3),
        word_id=torch.tensor([4, 5], dtype=torch.int32),
    )
    options = DecodingOptions(output_beam=1.0)
    decoder = TokenPassingDecoder(graph, options, lm_fusion=lm_fusion, backend=backend, inputs="scores")
    for impossible, is_complete, total in ((4, True, -12.5), (EOS_ID, False, -1.0)):
        lm = TableLM(graph.vocabulary)
        lm.log_prob_of = lambda _, word, own=impossible: -math.inf if word == own else -1.0  # type: ignore[method-assign]
        result = decoder.decode(torch.zeros(1, 1, 2), lm=lm)[0]
        assert result.best is not None and result.reached_final == is_complete
        assert result.best.words == (("w1",) if is_complete else ("w0",))
        assert result.best.total == pytest.approx(total) and result.best.am_score == pytest.approx(0.0)
    stream_decoder = StreamingDecoder(graph, options, lm, inputs="scores")
    (stream,) = stream_decoder.start()
    stream_decoder.advance([stream], torch.zeros(1, 1, 2), torch.tensor([1]))
    assert stream_decoder.finalize(stream) == result


@pytest.mark.parametrize("lm_fusion", ["search", "lattice", "chunks"])
def test_a_language_model_without_weight_rules_nothing_out(lm_fusion: str) -> None:
    graph, log_prob, num_frames = random_graph(3), random_log_prob(3, 2, 6), torch.tensor([6, 4])
    lm = TableLM(graph.vocabulary)
    lm.log_prob_of = lambda *_: -math.inf  # type: ignore[method-assign]
    decoder = TokenPassingDecoder(graph, DecodingOptions(lm_scale=0.0), lm_fusion=lm_fusion)
    for weighted, plain in zip(*(decoder.decode(log_prob, num_frames, model) for model in (lm, None)), strict=True):
        assert weighted.best is not None and plain.best is not None and weighted.reached_final
        assert weighted.best.word_ids == plain.best.word_ids
        assert weighted.best.total == pytest.approx(plain.best.total, abs=1e-4)
    stream_decoder = StreamingDecoder(graph, DecodingOptions(lm_scale=0.0), lm)
    (stream,) = stream_decoder.start()
    stream_decoder.advance([stream], log_prob[1:, :4], torch.tensor([4]))
    best = stream_decoder.finalize(stream).best
    assert best is not None and best.total == pytest.approx(plain.best.total, abs=1e-4)


def test_bad_log_probabilities_are_refused() -> None:
    first_pass = TokenPassingDecoder(random_graph(0))
    with pytest.raises(AsrError, match="5 columns but the graph was built for 4"):
        first_pass.decode(torch.zeros(1, 2, 5), torch.tensor([2]))
    log_prob = torch.zeros(2, 3, 4)
    log_prob[1, 2, 0] = torch.nan
    with pytest.raises(AsrError, match="utterance 1, frame 2"):
        first_pass.decode(log_prob, torch.tensor([3, 3]))
    first_pass.decode(log_prob, torch.tensor([3, 2]))
    with pytest.raises(AsrError, match="frame counts"):
        first_pass.decode(log_prob, torch.tensor([3, 4]))
    with pytest.raises(AsrError, match="without input epsilons"):
        TokenPassingDecoder(random_graph(0, epsilons=True), keep_lattice=True)


@pytest.mark.parametrize("with_lm", [False, True])
def test_no_utterances_have_no_results(with_lm: bool) -> None:
    for epsilons in (False, True):
        graph = random_graph(0, epsilons=epsilons)
        lm = TableLM(graph.vocabulary, 0) if with_lm else None
        passes: list[Decoder] = [TokenPassingDecoder(graph)]
        if not epsilons:
            passes += [
                TokenPassingDecoder(graph, keep_lattice=True),
                TokenPassingDecoder(graph, keep_lattice=True, lm_fusion="lattice"),
            ]
        for first_pass in passes:
            assert first_pass.decode(torch.zeros(0, 5, 4), torch.zeros(0, dtype=torch.int64), lm) == []


def test_so_many_partial_paths_survive_beside_epsilons() -> None:
    # Two paths behind the first frame; the better one leads nowhere, and an epsilon leaves where it stands.
    graph = DecodingGraph(
        arc_begin=torch.tensor([0, 2, 3, 4, 4]),
        dst_state=torch.tensor([1, 2, 3, 3]).int(),
        token_id=torch.tensor([1, 1, -1, 2]).int(),
        score=torch.tensor([0.0, -5.0, 0.0, 0.0]),
        word_begin=torch.zeros(5, dtype=torch.int64),
        word_id=torch.zeros(0, dtype=torch.int32),
        final_score=torch.tensor([-math.inf, -math.inf, -math.inf, 0.0]),
        tokens=TokenTable(["<blk>", "a", "b"]),
        vocabulary=Vocabulary(["w"]),
    )
    graph.validate()
    log_prob, num_frames = torch.zeros(1, 2, 3), torch.tensor([2])
    for min_active_states, total in ((3, -5.0), (1, None)):
        options = DecodingOptions(search_beam=1.0, min_active_states=min_active_states)
        best = TokenPassingDecoder(graph, options).decode(log_prob, num_frames)[0].best
        assert (best.total if best is not None else None) == total


@pytest.mark.parametrize(("score", "penalty", "gains"), [(0.5, 0.0, True), (0.25, 0.0, False), (0.0, 0.5, True)])
def test_no_cycle_of_epsilons_gains_score(score: float, penalty: float, gains: bool) -> None:
    """An arc that reads nothing has a word. The arc back loses 0.25, and another one leads there."""
    graph = DecodingGraph(
        arc_begin=torch.tensor([0, 1, 3, 4]),
        dst_state=torch.tensor([1, 2, 1, 1]).int(),
        token_id=torch.tensor([-1, -1, 1, -1]).int(),
        score=torch.tensor([1.0, score, 0.0, -0.25]),
        word_begin=torch.tensor([0, 0, 1, 1, 1]),
        word_id=torch.tensor([4]).int(),
        final_score=torch.tensor([-math.inf, 0.0, -math.inf]),
        tokens=TokenTable(["<blk>", "a"]),
        vocabulary=Vocabulary(["w"]),
    )
    options = DecodingOptions(word_insertion_penalty=penalty)
    if gains:
        for decoder in (TokenPassingDecoder, StreamingDecoder):
            with pytest.raises(AsrError, match="read no frame and gain score"):
                decoder(graph, options)
    else:
        best = TokenPassingDecoder(graph, options, inputs="scores").decode(torch.zeros(1, 2, 2))[0].best
        assert best is not None and best.total == 1.0


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_what_epsilons_earn_before_the_first_frame_counts(backend: str) -> None:
    """An arc that reads nothing gains 2 and has a word; one that reads a frame loses 0.5 and has another."""
    graph = DecodingGraph(
        arc_begin=torch.tensor([0, 1, 2, 2]),
        dst_state=torch.tensor([1, 2]).int(),
        token_id=torch.tensor([-1, 1]).int(),
        score=torch.tensor([2.0, -0.5]),
        word_begin=torch.arange(3),
        word_id=torch.tensor([4, 5]).int(),
        final_score=torch.tensor([-math.inf, -math.inf, 0.0]),
        tokens=TokenTable(["<blk>", "a"]),
        vocabulary=Vocabulary(["v", "w"]),
    )
    decoder, lm = TokenPassingDecoder(graph, backend=backend, inputs="scores"), TableLM(graph.vocabulary)
    for model, lm_score in ((None, 0.0), (lm, lm.score_sentence((4, 5)))):
        best = decoder.decode(torch.zeros(1, 1, 2), torch.tensor([1]), model)[0].best
        assert best is not None and best.words == ("v", "w")
        assert best.lm_score == pytest.approx(lm_score)
        assert best.total == pytest.approx(1.5 + DecodingOptions().lm_scale * lm_score)


def test_a_backend_is_reused_only_after_the_results_have_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    first_pass, num_idle = TokenPassingDecoder(random_graph(0)), []
    endings_of = token_passing.endings_of

    def waiting(*arguments: Any) -> Any:
        num_idle.append(len(first_pass._idle_of(None, False)))
        return endings_of(*arguments)

    monkeypatch.setattr(token_passing, "endings_of", waiting)
    for _ in range(2):
        first_pass.decode(random_log_prob(0, 1, 3), torch.tensor([3]))
    assert num_idle == [0, 0] and len(first_pass._idle_of(None, False)) == 1
