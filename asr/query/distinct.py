"""One representative of each distinct key of a batch, and the largest value of each."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

# torch 1.13 calls the function beta; what is used of it has stayed the same since.
warnings.filterwarnings("ignore", message=r"scatter_reduce\(\) is in beta")


def one_of_each(key: Tensor) -> tuple[Tensor, Tensor]:
    """key (Q,) -> the position of one query of each distinct key (D,), ascending by key, and which one each is (Q,)."""
    distinct, which = torch.unique(key, return_inverse=True)
    position = torch.arange(key.numel(), device=key.device)
    return torch.empty_like(distinct).index_copy_(0, which, position), which


def largest_of_each(values: Tensor, index: Tensor, num: int) -> Tensor:
    """values (Q,), index (Q,) in 0 .. num - 1 -> the largest value of each index (num,), lowest where none."""
    least = -torch.inf if values.is_floating_point() else torch.iinfo(values.dtype).min
    return torch.full((num,), least, dtype=values.dtype, device=values.device).scatter_reduce_(
        0, index, values, reduce="amax"
    )
