"""The compiled part of a cached language model: loops that answer queries from its arrays, and add new edges to them.

`look_up_cached` is called by other loops. It answers if every queried history has its hidden row. Rows that are missing
are computed by `expand_cached`, for all the histories that a loop waits for together, if the network multiplies bytes
and there is room for them; otherwise by `NumbaEngine`. The engine also provides the arrays, and takes over what the
loops have added. `NumbaEngine.score` answers a call from Python with the same loops.

Shapes: Q queries, K contexts, M missing queries, R of them new, D distinct rows, S state, H hidden, P places.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.kernels.byte_products import input_type
from asr.kernels.hash_table import HashTable, distinct_values, home_bucket, slot_of
from asr.kernels.jit import Intrinsic, jit_required
from asr.kernels.linear import byte_products
from asr.kernels.lookup import compiled_expansion, compiled_lookup
from asr.kernels.simd import prefetch, row_product
from asr.lm.cached.approximations import Recombination, key_of_ending
from asr.lm.cached.eviction import Capacity
from asr.lm.cached.outputs import ProjectionCache
from asr.lm.cached.states import NOT_PROJECTED, HistoryExpansion, load_bytes, store_bytes
from asr.lm.rnn.maxent import mixed_with
from asr.lm.rnn.output_numba import FLOATS_OF_LINE
from asr.lm.rnn.recurrent import max_byte_rows
from asr.lm.rnn.recurrent_numba import NO_BYTE_WEIGHTS, ByteGru, byte_product, fill_byte_steps

# Indices into `counts`: the number of nodes and edges, the maximum number of edges, and the number of edges for which
# there was no room; then answers, queries and scored edges since the counts were last read. For hidden rows: the number
# of the first free one, how many more fit, how many the loop has added and in how many steps, the largest of these
# steps, the number of the engine's call, and how many projections a query needed for which there was no room.
NODES, EDGES, MAX_EDGES, LACKING, ANSWERS, QUERIES, SCORED = range(7)
FIRST_ROW, ROW_ROOM, NEW_ROWS, STEPS, LARGEST_STEP, CALL, PROJECTIONS = range(7, 14)
NUM_COUNTS = 14
_TAKEN = -2  # marks a node that is already in the list, in place of a row
_LISTED = NOT_PROJECTED - 1  # the same for rows, in place of the number of a projection
_AHEAD = 16  # how many queries ahead the table is prefetched
_ROOM_FOR_ROWS = 128  # rows for which there is room when a loop begins
monotonic_seconds: Any = Intrinsic("asr.kernels.intrinsics", "monotonic_seconds")


class HiddenTables(NamedTuple):
    """The arrays with which `expand_cached` computes hidden rows; empty ones if it cannot, with `max_step` 0.

    Attributes:
        network: the hidden layer.
        max_step: how many rows may be computed in one step.
        state, scale, last_used: (rows, S) int8, (rows, 1 or 2) and (rows,), see `HiddenStore`.
        first_output: the first column that the output layer reads.
        seconds: (1,) float64, spent by the loop since it was last read.
    """

    network: ByteGru
    max_step: int
    state: Any
    scale: Any
    last_used: Any
    first_output: int
    seconds: Any


class CachedLMTables(NamedTuple):
    """The arrays of an engine that `look_up_cached` reads and writes.

    Attributes:
        edges: the table's keys, its hash's shift, and the edges' scores and nodes.
        endings: the table of `Recombination`, which says which histories share a node: its keys, its hash's shift, and
            its nodes; then the factors of `key_of_ending`, none if all histories are kept apart.
        parent, last_word, hidden_row: (nodes,) of the trie.
        hidden: (rows, H) the input of the output layer, float32 or int8; with projections (P, H), see
            `ProjectionCache`.
        scale: (rows,) float32, by which int8 rows are multiplied; (0,) for float32.
        projected: (rows,) int64, the numbers of the rows' projections; (0,) if there are none.
        num_projected: (1,) int64, how many have been computed.
        counts: (NUM_COUNTS,) int64, see NODES.
        output: the arrays of the output layer's loop.
        layer: `HiddenTables`.
    """

    edges: tuple[Any, int, Any, Any]
    endings: tuple[Any, int, Any, Any]
    parent: Any
    last_word: Any
    hidden_row: Any
    hidden: Any
    scale: Any
    projected: Any
    num_projected: Any
    counts: Any
    output: tuple[Any, ...]
    layer: HiddenTables

    @property
    def always_answers(self) -> bool:
        """False: a context's hidden row may have to be computed first."""
        return False


@compiled_lookup(CachedLMTables)
def look_up_cached(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """Fills log_prob (Q,) and next_idx (Q,) for context_idx, word_id (Q,) -> whether it was able to.

    It cannot if a history has no hidden row, if a projection is lacking that it cannot compute, or if there is no room
    for the new edges; then nothing is added.

    Args:
        tables: `CachedLMTables` of an engine; its arrays and counts are changed in place.
    """
    counts, hidden_row, edges, projected = tables.counts, tables.hidden_row, tables.edges, tables.projected
    oldest = tables.num_projected[0] - len(tables.hidden) if len(projected) else 0
    missing = np.empty(len(word_id), dtype=np.int64)
    missing = missing[: find_edges(context_idx, word_id, edges, log_prob, next_idx, missing)]
    are_held = True
    for query in missing:
        # A history that is not a node has no row either; `take_in` says so.
        if not 0 <= context_idx[query] < counts[NODES] or hidden_row[context_idx[query]] < 0:
            return False
        are_held = are_held and (not len(projected) or projected[hidden_row[context_idx[query]]] >= oldest)
    if counts[EDGES] + len(missing) > counts[MAX_EDGES]:
        counts[LACKING] = len(missing)
        return False
    if not are_held:
        row = rows_to_project(context_idx[missing], tables)
        if not tables.layer.max_step or len(row) > len(tables.hidden):
            counts[PROJECTIONS] = max(counts[PROJECTIONS], len(row))
            return False
        _project(row, tables)
    if len(missing):
        answer_missing(context_idx, word_id, missing, tables, log_prob, next_idx)
    counts[ANSWERS] += 1
    counts[QUERIES] += len(word_id)
    return True


@compiled_expansion(CachedLMTables)
def expand_cached(context_idx: Any, tables: Any) -> int:
    """Computes the missing hidden rows of contexts (K,), whose parents all have rows -> how many, or -1 if it cannot.

    Args:
        tables: `CachedLMTables` of an engine; its arrays and counts are changed in place.
    """
    counts, hidden_row, layer = tables.counts, tables.hidden_row, tables.layer
    begin = monotonic_seconds()
    for context in context_idx:
        if not 0 <= context < counts[NODES]:  # `take_in` says so
            return -1
    node, before, which, word = waiting_nodes(context_idx, tables.parent, tables.last_word, hidden_row)
    num, width = len(node), layer.state.shape[1]
    if num == 0:
        return 0
    if num > layer.max_step or counts[NEW_ROWS] + num > counts[ROW_ROOM]:
        return -1
    state, following = np.empty((len(before), width), dtype=np.float32), np.empty((num, width), dtype=np.float32)
    load_bytes(state, layer.state, layer.scale, before, layer.first_output)
    fill_byte_steps(word, which, state, layer.network, following)
    row = np.arange(num) + (counts[FIRST_ROW] + counts[NEW_ROWS])
    store_bytes(layer.state, layer.scale, row, following, layer.first_output)
    for i in range(num):
        hidden_row[node[i]], layer.last_used[row[i]] = row[i], counts[CALL]
    if len(tables.projected) and num <= len(tables.hidden):  # of more, some would be lost before they are read
        _project(row, tables)
    counts[NEW_ROWS] += num
    counts[STEPS] += 1
    counts[LARGEST_STEP] = max(counts[LARGEST_STEP], num)
    layer.seconds[0] += monotonic_seconds() - begin
    return num


def rows_to_project(context_idx: Any, tables: Any) -> Any:
    """The distinct rows among those of contexts (K,) whose projections are not held, or would be overwritten by those
    of the others (R,). See `ProjectionCache`; all contexts must have rows."""
    projected, hidden_row = tables.projected, tables.hidden_row
    row, num, num_before = np.empty(len(context_idx), dtype=np.int64), 0, -1
    while num > num_before:
        num_before = num
        for context in context_idx:
            own = np.int64(hidden_row[context])
            if projected[own] != _LISTED and tables.num_projected[0] - projected[own] > len(tables.hidden) - num:
                projected[own] = _LISTED
                row[num] = own
                num += 1
    for own in row[:num]:
        projected[own] = NOT_PROJECTED
    return row[:num]


def _project(row: Any, tables: Any) -> None:
    """Computes the projections of rows (R,), at most P."""
    projected, hidden, layer, num = tables.projected, tables.hidden, tables.layer, len(row)
    if num == 0:
        return
    state = np.empty((num, layer.state.shape[1]), dtype=np.float32)
    load_bytes(state, layer.state, layer.scale, row, layer.first_output)
    computed = byte_product(state, layer.network.projection, hidden.shape[1], layer.network.byte_kind)
    for i in range(num):
        projected[row[i]] = tables.num_projected[0] + i
        hidden[projected[row[i]] % len(hidden)] = computed[i]
    tables.num_projected[0] += num


def find_edges(context_idx: Any, word_id: Any, edges: Any, log_prob: Any, next_idx: Any, missing: Any) -> int:
    """Fills log_prob (Q,) and next_idx (Q,) of existing edges, and the beginning of missing (Q,) with the positions of
    the others -> the number of the others. edges is `CachedLMTables.edges`."""
    table, shift, edge_score, edge_node = edges
    num, num_missing = len(word_id), 0
    for query in range(num):
        if query + _AHEAD < num:
            _ask_for((context_idx[query + _AHEAD] << 32) + word_id[query + _AHEAD], edges)
        slot = slot_of(table, (context_idx[query] << 32) + word_id[query], shift)
        if slot < 0 or context_idx[query] >> 31 != 0:  # the key of such a number could be another's
            missing[num_missing] = query
            num_missing += 1
        else:
            log_prob[query], next_idx[query] = edge_score[slot], edge_node[slot]
    return num_missing


def answer_missing(context_idx: Any, word_id: Any, missing: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    """Adds and scores the edges of the missing queries (M,) -> whether all had room.

    If so, their log_prob (Q,) and next_idx (Q,) are filled; if not, a second call with a larger table continues. All
    contexts must have their hidden rows.
    """
    table, shift, edge_score, edge_node = tables.edges
    endings, ending_shift, ending_node, factors = tables.endings
    parent, last_word, hidden_row = tables.parent, tables.last_word, tables.hidden_row
    counts, width = tables.counts, table.shape[1]
    slots, new, num_new = np.empty(len(missing), dtype=np.int64), np.empty(len(missing), dtype=np.int64), 0
    has_room = True
    for which in range(len(missing)):
        if which + _AHEAD < len(missing):
            query = missing[which + _AHEAD]
            _ask_for((context_idx[query] << 32) + word_id[query], tables.edges)
        query = missing[which]
        key = (context_idx[query] << 32) + word_id[query]
        slot = slot_of(table, key, shift)
        if slot < 0:
            if counts[EDGES] == counts[MAX_EDGES]:
                has_room = False
                break
            slot = -1 - slot
            table[slot // width, slot % width] = key
            node = np.int64(counts[NODES])
            if len(factors):  # histories that end in the same words share a node
                ending = key_of_ending(context_idx[query], word_id[query], parent, last_word, factors)
                ending_slot = slot_of(endings, ending, ending_shift)
                if ending_slot >= 0:
                    node = np.int64(ending_node[ending_slot])
                else:
                    ending_slot = -1 - ending_slot
                    endings[ending_slot // endings.shape[1], ending_slot % endings.shape[1]] = ending
                    ending_node[ending_slot] = node
            if node == counts[NODES]:
                parent[node], last_word[node], hidden_row[node] = context_idx[query], word_id[query], -1
                counts[NODES] += 1
            edge_node[slot] = node
            new[num_new] = which
            num_new += 1
            counts[EDGES] += 1
            counts[SCORED] += 1
        slots[which], next_idx[query] = slot, edge_node[slot]
    new = new[:num_new]
    _score_edges(context_idx, word_id, missing[new], slots[new], tables)
    if has_room:
        for which in range(len(missing)):
            log_prob[missing[which]] = edge_score[slots[which]]
    return has_room


def _ask_for(key: int, edges: Any) -> None:
    """Prefetches a key's bucket and its values, which may be anywhere in large tables."""
    table, shift, edge_score, _ = edges
    bucket = home_bucket(key, shift)
    prefetch(table[bucket], 0)
    prefetch(edge_score, 2 * table.shape[1] * bucket)  # a view of every other number


def _score_edges(context_idx: Any, word_id: Any, query: Any, slot: Any, tables: Any) -> None:
    """Scores the edges of queries (R,), which are at slot (R,), reading hidden rows in place."""
    parent, last_word, hidden_row = tables.parent, tables.last_word, tables.hidden_row
    hidden, scale = tables.hidden, tables.scale
    edge_score = tables.edges[2]
    rows, bias, weight, order, table_size, log_z = tables.output
    for new in range(len(query)):
        if new + 1 < len(query):
            following = rows[word_id[query[new + 1]]]
            for i in range(0, len(following), FLOATS_OF_LINE):
                prefetch(following, i)
        context, word = context_idx[query[new]], word_id[query[new]]
        row = np.int64(hidden_row[context])
        if len(tables.projected):
            row = tables.projected[row] % len(hidden)
        product = row_product(hidden, row, rows, word)
        if len(scale):
            product *= scale[row]
        total = bias[word] + product
        mixed = 0
        for age in range(order - 1):
            mixed = mixed_with(mixed, last_word[context], age)
            total += weight[mixed % table_size + word]
            context = np.int64(parent[context])
        edge_score[slot[new]] = min(total - log_z, np.float32(0.0))


def waiting_nodes(context_idx: Any, parent: Any, last_word: Any, hidden_row: Any) -> Any:
    """The distinct contexts among (K,) that have no hidden row (R,), and the inputs of the hidden layer for them.

    These inputs are the distinct previous rows (D,), which of these each context follows (R,), and its word (R,).
    """
    node, num = np.empty(len(context_idx), dtype=np.int64), 0
    for context in context_idx:
        if hidden_row[context] == -1:
            hidden_row[context] = _TAKEN
            node[num] = context
            num += 1
    before, word = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    for i in range(num):
        hidden_row[node[i]] = -1
        before[i], word[i] = hidden_row[parent[node[i]]], last_word[node[i]]
    row, which = distinct_values(before)
    return node[:num], row, which, word


class NumbaEngine:
    """Answers an engine's calls with compiled loops, and provides its arrays to loops that query without a call.

    Edges, nodes and scores are those of `TorchEngine`. If there is no more room within the capacity, methods return
    None.

    Args:
        expansion: the engine's trie, hidden rows and hidden layer.
        projections: what the output layer reads of rows, or None if it reads the rows themselves.
        recombination: which histories share contexts, or None; the first history of a context keeps it.
        capacity: the engine's bound on memory, or None.
        room: the minimum number of new edges for which there is room when a loop begins.
    """

    def __init__(
        self,
        expansion: HistoryExpansion,
        projections: ProjectionCache | None,
        recombination: Recombination | None,
        capacity: Capacity | None,
        room: int,
    ) -> None:
        self._expansion = expansion
        self._projections = projections
        self._recombination = recombination
        self._capacity = capacity
        self._room = room
        self._clock = expansion.layer.clock
        self._current: tuple[tuple[Tensor, ...], CachedLMTables] | None = None
        self.num_words = len(expansion.layer.networks[0].vocabulary)
        self._counts = np.zeros(NUM_COUNTS, dtype=np.int64)
        self._seconds = np.zeros(1)
        self._no_endings = HashTable(1, expansion.trie.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": None}  # a copy has arrays of its own

    def tables(self, most_new: int | None = None) -> CachedLMTables | None:
        """The arrays, with room for new edges; None if the engine's bound leaves none.

        At most `most_new` edges will be added, if that is known.
        """
        trie, counts = self._expansion.trie, self._counts
        room = max(self._room, int(counts[LACKING])) if most_new is None else min(self._room, most_new)
        rows = self._expansion.hidden.rows
        if self._projections is not None:
            num_needed = int(counts[PROJECTIONS])
            if not self._projections.grow(rows.num_used + _ROOM_FOR_ROWS, num_needed) and self._capacity is not None:
                self._capacity.set_tight()
        if self._capacity is not None and not self._capacity.has_room(room):
            return None
        trie.edges.reserve(room)
        trie.reserve_nodes(room)
        most = min(trie.edges.num_free, trie.nodes.num_free)
        if self._recombination is not None:
            self._recombination.table.reserve(room)
            most = min(most, self._recombination.table.num_free)
        counts[:] = 0
        counts[NODES], counts[EDGES] = trie.num_nodes, trie.edges.count
        counts[MAX_EDGES] = trie.edges.count + most
        most = sys.maxsize if self._capacity is None else self._capacity.num_free_rows
        if rows.num_free < _ROOM_FOR_ROWS <= most:
            self._expansion.hidden.reserve(_ROOM_FOR_ROWS)
        counts[FIRST_ROW], counts[CALL] = rows.num_started, trie.call
        # Rows that were freed are given to the engine alone.
        counts[ROW_ROOM] = 0 if rows.num_used < rows.num_started else min(rows.num_free, most)
        return self.current_tables()

    def current_tables(self) -> CachedLMTables:
        """The arrays in their current state."""
        trie, store = self._expansion.trie, self._expansion.hidden
        endings = self._no_endings if self._recombination is None else self._recombination.table
        # If there are no projections, the output layer reads the states.
        read = store.state if self._projections is None else self._projections.hidden
        grown = trie.edges.keys, trie.parent, store.state, read, endings.keys
        if self._current is None or any(now is not before for now, before in zip(grown, self._current[0], strict=True)):
            edges = *trie.edges.for_loop(), trie.edge_score.numpy(), trie.edge_node.numpy()
            no_numbers, own_scale = store.projected.new_empty(0), store.scale.new_empty(0)
            factors = no_numbers if self._recombination is None else self._recombination.factors
            shared = *endings.for_loop(), endings.values.numpy(), factors.numpy()
            if self._projections is not None:
                projected, num_projected = store.projected[:, 0], self._projections.num_computed
            else:
                read, projected, num_projected = read[:, store.first_output :], no_numbers, no_numbers
                if store.state.dtype == torch.int8:
                    own_scale = store.scale[:, -1]
            columns = trie.parent, trie.word, trie.hidden_row, read, own_scale, projected, num_projected
            arrays = (column.numpy() for column in columns)
            output = self._expansion.layer.home_network.output_tables()
            tables = edges, shared, *arrays, self._counts, output, self._hidden_tables()
            self._current = grown, CachedLMTables._make(tables)
        return self._current[1]

    def _hidden_tables(self) -> HiddenTables:
        layer, hidden = self._expansion.layer, self._expansion.hidden
        network = None
        if layer.branches and layer.are_bytes and hidden.state.dtype == torch.int8:
            with byte_products():
                network = layer.networks[0].step_tables()
        if network is None:
            return HiddenTables(
                ByteGru(np.empty((0, 0), np.float32), np.empty(0, input_type()), *[NO_BYTE_WEIGHTS] * 3),
                *(0, np.empty((0, 0), np.int8), np.empty((0, 0), np.float32), np.empty(0, np.int32), 0, self._seconds),
            )
        arrays = hidden.state.numpy(), hidden.scale.numpy(), hidden.last_used.numpy()
        return HiddenTables(ByteGru(*network), max_byte_rows(), *arrays, hidden.first_output, self._seconds)

    def take_in(self, context_idx: Tensor, held: Tensor) -> None:
        """Takes over what a loop has added since `tables`, and computes what contexts (K,) lack for queries.

        The search holds the contexts `held` (L,).

        Raises:
            AsrError: a context cannot be a node.
        """
        self.take_nodes()
        if len(context_idx):
            self._expansion.trie.check_contexts(context_idx)
        counts, statistics = self._counts, self._expansion.layer.statistics
        statistics.num_calls += int(counts[ANSWERS])
        statistics.num_queries += int(counts[QUERIES])
        statistics.num_edge_hits += int(counts[QUERIES] - counts[SCORED])
        if self._capacity is not None:
            self._capacity.count_uses(held)
        if len(context_idx) and self._add_rows(context_idx) and not self.current_tables().layer.max_step:
            self._project(context_idx)  # otherwise, the loop does so

    def take_nodes(self) -> None:
        """Registers with the trie the nodes and edges that a loop has added since `tables`."""
        trie, counts = self._expansion.trie, self._counts
        num_new = int(counts[NODES]) - trie.num_nodes
        if num_new:
            trie.nodes.take(num_new)
            if self._recombination is not None:
                self._recombination.table.count += num_new
        trie.edges.count = int(counts[EDGES])
        statistics = self._expansion.layer.statistics
        statistics.num_edges += int(counts[SCORED])
        statistics.num_outputs += int(counts[SCORED])
        if counts[NEW_ROWS]:
            self._expansion.hidden.rows.take(int(counts[NEW_ROWS]))
            statistics.num_hidden_rows += int(counts[NEW_ROWS])
            statistics.num_hidden_calls += int(counts[STEPS])
            statistics.largest_hidden_batch = max(statistics.largest_hidden_batch, int(counts[LARGEST_STEP]))
            statistics.seconds_hidden += float(self._seconds[0])
            statistics.seconds_total += float(self._seconds[0])
            counts[NEW_ROWS], self._seconds[0] = 0, 0.0

    @torch.no_grad()
    def _add_rows(self, context_idx: Tensor) -> bool:
        """Computes the missing hidden rows of contexts (K,), whose parents have rows -> whether there was room."""
        trie, hidden = self._expansion.trie, self._expansion.hidden
        arrays = (part.contiguous().numpy() for part in (context_idx, trie.parent, trie.word, trie.hidden_row))
        node, before, which, word = map(torch.from_numpy, jit_required(waiting_nodes)(*arrays))
        if self._capacity is not None and not self._capacity.has_row_room(len(node)):
            return False
        if len(node):
            layer = self._expansion.layer
            if layer.branches:
                state = layer.step(hidden.read(before), word, which)
            else:
                state = layer.step(hidden.read(before[which]), word)
            row = hidden.append(state)
            trie.hidden_row.index_copy_(0, node, row.int())
            hidden.last_used.index_fill_(0, row, trie.call)
        return True

    @torch.no_grad()
    def _project(self, context_idx: Tensor) -> bool:
        """Computes the missing projections of contexts (K,), which have rows -> whether there was room."""
        if self._projections is None:
            return True
        has_room = self._projections.hold(self._expansion.trie.hidden_row.index_select(0, context_idx).long())
        if not has_room and self._capacity is not None:
            self._capacity.set_tight()
        return has_room

    @torch.no_grad()
    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `CachedRNNLM.score`; None if there may be no room within the engine's bound."""
        begin = self._clock()
        if self._capacity is not None and not self._capacity.has_room(0):
            return None
        log_prob, next_idx = torch.empty(len(word_id), dtype=torch.float32), torch.empty_like(context_idx)
        arrays = (tensor.contiguous().numpy() for tensor in (context_idx, word_id, log_prob, next_idx))
        contexts, words, *answers = arrays
        missing = np.empty(len(words), dtype=np.int64)
        find = jit_required(find_edges)
        missing = missing[: find(contexts, words, self.current_tables().edges, *answers, missing)]
        counts = self._expansion.layer.statistics
        counts.seconds_find += self._clock() - begin
        if len(missing) and not self._add(contexts, words, missing, answers):
            return None
        counts.num_calls += 1
        counts.num_queries += len(words)
        counts.num_edge_hits += len(words) - len(missing)
        return log_prob, next_idx

    def _add(self, contexts: Any, words: Any, missing: Any, answers: list[Any]) -> bool:
        """Adds and answers missing queries (M,) -> whether there was room for them and their hidden rows."""
        trie, lacking = self._expansion.trie, torch.from_numpy(contexts[missing])
        trie.check(lacking, torch.from_numpy(words[missing]), self.num_words)
        trie.call += 1
        is_room = self._capacity is None or self._capacity.has_room(len(missing))
        if not is_room or not self._add_rows(lacking) or not self._project(lacking):
            return False
        begin = self._clock()
        most, is_done, answer = trie.edges.count + len(missing), False, jit_required(answer_missing)
        while not is_done:
            tables = self.tables(most - trie.edges.count)
            assert tables is not None
            is_done = answer(contexts, words, missing, tables, *answers)
            self.take_nodes()
        if self._capacity is not None:
            row = trie.hidden_row.index_select(0, lacking).long()
            self._expansion.hidden.last_used.index_fill_(0, row, trie.call)
        self._expansion.layer.statistics.seconds_output += self._clock() - begin
        return True
