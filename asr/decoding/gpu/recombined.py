"""The second half of a frame in room of a fixed size: which candidates win, and where each stream is cut off.

Shapes: A room for candidates, N room for streams, M slots.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from asr.decoding.gpu import recombination, selection
from asr.decoding.gpu.limits import FrameLimits


class Recombined:
    """Room for what is found out about candidates, and the kernels that do. Nothing here waits for the device.

    Args:
        limits: beams.
        num_candidates: A.
        num_streams: N.
        device: where.
    """

    def __init__(self, limits: FrameLimits, num_candidates: int, num_streams: int, device: torch.device) -> None:
        self._limits = limits
        self.num_candidates, self.num_streams = num_candidates, num_streams
        num_slots = 1 << max(4, (2 * num_candidates - 1).bit_length())
        self._owner = torch.full((num_slots,), recombination.EMPTY.value, dtype=torch.int32, device=device)
        self._best = torch.full((num_slots,), recombination.UNBEATEN.value, dtype=torch.int64, device=device)
        self._slot = torch.zeros(num_candidates, dtype=torch.int32, device=device)
        self.winner = torch.zeros_like(self._slot)
        self.value = torch.zeros(num_candidates, device=device)
        self._by_stream = torch.zeros(3, num_streams, dtype=torch.int32, device=device)
        self.num_inside = self._by_stream[0]
        self.threshold = torch.zeros(num_streams, device=device)

    def run(
        self, stream: Tensor, state: Tensor, context_idx: Tensor | None, score: Tensor, num_candidates: Tensor
    ) -> None:
        """Fills winner (A,), value (A,), -inf for losers, num_inside (N,) and threshold (N,).

        Args:
            stream, state, context_idx, score: (A,), streams ascending.
            num_candidates: (1,) int64, how many there are.
        """
        limits = self._limits
        block, grid = limits.block, (triton.cdiv(self.num_candidates, limits.block),)
        counted = (num_candidates, self.num_candidates)
        self._by_stream.zero_()
        recombination.enter[grid](
            *(stream, state, state if context_idx is None else context_idx, score),
            *(*counted, self._owner, self._best, self._slot, len(self._owner) - 1),
            HAS_CONTEXT=context_idx is not None,
            B=block,
        )
        recombination.settle[grid](
            *(stream, score, *counted, self._best, self._slot, self.winner, self.value, *self._by_stream),
            limits.beam,
            B=block,
        )
        selection.cut_off[self.num_streams,](
            *(self.value, *self._by_stream[1:], self.num_inside, self.threshold),
            *(limits.beam, limits.min_active, limits.max_active),
            B=limits.selection_block,
        )
        recombination.leave[grid](*counted, self._owner, self._best, self._slot, B=block)
