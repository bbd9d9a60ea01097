"""A small transducer with random weights, and its scores by enumeration of all token sequences.

Shapes: T frames, E encoder dimensions, K hypotheses, C tokens, D durations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from asr.models.transducers import State, Transducer
from asr.text.ctc_tokens import CTCTokens


class ToyTransducer(Transducer):
    """A transducer that reads all previous tokens with a GRU; frames are samples, `dim` at a time.

    Args:
        symbols: its tokens, the blank anywhere.
        durations: for a token-and-duration transducer.
        dim: E.
        seed: of its weights.
        sharpness: factor of its logits.
        blank_bias: added to the logit of the blank.
    """

    name = "toy"
    sampling_rate = 16000

    def __init__(
        self,
        symbols: Sequence[str],
        durations: tuple[int, ...] = (),
        dim: int = 6,
        seed: int = 0,
        sharpness: float = 1.5,
        blank_bias: float = 0.0,
    ) -> None:
        self.tokens = CTCTokens(list(symbols))
        self.durations = durations
        self.frame_shift = dim / self.sampling_rate
        self.dim = dim
        generator = torch.Generator().manual_seed(seed)
        num = len(self.tokens)
        self.embedding = torch.randn(num, dim, generator=generator)
        self.gru = nn.GRUCell(dim, dim)
        self.joint = nn.Linear(dim, num + len(durations))
        with torch.no_grad():
            for weight in [*self.gru.parameters(), *self.joint.parameters()]:
                weight.copy_(torch.randn(weight.shape, generator=generator))
            self.joint.weight *= sharpness
            self.joint.bias[self.tokens.blank_id] += blank_bias
        # By token history, as a number.
        self.predicted: Counter[int] = Counter()

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def to(self, device: torch.device) -> ToyTransducer:
        self.embedding = self.embedding.to(device)
        self.gru.to(device)
        self.joint.to(device)
        return self

    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        num_frames = num_samples // self.dim
        longest = int(num_frames.max())
        return waveform[:, : longest * self.dim].reshape(len(waveform), longest, self.dim), num_frames

    def start(self) -> tuple[Tensor, State]:
        hidden = torch.zeros(1, self.dim, device=self.device)
        return hidden, (hidden, torch.ones(1, dtype=torch.int64, device=self.device))

    def predict(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        assert not bool((token == self.tokens.blank_id).any())
        hidden, history = self.gru(self.embedding[token], state[0]), 1_000_003 * state[1] + token
        self.predicted.update(history.tolist())
        return hidden, (hidden, history)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        return self.joint(torch.tanh(encoded + predicted))


class ToyReader:
    """What `StreamingToy` reads an utterance with."""

    def __init__(self, dim: int) -> None:
        self.dim, self.chunk_samples, self.held = dim, 4 * dim, torch.zeros(0)

    def accept(self, waveform: Tensor, is_last: bool = False) -> Tensor:
        self.held = torch.cat([self.held, waveform])
        num = len(self.held) // self.dim
        frames, self.held = self.held[: num * self.dim], self.held[num * self.dim :]
        return frames.reshape(num, self.dim)


class StreamingToy(ToyTransducer):
    """The same, whose encoder may also read chunks of four frames."""

    def stream(self) -> ToyReader:  # type: ignore[override]
        return ToyReader(self.dim)


@torch.no_grad()
def scores_of(network: Transducer, frame: Tensor, columns: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens (C,) and durations (D,) in a frame (E,) after some tokens."""
    output, state = network.start()
    for column in columns:
        output, state = network.predict(torch.tensor([column]), state)
    logits = network.join(frame.unsqueeze(0), output)[0]
    num = len(network.tokens)
    return logits[:num].log_softmax(0), logits[num:].log_softmax(0)


def internal_score(network: Transducer, dim: int, columns: Sequence[int]) -> float:
    """The score of tokens without audio, renormalized without the blank."""
    total = 0.0
    for place, column in enumerate(columns):
        output, state = network.start()
        with torch.no_grad():
            for before in columns[:place]:
                output, state = network.predict(torch.tensor([before]), state)
            logits = network.join(torch.zeros(1, dim), output)[0, : len(network.tokens)]
        logits[network.tokens.blank_id] = -torch.inf
        total += float(logits.log_softmax(0)[column])
    return total


def sum_over_paths(network: Transducer, encoded: Tensor, columns: Sequence[int], max_symbols: int) -> float:
    """The log of the sum of all paths of some tokens through frames (T, E), by recursion over (frame, tokens, step)."""
    num_frames, num = len(encoded), len(columns)
    blank = network.tokens.blank_id
    scores = [[scores_of(network, frame, columns[:after]) for after in range(num + 1)] for frame in encoded]
    longest = max(network.durations, default=1)
    sums = np.full((num_frames + longest + 1, num + 1, max_symbols + 1), -np.inf)
    sums[0, 0, 0] = 0.0
    for frame, after, step in itertools.product(range(num_frames), range(num + 1), range(max_symbols + 1)):
        # Within a frame, tokens come before steps: (after, step) leads to (after + 1, step + 1).
        own = sums[frame, after, step]
        token, duration = scores[frame][after]
        if own == -np.inf:
            continue

        def add(to_frame: int, to_after: int, to_step: int, score: float) -> None:
            sums[to_frame, to_after, to_step] = np.logaddexp(sums[to_frame, to_after, to_step], score)

        for place, advance in enumerate(network.durations or (1,)):
            extra = float(duration[place]) if network.durations else 0.0
            if advance > 0:
                add(frame + advance, after, 0, own + float(token[blank]) + extra)
        if after == num or step == max_symbols:
            continue
        emitted = own + float(token[columns[after]])
        if not network.durations:
            add(frame, after + 1, step + 1, emitted)
        for place, advance in enumerate(network.durations):
            extra = float(duration[place])
            add(frame + advance, after + 1, step + 1 if advance == 0 else 0, emitted + extra)
    return float(np.logaddexp.reduce(sums[num_frames:, num, :], axis=None))
