"""The partial paths that a search keeps alive, and what they become over arcs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class ActiveTokens:
    """K partial paths.

    Args:
        stream: (K,) int64, the utterance it belongs to.
        state: (K,) int64, graph state or lattice state.
        context_idx: (K,) int64, word history.
        score: (K,) float32, relative to the best of its stream.
        lm_score: (K,) float64, the language model's share of the path, unscaled.
        record: (K,) int64, back-pointer, -1 at the start.
    """

    stream: Tensor
    state: Tensor
    context_idx: Tensor
    score: Tensor
    lm_score: Tensor
    record: Tensor

    def __len__(self) -> int:
        return len(self.state)

    @staticmethod
    def none(device: torch.device) -> ActiveTokens:
        """An empty set."""
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return ActiveTokens(empty, empty, empty, empty.float(), empty.double(), empty)

    @staticmethod
    def starting(stream: Tensor, state: Tensor, context_idx: Tensor) -> ActiveTokens:
        """Paths that have read nothing yet."""
        zeros = torch.zeros_like(stream)
        return ActiveTokens(stream, state, context_idx, zeros.float(), zeros.double(), zeros - 1)

    def select(self, position: Tensor) -> ActiveTokens:
        """Some of them, in the order given."""
        return ActiveTokens(*(getattr(self, field.name).index_select(0, position) for field in fields(self)))

    def by_stream(self, num_streams: int) -> tuple[Tensor, ...]:
        """The positions of those of each stream, in their order."""
        order = torch.sort(self.stream, stable=True).indices
        return order.split(torch.bincount(self.stream, minlength=num_streams).tolist())

    @staticmethod
    def join(parts: list[ActiveTokens]) -> ActiveTokens:
        """All of several sets, in order."""
        if len(parts) == 1:
            return parts[0]
        return ActiveTokens(
            *(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(ActiveTokens))
        )


@dataclass
class Candidates:
    """What partial paths become over arcs, before recombination.

    Args:
        source: (A,) the path that goes on.
        arc: (A,) the arc in its set.
        stream: (A,) int64.
        score: (A,) float32, relative to the stream's best.
        state: (A,) int64, where the arc leads.
        context_idx: (A,) int64 and
        lm_score: (A,) float64, both None without a language model.
    """

    source: Tensor
    arc: Tensor
    stream: Tensor
    score: Tensor
    state: Tensor
    context_idx: Tensor | None
    lm_score: Tensor | None


def expand(arc_begin: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Lists all arcs that leave the states of some tokens, by prefix sums.

    Args:
        arc_begin: (S + 1,) int64, arcs of state s are arc_begin[s] to arc_begin[s + 1].
        state: (K,) int64.

    Returns:
        source (A,) the token, and arc (A,) the arc, in token order; both int64.
    """
    begin = arc_begin.index_select(0, state)
    num_arcs = arc_begin.index_select(0, state + 1) - begin
    end = num_arcs.cumsum(0)
    total = int(end[-1]) if len(end) else 0
    source = torch.repeat_interleave(num_arcs, output_size=total)
    arc = (begin - end + num_arcs).index_select(0, source)
    arc += torch.arange(total, device=state.device)
    return source, arc
