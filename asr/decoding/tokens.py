"""Active tokens, which are the partial paths of a search, and the candidates that extend them over arcs.

Shapes: N streams, K tokens, A candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class ActiveTokens:
    """K partial paths. Those of a stream are adjacent.

    Args:
        stream: (K,) int64, the utterance that each belongs to.
        state: (K,) int64, graph state or lattice state.
        context_idx: (K,) int64, word history.
        score: (K,) float32, relative to the best of its stream; the stream's `score_offset` makes it absolute.
        lm_score: (K,) float64, the language model score of the path, unscaled.
        backpointer: (K,) int64, entry of the `Backtrace`, -1 at the start.
    """

    stream: Tensor
    state: Tensor
    context_idx: Tensor
    score: Tensor
    lm_score: Tensor
    backpointer: Tensor

    def __len__(self) -> int:
        return len(self.state)

    @staticmethod
    def empty(device: torch.device) -> ActiveTokens:
        """No tokens."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        return ActiveTokens(none, none, none, none.float(), none.double(), none)

    @staticmethod
    def initial(stream: Tensor, state: Tensor, context_idx: Tensor) -> ActiveTokens:
        """Paths that have read nothing yet, (K,) each."""
        zeros = torch.zeros_like(stream)
        return ActiveTokens(stream, state, context_idx, zeros.float(), zeros.double(), zeros - 1)

    def select(self, position: Tensor) -> ActiveTokens:
        """The tokens at these positions, in this order."""
        return ActiveTokens(*(getattr(self, field.name).index_select(0, position) for field in fields(self)))

    def split(self, sizes: list[int]) -> list[ActiveTokens]:
        """Splits the tokens into consecutive parts of these sizes."""
        columns = [getattr(self, field.name).split(sizes) for field in fields(self)]
        return [ActiveTokens(*parts) for parts in zip(*columns, strict=True)]

    @staticmethod
    def join(parts: list[ActiveTokens]) -> ActiveTokens:
        """Concatenates several sets."""
        if len(parts) == 1:
            return parts[0]
        return ActiveTokens(
            *(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(ActiveTokens))
        )


class Expansion(NamedTuple):
    """Tokens and the arcs that extend them.

    Attributes:
        source, arc, stream: (A,) int64, see `Candidates`.
        score: (A,) float32, relative to the stream's best, without the language model.
        is_complete: (N,) bool, see `Candidates`.
        with_words: ascending positions of those whose arcs have words; None if not computed yet.
    """

    source: Tensor
    arc: Tensor
    stream: Tensor
    score: Tensor
    is_complete: Tensor
    with_words: Tensor | None = None


@dataclass
class Candidates:
    """Tokens extended over arcs, before recombination.

    Args:
        source: (A,) int64, the token that is extended.
        arc: (A,) int64, the arc's position in its `ArcSet`.
        stream: (A,) int64.
        score: (A,) float32, relative to the stream's best.
        state: (A,) int64, the arc's destination.
        context_idx: (A,) int64, None without a language model.
        lm_score: (A,) float64, None without a language model.
        is_complete: (N,) bool, False if a candidate of the stream was left out that might have survived.
    """

    source: Tensor
    arc: Tensor
    stream: Tensor
    score: Tensor
    state: Tensor
    context_idx: Tensor | None
    lm_score: Tensor | None
    is_complete: Tensor


class Survivors(NamedTuple):
    """The outcome of recombination and pruning.

    Attributes:
        winner: (A,) int64, the position of the candidate that each lost to, or its own if it won.
        kept: (K',) int64, ascending positions of the winners that survive.
        is_complete: False if a candidate that was left out might have survived; then expand again with `prune=False`.
    """

    winner: Tensor
    kept: Tensor
    is_complete: bool


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
