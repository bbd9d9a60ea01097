"""What decoders say of values that are no log-probabilities."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asr.decoding.interface import DecodingOptions, check_log_prob
from asr.decoding.online import StreamingDecoder
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from tests.decoding.random_graphs import random_graph, random_log_prob

Feed = Callable[[Tensor], object]


def _token_passing(graph: DecodingGraph, inputs: str) -> Feed:
    return TokenPassingDecoder(graph, inputs=inputs).decode


def _rescoring(graph: DecodingGraph, inputs: str) -> Feed:
    return TokenPassingDecoder(graph, lm_fusion="lattice", keep_lattice=True, inputs=inputs).decode


def _streaming(graph: DecodingGraph, inputs: str) -> Feed:
    decoder = StreamingDecoder(graph, inputs=inputs)
    streams = decoder.start(2)
    return lambda log_prob: _partials(decoder, streams, log_prob)


def _partials(decoder: Any, streams: list[int], log_prob: Tensor) -> list[Any]:
    decoder.advance(streams, log_prob, torch.tensor([log_prob.shape[1]] * 2))
    return [decoder.partial(stream) for stream in streams]


def _k2(graph: DecodingGraph, inputs: str) -> Feed:
    from asr.decoding.k2 import K2Decoder

    return K2Decoder(graph, inputs=inputs).decode


def _k2_streaming(graph: DecodingGraph, inputs: str) -> Feed:
    from asr.decoding.k2_online import K2StreamingDecoder

    decoder = K2StreamingDecoder(graph, inputs=inputs)
    streams = decoder.start(2)
    return lambda log_prob: _partials(decoder, streams, log_prob)


needs_k2 = pytest.mark.skipif(importlib.util.find_spec("k2") is None, reason="k2 is not installed")
DECODERS = [
    _token_passing,
    _rescoring,
    _streaming,
    pytest.param(_k2, marks=needs_k2),
    pytest.param(_k2_streaming, marks=needs_k2),
]


@pytest.mark.parametrize("make", DECODERS)
def test_the_first_batch_is_looked_at(make: Callable[[DecodingGraph, str], Feed]) -> None:
    graph, log_prob = random_graph(0), random_log_prob(0, 2, 6)
    with pytest.warns(UserWarning, match=r"the probabilities of a frame sum to .*for logits, apply log_softmax"):
        make(graph, "log_probs")(log_prob + 3.0)
    with pytest.raises(AsrError, match="are probabilities, not log-probabilities: give their natural logarithm"):
        make(graph, "log_probs")(log_prob.exp())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the values")
        feed = make(graph, "log_probs")
        feed(log_prob)
        feed(log_prob + 3.0)  # of a network whose first batch was right
        make(graph, "scores")(log_prob + 3.0)
        make(graph, "scores")(log_prob.exp())
    with pytest.raises(AsrError, match="no inputs 'logit'; give one of log_probs, scores"):
        make(graph, "logit")


@pytest.mark.parametrize("make", DECODERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_and_gradients_are_taken(make: Callable[[DecodingGraph, str], Feed], dtype: torch.dtype) -> None:
    given = random_log_prob(0, 2, 6).to(dtype)
    given[0, 0, 1] = -torch.inf
    wanted = make(random_graph(0), "scores")(given.float())
    found = make(random_graph(0), "log_probs")(given.clone().requires_grad_())
    assert str(found) == str(wanted)


def test_arrays_are_refused_by_name() -> None:
    with pytest.raises(AsrError, match=r"of type ndarray; give a tensor, as from torch\.as_tensor"):
        TokenPassingDecoder(random_graph(0)).decode(random_log_prob(0, 2, 6).numpy())  # type: ignore[arg-type]


def test_frames_that_are_not_used_do_not_count() -> None:
    log_prob = random_log_prob(1, 3, 6)
    log_prob[0, 3:] = 0.0
    log_prob[1] = 0.0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the values")
        check_log_prob(log_prob, torch.tensor([3, 0, 6]), 4, checks_values=True)
        check_log_prob(log_prob[:0], torch.tensor([], dtype=torch.int64), 4, checks_values=True)
        check_log_prob(log_prob[:, :0], torch.tensor([0, 0, 0]), 4, checks_values=True)
    with pytest.warns(UserWarning, match="sum to 4, not to 1"):
        check_log_prob(log_prob, torch.tensor([3, 6, 6]), 4, checks_values=True)
    with pytest.warns(UserWarning, match="sum to 0, not to 1"):
        check_log_prob(torch.full((1, 2, 4), -1e4), torch.tensor([2]), 4, checks_values=True)
    with pytest.warns(UserWarning, match=r"sum to e\^301, not to 1"):
        check_log_prob(torch.full((1, 2, 4), 300.0), torch.tensor([2]), 4, checks_values=True)


def test_a_first_batch_without_frames_leaves_the_look_to_the_next() -> None:
    decoder = TokenPassingDecoder(random_graph(0), DecodingOptions())
    decoder.decode(torch.zeros(0, 6, 4), torch.tensor([], dtype=torch.int64))
    with pytest.warns(UserWarning, match="log_softmax"):
        decoder.decode(random_log_prob(0, 2, 6) + 3.0)
