"""The benchmark of CTC decoders: kept frames, peers that search our graph, and what is said of the curves."""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from asr.bundle import Bundle
from asr.ctc import CTCDecoder, CTCTokens
from asr.ctc.graphs import spelled_lexicon
from asr.ctc.word_models import uniform_ngram
from asr.graph.context import TiedStates
from asr.text.lexicon import Lexicon
from scripts.benchmarks import ctc, ctc_free, ctc_networks, ctc_posteriors
from scripts.benchmarks.ctc_spoken_text import SpokenText
from scripts.benchmarks.ctc_workload import RECORDED, CTCWorkload, read, write
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE
from scripts.benchmarks.peers import ctc as peers
from scripts.benchmarks.speech import recordings

LETTERS = ("-", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'")
WORDS = ["HELLO", "HELP", "WORLD", "WORD", "A"]
TEXTS = [["HELLO", "A", "WORLD"], ["HELP", "WORD"], ["A", "WORLD"]]


@pytest.fixture(scope="module")
def workload() -> CTCWorkload:
    generator = torch.Generator().manual_seed(0)
    frames = []
    for words in TEXTS:
        columns = [column for symbol in "|".join(words) for column in (LETTERS.index(symbol), 0)]
        logits = torch.randn((len(columns), len(LETTERS)), generator=generator)
        logits[torch.arange(len(columns)), torch.tensor(columns)] += 5.0
        frames.append(logits.log_softmax(1))
    return CTCWorkload("letters", CTCTokens(LETTERS), frames, TEXTS)


def test_frames_are_kept(workload: CTCWorkload, tmp_path: Path) -> None:
    path = tmp_path / "frames.safetensors"
    assert read(path) == {}
    write([workload], path)
    kept = read(path)["letters"]
    assert kept.tokens.symbols == workload.tokens.symbols
    assert kept.references == workload.references
    for found, wanted in zip(kept.frames, workload.frames, strict=True):
        assert torch.allclose(found, wanted, atol=0.02)
        assert torch.allclose(found.exp().sum(1), torch.ones(len(found)), atol=1e-5)
    assert len(kept.first(2).frames) == len(kept.first(2).references) == 2


def test_the_frames_beside_the_benchmark_are_of_networks() -> None:
    kept = read(RECORDED)
    assert set(kept) == set(ctc.KINDS)
    for kind, of in kept.items():
        assert of.tokens.kind == kind
        assert len(of.frames) == len(of.references) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", "pyctcdecode", "flashlight"])
def test_words_are_found_without_a_list(workload: CTCWorkload, name: str) -> None:
    if name != "ours" and importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    arguments = (5,) if name == "pyctcdecode" else (None, 5)
    decode = getattr(ctc_free, name)(workload.tokens, *arguments)
    assert [decode(frames) for frames in workload.frames] == TEXTS
    assert ctc_free.words_of(CTCTokens(["<blk>", "▁A", "B", "▁"]), [1, 2, 2, 3, 1]) == ["ABB", "A"]


PHONES = ("AH", "B", "K", "T")
LEXICON = Lexicon(
    {"CAT": [("K", "AH", "T")], "TUB": [("T", "AH", "B")], "CUB": [("K", "AH", "B")], "ABUT": [("AH", "B", "AH", "T")]}
)


def posteriors_of(columns: list[int]) -> torch.Tensor:
    """Log posteriors (T, 1 + 2 P) that are sure of one column in each frame."""
    sure = torch.full((len(columns), 1 + 2 * len(PHONES)), 0.001)
    sure[torch.arange(len(columns)), torch.tensor(columns)] = 1.0
    return sure.log()


# Silence is 0; K, AH, T begin as 3, 1, 4 and go on as 7, 5, 8; TUB has no pause before it, but one after it.
CAT_TUB = posteriors_of([0, 3, 7, 1, 4, 8, 4, 1, 5, 5, 2, 0, 0])


def test_sentences_are_made_of_the_longest_stretches() -> None:
    spoken = SpokenText([CAT_TUB], [["CAT", "TUB"]], PHONES, LEXICON)
    draw = random.Random(0)
    made = spoken.say(["CAT", "TUB"], draw)
    assert made is not None
    assert made.equal(CAT_TUB[1:])  # all at once, with the pause
    made = spoken.say(["TUB", "CAT"], draw)
    assert made is not None
    assert made.equal(torch.cat((CAT_TUB[6:], CAT_TUB[1:6])))
    made = spoken.say(["CUB"], draw)  # K with AH from CAT, B at a word's end from TUB
    assert made is not None
    assert made.equal(torch.cat((CAT_TUB[1:4], CAT_TUB[10:])))
    assert spoken.say(["CAR"], draw) is None
    assert spoken.say(["ABUT"], draw) is None  # B was said at the end of a word only
    cut_short = SpokenText([CAT_TUB[:4]], [["CAT", "TUB"]], PHONES, LEXICON)
    assert cut_short.say(["CAT"], draw) is None


def test_posteriors_of_a_phone_are_added_up() -> None:
    # Two phones after silence; the second begins in other columns after the first.
    entry, loop = torch.tensor([[0, 1, 3], [0, 1, 4], [0, 1, 3]]), torch.tensor([[0, 2, 5]] * 3)
    sums = ctc_posteriors._sums(TiedStates(("SIL", "A", "B"), entry.numpy(), loop.numpy()))
    posteriors = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.25, 0.1])
    assert torch.allclose(posteriors @ sums, torch.tensor([0.1, 0.2, 0.55, 0.05, 0.1]))


@pytest.mark.one_stack
@pytest.mark.slow
def test_posteriors_do_not_depend_on_the_other_recordings() -> None:
    bundle = Bundle.load(LIBRISPEECH_BUNDLE)
    speech = recordings(None, 3)[1]
    together = ctc_posteriors.phone_posteriors(bundle, speech)
    alone = [ctc_posteriors.phone_posteriors(bundle, [one])[0] for one in speech]
    slow = ctc_posteriors.phone_posteriors(bundle, speech[:1], ctc_posteriors.CONDITIONS["slow"])[0]
    for found, wanted in zip(together, alone, strict=True):
        assert found.shape == wanted.shape
        # Silence follows all but the longest of a batch, which changes the last frames.
        assert torch.allclose(found[:-20].float().exp(), wanted[:-20].float().exp(), atol=0.02)
        assert torch.allclose(found.float().exp().sum(1), torch.ones(len(found)), atol=0.01)
        assert 0.0 < found[:, 0].float().exp().mean() < 0.5  # silence
    assert len(slow) == pytest.approx(1.25 * len(alone[0]), abs=2)


@pytest.mark.one_stack
@pytest.mark.slow
def test_a_network_learns_to_read_posteriors(workload: CTCWorkload) -> None:
    targets = [ctc_networks.target_of(words, workload.tokens, None) for words in TEXTS]
    assert ctc_networks.target_of(["ÄH"], workload.tokens, None) is None
    examples = [(own, target) for own, target in zip(workload.frames, targets, strict=True) if target is not None]
    network = ctc_networks.Readout(len(LETTERS), len(LETTERS)).eval()
    assert ctc_networks.greedy_error_rate(network, 0, examples) > 80.0
    ctc_networks.optimize(network, 0, itertools.repeat(examples), 6000 * 80, random.Random(0))
    assert ctc_networks.greedy_error_rate(network.eval(), 0, examples) < 5.0
    first = network.leave.weight.clone()
    ctc_networks.optimize(network, 0, itertools.repeat(examples), 6000 * 80, random.Random(0))
    assert network.leave.weight.equal(first)  # whatever the weights were before


@pytest.mark.slow
def test_batches_have_what_was_said_and_what_is_made(workload: CTCWorkload) -> None:
    target = torch.tensor([1, 2])
    spoken = SpokenText([CAT_TUB], [["CAT", "TUB"]], PHONES, LEXICON)
    conditions = [([(CAT_TUB, target)], spoken)]
    # The second sentence cannot be said, the third has more letters than frames.
    sentences = [(["TUB"], target), (["CAR"], target), (["TUB"], torch.arange(1, 9))]
    batches = ctc_networks.training_batches(conditions, sentences, 0.5, random.Random(0))
    examples = [example for _ in range(4) for example in next(batches)]
    lengths = [len(own) for own, _ in examples]
    assert set(lengths) == {len(CAT_TUB), 7}
    assert 0.2 < lengths.count(7) / len(lengths) < 0.3  # half of the draws are a sentence, a third of these is of use
    assert all(own_target is target for _, own_target in examples)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kaldi", "sherpa", "k2"])
def test_peers_find_our_best_path_in_our_graph(workload: CTCWorkload, name: str) -> None:
    package = {"kaldi": "kaldi_decoder", "sherpa": "sherpa_onnx", "k2": "k2"}[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    # Blank last, so that columns must be put in the graph's order.
    tokens = CTCTokens([*LETTERS[1:], "-"])
    moved = [torch.cat([log_prob[:, 1:], log_prob[:, :1]], dim=1) for log_prob in workload.frames]
    settings = {"lm_scale": 0.7, "word_insertion_penalty": 0.5, "search_beam": 50.0, "max_active_states": 100000}
    decoder = CTCDecoder(tokens, words=WORDS, **settings)
    assert decoder.word_graph is not None
    graph = decoder.word_graph.graph
    if name == "sherpa":
        peer = peers.sherpa(tokens, graph, moved, 0.7, 0.5)(100000)
    else:
        peer = getattr(peers, name)(tokens, graph, 0.7, 0.5)(50.0, 100000)
    for log_prob, words in zip(moved, workload.references, strict=True):
        (best,) = decoder(log_prob)
        assert peer(log_prob) == best.text.split() == words  # type: ignore[union-attr]


def test_a_peer_is_loaded_once_for_all_beams() -> None:
    loaded = []

    def load(name: str) -> Any:
        loaded.append(name)
        return lambda *beams: (name, *beams)

    with_beam = ctc.loaded_once(load, "peer")
    assert loaded == []
    assert [with_beam(1), with_beam(2, 3)] == [("peer", 1), ("peer", 2, 3)]
    assert loaded == ["peer"]


@pytest.mark.one_stack
@pytest.mark.slow
def test_scales_are_tried(workload: CTCWorkload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(ctc, "TRIED_SCALES", (0.5, 30.0))
    monkeypatch.setattr(ctc, "TRIED_WORD_SCORES", (0.0,))
    ngram, other = uniform_ngram(WORDS), uniform_ngram(WORDS)
    lexicon = spelled_lexicon(WORDS, workload.tokens)[0]
    rows = ctc.tune(workload, ngram, lexicon, other, WORDS)
    tried = [(row["weight"], row["lm_scale"], row["word_score"]) for row in rows]
    both = [(0.5, 0.0), (30.0, 0.0)]
    assert tried[:4] == [(weight, *pair) for weight in (0.0, 0.7) for pair in both]
    assert tried[4:] == [(weight, 0.5, 0.0) for weight in ctc.OTHER_WEIGHTS]
    for each in rows:  # with a scale of 30, words cost too much
        assert (
            min(each["graph"], each["summed"], each["mean"]) > 0.0 if each["lm_scale"] == 30.0 else each["mean"] == 0.0
        )


@pytest.mark.one_stack
@pytest.mark.slow
def test_processes_share_the_utterances(workload: CTCWorkload) -> None:
    seconds = 0.2

    def decode(log_prob: torch.Tensor) -> list[str]:
        time.sleep(seconds)
        return []

    def fails(log_prob: torch.Tensor) -> list[str]:
        raise ValueError("not this one")

    found = [
        ctc.time_by_clock(decode, workload, ctc.Passes(2, 9.0), num) * workload.num_frames / 1000.0 for num in (1, 3)
    ]
    # A sleep may be a little short by the clock that measures it.
    assert found[0] > 2.9 * seconds > found[1] > 0.9 * seconds
    with pytest.raises(threading.BrokenBarrierError):
        ctc.time_by_clock(fails, workload, ctc.ONE_PASS, 2)
    assert ctc.in_fork(os.getppid) == os.getpid()
    with pytest.raises(EOFError):
        ctc.in_fork(lambda: fails(torch.zeros(1)))


@pytest.mark.one_stack
@pytest.mark.slow
def test_the_most_frequent_words_come_first() -> None:
    ngram = Bundle.load(LIBRISPEECH_BUNDLE).small_ngram
    assert ngram is not None
    words = ctc.frequent_words(ngram, 5000)
    assert len(set(words)) == 5000
    assert {"THE", "AND", "OF", "TO"} < set(words[:8])


@pytest.mark.slow
def test_slow_decoders_make_few_passes(workload: CTCWorkload) -> None:
    calls = multiprocessing.Value("i", 0)

    def decode(log_prob: torch.Tensor) -> list[str]:
        with calls:
            calls.value += 1
        time.sleep(0.01)
        return []

    for seconds, num_passes in ((1.0, 3), (0.02, 1)):
        calls.value = 0
        ctc.time_by_clock(decode, workload, ctc.Passes(3, seconds), 1)
        assert calls.value == 1 + num_passes * len(workload.frames)


def row(system: str, wer: float, time: float) -> dict[str, Any]:
    return {"system": system, "beam": "1", "wer": wer, "ms_per_frame": time}


def test_times_are_compared_at_the_errors_of_the_other(workload: CTCWorkload) -> None:
    rows = [
        *(row("ours", 20.0, 1.0), row("ours", 12.0, 2.0), row("ours", 10.0, 8.0)),
        *(row("pyctcdecode", 30.0, 5.0), row("pyctcdecode", 12.0, 20.0), row("pyctcdecode", 12.0, 25.0)),
        *(row("flashlight", 11.0, 16.0), row("k2", 9.0, 3.0)),
        *(row("ours, neural", 9.5, 2.0), row("ours, neural", 8.0, 5.0), row("ours, neural", 7.0, 30.0)),
    ]
    found = ctc.summary(rows, workload)
    assert (found["wer_ours"], found["wer_best_peer"], found["wer_ours_neural"]) == (10.0, 9.0, 7.0)
    assert found["time_over_pyctcdecode"] == 0.1  # our 12 % in 2, theirs in 20
    assert found["time_over_flashlight"] == 0.5  # our 10 % in 8
    assert found["time_over_k2"] is None  # never reached
    assert found["time_over_best_peer_at_equal_wer"] is None
    assert found["neural_time_over_pyctcdecode"] == 0.25  # the fastest below 9 % takes 5
    assert found["time_over_torchaudio"] is None
    assert "all_cores_over_k2" not in found
    found = ctc.summary([{**each, "ms_by_clock": each["wer"] * each["ms_per_frame"]} for each in rows], workload)
    assert found["all_cores_over_pyctcdecode"] == 0.1
    assert found["all_cores_over_flashlight"] == round(80.0 / 176.0, 4)
