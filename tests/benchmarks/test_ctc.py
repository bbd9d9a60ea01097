"""The benchmark of CTC decoders: kept frames, peers that search our graph, and what is said of the curves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from asr.ctc import CTCDecoder, CTCTokens
from scripts.benchmarks import ctc, ctc_free, ctc_networks
from scripts.benchmarks.ctc_workload import RECORDED, CTCWorkload, read, write
from scripts.benchmarks.peers import ctc as peers

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


@pytest.mark.parametrize("name", ["ours", "pyctcdecode", "flashlight"])
def test_words_are_found_without_a_list(workload: CTCWorkload, name: str) -> None:
    if name != "ours" and importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    arguments = (5,) if name == "pyctcdecode" else (None, 5)
    decode = getattr(ctc_free, name)(workload.tokens, *arguments)
    assert [decode(frames) for frames in workload.frames] == TEXTS
    assert ctc_free.words_of(CTCTokens(["<blk>", "▁A", "B", "▁"]), [1, 2, 2, 3, 1]) == ["ABB", "A"]


def test_a_network_learns_to_read_scores(workload: CTCWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc_networks, "_EPOCHS", 150)
    recordings = [ctc_networks.Recording(Path(), tuple(words)) for words in TEXTS]
    targets = [ctc_networks._target(recording, workload.tokens, None) for recording in recordings]
    assert ctc_networks._target(ctc_networks.Recording(Path(), ("ÄH",)), workload.tokens, None) is None
    torch.manual_seed(0)
    network = ctc_networks.Readout(len(LETTERS), len(LETTERS)).eval()
    before = _ctc_loss(network, workload.frames, targets)
    ctc_networks._train(network, 0, workload.frames, targets)
    assert _ctc_loss(network.eval(), workload.frames, targets) < 0.1 * before


@torch.no_grad()
def _ctc_loss(network: ctc_networks.Readout, frames: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    losses = [
        torch.nn.functional.ctc_loss(network(own[None])[0], target, (len(own),), (len(target),))
        for own, target in zip(frames, targets, strict=True)
    ]
    return float(torch.stack(losses).sum())


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
        peer = peers.sherpa(tokens, graph, moved, 0.7, 0.5, 100000)
    else:
        peer = getattr(peers, name)(tokens, graph, 0.7, 0.5, 50.0, 100000)
    for log_prob, words in zip(moved, workload.references, strict=True):
        (best,) = decoder(log_prob)
        assert peer(log_prob) == best.text.split() == words  # type: ignore[union-attr]


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
