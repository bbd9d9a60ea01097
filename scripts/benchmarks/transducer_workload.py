"""Utterances for the benchmark of decoders of transducers: what the small transducer hears, some of which is stored.

Shapes: N utterances, L samples, T frames, K hypotheses, C tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asr.bundle import Bundle
from asr.ctc import CTCTokens
from asr.errors import AsrError
from asr.models.transducers.base import State, Transducer
from scripts.benchmarks.ctc_networks import HELD_OUT, held_posteriors
from scripts.benchmarks.ctc_posteriors import RATE, PhonePosteriors, phone_posteriors
from scripts.benchmarks.inputs import required_corpora
from scripts.benchmarks.speech import recordings
from scripts.benchmarks.transducer_network import (
    CONTEXT,
    FRAME_SHIFT,
    Network,
    TokenNetworks,
    encoded_of,
    trained_transducer,
)

RECORDED = Path(__file__).with_name("transducer_frames.safetensors")
NUM_KEPT = 8
Encode = Callable[[Tensor], Tensor]
"""Samples (L,) -> encoded (T, WIDTH)."""


class SmallTransducer(Transducer):
    """The small transducer as decoders see it.

    Args:
        tokens: its columns.
        networks: the prediction and the joint network.
        encode_one: the encoder; None for networks that are stored without it.
    """

    name, sampling_rate, frame_shift = "small transducer", RATE, FRAME_SHIFT

    def __init__(self, tokens: CTCTokens, networks: TokenNetworks, encode_one: Encode | None = None) -> None:
        self.tokens = tokens
        self.networks = networks.eval().requires_grad_(False)
        self._encode_one = encode_one

    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        if self._encode_one is None:
            raise AsrError(
                "this transducer is stored without its encoder; `scripts/bench transducer` without --quick trains one."
            )
        rows = [self._encode_one(own[:length]) for own, length in zip(waveform, num_samples.tolist(), strict=True)]
        return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])

    def start(self) -> tuple[Tensor, State]:
        first = torch.full((1, CONTEXT), self.tokens.blank_id)
        return self.networks.predict(first)[:, 0], (first,)

    def predict(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        last = torch.cat((state[0][:, 1:], token[:, None]), dim=1)
        return self.networks.predict(last)[:, 0], (last,)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        return self.networks.join(encoded, predicted)


@dataclass(frozen=True)
class EncodedWorkload:
    """Utterances.

    Args:
        name: where they are from.
        network: the one whose encoder has heard them.
        encoded: (T, WIDTH) of each.
        references: its words.
    """

    name: str
    network: Any
    encoded: list[Tensor]
    references: list[list[str]]

    def first(self, num_utts: int) -> EncodedWorkload:
        """The same with fewer utterances."""
        return replace(self, encoded=self.encoded[:num_utts], references=self.references[:num_utts])

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """All utterances, (N, T, WIDTH), and their frames (N,)."""
        return pad_sequence(self.encoded, batch_first=True), torch.tensor([len(own) for own in self.encoded])

    @property
    def num_seconds(self) -> float:
        return FRAME_SHIFT * sum(map(len, self.encoded))


def heard(bundle: Bundle, tokens: CTCTokens, corpora: Path | None, num_utts: int) -> EncodedWorkload:
    """Utterances of dev-clean-2; the network is trained on the first call."""
    transducer, network = _loaded(bundle, tokens, corpora)
    name, speech = recordings(corpora, num_utts)
    encoded = encoded_of(network, phone_posteriors(bundle, speech))
    return EncodedWorkload(name, transducer, encoded, [list(one.words) for one in speech])


def heard_held(bundle: Bundle, tokens: CTCTokens, corpora: Path | None) -> EncodedWorkload:
    """The same for the recordings of the held-out speakers on which scales are chosen."""
    transducer, network = _loaded(bundle, tokens, corpora)
    posteriors, references = held_posteriors(bundle, required_corpora(corpora))
    return EncodedWorkload(" and ".join(HELD_OUT), transducer, encoded_of(network, posteriors), references)


def _loaded(bundle: Bundle, tokens: CTCTokens, corpora: Path | None) -> tuple[SmallTransducer, Network]:
    network, posteriors = trained_transducer(bundle, tokens, corpora), PhonePosteriors(bundle)

    def encode_one(waveform: Tensor) -> Tensor:
        return encoded_of(network, posteriors([waveform]))[0]

    return SmallTransducer(tokens, network.of_tokens, encode_one), network


def write(workload: EncodedWorkload, path: Path) -> None:
    """Keeps the first utterances and the networks without the encoder, in half precision."""
    kept = workload.first(NUM_KEPT)
    tensors = {name: weight.half() for name, weight in kept.network.networks.state_dict().items()}
    described = {
        "name": kept.name,
        "symbols": list(kept.network.tokens.symbols),
        "lengths": list(map(len, kept.encoded)),
        "references": kept.references,
    }
    save_file({**tensors, "encoded": torch.cat(kept.encoded).half()}, path, {"workload": json.dumps(described)})


def read(path: Path) -> EncodedWorkload:
    """What `write` has kept."""
    with safe_open(path, "pt") as stored:
        of = json.loads(stored.metadata()["workload"])
        tensors = {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118
    encoded = tensors.pop("encoded").split(of["lengths"])
    networks = TokenNetworks(len(of["symbols"]))
    networks.load_state_dict(tensors)
    transducer = SmallTransducer(CTCTokens(of["symbols"], kind="pieces"), networks)
    return EncodedWorkload(of["name"], transducer, list(encoded), of["references"])
