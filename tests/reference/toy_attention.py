"""A small attention-based encoder-decoder with random weights, and its scores of whole texts.

Shapes: T frames, E encoder dimensions, K hypotheses, C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.models.attention import AttentionModel
from asr.text.ctc_tokens import CTCTokens


class State(NamedTuple):
    """What K hypotheses have read: GRU states (K, E), and their encoded frames (K, T, E) and numbers of these (K,)."""

    hidden: Tensor
    encoded: Tensor
    num_frames: Tensor


class ToyAttention(AttentionModel):
    """A GRU of the tokens so far with dot-product attention; frames are samples, `dim` at a time.

    Args:
        symbols: its tokens, the end of the text among them as `<blk>`.
        dim: E.
        seed: of its weights.
        sharpness: factor of its logits.
        end_bias: added to the logit of the end.
        num_prompts: tokens of a prompt.
        no_speech: the probability that nobody speaks, (N,); None if it does not tell.
    """

    name = "toy"
    sampling_rate = 16000

    def __init__(
        self,
        symbols: Sequence[str],
        dim: int = 6,
        seed: int = 0,
        sharpness: float = 1.5,
        end_bias: float = 0.0,
        num_prompts: int = 1,
        no_speech: Tensor | None = None,
    ) -> None:
        self.tokens = CTCTokens(list(symbols), blank=list(symbols).index("<blk>"))
        self.frame_shift = dim / self.sampling_rate
        self.max_tokens = 4
        self.dim, self.num_prompts = dim, num_prompts
        generator = torch.Generator().manual_seed(seed)
        num = len(self.tokens)
        self.embedding = torch.randn(num, dim, generator=generator)
        self.gru = nn.GRUCell(dim, dim)
        self.output = nn.Linear(2 * dim, num)
        with torch.no_grad():
            for weight in [*self.gru.parameters(), *self.output.parameters()]:
                weight.copy_(torch.randn(weight.shape, generator=generator))
            self.output.weight *= sharpness
            self.output.bias[self.tokens.blank_id] += end_bias
        self.num_steps = 0
        self._no_speech = no_speech

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def to(self, device: torch.device) -> ToyAttention:
        self.embedding = self.embedding.to(device)
        self.gru.to(device)
        self.output.to(device)
        return self

    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        num_frames = num_samples // self.dim
        longest = int(num_frames.max())
        return waveform[:, : longest * self.dim].reshape(len(waveform), longest, self.dim), num_frames

    def prompt(self, encoded: Tensor, num_frames: Tensor) -> Tensor:
        return torch.full((len(encoded), self.num_prompts), 1, device=encoded.device)

    def start(self, encoded: Tensor, num_frames: Tensor, prompt: Tensor) -> tuple[Tensor, State]:
        state = State(encoded.new_zeros(len(encoded), self.dim), encoded, num_frames.to(encoded.device))
        logits = self._logits(state)
        for token in prompt.T:
            logits, state = self.step(token, torch.arange(len(encoded), device=encoded.device), state)
        return logits, state

    def step(self, token: Tensor, source: Tensor, state: State) -> tuple[Tensor, State]:
        self.num_steps += 1
        hidden = self.gru(self.embedding[token], state.hidden[source])
        state = State(hidden, state.encoded[source], state.num_frames[source])
        return self._logits(state), state

    def no_speech(self, state: State) -> Tensor | None:
        return self._no_speech

    def _logits(self, state: State) -> Tensor:
        weight = (state.encoded @ state.hidden.unsqueeze(2)).squeeze(2)
        is_used = torch.arange(weight.shape[1], device=weight.device) < state.num_frames.unsqueeze(1)
        weight = weight.masked_fill(~is_used, -torch.inf).softmax(1)
        heard = (weight.unsqueeze(1) @ state.encoded).squeeze(1)
        return self.output(torch.tanh(torch.cat([state.hidden, heard], 1)))


@torch.no_grad()
def text_score(model: ToyAttention, encoded: Tensor, columns: Sequence[int]) -> float:
    """log P(columns, end | encoded (T, E)), token by token."""
    num_frames = torch.tensor([len(encoded)])
    logits, state = model.start(encoded[None], num_frames, model.prompt(encoded[None], num_frames))
    score = 0.0
    for column in [*columns, model.tokens.blank_id]:
        score += float(logits.log_softmax(1)[0, column])
        logits, state = model.step(torch.tensor([column]), torch.tensor([0]), state)
    return score


def internal_score(model: ToyAttention, columns: Sequence[int]) -> float:
    """The score of a text without audio."""
    return text_score(model, torch.zeros(1, model.dim), columns)
