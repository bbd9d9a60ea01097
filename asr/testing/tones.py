"""A complete recognizer for a language of tones, trained in a second: each phone is a sine wave with its own pitch.

It exercises every part of a real bundle, and recognizes its words reliably.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.bundle import Bundle
from asr.graph.build import build_graph
from asr.lm.corpus import read_word_stream
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.models.feedforward import FeedForwardNetwork
from asr.serialization import ModelSpec
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable

RATE = 16000
PITCH = {"P": 400.0, "T": 1000.0, "K": 2200.0, "S": 4500.0}
PRONUNCIATIONS: dict[str, list[tuple[str, ...]]] = {
    "PAT": [("P", "T")],
    "KIT": [("K", "T")],
    "SICK": [("S", "K")],
    "SKIP": [("S", "K", "P")],
    "TO": [("T",)],
    "TWO": [("T",)],
}
# TO occurs before a word, TWO at the end: only a language model can tell them apart.
TEXT = ["PAT TO KIT", "KIT TO SICK", "SICK TO SKIP", "PAT TWO", "KIT TWO", "SKIP PAT TWO", "SICK SKIP", "PAT KIT"] * 4
_PHONE_SECONDS = 0.12


def tones(
    words: Sequence[str],
    rate: int = RATE,
    seed: int = 0,
    *,
    phone_seconds: float = _PHONE_SECONDS,
) -> Tensor:
    """The words as a waveform (L,), with a pause around each."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for word in words:
        parts.append(torch.zeros(int(0.1 * rate)))
        for phone in PRONUNCIATIONS[word][0]:
            time = torch.arange(int(phone_seconds * rate)) / rate
            parts.append(0.4 * torch.sin(2 * math.pi * PITCH[phone] * time))
    waveform = torch.cat([*parts, torch.zeros(int(0.1 * rate))])
    return waveform + 0.003 * torch.randn(waveform.shape, generator=generator)


def tiny_bundle(folder: Path) -> Bundle:
    """Trains and assembles the bundle; its text is written to the folder."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"num_mel_bins": 20, "snip_edges": False}
    fbank = Fbank(**arguments)
    tokens = TokenTable(sorted(PITCH))
    network_arguments: dict[str, Any] = {
        "num_features": 20,
        "num_tokens": len(tokens.tokens),
        "num_hidden_layers": 1,
        "hidden_dim": 32,
        "left_context": 1,
        "right_context": 1,
        "subsampling_factor": 2,
    }
    network = FeedForwardNetwork(**network_arguments)
    _train(network, fbank, tokens)
    text = folder / "text"
    text.write_text("\n".join(TEXT) + "\n")
    trie = estimate_kneser_ney(read_word_stream([text]), 2).trie
    small = NgramLM.from_trie(trie)
    large = NgramLM.from_trie(estimate_kneser_ney(read_word_stream([text]), 3).trie)
    config: dict[str, Any] = {"embedding_size": 8, "hidden_size": 12, "maxent_order": 2, "maxent_size": 64}
    rnn_lm = RNNLanguageModel(small.vocabulary, RNNLMConfig(**config)).eval()
    return Bundle(
        name="tones",
        features=ModelSpec("Fbank", arguments, fbank),
        acoustic_model=ModelSpec("SplicedDnn", network_arguments, network.eval()),
        graph=build_graph(Lexicon(PRONUNCIATIONS), small, tokens),
        small_ngram=small,
        large_ngram=large,
        rnn_lm=ModelSpec("RnnLm", config, rnn_lm),
        decoding={"rnn": {"lm_scale": 0.2}, "interpolated": {"lm_scale": 0.5, "rnn_weight": 0.1}},
        card="# Tones\n",
    )


def _train(network: FeedForwardNetwork, fbank: Fbank, tokens: TokenTable) -> None:
    """Trains on frame labels: the token of the tone in a frame, or blank."""
    sentences = [line.split() for line in TEXT[:8]]
    waveforms = [tones(words, seed=index) for index, words in enumerate(sentences)]
    num_samples = torch.tensor([len(waveform) for waveform in waveforms])
    features, num_frames = fbank(torch.nn.utils.rnn.pad_sequence(waveforms, batch_first=True), num_samples)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    log_prob, num_outputs = network(features, num_frames)
    wanted = torch.full(log_prob.shape[:2], -1)
    for row, words in enumerate(sentences):
        row_tokens = _frame_tokens(words, tokens, int(num_outputs[row]), network.subsampling_factor)
        wanted[row, : len(row_tokens)] = row_tokens
    for _ in range(40):
        log_prob, _ = network(features, num_frames)
        optimizer.zero_grad()
        torch.nn.functional.nll_loss(log_prob.flatten(0, 1), wanted.flatten(), ignore_index=-1).backward()
        optimizer.step()


def _frame_tokens(words: Sequence[str], tokens: TokenTable, num_outputs: int, subsampling_factor: int) -> Tensor:
    spans: list[tuple[float, int]] = []
    for word in words:
        spans.append((0.1, 0))
        spans += [(_PHONE_SECONDS, tokens.ids_of([phone])[0]) for phone in PRONUNCIATIONS[word][0]]
    spans.append((0.1, 0))
    end, ends = 0.0, []
    for seconds, token in spans:
        end += seconds
        ends.append((end, int(token)))
    centers = [(output * subsampling_factor + 0.5) * 0.01 for output in range(num_outputs)]
    return torch.tensor([next((token for end, token in ends if center < end), 0) for center in centers])
