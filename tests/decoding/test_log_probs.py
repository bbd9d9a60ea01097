"""What decoders say of values that are no log-probabilities."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asr.decoding.interface import check_chunks, check_log_prob, check_numbers
from asr.decoding.online import StreamingDecoder
from asr.decoding.settings import DecodingOptions
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


@pytest.mark.parametrize(("shift", "is_told"), [(0.09, False), (-0.09, False), (0.11, True), (-0.11, True)])
def test_sums_of_about_one_are_rounding(shift: float, is_told: bool) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_log_prob(random_log_prob(1, 2, 6) + shift, torch.tensor([6, 6]), 4, checks_values=True)
    assert [f"sum to {math.exp(shift):.3g}, not to 1" in str(one.message) for one in told] == [True] * is_told


@pytest.mark.parametrize(("total", "are_probabilities"), [(0.92, True), (1.08, True), (0.88, False), (1.12, False)])
def test_probabilities_sum_to_about_one_and_none_is_negative(total: float, are_probabilities: bool) -> None:
    values = torch.tensor([0.1, 0.2, 0.3, 0.4]).mul(total).expand(1, 2, 4)
    for lowest, is_refused in ((0.0, are_probabilities), (-1e-3, False)):
        shifted = values + torch.tensor([lowest, 0.0, 0.0, -lowest]) - torch.tensor([0.1, 0.0, 0.0, -0.1]) * total
        if is_refused:
            with pytest.raises(AsrError, match="the values are probabilities"):
                check_log_prob(shifted, torch.tensor([2]), 4, checks_values=True)
        else:
            with pytest.warns(UserWarning, match="are not log-probabilities"):
                check_log_prob(shifted, torch.tensor([2]), 4, checks_values=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_frames_that_no_network_may_give_are_named(bad: float) -> None:
    log_prob = random_log_prob(1, 3, 6)
    log_prob[1, 4, 3] = log_prob[2, 0, 0] = bad
    check_numbers(log_prob, torch.tensor([6, 4, 0]))
    with pytest.raises(AsrError, match="utterance 1, frame 4: the acoustic model gave NaN or infinity"):
        check_numbers(log_prob, torch.tensor([6, 5, 0]))
    with pytest.raises(AsrError, match="utterance 2, frame 0"):
        check_log_prob(log_prob, torch.tensor([6, 4, 1]), 4)
    check_numbers(torch.full((1, 9, 4), -torch.inf), torch.tensor([9]))


def test_frame_counts_are_whole_numbers() -> None:
    with pytest.raises(AsrError, match=r"frame counts are torch\.float32; give whole numbers"):
        check_log_prob(random_log_prob(1, 2, 6), torch.tensor([1.0, 0.5]), 4)


@pytest.mark.parametrize("num_frames", [[7, 6], [6, -1]])
def test_more_frames_than_there_are(num_frames: list[int]) -> None:
    check_log_prob(random_log_prob(1, 2, 6), torch.tensor([0, 6]), 4)
    told = f"frame counts range from {min(num_frames)} to {max(num_frames)}, but the log-probabilities have 6 frames"
    with pytest.raises(AsrError, match=told):
        check_log_prob(random_log_prob(1, 2, 6), torch.tensor(num_frames), 4)


@pytest.mark.parametrize("shape", [(6, 4), (2, 6, 4, 1), (3, 6, 4)])
def test_shapes_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(AsrError, match="give \\(utterances, frames, tokens\\) and \\(utterances,\\)"):
        check_log_prob(torch.zeros(shape), torch.tensor([6, 6]), 4)


def test_each_stream_gets_one_chunk() -> None:
    check_chunks([3, 1], torch.tensor([5, 0]))
    for streams, num_chunks in (([3, 3], 2), ([3, 1], 1), ([3], 2)):
        with pytest.raises(AsrError, match=f"with {num_chunks} chunks: give each stream one chunk"):
            check_chunks(streams, torch.zeros(num_chunks))


@pytest.mark.parametrize("num_frames", [[], [0, 0]])
def test_a_first_batch_without_frames_leaves_the_look_to_the_next(num_frames: list[int]) -> None:
    decoder = TokenPassingDecoder(random_graph(0), DecodingOptions())
    decoder.decode(torch.zeros(len(num_frames), 6, 4), torch.tensor(num_frames, dtype=torch.int64))
    with pytest.warns(UserWarning, match="log_softmax"):
        decoder.decode(random_log_prob(0, 2, 6) + 3.0)
