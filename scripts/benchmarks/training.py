"""Training of the benchmarks' small networks in rounds, which goes on where it was interrupted."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from asr.serialization import atomic_path
from asr.torch_archive import load_tensors
from scripts.benchmarks.ctc_networks import SCALES, Example
from scripts.benchmarks.ctc_posteriors import FLOOR
from scripts.benchmarks.inputs import with_progress

_LARGEST_NORM = 5.0
Examples = Callable[[random.Random], Iterator[list[Example]]]
"""Batches that depend only on the generator, a new one for each round."""


@dataclass(frozen=True)
class Schedule:
    """How long training lasts, and its learning rate: half a cosine that falls to zero, after a linear warm-up.

    Args:
        num_rounds: after each of which a checkpoint is written.
        num_steps: of a round.
        peak_lr: the learning rate that the cosine begins with.
        num_warm_up: steps of warm-up.
    """

    num_rounds: int
    num_steps: int
    peak_lr: float
    num_warm_up: int

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted over all rounds."""
        warm_up = min(1.0, (step + 1) / self.num_warm_up)
        return self.peak_lr * warm_up * 0.5 * (1.0 + math.cos(math.pi * step / (self.num_rounds * self.num_steps)))


def train_in_rounds(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[list[Tensor], Sequence[Tensor]], Tensor],
    examples: Examples,
    schedule: Schedule,
    checkpoint: Path,
    name: str,
) -> None:
    """Trains a network from its present weights, or from the checkpoint if it exists.

    Args:
        network: the part that is trained.
        optimizer: of its weights.
        loss_of: the loss of a batch: log posteriors (T, 1 + 2 P), scaled at random, and tokens (U,) of each utterance.
        examples: see `Examples`.
        schedule: rounds and learning rates.
        checkpoint: written after each round.
        name: of the network, for messages.
    """
    num_done = 0
    if checkpoint.is_file():
        stored = load_tensors(checkpoint)
        network.load_state_dict(stored["network"])
        optimizer.load_state_dict(stored["optimizer"])
        num_done = stored["num_done"]
    network.train()
    for number in with_progress(range(num_done, schedule.num_rounds), name):
        torch.manual_seed(number)
        draw = random.Random(number)
        batches = examples(draw)
        losses = []
        for step in range(number * schedule.num_steps, (number + 1) * schedule.num_steps):
            optimizer.param_groups[0]["lr"] = schedule.lr(step)
            own, targets = zip(*next(batches), strict=True)
            loss = loss_of([(each.float() * draw.uniform(*SCALES)).clamp(min=FLOOR) for each in own], targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), _LARGEST_NORM)
            optimizer.step()
            losses.append(loss.item())
        print(f"{name}: loss {sum(losses) / len(losses):.3f} in round {number + 1}", file=sys.stderr)
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "num_done": number + 1}
        with atomic_path(checkpoint) as written:
            torch.save(state, written)
