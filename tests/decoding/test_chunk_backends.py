"""Searches of whole chunks, by loops or by kernels in buffers of a fixed size, equal the reference bit for bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asr.decoding.backend import ActiveTokens, Searchable, SearchGraph
from asr.decoding.backtrace import Backtrace
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.cpu.arrays import arc_arrays, largest_excess
from asr.decoding.cpu.chunk_lm import NumbaChunkSearchWithLM
from asr.decoding.frame import TokenSearch
from asr.decoding.selection import BackendFactory, select_backend
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.byte_products import has_byte_products
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import Difference, Interpolated, RemappedLM
from asr.lm.contexts import ContextTable, DenseContexts
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from tests.decoding.random_graphs import random_graph, random_log_prob, sorted_by_score
from tests.reference.ngram_oracle import toy_sentences
from tests.reference.table_lm import TableLM

NUM_FRAMES = torch.tensor([5, 0, 11, 11, 1])
GRAPH = random_graph(3, num_states=40, num_arcs=200)
# 200 arcs leave each state, of which sharp frames make few likely.
WIDE_GRAPH = random_graph(3, num_states=8, num_arcs=1600, num_tokens=60)
SORTED_GRAPH = sorted_by_score(WIDE_GRAPH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("initial_capacity", "frames_per_call", "beam", "limits"),
    [
        (4, 4, 6.0, (3, 12)),
        (1024, 32, float("inf"), (0, 10**6)),
        (16, 3, 0.3, (8, 9)),
        (1024, 32, 0.3, (2**63 - 1, 2**63 - 1)),
    ],
)
def test_kernels_in_buffers_of_a_fixed_size(
    initial_capacity: int,
    frames_per_call: int,
    beam: float,
    limits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
    from asr.decoding.gpu.cuda_graph import CudaGraphSearch, Rooms
    from asr.decoding.gpu.frame import FrameLimits

    # So few streams already move to smaller buffers as others end.
    rooms = Rooms(fewest=1, factor=2)
    searches: list[CudaGraphSearch] = []

    def made(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, _: bool) -> ChunkBackend:
        frame_limits = FrameLimits(options, False, torch.device("cpu"))
        searches.append(CudaGraphSearch(graph, frame_limits, False, frames_per_call, initial_capacity, rooms=rooms))
        return searches[-1]

    _check_same_paths(made, beam, limits, monkeypatch)
    assert len(searches) == 2
    for search in searches:
        assert (search.num_retries > 0) == (initial_capacity < 1024)


@pytest.mark.slow
def test_sizes_of_buffers_are_remembered_and_shared() -> None:
    pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
    from asr.decoding.gpu.cuda_graph import CudaGraphSearch
    from asr.decoding.gpu.frame import FrameLimits

    options = DecodingOptions(search_beam=6.0)
    searched = SearchGraph(GRAPH, options)
    search = CudaGraphSearch(searched, FrameLimits(options, False, torch.device("cpu")), False, 4, 4)
    log_prob = random_log_prob(5, 5, 11, len(GRAPH.tokens), 2.0)
    retries = []
    for _ in range(2):
        tokens = TokenSearch(searched, options, None, search, Backtrace(GRAPH.device))
        tokens.advance(tokens.start(torch.zeros(5, dtype=torch.int64)), log_prob, NUM_FRAMES)
        retries.append(search.num_retries)
    assert retries[0] == retries[1] > 0
    few = search._sizes_for(5, 7)
    many = search._sizes_for(9, 7)
    assert (few.streams, many.streams, many.columns) == (8, 32, 7)
    assert many.arcs == 4 * few.arcs and many.records == 4 * few.records


@pytest.mark.parametrize("frames_per_call", [3, 32])
@pytest.mark.parametrize(("beam", "limits"), [(6.0, (3, 12)), (float("inf"), (0, 10**6)), (0.3, (8, 9))])
def test_loops(frames_per_call: int, beam: float, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from asr.decoding.cpu.chunk import NumbaChunkSearch

    def made(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, _: bool) -> ChunkBackend:
        return NumbaChunkSearch(graph, options, frames_per_call)

    _check_same_paths(made, beam, limits, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [WIDE_GRAPH, SORTED_GRAPH], ids=["any order", "sorted"])
@pytest.mark.parametrize("has_lm", [False, True])
@pytest.mark.parametrize(
    ("beam", "limits"), [(4.0, (0, 50)), (4.0, (6, 8)), (0.3, (7, 8)), (float("inf"), (0, 10**6)), (1.0, (40, 60))]
)
def test_loops_over_states_with_many_arcs(
    graph: DecodingGraph, beam: float, limits: tuple[int, int], has_lm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    lm = TableLM(graph.vocabulary, num_history_words=2) if has_lm else None
    backend: BackendFactory = functools.partial(select_backend, name="numba")
    _check_same_paths(backend, beam, limits, monkeypatch, lm, graph=graph, sharpness=6.0)


def test_the_excess_is_how_much_later_arcs_are_better() -> None:
    pytest.importorskip("numba")
    state_0, state_1 = [-1.0, -3.0, -2.5], [0.0, -4.0, -7.0]
    scores = np.array([*state_0, *state_1], dtype=np.float32)
    assert largest_excess(np.array([0, 3, 3, 6]), scores) == 0.5
    assert largest_excess(np.array([0, 2, 3, 6]), scores) == 0.0
    searched = SearchGraph(SORTED_GRAPH, DecodingOptions())
    assert arc_arrays(searched.emitting).excess == 0.0


def _numba_with_lm(looks_up: bool) -> BackendFactory:
    def made(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, _: bool) -> ChunkBackend:
        assert lm is not None
        return NumbaChunkSearchWithLM(graph, options, lm, looks_up, backpointers_per_call=100)

    return made


@pytest.mark.slow
@pytest.mark.parametrize("skip_beam", [None, 0.2])
@pytest.mark.parametrize(("beam", "limits"), [(6.0, (3, 12)), (float("inf"), (0, 500)), (0.3, (8, 9)), (1.0, (0, 5))])
def test_loops_with_a_language_model(
    beam: float, limits: tuple[int, int], skip_beam: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    lm = TableLM(GRAPH.vocabulary, num_history_words=2)
    _check_same_paths(_numba_with_lm(looks_up=False), beam, limits, monkeypatch, lm, skip_beam)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "indexed", "quantized", "words missing"])
@pytest.mark.parametrize(
    ("beam", "limits", "skip_beam"), [(6.0, (3, 12), None), (float("inf"), (0, 500), None), (1.0, (0, 5), 0.2)]
)
def test_loops_that_look_up_ngrams(
    kind: str,
    beam: float,
    limits: tuple[int, int],
    skip_beam: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    path = tmp_path / "text"
    path.write_text("\n".join(toy_sentences(0, 200, 3 if kind == "words missing" else 9)))
    stream = read_word_stream([path])
    small, large = (NgramLM.from_trie(estimate_kneser_ney(stream, order).trie) for order in (2, 4))
    large = {"indexed": large.with_index(), "quantized": large.quantized()}.get(kind, large)
    lm = Difference(RemappedLM(large, GRAPH.vocabulary), RemappedLM(small, GRAPH.vocabulary))
    assert _check_same_paths(_numba_with_lm(looks_up=True), beam, limits, monkeypatch, lm, skip_beam) == 0


@pytest.mark.slow
def test_tables_are_read_again_after_contexts_were_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(Backtrace, "is_due", property(lambda self: self.num_records > 20))
    path = tmp_path / "text"
    path.write_text("\n".join(toy_sentences(0, 200, 9)))
    stream = read_word_stream([path])
    small, middle, large = (
        RemappedLM(NgramLM.from_trie(estimate_kneser_ney(stream, order).trie), GRAPH.vocabulary) for order in (2, 3, 4)
    )
    forgotten, found, keep = [], [], ContextTable.keep

    def noted(self: ContextTable, index: Tensor) -> None:
        forgotten.append(len(index))
        keep(self, index)

    monkeypatch.setattr(ContextTable, "keep", noted)
    options = DecodingOptions(search_beam=6.0, min_active_states=3, max_active_states=10)
    log_prob, num_frames = random_log_prob(5, 3, 200), torch.tensor([200, 200, 71])
    for backend in (functools.partial(select_backend, name="torch"), _numba_with_lm(looks_up=True)):
        lm = Difference(Interpolated([large, middle], [0.5, 0.5]), small)
        lm.contexts = DenseContexts(3, GRAPH.device, forget_from=4)
        forgotten.clear()
        results = TokenPassingDecoder(GRAPH, options, backend=backend).decode(log_prob, num_frames, lm)
        assert forgotten
        found.append([(result.best.word_ids, result.best.total) for result in results if result.best is not None])
    for (words, total), (own_words, own_total) in zip(*found, strict=True):
        assert words == own_words and total == pytest.approx(own_total, abs=1e-3)


def _toy_models(folder: Path) -> tuple[RemappedLM, RNNLanguageModel]:
    path = folder / "text"
    path.write_text("\n".join(toy_sentences(0, 200, 9)))
    small = RemappedLM(NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), 2).trie), GRAPH.vocabulary)
    torch.manual_seed(0)
    return small, RNNLanguageModel(GRAPH.vocabulary, RNNLMConfig(6, 8, maxent_order=3, maxent_size=1000))


@pytest.mark.slow
@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize(
    ("beam", "limits", "skip_beam"), [(6.0, (3, 12), None), (float("inf"), (0, 500), None), (1.0, (0, 5), 0.2)]
)
def test_loops_that_ask_a_recurrent_network(
    beam: float,
    limits: tuple[int, int],
    skip_beam: float | None,
    looks_up: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    small, network = _toy_models(tmp_path)
    # The torch backend finds what the loops have put into the caches, and the other way round.
    for loops_first in (True, False):
        engine = CachedRNNLM(network)
        lm = Difference(engine, small)
        make_backend = _numba_with_lm(looks_up)
        num_calls = _check_same_paths(make_backend, beam, limits, monkeypatch, lm, skip_beam, loops_first)
        assert (num_calls == 0) == looks_up
        num_runs, num_rows = engine.statistics().num_hidden_calls, engine.statistics().num_hidden_rows
        if loops_first:
            runs_of_loops, rows_of_loops = num_runs, num_rows
    assert runs_of_loops <= num_runs
    assert rows_of_loops == num_rows


@pytest.mark.slow
def test_a_search_looks_words_up_where_the_model_has_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    small, network = _toy_models(tmp_path)
    make_backend: BackendFactory = functools.partial(select_backend, name="numba")
    assert _check_same_paths(make_backend, 6.0, (3, 12), monkeypatch, Difference(CachedRNNLM(network), small)) == 0
    calls_only = CachedRNNLM(network, CacheOptions(compiled=False))
    assert _check_same_paths(make_backend, 6.0, (3, 12), monkeypatch, Difference(calls_only, small)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("capacity_bytes", [8_000, 30_000, 10**7])
def test_a_network_that_has_no_more_room_is_asked_by_calls(
    capacity_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    small, network = _toy_models(tmp_path)
    options = DecodingOptions(search_beam=6.0, min_active_states=3, max_active_states=40)
    log_prob = random_log_prob(5, 5, 11)
    bounded = CachedRNNLM(network, CacheOptions(capacity_bytes=capacity_bytes, loop_room=16))
    assert bounded.lookup_tables() is not None
    cases = {
        "torch": (CachedRNNLM(network), functools.partial(select_backend, name="torch")),
        "calls": (CachedRNNLM(network), _numba_with_lm(looks_up=False)),
        "lookup": (bounded, _numba_with_lm(looks_up=True)),
    }
    found, num_queries = {}, {}
    for name, (engine, make_backend) in cases.items():
        lm = Difference(engine, small)
        decoder = TokenPassingDecoder(GRAPH, options, backend=make_backend)
        counts = []
        for _ in range(2):
            with _queries_of(lm) as queries:
                results = decoder.decode(log_prob, NUM_FRAMES, lm)
            counts.append(sum(queries))
        found[name], num_queries[name] = [result.best for result in results], counts
    for one, other in zip(found["torch"], found["lookup"], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.word_ids == other.word_ids and one.total == pytest.approx(other.total, abs=1e-4)
    assert (bounded.lookup_tables() is None) == (capacity_bytes < 10**7)
    if capacity_bytes == 10**7:
        assert num_queries["lookup"] == [0, 0]
    else:
        # The first batch is begun by looking up, the second one goes by calls altogether.
        first, second = num_queries["lookup"]
        assert 0 < first < num_queries["calls"][0] and second == num_queries["calls"][1]


@pytest.mark.slow
@pytest.mark.skipif(not has_byte_products(), reason="this processor does not multiply bytes")
@pytest.mark.parametrize("searches_lattice", [False, True])
def test_the_loop_runs_the_hidden_layer_itself(searches_lattice: bool, tmp_path: Path) -> None:
    """It returns to Python only where there is no room for hidden rows, and computes no more of them than calls do."""
    _, network = _toy_models(tmp_path)
    options = DecodingOptions(search_beam=6.0, min_active_states=3, max_active_states=40)
    graph, log_prob = SearchGraph(GRAPH, options), random_log_prob(5, 5, 11)
    graph.is_pushed = searches_lattice  # changes no results, but how many histories are expanded at once
    found, num_rows = [], []
    for looks_up in (False, True):
        engine = CachedRNNLM(network, CacheOptions(hidden_dtype="int8", hidden_products="int8"))
        backend = NumbaChunkSearchWithLM(graph, options, engine, looks_up)
        search = TokenSearch(graph, options, engine, backend, Backtrace(GRAPH.device))
        stream = search.start(torch.zeros(5, dtype=torch.int64))
        with pytest.MonkeyPatch.context() as patch:
            returns: list[int] = []
            expand = engine.expand
            patch.setattr(engine, "expand", lambda idx, live: returns.append(len(idx)) or expand(idx, live))  # noqa: B023
            search.advance(stream, log_prob, NUM_FRAMES)
        tokens = search.all_active()[0]
        tokens = tokens.select(torch.sort(tokens.stream, stable=True).indices)
        found.append((tokens.stream, tokens.state, tokens.score))
        num_rows.append(engine.statistics().num_hidden_rows)
    statistics = engine.statistics()
    assert 0 < len(returns) < statistics.num_hidden_calls and statistics.num_hidden_calls > 8
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert num_rows[1] > num_rows[0] if searches_lattice else num_rows[1] == num_rows[0]


@contextlib.contextmanager
def _queries_of(lm: LanguageModel) -> Iterator[list[int]]:
    """How many words each call of `lm.score` is asked for."""
    queries: list[int] = []
    score = lm.score

    def counted(context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        queries.append(len(word_id))
        return score(context_idx, word_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "score", counted)
        yield queries


def test_streams_ask_together() -> None:
    pytest.importorskip("numba")
    # One state; the second token says a word. Two streams hear it, at different frames, one of them twice.
    graph = replace(
        random_graph(0, num_states=1, num_arcs=2, num_tokens=2, num_words=1),
        token_id=torch.tensor([0, 1], dtype=torch.int32),
        word_begin=torch.tensor([0, 0, 1]),
        word_id=torch.tensor([4], dtype=torch.int32),
    )
    log_prob = torch.tensor([0.0, -20.0]).repeat(3, 6, 1)
    for utt, frame in ((0, 1), (2, 2), (2, 4)):
        log_prob[utt, frame] = torch.tensor([-20.0, 0.0])
    options = DecodingOptions(search_beam=8.0, min_active_states=0)
    lm = TableLM(graph.vocabulary)
    searched = SearchGraph(graph, options)
    backend = select_backend(searched, options, lm, name="numba")
    search = TokenSearch(searched, options, lm, backend, Backtrace(graph.device))
    search.advance(search.start(torch.zeros(3, dtype=torch.int64)), log_prob, torch.tensor([6, 6, 5]))
    histories = [lm.history_of(int(search.active(utt)[0].context_idx[0])) for utt in range(3)]
    assert [len(history) - 1 for history in histories] == [1, 0, 2]
    assert lm.num_calls == 2


@pytest.mark.parametrize("name", ["numba", pytest.param("triton", marks=pytest.mark.slow)])
def test_arcs_are_named_as_in_the_graph(name: str) -> None:
    # The arcs of a part of a graph or lattice have other numbers there.
    if name == "triton":
        pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
    else:
        pytest.importorskip("numba")
    options = DecodingOptions(search_beam=6.0)
    searched = SearchGraph(GRAPH, options)
    searched.emitting = replace(searched.emitting, graph_arc=1000 + torch.arange(GRAPH.num_arcs))
    log_prob, paths = random_log_prob(5, 1, 6), []
    for own_name in ("torch", name):
        backtrace = Backtrace(GRAPH.device)
        backend = select_backend(searched, options, None, name=own_name)
        search = TokenSearch(searched, options, None, backend, backtrace)
        search.advance(search.start(torch.zeros(1, dtype=torch.int64)), log_prob, torch.tensor([6]))
        paths.append([backtrace.path(own).tolist() for own in search.active(0)[0].backpointer.tolist()])
    assert paths[0] == paths[1] and min(map(min, paths[0])) >= 1000


def _check_same_paths(
    make_backend: BackendFactory,
    beam: float,
    limits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    lm: LanguageModel | None = None,
    skip_beam: float | None = None,
    loops_first: bool = False,
    graph: DecodingGraph = GRAPH,
    sharpness: float = 2.0,
) -> int:
    """In one chunk and in several, back-pointers collected on the way; gives the number of calls of `lm.score`."""
    monkeypatch.setattr(Backtrace, "is_due", property(lambda self: self.num_records > 200))
    log_prob = random_log_prob(5, 5, 11, len(graph.tokens), sharpness)
    log_prob[2, :, 1] = -torch.inf
    log_prob[3, 6] = -torch.inf
    options = DecodingOptions(
        search_beam=beam, min_active_states=limits[0], max_active_states=limits[1], skip_beam=skip_beam
    )
    searched = SearchGraph(graph, options)
    found, num_calls = [], 0
    reference: BackendFactory = functools.partial(select_backend, name="torch")
    runs = [(reference, [11]), (make_backend, [11]), (make_backend, [2, 9])]
    for make, cuts in reversed(runs) if loops_first else runs:
        backtrace = Backtrace(graph.device)
        search = TokenSearch(searched, options, lm, make(searched, options, lm, False), backtrace)
        stream = search.start(torch.zeros(5, dtype=torch.int64))
        begin = 0
        with contextlib.nullcontext([]) if lm is None else _queries_of(lm) as queries:
            for num in cuts:
                search.advance(stream, log_prob[:, begin : begin + num], (NUM_FRAMES - begin).clamp(0, num))
                begin += num
        num_calls += len(queries) if make is make_backend else 0
        found.append([(*search.active(utt), backtrace) for utt in range(5)])
    if loops_first:
        found.reverse()
    for others in found[1:]:
        for (tokens, offset, backtrace), (own, own_offset, own_backtrace) in zip(found[0], others, strict=True):
            assert offset == own_offset
            _assert_equal(tokens, own)
            for backpointer, own_record in zip(tokens.backpointer.tolist(), own.backpointer.tolist(), strict=True):
                assert torch.equal(backtrace.path(backpointer), own_backtrace.path(own_record))
            together = own_backtrace.paths_together(own.backpointer)
            assert [arc.tolist() for arc in together] == [
                own_backtrace.path(r).tolist() for r in own.backpointer.tolist()
            ]
    return num_calls


def _assert_equal(tokens: ActiveTokens, others: ActiveTokens) -> None:
    for field in fields(tokens):
        if field.name != "backpointer":
            assert torch.equal(getattr(tokens, field.name), getattr(others, field.name)), field.name
