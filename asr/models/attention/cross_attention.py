"""What the decoder of an encoder-decoder of transformers attends to.

Its networks return attention weights only where a slower implementation of attention is chosen when they are loaded.
Here, weights are computed from queries and keys.

Shapes: N utterances, U tokens, T frames, H heads, D dimensions of a head.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Names of the layers' cross-attention.
_NAMES = ("encoder_attn", "crossattention")
Seen = dict[tuple[int, str], Tensor]
"""Queries (N, U, H * D) and keys (N, T, H * D) by layer and `q` or `k`."""


class CrossAttention:
    """The heads of cross-attention that follow the audio.

    Args:
        network: of transformers.

    Attributes:
        of_layer: the heads of each layer that are used: those that the generation configuration names
            (`alignment_heads`), or all of the upper half of the layers. Empty if no cross-attention is found.
    """

    def __init__(self, network: Any) -> None:
        self._watch = _Watch()
        self._modules = [
            module
            for name, module in network.named_modules()
            if name.rpartition(".")[2] in _NAMES and all(hasattr(module, each) for each in ("q_proj", "k_proj"))
        ]
        num = len(self._modules)
        self.of_layer: dict[int, list[int] | None] = dict.fromkeys(range(num // 2, num))
        named = getattr(network.generation_config, "alignment_heads", None) or ()
        # Distilled networks may have the configuration of their teacher, which has more layers.
        if named and all(layer < num and head < _num_heads(self._modules[layer]) for layer, head in named):
            self.of_layer = {layer: [head for own, head in named if own == layer] for layer, _ in named}
        for layer in self.of_layer:
            for name in ("q", "k"):
                getattr(self._modules[layer], f"{name}_proj").register_forward_hook(_Hook(self._watch, (layer, name)))

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        """Collects queries and keys while this thread runs the network."""
        seen: Seen = {}
        self._watch.thread.seen = seen
        try:
            yield seen
        finally:
            self._watch.thread.seen = None

    def weights(self, seen: Seen, mask: Tensor) -> Tensor:
        """Weights (H, N, U, T) of all heads that are used, over frames where the mask (N, T) is set."""
        found = []
        for layer, heads in self.of_layer.items():
            dim = self._modules[layer].head_dim
            query, key = (seen[layer, name].float().unflatten(2, (-1, dim)) for name in ("q", "k"))
            key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
            fit = torch.einsum("nuhd,nthd->hnut", query, key) * dim**-0.5
            weight = fit.masked_fill(~mask[:, None], -torch.inf).softmax(3)
            found.append(weight if heads is None else weight[heads])
        return torch.cat(found)


def _num_heads(module: Any) -> int:
    return int(module.q_proj.out_features) // int(module.head_dim)


class _Watch:
    """Where each thread collects, if it does; a copy of it collects nothing."""

    def __init__(self) -> None:
        self.thread = threading.local()

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()


class _Hook(NamedTuple):
    """Keeps the output of a layer's queries or keys."""

    watch: _Watch
    key: tuple[int, str]

    def __call__(self, module: Any, inputs: Any, output: Tensor) -> None:
        seen = getattr(self.watch.thread, "seen", None)
        if seen is not None:
            seen[self.key] = output
