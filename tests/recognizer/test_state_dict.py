from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from asr.bundle import Bundle
from asr.decoding.build import available_modes
from asr.errors import AsrError
from asr.graph.decoding_graph import TENSOR_DTYPES
from asr.recognizer import Recognizer
from asr.streaming import recognize_stream
from asr.testing.tones import RATE, TEXT, tones

SENTENCES = [line.split() for line in TEXT[:3]]


@pytest.fixture
def bundle(tiny_bundle_folder):
    # One for each test: they change its tensors.
    return Bundle.load(tiny_bundle_folder)


def other_words(bundle):
    """The bundle with another word on each arc."""
    graph = bundle.graph
    first = int(graph.word_id.min())
    word_id = first + (graph.word_id - first + 1) % (int(graph.word_id.max()) + 1 - first)
    return replace(bundle, graph=replace(graph, word_id=word_id.int()))


def texts(recognizer):
    return [result.text.split() for result in recognizer([tones(words, seed=9) for words in SENTENCES])]


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_holds_the_graph(bundle, assign):
    mode = "ngram"
    state = copy.deepcopy(Recognizer(bundle, mode).state_dict())
    assert {f"graph.{name}" for name in TENSOR_DTYPES} <= set(state)
    other = Recognizer(other_words(bundle), mode)
    assert texts(other) != SENTENCES
    if assign and not hasattr(torch, "compile"):
        pytest.skip("this torch has no assign")
    # What was built for the old graph is not used any more.
    other.load_state_dict(state, **({"assign": True} if assign else {}))
    assert texts(other) == SENTENCES
    assert {name: tensor.dtype for name, tensor in other.graph.named_buffers()} == TENSOR_DTYPES
    streamed = list(recognize_stream(other, [tones(SENTENCES[0], seed=9)], RATE))
    assert streamed[-1].text.split() == SENTENCES[0]
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())


@pytest.mark.slow
def test_weights_of_the_recurrent_model_take_effect_at_once(bundle):
    assert "rnn" in available_modes(bundle)
    recognizer = Recognizer(bundle, "rnn")
    waveforms = [tones(words, seed=9) for words in SENTENCES]
    before = [result.lm_score for result in recognizer(waveforms)]
    state = copy.deepcopy(recognizer.state_dict())
    for name in state:
        if name.startswith("recurrent_model.") and state[name].is_floating_point():
            state[name] = state[name] * 0.5
    other = copy.deepcopy(recognizer)
    assert [result.lm_score for result in other(waveforms)] == before
    other.load_state_dict(state)
    assert [result.lm_score for result in other(waveforms)] != before


@pytest.mark.parametrize(
    ("name", "position", "value"),
    [
        ("dst_state", 3, 10**6),
        ("token_id", 0, 10**6),
        ("word_id", 0, -5),
        ("arc_begin", 1, 10**6),
        ("score", 2, torch.nan),
    ],
)
def test_a_graph_that_no_search_could_follow_is_refused(bundle, name, position, value):
    recognizer = Recognizer(bundle, "ngram")
    state = copy.deepcopy(recognizer.state_dict())
    state[f"graph.{name}"][position] = value
    with pytest.raises(AsrError, match="the decoding graph to be loaded"):
        recognizer.load_state_dict(state)
    assert texts(recognizer) == SENTENCES


def test_a_graph_of_another_size_is_an_error_as_of_any_module(bundle):
    recognizer = Recognizer(bundle, "ngram")
    state = copy.deepcopy(recognizer.state_dict())
    state["graph.score"] = state["graph.score"][:-1]
    with pytest.raises(RuntimeError, match=r"size mismatch for graph\.score"):
        recognizer.load_state_dict(state)
    del state["graph.score"]
    with pytest.raises(RuntimeError, match=r"Missing key.*graph\.score"):
        recognizer.load_state_dict(state)
    assert texts(recognizer) == SENTENCES


def test_copies_have_graphs_of_their_own(bundle):
    recognizer = Recognizer(bundle, "ngram")
    for copied in (copy.deepcopy(recognizer), pickle.loads(pickle.dumps(recognizer))):
        assert copied.graph.score.data_ptr() != recognizer.graph.score.data_ptr()
        # Nothing is held twice.
        assert copied.graph.score.data_ptr() == copied.bundle.graph.score.data_ptr()
        copied.graph.score.fill_(-1.0)
        assert float(recognizer.graph.score.max()) > -1.0


def test_types_leave_the_graph_alone_and_moving_takes_it_along(bundle):
    recognizer = Recognizer(bundle, "ngram").half()
    assert {name: tensor.dtype for name, tensor in recognizer.graph.named_buffers()} == TENSOR_DTYPES
    graph = f"states={bundle.graph.num_states}, arcs={bundle.graph.num_arcs}, words={len(bundle.graph.vocabulary)}"
    assert f"(graph): GraphModule({graph})" in repr(recognizer)
    moved = copy.deepcopy(recognizer).to("meta")
    assert {tensor.device.type for tensor in moved.graph.buffers()} == {"meta"}
    assert moved.graph.decoding_graph().device.type == "meta"
