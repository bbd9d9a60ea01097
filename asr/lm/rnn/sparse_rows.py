"""One optimiser for a network most of whose parameters are tables of which a batch touches a few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from asr.lm.compiled_loop import loop_for


class AdamWithSparseRows(torch.optim.Optimizer):
    """Adam where gradients are dense; where they are sparse, Adagrad with one accumulator a row, touched rows only.

    Gradients are expected summed, not averaged, over the words of a batch: then a step does not depend on the batch
    size, and `initial_accumulator`, in units of one word's squared gradient, keeps rows that only noise has touched
    from moving as far as rows that data has touched. One-column tables are updated entry by entry, repeated
    entries as they come, without sorting.

    Args:
        params: parameters or groups; each group may set its own `lr`, `sparse_lr` and `initial_accumulator`.
        lr: Adam's learning rate.
        sparse_lr: Adagrad's learning rate.
        betas: Adam's decay rates.
        initial_accumulator: where Adagrad's accumulators start.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        sparse_lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        initial_accumulator: float = 1.0,
    ) -> None:
        defaults = {"lr": lr, "sparse_lr": sparse_lr, "betas": betas, "initial_accumulator": initial_accumulator}
        super().__init__(params, defaults)

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
                    self._adagrad(param, group["sparse_lr"] * factor, group["initial_accumulator"])
                else:
                    self._adam(param, group["lr"], group["betas"])
        return loss

    def _adam(self, param: Tensor, lr: float, betas: tuple[float, float]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"] = torch.zeros_like(param)
            state["square"] = torch.zeros_like(param)
        state["step"] += 1
        count = state["step"].item()
        grad, (decay, square_decay) = param.grad, betas
        assert grad is not None
        state["mean"].lerp_(grad, 1 - decay)
        state["square"].mul_(square_decay).addcmul_(grad, grad, value=1 - square_decay)
        root = state["square"].sqrt().mul_((1 - square_decay**count) ** -0.5).add_(1e-8)
        param.addcdiv_(state["mean"], root, value=-lr / (1 - decay**count))

    def _adagrad(self, param: Tensor, lr: float, initial_accumulator: float) -> None:
        state = self.state[param]
        if not state:
            state["square"] = param.new_full((param.shape[0],), initial_accumulator)
        grad = param.grad
        assert grad is not None
        loop = loop_for(adagrad_entries, param.detach()) if param.dim() == 1 else None
        if loop is not None:
            arrays = param.detach(), state["square"], grad._indices()[0], grad._values()
            loop(*(array.contiguous().numpy() for array in arrays), lr)
            return
        if param.dim() == 2:
            grad = grad.coalesce()
            rows, values = grad._indices()[0], grad._values()
            squares = values.square().mean(dim=1)
        else:
            rows, values = grad._indices()[0], grad._values()
            squares = values.square()
        state["square"].index_add_(0, rows, squares)
        scale = state["square"].index_select(0, rows).rsqrt_().mul_(-lr)
        param.index_add_(0, rows, values * (scale[:, None] if param.dim() == 2 else scale))


def adagrad_entries(param: Any, square: Any, entry: Any, grad: Any, lr: float) -> None:
    """Adagrad on single entries (W,) of a table, repeated ones as they come, for `compiled_loop`."""
    for i in range(len(entry)):
        square[entry[i]] += grad[i] * grad[i]
    for i in range(len(entry)):
        param[entry[i]] -= lr * grad[i] / math.sqrt(square[entry[i]])
