"""The networks of lattice-free MMI: frame rate, padding, context, pieces, dropout, and the registry."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from asr.errors import AsrError
from asr.models.feedforward import ChainFeedForwardNetwork
from asr.models.tdnnf import ChainNetwork, FilterSmoothing
from asr.serialization import ACOUSTIC_MODEL_CLASSES, build_network

SIZES: dict[str, dict[str, Any]] = {
    "Tdnnf": {"dim": 16, "bottleneck_dim": 4, "num_layers": 2, "prefinal_dim": 8, "small_dim": 8},
    "Tdnnf, more convolutions": {
        "dim": 16,
        "bottleneck_dim": 4,
        "num_layers": 1,
        "prefinal_dim": 8,
        "small_dim": 8,
        "num_convolutions": 2,
    },
    "ChainDnn": {"hidden_dims": [16, 16], "spans": [11, 1]},
    "ChainDnn, shared weights": {"hidden_dims": [8, 8, 16], "spans": [5, 3, 3]},
    "ChainDnn, factorized": {"hidden_dims": [16] * 3, "spans": [5, 3, 5], "bottleneck_dim": 4, "small_dim": 6},
}


@pytest.fixture(params=list(SIZES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def network(name: str) -> ChainNetwork:
    return built(name)


def built(name: str, **more: float) -> ChainNetwork:
    torch.manual_seed(0)
    arguments = {"num_features": 12, "num_tokens": 7, **SIZES[name], **more}
    class_name = name.partition(",")[0]
    network = build_network(class_name, arguments, ACOUSTIC_MODEL_CLASSES, "a test").network
    assert isinstance(network, ChainNetwork)
    for parameter in network.branch.parameters():  # scores begin equal
        torch.nn.init.normal_(parameter)
    return network.eval()


def test_an_output_every_third_frame(network: ChainNetwork) -> None:
    for num_frames in (1, 2, 3, 4, 30, 31):
        log_prob, num_outputs = network(torch.randn(1, num_frames, 12), torch.tensor([num_frames]))
        assert log_prob.shape == (1, -(-num_frames // 3), 7) and num_outputs.tolist() == [-(-num_frames // 3)]
        torch.testing.assert_close(log_prob.exp().sum(2), torch.ones(log_prob.shape[:2]))


def test_alone_as_in_a_batch(network: ChainNetwork) -> None:
    features, num_frames = torch.randn(3, 40, 12), torch.tensor([40, 17, 31])
    together, num_outputs = network(features, num_frames)
    for row, (frames, outputs) in enumerate(zip(num_frames.tolist(), num_outputs.tolist(), strict=True)):
        alone, _ = network(features[row : row + 1, :frames], num_frames[row : row + 1])
        torch.testing.assert_close(alone[0], together[row, :outputs], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_the_middle_of_a_window_is_that_of_three_frames(network: ChainNetwork) -> None:
    num_outputs, middle = 9, 4
    padded = torch.randn(1, network.left_context + 3 * num_outputs + network.right_context, 12)
    first = network.left_context + 3 * middle
    with torch.no_grad():
        before = network.encode(padded)
        assert before.shape[1] == num_outputs
        reach = {}
        for frame in range(padded.shape[1]):
            changed = padded.clone()
            changed[0, frame] += 1.0
            if (network.encode(changed) - before)[0, middle].abs().max() > 1e-7:
                reach[frame - first] = True
    # As many frames before the second one of three as after it.
    assert min(reach) + max(reach) == 2 and min(reach) >= -network.left_context


def test_pieces_give_what_the_whole_gives(network: ChainNetwork) -> None:
    normal = torch.randn(1, 60, 12)
    whole = network.forward_normalized(normal, torch.tensor([60]))[0][-1]
    padded = torch.nn.functional.pad(normal, (0, 0, network.left_context, network.right_context))
    first, length = 7, 5
    piece = padded[:, 3 * first : 3 * (first + length) + network.left_context + network.right_context]
    scores = network.branch(network.encode(piece)).log_softmax(2)
    torch.testing.assert_close(scores, whole[:, first : first + length], atol=1e-5, rtol=1e-5)


def test_shared_weights_are_those_of_a_fully_connected_network_at_several_positions() -> None:
    torch.manual_seed(0)
    shared = ChainFeedForwardNetwork(2, 7, hidden_dims=(4, 6), spans=(5, 3)).eval()
    whole = ChainFeedForwardNetwork(2, 7, hidden_dims=(12, 6), spans=(11, 1)).eval()
    state = {name: value for name, value in shared.state_dict().items() if ".0." not in name}
    weight = torch.zeros(4, 3, 2, 11)  # unit, position, filter, frame
    for position in range(3):
        weight[:, position, :, 3 * position : 3 * position + 5] = shared.hidden[0].weight.view(4, 2, 5)
    state["hidden.0.weight"] = weight.view(12, 22)
    state["hidden.0.bias"] = shared.hidden[0].bias.repeat_interleave(3)
    for name, value in shared.norms[0].state_dict().items():
        state[f"norms.0.{name}"] = value.repeat_interleave(3) if value.dim() else value
    whole.load_state_dict(state)
    for network in (shared, whole):
        torch.manual_seed(1)
        torch.nn.init.normal_(network.branch.weight)
    features, num_frames = torch.randn(1, 40, 2), torch.tensor([40])
    torch.testing.assert_close(shared(features, num_frames), whole(features, num_frames))


@torch.no_grad()
def test_a_factorized_layer_is_a_product_of_two_and_has_a_bypass() -> None:
    torch.manual_seed(0)
    factorized = ChainFeedForwardNetwork(2, 7, hidden_dims=(4, 4), spans=(5, 3), bottleneck_dim=3)
    for _ in range(200):
        factorized.semi_orthogonal_step()
    first = torch.cat(factorized.factors[0].weight.chunk(3), dim=1).view(3, 3, 4)  # channel, position, unit below
    product = first.flatten(1) @ first.flatten(1).T
    torch.testing.assert_close(product, product.trace() / 3 * torch.eye(3), atol=1e-4, rtol=1e-3)
    whole = ChainFeedForwardNetwork(2, 7, hidden_dims=(4, 4), spans=(5, 3))
    state = {name: value for name, value in factorized.state_dict().items() if not name.startswith("factors.")}
    second = factorized.hidden[1]
    state["hidden.1.weight"] = second.weight @ first.transpose(1, 2).flatten(1)
    state["hidden.1.bias"] = second.weight @ factorized.factors[0].bias.view(3, 3).sum(0) + second.bias
    whole.load_state_dict(state)
    features = torch.randn(1, 26, 2)
    below = ChainFeedForwardNetwork(2, 7, hidden_dims=(4,), spans=(5,))
    below.load_state_dict({name: value for name, value in state.items() if ".1." not in name})
    inputs = below.eval().encode(features)[:, 1:-1]
    torch.testing.assert_close(factorized.eval().encode(features), whole.eval().encode(features) + 0.66 * inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_dims": [8, 8], "spans": [5]}, r"spans are \[5\]"),
        ({"hidden_dims": [8, 0], "spans": [5, 1]}, r"hidden_dims \[8, 0\]"),
        ({"hidden_dims": [8, 8], "spans": [5, 2]}, "an output reads 8 frames"),
        ({"hidden_dims": [8, 8], "spans": [1, 1]}, "an output reads 1 frames"),
        ({"hidden_dims": [8, 9], "spans": [5, 3], "bottleneck_dim": 2}, "give equal hidden_dims"),
        ({"hidden_dims": [8] * 3, "spans": [5, 2, 2], "bottleneck_dim": 2}, "odd spans"),
    ],
)
def test_spans_without_a_middle_are_refused(arguments: dict[str, Any], message: str) -> None:
    with mock.patch.dict(SIZES, ChainDnn=arguments), pytest.raises(AsrError, match=message):
        built("ChainDnn")


def test_the_registry_builds_it_without_the_branch_of_training(name: str) -> None:
    assert built(name).auxiliary is None and built(name, has_auxiliary=True).auxiliary is not None


def test_dropout_acts_in_training_alone(network: ChainNetwork) -> None:
    network.set_dropout(0.4)
    features, num_frames = torch.randn(2, 30, 12), torch.tensor([30, 30])
    torch.testing.assert_close(network(features, num_frames)[0], network(features, num_frames)[0])
    network.train()
    assert not torch.equal(network(features, num_frames)[0], network(features, num_frames)[0])


def test_smoothing_mixes_each_filter_with_its_neighbors() -> None:
    smooth = FilterSmoothing(0.2).eval()
    features = torch.tensor([[[10.0, 0.0, 0.0, 5.0]]])
    torch.testing.assert_close(smooth(features), torch.tensor([[[8.0, 2.0, 1.0, 4.0]]]))
    assert torch.equal(smooth.train()(features), features)


def test_a_smoothing_network_reads_smoothed_features_outside_training(name: str) -> None:
    plain, smoothing = built(name), built(name, smoothing=0.3)
    features, num_frames = torch.randn(1, 30, 12), torch.tensor([30])
    smoothed = FilterSmoothing(0.3).eval()(plain.input_norm(features, num_frames))
    expected = plain.forward_normalized(smoothed, num_frames)[0][-1]
    torch.testing.assert_close(smoothing(features, num_frames)[0], expected)
    assert not torch.allclose(expected, plain(features, num_frames)[0])
    assert torch.equal(smoothing.train().encode(features), plain.train().encode(features))


@pytest.mark.parametrize("share", [-0.1, 0.6])
def test_a_share_of_no_use_is_refused(name: str, share: float) -> None:
    with pytest.raises(AsrError, match="smoothing is"):
        built(name, smoothing=share)
