"""A language model inside the search on a simulated GPU: frames are captured, and the host seldom waits."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
os.environ.setdefault("TRITON_INTERPRET", "1")

from asr.decoding.backend import Searchable
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.gpu.chunk_lm import TritonChunkSearchWithLM
from asr.decoding.gpu.cuda_graph import CudaGraphSearch, FrameReplay, LmInside
from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend
from asr.decoding.interface import DecodeResult
from asr.decoding.lattice_records import lattice_margin
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import ADD, CombinedLM, Difference, Interpolated, RemappedLM, SentencesLM, Step
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel, device_of
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.offload import table_bytes, with_host_tables
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.testing.simulated_gpu import SimulatedDevice, simulated_gpu
from asr.text.symbols import EOS_ID, Vocabulary
from tests.decoding.random_graphs import random_graph, random_log_prob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GRAPH = random_graph(1, num_states=8, num_arcs=24)
OPTIONS = DecodingOptions(search_beam=3.0, min_active_states=2, max_active_states=12)
LOG_PROB, NUM_FRAMES = random_log_prob(1, 4, 10), torch.tensor([10, 0, 9, 3])
FRAMES_PER_CALL = 4
KINDS = ["rnn", "difference", "interpolated"]


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_gpu() as simulated:
        yield simulated


def network(vocabulary: Vocabulary, projects: bool = False, num_layers: int = 1) -> RNNLanguageModel:
    torch.manual_seed(1)
    width = 6 if projects else 8
    config = RNNLMConfig(width, hidden_size=8, num_layers=num_layers, maxent_order=3, maxent_size=64)
    made = RNNLanguageModel(vocabulary, config).eval().requires_grad_(False)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def ngram(folder: Path, vocabulary: Vocabulary, order: int) -> LanguageModel:
    generator = random.Random(order)
    lines = [" ".join(generator.choices(vocabulary.words[4:], k=generator.randint(1, 6))) for _ in range(60)]
    path = folder / f"{order}.txt"
    path.write_text("\n".join(lines))
    return NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), order).trie)


def model(kind: str, rnn: LanguageModel, folder: Path, device: torch.device) -> LanguageModel:
    """A language model of one of the kinds, with the recurrent one in it."""
    if kind == "rnn":
        return rnn
    small, middle = (
        RemappedLM(ngram(folder, rnn.vocabulary, order).to(device), rnn.vocabulary, warn=False)  # type: ignore[attr-defined]
        for order in (2, 3)
    )
    if kind == "difference":
        return Difference(rnn, small)
    return SentencesLM(Difference(Interpolated([rnn, middle], [0.6, 0.4]), small))


class Calls:
    """Calls of a fixed size, captured once as long as the model's tensors are the same."""

    def __init__(self, lm: LanguageModel, size: int) -> None:
        self._lm, self._size = lm, size
        self._query = torch.zeros(2, size, dtype=torch.int64, device=CUDA)
        self._tensors: tuple[Tensor, ...] = ()
        self.num_captures = self.num_repeated = 0

    def answers(self, rounds: list[tuple[list[int], list[int]]], contexts: list[int]) -> list[Tensor]:
        """Scores of rounds of (positions in the list of contexts, words); next contexts are appended to the list."""
        while True:
            own = list(contexts)
            tensors = self._lm.reserve(self._size)
            assert tensors is not None
            if [*map(id, tensors)] != [*map(id, self._tensors)]:
                self._capture()
                self._tensors = tensors
            scores = [self._replayed(positions, words, own) for positions, words in rounds]
            if self._lm.release(sum(len(words) for _, words in rounds)):
                contexts[:] = own
                return scores
            self.num_repeated += 1

    def _capture(self) -> None:
        self._query[0].copy_(self._lm_start)
        self._query[1].fill_(EOS_ID)
        self.num_captures += 1
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._answer = self._lm.score(*self._query)

    def start(self) -> list[int]:
        self._lm_start = self._lm.start(1)
        return [int(self._lm_start)]

    def _replayed(self, positions: list[int], words: list[int], contexts: list[int]) -> Tensor:
        num = len(words)
        # As in the search, queries are repeated to fill the call.
        filled = [
            [contexts[positions[i % num]] for i in range(self._size)],
            [words[i % num] for i in range(self._size)],
        ]
        self._query.copy_(torch.tensor(filled))
        self._graph.replay()
        log_prob, next_idx = self._answer
        contexts += next_idx[:num].tolist()
        return log_prob[:num].cpu().clone()


@pytest.mark.parametrize(
    ("kind", "projects"), [("rnn", False), ("rnn", True), ("difference", False), ("interpolated", False)]
)
def test_captured_calls_answer_as_a_cpu_does(
    kind: str, projects: bool, tmp_path: Path, device: SimulatedDevice
) -> None:
    vocabulary, generator = Vocabulary([f"w{i}" for i in range(200)]), random.Random(3)
    plain_rnn, rnn = CachedRNNLM(network(vocabulary, projects)), CachedRNNLM(network(vocabulary, projects).to(CUDA))
    plain, lm = model(kind, plain_rnn, tmp_path, CPU), model(kind, rnn, tmp_path, CUDA)
    calls = Calls(lm, 80)
    contexts, plain_contexts = calls.start(), plain.start(1).tolist()
    for _ in range(3):
        # First there are more new edges, and then more new histories in a call than there is room for at first.
        rounds = []
        for num in (3, 80, 80, 7, 80, 80):
            newest = range(max(0, len(contexts) - 200), len(contexts))
            positions = generator.sample(newest, num) if len(newest) >= num else generator.choices(newest, k=num)
            rounds.append((positions, [generator.randrange(EOS_ID, 204) for _ in range(num)]))
        found = calls.answers(rounds, contexts)
        for (positions, words), scores in zip(rounds, found, strict=True):
            before = torch.tensor([plain_contexts[position] for position in positions])
            expected, after = plain.score(before, torch.tensor(words))
            assert torch.allclose(scores, expected, atol=1e-4)
            plain_contexts += after.tolist()
        # Two histories are one for both, or for neither.
        assert len(set(contexts)) == len(set(plain_contexts)) == len(set(zip(contexts, plain_contexts, strict=True)))
    assert calls.num_repeated >= 2 and calls.num_captures <= 3 + calls.num_repeated
    counts, plain_counts = rnn.statistics(), plain_rnn.statistics()
    assert counts.num_edges >= plain_counts.num_edges  # repeated rounds may begin with another start
    assert counts.num_contexts == counts.num_edges + 2
    assert counts.num_hidden_rows == counts.num_hidden_held - 1


@pytest.mark.parametrize(("dtype", "num_layers"), [("float16", 1), ("bfloat16", 1), ("int8", 1), ("int8", 2)])
def test_stored_states_are_rounded_as_on_a_cpu(
    dtype: Literal["float16", "bfloat16", "int8"], num_layers: int, device: SimulatedDevice
) -> None:
    vocabulary, options = Vocabulary([f"w{i}" for i in range(20)]), CacheOptions(hidden_dtype=dtype)
    own = network(vocabulary, num_layers=num_layers)
    plain, words = CachedRNNLM(own, options), list(range(EOS_ID, EOS_ID + 16))
    rounds = [([0] * 16, words), (list(range(1, 17)), words), (list(range(17, 33)), words[::-1])]
    context_idx, expected = plain.start(16), []
    for _, own_words in rounds:
        log_prob, context_idx = plain.score(context_idx, torch.tensor(own_words))
        expected.append(log_prob)
    calls = Calls(CachedRNNLM(own.to(CUDA), options), 16)
    for log_prob, other in zip(calls.answers(rounds, calls.start()), expected, strict=True):
        assert torch.allclose(log_prob, other, atol=2e-3)


def captured(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, keep_lattice: bool) -> ChunkBackend:
    """As `select_backend` chooses it, with few programs, which the interpreter runs one by one, and a host that looks
    often."""
    assert lm is not None
    limits, margin = FrameLimits(options, True, CUDA, block=64), lattice_margin(options) if keep_lattice else None
    otherwise = TritonChunkSearchWithLM(graph, options, lm, TritonFrameBackend(graph, limits, 64))
    inside = LmInside(lm, options.lm_scale, otherwise)
    return CudaGraphSearch(graph, limits, True, FRAMES_PER_CALL, 64, margin, inside=inside)


def searching(keep_lattice: bool = False) -> TokenPassingDecoder:
    return TokenPassingDecoder(GRAPH.to(CUDA), OPTIONS, keep_lattice=keep_lattice, backend=captured)


def decoded(decoder: TokenPassingDecoder, lm: LanguageModel, device: torch.device) -> list[DecodeResult]:
    return decoder.decode(LOG_PROB.to(device), NUM_FRAMES.to(device), lm)


def assert_same(found: list[DecodeResult], expected: list[DecodeResult]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.reached_final == other.reached_final
        assert (own.best is None) == (other.best is None)
        if own.best is not None and other.best is not None:
            assert own.best.word_ids == other.best.word_ids
            assert own.best.total == pytest.approx(other.best.total, abs=1e-3)
            assert own.best.lm_score == pytest.approx(other.best.lm_score, abs=1e-3)
        assert (own.lattice is None) == (other.lattice is None)
        if own.lattice is not None and other.lattice is not None:
            assert torch.equal(own.lattice.graph_arc, other.lattice.graph_arc)
            assert torch.allclose(own.lattice.lm_score, other.lattice.lm_score, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_frames_find_what_a_cpu_finds(kind: str, tmp_path: Path, device: SimulatedDevice) -> None:
    own = network(GRAPH.vocabulary)
    plain = TokenPassingDecoder(GRAPH, OPTIONS, keep_lattice=True, backend="torch")
    expected = decoded(plain, model(kind, CachedRNNLM(own), tmp_path, CPU), CPU)
    lm = model(kind, CachedRNNLM(own.to(CUDA)), tmp_path, CUDA)
    decoder = searching(keep_lattice=True)
    assert_same(decoded(decoder, lm, CUDA), expected)
    assert_same(decoded(decoder, lm, CUDA), expected)
    # All histories are known now, and all buffers are large enough.
    device.clear_counts()
    assert_same(decoded(decoder, lm, CUDA), expected)
    assert device.kernels["graph"] == 10
    assert device.waits.total() < 40
    assert "_claim_rows" not in device.kernels


def test_a_search_goes_on_frame_by_frame_if_memory_is_bounded(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = network(GRAPH.vocabulary)
    plain, plain_rnn = TokenPassingDecoder(GRAPH, OPTIONS, keep_lattice=True, backend="torch"), CachedRNNLM(own)
    batches = [random_log_prob(seed, 4, 10) for seed in range(3)]
    expected = [plain.decode(log_prob, NUM_FRAMES, plain_rnn) for log_prob in batches]
    rnn = CachedRNNLM(own.to(CUDA), CacheOptions(capacity_bytes=14_000))
    reserved: list[bool] = []
    reserve = CachedRNNLM.reserve

    def noted(lm: CachedRNNLM, num_queries: int) -> tuple[Tensor, ...] | None:
        tensors = reserve(lm, num_queries)
        reserved.append(tensors is not None)
        return tensors

    monkeypatch.setattr(CachedRNNLM, "reserve", noted)
    decoder = searching(keep_lattice=True)
    for log_prob, results in zip(batches, expected, strict=True):
        assert_same(decoder.decode(log_prob.to(CUDA), NUM_FRAMES.to(CUDA), rnn), results)
    num_reserved = reserved.index(False)
    assert num_reserved > 1 and reserved[num_reserved - 1]
    # Nothing is live, and half of the memory is used: histories are forgotten, and frames are captured again.
    rnn.retain(rnn.start(0))
    reserved.clear()
    assert_same(decoder.decode(batches[0].to(CUDA), NUM_FRAMES.to(CUDA), rnn), expected[0])
    assert reserved[0]


def test_an_interrupted_search_leaves_a_model_that_answers_as_before(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = network(GRAPH.vocabulary)
    expected = decoded(TokenPassingDecoder(GRAPH, OPTIONS, backend="torch"), CachedRNNLM(own), CPU)
    rnn = CachedRNNLM(own.to(CUDA))
    decoder = searching()

    def interrupted(self: FrameReplay, num_frames: int) -> None:
        monkeypatch.undo()
        self.read(num_frames // 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(FrameReplay, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoded(decoder, rnn, CUDA)
    assert rnn.statistics().num_edges > 0 and rnn.statistics().num_edge_hits >= 0
    assert_same(decoded(decoder, rnn, CUDA), expected)


def test_backends_are_kept_for_each_language_model(device: SimulatedDevice) -> None:
    own = network(GRAPH.vocabulary).to(CUDA)
    one, other = CachedRNNLM(own), CachedRNNLM(own)
    decoder = TokenPassingDecoder(GRAPH.to(CUDA), OPTIONS)  # with the backend that is chosen for a GPU
    first, second = decoder._take_backend(one, False), decoder._take_backend(other, False)
    assert isinstance(first, CudaGraphSearch)
    decoder._give_back(first, one, False)
    decoder._give_back(second, other, False)
    assert decoder._take_backend(other, False) is second
    assert decoder._take_backend(one, True) is not first
    assert decoder._take_backend(one, False) is first


@pytest.mark.parametrize(
    "options",
    [
        CacheOptions(cache_scores=False),
        CacheOptions(cache_hidden=False),
        CacheOptions(recombination_length=2),
        CacheOptions(history_precision="sign"),
        CacheOptions(batching="query"),
    ],
)
def test_other_caches_are_not_captured(options: CacheOptions, device: SimulatedDevice) -> None:
    own = network(GRAPH.vocabulary).to(CUDA)
    assert CachedRNNLM(own).reserve(16) is not None
    assert CachedRNNLM(own, options).reserve(16) is None


def test_networks_that_need_the_host_are_not_captured(device: SimulatedDevice) -> None:
    own = network(GRAPH.vocabulary)
    hosted, _ = with_host_tables(own, CUDA, table_bytes(own))
    assert CachedRNNLM(hosted).reserve(16) is None
    for output in ("hierarchical", "class", "full"):
        other = RNNLanguageModel(GRAPH.vocabulary, RNNLMConfig(embedding_size=8, hidden_size=8, output=output))  # type: ignore[arg-type]
        assert CachedRNNLM(other.to(CUDA)).reserve(16) is None
    normalized = RNNLanguageModel(GRAPH.vocabulary, RNNLMConfig(embedding_size=8, hidden_size=8, normalized=True))
    assert CachedRNNLM(normalized.to(CUDA)).reserve(16) is None


def test_a_part_that_cannot_be_reserved_leaves_the_others_free(tmp_path: Path, device: SimulatedDevice) -> None:
    own = network(GRAPH.vocabulary).to(CUDA)
    rnn, other = CachedRNNLM(own), CachedRNNLM(own, CacheOptions(cache_scores=False))
    assert Interpolated([rnn, other], [0.5, 0.5]).reserve(16) is None
    log_prob, _ = rnn.score(rnn.start(3), torch.full((3,), EOS_ID, device=CUDA))
    assert len(log_prob) == 3 and rnn.statistics().num_queries == 3


class Mixer(LanguageModel):
    """A model with any number of contexts, whose calls need no preparation."""

    def __init__(self, factor: int) -> None:
        self._factor = factor

    @property
    def vocabulary(self) -> Vocabulary:
        return GRAPH.vocabulary

    def start(self, num_streams: int) -> Tensor:
        return torch.zeros(num_streams, dtype=torch.int64, device=CUDA)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        return context_idx * -0.5, (context_idx * self._factor + word_id) % (1 << 31)

    def final(self, context_idx: Tensor) -> Tensor:
        return context_idx * -0.5

    def reserve(self, num_queries: int) -> tuple[Tensor, ...]:
        return ()


def mixed(forget_from: int = 1 << 16) -> CombinedLM:
    """Three models, so that contexts of two are numbered."""
    steps = [Step(ADD, 0, 1, 1.0, 1.0), Step(ADD, 3, 2, 1.0, 1.0)]
    return CombinedLM([Mixer(3), Mixer(5), Mixer(7)], steps, forget_from)


def test_calls_without_room_give_contexts_that_are_in_use(device: SimulatedDevice) -> None:
    lm, words = mixed(forget_from=8), torch.arange(1, 17, device=CUDA)
    _, first = lm.score(lm.start(1).expand(16).contiguous(), words)
    lm.retain(first[8:])  # the first numbers are forgotten
    known = set(first[8:].tolist())
    assert lm.reserve(16) is not None
    context_idx = first[torch.arange(8, 16, device=CUDA).repeat(2)]
    for number in range(8):
        _, context_idx = lm.score(context_idx, words + 100 * number)
        if number < 4:
            known |= set(context_idx.tolist())
    assert not lm.release(8 * 16)
    assert set(context_idx.tolist()) <= known


def test_calls_of_several_sizes_share_what_was_captured(device: SimulatedDevice) -> None:
    lm = mixed()
    sizes = (16, 64, 16, 32, 64)
    kept = []
    for size in sizes:
        kept.append(lm.reserve(size))
        lm.release(0)
    for tensors in kept[2:]:
        assert tensors is not None and kept[1] is not None
        assert all(one is other for one, other in zip(tensors, kept[1], strict=True))


class Interrupting(Mixer):
    """Is interrupted when calls are reserved or released."""

    def __init__(self, method: str) -> None:
        super().__init__(3)
        self._method = method

    def reserve(self, num_queries: int) -> tuple[Tensor, ...]:
        if self._method == "reserve":
            raise KeyboardInterrupt
        return ()

    def release(self, num_queries: int) -> bool:
        if self._method == "release":
            raise KeyboardInterrupt
        return True


@pytest.mark.parametrize("method", ["reserve", "release"])
def test_an_interrupted_reservation_leaves_no_part_reserved(method: str, device: SimulatedDevice) -> None:
    rnn = CachedRNNLM(network(GRAPH.vocabulary).to(CUDA))
    lm = CombinedLM([rnn, Mixer(5), Mixer(7), Interrupting(method)], [Step(ADD, 0, 1, 1.0, 1.0)])
    with pytest.raises(KeyboardInterrupt):
        lm.reserve(16)
        lm.release(0)
    # Answers without a reservation may have any size.
    _, next_idx = lm.score(lm.start(3), torch.arange(EOS_ID, EOS_ID + 3, device=CUDA))
    assert len(set(next_idx.tolist())) == 3
    assert rnn.statistics().num_edges == 3


@pytest.mark.parametrize("where", ["_add_rows", "_log_prob"])
def test_an_interrupted_call_leaves_no_edge_without_a_score(
    where: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, words = network(Vocabulary([f"w{i}" for i in range(8)])), torch.arange(EOS_ID, EOS_ID + 8)
    plain = CachedRNNLM(own)
    _, plain_idx = plain.score(plain.start(8), words)
    expected = [plain.score(own_idx, words)[0] for own_idx in (plain_idx.flip(0), plain_idx)]
    rnn, words = CachedRNNLM(own.to(CUDA)), words.to(CUDA)
    _, next_idx = rnn.score(rnn.start(8), words)

    def interrupted(*_: object) -> Tensor:
        raise KeyboardInterrupt

    assert rnn.reserve(8) is not None
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        if where == "_add_rows":  # while contexts are claimed
            patches.setattr("asr.lm.cached.engine_triton._begin_call", {(1,): interrupted})
        else:
            patches.setattr("asr.lm.cached.engine_triton.TritonEngine._log_prob", interrupted)
        rnn.score(next_idx, words)
    rnn.release(0)
    _, next_idx = rnn.score(rnn.start(8), words)
    assert rnn.reserve(8) is not None
    found = [rnn.score(own_idx, words)[0] for own_idx in (next_idx.flip(0), next_idx)]
    assert rnn.release(16)
    for log_prob, other in zip(found, expected, strict=True):
        assert torch.allclose(log_prob.cpu(), other, atol=1e-4)


def test_an_interrupted_call_leaves_no_context_without_a_number(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, words = mixed(), torch.arange(1, 9, device=CUDA)
    _, before = lm.score(lm.start(8), words)
    parts = [part.tolist() for part in lm.contexts.unpack(before)]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    assert lm.reserve(8) is not None
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr("asr.kernels.hash_table.HashTable.store_queued", interrupted)
        lm.score(before, words)
    lm.release(0)
    # What was known is as before, and what is new has numbers of its own.
    assert [part.tolist() for part in lm.contexts.unpack(before)] == parts
    assert lm.score(lm.start(8), words)[1].tolist() == before.tolist()
    _, after = lm.score(before, words)
    for found, part, factor in zip(lm.contexts.unpack(after), lm.contexts.unpack(before), (3, 5, 7), strict=True):
        assert torch.equal(found.cpu(), (part * factor + words).cpu())


def test_all_captures_of_a_search_use_one_stream(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noted(name: str, make: Any, *args: object, **kwargs: object) -> Any:
        made.append(name)
        return make(*args, **kwargs)

    for name in ("Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, functools.partial(noted, name, getattr(torch.cuda, name)))
    decoder, rnn = searching(), CachedRNNLM(network(GRAPH.vocabulary).to(CUDA))
    decoded(decoder, rnn, CUDA)
    assert made.count("CUDAGraph") > 1 and made.count("Stream") == 1


def test_backends_of_models_that_no_other_search_sees_are_not_kept(device: SimulatedDevice) -> None:
    own = CachedRNNLM(network(GRAPH.vocabulary))
    for options, lm, where in ((OPTIONS, own, CPU), (replace(OPTIONS, lm_scale=0.0), Mixer(1), CUDA)):
        decoder = TokenPassingDecoder(GRAPH.to(CUDA), options)
        assert device_of(lm) == torch.empty(0, device=where).device
        decoded(decoder, lm, CUDA)
        assert not any(decoder._idle_backends.values())


def test_inference_mode_makes_no_difference(device: SimulatedDevice) -> None:
    decoder, rnn = searching(keep_lattice=True), CachedRNNLM(network(GRAPH.vocabulary).to(CUDA))
    log_prob, num_frames = LOG_PROB.to(CUDA), NUM_FRAMES.to(CUDA)
    with torch.inference_mode():
        expected = decoder.decode(log_prob, num_frames, rnn)
    assert_same(decoder.decode(log_prob, num_frames, rnn), expected)
    with torch.inference_mode():
        assert_same(decoder.decode(log_prob, num_frames, rnn), expected)
