"""One pass in chunks: with open beams the exact result, with narrow ones the language model leads the search."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asr.decoding import chunks
from asr.decoding.interface import DecodeResult
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.text.symbols import SPECIAL_WORDS, TokenTable, Vocabulary
from tests.decoding.random_graphs import UNPRUNED, random_graph, random_log_prob
from tests.reference.lattice_paths import all_sentences, best_total_of
from tests.reference.table_lm import TableLM

OPEN = replace(UNPRUNED, output_beam=1e4)
NARROW = replace(OPEN, search_beam=6.0, output_beam=4.0, context_beam=4.0, min_active_states=2, max_active_states=40)
LENGTHS = torch.tensor([9, 4, 0, 7])


def decoded(
    seed: int, options: DecodingOptions, lm_fusion: str, backend: str = "auto", rows: slice = slice(None)
) -> list[DecodeResult]:
    graph = random_graph(seed)
    decoder = TokenPassingDecoder(graph, options, lm_fusion=lm_fusion, keep_lattice=True, backend=backend)
    return decoder.decode(random_log_prob(seed, 4, 9)[rows], LENGTHS[rows], TableLM(graph.vocabulary, seed))


def require_same(ours: list[DecodeResult], theirs: list[DecodeResult]) -> None:
    """The same best words, with the same scores, at the same times or at others that score as well."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.reached_final == other.reached_final
        assert (one.best is None) == (other.best is None)
        if one.best is not None and other.best is not None:
            assert one.best.word_ids == other.best.word_ids
            assert one.best.total == pytest.approx(other.best.total, abs=1e-3)
            if one.best.start_frames != other.best.start_frames:
                assert other.lattice is not None
                tied = best_total_of(other.lattice, OPEN, one.best.word_ids, one.best.start_frames)
                assert tied == pytest.approx(other.best.total, abs=1e-3)
            assert one.best.lm_score == pytest.approx(other.best.lm_score, abs=1e-3)


@pytest.mark.slow
@settings(max_examples=8)
@example(seed=1531, chunk_frames=1, lookahead_frames=0, backend="torch")  # two ways with equal scores
@given(
    seed=st.integers(0, 10**6),
    chunk_frames=st.integers(1, 6),
    lookahead_frames=st.integers(0, 3),
    backend=st.sampled_from(["torch", "auto"]),
)
def test_with_open_beams_chunks_change_nothing(
    seed: int, chunk_frames: int, lookahead_frames: int, backend: str
) -> None:
    options = replace(OPEN, chunk_frames=chunk_frames, lookahead_frames=lookahead_frames)
    ours, exact = decoded(seed, options, "chunks", backend), decoded(seed, OPEN, "search")
    require_same(ours, exact)
    for one, other in zip(ours, exact, strict=True):
        if one.lattice is not None and other.lattice is not None:
            found, expected = all_sentences(one.lattice, OPEN), all_sentences(other.lattice, OPEN)
            assert found.keys() == expected.keys()
            assert all(found[words] == pytest.approx(expected[words], abs=1e-3) for words in expected)


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), backend=st.sampled_from(["torch", "auto"]))
def test_one_chunk_is_a_lattice_rescored(seed: int, backend: str) -> None:
    for options in (replace(NARROW, chunk_frames=9), replace(NARROW, chunk_frames=6, lookahead_frames=3)):
        ours, theirs = (decoded(seed, options, fusion, backend) for fusion in ("chunks", "lattice"))
        require_same(ours, theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.lattice is None) == (other.lattice is None)
            if one.lattice is not None and other.lattice is not None:
                found, expected = all_sentences(one.lattice, options), all_sentences(other.lattice, options)
                assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6), chunk_frames=st.integers(1, 4), lookahead_frames=st.integers(0, 3))
def test_narrow_beams_find_the_same_alone_and_uncompiled(seed: int, chunk_frames: int, lookahead_frames: int) -> None:
    options = replace(NARROW, chunk_frames=chunk_frames, lookahead_frames=lookahead_frames)
    together = decoded(seed, options, "chunks")
    alone = [decoded(seed, options, "chunks", rows=slice(utt, utt + 1))[0] for utt in range(4)]
    require_same(together, alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "jit", lambda function: None)
        require_same(together, decoded(seed, options, "chunks"))


def two_ways() -> tuple[DecodingGraph, TableLM]:
    """Words 0 and 1 part at the first frame and never meet; behind word 0 is room for two paths, behind word 1 for one.

    The graph prefers word 0, and the language model word 1.
    """
    graph = DecodingGraph(
        arc_begin=torch.tensor([0, 2, 4, 5, 6, 7]),
        dst_state=torch.tensor([1, 2, 3, 4, 2, 3, 4], dtype=torch.int32),
        token_id=torch.zeros(7, dtype=torch.int32),
        score=torch.tensor([0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        word_begin=torch.tensor([0, 1, 2, 2, 2, 2, 2, 2]),
        word_id=torch.tensor([len(SPECIAL_WORDS), len(SPECIAL_WORDS) + 1], dtype=torch.int32),
        final_score=torch.tensor([-math.inf, -math.inf, 0.0, 0.0, 0.0]),
        tokens=TokenTable(["<blk>", "a"]),
        vocabulary=Vocabulary(["zero", "one"]),
        meta={},
    )
    lm = TableLM(graph.vocabulary)
    lm.log_prob_of = lambda history, word: -9.0 if word == len(SPECIAL_WORDS) else 0.0  # type: ignore[method-assign]
    return graph, lm


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(
    ("lm_fusion", "chunk_frames", "lookahead_frames", "word"),
    [("lattice", 1, 0, "zero"), ("chunks", 2, 0, "zero"), ("chunks", 1, 1, "zero"), ("chunks", 1, 0, "one")],
)
def test_what_the_language_model_likes_survives_the_next_chunk(
    backend: str, lm_fusion: str, chunk_frames: int, lookahead_frames: int, word: str
) -> None:
    """After one frame both words are alive; after two, only what the graph prefers."""
    graph, lm = two_ways()
    options = DecodingOptions(
        output_beam=8.0,
        context_beam=5.0,
        min_active_states=0,
        max_active_states=2,
        chunk_frames=chunk_frames,
        lookahead_frames=lookahead_frames,
    )
    decoder = TokenPassingDecoder(graph, options, lm_fusion=lm_fusion, backend=backend, inputs="scores")
    best = decoder.decode(torch.zeros(1, 4, 2), lm=lm)[0].best
    assert best is not None and best.words == (word,)
    assert best.total == pytest.approx(-1.0 if word == "one" else -9.0)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(("context_beam", "word"), [(5.0, "one"), (7.0, "zero")])
def test_what_the_graph_puts_outside_the_context_beam_is_gone(backend: str, context_beam: float, word: str) -> None:
    """The language model would have preferred word 0, whose path is 6 worse by the graph."""
    graph, lm = two_ways()
    graph = replace(graph, score=torch.tensor([-6.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    lm.log_prob_of = lambda history, word: -9.0 if word == len(SPECIAL_WORDS) + 1 else 0.0  # type: ignore[method-assign]
    options = DecodingOptions(output_beam=8.0, context_beam=context_beam, min_active_states=0, chunk_frames=1)
    decoder = TokenPassingDecoder(graph, options, lm_fusion="chunks", backend=backend, inputs="scores")
    best = decoder.decode(torch.zeros(1, 4, 2), lm=lm)[0].best
    assert best is not None and best.words == (word,)
    assert best.total == pytest.approx(-9.0 if word == "one" else -6.0)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_final_scores_count_only_at_the_end(backend: str) -> None:
    """Word 1 is in a state without an end after the first chunk, and has the better end after the second."""
    graph, lm = two_ways()
    graph = replace(
        graph,
        arc_begin=torch.tensor([0, 2, 3, 4, 4]),
        dst_state=torch.tensor([1, 2, 1, 3], dtype=torch.int32),
        token_id=torch.zeros(4, dtype=torch.int32),
        score=torch.tensor([0.0, 0.0, 0.0, -20.0]),
        word_begin=torch.tensor([0, 1, 2, 2, 2]),
        final_score=torch.tensor([-math.inf, -40.0, -math.inf, 0.0]),
    )
    options = DecodingOptions(output_beam=8.0, min_active_states=0, chunk_frames=1, lookahead_frames=0)
    decoder = TokenPassingDecoder(graph, options, lm_fusion="chunks", backend=backend, inputs="scores")
    result = decoder.decode(torch.zeros(1, 2, 2), lm=lm)[0]
    assert result.reached_final and result.best is not None and result.best.words == ("one",)
    assert result.best.total == pytest.approx(-20.0)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_frames", [1, 2])
def test_chunks_change_no_score_of_any_sentence(chunk_frames: int) -> None:
    """Histories in states of different scores begin each chunk."""
    options = replace(OPEN, chunk_frames=chunk_frames, lookahead_frames=1)
    ours, exact = (decoded(2, options, fusion, "torch", slice(0, 2)) for fusion in ("chunks", "search"))
    require_same(ours, exact)
    for one, other in zip(ours, exact, strict=True):
        assert one.lattice is not None and other.lattice is not None
        found, expected = all_sentences(one.lattice, OPEN), all_sentences(other.lattice, OPEN)
        assert len(expected) > 5 and found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("keep_lattice", [False, True])
def test_nothing_to_decode(keep_lattice: bool) -> None:
    graph = random_graph(3)
    decoder = TokenPassingDecoder(graph, OPEN, lm_fusion="chunks", keep_lattice=keep_lattice)
    lm = TableLM(graph.vocabulary)
    assert decoder.decode(torch.zeros(0, 5, 4), torch.zeros(0, dtype=torch.int64), lm) == []
    (empty,) = decoder.decode(torch.zeros(1, 0, 4), torch.zeros(1, dtype=torch.int64), lm)
    assert empty.num_frames == 0


def test_without_a_language_model_there_is_nothing_to_ask() -> None:
    graph, log_prob = random_graph(4), random_log_prob(4, 2, 6)
    require_same(*(TokenPassingDecoder(graph, NARROW, lm_fusion=one).decode(log_prob) for one in ("chunks", "search")))


@pytest.mark.parametrize(("chunk_frames", "lookahead_frames"), [(0, 3), (-1, 3), (4, -1), (2**31, 0)])
def test_chunks_have_frames(chunk_frames: int, lookahead_frames: int) -> None:
    with pytest.raises(AsrError, match="chunk_frames is"):
        DecodingOptions(chunk_frames=chunk_frames, lookahead_frames=lookahead_frames)


def test_chunks_need_a_graph_without_epsilons() -> None:
    with pytest.raises(AsrError, match="arcs that read no frame"):
        TokenPassingDecoder(random_graph(5, epsilons=True), OPEN, lm_fusion="chunks")
