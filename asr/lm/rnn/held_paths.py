"""What is known of tree paths, in tensors: the beginnings of paths that earlier queries of a history have gone.

Shapes: Q queries, L nodes of all their paths, O histories, K nodes held of each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGEST = math.log(1e30)
"""A float32 holds somewhat more."""


class HeldPaths:
    """The part of some paths that has to be computed, and the sums over their nodes.

    Args:
        query: the query of each node, path after path from the root down, (L,).
        column: of each node, its place in `held` where that is below K; the root's is 0, (L,).
        owner: the history of each query, (Q,).
        held: 1 / P(node | history), NaN where it is not known, (O, K) contiguous. `total` fills it.

    Attributes:
        rest: the nodes whose decisions are not known, (R,).
    """

    def __init__(self, query: Tensor, column: Tensor, owner: Tensor, held: Tensor) -> None:
        self._held = held.view(-1)
        num_held = held.shape[1]
        place = owner[query] * num_held + column
        is_held = column < num_held
        value = self._held[place.clamp(max=len(self._held) - 1)].masked_fill(~is_held, torch.nan)
        value = value.masked_fill(column == 0, 1.0)
        # Above a node that is known all are, so that their number says where to go on.
        num_known = torch.zeros_like(owner).index_add_(0, query, (~value.isnan()).long())
        length = torch.zeros_like(owner).index_add_(0, query, torch.ones_like(query))
        begin = length.cumsum(0) - length + num_known - 1
        at = torch.arange(len(query), device=query.device)
        self.rest = (at >= begin[query]).nonzero().squeeze(1)
        start = (at == begin[query]).nonzero().squeeze(1)
        self._known = held.new_zeros(len(owner)).index_add_(0, query[start], value[start].log())
        self._query = query[self.rest]
        # A decision leads to the node after it on the path.
        following = (self.rest + 1).clamp(max=max(len(query) - 1, 0))
        is_on_path = (following > self.rest) & (query[following] == self._query) & is_held[following]
        self._place = place[following]
        self._is_kept = is_on_path

    def total(self, against: Tensor) -> Tensor:
        """-log P of each decision of `rest` (R,) -> -log P of each path, (Q,)."""
        # In double precision: the sums run over all queries.
        sums = torch.zeros_like(self._known, dtype=torch.float64).index_add_(0, self._query, against.double())
        total = self._known + sums.float()
        before = sums.cumsum(0) - sums
        through = against.double().cumsum(0) - before[self._query] + self._known[self._query]
        kept = (self._is_kept & (through < _LARGEST)).nonzero().squeeze(1)
        self._held[self._place[kept]] = through[kept].exp().float()
        return total
