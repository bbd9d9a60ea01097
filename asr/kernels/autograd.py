"""Switches torch's autograd off for code that keeps tensors between calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_autograd() -> Iterator[None]:
    """Records no gradients and makes ordinary tensors, also inside `torch.inference_mode()`.

    A tensor that is made in inference mode cannot be changed outside of it. Caches and streams would break if their
    user called them in inference mode once and not the next time. Works as a decorator, too: `@no_autograd()`.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
