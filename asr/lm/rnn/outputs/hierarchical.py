"""Output layer with a binary decision at each inner node of a Huffman tree over the words (Mnih and Hinton 2008).

A word's probability is the product of the decisions on its path, so it needs no normalizer. `PathPrefixCache` keeps the
decisions computed for earlier queries of a history. In training on a CPU, compiled loops compute loss and gradients;
the words of a batch are divided among threads, and the results do not depend on the number of threads.

Shapes: N words of a batch, Q queries, H hidden, M history words, R history lengths, V vocabulary, L path nodes of all
words or queries, D distinct ones among them, O histories, K nodes kept of each, W the MaxEnt table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from asr.kernels.jit import arrays_of, in_threads, jit_for, jit_required
from asr.kernels.simd import row_product
from asr.lm.interface import CacheableTerms
from asr.lm.rnn.maxent import HashedMaxEnt, places_and_weight
from asr.lm.rnn.output_numba import add_path_log_prob, ask_for_path
from asr.lm.rnn.outputs.base import OutputLayer
from asr.text.symbols import BOS_ID, EPSILON_ID

_MIN_WORDS, _MIN_COLUMNS = 128, 32  # for each thread


class TreeBatch(NamedTuple):
    """The inputs that have no gradient: places of the MaxEnt slices (N, R), with R = 0 without features, and word_id
    (N,); and the tree: a word's path is path_begin[word] .. path_begin[word + 1] - 1 of path_node and path_sign."""

    places: Tensor
    word_id: Tensor
    path_begin: Tensor
    path_node: Tensor
    path_sign: Tensor


class LoopedTreeLoss(torch.autograd.Function):
    """hidden (N, H), rows (V, H), bias (V, 1), MaxEnt weight (W,) -> the loss; sparse gradients of tables.

    The forward pass computes the gradients as well, so that a node's vector is read only once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor, bias: Tensor, weight: Tensor, batch: TreeBatch) -> Tensor:
        num_words, (num_rows, size), places = len(hidden), rows.shape, batch.places
        length = batch.path_begin[batch.word_id + 1] - batch.path_begin[batch.word_id]
        first = length.cumsum(0) - length
        num_nodes = int(length.sum())
        losses, residual, grad_hidden = torch.empty(num_words), torch.empty(num_nodes), torch.zeros(num_words, size)
        slots = torch.empty(num_nodes, places.shape[1], dtype=torch.int64)
        paths = batch.word_id, batch.path_begin, batch.path_node, first
        tables = tuple(arrays_of(hidden, *paths, places, batch.path_sign, rows, bias[:, 0], weight))
        results = tuple(arrays_of(losses, residual, slots, grad_hidden))
        loop = jit_required(fill_paths)
        in_threads(lambda begin, end: loop(begin, end, tables, results), num_words, _MIN_WORDS)
        which, node = torch.empty(num_nodes, dtype=torch.int64), torch.empty(num_nodes, dtype=torch.int64)
        num_distinct = jit_required(number_nodes)(*arrays_of(*paths[:3], which, node), np.full(num_rows, -1))
        grad_rows, grad_bias = torch.zeros(num_distinct, size), torch.zeros(num_distinct, 1)
        sums = arrays_of(hidden, first, which, residual, grad_rows, grad_bias)
        loop_of_sums = jit_required(add_row_gradients)
        in_threads(lambda begin, end: loop_of_sums(begin, end, *sums), size, _MIN_COLUMNS)
        ctx.save_for_backward(grad_hidden, node[:num_distinct], grad_rows, grad_bias, slots, residual)
        ctx.sizes = rows.shape, bias.shape, weight.shape
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, node, grad_rows, grad_bias, slots, residual = ctx.saved_tensors
        rows_shape, bias_shape, weight_shape = ctx.sizes
        grad_weight = None
        if weight_shape[0]:
            values = (residual * grad)[:, None].expand_as(slots)
            grad_weight = torch.sparse_coo_tensor(slots.view(1, -1), values.reshape(-1), weight_shape)
        return (
            grad_hidden * grad,
            torch.sparse_coo_tensor(node[None], grad_rows * grad, rows_shape),
            torch.sparse_coo_tensor(node[None], grad_bias * grad, bias_shape),
            grad_weight,
            None,
        )


def fill_paths(begin: int, end: int, tables: Any, results: Any) -> None:
    """For the words begin .. end - 1, fills losses (N,) and adds to grad_hidden (N, H). For the nodes of their paths,
    which begin at first (N,), fills residual (L,), the gradients of their logits, and slots (L, R)."""
    hidden, word_id, path_begin, path_node, first, places, path_sign, rows, bias, weight = tables
    losses, residual, slots, grad_hidden = results
    one = np.float32(1.0)
    for query in range(begin, end):
        word, at, total, grads = word_id[query], first[query], 0.0, grad_hidden[query]
        if query + 1 < end:
            ask_for_path(query + 1, word, hidden, places, word_id[query + 1], path_begin, path_node, rows, weight)
        for place in range(path_begin[word], path_begin[word + 1]):
            node, sign = path_node[place], path_sign[place]
            logit = bias[node] + row_product(hidden, query, rows, node)
            for i in range(places.shape[1]):
                slots[at, i] = places[query, i] + node
                logit += weight[slots[at, i]]
            against = -sign * logit
            power = math.exp(-abs(against))
            total += max(against, 0.0) + math.log1p(power)
            grad = np.float32(-sign * (one if against > 0 else power) / (one + power))
            row = rows[node]
            for j in range(len(row)):
                grads[j] += grad * row[j]
            residual[at] = grad
            at += 1
        losses[query] = total


def number_nodes(word_id: Any, path_begin: Any, path_node: Any, which: Any, node: Any, number_of: Any) -> int:
    """Numbers the distinct nodes of all words' paths: the number of each (L,), and the node of each number (D or more,)
    -> D. number_of (V,), at first -1, gets each node's number."""
    at = num = 0
    for query in range(len(word_id)):
        word = word_id[query]
        for place in range(path_begin[word], path_begin[word + 1]):
            one = path_node[place]
            if number_of[one] < 0:
                number_of[one], node[num] = num, one
                num += 1
            which[at] = number_of[one]
            at += 1
    return num


def add_row_gradients(
    begin: int, end: int, hidden: Any, first: Any, which: Any, residual: Any, grad_rows: Any, grad_bias: Any
) -> None:
    """Adds to the columns begin .. end - 1 of grad_rows (D, H), and, if begin is 0, to grad_bias (D, 1)."""
    for query in range(len(first)):
        last = first[query + 1] if query + 1 < len(first) else len(which)
        factor = hidden[query]
        for at in range(first[query], last):
            grads, grad = grad_rows[which[at]], residual[at]
            for j in range(begin, end):
                grads[j] += grad * factor[j]
            if begin == 0:
                grad_bias[which[at], 0] += grad


_LARGEST = math.log(1e30)
"""The log of a number somewhat below float32's maximum."""


class PathPrefixCache:
    """Uses and keeps known decisions: says which part of each path is left to compute, and sums over the paths.

    Args:
        query: the query of each node, path after path from the root down, (L,).
        column: the column of each node in `held`, if it is below K; the root's is 0, (L,).
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
        # If a node is known, so are all above it; their count says where to continue.
        num_known = torch.zeros_like(owner).index_add_(0, query, (~value.isnan()).long())
        length = torch.zeros_like(owner).index_add_(0, query, torch.ones_like(query))
        begin = length.cumsum(0) - length + num_known - 1
        at = torch.arange(len(query), device=query.device)
        self.rest = (at >= begin[query]).nonzero().squeeze(1)
        start = (at == begin[query]).nonzero().squeeze(1)
        self._known = held.new_zeros(len(owner)).index_add_(0, query[start], value[start].log())
        self._query = query[self.rest]
        # A decision leads to the next node of the path.
        following = (self.rest + 1).clamp(max=max(len(query) - 1, 0))
        is_on_path = (following > self.rest) & (query[following] == self._query) & is_held[following]
        self._place = place[following]
        self._is_kept = is_on_path

    def total(self, against: Tensor) -> Tensor:
        """-log P of each decision of `rest` (R,) -> -log P of each path, (Q,)."""
        # Double precision, since the sums run over all queries.
        sums = torch.zeros_like(self._known, dtype=torch.float64).index_add_(0, self._query, against.double())
        total = self._known + sums.float()
        before = sums.cumsum(0) - sums
        through = against.double().cumsum(0) - before[self._query] + self._known[self._query]
        kept = (self._is_kept & (through < _LARGEST)).nonzero().squeeze(1)
        self._held[self._place[kept]] = through[kept].exp().float()
        return total


class HuffmanOutput(OutputLayer):
    """P(w | h) is the product over w's path of sigmoid(+-(row(node) . hidden + bias(node) + MaxEnt(node, h))).

    Args:
        vocabulary_size: V; `<eps>` and `<s>` are not in the tree.
        hidden_size: H.
        maxent: n-gram features of histories and tree nodes, or None.
    """

    def __init__(self, vocabulary_size: int, hidden_size: int, maxent: HashedMaxEnt | None) -> None:
        super().__init__()
        self.maxent = maxent
        self.rows = nn.Embedding(vocabulary_size, hidden_size, sparse=True)
        self.bias = nn.Embedding(vocabulary_size, 1, sparse=True)
        nn.init.zeros_(self.rows.weight)
        nn.init.zeros_(self.bias.weight)
        # The counts determine the tree, so a checkpoint holds only the counts.
        self.counts: Tensor
        self.register_buffer("counts", torch.ones(vocabulary_size, dtype=torch.int64))
        self.path_begin: Tensor
        self.path_node: Tensor
        self.path_sign: Tensor
        for name in ("path_begin", "path_node", "path_sign"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self._build()

    @property
    def cacheable_terms(self) -> CacheableTerms:
        return "tree"

    def set_unigram(self, counts: Tensor, *, reset_bias: bool) -> None:
        """Builds the tree; `reset_bias` makes each decision as likely as the counts below it."""
        self.counts.copy_(counts + 1)
        node_odds = self._build()
        if reset_bias:
            self.bias.weight.data[: len(node_odds), 0] = torch.from_numpy(node_odds).to(self.bias.weight)

    def loss(self, hidden: Tensor, history: Tensor, word_id: Tensor, generator: torch.Generator) -> Tensor:
        if jit_for(fill_paths, hidden.detach()) is not None:
            return self._looped_loss(hidden, history, word_id)
        query, node, sign = self._paths(word_id)
        logits = (self.rows(node) * hidden[query]).sum(dim=1) + self.bias(node).squeeze(1)
        if self.maxent is not None:
            logits = logits + self.maxent.score(history[query], node)
        return F.softplus(-sign * logits).sum()

    def _looped_loss(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        places, weight = places_and_weight(self.maxent, history, hidden)
        batch = TreeBatch(places, word_id, self.path_begin, self.path_node, self.path_sign)
        loss: Tensor = LoopedTreeLoss.apply(hidden, self.rows.weight, self.bias.weight, weight, batch)  # type: ignore[no-untyped-call]
        return loss

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        return self.path_log_prob(hidden, history, word_id, word_id, hidden.new_empty(0, 0))[0]

    def path_log_prob(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, owner: Tensor, held: Tensor
    ) -> tuple[Tensor, int]:
        # The loops need the rows as one array, which a table in host memory is not.
        is_whole = isinstance(self.rows, nn.Embedding) and not torch.is_grad_enabled()
        loop = jit_for(add_path_log_prob, hidden.detach()) if is_whole else None
        if loop is None:
            log_prob, num_computed = self._log_prob_by_tensors(hidden, history, word_id, owner, held)
        else:
            log_prob, num_computed = self._log_prob_by_loops(hidden, history, word_id, owner, held, loop)
        return log_prob.masked_fill((word_id == EPSILON_ID) | (word_id == BOS_ID), -torch.inf), num_computed

    def _log_prob_by_tensors(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, owner: Tensor, held: Tensor
    ) -> tuple[Tensor, int]:
        query, node, sign = self._paths(word_id)
        known = PathPrefixCache(query, self._root - node, owner, held) if held.numel() else None
        if known is not None:
            query, node, sign = query[known.rest], node[known.rest], sign[known.rest]
        logits = (self.rows(node) * hidden[query]).sum(dim=1) + self.bias.weight[node, 0]
        if self.maxent is not None:
            logits = logits + self.maxent.score(history[query], node)
        against = F.softplus(-sign * logits)
        if known is not None:
            return -known.total(against), len(node)
        return hidden.new_zeros(len(word_id)).index_add(0, query, -against), len(node)

    def _log_prob_by_loops(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, owner: Tensor, held: Tensor, loop: Callable[..., int]
    ) -> tuple[Tensor, int]:
        log_prob = hidden.new_zeros(len(word_id))
        places, weight = places_and_weight(self.maxent, history, hidden)
        arrays = arrays_of(
            hidden, places, word_id, self.path_begin, self.path_node, self.path_sign,
            self.rows.weight, self.bias.weight[:, 0], weight, owner,
        )  # fmt: skip
        # Queries of one word are adjacent, so that the path's nodes are in the processor's cache for all but the first.
        order = np.argsort(word_id.numpy())
        num_computed = loop(order, *arrays, held.numpy(), self._root, log_prob.numpy())
        return log_prob, num_computed

    def _paths(self, word_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """word_id (Q,) -> for each node of each path its query, node and direction (+1 or -1), all (L,)."""
        begin = self.path_begin[word_id]
        length = self.path_begin[word_id + 1] - begin
        query = torch.repeat_interleave(torch.arange(len(word_id), device=word_id.device), length)
        first = length.cumsum(0) - length
        place = torch.arange(len(query), device=word_id.device) + (begin - first)[query]
        return query, self.path_node[place], self.path_sign[place]

    def _build(self) -> NDArray[np.float32]:
        """Sets the paths; returns each node's log odds of going to the +1 side by the counts."""
        counts = self.counts.cpu().numpy()
        begin, node, sign, node_odds = huffman_paths(counts, np.array([EPSILON_ID, BOS_ID]))
        self._root = len(node_odds) - 1
        device = self.counts.device
        self.path_begin = torch.from_numpy(begin).to(device)
        self.path_node = torch.from_numpy(node).to(device)
        self.path_sign = torch.from_numpy(sign).to(device)
        return node_odds

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._build()


def huffman_paths(
    counts: NDArray[np.int64], left_out: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """The Huffman tree (1952) over the words except `left_out`; words with equal counts keep their order.

    Returns:
        path_begin (V + 1,), path_node and path_sign from the root down, all words' paths one after the other, and
        the log odds of the +1 side of each node. Nodes are numbered by the counts below them, the root last.
    """
    words = np.setdiff1d(np.arange(len(counts)), left_out)
    leaves = words[np.argsort(counts[words], kind="stable")]
    num_leaves = len(leaves)
    # Two queues: leaves by count, and inner nodes, which are created in order of count.
    weight = counts[leaves].tolist()
    pairs: list[tuple[int, int]] = []  # the two nodes below each inner node, the lighter one first
    next_leaf, next_inner = 0, num_leaves
    for made in range(num_leaves, 2 * num_leaves - 1):
        chosen = []
        for _ in range(2):
            if next_leaf < num_leaves and (next_inner >= made or weight[next_leaf] <= weight[next_inner]):
                chosen.append(next_leaf)
                next_leaf += 1
            else:
                chosen.append(next_inner)
                next_inner += 1
        less, more = chosen
        pairs.append((less, more))
        weight.append(weight[less] + weight[more])
    below = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    by_side = np.array(weight, dtype=np.float64)[below]
    odds = np.log(by_side[:, 1] / by_side[:, 0]).astype(np.float32)
    parent, side = np.full(len(weight), -1), np.zeros(len(weight), dtype=np.float32)
    parent[below], side[below] = np.arange(len(below))[:, None], (-1.0, 1.0)
    # All words climb to the root together, one decision at a time.
    climbs = []
    length = np.zeros(len(counts), dtype=np.int64)
    leaf = node = np.flatnonzero(parent[:num_leaves] >= 0)
    while len(leaf):
        climbs.append((leaf, parent[node], side[node]))
        length[leaves[leaf]] += 1
        node = parent[node] + num_leaves
        is_below_root = parent[node] >= 0
        leaf, node = leaf[is_below_root], node[is_below_root]
    begin = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(length, out=begin[1:])
    path_node, path_sign = np.empty(begin[-1], dtype=np.int64), np.empty(begin[-1], dtype=np.float32)
    for height, (leaf, inner, sign) in enumerate(climbs, start=1):
        place = begin[leaves[leaf] + 1] - height
        path_node[place], path_sign[place] = inner, sign
    return begin, path_node, path_sign, odds
