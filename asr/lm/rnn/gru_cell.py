"""The element-wise part of a GRU's step in training, forward and backward: as written, or compiled.

Shapes: B streams, H hidden. Gate order r, z, n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def cell_forward(
    gates: Tensor, recurrent: Tensor, hidden: Tensor, next_keep: Tensor,
    saved: Tensor, out: Tensor, next_hidden: Tensor, next_previous: Tensor,
) -> None:  # fmt: skip
    """gates, recurrent (B, 3H), hidden (B, H) -> out (B, H), and what the next step starts from; saved (B, 4H) receives
    r, z, n and n's recurrent part."""
    size = hidden.shape[1]
    rz = torch.sigmoid(gates[:, : 2 * size].float() + recurrent[:, : 2 * size].float())
    from_state = recurrent[:, 2 * size :]
    n = torch.tanh(gates[:, 2 * size :].float() + rz[:, :size] * from_state.float())
    new = n + rz[:, size:] * (hidden - n)
    kept = new * next_keep
    out.copy_(new)
    next_hidden.copy_(kept)
    next_previous.copy_(kept)
    saved[:, : 2 * size].copy_(rz)
    saved[:, 2 * size : 3 * size].copy_(n)
    saved[:, 3 * size :].copy_(from_state)


def cell_backward(
    grad_out: Tensor, direct: Tensor, through: Tensor, next_keep: Tensor, saved: Tensor, previous: Tensor,
    grad_recurrent: Tensor, grad_gates: Tensor, next_direct: Tensor,
) -> None:  # fmt: skip
    """The new state's gradient, from its output and from the step after it (direct and through the recurrent weights),
    (B, H) -> gradients of both pre-activations (B, 3H) and of the old state's direct path (B, H)."""
    size = direct.shape[1]
    grad = grad_out + (direct + through.float()) * next_keep
    r, z, n, from_state = (part.float() for part in saved.split(size, dim=1))
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * from_state * r * (1 - r)
    grad_z = grad * (previous.float() - n) * z * (1 - z)
    for target, last in ((grad_recurrent, grad_n * r), (grad_gates, grad_n)):
        target[:, :size].copy_(grad_r)
        target[:, size : 2 * size].copy_(grad_z)
        target[:, 2 * size :].copy_(last)
    next_direct.copy_(grad * z)


@dataclass(frozen=True)
class GruCell:
    """The element-wise part of a step, as written or compiled into one loop each."""

    forward: Callable[..., None]
    backward: Callable[..., None]


PLAIN_CELL = GruCell(cell_forward, cell_backward)


@lru_cache(maxsize=1)
def compiled_cell() -> GruCell:
    """Needs torch 2 and a C++ compiler; three times the speed of the plain cell on a CPU."""
    return GruCell(torch.compile(cell_forward, dynamic=False), torch.compile(cell_backward, dynamic=False))
