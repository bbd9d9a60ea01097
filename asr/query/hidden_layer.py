"""Runs a network's hidden layer where it lies: on the home device, on another one, or on several workers.

Shapes: R rows, S state width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.contract import StatefulNetwork, branched
from asr.query.statistics import QueryStatistics

BATCHINGS = ("frame", "query")


class HiddenLayer:
    """All rows of a call go out in one block, and come back in one.

    Args:
        networks: whose `step` is run, each on the device of its own initial state; the rows of a call are divided among
            them. The same network twice is two workers (threads) that share it.
        home: the device that rows come from and go back to.
        batching: "frame", all rows of a call in one run, or "query", one row a run (for the papers' comparison).
        statistics: where runs, blocks and seconds are counted.
    """

    def __init__(
        self, networks: Sequence[StatefulNetwork], home: torch.device, batching: str, statistics: QueryStatistics
    ) -> None:
        if batching not in BATCHINGS:
            raise AsrError(f"batching: {batching!r} is not one of {', '.join(BATCHINGS)}; choose one of these.")
        self.networks = list(networks)
        self.home = home
        self.batching = batching
        self.statistics = statistics
        self._devices = [network.initial_state().device for network in self.networks]
        self._workers = ThreadPoolExecutor(len(self.networks)) if len(self.networks) > 1 else None
        is_at_home = self._workers is None and batching == "frame" and self._devices[0] == home
        # On a GPU it costs a round trip to find equal states.
        self.branches = is_at_home and home.type == "cpu" and hasattr(self.networks[0], "branch")

    def step(self, state: Tensor, word_id: Tensor, before: Tensor | None = None) -> Tensor:
        """state (R, S), word_id (R,) on the home device -> next state (R, S) on the home device.

        With before (R,), which only a layer that `branches` takes, row r follows state[before[r]] of fewer states.
        """
        begin = time.perf_counter()
        num_rows = word_id.numel()
        if before is not None:
            with torch.no_grad():
                parts = [branched(self.networks[0], state, before, word_id)]
        elif self.batching == "query":
            parts = [self._run(0, *row) for row in zip(state.split(1), word_id.split(1), strict=True)]
        elif self._workers is None or num_rows < 2 * len(self.networks):
            parts = [self._run(0, state, word_id)]
        else:
            pieces = zip(state.chunk(len(self.networks)), word_id.chunk(len(self.networks)), strict=True)
            parts = list(self._workers.map(lambda item: self._run(item[0], *item[1]), enumerate(pieces)))
        counts = self.statistics
        counts.num_hidden_rows += num_rows
        counts.num_hidden_calls += len(parts)
        counts.largest_hidden_batch = max(counts.largest_hidden_batch, *(len(part) for part in parts))
        counts.seconds_hidden += time.perf_counter() - begin
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, worker: int, state: Tensor, word_id: Tensor) -> Tensor:
        network, device = self.networks[worker], self._devices[worker]
        with torch.no_grad():  # the mode is a thread's own
            if device == self.home:
                return network.step(state, word_id)
            block = _packed(state, word_id).to(device)
            back = network.step(*_unpacked(block)).to(self.home)
        self.statistics.num_transfers += 2
        self.statistics.bytes_moved += 4 * (block.numel() + back.numel())
        return back


def _packed(state: Tensor, word_id: Tensor) -> Tensor:
    """state (R, S) float32, word_id (R,) -> one block (R, S + 1), the words' bits in its last column."""
    return torch.cat((state, word_id.int().view(torch.float32).unsqueeze(1)), dim=1)


def _unpacked(block: Tensor) -> tuple[Tensor, Tensor]:
    return block[:, :-1], block[:, -1].contiguous().view(torch.int32).long()
