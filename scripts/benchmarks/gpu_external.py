"""Decoders of transducers and attention models with random networks of usual sizes: a device against the CPU.

Shapes: N utterances, L samples, T frames, E encoder dimensions, K hypotheses, C tokens.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asr.attention import AttentionDecoder
from asr.fusion.decoder import FusionDecoder
from asr.models.attention import AttentionModel
from asr.models.external.encoder import TorchEncoder
from asr.models.transducers import Transducer
from asr.models.transducers.base import State
from asr.text.ctc_tokens import CTCTokens
from asr.transducer import TransducerDecoder

LETTERS = ["<blk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
# By how much scores of the same text may differ.
_TOLERANCE = 0.02


class Sizes(NamedTuple):
    """Dimensions of the networks, the utterances of a batch, their frames, and how many are compared in part."""

    dim: int = 640
    num_utts: int = 64
    num_frames: int = 100
    num_compared: int = 4


class _Random(TorchEncoder):
    """Random networks, without an encoder that deserves the name."""

    sampling_rate, frame_shift = 16000, 0.04

    def __init__(self, dim: int) -> None:
        self.tokens = CTCTokens(LETTERS, blank=0)
        self.dim = dim
        torch.manual_seed(0)
        self.network = nn.ModuleDict(
            {
                "embed": nn.Embedding(len(LETTERS), dim),
                "gru": nn.GRUCell(dim, dim),
                "leave": nn.Linear(dim, len(LETTERS)),
            }
        ).requires_grad_(False)
        self.network["leave"].weight *= 6.0  # so that some tokens are sure

    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        num_frames = num_samples // 640
        frames = waveform[:, : 640 * int(num_frames.max())].unflatten(1, (-1, 640))[:, :, :1]
        return frames.expand(-1, -1, self.dim), num_frames

    def read(self, token: Tensor, hidden: Tensor) -> Tensor:
        return self.network["gru"](self.network["embed"](token), hidden)


class RandomTransducer(_Random, Transducer):
    """A prediction network with a GRU, and a joint network that adds."""

    name = "random transducer"

    def start(self) -> tuple[Tensor, State]:
        hidden = torch.zeros(1, self.dim, device=self.device)
        return hidden, (hidden,)

    def predict(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        hidden = self.read(token, state[0])
        return hidden, (hidden,)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        logits = self.network["leave"](torch.tanh(encoded + predicted))
        logits[:, 0] += 4.0
        return logits


class RandomAttention(_Random, AttentionModel):
    """A decoder with a GRU and dot-product attention."""

    name, max_tokens = "random attention model", 60

    def start(self, encoded: Tensor, num_frames: Tensor, prompt: Tensor) -> tuple[Tensor, Any]:
        mask = (torch.arange(encoded.shape[1]) < num_frames[:, None]).to(self.device)
        token = torch.zeros(len(encoded), dtype=torch.int64, device=self.device)
        state = encoded.new_zeros(len(encoded), self.dim), encoded, mask
        return self.step(token, torch.arange(len(encoded), device=self.device), state)

    def step(self, token: Tensor, source: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, encoded, mask = self.read(token, state[0][source]), state[1][source], state[2][source]
        fit = (encoded @ hidden[:, :, None]).squeeze(2).masked_fill(~mask, -torch.inf)
        heard = (fit.softmax(1)[:, None] @ encoded).squeeze(1)
        return self.network["leave"](torch.tanh(hidden + heard)), (hidden, encoded, mask)


@torch.no_grad()
def agreement(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Differences of scores, and milliseconds for a batch on the device, of both decoders; `wrong` if they disagree."""
    generator = torch.Generator().manual_seed(0)
    encoded = 0.5 * torch.randn(sizes.num_utts, sizes.num_frames, sizes.dim, generator=generator)
    lengths = torch.randint(sizes.num_frames // 2, sizes.num_frames + 1, (sizes.num_utts,), generator=generator)
    found: dict[str, Any] = {}
    for name, decoder_type, network_type in (
        ("transducer", TransducerDecoder, RandomTransducer),
        ("attention", AttentionDecoder, RandomAttention),
    ):

        def decoder_on(place: torch.device, make: Any = decoder_type, network: Any = network_type) -> FusionDecoder:
            return make(network(sizes.dim).to(place), internal_lm_scale=0.1, beam_size=4)  # type: ignore[no-any-return]

        few = encoded[: sizes.num_compared, : sizes.num_frames // 4], lengths[: sizes.num_compared] // 4
        expected = decoder_on(torch.device("cpu"))(*few)
        decoder, moved = decoder_on(device), encoded.to(device)
        results = decoder(few[0].to(device), few[1])
        begin = time.perf_counter()
        decoder(moved, lengths)
        found[f"{name}_ms"] = round(1000.0 * (time.perf_counter() - begin), 1)
        pairs = [(own[0], wanted[0]) for own, wanted in zip(results, expected, strict=True)]
        found[f"{name}_tokens"] = sum(len(own.tokens) for own, _ in pairs)
        found[f"{name}_difference"] = max(abs(own.score - wanted.score) for own, wanted in pairs)
        if found[f"{name}_difference"] > _TOLERANCE or not found[f"{name}_tokens"]:
            found["wrong"] = f"{name}: scores differ from a CPU's by up to {found[f'{name}_difference']:.3f}"
    return found
