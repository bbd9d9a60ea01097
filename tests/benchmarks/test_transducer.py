"""The benchmark of decoders of transducers: the loss, the small network, and what is kept."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asr.bundle import Bundle
from asr.ctc import CTCTokens
from asr.ctc.word_models import uniform_ngram
from asr.errors import AsrError
from asr.transducer import TransducerDecoder
from scripts.benchmarks import transducer, transducer_network
from scripts.benchmarks.ctc_networks import WIDTH, Example, Readout
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE
from scripts.benchmarks.peers import transducer as peers
from scripts.benchmarks.training import Schedule
from scripts.benchmarks.transducer_network import Network, TokenNetworks, encoded_of, next_log_probs, transducer_loss
from scripts.benchmarks.transducer_workload import NUM_KEPT, RECORDED, EncodedWorkload, SmallTransducer, read, write
from tests.reference.toy_transducer import ToyTransducer

NUM_TOKENS, NUM_FRAMES, LENGTHS = 6, (4, 3, 1), (3, 0, 2)


def by_alignments(log_prob: Tensor, target: list[int]) -> Tensor:
    """The negative log-likelihood of tokens: log_prob (T, U + 1, C), one alignment after another; 0 is the blank."""
    num_frames, found = len(log_prob), []
    # The last step is a blank.
    for places in itertools.combinations(range(num_frames + len(target) - 1), len(target)):
        frame, total = 0, torch.zeros((), dtype=log_prob.dtype)
        num_read = 0
        for step in range(num_frames + len(target)):
            if step in places:
                total = total + log_prob[frame, num_read, target[num_read]]
                num_read += 1
            else:
                total = total + log_prob[frame, num_read, 0]
                frame += 1
        found.append(total)
    return -torch.stack(found).logsumexp(0)


@pytest.fixture
def example() -> tuple[TokenNetworks, Tensor, Tensor, list[Tensor]]:
    """Networks, encoded (N, T, WIDTH), predicted (N, U + 1, WIDTH), and the tokens."""
    torch.manual_seed(0)
    encoded = torch.randn(3, max(NUM_FRAMES), WIDTH, requires_grad=True)
    predicted = torch.randn(3, max(LENGTHS) + 1, WIDTH, requires_grad=True)
    return TokenNetworks(NUM_TOKENS), encoded, predicted, [torch.randint(1, NUM_TOKENS, (each,)) for each in LENGTHS]


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    weights = torch.arange(1, 1 + len(loss), dtype=loss.dtype)
    return list(torch.autograd.grad((loss * weights).sum(), inputs))


def test_loss_sums_over_all_alignments(example: tuple[TokenNetworks, Tensor, Tensor, list[Tensor]]) -> None:
    networks, encoded, predicted, targets = example
    num_frames = torch.tensor(NUM_FRAMES)
    log_probs = next_log_probs(networks, encoded, predicted, targets, num_frames, 0)
    loss = transducer_loss(*log_probs, num_frames, torch.tensor(LENGTHS))
    log_prob = networks.join(encoded[:, :, None], predicted[:, None]).log_softmax(3).double()
    wanted = torch.stack(
        [by_alignments(log_prob[i, : NUM_FRAMES[i]], targets[i].tolist()) for i in range(len(targets))]
    )
    assert torch.allclose(loss, wanted, atol=1e-5)
    inputs = (encoded, predicted, *networks.leave.parameters())
    for found, right in zip(gradients(loss, *inputs), gradients(wanted, *inputs), strict=True):
        assert torch.allclose(found, right, atol=1e-5)


def test_loss_is_torchaudios(example: tuple[TokenNetworks, Tensor, Tensor, list[Tensor]]) -> None:
    if importlib.util.find_spec("torchaudio") is None:
        pytest.skip("needs torchaudio")
    from torchaudio.functional import rnnt_loss

    networks, encoded, predicted, targets = example
    num_frames = torch.tensor(NUM_FRAMES)
    log_probs = next_log_probs(networks, encoded, predicted, targets, num_frames, 0)
    loss = transducer_loss(*log_probs, num_frames, torch.tensor(LENGTHS)).float()
    logits = networks.join(encoded[:, :, None], predicted[:, None])
    padded = pad_sequence(targets, batch_first=True).int()
    theirs = rnnt_loss(logits, padded, num_frames.int(), torch.tensor(LENGTHS).int(), blank=0, reduction="none")
    assert torch.allclose(loss, theirs, atol=1e-4)
    for found, right in zip(gradients(loss, encoded, predicted), gradients(theirs, encoded, predicted), strict=True):
        assert torch.allclose(found, right, atol=1e-4)


def spoken(draw: random.Random) -> list[Example]:
    """Posteriors that are sure of a token in every fourth frame, of silence in the others."""
    examples = []
    for length in (3, 5, 6, 8):
        target = torch.tensor([draw.randrange(1, NUM_TOKENS) for _ in range(length)])
        sure = torch.full((4 * length + 1, NUM_TOKENS), 0.001)
        sure[:, 0] = 1.0
        sure[4 * torch.arange(length) + 1, target] = 100.0
        examples.append(((sure / sure.sum(1, keepdim=True)).log(), target))
    return examples


@pytest.mark.one_stack
@pytest.mark.slow
def test_a_transducer_is_trained_and_goes_on(tmp_path: Path) -> None:
    schedule = Schedule(num_rounds=2, num_steps=90, peak_lr=1e-3, num_warm_up=200)
    num_batches = 0

    def examples(draw: random.Random, most: int = 1000) -> Iterator[list[Example]]:
        nonlocal num_batches
        while num_batches < most:
            num_batches += 1
            yield spoken(draw)
        raise InterruptedError

    def network() -> Network:
        torch.manual_seed(0)
        return Network(Readout(NUM_TOKENS, NUM_TOKENS), NUM_TOKENS)

    def rate(of: Network) -> float:
        return transducer_network.greedy_error_rate(of.eval(), 0, spoken(random.Random(9)))

    whole, parted = network(), network()
    assert rate(whole) > 50.0
    transducer_network.optimize(whole, 0, examples, tmp_path / "whole.pt", schedule)
    assert rate(whole) < 5.0
    num_batches = 0
    with pytest.raises(InterruptedError):
        few = functools.partial(examples, most=97)
        transducer_network.optimize(parted, 0, few, tmp_path / "parted.pt", schedule)
    parted = network()
    transducer_network.optimize(parted, 0, examples, tmp_path / "parted.pt", schedule)
    assert num_batches == 90 + 7 + 90
    for name, weight in parted.state_dict().items():
        assert weight.equal(whole.state_dict()[name]), name


SYMBOLS = ["▁A", "<blk>", "▁B", "C", "D", "▁"]


@pytest.fixture
def workload() -> EncodedWorkload:
    torch.manual_seed(0)
    network = SmallTransducer(CTCTokens(SYMBOLS, kind="pieces"), TokenNetworks(len(SYMBOLS)))
    lengths = (5, 1, 3)
    encoded = [2.0 * torch.randn(length, WIDTH) for length in lengths]
    return EncodedWorkload("toy", network, encoded, [["A", "BC"], ["A"], ["BD"]])


def test_prediction_reads_two_tokens(workload: EncodedWorkload) -> None:
    network = workload.network
    output, state = network.start()
    blank, tokens = network.tokens.blank_id, [0, 3, 2, 4]
    wanted = network.networks.predict(torch.tensor([[blank, blank, *tokens]]))[0]
    assert torch.allclose(output[0], wanted[0], atol=1e-5)
    for column, right in zip(tokens, wanted[1:], strict=True):
        output, state = network.predict(torch.tensor([column]), state)
        assert torch.allclose(output[0], right, atol=1e-5)
    with pytest.raises(AsrError, match="without --quick"):
        network(torch.zeros(16000))


def test_frames_and_networks_are_kept(workload: EncodedWorkload, tmp_path: Path) -> None:
    write(workload, tmp_path / "frames.safetensors")
    kept = read(tmp_path / "frames.safetensors")
    assert kept.references == workload.references
    assert kept.num_seconds == pytest.approx(9 * 0.06)
    assert kept.network.tokens.symbols == tuple(SYMBOLS)
    for found, right in zip(kept.encoded, workload.encoded, strict=True):
        assert torch.allclose(found, right, atol=0.01)
    assert torch.allclose(kept.network.start()[0], workload.network.start()[0], atol=0.01)
    assert len(kept.first(2).encoded) == len(kept.first(2).references) == 2


def test_frames_beside_the_benchmark_are_small() -> None:
    assert RECORDED.stat().st_size < 2_000_000
    kept = read(RECORDED)
    assert len(kept.encoded) == len(kept.references) == NUM_KEPT


def test_two_frames_become_one() -> None:
    torch.manual_seed(0)
    network = Network(Readout(NUM_TOKENS, NUM_TOKENS), NUM_TOKENS).eval()
    assert [len(each) for each in encoded_of(network, [torch.randn(length, NUM_TOKENS) for length in (4, 5, 1)])] == [
        2,
        3,
        1,
    ]


@pytest.mark.slow
def test_a_peer_finds_our_best_tokens() -> None:
    if importlib.util.find_spec("torchaudio") is None:
        pytest.skip("needs torchaudio")
    symbols = ["▁A", "<blk>", *(f"▁{letter}" for letter in "BCDEFGHIJKLMNOPQRSTUVWXYZ")]
    network = ToyTransducer(symbols, sharpness=1.0, blank_bias=2.0)
    decoder = TransducerDecoder(network, beam_size=20, search_beam=1000.0, token_min_log_prob=-1000.0)
    peer = peers.torchaudio(network, by_length=False)(20)
    num_found = 0
    for length in (1, 5, 8):
        encoded = 2.0 * torch.randn(length, network.dim, generator=torch.Generator().manual_seed(length))
        best = decoder(encoded)[0]
        assert [symbols[column] for column in peer(encoded)] == [token.text for token in best.tokens]
        num_found += len(best.tokens)
    assert num_found > 3


def test_figures_are_those_of_one_beam(workload: EncodedWorkload) -> None:
    rows = [
        {"system": transducer.GREEDY, "beam": 1, "wer": 40.0, "rtf": 0.5},
        *({"system": "none", "beam": beam, "wer": 30.0 - beam, "rtf": 0.01 * beam} for beam in (1, 8, 16)),
        {"system": "GRU", "beam": 8, "wer": 12.34567, "rtf": 0.2},
        {"system": "torchaudio", "beam": 8, "wer": 23.0, "rtf": 0.32},
    ]
    found = transducer.summary(rows, workload, 8)
    assert found == {
        "data": "toy",
        "num_seconds": 0.54,
        "beam_size": 8,
        "wer_greedy": 40.0,
        "wer_beam": 22.0,
        "decoding_rtf": 0.08,
        "wer_ngram": None,
        "decoding_rtf_ngram": None,
        "wer_rnn": 12.3457,
        "decoding_rtf_rnn": 0.2,
        "wer_both": None,
        "decoding_rtf_both": None,
        "wer_torchaudio": 23.0,
        "time_over_torchaudio": 0.25,
    }
    assert transducer.words_of(workload.network.tokens, [0, 3, 2, 5, 4]) == ["AC", "B", "D"]


@pytest.mark.slow
def test_each_model_and_beam_is_measured(
    workload: EncodedWorkload, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Bundle.load(LIBRISPEECH_BUNDLE)
    monkeypatch.setattr(bundle, "small_ngram", uniform_ngram(["A", "BC", "BD"]))
    found = transducer.measure(bundle, workload, (1, 2), ("none", "trigram"))
    shown = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    ours = [["| none", "1"], ["| none", "2"], ["| trigram", "1"], ["| trigram", "2"]]
    assert [["| greedy", "1"], *ours] == [row for row in shown[2:] if "torchaudio" not in row[0]]
    assert found["beam_size"] == 8
    assert found["wer_greedy"] is not None
    found = transducer.measure(bundle, workload, (2,), ("trigram",))
    assert found["beam_size"] == 2
    assert found["wer_ngram"] is not None
    assert found["wer_beam"] is None


@pytest.mark.slow
def test_scales_are_tried(workload: EncodedWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.load(LIBRISPEECH_BUNDLE)
    monkeypatch.setattr(bundle, "small_ngram", uniform_ngram(["A", "BC", "BD"]))
    monkeypatch.setattr(transducer, "TRIED", ((0.5,), (0.0, 0.3), (0.0, 100.0)))
    rows = transducer.tune(bundle, workload, ("none", "trigram"))
    tried = [(row["lm_scale"], row["internal_lm_scale"], row["word_score"]) for row in rows]
    assert tried[:3] == [("default", "", ""), ("default", "", ""), (0.5, 0.0, 0.0)]
    assert tried[3:] == [(0.5, 0.0, 100.0), (0.5, 0.3, 0.0), (0.5, 0.3, 100.0)]
    assert rows[3]["wer"] > 200.0  # as many words as there is room for
    assert rows[2]["wer"] < 200.0


@pytest.mark.one_stack
@pytest.mark.slow
def test_quick_reads_what_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    assert transducer.main(["--quick", "--models", "none", "trigram"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["wer_ngram"] < found["wer_beam"] < 60.0
    with pytest.raises(AsrError, match="stored"):
        transducer.main(["--quick", "--tune"])
