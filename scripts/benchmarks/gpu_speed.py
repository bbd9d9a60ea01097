"""For `scripts/gpu_check`: speed of language-model queries, and of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.lm.rnn.data import TokenBatch, TokenStreams
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.optim import AdamWithSparseRows
from asr.text.symbols import Vocabulary
from scripts.benchmarks.clock import waiting_clock
from scripts.benchmarks.inputs import ROOT
from scripts.benchmarks.query_stream import QueryStream, load_streams
from scripts.benchmarks.query_tables import placement, throughput_of_one_engine
from scripts.benchmarks.query_workload import random_network

_STREAMS = ROOT / "tests/assets/query_streams.npz.xz"


def recorded_streams(num_streams: int | None = None, num_calls: int | None = None) -> list[QueryStream]:
    """The first of the recorded query streams, and the first calls of each; None takes all."""
    streams = load_streams(_STREAMS)[:num_streams]
    if num_calls is None:
        return streams
    return [
        replace(one, query=one.query[: int(one.call_begin[num_calls])], call_begin=one.call_begin[: num_calls + 1])
        for one in streams
    ]


@torch.no_grad()
def queries(
    device: torch.device,
    numbers: Sequence[int],
    hidden_size: int = 256,
    seconds: float = 2.0,
    streams: Sequence[QueryStream] | None = None,
) -> dict[str, float]:
    """Scores per second of a GRU, for each number of recorded query streams side by side, measured so long."""
    network = random_network("nce", hidden_size=hidden_size).to(device)
    rows = throughput_of_one_engine(network, streams or recorded_streams(), seconds, numbers)
    return {f"queries_per_s_{row['streams']}_streams": row["queries/s"] for row in rows}


@torch.no_grad()
def placements(
    device: torch.device, hidden_size: int = 256, streams: Sequence[QueryStream] | None = None
) -> list[dict[str, Any]]:
    """What each placement of search, hidden and output layer takes and moves, on the recorded streams or others.

    Raises:
        AssertionError: their scores differ.
    """
    rows = placement(random_network("nce", hidden_size=hidden_size), streams or recorded_streams(), device)
    difference = max(row["largest difference"] for row in rows)
    assert difference < 1e-3, f"log probabilities differ by up to {difference:.1e}"
    return rows


def training(device: torch.device, num_words: int, num_streams: int, num_steps: int) -> dict[str, float]:
    """Training words per second of a GRU 256 with noise-contrastive estimation and n-gram features."""
    network = RNNLanguageModel(_vocabulary(num_words), _gru())
    generator = torch.Generator().manual_seed(0)
    token_id = (num_words ** torch.rand(num_streams * 20 * (num_steps + 3), generator=generator)).long().clamp(4)
    token_id = token_id.clamp(max=num_words - 1)
    network.output.set_unigram(torch.bincount(token_id, minlength=num_words), reset_bias=True)
    network = network.to(device)
    optimizer = AdamWithSparseRows(network.parameters(), lr=1e-3)
    streams = TokenStreams(token_id.int().numpy(), num_streams, 20, network.num_history_words)
    states, begin, clock = None, 0.0, waiting_clock(device)
    for step in range(num_steps + 2):
        if step == 2:
            begin = clock()
        batch = _on(device, streams[step])
        loss, states = network(batch, states, torch.Generator().manual_seed(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    rate = round(num_streams * 20 * num_steps / (clock() - begin))
    print(f"{device.type:<5}training, GRU 256, {num_words} words, {num_streams} streams: {rate} words/s")
    return {f"training_words_per_s_{num_words}": rate}


def acoustic_training(
    folder: Path, device: torch.device, num_streams: int, num_frames: int, num_steps: int
) -> dict[str, float]:
    """Seconds of audio a second that a bundle's acoustic model learns from, by CTC over made-up frames and tokens."""
    bundle = Bundle.load(folder)
    network = bundle.acoustic_model.network.to(device).train()
    num_tokens, num_words = len(bundle.graph.tokens), 30
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_streams, num_frames, bundle.features.network.feature_dim, generator=generator).to(device)
    tokens = torch.randint(1, num_tokens, (num_streams, num_words), generator=generator).to(device)
    lengths = torch.full((num_streams,), num_frames, device=device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    clock, begin = waiting_clock(device), 0.0
    for step in range(num_steps + 2):
        if step == 2:
            begin = clock()
        log_prob, num_outputs = network(features, lengths)
        loss = torch.nn.functional.ctc_loss(
            log_prob.transpose(0, 1), tokens, num_outputs, torch.full_like(num_outputs, num_words)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    audio = num_steps * num_streams * num_frames * 0.01
    return {"acoustic_training_times_real_time": round(audio / (clock() - begin), 1)}


def training_agrees(folder: Path, device: torch.device) -> dict[str, Any]:
    """Loss and size of the gradients of a step of each model, on a device and on a CPU: `wrong` if they differ."""
    found: dict[str, Any] = {}
    for name, step in (("lm", _lm_step), ("am", partial(_am_step, folder))):
        theirs, ours = step(torch.device("cpu")), step(device)
        for kind, one, other in zip(("loss", "gradient"), ours, theirs, strict=True):
            difference = abs(one - other) / abs(other)
            found[f"{kind}_difference_{name}"] = float(f"{difference:.1e}")
            # TF32 has ten bits.
            if not difference < 0.01:
                return {**found, "wrong": f"{name}: {kind} {one}, {other} on a CPU"}
    return found


def _lm_step(device: torch.device) -> tuple[float, float]:
    torch.manual_seed(0)
    network = RNNLanguageModel(_vocabulary(500), _gru()).eval()
    token_id = torch.randint(4, 500, (8 * 40,), generator=torch.Generator().manual_seed(0))
    network.output.set_unigram(torch.bincount(token_id, minlength=500), reset_bias=True)
    network = network.to(device)
    batch = _on(device, TokenStreams(token_id.int().numpy(), 8, 20, network.num_history_words)[0])
    loss, _ = network(batch, None, torch.Generator().manual_seed(0))
    return _loss_and_gradient(network, loss)


def _on(device: torch.device, batch: TokenBatch) -> TokenBatch:
    return batch._replace(
        **{name: part.to(device) for name, part in batch._asdict().items() if isinstance(part, Tensor)}
    )


def _am_step(folder: Path, device: torch.device) -> tuple[float, float]:
    bundle = Bundle.load(folder)
    network, generator = bundle.acoustic_model.network.to(device).eval(), torch.Generator().manual_seed(0)
    features = torch.randn(2, 120, bundle.features.network.feature_dim, generator=generator)
    tokens = torch.randint(1, len(bundle.graph.tokens), (2, 5), generator=generator)
    log_prob, num_outputs = network(features.to(device), torch.tensor([120, 120], device=device))
    lengths = torch.full_like(num_outputs, 5)
    loss = torch.nn.functional.ctc_loss(log_prob.transpose(0, 1), tokens.to(device), num_outputs, lengths)
    return _loss_and_gradient(network, loss)


def _loss_and_gradient(network: torch.nn.Module, loss: Tensor) -> tuple[float, float]:
    loss.backward()
    gradients = [part.grad for part in network.parameters() if part.grad is not None]
    dense = [part.to_dense() if part.is_sparse else part for part in gradients]
    return float(loss.detach()), float(sum(float(part.double().square().sum()) for part in dense) ** 0.5)


def _vocabulary(num_words: int) -> Vocabulary:
    return Vocabulary(f"w{number}" for number in range(4, num_words))


def _gru() -> RNNLMConfig:
    return RNNLMConfig(embedding_size=256, hidden_size=256, maxent_order=3, maxent_size=1 << 20)
