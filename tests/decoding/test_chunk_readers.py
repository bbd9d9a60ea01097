"""What reads whole chunks (loops, or kernels in rooms of fixed sizes) finds what the tensor form finds, bit for bit."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from asr.decoding.backend import Chunk, ChunkBackend, SearchSink
from asr.decoding.backtrace import Backtrace
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import SearchGraph
from asr.decoding.token_passing import TokenPassingDecoder
from asr.decoding.token_search import TokenSearch
from asr.decoding.tokens import ActiveTokens
from asr.lm.cached import engine_numba
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

NUM_FRAMES = torch.tensor([5, 0, 11, 11, 1])
GRAPH = random_graph(3, num_states=40, num_arcs=200)


@pytest.mark.parametrize(
    ("first_room", "frames_at_once", "beam", "limits"),
    [(4, 4, 6.0, (3, 12)), (1024, 32, float("inf"), (0, 10**6)), (16, 3, 0.3, (8, 9))],
)
def test_rooms_of_fixed_sizes(
    first_room: int, frames_at_once: int, beam: float, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
    from asr.decoding.gpu import cuda_graph
    from asr.decoding.gpu.cuda_graph import CudaGraphSearch

    monkeypatch.setattr(cuda_graph, "_FIRST_ROOM", first_room)
    monkeypatch.setattr(cuda_graph, "_FRAMES_AT_ONCE", frames_at_once)
    for reader in _check_same_paths("steps", beam, limits, monkeypatch):
        assert isinstance(reader, CudaGraphSearch)
        assert (reader.num_retries > 0) == (first_room < 1024)


@pytest.mark.parametrize("frames_at_once", [3, 32])
@pytest.mark.parametrize(("beam", "limits"), [(6.0, (3, 12)), (float("inf"), (0, 10**6)), (0.3, (8, 9))])
def test_loops(frames_at_once: int, beam: float, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from asr.decoding.cpu import chunk

    monkeypatch.setattr(chunk, "_FRAMES_AT_ONCE", frames_at_once)
    assert len(_check_same_paths("loops", beam, limits, monkeypatch)) == 2


@pytest.mark.parametrize("word_beam", [None, 0.2])
@pytest.mark.parametrize(("beam", "limits"), [(6.0, (3, 12)), (float("inf"), (0, 500)), (0.3, (8, 9)), (1.0, (0, 5))])
def test_loops_with_a_language_model(
    beam: float, limits: tuple[int, int], word_beam: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    from asr.decoding.cpu.chunk_lm import NumbaChunkSearchWithLM

    lm = TableLM(GRAPH.vocabulary, num_history_words=2)
    readers = _check_same_paths("loops", beam, limits, monkeypatch, lm, word_beam)
    assert [type(reader) for reader in readers] == 2 * [NumbaChunkSearchWithLM]


@pytest.mark.parametrize("kind", ["plain", "indexed", "quantized", "words missing"])
@pytest.mark.parametrize(
    ("beam", "limits", "word_beam"), [(6.0, (3, 12), None), (float("inf"), (0, 500), None), (1.0, (0, 5), 0.2)]
)
def test_loops_that_look_up_ngrams(
    kind: str,
    beam: float,
    limits: tuple[int, int],
    word_beam: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    from asr.decoding.cpu import chunk_lm

    monkeypatch.setattr(chunk_lm, "_RECORDS_AT_ONCE", 100)
    path = tmp_path / "text"
    path.write_text("\n".join(toy_sentences(0, 200, 3 if kind == "words missing" else 9)))
    stream = read_word_stream([path])
    small, large = (NgramLM.from_trie(estimate_kneser_ney(stream, order).trie) for order in (2, 4))
    large = {"indexed": large.with_index(), "quantized": large.quantized()}.get(kind, large)
    lm = Difference(RemappedLM(large, GRAPH.vocabulary), RemappedLM(small, GRAPH.vocabulary))
    readers = _check_same_paths("loops", beam, limits, monkeypatch, lm, word_beam)
    assert [type(reader) for reader in readers] == 2 * [chunk_lm.NumbaWordSearch]


def _toy_models(folder: Path) -> tuple[RemappedLM, RNNLanguageModel]:
    path = folder / "text"
    path.write_text("\n".join(toy_sentences(0, 200, 9)))
    small = RemappedLM(NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), 2).trie), GRAPH.vocabulary)
    torch.manual_seed(0)
    return small, RNNLanguageModel(GRAPH.vocabulary, RNNLMConfig(6, 8, maxent_order=3, maxent_size=1000))


@pytest.mark.parametrize("is_pushed", [False, True])
@pytest.mark.parametrize(
    ("beam", "limits", "word_beam"), [(6.0, (3, 12), None), (float("inf"), (0, 500), None), (1.0, (0, 5), 0.2)]
)
def test_loops_that_ask_a_recurrent_network(
    beam: float,
    limits: tuple[int, int],
    word_beam: float | None,
    is_pushed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    from asr.decoding.cpu.chunk_lm import NumbaChunkSearchWithLM, NumbaWordSearch

    monkeypatch.setattr(SearchGraph, "is_pushed", is_pushed)
    small, network = _toy_models(tmp_path)
    # What the loops have scored, and the tensor form then finds; and the other way round.
    for loops_first in (True, False):
        engine = CachedRNNLM(network)
        lm = Difference(engine, small)
        readers = _check_same_paths("loops", beam, limits, monkeypatch, lm, word_beam, loops_first)
        assert [type(reader) for reader in readers] == 2 * [NumbaWordSearch if is_pushed else NumbaChunkSearchWithLM]
        num_runs, num_rows = engine.statistics().num_hidden_calls, engine.statistics().num_hidden_rows
        if loops_first:
            runs_of_loops, rows_of_loops = num_runs, num_rows
    assert runs_of_loops <= num_runs
    assert rows_of_loops >= num_rows if is_pushed else rows_of_loops == num_rows


@pytest.mark.parametrize("capacity_bytes", [8_000, 30_000, 10**7])
def test_a_network_that_has_no_more_room_is_asked_by_calls(
    capacity_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    from asr.decoding.cpu.chunk_lm import NumbaChunkSearchWithLM

    monkeypatch.setattr(SearchGraph, "is_pushed", True)
    monkeypatch.setattr(engine_numba, "_ROOM", 16)
    frames_by_calls: list[list[int]] = []
    read = NumbaChunkSearchWithLM.read

    def recorded(
        reader: NumbaChunkSearchWithLM, tokens: ActiveTokens, chunk: Chunk, traces: SearchSink
    ) -> ActiveTokens:
        frames_by_calls.append(chunk.num_frames.tolist())
        return read(reader, tokens, chunk, traces)

    monkeypatch.setattr(NumbaChunkSearchWithLM, "read", recorded)
    small, network = _toy_models(tmp_path)
    options = DecodingOptions(search_beam=6.0, min_active_states=3, max_active_states=40)
    log_prob, found = random_log_prob(5, 5, 11), []
    engine = CachedRNNLM(network, capacity_bytes=capacity_bytes)
    assert engine.lookup_tables() is not None
    for own, form in ((CachedRNNLM(network), "tensor"), (engine, "loops")):
        search = TokenPassingDecoder(GRAPH, options, form=form)
        for _ in range(2):
            results = search.decode(log_prob, NUM_FRAMES, Difference(own, small))
        found.append([result.best for result in results])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.word_ids == other.word_ids and one.total == pytest.approx(other.total, abs=1e-4)
    assert (engine.lookup_tables() is None) == (capacity_bytes < 10**7)
    if capacity_bytes == 10**7:
        assert not frames_by_calls
    else:
        # The first utterances are begun by the loop, the second ones are not.
        assert 0 < sum(frames_by_calls[0]) < int(NUM_FRAMES.sum()) and frames_by_calls[-1] == NUM_FRAMES.tolist()


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
    search = TokenSearch(SearchGraph(graph, options), options, lm, Backtrace(graph.device), form="loops")
    search.advance(search.start(torch.zeros(3, dtype=torch.int64)), log_prob, torch.tensor([6, 6, 5]))
    histories = [lm.history_of(int(search.alive(utt)[0].context_idx[0])) for utt in range(3)]
    assert [len(history) - 1 for history in histories] == [1, 0, 2]
    assert lm.num_calls == 2


def _check_same_paths(
    form: str,
    beam: float,
    limits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    lm: LanguageModel | None = None,
    word_beam: float | None = None,
    loops_first: bool = False,
) -> list[ChunkBackend]:
    """In one chunk and in several, records collected on the way; gives the readers."""
    monkeypatch.setattr(Backtrace, "is_due", property(lambda self: self.num_records > 200))
    graph = GRAPH
    log_prob = random_log_prob(5, 5, 11)
    log_prob[2, :, 1] = -torch.inf
    log_prob[3, 6] = -torch.inf
    options = DecodingOptions(
        search_beam=beam, min_active_states=limits[0], max_active_states=limits[1], word_beam=word_beam
    )
    searched = SearchGraph(graph, options)
    found = []
    readers: list[ChunkBackend] = []
    runs = [("tensor", [11]), (form, [11]), (form, [2, 9])]
    for own_form, cuts in reversed(runs) if loops_first else runs:
        backtrace = Backtrace(graph.device)
        search = TokenSearch(searched, options, lm, backtrace, form=own_form)
        assert (search.reader is None) == (own_form == "tensor")
        stream = search.start(torch.zeros(5, dtype=torch.int64))
        begin = 0
        for num in cuts:
            search.advance(stream, log_prob[:, begin : begin + num], (NUM_FRAMES - begin).clamp(0, num))
            begin += num
        found.append([(*search.alive(utt), backtrace) for utt in range(5)])
        if search.reader is not None:
            readers.append(search.reader)
    if loops_first:
        found.reverse()
    for others in found[1:]:
        for (tokens, offset, backtrace), (own, own_offset, own_backtrace) in zip(found[0], others, strict=True):
            assert offset == own_offset
            _assert_equal(tokens, own)
            for record, own_record in zip(tokens.record.tolist(), own.record.tolist(), strict=True):
                assert torch.equal(backtrace.path(record), own_backtrace.path(own_record))
            together = own_backtrace.paths_together(own.record)
            assert [arc.tolist() for arc in together] == [own_backtrace.path(r).tolist() for r in own.record.tolist()]
    return readers


def _assert_equal(tokens: ActiveTokens, others: ActiveTokens) -> None:
    for field in fields(tokens):
        if field.name != "record":
            assert torch.equal(getattr(tokens, field.name), getattr(others, field.name)), field.name
