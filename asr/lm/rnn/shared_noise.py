"""The noise half of NCE, every noise word against every word of the batch, with its gradients in closed form.

Shapes: N words of a batch, K noise words, G of them with MaxEnt gradients, H hidden, R history lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asr.lm.rnn.maxent import HashedMaxEnt


@dataclass(frozen=True)
class SharedNoise:
    """Noise words that a batch shares.

    MaxEnt weights get their gradient only through `grad_columns` (G,) of the K noise words, scaled by K / G: an
    unbiased estimate at a fraction of the cost of updating N * K weights.
    """

    noise_id: Tensor
    grad_columns: Tensor
    maxent: HashedMaxEnt | None
    compute_dtype: torch.dtype
    compiled: bool

    def loss(self, hidden: Tensor, history: Tensor, rows: Tensor, offset: Tensor) -> Tensor:
        """hidden (N, H), history (N, M), rows (K, H), offset (K,) -> sum over N and K of -log P(noise)."""
        weight = places = None
        if self.maxent is not None:
            weight, places = self.maxent.weight, self.maxent.places(history)
        loss: Tensor = _NoiseLoss.apply(  # type: ignore[no-untyped-call]
            hidden.to(self.compute_dtype), rows.to(self.compute_dtype), offset, weight, places, self
        )
        return loss


class _NoiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: Tensor, offset: Tensor, weight: Tensor | None, places: Tensor | None,
        noise: SharedNoise,
    ) -> Tensor:  # fmt: skip
        products = torch.mm(hidden, rows.t())
        if noise.compiled:
            loss, prob = compiled_terms()(products, offset, weight, places, noise.noise_id)
        else:
            loss, prob = noise_terms(products, offset, noise.maxent, places, noise.noise_id)
        ctx.save_for_backward(hidden, rows, prob, places)
        ctx.noise = noise
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, rows, prob, places = ctx.saved_tensors
        noise: SharedNoise = ctx.noise
        grad_hidden = torch.mm(prob, rows) * grad
        grad_rows = torch.mm(prob.t(), hidden) * grad
        grad_offset = torch.mm(prob.new_ones(1, len(prob)), prob)[0].float() * grad
        grad_weight = None
        if noise.maxent is not None:
            num_places = places.shape[1]
            slots = places[:, :, None] + noise.noise_id[noise.grad_columns]
            scale = grad * (len(noise.noise_id) / len(noise.grad_columns))
            values = (prob[:, noise.grad_columns].float() * scale)[:, None, :].expand(-1, num_places, -1)
            size = noise.maxent.weight.shape
            grad_weight = torch.sparse_coo_tensor(slots.reshape(1, -1), values.reshape(-1), size)
        return grad_hidden, grad_rows, grad_offset, grad_weight, None, None


def noise_terms(
    products: Tensor, offset: Tensor, maxent: HashedMaxEnt | None, places: Tensor | None, noise_id: Tensor
) -> tuple[Tensor, Tensor]:
    """products (N, K), offset (K,), places (N, R), noise_id (K,) -> loss (), P(data) (N, K) of the products' type."""
    odds = products.float() + offset
    if maxent is not None and places is not None:
        maxent.add_scores(odds, places, noise_id)
    loss = F.softplus(odds).sum()
    return loss, odds.sigmoid_().to(products.dtype)


def _terms_by_indexing(
    products: Tensor, offset: Tensor, weight: Tensor | None, places: Tensor | None, noise_id: Tensor
) -> tuple[Tensor, Tensor]:
    # What `noise_terms` computes, written for the compiler; weight (W,).
    odds = products.float() + offset
    if weight is not None and places is not None:
        for column in range(places.shape[1]):
            odds = odds + weight[places[:, column, None] + noise_id]
    prob = torch.sigmoid(odds)
    # softplus(x) = max(x, 0) - log(sigmoid(|x|)), with the one exponential shared.
    return (odds.clamp(min=0) - torch.log(torch.where(odds > 0, prob, 1 - prob))).sum(), prob.to(products.dtype)


@lru_cache(maxsize=1)
def compiled_terms() -> Callable[..., tuple[Tensor, Tensor]]:
    """The same in one loop over memory; needs torch 2 and a C++ compiler."""
    return torch.compile(_terms_by_indexing, dynamic=False)
