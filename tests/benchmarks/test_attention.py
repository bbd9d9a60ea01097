"""The benchmark of decoders of attention models: the small network, and the one beside transformers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asr.attention import AttentionDecoder
from asr.bundle import Bundle
from asr.ctc import CTCTokens
from scripts.benchmarks import attention, attention_network
from scripts.benchmarks.attention_network import Decoder, SmallAttention
from scripts.benchmarks.ctc_networks import WIDTH, Example, Readout
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE
from scripts.benchmarks.training import Schedule
from scripts.benchmarks.transducer import ours, run
from scripts.benchmarks.transducer_network import Encoder
from scripts.benchmarks.transducer_workload import EncodedWorkload

TOKENS = CTCTokens(["<blk>", "▁A", "B", "▁C", "D"])
LENGTHS = torch.tensor([9, 5])


@pytest.fixture
def network() -> SmallAttention:
    torch.manual_seed(0)
    return SmallAttention(TOKENS, Decoder(len(TOKENS)), lambda waveform: waveform[:, None].expand(-1, WIDTH))


@pytest.fixture
def encoded() -> Tensor:
    return torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_steps_are_those_of_training(network: SmallAttention, encoded: Tensor) -> None:
    targets = [torch.tensor([1, 2, 3, 4]), torch.tensor([3, 1, 1, 2])]
    mask = torch.arange(9) < LENGTHS[:, None]
    decoder = network.decoder
    read = torch.stack([torch.cat([torch.tensor([0]), own]) for own in targets])
    wanted, _ = decoder(read, decoder.empty(2), decoder.read_frames(encoded), mask)
    logits, state = network.start(encoded, LENGTHS, network.prompt(encoded, LENGTHS))
    for number, tokens in enumerate(torch.stack(targets, 1)):
        assert torch.allclose(logits, wanted[:, number], atol=1e-5)
        logits, state = network.step(tokens, torch.arange(2), state)
    assert torch.allclose(logits, wanted[:, -1], atol=1e-5)
    swapped, _ = network.step(torch.tensor([1, 1]), torch.tensor([1, 0]), state)
    straight, _ = network.step(torch.tensor([1, 1]), torch.tensor([0, 1]), state)
    assert torch.allclose(swapped, straight.flip(0), atol=1e-5)
    alone, _ = network.start(encoded[1:, :5], LENGTHS[1:], torch.tensor([[0]]))
    both, _ = network.start(encoded, LENGTHS, torch.tensor([[0], [0]]))
    assert torch.allclose(both[1], alone[0], atol=1e-5)


def test_the_loss_is_that_of_each_token(network: SmallAttention, encoded: Tensor) -> None:
    targets = [torch.tensor([1, 2, 3, 4]), torch.tensor([3])]
    found = network.decoder.loss(encoded, LENGTHS, targets, 0)
    losses = []
    for own, frames, length in zip(targets, encoded, LENGTHS, strict=True):
        logits, state = network.start(frames[None, :length], length[None], torch.tensor([[0]]))
        for token in [*own, torch.tensor(0)]:
            log_prob = logits[0].log_softmax(0)
            losses.append(-(0.9 * log_prob[token] + 0.1 * log_prob.mean()))
            logits, state = network.step(token[None], torch.tensor([0]), state)
    assert found.item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-4)


def test_interrupted_training_goes_on(tmp_path: Path) -> None:
    def examples(draw: random.Random) -> Iterator[list[Example]]:
        for _ in itertools.count():
            yield [(-draw.random() * torch.rand(12, 7), torch.tensor([1, 2, 3])) for _ in range(2)]

    def trained(checkpoint: Path, num_rounds: int) -> Decoder:
        torch.manual_seed(3)
        encoder, decoder = Encoder(Readout(7, len(TOKENS))).eval().requires_grad_(False), Decoder(len(TOKENS))
        batches = examples
        if num_rounds < 3:
            rounds = iter(range(num_rounds))

            def batches(draw: random.Random) -> Iterator[list[Example]]:
                if next(rounds, None) is None:
                    raise KeyboardInterrupt
                return examples(draw)

        attention_network.optimize(encoder, decoder, 0, batches, checkpoint, Schedule(3, 2, 1e-3, 400))
        return decoder

    whole = trained(tmp_path / "whole.pt", 3)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts.pt", 1)
    parts = trained(tmp_path / "parts.pt", 3)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


def test_each_model_and_beam_is_measured(network: SmallAttention, encoded: Tensor) -> None:
    workload = EncodedWorkload("toy", network, [encoded[0], encoded[1, :5]], [["A", "CD"], ["AB"]])
    (system,) = ours(Bundle.load(LIBRISPEECH_BUNDLE), network, [2], ["none"])
    row = run(system, workload)
    assert row["wer"] >= 0.0
    assert row["rtf"] > 0.0 and row["rtf_batch"] > 0.0


@pytest.mark.slow
def test_both_searches_write_as_many_tokens() -> None:
    pytest.importorskip("transformers")
    model = attention.random_whisper()
    model.max_tokens = 3
    assert len(model.tokens) == attention.NUM_PIECES
    encoded = model(torch.zeros(8000))
    (found,) = AttentionDecoder(model, beam_size=2, token_min_log_prob=-1e9)(*encoded)[0]
    assert len(found.tokens) == 3
