"""Histories of tokens that a causal Transformer has read, as a tree, and their batched computation.

A node is a history of tokens; its parent is the history without the last one. For each node the tree keeps the keys and
values of its last token in all layers, so that no token is read twice after the same tokens. All nodes that are missing
at one moment, of any length and of all utterances, go through the network in one run. The attention mask of that run
lets each token see itself and the tokens of its own history ("tree attention", Miao et al., 2024).

Shapes: Q queries, R new nodes, A earlier nodes that new ones see, D tokens of the longest history, C tokens of the
vocabulary, G groups of nodes, E heads, K width of a key, H width of the last layer.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.errors import AsrError
from asr.kernels.hash_table import HashTable, first_of_each

ROOT = 0
"""The node of the history that has nothing but the token that begins every text."""

_FIRST_NODES = 1024
# A run of the network has about so many tokens at most, in groups of so many, and so many scores.
_MOST_TOKENS = 512
_GROUP = 16
_MOST_SCORES = 1 << 25
# By how much scores may differ if only the order of sums does, in standard deviations.
_TOLERANCE = 1e-2
_NUM_CHECKED = 1000
_MOST_NODES = 1 << 22
# Unlike those of other trees and other processes, whose nodes may have been copied; never 0.
_GENERATIONS = itertools.count(random.SystemRandom().randrange(1, 1 << 23))


class TokenTree:
    """Scores tokens after histories of tokens.

    Args:
        network: a causal language model of transformers, such as a `LlamaForCausalLM`.
        begin_id: the token that begins every text.
        num_bytes: memory for keys, values and outputs. Once it is used up, `make_room` forgets all histories.
        name: of the network, shown to users.
        factor: what the network multiplies its scores by, see `checked_factor`.

    Attributes:
        generation: a number below 2**24 for all nodes until histories are forgotten; others are not valid.
        num_read: the number of tokens that went through the network.
    """

    def __init__(self, network: nn.Module, begin_id: int, num_bytes: int, name: str, factor: float = 1.0) -> None:
        self._network = network
        self._begin_id = begin_id
        self._num_bytes = num_bytes
        self._name = name
        embedding: Any = network.get_output_embeddings()  # type: ignore[operator]
        # transformers has renamed this argument in its fifth version.
        self._layers: nn.Module = network.base_model  # type: ignore[assignment]
        parameters = inspect.signature(self._layers.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._weight: Tensor = embedding.weight
        self._bias: Tensor | None = getattr(embedding, "bias", None)
        self._factor = factor
        self.device = self._weight.device
        self.num_read = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all histories but the shortest one."""
        self.generation = next(_GENERATIONS)
        self._num_nodes = 0
        self._parent, self._token, self._depth, self._row = (
            torch.full((_FIRST_NODES,), -1, dtype=torch.int64) for _ in range(4)
        )
        self._edges = HashTable(16, torch.device("cpu"))
        # Of each row: keys and values of each layer, (rows, E, K); outputs (rows, H); log of the sum of all scores.
        self._num_rows = 0
        self._past: list[tuple[Tensor, ...]] = []
        self._output = self._weight.new_empty(0, self._weight.shape[1])
        self._log_sum = torch.empty(0, device=self.device)
        self._new_nodes(torch.tensor([-1]), torch.tensor([self._begin_id]), torch.tensor([0]))

    def make_room(self) -> None:
        """Forgets all histories if the memory is used up."""
        if self._num_nodes > _MOST_NODES or self.num_bytes > self._num_bytes:
            self.clear()

    @property
    def num_bytes(self) -> int:
        """The memory for keys, values and outputs."""
        tensors = [self._output, self._log_sum, *(part for layer in self._past for part in layer)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def extended(self, node: Tensor, token: Tensor) -> Tensor:
        """The nodes (Q,) of the histories of nodes (Q,) and one more token (Q,); those that are missing are created."""
        key = (node << 32) | token
        slot, missing = self._edges.find(key)
        if missing is not None:
            new, first = self._edges.insert(key.index_select(0, missing))
            one = missing.index_select(0, first)
            before = node.index_select(0, one)
            self._edges.values[new.index_select(0, first)] = self._new_nodes(
                before, token.index_select(0, one), self._depth.index_select(0, before) + 1
            )
            slot, _ = self._edges.find(key)
        return self._edges.values.index_select(0, slot)

    @torch.no_grad()
    def log_prob(self, node: Tensor, token: Tensor) -> Tensor:
        """log P(token | history) of nodes (Q,) and tokens (Q,) -> (Q,) float32, all on the host."""
        self._read(node)
        row = self._row.index_select(0, node).to(self.device)
        token = token.to(self.device)
        output = self._output.index_select(0, row)
        score = (output.float() * self._weight.index_select(0, token).float()).sum(1)
        if self._bias is not None:
            score = score + self._bias.index_select(0, token).float()
        return (self._factor * score - self._log_sum.index_select(0, row)).cpu()

    @torch.no_grad()
    def checked_factor(self) -> float:
        """Compares a small tree with whole texts.

        Returns:
            The factor that the network applies to the scores of its output layer, 1 for most.

        Raises:
            AsrError: the network's scores are not the same in a tree, or not those of its output layer.
        """
        generator = torch.Generator().manual_seed(0)
        num_tokens, size = 6, len(self._weight)
        text = torch.randint(size, (2, num_tokens), generator=generator)
        text[:, 0] = self._begin_id
        text[1, 1:3] = text[0, 1:3]  # two texts that begin alike
        wanted = self._network(input_ids=text.to(self.device)).logits.float()
        scores = self._scores(self._layers(input_ids=text.to(self.device)).last_hidden_state)
        factor = float((wanted * scores).sum() / (scores * scores).sum())
        self._factor *= factor
        if not self._are_near(factor * scores, wanted):
            raise AsrError(
                f"{self._name}: its scores are not those of its output layer alone, so they cannot be computed for "
                f"single tokens; {_CURE}."
            )
        node, nodes = torch.tensor([ROOT, ROOT]), []
        for place in range(num_tokens):
            node = node if place == 0 else self.extended(node, text[:, place])
            nodes.append(node)
        node, some = torch.stack(nodes, dim=1).flatten(), torch.randperm(size, generator=generator)[:_NUM_CHECKED]
        try:
            self._read(nodes[2])  # the others then find a part of their histories known
            scores = self.log_prob(node.repeat_interleave(len(some)), some.repeat(len(node))).view(len(node), -1)
        except Exception as error:  # of any class: networks read these arguments in their own ways
            raise AsrError(f"{self._name}: {_NO_TREE}; {_CURE}.") from error
        if not self._are_near(scores, wanted.log_softmax(-1).flatten(0, 1).cpu()[:, some]):
            raise AsrError(f"{self._name}: {_NO_TREE}; {_CURE}.")
        return self._factor

    def _are_near(self, ours: Tensor, theirs: Tensor) -> bool:
        """Whether two arrays differ by little, compared with the spread of their values."""
        eps = torch.finfo(self._weight.dtype).eps
        return bool((ours - theirs).abs().max() <= max(_TOLERANCE, 64 * eps) * theirs.std())

    def _new_nodes(self, parent: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Creates nodes (R,) -> their numbers."""
        begin, end = self._num_nodes, self._num_nodes + len(parent)
        if end > len(self._parent):
            room = torch.full((max(end, len(self._parent) // 2),), -1, dtype=torch.int64)
            self._parent, self._token, self._depth, self._row = (
                torch.cat((part, room)) for part in (self._parent, self._token, self._depth, self._row)
            )
        self._parent[begin:end], self._token[begin:end], self._depth[begin:end] = parent, token, depth
        self._num_nodes = end
        return torch.arange(begin, end)

    def _scores(self, output: Tensor) -> Tensor:
        """The scores (..., C) float32 of all tokens after outputs (..., H)."""
        return self._factor * nn.functional.linear(output, self._weight, self._bias).float()

    def _read(self, node: Tensor) -> None:
        """Lets the network read whatever it has not read of the histories of nodes (Q,)."""
        missing = self._with_missing(node[self._row.index_select(0, node) < 0])
        if not len(missing):
            return
        depth_first = missing[self._order(self._histories(missing))]
        for some in depth_first.split(max(_GROUP, min(_MOST_TOKENS, _MOST_SCORES // len(self._weight)))):
            self._run([self._with_missing(group) for group in some.split(_GROUP)])

    def _with_missing(self, node: Tensor) -> Tensor:
        """Nodes (R,) and those above them that the network has not read, ascending: parents come first."""
        levels = [node]
        while len(levels[-1]):
            above = self._parent.index_select(0, levels[-1])
            above = torch.unique(above[above >= 0])
            levels.append(above[self._row.index_select(0, above) < 0])
        return torch.unique(torch.cat(levels))

    def _histories(self, node: Tensor) -> Tensor:
        """Nodes (R,) and all those above them, (R, D), in columns by their depths; -1 elsewhere."""
        depth = self._depth.index_select(0, node)
        histories = torch.full((len(node), int(depth.max()) + 1), -1, dtype=torch.int64)
        row = torch.arange(len(node))
        while len(row):
            histories[row, depth] = node
            below = depth > 0
            row, depth, node = row[below], depth[below] - 1, self._parent.index_select(0, node[below])
        return histories

    @staticmethod
    def _order(histories: Tensor) -> Tensor:
        """The depth-first order of histories (R, D), (R,): neighbors have most of their tokens in common."""
        return torch.from_numpy(np.lexsort(histories.numpy().T[::-1]))

    def _run(self, groups: list[Tensor]) -> None:
        """One run of the network for G groups of nodes; those above a node are known, or in its group.

        Each group is one sequence. Groups are small, since each token is compared with all others that its group sees.
        """
        every = torch.cat(groups)
        seen = self._histories(every).split([len(group) for group in groups])
        rows = [torch.where(each >= 0, self._row[each.clamp(min=0)], -1) for each in seen]
        held = [torch.unique(row[row >= 0]) for row in rows]
        num_new, num_held = max(map(len, groups)), max(map(len, held))
        # The last column is for the places of the histories where there is no node.
        is_seen = torch.zeros(len(groups), num_new, num_held + num_new + 1, dtype=torch.bool)
        for one, group, each, row, own in zip(is_seen, groups, seen, rows, held, strict=True):
            column = torch.where(row >= 0, torch.searchsorted(own, row), num_held + torch.searchsorted(group, each))
            one[: len(group)].scatter_(1, column.masked_fill(each < 0, num_held + num_new), True)
        dtype = self._weight.dtype
        mask = torch.zeros(len(groups), 1, num_new, num_held + num_new, dtype=dtype)
        mask.masked_fill_(~is_seen[:, None, :, :-1], torch.finfo(dtype).min)
        node = pad_sequence(groups, batch_first=True)
        cache = self._cache_of(pad_sequence(held, batch_first=True).to(self.device))
        found = self._layers(
            input_ids=self._token[node].to(self.device),
            position_ids=self._depth[node].to(self.device),
            attention_mask=mask.to(self.device),
            use_cache=True,
            **{self._cache_name: cache},
        )
        # A node that is missing above several groups is in each of them; one of its places counts.
        place = torch.cat([number * num_new + torch.arange(len(group)) for number, group in enumerate(groups)])
        one, _ = first_of_each(every)
        place = place[one].to(self.device)

        def taken(values: Tensor) -> Tensor:
            """Of values (G, num_new, ...), those of the new nodes, (R, ...)."""
            return values.flatten(0, 1).index_select(0, place)

        layers = [
            tuple(taken(part[:, :, num_held:].transpose(1, 2)) for part in (layer.keys, layer.values))
            for layer in cache.layers
        ]
        output = taken(found.last_hidden_state)
        begin, end = self._num_rows, self._num_rows + len(place)
        self._reserve(end, layers)
        for kept, new in zip(self._past, layers, strict=True):
            kept[0][begin:end], kept[1][begin:end] = new
        self._output[begin:end] = output
        self._log_sum[begin:end] = self._scores(output).logsumexp(-1)
        self._row[every[one]] = torch.arange(begin, end)
        self._num_rows = end
        self.num_read += len(every)

    def _cache_of(self, row: Tensor) -> Any:
        """The keys and values of rows (G, A), as the network takes them."""
        cache = importlib.import_module("transformers.cache_utils").DynamicCache()
        if row.shape[1]:
            for number, layer in enumerate(self._past):
                cache.update(*(part[row].transpose(1, 2) for part in layer), number)
        return cache

    def _reserve(self, num_rows: int, layers: Sequence[tuple[Tensor, ...]]) -> None:
        """Makes room for rows like those of the layers' keys and values (R, E, K)."""
        if num_rows <= len(self._output):
            return
        room = max(num_rows, len(self._output) * 3 // 2)

        def longer(old: Tensor) -> Tensor:
            new = old.new_empty(room, *old.shape[1:])
            new[: self._num_rows] = old[: self._num_rows]
            return new

        self._past = [tuple(map(longer, layer)) for layer in self._past or layers]
        self._output, self._log_sum = longer(self._output), longer(self._log_sum)


_NO_TREE = (
    "it cannot read several texts that begin alike as one tree (its cache has no keys and values, or it does not take "
    "positions)"
)
_CURE = "use a model like GPT-2, Llama, Qwen or Mistral"
