"""The optimiser of acoustic models."""

from __future__ import annotations

import torch
from torch import nn


def adamw(network: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only, in one fused kernel where this torch has one for the device."""
    matrices = [parameter for parameter in network.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in network.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    on_cpu = all(parameter.device.type == "cpu" for parameter in network.parameters())
    fused = version >= (2, 4) or (version >= (2, 0) and not on_cpu)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), **({"fused": True} if fused else {}))
