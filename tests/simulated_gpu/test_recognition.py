"""The whole chain on a simulated GPU: nothing is on the wrong device, and the host seldom waits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.decoding.interface import check_log_prob
from asr.decoding.lattice import join
from asr.decoding.nbest import PrefixTree, n_best, rescore_n_best, score_tree
from asr.decoding.rescoring import rescore_lattice
from asr.decoding.settings import ResourceOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.kernels.jit import triton_problem
from asr.kernels.memory import to_device
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import on_device
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.offload import HostNgramLM
from asr.recognizer import Recognizer
from asr.results import RecognitionResult, StageTimes
from asr.streaming import StreamingOptions, StreamingRecognizer, recognize_stream
from asr.testing.simulated_gpu import SimulatedDevice, SimulatedGraph, simulated_gpu
from asr.testing.tones import RATE, tones
from tests.reference.ngram_oracle import toy_sentences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]
CUDA = torch.device("cuda")
# A GPU does not multiply bytes.
IN_FLOAT32 = ResourceOptions(acoustic_precision="float32")
# Without most of the pauses around them: the interpreter takes a second for three frames.
SAMPLES = [tones(words)[1200:-1200] for words in (["KIT", "TWO"], ["PAT"])]
NUM_FRAMES = math.ceil(len(SAMPLES[0]) / RATE * 50)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs a kernel's programs one by one: little room at first means few that have nothing to do."""
    monkeypatch.setattr("asr.decoding.gpu.frame.FIRST_CAPACITY", 512)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_gpu() as simulated:
        yield simulated


def test_triton_is_tried_before_it_is_used(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("asr.kernels.hash_table_triton")
    assert triton_problem.__wrapped__(CUDA) is None
    assert device.kernels == {"_find": 1}

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(kernels, "find_places", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        triton_problem.__wrapped__(CUDA)


def test_copies_to_a_gpu_wait_unless_they_are_queued_from_pinned_memory(device: SimulatedDevice) -> None:
    there = torch.zeros(4, device=CUDA)
    index = to_device(torch.tensor([1, 2]), CUDA)
    there[:1] = 1.0
    there.index_fill_(0, index, 2.0)
    assert not device.waits and there.tolist() == [1.0, 2.0, 2.0, 0.0]
    device.waits.clear()
    torch.tensor([1], device=CUDA)
    torch.tensor([1]).to(CUDA, non_blocking=True)
    torch.tensor([1]).pin_memory().to(CUDA)
    there[0] = 1.0
    there[index] = 3.0
    assert device.waits == {"copy to device": 5}
    with device.capture(SimulatedGraph()), pytest.raises(RuntimeError, match="not permitted"):
        there[0] = 1.0


def test_it_refuses_what_a_gpu_refuses(device: SimulatedDevice) -> None:
    here, there = torch.arange(6.0), torch.arange(6.0).to(CUDA)
    assert there.device.type == "cuda" and there.is_cuda
    for mixed in (lambda: here + there, lambda: there.index_select(0, torch.tensor([0])), lambda: here[there.long()]):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    index = torch.tensor([2, 1, 2]).to(CUDA)
    with pytest.raises(RuntimeError, match="either of them"):
        (there + 0).index_copy_(0, index, there[:3])
    assert (there + 0).index_copy_(0, index, there[:1].expand(3)).shape == (6,)
    device.waits.clear()
    assert (there * 2 + 1).cpu().tolist() == [1, 3, 5, 7, 9, 11]
    assert device.waits == {"copy to host": 1}
    assert float(there[2]) == 2.0 and there.nonzero().shape == (5, 1)
    assert device.waits == {"copy to host": 1, "_local_scalar_dense": 1, "nonzero": 1}


def test_it_replays_what_was_captured_and_lets_nobody_wait_meanwhile(device: SimulatedDevice) -> None:
    value, total = torch.ones(3, device=CUDA), torch.zeros(3, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    assert isinstance(graph, SimulatedGraph)
    with torch.cuda.graph(graph):
        total += 2 * value
        with pytest.raises(RuntimeError, match="capturing"):
            total.tolist()
    assert total.tolist() == [0, 0, 0]
    for factor in (1, 10):
        value.fill_(factor)
        graph.replay()
    assert total.tolist() == [22, 22, 22]


def test_a_thread_captures_its_own_work_alone(device: SimulatedDevice) -> None:
    value, read = torch.ones(3, device=CUDA), []

    def work() -> None:
        value.add_(1)
        read.append(value.tolist())

    graph, other = torch.cuda.CUDAGraph(), threading.Thread(target=work)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        value.mul_(5)
        other.start()
        other.join()
    assert read == [[2, 2, 2]] and value.tolist() == [2, 2, 2]
    graph.replay()
    assert value.tolist() == [10, 10, 10]


@pytest.fixture
def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It searches 48 frames, which takes the interpreter 20 seconds; other tests have it."""
    monkeypatch.setattr("asr.recognizer.needs_warm_up", lambda *_: False)


def recognized(recognizer: Recognizer) -> list[RecognitionResult]:
    with torch.no_grad():
        return recognizer(SAMPLES, RATE)


@pytest.mark.usefixtures("without_warm_up")
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("interpolated", {"resources": {"lm_device_bytes": 3000}, "hot_words": ["KIT TO"]}),
        ("rnn", {"resources": {"num_workers": 2}, "keep_lattices": True}),
        ("rnn", {"resources": {"lm_hidden_device": "cuda", "lm_output_device": "cpu"}}),
        ("interpolated", {"resources": {"lm_hidden_device": "cpu"}}),
    ],
)
def test_a_recognizer_finds_the_same(tiny_bundle_folder: Path, mode: str, options: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="GPUs run Triton's kernels")
    bundle = Bundle.load(tiny_bundle_folder)
    hot = options.get("hot_words")
    expected = recognized(Recognizer(bundle, mode, decoder="token-passing", resources=IN_FLOAT32, hot_words=hot))
    with simulated_gpu() as device:
        options = {**options, "resources": ResourceOptions(**options["resources"])}
        ours = Recognizer(Bundle.load(tiny_bundle_folder), mode, decoder="token-passing", **options)
        found = recognized(ours.to(CUDA))
        lattices = [piece.lattice.to("cpu") for result in found for piece in result.lattices]
        # No memory was freed or used while another stream might still be at it.
        assert not device.streams.hazards and not device.streams.races
    assert_equal(found, expected)
    assert expected[0].text == ("KIT TO" if hot else "KIT TWO")
    assert len(lattices) == (len(SAMPLES) if options.get("keep_lattices") else 0)


@pytest.mark.parametrize(
    ("fusion", "output_device", "expected", "in_streams"),
    [
        ("lattice", None, "cpu", "cpu"),
        ("lattice", "cuda", "cuda", "cuda"),
        ("search", None, "cuda", "cpu"),
        ("search", "cpu", "cpu", "cpu"),
    ],
)
def test_the_recurrent_model_is_where_it_is_fastest_unless_told(
    tiny_bundle_folder: Path, fusion: str, output_device: str | None, expected: str, in_streams: str
) -> None:
    pytest.importorskip("numba", reason="without compiled loops, a CPU is not faster")
    with simulated_gpu():
        resources = ResourceOptions(lm_output_device=output_device)
        bundle = Bundle.load(tiny_bundle_folder)
        recognizer = Recognizer(bundle, "rnn", decoder="token-passing", lm_fusion=fusion, resources=resources).to(CUDA)
        engine = recognizer.build_language_models(1 << 20).engine
        assert engine is not None and engine.device.type == expected
        assert recognizer.recurrent_model is not None
        assert {part.device.type for part in recognizer.recurrent_model.parameters()} == {expected}
        streams = StreamingRecognizer(recognizer)
        assert streams.engine is not None and streams.engine.device.type == in_streams
        # The recognizer's own model stays where it is.
        assert {part.device.type for part in recognizer.recurrent_model.parameters()} == {expected}


def test_no_capture_takes_the_stream_of_a_worker(tiny_bundle_folder: Path) -> None:
    pytest.importorskip("triton", reason="GPUs run Triton's kernels")
    resources = ResourceOptions(num_workers=2, batch_seconds=1.0)
    expected = recognized(Recognizer(Bundle.load(tiny_bundle_folder), "ngram", resources=IN_FLOAT32))
    with simulated_gpu(num_streams=3) as device:
        lent, captured = {torch.cuda.Stream().cuda_stream for _ in range(3)}, set()

        def capture(graph: SimulatedGraph, stream: Any, **options: Any) -> Any:
            captured.add(stream.cuda_stream)
            return device.capture(graph, stream, **options)

        with mock.patch.object(torch.cuda, "graph", capture):
            found = recognized(Recognizer(Bundle.load(tiny_bundle_folder), "ngram", resources=resources).to(CUDA))
    assert_equal(found, expected)
    assert captured and not captured & lent


@pytest.mark.usefixtures("without_warm_up")
@pytest.mark.parametrize(
    ("mode", "lm_fusion", "waits_a_frame"),
    [
        # After expansion, at the words, in the table of histories, after the cut-off.
        ("rnn", "search", 4),
        # n-gram models are looked up in one kernel, with nothing to wait for.
        ("large_ngram", "search", 3),
        # Pairs of histories have a table of their own.
        ("interpolated", "search", 5.5),
        # The search over the lattice waits for its own counts, once a frame.
        ("interpolated, lattices", "lattice", 2),
    ],
)
def test_the_host_seldom_waits(tiny_bundle_folder: Path, mode: str, lm_fusion: str, waits_a_frame: float) -> None:
    """When the histories are known; a new one costs some more. Without a language model: benchmarks/test_gpu_counts."""
    pytest.importorskip("triton", reason="GPUs run Triton's kernels")
    asked: dict[str, Any] = {"decoder": "token-passing", "lm_fusion": lm_fusion}
    mode, _, lattices = mode.partition(", ")
    asked["keep_lattices"] = bool(lattices)
    expected = recognized(Recognizer(Bundle.load(tiny_bundle_folder), mode, resources=IN_FLOAT32, **asked))
    with simulated_gpu() as device:
        recognizer = Recognizer(Bundle.load(tiny_bundle_folder), mode, **asked).to(CUDA)
        recognized(recognizer)
        device.waits.clear()
        found = recognized(recognizer)
        num_waits = device.waits.total()
    assert_equal(found, expected)
    confidences = [[word.confidence for one in results for word in one.words] for results in (found, expected)]
    assert (None in confidences[0]) != asked["keep_lattices"]
    if asked["keep_lattices"]:
        assert confidences[0] == pytest.approx(confidences[1], abs=1e-4)
    assert num_waits <= waits_a_frame * NUM_FRAMES + 40


def assert_equal(found: list[RecognitionResult], expected: list[RecognitionResult]) -> None:
    assert [result.text for result in found] == [result.text for result in expected]
    assert [result.total for result in found] == pytest.approx([result.total for result in expected], abs=1e-4)


@pytest.mark.usefixtures("without_warm_up")
def test_a_failed_call_leaves_no_buffers_behind(tiny_bundle_folder: Path, device: SimulatedDevice) -> None:
    """The buffers of a search belong to its stream: after a call has run out of memory, the next one has the same."""
    pytest.importorskip("triton", reason="GPUs run Triton's kernels")
    recognizer = Recognizer(Bundle.load(tiny_bundle_folder), "ngram", decoder="token-passing").to(CUDA)
    wanted = recognizer(SAMPLES[1])[0].text
    before = sum(device.streams.bytes_held.values())
    for _ in range(2):
        with (
            mock.patch.object(recognizer, "_score", side_effect=torch.cuda.OutOfMemoryError),
            pytest.raises(torch.cuda.OutOfMemoryError),
        ):
            recognizer(SAMPLES[1])
        assert recognizer(SAMPLES[1])[0].text == wanted
    assert sum(device.streams.bytes_held.values()) == before


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor operations only, without Triton's interpreter."""
    monkeypatch.setattr("asr.kernels.jit.triton_available", lambda device: False)
    monkeypatch.setattr("asr.decoding.selection.triton_available", lambda device: False)


@pytest.mark.usefixtures("without_kernels")
def test_frames_without_kernels_are_the_same(tiny_bundle_folder: Path) -> None:
    expected = recognized(Recognizer(Bundle.load(tiny_bundle_folder), "rnn", lm_fusion="search"))
    with simulated_gpu():
        found = recognized(Recognizer(Bundle.load(tiny_bundle_folder), "rnn", lm_fusion="search").to(CUDA))
    assert [result.text for result in found] == [result.text for result in expected]


def test_statistics_of_a_speaker_are_the_same(tiny_bundle_folder: Path) -> None:
    def found_on(device: str) -> tuple[Tensor, Tensor]:
        recognizer = Recognizer(Bundle.load(tiny_bundle_folder), "ngram", resources=IN_FLOAT32).to(device)
        statistics = recognizer.speaker_statistics(SAMPLES)
        with torch.no_grad():
            log_prob, _ = recognizer.log_prob(SAMPLES[:1], StageTimes(), statistics)
        return statistics.variance.cpu(), log_prob.cpu()

    expected = found_on("cpu")
    with simulated_gpu():
        found = found_on("cuda")
    torch.testing.assert_close(found, expected)


def test_a_stream_is_the_same(tiny_bundle_folder: Path) -> None:
    pytest.importorskip("triton", reason="GPUs run Triton's kernels")
    options = StreamingOptions(chunk_seconds=0.3, left_seconds=1.0, right_seconds=0.2)
    pieces = SAMPLES[0].split(4000)
    plain = Recognizer(Bundle.load(tiny_bundle_folder), "rnn", decoder="token-passing")
    expected = [result.text for result in recognize_stream(plain, pieces, options=options)]
    with simulated_gpu():
        recognizer = Recognizer(Bundle.load(tiny_bundle_folder), "rnn", decoder="token-passing").to(CUDA)
        assert [result.text for result in recognize_stream(recognizer, pieces, options=options)] == expected


@pytest.mark.usefixtures("device")
def test_bad_log_probabilities_are_told_where_the_host_has_the_counts() -> None:
    log_prob = torch.tensor([[[0.0, 0.0], [0.0, math.nan]]]).to(CUDA)
    with pytest.raises(AsrError, match="utterance 0, frame 1"):
        check_log_prob(log_prob, torch.tensor([2]), 2)


@pytest.mark.usefixtures("without_kernels")
def test_lattices_and_second_passes_are_the_same(tiny_bundle_folder: Path) -> None:
    def found_on(device: str) -> list[Any]:
        bundle = Bundle.load(tiny_bundle_folder)
        assert bundle.rnn_lm is not None
        recognizer = Recognizer(bundle, "ngram", decoder="token-passing", resources=IN_FLOAT32).to(device)
        graph, network = bundle.graph.to(torch.device(device)), bundle.rnn_lm.network.to(device)
        with torch.no_grad():
            log_prob = recognizer.log_prob(SAMPLES, StageTimes())
            results = TokenPassingDecoder(graph, recognizer.options, keep_lattice=True).decode(*log_prob)
            lattices = [result.lattice for result in results if result.lattice is not None]
            lists = [n_best(lattice, graph, recognizer.options, 5) for lattice in lattices]
            tree = PrefixTree([hypothesis.word_ids for hypotheses in lists for hypothesis in hypotheses], device)
            joint = join(lattices).to(device)
            rescored = rescore_lattice(joint, recognizer.options, CachedRNNLM(network), keep_lattice=True)  # type: ignore[arg-type]
            second = rescore_n_best(lists, CachedRNNLM(network), recognizer.options)  # type: ignore[arg-type]
            return [
                [[hypothesis.total for hypothesis in hypotheses] for hypotheses in (*lists, *second)],
                score_tree(tree, CachedRNNLM(network)).tolist(),  # type: ignore[arg-type]
                [path.total for path in rescored if path is not None],
            ]

    expected = found_on("cpu")
    with simulated_gpu():
        found = found_on("cuda")
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("hidden_on", ["cuda", "cpu", "both"])
def test_the_hidden_layer_may_lie_elsewhere(tiny_bundle_folder: Path, hidden_on: str) -> None:
    """Placement: trie and output layer on one device, hidden layer on another, or on two at a time."""

    def network(where: str) -> Any:
        rnn_lm = Bundle.load(tiny_bundle_folder).rnn_lm
        assert rnn_lm is not None
        return rnn_lm.network.to(where)

    expected = answers(CachedRNNLM(network("cpu")))
    with simulated_gpu() as device, torch.no_grad():
        home, others = {
            "cuda": (network("cpu"), [network("cuda")]),
            "cpu": (network("cuda"), [network("cpu")]),
            "both": (network("cuda"), [network("cuda"), network("cpu")]),
        }[hidden_on]
        clock = mock.Mock(side_effect=time.perf_counter)
        engine = CachedRNNLM(home, hidden_networks=others, clock=clock)
        found = answers(engine)
        statistics = engine.statistics()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)
    assert statistics.num_transfers > 0 and statistics.bytes_moved > 0
    assert 0.0 < statistics.seconds_transfer < statistics.seconds_hidden < statistics.seconds_total
    assert device.waits.total() > 0
    # Each call is timed in whole and in stages, each from a beginning to an end.
    assert clock.call_count >= 8 * statistics.num_calls


def test_a_search_on_the_same_device_moves_nothing(tiny_bundle_folder: Path, device: SimulatedDevice) -> None:
    rnn_lm = Bundle.load(tiny_bundle_folder).rnn_lm
    assert rnn_lm is not None
    engine = CachedRNNLM(rnn_lm.network.to(CUDA))  # type: ignore[arg-type]
    with torch.no_grad():
        answers(on_device(engine, CUDA))
    assert engine.statistics().num_transfers == 0


def answers(lm: LanguageModel) -> Tensor:
    """What a model says of 20 words after each of 4 growing histories, (5, 20), on the host."""
    generator = torch.Generator().manual_seed(0)
    context_idx, scores = lm.start(20), []
    for _ in range(4):
        word_id = torch.randint(4, len(lm.vocabulary), (20,), generator=generator).to(context_idx.device)
        score, context_idx = lm.score(context_idx, word_id)
        scores.append(score)
    return torch.stack([*scores, lm.final(context_idx)]).detach().cpu()


@pytest.fixture(scope="module")
def ngram(tmp_path_factory: pytest.TempPathFactory) -> NgramLM:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("\n".join(toy_sentences(0, 3000)))
    return NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), 4).trie)


@pytest.mark.parametrize("kind", ["searched", "hashed", "quantized", "without kernel"])
def test_an_ngram_model_on_the_device_gives_the_same_bits(
    ngram: NgramLM, kind: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "without kernel":
        monkeypatch.setattr("asr.kernels.jit.triton_available", lambda device: False)
    else:
        pytest.importorskip("triton", reason="the kernel needs triton")
    lm = {"hashed": ngram.with_index(), "quantized": ngram.quantized()}.get(kind, ngram)
    on_device = lm.to(CUDA)
    device.waits.clear()
    assert torch.equal(answers(on_device), answers(lm))
    # The test's own queries are copied to the device.
    assert kind == "without kernel" or device.waits == {"copy to host": 1, "copy to device": 4}


@pytest.mark.parametrize("share", [2.0, 0.75, 0.3, 0.1])
def test_an_ngram_model_in_host_memory_gives_the_same_bits(ngram: NgramLM, share: float) -> None:
    budget = int(share * sum(ngram.arrays.num_bytes().values()))
    expected = answers(ngram)
    with simulated_gpu():
        assert torch.equal(answers(HostNgramLM(ngram, CUDA, budget)), expected)
