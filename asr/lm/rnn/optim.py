"""An optimizer for networks whose parameters are mostly tables of which a batch touches only a few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.kernels.jit import arrays_of, in_threads, jit_for
from asr.kernels.simd import prefetch

_BETAS = 0.9, 0.99  # Adam's decay rates
_AHEAD = 16  # entries that are prefetched
_MIN_PLACES = 4096  # of a table, for each thread


class AdamWithSparseRows(torch.optim.Optimizer):
    """Adam where gradients are dense; where they are sparse, Adagrad with one accumulator a row, touched rows only.

    Gradients are expected summed, not averaged, over the words of a batch: then a step does not depend on the batch
    size. Accumulators begin at 1, in units of one word's squared gradient, so that rows that only noise has touched do
    not move as far as rows that data has touched. Tables of one dimension are updated entry by entry, in the order of
    the gradients, without sorting or adding up repeated entries.

    Args:
        params: parameters or groups; each group may set its own `lr` and `sparse_lr`.
        lr: Adam's learning rate.
        sparse_lr: Adagrad's learning rate.
    """

    def __init__(self, params: Iterable[Any], lr: float = 2e-3, sparse_lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "sparse_lr": sparse_lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update; the schedule scales `lr`, and `sparse_lr` by the same factor."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            factor = group["lr"] / group.get("initial_lr", group["lr"]) if group["lr"] else 0.0
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    self._adagrad(param, group["sparse_lr"] * factor)
                else:
                    self._adam(param, group["lr"])
        return loss

    def _adam(self, param: Tensor, lr: float) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"] = torch.zeros_like(param)
            state["square"] = torch.zeros_like(param)
        state["step"] += 1
        count = state["step"].item()
        grad, (decay, square_decay) = param.grad, _BETAS
        assert grad is not None
        state["mean"].lerp_(grad, 1 - decay)
        state["square"].mul_(square_decay).addcmul_(grad, grad, value=1 - square_decay)
        root = state["square"].sqrt().mul_((1 - square_decay**count) ** -0.5).add_(1e-8)
        param.addcdiv_(state["mean"], root, value=-lr / (1 - decay**count))

    def _adagrad(self, param: Tensor, lr: float) -> None:
        state = self.state[param]
        if not state:
            state["square"] = param.new_ones(param.shape[0])
        grad = param.grad
        assert grad is not None
        rows, values = grad._indices()[0], grad._values()
        loop = jit_for(adagrad_entries if param.dim() == 1 else adagrad_rows, param.detach())
        if loop is not None:
            by_row = (rows,) if param.dim() == 1 else rows.sort(stable=True)
            arrays = arrays_of(param, state["square"], *by_row, values)
            # Each thread reads all gradients, and updates its part of the table.
            at_least = _MIN_PLACES if param.dim() == 1 else len(param)
            in_threads(lambda begin, end: loop(begin, end, *arrays, lr), len(param), at_least)
            return
        if param.dim() == 2:
            grad = grad.coalesce()
            rows, values = grad._indices()[0], grad._values()
            squares = values.square().mean(dim=1)
        else:
            squares = values.square()
        state["square"].index_add_(0, rows, squares)
        scale = state["square"].index_select(0, rows).rsqrt_().mul_(-lr)
        param.index_add_(0, rows, values * (scale[:, None] if param.dim() == 2 else scale))


def adagrad_entries(begin: int, end: int, param: Any, square: Any, entry: Any, grad: Any, lr: float) -> None:
    """Adagrad on single entries (W,) of a table, those in begin .. end - 1; repeated ones are updated repeatedly."""
    mine, num = np.empty(len(entry) + _AHEAD, dtype=np.int64), 0
    for i in range(len(entry)):
        mine[num] = i
        num += begin <= entry[i] < end
    mine[num:] = 0  # prefetched after the last one
    for at in range(num):
        prefetch(square, entry[mine[at + _AHEAD]])
        prefetch(param, entry[mine[at + _AHEAD]])
        square[entry[mine[at]]] += grad[mine[at]] * grad[mine[at]]
    for at in range(num):
        prefetch(square, entry[mine[at + _AHEAD]])
        prefetch(param, entry[mine[at + _AHEAD]])
        param[entry[mine[at]]] -= lr * grad[mine[at]] / math.sqrt(square[entry[mine[at]]])


def adagrad_rows(
    begin: int, end: int, param: Any, square: Any, row_idx: Any, order: Any, grad: Any, lr: float
) -> None:  # fmt: skip
    """Adagrad on rows (W, H) of a table, those in begin .. end - 1, by the sums of their gradients grad (L, H).

    row_idx (L,) is sorted, and order (L,) gives the row of grad that belongs to each.
    """
    num, size = len(order), param.shape[1]
    total = np.empty(size, dtype=np.float32)
    at = np.searchsorted(row_idx, begin)
    while at < num and row_idx[at] < end:
        row = row_idx[at]
        total[:] = np.float32(0.0)
        while at < num and row_idx[at] == row:
            values = grad[order[at]]
            for j in range(size):
                total[j] += values[j]
            at += 1
        squares = np.float32(0.0)
        for j in range(size):
            squares += total[j] * total[j]
        square[row] += squares / np.float32(size)
        scale, weights = np.float32(lr / math.sqrt(square[row])), param[row]
        for j in range(size):
            weights[j] -= scale * total[j]
