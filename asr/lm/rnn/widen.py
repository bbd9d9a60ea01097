"""A recurrent language model made wider without changing what it computes (Net2WiderNet; Chen et al. 2016)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.rnn.model import RNNLanguageModel
from asr.lm.rnn.recurrent import GruLayer


def widened(network: RNNLanguageModel, hidden_size: int, seed: int = 1) -> RNNLanguageModel:
    """A copy of a network with one GRU layer, with more hidden units and the same scores.

    Each new unit is a copy of an old one. The weight of what reads the old unit is split among this unit and its
    copies, at random, so that training tells them apart.

    Args:
        network: the network; it must have a projection between the layer and the output.
        hidden_size: the new number of units.
        seed: of the split.

    Raises:
        AsrError: the network has another shape, or is wider already.
    """
    layer = network.layers[0]
    if len(network.layers) != 1 or not isinstance(layer, GruLayer) or network.projection is None:
        raise AsrError("only a network with one GRU layer and tied embeddings of another size can be widened.")
    old_size = network.config.hidden_size
    if hidden_size < old_size:
        raise AsrError(f"the network has {old_size} hidden units, more than {hidden_size}; raise network.hidden_size.")
    copied = torch.arange(hidden_size) % old_size
    rows = torch.cat([copied + gate * old_size for gate in range(3)])
    generator = torch.Generator().manual_seed(seed)
    state = network.state_dict()
    for name in ("weight_ih", "bias_ih", "bias_hh"):
        state[f"layers.0.{name}"] = state[f"layers.0.{name}"][rows]
    state["layers.0.weight_hh"] = _split_columns(state["layers.0.weight_hh"][rows], copied, generator)
    state["projection.weight"] = _split_columns(state["projection.weight"], copied, generator)
    wider = RNNLanguageModel(network.vocabulary, replace(network.config, hidden_size=hidden_size))
    wider.load_state_dict(state)
    return wider.train(network.training)


def _split_columns(weight: Tensor, copied: Tensor, generator: torch.Generator) -> Tensor:
    """weight (R, old) -> (R, new): an old column is the sum of the new columns made from it."""
    share = 0.5 + torch.rand(len(weight), len(copied), generator=generator)
    total = torch.zeros_like(weight).index_add_(1, copied, share)
    return weight[:, copied] * share / total[:, copied]
