"""Which backend a search gets, and that no two threads get the same one."""

from __future__ import annotations

import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asr.cli import doctor
from asr.decoding.backend import ActiveTokens, Searchable, SearchGraph
from asr.decoding.chunk_backend import Chunk, ChunkBackend, SearchSink
from asr.decoding.chunks import ChunkGraph
from asr.decoding.frame import FrameSearch, SplitFrameBackend, TorchFrameBackend
from asr.decoding.rescoring import LatticeGraph
from asr.decoding.selection import backend_name, frame_backend, select_backend
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.kernels.jit import triton_available, triton_problem
from asr.lm.combine import Difference, RemappedLM
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.ngram_oracle import toy_sentences
from tests.reference.table_lm import TableLM

OPTIONS = DecodingOptions(search_beam=6.0, output_beam=6.0)


def _ngrams(folder: Path, graph_words: LanguageModel) -> Difference:
    path = folder / "text"
    path.write_text("\n".join(toy_sentences(0, 100, 9)))
    stream = read_word_stream([path])
    small, large = (NgramLM.from_trie(estimate_kneser_ney(stream, order).trie) for order in (2, 3))
    words = graph_words.vocabulary
    return Difference(RemappedLM(large, words), RemappedLM(small, words))


def test_the_numba_backend_of_each_search(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    from asr.decoding.cpu.chunk import NumbaChunkSearch
    from asr.decoding.cpu.chunk_lm import NumbaChunkSearchWithLM
    from asr.decoding.cpu.frame import NumbaFrameBackend
    from asr.decoding.cpu.lattice_search import NumbaLatticeSearch

    graph = random_graph(3, num_states=40, num_arcs=200)
    searched, table_lm = SearchGraph(graph, OPTIONS), TableLM(graph.vocabulary)
    ngrams = _ngrams(tmp_path, table_lm)
    kinds: dict[str, type] = {
        name: type(select_backend(searched, OPTIONS, lm, keep_lattice, "numba"))
        for name, lm, keep_lattice in [
            ("no language model", None, False),
            ("a lattice", None, True),
            ("any language model", table_lm, False),
            ("a lattice with a language model", table_lm, True),
            ("n-grams", ngrams, False),
        ]
    }
    assert kinds == {
        "no language model": NumbaChunkSearch,
        "a lattice": NumbaChunkSearch,
        "any language model": NumbaChunkSearchWithLM,
        "a lattice with a language model": NumbaChunkSearchWithLM,
        "n-grams": NumbaChunkSearchWithLM,
    }
    limited = DecodingOptions(max_contexts_per_state=2)
    assert isinstance(select_backend(searched, limited, table_lm, name="numba"), FrameSearch)
    assert isinstance(frame_backend(searched, limited, True, "numba"), SplitFrameBackend)
    assert isinstance(select_backend(searched, limited, None, name="numba"), NumbaChunkSearch)
    assert isinstance(frame_backend(searched, limited, False, "numba"), NumbaFrameBackend)
    with_epsilons = SearchGraph(random_graph(3, epsilons=True), OPTIONS)
    assert isinstance(select_backend(with_epsilons, OPTIONS, None, name="numba"), FrameSearch)
    decoder = TokenPassingDecoder(graph, OPTIONS, backend="torch")
    lattice = decoder.search(random_log_prob(3, 2, 5), torch.tensor([5, 4]), keep_lattice=True).lattice
    assert lattice is not None
    pushed = LatticeGraph(lattice, OPTIONS)
    for keep_lattice in (False, True):
        assert isinstance(select_backend(pushed, OPTIONS, ngrams, keep_lattice, "numba"), NumbaLatticeSearch)


def test_the_reference_runs_frame_by_frame() -> None:
    searched = SearchGraph(random_graph(0), OPTIONS)
    assert isinstance(select_backend(searched, OPTIONS, None, name="torch"), FrameSearch)
    assert isinstance(frame_backend(searched, OPTIONS, False, "torch"), TorchFrameBackend)


def test_loops_are_compiled_once_for_the_arcs_of_all_graphs() -> None:
    found: list[Searchable] = []

    def make(searched: Searchable, options: DecodingOptions, lm: LanguageModel | None, records: bool) -> ChunkBackend:
        found.append(searched)
        return select_backend(searched, options, lm, records, "torch")

    graphs = random_graph(3), random_graph(3, epsilons=True)
    graph, with_epsilons = (
        replace(each, dst_state=each.dst_state.long(), token_id=each.token_id.long()) for each in graphs
    )
    log_prob = random_log_prob(3, 1, 8)
    torch.set_default_dtype(torch.float64)
    try:
        found.append(SearchGraph(with_epsilons, OPTIONS))
        for lm_fusion in ("lattice", "chunks"):
            decoder = TokenPassingDecoder(graph, OPTIONS, lm_fusion=lm_fusion, backend=make, inputs="scores")
            decoder.decode(log_prob, lm=TableLM(graph.vocabulary))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {type(each) for each in found} == {SearchGraph, LatticeGraph, ChunkGraph}
    types = {(arcs.dst_state.dtype, arcs.token_id.dtype, arcs.score.dtype) for arcs in (one.emitting for one in found)}
    assert types == {(torch.int32, torch.int32, torch.float32)}


@pytest.mark.parametrize(("lm_fusion", "graphs"), [("search", [SearchGraph]), ("lattice", [SearchGraph, LatticeGraph])])
def test_a_decoder_makes_all_its_backends_alike(lm_fusion: str, graphs: list[type]) -> None:
    made: list[type] = []

    def make(searched: Searchable, options: DecodingOptions, lm: LanguageModel | None, records: bool) -> ChunkBackend:
        made.append(type(searched))
        return select_backend(searched, options, lm, records, "torch")

    graph = random_graph(3)
    log_prob = random_log_prob(3, 1, 8)
    decoder = TokenPassingDecoder(graph, OPTIONS, lm_fusion=lm_fusion, backend=make, inputs="scores")
    assert decoder.decode(log_prob, lm=TableLM(graph.vocabulary))[0].reached_final
    assert made == graphs


def test_backends_that_do_not_exist_or_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(AsrError, match="no search backend 'loops'; choose one of auto, torch, numba, triton"):
        TokenPassingDecoder(random_graph(0), backend="loops")
    with pytest.raises(AsrError, match="'triton' needs triton and a GPU"):
        TokenPassingDecoder(random_graph(0), backend="triton")
    with pytest.raises(AsrError, match="no LM fusion 'lattices'"):
        TokenPassingDecoder(random_graph(0), lm_fusion="lattices")
    with pytest.raises(AsrError, match="without input epsilons"):
        TokenPassingDecoder(random_graph(0, epsilons=True), lm_fusion="lattice")


class ExclusiveSearch:
    """A search that notices when two threads use it at the same time."""

    def __init__(self, search: ChunkBackend) -> None:
        self._search = search
        self._lock = threading.Lock()

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        assert self._lock.acquire(blocking=False), "two threads use one backend"
        try:
            time.sleep(0.02)
            return self._search.search(tokens, chunk, sink)
        finally:
            self._lock.release()


@pytest.mark.slow
def test_threads_share_a_decoder_but_no_backend() -> None:
    made = []

    def exclusive(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, _: bool) -> ChunkBackend:
        frame = TorchFrameBackend(graph, options, lm is not None)
        made.append(ExclusiveSearch(FrameSearch(graph, options, lm, frame)))
        return made[-1]

    decoder = TokenPassingDecoder(random_graph(1), OPTIONS, backend=exclusive)
    log_prob, num_frames = random_log_prob(1, 2, 5), torch.tensor([5, 3])
    expected = decoder.decode(log_prob, num_frames)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: decoder.decode(log_prob, num_frames), range(24)))
    assert all(results == expected for results in found)
    # Idle backends are used again.
    assert 1 < len(made) <= 5


@pytest.mark.parametrize(("version", "is_new"), [("2.3.1", False), ("3.0.0", True), ("3.10.0+git12", True)])
def test_a_triton_that_lacks_what_kernels_use_is_none(
    version: str, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    monkeypatch.setattr("asr.kernels.jit.triton_problem", lambda device: None)
    assert triton_available(torch.device("cuda")) == is_new
    found = doctor._triton()
    assert found.state == ("ok" if is_new else "no") and version in found.text


def test_triton_is_not_imported_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_package(name: str) -> bool:
        raise AssertionError(name)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("asr.kernels.jit.has_package", has_package)
    assert not triton_available(torch.device("cpu"))


def test_a_triton_that_does_not_run_on_the_gpu_is_told_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.9.0"))
    monkeypatch.setattr("asr.kernels.jit.triton_problem", lambda device: "Failed to find C compiler")
    with pytest.warns(UserWarning, match=r"do not run on cuda:0 \(Failed to find C compiler\); operations of torch"):
        assert backend_name("auto", torch.device("cuda", 0)) == "torch"
    with pytest.warns(UserWarning), pytest.raises(AsrError, match="needs triton and a GPU"):
        backend_name("triton", torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = doctor._triton()
    assert found.state == "no" and "Failed to find C compiler" in found.text and "gcc" in found.text


def test_what_keeps_triton_from_a_gpu_is_one_line() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    problem = triton_problem(torch.device("cuda"))
    assert problem and "\n" not in problem
