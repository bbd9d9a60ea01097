"""The loss of a softmax over the whole vocabulary, and its gradients, in blocks of histories.

Scores of all words after all histories of a batch do not fit into memory. So forward computes a block of them, its
losses and all of its gradients at once, and keeps the gradients alone. On a GPU, Triton kernels add the features, sum
the exponentials and turn scores into gradients.

A network that is searched with a constant log Z needs each history's log Z near it: a penalty on the square of their
difference ("self-normalization", Devlin et al. 2014, section 2.2).

Shapes: N words of a batch, H hidden, M history words, R history lengths, V vocabulary, W the MaxEnt table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from asr.kernels.jit import gpu_module
from asr.lm.rnn.maxent import HashedMaxEnt, add_score_range, places_and_weight
from asr.text.symbols import BOS_ID, EPSILON_ID

# Scores of a block: 16 MB on a CPU, half a gigabyte on a GPU.
_SCORES_ON_CPU = 1 << 22
_SCORES_ON_GPU = 1 << 27
_ALIGNED_WORDS = 128


class LogZPenalty(NamedTuple):
    """What pulls each history's log Z to a constant (): the weight of the square of their difference."""

    log_z: Tensor
    weight: float


class SoftmaxTargets(NamedTuple):
    """What the loss reads besides parameters.

    Attributes:
        word_id: the words to predict, (N,).
        places: of the MaxEnt slices, (N, R); R is 0 without features.
        penalty: weight of the squares of log Z minus its constant.
        is_coarse: whether the products may be rounded: to bfloat16 on a CPU, to TF32 on a GPU.
    """

    word_id: Tensor
    places: Tensor
    penalty: float
    is_coarse: bool


def softmax_loss(
    hidden: Tensor, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None, history: Tensor, word_id: Tensor,
    penalty: LogZPenalty | None = None, compute_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """hidden (N, H), rows (V, H), bias (V,), history (N, M), word_id (N,) -> sum of -log P, ().

    Args:
        maxent: n-gram features, or None; their gradient is sparse in form, and has all weights.
        penalty: added to each word's loss, or None.
        compute_dtype: bfloat16 allows products to be rounded.
    """
    places, weight = places_and_weight(maxent, history, hidden)
    if penalty is None:
        penalty = LogZPenalty(hidden.new_zeros(()), 0.0)
    targets = SoftmaxTargets(word_id, places, penalty.weight, compute_dtype != torch.float32)
    loss: Tensor = _SoftmaxLoss.apply(hidden, rows, bias, weight, penalty.log_z, targets)  # type: ignore[no-untyped-call]
    return loss


class _SoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: Tensor, bias: Tensor, weight: Tensor, log_z: Tensor, targets: SoftmaxTargets
    ) -> Tensor:
        with _rounded_products(hidden, targets.is_coarse) as dtype:
            loss, gradients = loss_and_gradients(hidden, rows, bias, weight, log_z, targets, dtype)
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In place, and released: the table's gradient is as large as the table.
        gradients, ctx.gradients = [part.mul_(grad) for part in ctx.gradients], None
        *dense, grad_weight, grad_log_z = gradients
        if not len(grad_weight):
            return *dense, None, grad_log_z, None
        # In the form of the other losses' gradients: the optimizer treats tables by it.
        every = torch.arange(len(grad_weight), device=grad_weight.device)[None]
        return *dense, torch.sparse_coo_tensor(every, grad_weight, grad_weight.shape), grad_log_z, None


@contextlib.contextmanager
def _rounded_products(like: Tensor, is_coarse: bool) -> Iterator[torch.dtype]:
    """The type of the factors of products; on a GPU they stay float32, and TF32 is allowed meanwhile."""
    if like.device.type != "cuda" or not is_coarse:
        yield torch.bfloat16 if is_coarse else torch.float32
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield torch.float32
    finally:
        torch.set_float32_matmul_precision(before)


def loss_and_gradients(
    hidden: Tensor, rows: Tensor, bias: Tensor, weight: Tensor, log_z: Tensor, targets: SoftmaxTargets,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The loss, and the gradients of hidden, rows, bias, weight and log_z, all float32."""
    gradients = [torch.zeros_like(part) for part in (hidden, rows, bias, weight, log_z)]
    grad_hidden, grad_rows, grad_bias, grad_weight, grad_log_z = gradients
    bias = bias.index_fill(0, torch.tensor([EPSILON_ID, BOS_ID], device=bias.device), -torch.inf)
    kernels = gpu_module("asr.lm.rnn.outputs.softmax_loss_triton", hidden.device)
    num_words, factors = len(rows), rows.to(dtype)
    add_features, fill_gradients = _add_features, _fill_gradients
    if kernels is not None:
        add_features, fill_gradients = kernels.add_features, kernels.fill_gradients
        # Tensor cores want rows of scores that begin at multiples of 16 bytes. The scores of added words stay zero.
        factors = F.pad(factors, (0, 0, 0, -num_words % _ALIGNED_WORDS))
    loss = torch.zeros((), device=hidden.device)
    at_once = max(1, (_SCORES_ON_GPU if hidden.device.type == "cuda" else _SCORES_ON_CPU) // len(factors))
    for begin in range(0, len(hidden), at_once):
        part = slice(begin, begin + at_once)
        states, word_id, places = hidden[part].to(dtype), targets.word_id[part], targets.places[part]
        padded_scores = torch.mm(states, factors.t()).float()
        scores = padded_scores[:, :num_words]
        own = add_features(scores, bias, weight, places)
        excess = own - log_z
        loss += (own - scores.gather(1, word_id[:, None])[:, 0]).sum() + targets.penalty * excess.square().sum()
        grad_log_z -= 2 * targets.penalty * excess.sum()
        scale = 1 + 2 * targets.penalty * excess
        fill_gradients(scores, own, scale, word_id, places, grad_weight)
        of_scores = padded_scores.to(dtype)
        grad_hidden[part] = torch.mm(of_scores, factors)
        grad_rows += torch.mm(of_scores.t(), states)[:num_words]
        grad_bias += scores.sum(dim=0)
    return loss, gradients


def _add_features(scores: Tensor, bias: Tensor, weight: Tensor, places: Tensor) -> Tensor:
    """scores (N, V) += bias (V,) and the features at places (N, R) -> log Z, (N,)."""
    scores += bias
    if places.shape[1]:
        add_score_range(scores, weight.detach(), places, 0)
    return scores.logsumexp(dim=1)


def _fill_gradients(
    scores: Tensor, log_z: Tensor, scale: Tensor, word_id: Tensor, places: Tensor, grad_weight: Tensor
) -> None:
    """scores (N, V) become their own gradients, and grad_weight (W,) += those of the features.

    scale (N,) is the gradient of log Z.
    """
    scores.sub_(log_z[:, None]).exp_().mul_(scale[:, None])
    scores[torch.arange(len(word_id), device=word_id.device), word_id] -= 1
    words = torch.arange(scores.shape[1], device=scores.device)
    for column in places.unbind(dim=1):
        grad_weight.index_add_(0, (column[:, None] + words).view(-1), scores.view(-1))
