"""Contexts shared between histories that end in the same k words (recombination length k of four-caches).

Shapes: R new edges.


Hidden rows shared between near histories: where quantised previous state and word are equal (frame-batch).

Shapes: R rows, S state width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.hash_table import HashTable, first_of_each, segment_max
from asr.lm.cached.trie import HistoryTrie

CHOICES = ("first", "best")


class Recombination:
    """Gives new edges the node that stands for their last k words.

    Word sequences are compared by a 64-bit hash, so that two different ones are taken for equal once in 2**64 pairs.

    Args:
        length: k.
        choice: which history's hidden state stands for a node: that which came "first", or the "best" (highest
            log P(last word)) of those met within `window` calls; the latter takes the place of a row already computed.
    """

    def __init__(self, length: int, choice: str, window: int, device: torch.device) -> None:
        if length < 1:
            raise AsrError(f"recombination_length: {length} is too short; it must be 1 or more, or left out.")
        if choice not in CHOICES:
            raise AsrError(f"recombination: {choice!r} is not one of {', '.join(CHOICES)}; choose one of these.")
        self.length = length
        self.choice = choice
        self.window = window
        self.device = device
        generator = torch.Generator().manual_seed(1)
        self._factor = (torch.randint(-(2**62), 2**62, (length,), generator=generator) * 2 + 1).to(device)
        self.clear()

    def clear(self) -> None:
        self._table = HashTable(16, self.device)
        self._best_score = torch.empty(0, device=self.device)
        self._best_call = torch.empty(0, dtype=torch.int32, device=self.device)

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes + 8 * self._best_score.numel()

    def nodes(self, trie: HistoryTrie, context_idx: Tensor, word_id: Tensor) -> Tensor:
        """The node of each edge (R,): an old one, or a new one whose parent is the first context that led to it."""
        words = torch.cat((word_id.unsqueeze(1), trie.history(context_idx, self.length - 1)), dim=1)
        mixed = ((words + 1) * self._factor).sum(1)
        key = (mixed ^ (mixed >> 31)) & (2**63 - 1)
        slot, missing = self._table.find(key)
        if missing is not None:
            new, first = self._table.insert(key.index_select(0, missing))
            one = missing.index_select(0, first)
            self._table.values[new[first]] = trie.new_nodes(
                context_idx.index_select(0, one), word_id.index_select(0, one)
            )
            slot, _ = self._table.find(key)
        return self._table.values.index_select(0, slot)

    def better(self, node: Tensor, score: Tensor, call: int, num_nodes: int) -> Tensor:
        """Positions (B,) of the edges, one a node, that now stand for their node (R,) < num_nodes by score (R,)."""
        missing = num_nodes - self._best_score.numel()
        if missing > 0:
            self._best_score = torch.cat((self._best_score, torch.full((missing,), -torch.inf, device=self.device)))
            self._best_call = torch.cat((self._best_call, self._best_call.new_zeros(missing)))
        distinct, which = torch.unique(node, return_inverse=True)
        best = segment_max(score, which, distinct.numel())
        is_stale = self._best_call.index_select(0, distinct) < call - self.window
        is_better = (best > self._best_score.index_select(0, distinct)) | is_stale
        stands = (is_better.index_select(0, which) & (score == best.index_select(0, which))).nonzero().squeeze(1)
        position = stands.index_select(0, first_of_each(which.index_select(0, stands))[0])
        self._best_score[node.index_select(0, position)] = score.index_select(0, position)
        self._best_call[node.index_select(0, position)] = call
        return position

    def forget(self, is_evicted: Tensor) -> None:
        """Drops the nodes marked in is_evicted (nodes,)."""
        self._table.keep(~is_evicted[self._table.values.clamp(max=is_evicted.numel() - 1)])
        known = is_evicted[: self._best_score.numel()].nonzero().squeeze(1)
        self._best_score[known] = -torch.inf


_SCALE = {"round-2": 100.0, "round-1": 10.0}


PRECISIONS = (*_SCALE, "sign")


class QuantizedHistory:
    """Finds the hidden row that a near history has already computed for a word.

    Quantised states are compared by a 64-bit hash, so that two different ones are taken for equal once in 2**64 pairs.

    Args:
        precision: "round-2" or "round-1" (decimals kept), or "sign".
        num_columns: of the state, from its beginning: those that the next step reads.
    """

    def __init__(self, precision: str, num_columns: int, device: torch.device) -> None:
        if precision not in PRECISIONS:
            choices = ", ".join(PRECISIONS)
            raise AsrError(f"history_precision: {precision!r} is not one of {choices}; choose one of these.")
        self.precision = precision
        self.device = device
        generator = torch.Generator().manual_seed(0)
        bound = 2**62
        # Odd factors: no column's bits are lost in the products, which wrap around.
        self._factor = (torch.randint(-bound, bound, (num_columns + 1,), generator=generator) * 2 + 1).to(device)
        self.clear()

    def clear(self) -> None:
        self._table = HashTable(4, self.device)

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes

    def key(self, state: Tensor, word_id: Tensor) -> Tensor:
        """Previous state (R, S) and word (R,) -> one key (R,) for all that count as equal."""
        state = state[:, : self._factor.numel() - 1]
        if self.precision == "sign":
            level = (state > 0).long()
        else:
            level = torch.round(state * _SCALE[self.precision]).long()
        mixed = (level * self._factor[:-1]).sum(1) + (word_id + 1) * self._factor[-1]
        # Table keys are not negative.
        return (mixed ^ (mixed >> 31)) & (2**63 - 1)

    def find(self, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """key (R,) -> row (R,), and the positions without one (None where all have one)."""
        slot, missing = self._table.find(key)
        return self._table.values.index_select(0, slot.clamp(min=0)), missing

    def store(self, key: Tensor, row: Tensor) -> None:
        """Distinct absent keys (D,) and their rows (D,)."""
        slot, _ = self._table.insert(key)
        self._table.values[slot] = row

    def forget(self, is_freed: Tensor) -> None:
        """Drops the keys of rows marked in is_freed (rows,)."""
        self._table.keep(~is_freed[self._table.values.clamp(max=is_freed.numel() - 1)])
