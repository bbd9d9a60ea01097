"""A decoding graph as a submodule: its tensors are buffers, which move and are saved with the module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from asr.graph.decoding_graph import TENSOR_DTYPES, DecodingGraph, require_valid_tensors


class GraphModule(nn.Module):
    """Holds a decoding graph's tensors as buffers, which are not copied as long as they stay on the host.

    `load_state_dict` loads another graph of the same size, with the same tokens and words. It changes the tensors in
    place, including those of the graph that was given, even if the module is on another device.

    Args:
        graph: a graph on the host.
    """

    def __init__(self, graph: DecodingGraph) -> None:
        super().__init__()
        self._host = graph
        for name in TENSOR_DTYPES:
            self.register_buffer(name, getattr(graph, name))

    def decoding_graph(self) -> DecodingGraph:
        """The graph, on the module's device."""
        return replace(self._host, **{name: getattr(self, name) for name in TENSOR_DTYPES})

    def extra_repr(self) -> str:
        return f"states={self._host.num_states}, arcs={self._host.num_arcs}, words={len(self._host.vocabulary)}"

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Checks tensors before they replace the graph's, because compiled searches do not check them.

        Raises:
            AsrError: an index is out of range, or no path can end.
        """
        given = {name: state_dict.get(prefix + name) for name in TENSOR_DTYPES}
        loaded: dict[str, Tensor] = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        fits = {name for name, tensor in loaded.items() if tensor.shape == getattr(self, name).shape}
        # torch reports tensors that are missing or of another size, and does not copy the latter.
        other = {name: tensor.to("cpu", TENSOR_DTYPES[name]) for name, tensor in loaded.items() if name in fits}
        if other:
            tensors = {name: other.get(name, getattr(self._host, name)) for name in TENSOR_DTYPES}
            sizes = len(self._host.tokens), len(self._host.vocabulary)
            require_valid_tensors(tensors, *sizes, "the decoding graph to be loaded")
        super()._load_from_state_dict(state_dict, prefix, *args)
        with torch.no_grad():
            for name in fits:
                # With `assign=True`, torch keeps the given tensors with their types.
                setattr(self, name, getattr(self, name).to(TENSOR_DTYPES[name]))
                getattr(self._host, name).copy_(getattr(self, name))
