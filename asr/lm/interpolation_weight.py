"""Weights of linear interpolation that make a held-out text likeliest.

Shapes: K models, L words of the text.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tune_linear_weights(log_prob: Tensor, num_iterations: int = 100) -> tuple[Tensor, Tensor]:
    """Expectation maximisation from equal weights; the text's probability is concave in them, so it finds the best.

    Args:
        log_prob: log P(word | history) of each word by each model, (K, L).
        num_iterations: at most; fewer where the weights stand still.

    Returns:
        weights (K,), which sum to one, and the mixture's log_prob (L,).
    """
    log_prob = log_prob.double()
    weight = torch.full((len(log_prob),), 1 / len(log_prob), dtype=torch.float64)
    for _ in range(num_iterations):
        share = torch.softmax(log_prob + weight.log()[:, None], dim=0)
        new_weight = share.mean(dim=1)
        change = (new_weight - weight).abs().max()
        weight = new_weight
        if change < 1e-6:
            break
    return weight, torch.logsumexp(log_prob + weight.log()[:, None], dim=0)
