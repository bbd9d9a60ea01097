"""The history trie: every word history that has been queried is a node, and a context index is a node's number.

A node has a parent and a last word. An edge (context, word) has the word's score and the node that it leads to: a node
of its own or, if contexts are shared, one that other edges lead to as well. All data are in tensors, and a batch is
looked up or added at once. `RowAllocator` assigns numbers, freed ones first.

Shapes: Q queries, R new edges, M history words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.kernels.hash_table import HashTable
from asr.lm.contexts import check_contexts, check_words
from asr.text.symbols import BOS_ID, EPSILON_ID


class RowAllocator:
    """Allocates row numbers 0 .. capacity - 1; the owner of the arrays extends them whenever `capacity` has grown.

    Args:
        limit: a capacity that is exceeded only if more rows than that are in use.
        growth: the capacity grows at least by this share.

    Attributes:
        num_started: all rows in use, and those freed again, are below this number.
    """

    def __init__(self, capacity: int, device: torch.device, limit: int | None = None, growth: float = 0.25) -> None:
        self.capacity = capacity
        self.device = device
        self.limit = limit
        self.growth = growth
        self.num_started = 0
        self._freed = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def num_used(self) -> int:
        return self.num_started - self._freed.numel()

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_used

    def is_used(self) -> Tensor:
        """A mask of the rows in use, (capacity,)."""
        is_used = torch.zeros(self.capacity, dtype=torch.bool, device=self.device)
        is_used[: self.num_started] = True
        is_used[self._freed] = False
        return is_used

    def capacity_for(self, num_new: int) -> int:
        """The capacity needed for `num_new` more rows: larger by `growth`, within the limit if that is enough."""
        needed = self.num_used + num_new
        if needed <= self.capacity:
            return self.capacity
        # Doubling would copy less, but most of the memory is in these rows, and a third of it would often be unused.
        larger = max(self.capacity + int(self.growth * self.capacity), needed)
        return larger if self.limit is None else max(needed, min(larger, self.limit))

    def upcoming(self, num: int) -> Tensor:
        """The numbers that `take` would give, (num,)."""
        if num > self.num_free:
            raise IndexError(f"{num} rows asked for, {self.num_free} of {self.capacity} free")
        reused, first = self._freed[:num], self.num_started
        fresh = torch.arange(first, first + num - reused.numel(), device=self.device)
        return torch.cat((reused, fresh)) if reused.numel() else fresh

    def take(self, num: int) -> Tensor:
        """The numbers of `num` free rows, (num,); there must be as many."""
        taken = self.upcoming(num)
        num_reused = min(num, self._freed.numel())
        self._freed = self._freed[num_reused:]
        self.num_started += num - num_reused
        return taken

    def give_back(self, rows: Tensor) -> None:
        """Frees rows (R,), which must be in use and distinct. The lowest are allocated again first."""
        self._freed = torch.cat((self._freed, rows)).sort().values

    def trim(self, capacity: int) -> None:
        """Reduces the capacity; no row beyond it may be in use."""
        self._freed = self._freed[self._freed < capacity]
        self.num_started = min(self.num_started, capacity)
        self.capacity = capacity


BEFORE_START = 0
"""The node above `<s>`: its own parent; its hidden row is the network's initial state."""

START = 1
"""The node of the history `<s>`."""

BYTES_PER_NODE = 20
_COLUMNS = ("parent", "word", "hidden_row", "num_uses", "last_given")
_FIRST_NODES = 64
_FIRST_BUCKETS = 16


class HistoryTrie:
    """Nodes and edges of the trie.

    Attributes:
        parent, word: of each node, int32 (capacity,).
        hidden_row: the node's row in the hidden store or -1, int32 (capacity,); set by the engine.
        num_uses: how often an edge to the node was queried, int32 (capacity,); counted if the engine evicts.
        last_given: the call that created the node or last returned it, int32 (capacity,); counted if the engine evicts.
        call: the number of the current call; set by the engine.
        edges: the table from (context, word) to slots of `edge_score` and `edge_node`, whose bits are its values.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.max_nodes: int | None = None
        self.clear()

    def clear(self) -> None:
        """Resets the trie to the two nodes BEFORE_START and START, with arrays of the initial sizes."""
        self.nodes = RowAllocator(_FIRST_NODES, self.device, self.max_nodes)
        self.parent = torch.zeros(_FIRST_NODES, dtype=torch.int32, device=self.device)
        self.word = torch.zeros_like(self.parent)
        self.hidden_row = torch.full_like(self.parent, -1)
        self.num_uses = torch.zeros_like(self.parent)
        self.last_given = torch.zeros_like(self.parent)
        self.call = 0
        self.edges = HashTable(_FIRST_BUCKETS, self.device)
        start = torch.tensor([BEFORE_START, BEFORE_START], device=self.device)
        self.new_nodes(start, torch.tensor([EPSILON_ID, BOS_ID], device=self.device))

    def limit_nodes(self, max_nodes: int) -> None:
        """Lets the arrays grow beyond `max_nodes` only if more nodes are in use."""
        self.max_nodes = self.nodes.limit = max_nodes

    @property
    def num_nodes(self) -> int:
        return self.nodes.num_used

    @property
    def num_bytes(self) -> int:
        """Bytes of all allocated arrays."""
        return BYTES_PER_NODE * self.nodes.capacity + self.edges.num_bytes

    @staticmethod
    def edge_key(context_idx: Tensor, word_id: Tensor) -> Tensor:
        """(Q,), (Q,) int64 -> (Q,) int64; the pair itself, so that no two pairs collide."""
        return torch.add(word_id, context_idx, alpha=1 << 32)

    @property
    def edge_score(self) -> Tensor:
        """float32 (slots,), a view."""
        return self.edges.values.view(torch.float32)[0::2]

    @property
    def edge_node(self) -> Tensor:
        """int32 (slots,), a view."""
        return self.edges.values.view(torch.int32)[1::2]

    def new_nodes(self, parent: Tensor, word_id: Tensor) -> Tensor:
        """Creates a node for each parent (R,) and word (R,) -> node numbers (R,)."""
        self.reserve_nodes(parent.numel())
        node = self.nodes.take(parent.numel())
        self.parent.index_copy_(0, node, parent.int())
        self.word.index_copy_(0, node, word_id.int())
        self.hidden_row.index_fill_(0, node, -1)
        self.num_uses.index_fill_(0, node, 0)
        self.last_given.index_fill_(0, node, self.call)
        return node

    def new_roots(self, num: int) -> Tensor:
        """Creates nodes like BEFORE_START, each its own parent, whose hidden rows the caller must set -> (num,)."""
        nothing = torch.zeros(num, dtype=torch.int64, device=self.device)
        root = self.new_nodes(nothing, torch.full_like(nothing, EPSILON_ID))
        self.parent.index_copy_(0, root, root.int())
        return root

    def reserve_nodes(self, num_new: int) -> None:
        """Makes room for `num_new` more nodes."""
        capacity = self.nodes.capacity_for(num_new)
        if capacity == self.nodes.capacity:
            return
        added = torch.zeros(capacity - self.nodes.capacity, dtype=torch.int32, device=self.device)
        for name in _COLUMNS:
            setattr(self, name, torch.cat((getattr(self, name), added)))
        self.nodes.capacity = capacity

    def trim_nodes(self, capacity: int) -> None:
        """Frees the memory above `capacity` nodes, or above the highest node in use."""
        highest = int(self.nodes.is_used().nonzero()[-1])
        capacity = max(capacity, highest + 1)
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[:capacity].clone())
        self.nodes.trim(capacity)

    def check(self, context_idx: Tensor, word_id: Tensor, num_words: int) -> None:
        """Raises AsrError if a context (Q,) cannot be a node, or a word (Q,) is not in the vocabulary."""
        # All bounds at once, so that the host waits for a GPU only once.
        bounds = torch.stack((*torch.aminmax(word_id), *torch.aminmax(context_idx))).tolist()
        check_words(bounds[0], bounds[1], num_words, "a recurrent language model")
        check_contexts(bounds[2], bounds[3], self.nodes.num_started, "a recurrent language model")

    def check_contexts(self, context_idx: Tensor) -> None:
        """Raises AsrError if a context (Q,) cannot be a node."""
        low, high = torch.aminmax(context_idx)
        check_contexts(int(low), int(high), self.nodes.num_started, "a recurrent language model")

    def history(self, context_idx: Tensor, num_words: int) -> Tensor:
        """The last words of each context, newest first, EPSILON_ID before `<s>`: (Q,) -> (Q, M) int64."""
        return self._ancestors(context_idx, num_words)[1]

    def ending(self, context_idx: Tensor, num_words: int) -> Tensor:
        """As `history`, but before `<s>` with minus the number of the node above it, which differs between starts."""
        node, word = self._ancestors(context_idx, num_words)
        return torch.where(word == EPSILON_ID, -node, word)

    def _ancestors(self, context_idx: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Each context (Q,) and the nodes above it, and their words, (Q, num) int64 each."""
        nodes = [context_idx.to(self.parent.dtype)] if num else []
        while len(nodes) < num:
            nodes.append(self.parent.index_select(0, nodes[-1]))
        if not nodes:
            nothing = torch.empty(context_idx.numel(), 0, dtype=torch.int64, device=self.device)
            return nothing, nothing
        node = torch.stack(nodes, dim=1)
        return node.long(), self.word[node.long()].long()
