"""Lattices by numba's loops, which drop early what the output beam drops, are those of the tensor form, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding import lattice
from asr.decoding.backend import Searchable, SearchGraph
from asr.decoding.backtrace import Backtrace, best_arcs, endings_of
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.cpu.chunk import NumbaChunkSearch
from asr.decoding.cpu.chunk_lm import NumbaChunkSearchWithLM
from asr.decoding.cpu.frame import NumbaFrameBackend
from asr.decoding.cpu.lattice import LatticeBackpointers, LosingArcs, add_losses, kept_within, order_by_source
from asr.decoding.cpu.lattice_search import NumbaLatticeSearch
from asr.decoding.frame import FrameSearch, TokenSearch, TorchFrameBackend
from asr.decoding.lattice import Lattice
from asr.decoding.lattice_records import LatticeRecords
from asr.decoding.rescoring import rescore_lattice
from asr.decoding.selection import BackendFactory, select_backend
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import Difference, RemappedLM
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.ngram_oracle import toy_sentences
from tests.reference.table_lm import TableLM

NUM_FRAMES = torch.tensor([11, 0, 5, 11, 1])
ChunkFactory = Callable[[Searchable, DecodingOptions, LanguageModel], ChunkBackend]


def assert_equal(one: Lattice, other: Lattice) -> None:
    for field in fields(one):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    beam=st.sampled_from([0.3, 3.0, 6.0, float("inf")]),
    output_beam=st.sampled_from([0.5, 4.0, float("inf")]),
    limits=st.sampled_from([(0, 5), (4, 6), (30, 40), (0, 10**6)]),
    kind=st.sampled_from(["no language model", "chunks", "frames"]),
    frames_per_call=st.sampled_from([1, 3, 32]),
)
def test_loops_give_the_tensor_forms_lattice(
    seed: int, beam: float, output_beam: float, limits: tuple[int, int], kind: str, frames_per_call: int
) -> None:
    pytest.importorskip("numba")
    graph = random_graph(seed, num_states=40, num_arcs=200, final_prob=0.2)
    log_prob = random_log_prob(seed, 5, 11)
    log_prob[0, 2, 1] = -torch.inf
    log_prob[3, 6] = -torch.inf
    options = DecodingOptions(
        search_beam=beam,
        output_beam=output_beam,
        min_active_states=limits[0],
        max_active_states=limits[1],
        am_scale=0.7,
        graph_scale=1.1,
        lm_scale=0.9,
        word_insertion_penalty=-0.3,
    )
    # Two words of history: with all of them an open beam keeps every word sequence, a minute an example.
    lm = None if kind == "no language model" else TableLM(graph.vocabulary, seed, num_history_words=2)

    def numba_backend(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, _: bool) -> ChunkBackend:
        if lm is None:
            return NumbaChunkSearch(graph, options, frames_per_call)
        if kind == "chunks":
            return NumbaChunkSearchWithLM(graph, options, lm)
        return FrameSearch(graph, options, lm, NumbaFrameBackend(graph, options, True))

    found = TokenPassingDecoder(graph, options, backend=numba_backend).search(
        log_prob, NUM_FRAMES, lm, keep_lattice=True
    )
    with pytest.MonkeyPatch.context() as patch:
        # The whole lattice by tensor operations, too.
        patch.setattr(lattice, "jit", lambda function: None)
        expected = TokenPassingDecoder(graph, options, backend="torch").search(
            log_prob, NUM_FRAMES, lm, keep_lattice=True
        )
    assert [found.result(utt) for utt in range(5)] == [expected.result(utt) for utt in range(5)]
    assert found.lattice is not None and expected.lattice is not None
    if kind != "chunks":
        assert_equal(found.lattice, expected.lattice)
    # In chunks with a language model, utterances come to a frame in any order.
    for one, other in zip(found.lattice.split(), expected.lattice.split(), strict=True):
        assert_equal(one, other)


@pytest.fixture(scope="module")
def ngrams(tmp_path_factory: pytest.TempPathFactory) -> list[NgramLM]:
    """Of two and of three words."""
    path = tmp_path_factory.mktemp("ngrams") / "text"
    path.write_text("\n".join(toy_sentences(0, 200, 9)))
    stream = read_word_stream([path])
    return [NgramLM.from_trie(estimate_kneser_ney(stream, order).trie) for order in (2, 3)]


def _rescoring_backend(chunk: ChunkFactory) -> BackendFactory:
    def made(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, keep_lattice: bool) -> ChunkBackend:
        assert lm is not None and keep_lattice
        return chunk(graph, options, lm)

    return made


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    context_beam=st.sampled_from([None, 0.5, 3.0]),
    output_beam=st.sampled_from([0.5, 4.0, float("inf")]),
    max_active=st.sampled_from([5, 10**6]),
    skip_beam=st.sampled_from([None, 0.2]),
)
def test_a_lattice_rescored_in_chunks(
    seed: int,
    context_beam: float | None,
    output_beam: float,
    max_active: int,
    skip_beam: float | None,
    ngrams: list[NgramLM],
) -> None:
    pytest.importorskip("numba")
    graph = random_graph(seed, num_states=30, num_arcs=120, final_prob=0.2)
    options = DecodingOptions(
        output_beam=output_beam,
        context_beam=context_beam,
        min_active_states=5,
        max_active_states=max_active,
        skip_beam=skip_beam,
        am_scale=0.7,
        lm_scale=0.9,
    )
    first_pass = TokenPassingDecoder(graph, DecodingOptions(output_beam=6.0))
    joint = first_pass.search(random_log_prob(seed, 5, 11), NUM_FRAMES, keep_lattice=True).lattice
    assert joint is not None
    small, large = (RemappedLM(lm, graph.vocabulary) for lm in ngrams)
    lm = Difference(large, small)
    expected = rescore_lattice(joint, options, lm, True, make_backend=functools.partial(select_backend, name="torch"))
    kinds: dict[str, ChunkFactory] = {
        "calls": NumbaChunkSearchWithLM,
        "lookup": lambda graph, options, lm: NumbaChunkSearchWithLM(graph, options, lm, True, 100),
        "always answers": NumbaLatticeSearch,
    }
    for name, chunk in kinds.items():
        found = rescore_lattice(joint, options, lm, True, make_backend=_rescoring_backend(chunk))
        for path, other in zip(found, expected, strict=True):
            assert (path is None) == (other is None), name
            if path is None or other is None:
                continue
            assert torch.equal(path.graph_arc, other.graph_arc) and path.total == other.total, name
            assert path.lattice is not None and other.lattice is not None
            assert_equal(path.lattice, other.lattice)


@pytest.mark.slow
def test_a_lattice_rescored_by_a_recurrent_network() -> None:
    pytest.importorskip("numba")
    graph = random_graph(3, num_states=40, num_arcs=200, final_prob=0.2)
    options = DecodingOptions(output_beam=4.0)
    torch.manual_seed(0)
    network = RNNLanguageModel(graph.vocabulary, RNNLMConfig(6, 8, maxent_order=3, maxent_size=1000))
    log_prob = random_log_prob(3, 5, 11)
    joint = TokenPassingDecoder(graph, options).search(log_prob, NUM_FRAMES, keep_lattice=True).lattice
    assert joint is not None
    reference = functools.partial(select_backend, name="torch")
    expected = rescore_lattice(joint, options, CachedRNNLM(network), True, make_backend=reference)
    engine, makers = CachedRNNLM(network), []

    def chosen(*arguments: Any) -> ChunkBackend:
        makers.append(select_backend(*arguments, name="numba"))
        return makers[-1]

    found = rescore_lattice(joint, options, engine, True, make_backend=chosen)
    assert isinstance(makers[0], NumbaChunkSearchWithLM)
    for path, other in zip(found, expected, strict=True):
        assert path is not None and other is not None and torch.equal(path.graph_arc, other.graph_arc)
        assert path.lattice is not None and other.lattice is not None
        for field in fields(Lattice):
            one, two = getattr(path.lattice, field.name), getattr(other.lattice, field.name)
            assert torch.allclose(one, two, atol=1e-5) if one.is_floating_point() else torch.equal(one, two)


def test_a_lattice_costs_the_search_no_path() -> None:
    graph = random_graph(3, num_states=40, num_arcs=200)
    log_prob = random_log_prob(3, 5, 11)
    options = DecodingOptions(search_beam=4.0, output_beam=3.0, min_active_states=3, max_active_states=12)
    with_lattice = TokenPassingDecoder(graph, options, keep_lattice=True).decode(log_prob, NUM_FRAMES)
    plain = TokenPassingDecoder(graph, options).decode(log_prob, NUM_FRAMES)
    assert [replace(result, lattice=None) for result in with_lattice] == plain


def test_no_frames_at_all() -> None:
    graph = random_graph(3)
    graph.final_score[0] = -0.5
    lattice = (
        TokenPassingDecoder(graph, keep_lattice=True)
        .search(torch.zeros(2, 0, 4), torch.tensor([0, 0]), keep_lattice=True)
        .lattice
    )
    assert lattice is not None
    assert lattice.num_states == 2 and lattice.num_arcs == 0 and lattice.final_graph_score.tolist() == [-0.5, -0.5]


def test_losses_by_hand() -> None:
    # 0 -> 2 -> 3, 1 lost 2 to 0 by 0.5, and 2 lost 4 by 2 to the start's own arc; 3 and 4 may end, 4 a little worse.
    frame = torch.tensor([1, 1, 2, 3, 3])
    previous = torch.tensor([-1, -1, 0, 2, -1])
    src, dst, score_gap = torch.tensor([1, 2]), torch.tensor([2, 4]), torch.tensor([0.5, 2.0])
    loss = torch.tensor([torch.inf, torch.inf, torch.inf, 0.0, 0.25])
    arrays = LatticeBackpointers(previous.numpy(), torch.zeros_like(previous).numpy(), frame.numpy())
    add_losses(arrays, LosingArcs(src.numpy(), dst.numpy(), score_gap.numpy()), loss.numpy())
    assert loss.tolist() == [0.0, 0.5, 0.0, 0.0, 0.25]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_scores_by_loops_equal_those_by_tensors(seed: int) -> None:
    graph = random_graph(seed, num_states=40, num_arcs=200)
    options = DecodingOptions(output_beam=float("inf"))
    first_pass = TokenPassingDecoder(graph, options, keep_lattice=True)
    joint = first_pass.search(random_log_prob(seed, 5, 11), NUM_FRAMES, keep_lattice=True).lattice
    assert joint is not None
    arc_total, final_total = joint.arc_total(options), joint.final_total(options)
    forward = lattice.best_from_start(joint, arc_total)
    backward = lattice.best_to_end(joint, arc_total, final_total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lattice, "jit", lambda function: None)
        assert torch.equal(forward, lattice.best_from_start(joint, arc_total))
        assert torch.equal(backward, lattice.best_to_end(joint, arc_total, final_total))


def test_what_stays_by_hand() -> None:
    # The utterance's start -> 0 -> 2, and 1 lost 2 to 0 by 0.5; 3 is of another utterance and loses too much.
    frame, utt_idx = torch.tensor([1, 1, 2, 1]), torch.tensor([0, 0, 0, 1])
    previous, src, dst = torch.tensor([-1, -1, 0, -1]), torch.tensor([1, -1]), torch.tensor([2, 3])
    loss, score_gap = torch.tensor([0.0, 0.5, 0.0, 9.0]), torch.tensor([0.5, 0.0])
    arrays = LatticeBackpointers(previous.numpy(), utt_idx.numpy(), frame.numpy())
    losing_arcs = LosingArcs(src.numpy(), dst.numpy(), score_gap.numpy())
    backpointer, losing_arc, state, number, src_state, dst_state = (
        part.tolist() for part in kept_within(1.0, arrays, losing_arcs, loss.numpy(), 2)
    )
    assert backpointer == [0, 1, 2] and losing_arc == [0]
    assert state == [0, 1, 2] and number == [2, 3, 4, -1, -1]
    assert list(zip(src_state, dst_state, strict=True)) == [(0, 2), (0, 3), (2, 4), (3, 4)]


@given(seed=st.integers(0, 10**6))
def test_arcs_are_put_in_the_order_of_their_sources(seed: int) -> None:
    src_state = torch.randint(0, 7, (seed % 30,), generator=torch.Generator().manual_seed(seed))
    order, arc_begin = order_by_source(src_state.numpy(), 7)
    assert order.tolist() == torch.sort(src_state, stable=True).indices.tolist()
    assert arc_begin.tolist() == [0, *torch.bincount(src_state, minlength=7).cumsum(0).tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("with_lm", [False, True])
def test_collecting_while_it_searches_costs_a_lattice_nothing(with_lm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: in tensor form, and after every few frames."""
    monkeypatch.setattr(lattice, "jit", lambda function: None)
    most: list[int] = []

    def is_due(self: Backtrace) -> bool:
        most[-1] = max(most[-1], self.num_records)
        return self._collects and self.num_records > 150

    monkeypatch.setattr(Backtrace, "is_due", property(is_due))
    graph = random_graph(11, num_states=40, num_arcs=200, final_prob=0.2)
    log_prob, num_frames = random_log_prob(11, 4, 40), torch.tensor([40, 0, 17, 40])
    # Lowest first: the streams do not end in their order. One has no path from the middle on.
    log_prob[3, 21] = -torch.inf
    options = DecodingOptions(search_beam=7.0, output_beam=2.0, min_active_states=5, max_active_states=30)
    searched, found = SearchGraph(graph, options), []
    for collects in (False, True):
        most.append(0)
        lm = TableLM(graph.vocabulary, 1, num_history_words=1) if with_lm else None
        backend = FrameSearch(searched, options, lm, TorchFrameBackend(searched, options, with_lm))
        backtrace, records = Backtrace(torch.device("cpu"), collects), LatticeRecords(4, options)
        search = TokenSearch(searched, options, lm, backend, backtrace, records)
        search.advance(search.start(torch.zeros(4, dtype=torch.int64)), log_prob, num_frames)
        endings = endings_of(searched, options, lm, *search.all_active())
        pruned = lattice.pruned_lattice(records.collected(backtrace, endings), graph, log_prob, options)
        found.append((pruned, [arcs.tolist() for arcs in best_arcs(endings, backtrace)]))
    (expected, expected_paths), (ours, paths) = found
    assert_equal(ours, expected)
    assert paths == expected_paths and expected.num_arcs > 100
    assert most[1] < most[0] / 2


def test_what_is_collected_by_hand() -> None:
    # 1 -> 3 -> 5, 2 lost 3 to 1 by 0.5; 0 and 4 -> 6 are dead; 5 lives, to which 4 lost by 3.
    options = DecodingOptions(output_beam=1.0)
    backtrace, records = Backtrace(torch.device("cpu")), LatticeRecords(1, options)
    for previous, losing in (([-1, -1, -1], []), ([1, 2], [(2, 3, 0.5)]), ([3, 4], [(4, 5, 3.0)])):
        own = torch.tensor(previous)
        backtrace.add(own, 10 + own)
        src, dst, gap = (torch.tensor(column) for column in zip(*losing, strict=True)) if losing else 3 * [own[:0]]
        records.add_frame(torch.zeros_like(own), (src, dst, 20 + src, gap.float()))
    assert records.collect(backtrace, torch.tensor([5, -1])).tolist() == [3, -1]
    assert [part.tolist() for part in backtrace.records()] == [[-1, -1, 0, 2], [9, 9, 11, 13]]
    assert backtrace.block_begin == [0, 2, 3]
    ((utt_idx, frame),), ((src, dst, arc, gap),) = records._backpointers, records._losing_arcs
    assert utt_idx.tolist() == [0] * 4 and frame.tolist() == [1, 1, 2, 3]
    assert (src.tolist(), dst.tolist(), arc.tolist(), gap.tolist()) == ([1], [2], [22], [0.5])
