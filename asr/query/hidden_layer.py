"""Runs a network's hidden layer where it lies: on the home device, on another one, or on several workers.

Shapes: R rows, S state width.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.contract import StatefulNetwork, branched
from asr.query.stage_clock import StageClock
from asr.query.statistics import QueryStatistics

BATCHINGS = ("frame", "query")


class _Run(NamedTuple):
    """What one run of a network came to: the next states (R, S) at home, and what it took to send rows to and fro."""

    state: Tensor
    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class HiddenLayer:
    """All rows of a call go out in one block, and come back in one.

    Args:
        networks: whose `step` is run, each on the device of its own initial state; the rows of a call are divided among
            them. The same network twice is two workers (threads) that share it.
        home: the device that rows come from and go back to.
        batching: "frame", all rows of a call in one run, or "query", one row a run (for the papers' comparison).
        statistics: where runs, blocks and seconds are counted.
        clock: what seconds are read from.
    """

    def __init__(
        self,
        networks: Sequence[StatefulNetwork],
        home: torch.device,
        batching: str,
        statistics: QueryStatistics,
        clock: StageClock,
    ) -> None:
        if batching not in BATCHINGS:
            raise AsrError(f"batching: {batching!r} is not one of {', '.join(BATCHINGS)}; choose one of these.")
        self.networks = list(networks)
        self.home = home
        self.batching = batching
        self.statistics = statistics
        self.clock = clock
        self._devices = [network.initial_state().device for network in self.networks]
        self._workers = ThreadPoolExecutor(len(self.networks)) if len(self.networks) > 1 else None
        is_at_home = self._workers is None and batching == "frame" and self._devices[0] == home
        # On a GPU it costs a round trip to find equal states.
        self.branches = is_at_home and home.type == "cpu" and hasattr(self.networks[0], "branch")

    def step(self, state: Tensor, word_id: Tensor, before: Tensor | None = None) -> Tensor:
        """state (R, S), word_id (R,) on the home device -> next state (R, S) on the home device.

        With before (R,), which only a layer that `branches` takes, row r follows state[before[r]] of fewer states.
        """
        begin = self.clock.now()
        num_rows = word_id.numel()
        if before is not None:
            with torch.no_grad():
                runs = [_Run(branched(self.networks[0], state, before, word_id))]
        elif self.batching == "query":
            runs = [self._run(0, *row) for row in zip(state.split(1), word_id.split(1), strict=True)]
        elif self._workers is None or num_rows < 2 * len(self.networks):
            runs = [self._run(0, state, word_id)]
        else:
            pieces = zip(state.chunk(len(self.networks)), word_id.chunk(len(self.networks)), strict=True)
            runs = list(self._workers.map(lambda item: self._run(item[0], *item[1]), enumerate(pieces)))
        counts = self.statistics
        counts.num_hidden_rows += num_rows
        counts.num_hidden_calls += len(runs)
        for run in runs:
            counts.largest_hidden_batch = max(counts.largest_hidden_batch, len(run.state))
            counts.num_transfers += run.num_blocks
            counts.bytes_moved += run.num_bytes
            counts.seconds_transfer += run.seconds
        counts.seconds_hidden += self.clock.now() - begin
        return runs[0].state if len(runs) == 1 else torch.cat([run.state for run in runs])

    def _run(self, worker: int, state: Tensor, word_id: Tensor) -> _Run:
        network, device = self.networks[worker], self._devices[worker]
        with torch.no_grad():  # the mode is a thread's own
            if device == self.home:
                return _Run(network.step(state, word_id))
            begin = self.clock.now()
            block = _packed(state, word_id).to(device)
            arrived = self.clock.now()
            following = network.step(*_unpacked(block))
            leaves = self.clock.now()
            back = following.to(self.home)
            seconds = self.clock.now() - leaves + arrived - begin
        return _Run(back, 2, 4 * (block.numel() + back.numel()), seconds)


def _packed(state: Tensor, word_id: Tensor) -> Tensor:
    """state (R, S) float32, word_id (R,) -> one block (R, S + 1), the words' bits in its last column."""
    return torch.cat((state, word_id.int().view(torch.float32).unsqueeze(1)), dim=1)


def _unpacked(block: Tensor) -> tuple[Tensor, Tensor]:
    return block[:, :-1], block[:, -1].contiguous().view(torch.int32).long()
