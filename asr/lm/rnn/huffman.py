"""Output layer with a binary decision at each inner node of a Huffman tree over the words: normalised by its making.

Shapes: N words of a batch, Q queries, H hidden, M history words, V vocabulary, L path nodes of all queries together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from asr.lm.compiled_loop import arrays_of, loop_for
from asr.lm.rnn.held_paths import HeldPaths
from asr.lm.rnn.huffman_training import LoopedTreeLoss, TreeBatch, fill_paths
from asr.lm.rnn.maxent import HashedMaxEnt, places_and_weight
from asr.lm.rnn.output_kernel import add_path_log_prob
from asr.text.vocabulary import BOS_ID, EPSILON_ID


class HuffmanOutput(nn.Module):
    """P(w | h) is the product over w's path of sigmoid(+-(row(node) . hidden + bias(node) + MaxEnt(node, h))).

    Args:
        vocabulary_size: V; `<eps>` and `<s>` are not in the tree.
        hidden_size: H.
        maxent: n-gram features of histories and tree nodes, or none.
    """

    def __init__(self, vocabulary_size: int, hidden_size: int, maxent: HashedMaxEnt | None) -> None:
        super().__init__()
        self.maxent = maxent
        self.rows = nn.Embedding(vocabulary_size, hidden_size, sparse=True)
        self.bias = nn.Embedding(vocabulary_size, 1, sparse=True)
        nn.init.zeros_(self.rows.weight)
        nn.init.zeros_(self.bias.weight)
        # The tree follows from the counts, so the counts are what a checkpoint holds.
        self.counts: Tensor
        self.register_buffer("counts", torch.ones(vocabulary_size, dtype=torch.int64))
        self.path_begin: Tensor
        self.path_node: Tensor
        self.path_sign: Tensor
        for name in ("path_begin", "path_node", "path_sign"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self._build()

    def set_unigram(self, counts: Tensor, *, reset_bias: bool) -> None:
        """Builds the tree; `reset_bias` makes each decision as likely as the counts below it."""
        self.counts.copy_(counts + 1)
        node_odds = self._build()
        if reset_bias:
            self.bias.weight.data[: len(node_odds), 0] = torch.from_numpy(node_odds).to(self.bias.weight)

    def loss(self, hidden: Tensor, history: Tensor, word_id: Tensor, generator: torch.Generator) -> Tensor:
        """hidden (N, H), history (N, M), word_id (N,) -> negative log-likelihood, ()."""
        if loop_for(fill_paths, hidden.detach()) is not None:
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
        """hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,)."""
        return self.path_log_prob(hidden, history, word_id, word_id, hidden.new_empty(0, 0))[0]

    def path_log_prob(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, owner: Tensor, held: Tensor
    ) -> tuple[Tensor, int]:
        """log_prob (Q,), and how many decisions had to be computed for it.

        held (O, K) belongs to the histories owner (Q,): of the K likeliest nodes by the counts, the root first,
        1 / P(node | history), NaN where it is not known. It is read and filled.
        """
        # The loops read the rows in one array, which a table in host memory is not.
        is_whole = isinstance(self.rows, nn.Embedding) and not torch.is_grad_enabled()
        loop = loop_for(add_path_log_prob, hidden.detach()) if is_whole else None
        if loop is None:
            log_prob, num_computed = self._log_prob_by_tensors(hidden, history, word_id, owner, held)
        else:
            log_prob, num_computed = self._log_prob_by_loops(hidden, history, word_id, owner, held, loop)
        return log_prob.masked_fill((word_id == EPSILON_ID) | (word_id == BOS_ID), -torch.inf), num_computed

    def _log_prob_by_tensors(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, owner: Tensor, held: Tensor
    ) -> tuple[Tensor, int]:
        query, node, sign = self._paths(word_id)
        known = HeldPaths(query, self._root - node, owner, held) if held.numel() else None
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
        # Queries of a word one after the other: the second finds the path's nodes in the cache.
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
    """Huffman's tree over the words but `left_out`; equal counts in the order of the words.

    Returns:
        path_begin (V + 1,), path_node and path_sign from the root down, all words' paths one after the other, and
        the log odds of the +1 side of each node. Nodes are numbered by the counts below them, the root last.
    """
    words = np.setdiff1d(np.arange(len(counts)), left_out)
    leaves = words[np.argsort(counts[words], kind="stable")]
    num_leaves = len(leaves)
    # Two queues: leaves by count, and inner nodes, which come into being by count.
    weight = np.concatenate((counts[leaves], np.zeros(max(0, num_leaves - 1), dtype=np.int64))).tolist()
    parent = [-1] * len(weight)
    side = [0.0] * len(weight)
    odds = np.zeros(max(0, num_leaves - 1), dtype=np.float32)
    next_leaf, next_inner = 0, num_leaves
    for made in range(num_leaves, len(weight)):
        chosen = []
        for _ in range(2):
            if next_leaf < num_leaves and (next_inner >= made or weight[next_leaf] <= weight[next_inner]):
                chosen.append(next_leaf)
                next_leaf += 1
            else:
                chosen.append(next_inner)
                next_inner += 1
        less, more = chosen
        parent[less] = parent[more] = made
        side[less], side[more] = -1.0, 1.0
        weight[made] = weight[less] + weight[more]
        odds[made - num_leaves] = np.log(weight[more] / weight[less])
    paths: list[list[int]] = [[] for _ in counts]
    signs: list[list[float]] = [[] for _ in counts]
    for leaf, word in enumerate(leaves.tolist()):
        node = leaf
        while parent[node] >= 0:
            paths[word].append(parent[node] - num_leaves)
            signs[word].append(side[node])
            node = parent[node]
        paths[word].reverse()
        signs[word].reverse()
    begin = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum([len(path) for path in paths], out=begin[1:])
    path_node = np.array([node for path in paths for node in path], dtype=np.int64)
    path_sign = np.array([sign for path in signs for sign in path], dtype=np.float32)
    return begin, path_node, path_sign, odds
