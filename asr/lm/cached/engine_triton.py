"""`TritonEngine`: answers calls on a GPU while the host does not wait, so that a CUDA graph can capture them.

Like the other engines, it looks up edges, computes the hidden rows that are missing, and scores and adds missing edges.
But only the device knows how many there are. The arrays get room in advance, and the device counts what it uses. A call
that would need more room adds nothing and says so; the search then repeats its frames, after more room was made.

Shapes: W queries of a call, R rows that a call may add, N nodes, P places of the table of edges, L lanes of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asr.kernels.memory import no_autograd
from asr.lm.cached.eviction import Capacity
from asr.lm.cached.states import HistoryExpansion
from asr.lm.cached.trie import START
from asr.lm.interface import StatefulNetwork

_LANES = 256
_FIRST = tl.constexpr(START)
_NO_OWNER = tl.constexpr(0x7FFFFFFF)

NUM_EDGES = tl.constexpr(0)
MAX_EDGES = tl.constexpr(1)
NUM_ROWS = tl.constexpr(2)
MAX_ROWS = tl.constexpr(3)
HAS_ROOM = tl.constexpr(4)
LACKS_EDGES = tl.constexpr(5)
LACKS_ROWS = tl.constexpr(6)
MOST_ROWS = tl.constexpr(7)
CALL = tl.constexpr(8)
_NUM_COUNTS = 9
"""Length of the counts, int64, whose indices are above: edges, with their nodes, and rows added since `reserve`, and
how many may be; whether the current call has room, and whether one lacked it for edges or rows; the most rows that a
call needed; the number of the call in `HistoryTrie.call`."""

_ROOM_IN_CALLS, _GROWTH = 4, 4
_FIRST_ROWS = 64


@triton.jit(do_not_specialize=["num_queries"])
def _claim_rows(
    context_idx: tl.tensor,
    slot: tl.tensor,
    hidden_row: tl.tensor,
    owner: tl.tensor,
    num_queries: tl.tensor,
    L: tl.constexpr,
) -> None:
    """Lowers owner (N,) int32 of each context without a row to its first query (W,) that needs a score."""
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_absent = tl.load(slot + query, mask=query < num_queries, other=0) < 0
    node = tl.load(context_idx + query, mask=is_absent, other=0)
    lacks = is_absent & (tl.load(hidden_row + node, mask=is_absent, other=0) < 0)
    tl.atomic_min(owner + node, query, mask=lacks, sem="relaxed")


@triton.jit(do_not_specialize=["num_queries"])
def _mark_owners(
    context_idx: tl.tensor, owner: tl.tensor, num_queries: tl.tensor, is_owner: tl.tensor, L: tl.constexpr
) -> None:
    """Writes is_owner (W,) int64: whether a query computes the row of its context."""
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_valid = query < num_queries
    node = tl.load(context_idx + query, mask=is_valid, other=0)
    owns = tl.load(owner + node, mask=is_valid, other=_NO_OWNER) == query
    tl.store(is_owner + query, owns.to(tl.int64), mask=is_valid)


@triton.jit(do_not_specialize=["num_queries", "most_rows"])
def _begin_call(counts: tl.tensor, owners_end: tl.tensor, num_queries: tl.tensor, most_rows: tl.tensor) -> None:
    """Finds out whether a call has room; one program. owners_end (W,) int64 are prefix sums of its new rows."""
    num_rows = tl.load(owners_end + num_queries - 1)
    lacks_edges = tl.load(counts + NUM_EDGES) + num_queries > tl.load(counts + MAX_EDGES)
    lacks_rows = tl.load(counts + NUM_ROWS) + num_rows > tl.load(counts + MAX_ROWS)
    is_too_many = num_rows > most_rows
    tl.store(counts + HAS_ROOM, (~(lacks_edges | lacks_rows | is_too_many)).to(tl.int64))
    tl.store(counts + LACKS_EDGES, tl.load(counts + LACKS_EDGES) | lacks_edges.to(tl.int64))
    tl.store(counts + LACKS_ROWS, tl.load(counts + LACKS_ROWS) | lacks_rows.to(tl.int64))
    tl.store(counts + MOST_ROWS, tl.maximum(tl.load(counts + MOST_ROWS), num_rows))


@triton.jit(do_not_specialize=["num_queries"])
def _list_rows(
    context_idx: tl.tensor,
    is_owner: tl.tensor,
    owners_end: tl.tensor,
    counts: tl.tensor,
    free_row: tl.tensor,
    owner: tl.tensor,
    num_queries: tl.tensor,
    node: tl.tensor,
    row: tl.tensor,
    L: tl.constexpr,
) -> None:
    """Writes the nodes that get a row, and these rows, to the beginning of node and row (R,); clears owner (N,)."""
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_valid = query < num_queries
    own = tl.load(context_idx + query, mask=is_valid, other=0)
    tl.store(owner + own, tl.full([L], _NO_OWNER, tl.int32), mask=is_valid)
    if tl.load(counts + HAS_ROOM) == 0:
        return
    is_listed = is_valid & (tl.load(is_owner + query, mask=is_valid, other=0) > 0)
    place = tl.load(owners_end + query, mask=is_listed, other=1) - 1
    tl.store(node + place, own, mask=is_listed)
    own_row = tl.load(free_row + tl.load(counts + NUM_ROWS) + place, mask=is_listed, other=0)
    tl.store(row + place, own_row, mask=is_listed)


@triton.jit(do_not_specialize=["num_queries"])
def _give_rows(
    node: tl.tensor,
    row: tl.tensor,
    owners_end: tl.tensor,
    counts: tl.tensor,
    num_queries: tl.tensor,
    hidden_row: tl.tensor,
    L: tl.constexpr,
) -> None:
    """Writes hidden_row (N,) of the listed nodes."""
    if tl.load(counts + HAS_ROOM) == 0:
        return
    place = tl.program_id(0) * L + tl.arange(0, L)
    is_listed = place < tl.load(owners_end + num_queries - 1)
    own = tl.load(node + place, mask=is_listed, other=0)
    tl.store(hidden_row + own, tl.load(row + place, mask=is_listed, other=0).to(tl.int32), mask=is_listed)


@triton.jit(do_not_specialize=["num_queries"])
def _add_edges(
    context_idx: tl.tensor,
    word_id: tl.tensor,
    log_prob: tl.tensor,
    slot: tl.tensor,
    is_first: tl.tensor,
    firsts_end: tl.tensor,
    counts: tl.tensor,
    free_node: tl.tensor,
    num_queries: tl.tensor,
    value: tl.tensor,
    parent: tl.tensor,
    word: tl.tensor,
    hidden_row: tl.tensor,
    num_uses: tl.tensor,
    last_given: tl.tensor,
    last_used: tl.tensor,
    L: tl.constexpr,
) -> None:
    """Writes new edges and their nodes.

    Args:
        context_idx, word_id, log_prob, slot: (W,) the queries, their scores and the slots of their edges.
        is_first, firsts_end: (W,) int64, whether an edge is new and this its first query, and prefix sums.
        value: (P,) int64, written: the score's bits and, above them, the node.
        parent, word, hidden_row, num_uses, last_given: (N,) int32, written for the new nodes.
        last_used: of the hidden rows, int32, written for those that were read.
    """
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_new = tl.load(is_first + query, mask=query < num_queries, other=0) > 0
    place = tl.load(counts + NUM_EDGES) + tl.load(firsts_end + query, mask=is_new, other=1) - 1
    node = tl.load(free_node + place, mask=is_new, other=0)
    context = tl.load(context_idx + query, mask=is_new, other=0)
    call = tl.load(counts + CALL).to(tl.int32)
    tl.store(parent + node, context.to(tl.int32), mask=is_new)
    tl.store(word + node, tl.load(word_id + query, mask=is_new, other=0).to(tl.int32), mask=is_new)
    tl.store(hidden_row + node, tl.full([L], -1, tl.int32), mask=is_new)
    tl.store(num_uses + node, tl.zeros([L], tl.int32), mask=is_new)
    tl.store(last_given + node, call, mask=is_new)
    tl.store(last_used + tl.load(hidden_row + context, mask=is_new, other=0), call, mask=is_new)
    bits = tl.load(log_prob + query, mask=is_new, other=0.0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(value + tl.load(slot + query, mask=is_new, other=0), (node << 32) | bits, mask=is_new)


@triton.jit(do_not_specialize=["num_queries"])
def _answer(
    slot: tl.tensor,
    value: tl.tensor,
    counts: tl.tensor,
    num_queries: tl.tensor,
    num_uses: tl.tensor,
    last_given: tl.tensor,
    log_prob: tl.tensor,
    next_idx: tl.tensor,
    COUNTS_USES: tl.constexpr,
    L: tl.constexpr,
) -> None:
    """Writes log_prob (W,) float32 and next_idx (W,) int64 of the edges in slots (W,); for -1, any valid answer."""
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_valid = query < num_queries
    own = tl.load(slot + query, mask=is_valid, other=-1)
    is_known = own >= 0
    held = tl.load(value + own, mask=is_known, other=0)
    node = tl.where(is_known, held >> 32, _FIRST)
    tl.store(log_prob + query, (held & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True), mask=is_valid)
    tl.store(next_idx + query, node, mask=is_valid)
    if COUNTS_USES:
        tl.atomic_add(num_uses + node, tl.full([L], 1, tl.int32), mask=is_known, sem="relaxed")
        tl.store(last_given + node, tl.load(counts + CALL).to(tl.int32), mask=is_known)


@triton.jit(do_not_specialize=["num_queries"])
def _end_call(counts: tl.tensor, owners_end: tl.tensor, firsts_end: tl.tensor, num_queries: tl.tensor) -> None:
    """Counts what a call has added; one program. The prefix sums (W,) end with the numbers of new rows and edges."""
    has_room = tl.load(counts + HAS_ROOM)
    num_rows, num_edges = tl.load(owners_end + num_queries - 1), tl.load(firsts_end + num_queries - 1)
    tl.store(counts + NUM_ROWS, tl.load(counts + NUM_ROWS) + has_room * num_rows)
    tl.store(counts + NUM_EDGES, tl.load(counts + NUM_EDGES) + has_room * num_edges)


class TritonEngine:
    """Looks up edges and adds missing ones with a fixed sequence of launches.

    The states of all parents must be known, so nothing may have been dropped to bound memory.

    Args:
        expansion: the trie, the hidden rows and the hidden layer.
        network: runs the hidden layer and the output layer, on the device of the trie.
        capacity: the bound on memory, or None.

    Attributes:
        num_reservations: how many `reserve` without `release` there are: one for each part of a combination that is
            this model.
        was_interrupted: whether an exception has ended the last `score`. Then everything must be forgotten.
    """

    def __init__(self, expansion: HistoryExpansion, network: StatefulNetwork, capacity: Capacity | None) -> None:
        self._expansion = expansion
        self._trie = expansion.trie
        self._hidden = expansion.hidden
        self._network = network
        self._capacity = capacity
        self._statistics = expansion.layer.statistics
        device = self._trie.device
        self._counts = torch.zeros(_NUM_COUNTS, dtype=torch.int64, device=device)
        self._owner = torch.empty(0, dtype=torch.int32, device=device)
        self._free_node = torch.empty(0, dtype=torch.int64, device=device)
        self._free_row = torch.empty(0, dtype=torch.int64, device=device)
        # The list of the nodes and rows of a call, and the list without any.
        self._nothing = torch.empty(2, 0, dtype=torch.int64, device=device)
        self._listed = self._nothing
        self._num_queries = 0
        self._most_rows = _FIRST_ROWS
        self._calls = _ROOM_IN_CALLS
        self._row_calls = _ROOM_IN_CALLS
        self.clear()

    def clear(self) -> None:
        """To be called when everything is forgotten."""
        self.num_reservations = 0
        self.was_interrupted = False
        self._owner.fill_(_NO_OWNER.value)

    @no_autograd()
    def reserve(self, num_queries: int) -> tuple[Tensor, ...] | None:
        """See `LanguageModel.reserve`."""
        if self.num_reservations:
            self.num_reservations += 1
            return self._tensors()
        room = self._rooms(num_queries)
        if room is None:
            return None
        num_edges, num_rows = room
        trie, hidden = self._trie, self._hidden
        trie.edges.reserve(num_edges)
        # Arrays grow by much more than is needed, since what was captured is of no more use then.
        capacity = self._capacity
        if num_edges > trie.nodes.num_free:
            num_nodes = _GROWTH * num_edges
            trie.reserve_nodes(num_nodes if capacity is None else min(num_nodes, capacity.num_free_edges))
        # The last one is for places of the list that have no node.
        if num_rows + 1 > hidden.rows.num_free:
            most_rows = _GROWTH * num_rows
            hidden.reserve(most_rows if capacity is None else min(most_rows, capacity.num_free_rows))
        self._owner = self._grown(self._owner, trie.nodes.capacity, _NO_OWNER.value)
        self._free_node = self._grown(self._free_node, num_edges)
        self._free_row = self._grown(self._free_row, num_rows + 1)
        self._free_node[:num_edges] = trie.nodes.upcoming(num_edges)
        self._free_row[: num_rows + 1] = free_row = hidden.rows.upcoming(num_rows + 1)
        if self._most_rows != self._nothing.shape[1]:
            self._nothing = self._nothing.new_full((2, self._most_rows), START)
            self._listed = self._nothing.clone()
        self._nothing[1] = free_row[-1]
        trie.call += 1
        self._counts.zero_()
        for which, number in ((MAX_EDGES, num_edges), (MAX_ROWS, num_rows), (CALL, trie.call)):
            self._counts[which.value : which.value + 1].fill_(number)
        self._num_queries = num_queries
        self.num_reservations = 1
        return self._tensors()

    def _rooms(self, num_queries: int) -> tuple[int, int] | None:
        """How many edges and rows may be added; None if the memory does not suffice for a call."""
        capacity = self._capacity
        num_edges, num_rows = self._calls * num_queries, self._row_calls * self._most_rows
        if capacity is None:
            return num_edges, num_rows
        while num_edges > num_queries and not capacity.has_room(num_edges):
            num_edges //= 2
        num_rows = min(num_rows, capacity.num_free_rows - 1)
        return (num_edges, num_rows) if capacity.has_room(num_edges) and num_rows >= self._most_rows else None

    @staticmethod
    def _grown(held: Tensor, size: int, fill: int = 0) -> Tensor:
        """The tensor itself if it has this size or more, or a larger one with one value everywhere."""
        return held if len(held) >= size else held.new_full((max(size, 2 * len(held)),), fill)

    def _tensors(self) -> tuple[Tensor, ...]:
        trie, hidden = self._trie, self._hidden
        of_trie = (trie.edges.keys, trie.edges.values, trie.parent, trie.word, trie.hidden_row)
        of_uses = (trie.num_uses, trie.last_given, hidden.last_used)
        of_rows = (hidden.state, hidden.scale, hidden.projected)
        own = (self._counts, self._owner, self._free_node, self._free_row, self._nothing)
        return (*of_trie, *of_uses, *of_rows, *own)

    def release(self, num_queries: int) -> bool:
        """See `LanguageModel.release`."""
        self.num_reservations -= 1
        if self.num_reservations:
            return True  # what the last release says holds for all
        counts = self._counts.tolist()
        num_edges, num_rows = counts[NUM_EDGES.value], counts[NUM_ROWS.value]
        trie, statistics = self._trie, self._statistics
        trie.nodes.take(num_edges)
        trie.edges.count += num_edges
        self._hidden.rows.take(num_rows)
        statistics.num_calls += 1
        statistics.num_queries += num_queries
        statistics.num_edge_hits += max(0, num_queries - num_edges)
        statistics.num_edges += num_edges
        statistics.num_outputs += num_edges
        statistics.num_hidden_rows += num_rows
        statistics.num_hidden_calls += 1
        most_rows = counts[MOST_ROWS.value]
        statistics.largest_hidden_batch = max(statistics.largest_hidden_batch, min(most_rows, self._most_rows))
        lacks_edges, lacks_rows = bool(counts[LACKS_EDGES.value]), bool(counts[LACKS_ROWS.value])
        if lacks_edges:
            self._calls *= 2
        is_short = most_rows > self._most_rows
        if is_short:
            self._most_rows = triton.next_power_of_2(most_rows)
        elif lacks_rows:
            self._row_calls *= 2
        return not (lacks_edges or lacks_rows or is_short)

    @no_autograd()
    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """See `CachedRNNLM.score`; for as many queries as were reserved, and contexts and words that exist."""
        trie, counts, num = self._trie, self._counts, self._num_queries
        grid = (triton.cdiv(num, _LANES),)
        # Until all is queued, there may be edges without a score.
        self.was_interrupted = True
        with torch.cuda.device_of(context_idx):
            key = trie.edge_key(context_idx, word_id)
            found = trie.edges.find_queued(key)
            owners_end = self._add_rows(context_idx, found, grid)
            slot, is_first = trie.edges.insert_queued(key, found, counts[HAS_ROOM.value : HAS_ROOM.value + 1])
            firsts_end = is_first.cumsum(0)
            log_prob, next_idx = self._log_prob(context_idx, word_id), torch.empty_like(context_idx)
            of_nodes = trie.num_uses, trie.last_given
            _add_edges[grid](
                *(context_idx, word_id, log_prob, slot, is_first, firsts_end, counts, self._free_node, num),
                *(trie.edges.values, trie.parent, trie.word, trie.hidden_row, *of_nodes, self._hidden.last_used),
                L=_LANES,
            )
            _answer[grid](
                *(slot, trie.edges.values, counts, num, *of_nodes, log_prob, next_idx),
                COUNTS_USES=self._capacity is not None,
                L=_LANES,
            )
            _end_call[(1,)](counts, owners_end, firsts_end, num)
        self.was_interrupted = False
        return log_prob, next_idx

    def _add_rows(self, context_idx: Tensor, found: Tensor, grid: tuple[int]) -> Tensor:
        """Computes the rows of contexts (W,) whose queries were not found (W,) -> prefix sums of their number, (W,)."""
        trie, counts, num = self._trie, self._counts, self._num_queries
        node, row = self._listed
        is_owner = torch.empty_like(found)
        _claim_rows[grid](context_idx, found, trie.hidden_row, self._owner, num, L=_LANES)
        _mark_owners[grid](context_idx, self._owner, num, is_owner, L=_LANES)
        owners_end = is_owner.cumsum(0)
        _begin_call[(1,)](counts, owners_end, num, self._most_rows)
        self._listed.copy_(self._nothing)
        _list_rows[grid](
            *(context_idx, is_owner, owners_end, counts, self._free_row, self._owner, num, node, row), L=_LANES
        )
        parent = trie.parent.index_select(0, node)
        before = self._hidden.read(trie.hidden_row.index_select(0, parent).long())
        self._hidden.write(row, self._network.step(before, trie.word.index_select(0, node).long()))
        _give_rows[(triton.cdiv(len(node), _LANES),)](*(node, row, owners_end, counts, num, trie.hidden_row), L=_LANES)
        return owners_end

    def _log_prob(self, context_idx: Tensor, word_id: Tensor) -> Tensor:
        """The scores of words (W,) after contexts (W,); of contexts without a row, any number."""
        network, hidden = self._network, self._hidden
        row = self._trie.hidden_row.index_select(0, context_idx).long().clamp(min=0)
        if network.has_projection:
            read = network.project(hidden.read(row))
        else:
            read = hidden.read(row, hidden.first_output)
        history = self._trie.history(context_idx, network.num_history_words)
        return network.log_prob(read, history, word_id).float()
