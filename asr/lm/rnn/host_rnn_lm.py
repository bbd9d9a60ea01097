"""A recurrent language model whose big tables stay in host memory: the network on the device, within a budget."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.lm.cached_rows import CachedRows
from asr.lm.host_table import HostEmbedding, HostMaxEnt, HostTable
from asr.lm.placement import LEAST_PLACES
from asr.lm.rnn.full_softmax import FullSoftmaxOutput
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.nce import NceOutput
from asr.lm.rnn.rnn_lm import RnnLm


def table_bytes(network: RnnLm) -> int:
    """The size of the tables that `with_host_tables` can leave in host memory."""
    return sum(_num_bytes(module) for module in _big_modules(network).values())


def with_host_tables(
    network: RnnLm, device: torch.device | str, device_budget: int
) -> tuple[RnnLm, dict[str, HostTable]]:
    """The same network on a device, for scoring; equal to the original but for rounding.

    Word vectors come first, since a row of them is as much as hundreds of MaxEnt weights: they are resident if the
    budget allows, else a cache of them takes the part of the budget that they have in the tables' size.

    Args:
        network: in host memory; it keeps its weights, and lends its tables to the copy.
        device: where it shall run.
        device_budget: bytes of device memory that the tables may take; the rest of the network is small.

    Returns:
        the network, and its tables by name (`words`, or `output` and `input`, and `maxent`).

    Raises:
        AsrError: the budget is too small, or the scores are sums over the whole vocabulary.
    """
    output = network.output
    if isinstance(output, FullSoftmaxOutput) or (isinstance(output, NceOutput) and output.normalized):
        raise AsrError(
            "A language model normalised over the whole vocabulary reads all its word vectors for each history; give "
            "no device budget, or take an NCE, class or hierarchical output."
        )
    modules = _big_modules(network)
    least_left = sum(_least_bytes(module) for module in modules.values())
    if device_budget < least_left:
        raise AsrError(
            f"A device budget of {device_budget} bytes is too small for the tables of a recurrent language model; "
            f"give {least_left} or more."
        )
    tables: dict[str, HostTable] = {}
    put_in: dict[int, Any] = {id(network.vocabulary): network.vocabulary}
    left, bytes_left = device_budget, table_bytes(network)
    for name, module in modules.items():
        least_left -= _least_bytes(module)
        share = left - least_left
        if _num_bytes(module) > share:
            share = min(share, max(_least_bytes(module), left * _num_bytes(module) // bytes_left))
        is_features = isinstance(module, HashedMaxEnt)
        table = HostTable(_table(module), device, share, skips_zeros=is_features)
        put_in[id(module)] = HostMaxEnt(module, table) if isinstance(module, HashedMaxEnt) else HostEmbedding(table)
        tables[name] = table
        left -= table.device_bytes
        bytes_left -= _num_bytes(module)
    return copy.deepcopy(network, put_in).to(device), tables


def _big_modules(network: RnnLm) -> dict[str, nn.Embedding | HashedMaxEnt]:
    """The modules with a table, each once, word vectors first."""
    modules: dict[str, nn.Embedding | HashedMaxEnt] = {"words": network.embedding}
    if network.output.rows is not network.embedding:
        modules = {"output": network.output.rows, "input": network.embedding}
    if network.maxent is not None:
        modules["maxent"] = network.maxent
    return modules


def _table(module: nn.Embedding | HashedMaxEnt) -> Tensor:
    """(R, W), memory shared with the module."""
    weight = module.weight.detach()
    return weight if weight.dim() == 2 else weight[:, None]


def _num_bytes(module: nn.Embedding | HashedMaxEnt) -> int:
    return module.weight.numel() * module.weight.element_size()


def _least_bytes(module: nn.Embedding | HashedMaxEnt) -> int:
    """What the smallest placement takes: a cache, or all of a table that is smaller than that."""
    cache = LEAST_PLACES * CachedRows.place_bytes(_table(module).shape[1], module.weight.dtype)
    return min(cache, _num_bytes(module))
