"""The linear layer of acoustic models, and of what is behind recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asr.fixed_linear import FixedLinear


class PackedLinear(nn.Linear):
    """`nn.Linear`; on a CPU, where no gradient is wanted, weights are kept packed (`FixedLinear`)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self._fixed = FixedLinear()

    def tables_of_few(self) -> tuple[Any, Any] | None:
        """As of `FixedLinear`."""
        return self._fixed.tables_of_few(self.weight, self.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs (..., in_features) -> (..., out_features)."""
        if torch.is_grad_enabled() or inputs.device.type != "cpu" or inputs.dtype != torch.float32:
            return super().forward(inputs)
        outputs = self._fixed(inputs.reshape(-1, self.in_features), self.weight, self.bias)
        return outputs.reshape(*inputs.shape[:-1], self.out_features)
