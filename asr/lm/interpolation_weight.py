"""Weights of linear and log-linear interpolation that make a held-out text likeliest.

Shapes: K models, L words of the text, V vocabulary.
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


def tune_log_linear_weights(log_prob: Tensor, word_id: Tensor, num_iterations: int = 30) -> Tensor:
    """Newton's method on the likelihood of P(w | h) = prod_k P_k(w | h)^weight_k / Z(h), with Z(h) summed exactly.

    Unnormalised, larger weights would always seem better; normalised, the model is exponential and its likelihood
    concave. What one model rules out is ruled out.

    Args:
        log_prob: log P(w | history) by each model of every word at each place of the text, (K, L, V).
        word_id: the text, (L,).
        num_iterations: at most; fewer where the weights stand still.

    Returns:
        weights (K,); they need not sum to one.
    """
    ruled_out = torch.isinf(log_prob).any(dim=0)
    features = log_prob.masked_fill(ruled_out, 0.0)
    known = ~ruled_out.gather(1, word_id[:, None])[:, 0]
    features, ruled_out, word_id = features[:, known], ruled_out[known], word_id[known]
    observed = of_words(features, word_id)
    weight = torch.full((len(features),), 1 / len(features), dtype=torch.float64)
    for _ in range(num_iterations):
        mixed = torch.tensordot(weight.to(features), features, dims=1).masked_fill(ruled_out, -torch.inf)
        prob = mixed.softmax(dim=1)
        weighted = prob * features
        expected = weighted.sum(dim=2)
        gradient = (observed - expected).double().mean(dim=1)
        second = torch.einsum("jlv,klv->jk", weighted, features).double() / len(word_id)
        covariance = second - expected.double() @ expected.double().t() / len(word_id)
        step = torch.linalg.solve(covariance + 1e-9 * torch.eye(len(weight), dtype=torch.float64), gradient)
        # Far from the optimum a whole step may overshoot.
        step *= min(1.0, 0.5 / float(step.abs().max().clamp(min=1e-12)))
        weight = weight + step
        if step.abs().max() < 1e-5:
            break
    return weight


def of_words(values: Tensor, word_id: Tensor) -> Tensor:
    """What stands at each place's own word: values (K, L, V), word_id (L,) -> (K, L)."""
    return values.gather(2, word_id.expand(len(values), -1)[:, :, None])[:, :, 0]


def log_linear_log_prob(log_prob: Tensor, word_id: Tensor, weight: Tensor) -> Tensor:
    """Normalised log P of each word of a text (L,) by the mixture: log_prob (K, L, V), weight (K,) -> (L,)."""
    ruled_out = torch.isinf(log_prob).any(dim=0)
    mixed = torch.tensordot(weight.to(log_prob), log_prob.masked_fill(ruled_out, 0.0), dims=1)
    mixed = mixed.masked_fill(ruled_out, -torch.inf).log_softmax(dim=1)
    return mixed.gather(1, word_id[:, None])[:, 0]
