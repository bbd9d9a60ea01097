"""Two workers whose arrays grow in streams of their own, on a simulated GPU: is memory freed too early?

That is how `Recognizer` runs its stages: the acoustic model in one stream, each worker's language model in another,
call after call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from asr.lm.cached.states import HiddenStore
from asr.pipeline import StreamPool, pipelined
from asr.testing.simulated_gpu import simulated_gpu

_CUDA = torch.device("cuda", 0)
_NUM_WORKERS, _WIDTH = 2, 8


def early_frees(num_calls: int, is_persistent: bool = True, num_streams: int = 32) -> int:
    """How many blocks are freed while another stream may still use them.

    Args:
        num_calls: each runs six batches.
        is_persistent: whether streams live as long as the arrays, which are made in them. False makes new streams for
            each call and the arrays in the default stream, which is the mutant that must be noticed.
        num_streams: see `asr.testing.simulated_gpu.SimulatedDevice`.
    """
    with simulated_gpu(num_streams) as device:
        streams = StreamPool(_NUM_WORKERS + 1, _CUDA)
        stores = list(_stores(streams if is_persistent else None))

        def first(value: int) -> Tensor:
            return torch.full((64, _WIDTH), float(value), device=_CUDA) + 1.0

        def second(worker: int, values: Tensor) -> int:
            stores[worker].append(values * 2.0)
            return worker

        run: Callable[..., Iterator[int]] = pipelined
        for _ in range(num_calls):
            if not is_persistent:
                streams = StreamPool(_NUM_WORKERS + 1, _CUDA)
            for _ in run(range(6), first, second, _NUM_WORKERS, streams):
                pass
        return device.streams.hazards.total()


def _stores(streams: StreamPool | None) -> Iterator[HiddenStore]:
    for worker in range(_NUM_WORKERS):
        if streams is None:
            yield HiddenStore(_WIDTH, "float32", _CUDA)
            continue
        with streams.running(worker):
            store = HiddenStore(_WIDTH, "float32", _CUDA)
        yield store
