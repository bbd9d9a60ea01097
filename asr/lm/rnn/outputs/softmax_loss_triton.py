"""The element-wise parts of `asr.lm.rnn.outputs.softmax_loss` as Triton kernels.

Scores may be the first columns of a wider matrix.

Shapes: N histories, V words, R history lengths, W the MaxEnt table, L words of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 2048


@triton.jit(do_not_specialize=["num_words"])
def _add_features(
    scores: tl.tensor,
    bias: tl.tensor,
    weight: tl.tensor,
    places: tl.tensor,
    log_z: tl.tensor,
    num_words: tl.tensor,
    stride: tl.tensor,
    R: tl.constexpr,
    L: tl.constexpr,
) -> None:
    """A program for each history adds bias and features to its scores, and writes their log Z."""
    row = tl.program_id(0).to(tl.int64)
    own = scores + row * stride
    top = tl.full([L], -1e30, tl.float32)
    total = tl.zeros([L], tl.float32)
    for begin in range(0, num_words, L):
        word = begin + tl.arange(0, L)
        is_valid = word < num_words
        score = tl.load(own + word, mask=is_valid, other=0.0) + tl.load(bias + word, mask=is_valid, other=0.0)
        for length in tl.static_range(R):
            place = tl.load(places + row * R + length)
            score += tl.load(weight + place + word, mask=is_valid, other=0.0)
        tl.store(own + word, score, mask=is_valid)
        # Each lane keeps a maximum and a sum of its own; words that cannot be predicted have a score of -inf.
        score = tl.where(is_valid, score, -float("inf"))
        next_top = tl.maximum(top, score)
        total = total * tl.exp(top - next_top) + tl.exp(score - next_top)
        top = next_top
    highest = tl.max(top, 0)
    tl.store(log_z + row, highest + tl.log(tl.sum(total * tl.exp(top - highest), 0)))


@triton.jit(do_not_specialize=["num_words"])
def _fill_gradients(
    scores: tl.tensor,
    log_z: tl.tensor,
    scale: tl.tensor,
    word_id: tl.tensor,
    places: tl.tensor,
    grad_weight: tl.tensor,
    num_words: tl.tensor,
    stride: tl.tensor,
    R: tl.constexpr,
    L: tl.constexpr,
) -> None:
    """Each program turns a tile of one history's scores into their gradients, and adds these to the features'."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * L + tl.arange(0, L)
    is_valid = word < num_words
    own = scores + row * stride
    score = tl.load(own + word, mask=is_valid, other=-float("inf"))
    grad = tl.exp(score - tl.load(log_z + row)) * tl.load(scale + row)
    grad -= tl.where(word == tl.load(word_id + row), 1.0, 0.0)
    tl.store(own + word, grad, mask=is_valid)
    for length in tl.static_range(R):
        place = tl.load(places + row * R + length)
        tl.atomic_add(grad_weight + place + word, grad, mask=is_valid & (grad != 0.0), sem="relaxed")


def add_features(scores: Tensor, bias: Tensor, weight: Tensor, places: Tensor) -> Tensor:
    """scores (N, V) += bias (V,) and the features weight (W,) at places (N, R) -> log Z, (N,)."""
    log_z = scores.new_empty(len(scores))
    with torch.cuda.device_of(scores):
        _add_features[(len(scores),)](
            *(scores, bias, weight, places.contiguous(), log_z, scores.shape[1], scores.stride(0)),
            R=places.shape[1], L=_WORDS, num_warps=8,
        )  # fmt: skip
    return log_z


def fill_gradients(
    scores: Tensor, log_z: Tensor, scale: Tensor, word_id: Tensor, places: Tensor, grad_weight: Tensor
) -> None:
    """scores (N, V) become their own gradients, and grad_weight (W,) += those of the features at places (N, R).

    log_z (N,) normalizes the scores, and scale (N,) is its gradient; word_id (N,) are the words to predict.
    """
    num_histories, num_words = scores.shape
    with torch.cuda.device_of(scores):
        _fill_gradients[(num_histories, triton.cdiv(num_words, _WORDS))](
            *(scores, log_z, scale, word_id.contiguous(), places.contiguous(), grad_weight),
            *(num_words, scores.stride(0)),
            R=places.shape[1], L=_WORDS, num_warps=8,
        )  # fmt: skip
