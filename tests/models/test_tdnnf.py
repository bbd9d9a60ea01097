"""The factorised time-delay network: contexts, padding, the constraint, and the registry."""

from __future__ import annotations

import pytest
import torch

from asr.models.tdnnf import FactorizedLayer, Tdnnf
from asr.serialization import ACOUSTIC_MODEL_CLASSES, build_network

ARGUMENTS = {
    "num_features": 12,
    "num_tokens": 7,
    "dim": 16,
    "bottleneck_dim": 4,
    "num_layers": 2,
    "prefinal_dim": 8,
    "small_dim": 8,
}


def tiny_network(**more: bool) -> Tdnnf:
    torch.manual_seed(0)
    network = Tdnnf(**ARGUMENTS, **more)  # type: ignore[arg-type]
    torch.nn.init.normal_(network.branch.out.weight)
    return network.eval()


def test_an_output_every_third_frame() -> None:
    network = tiny_network()
    for num_frames in (1, 2, 3, 4, 30, 31):
        log_prob, num_outputs = network(torch.randn(1, num_frames, 12), torch.tensor([num_frames]))
        assert log_prob.shape == (1, -(-num_frames // 3), 7) and num_outputs.tolist() == [-(-num_frames // 3)]
        torch.testing.assert_close(log_prob.exp().sum(2), torch.ones(log_prob.shape[:2]))


def test_alone_as_in_a_batch() -> None:
    network = tiny_network()
    features, num_frames = torch.randn(3, 40, 12), torch.tensor([40, 17, 31])
    together, num_outputs = network(features, num_frames)
    for row, (frames, outputs) in enumerate(zip(num_frames.tolist(), num_outputs.tolist(), strict=True)):
        alone, _ = network(features[row : row + 1, :frames], num_frames[row : row + 1])
        torch.testing.assert_close(alone[0], together[row, :outputs], atol=1e-5, rtol=1e-5)


def test_the_context_is_what_it_says() -> None:
    network = tiny_network()
    # Both ways two frames around those of each layer's taps, three frames apart.
    assert network.left_context == network.right_context == 3 * network.context + 2
    num_outputs = 4
    padded = torch.randn(1, network.left_context + 3 * num_outputs + network.right_context, 12)
    with torch.no_grad():
        before = network.encode(padded)
        assert before.shape[1] == num_outputs
        # The outermost frames reach the first and the last output, and no other.
        for frame, reached in ((0, [0]), (padded.shape[1] - 1, [])):
            changed = padded.clone()
            changed[0, frame] += 1.0
            differs = (network.encode(changed) - before).abs().amax(2)[0] > 1e-7
            assert differs.nonzero().flatten().tolist() in (reached, [num_outputs - 1])


def test_pieces_give_what_the_whole_gives() -> None:
    network = tiny_network()
    normal = torch.randn(1, 60, 12)
    whole = network.forward_normalized(normal, torch.tensor([60]))[0][-1]
    padded = torch.nn.functional.pad(normal, (0, 0, network.left_context, network.right_context))
    first, length = 7, 5
    piece = padded[:, 3 * first : 3 * (first + length) + network.left_context + network.right_context]
    scores = network.branch(network.encode(piece)).log_softmax(2)
    torch.testing.assert_close(scores, whole[:, first : first + length], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stride", [0, 1])
def test_the_first_factor_becomes_a_multiple_of_a_semi_orthogonal_matrix(stride: int) -> None:
    torch.manual_seed(1)
    layer = FactorizedLayer(16, 4, stride)
    for _ in range(200):
        layer.semi_orthogonal_step()
    matrix = torch.cat(layer.factor.weight.chunk(2 if stride else 1), dim=1)
    product = matrix @ matrix.T
    torch.testing.assert_close(product, product.trace() / 4 * torch.eye(4), atol=1e-4, rtol=1e-3)


def test_the_registry_builds_it_without_the_branch_of_training() -> None:
    registered = build_network("Tdnnf", ARGUMENTS, ACOUSTIC_MODEL_CLASSES, "a test")
    assert isinstance(registered.network, Tdnnf) and registered.network.auxiliary is None
    assert tiny_network(has_auxiliary=True).auxiliary is not None


def test_dropout_acts_in_training_alone() -> None:
    network = tiny_network()
    network.set_dropout(0.4)
    features, num_frames = torch.randn(2, 30, 12), torch.tensor([30, 30])
    torch.testing.assert_close(network(features, num_frames)[0], network(features, num_frames)[0])
    network.train()
    assert not torch.equal(network(features, num_frames)[0], network(features, num_frames)[0])
