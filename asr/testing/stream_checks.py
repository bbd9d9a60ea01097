"""Checks on a simulated GPU whether the streams of a recognizer's workers free or read memory too early.

In each call, the acoustic model runs in one stream, and each worker's language model, whose arrays grow, in another.
"""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.pipeline import pipelined
from asr.recognizer import Recognizer, ResourceOptions
from asr.testing.simulated_gpu import simulated_gpu

_NUM_BATCHES, _NUM_QUERIES = 6, 64


def stream_hazards(bundle: Bundle, num_calls: int, num_streams: int = 4, has_kernels: bool = True) -> tuple[int, int]:
    """Runs calls of a recognizer with two workers whose language models are queried for new histories in each call.

    Args:
        bundle: a bundle with a recurrent language model.
        num_calls: number of calls, each of six batches.
        num_streams: see `asr.testing.simulated_gpu.SimulatedDevice`.
        has_kernels: whether histories are looked up by Triton's kernels; otherwise by tensor operations.

    Returns:
        The number of memory blocks freed while another stream might still use them, and the number of uses of a block
        while another stream might still write to it.
    """
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(simulated_gpu(num_streams))
        stack.enter_context(torch.no_grad())
        if not has_kernels:
            stack.enter_context(mock.patch("asr.kernels.jit.triton_available", lambda device: False))
        resources = ResourceOptions(num_workers=2)
        own = copy.deepcopy(bundle)  # its networks are moved to the device
        recognizer = Recognizer(own, "rnn", decoder="token-passing", lm_fusion="search", resources=resources)
        recognizer.to("cuda")
        for call in range(num_calls):
            _ask(recognizer, call)
        return device.streams.hazards.total(), device.streams.races.total()


def _ask(recognizer: Recognizer, call: int) -> None:
    """A call like those of `Recognizer.forward`, with words in place of samples, and queries in place of the search."""
    with recognizer._engines.lend(recognizer._new_engines) as engines:
        generator, num_words = torch.Generator().manual_seed(call), len(recognizer.bundle.graph.vocabulary)

        def first(length: int) -> Tensor:
            word_id = torch.randint(4, num_words, (length, _NUM_QUERIES), generator=generator)
            return word_id.to(recognizer.device) + 0

        def second(worker: int, word_ids: Tensor) -> Tensor:
            lm = engines.models[worker].model
            assert lm is not None
            context_idx = lm.start(_NUM_QUERIES)
            for word_id in word_ids:
                log_prob, context_idx = lm.score(context_idx, word_id)
            engines.models[worker].forget_contexts()
            return log_prob + 0.0

        lengths = [3 + call + batch % 2 for batch in range(_NUM_BATCHES)]
        for log_prob in pipelined(lengths, first, second, recognizer.resources.num_workers, engines.streams):
            log_prob.tolist()
