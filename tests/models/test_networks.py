"""Networks: shapes, padding, over-fitting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asr.models.conformer import Conformer
from asr.models.feedforward import FeedForwardNetwork
from asr.models.losses import TorchCtc
from asr.models.training import greedy_tokens


def small_conformer(num_features: int = 12, num_tokens: int = 5) -> Conformer:
    return Conformer(
        num_features=num_features,
        num_tokens=num_tokens,
        dim=32,
        num_blocks=2,
        num_heads=2,
        hidden_dim=64,
        kernel_size=5,
        group_size=8,
        dropout=0.1,
        skip_probability=0.1,
        intermediate_blocks=(1,),
    )


def small_dnn(num_features: int = 12, num_tokens: int = 5) -> FeedForwardNetwork:
    return FeedForwardNetwork(num_features, num_tokens, num_hidden_layers=2, hidden_dim=64)


@pytest.fixture(params=[small_conformer, small_dnn], ids=["conformer", "dnn"])
def network(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = request.param()
    return made


def random_batch(lengths: list[int]) -> tuple[Tensor, Tensor]:
    features = torch.randn(len(lengths), max(lengths), 12) * 3.0 + 10.0
    return features, torch.tensor(lengths)


def test_outputs_are_log_probabilities_at_the_lower_rate(network: nn.Module) -> None:
    log_prob, num_frames = network.eval()(*random_batch([40, 23, 1]))
    factor = int(network.subsampling_factor)  # type: ignore[arg-type]
    assert log_prob.dtype == torch.float32
    assert log_prob.shape[2] == network.num_tokens == 5
    assert log_prob.shape[1] == int(num_frames.max()) == round(40 / factor)
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(log_prob.shape[:2]))


def test_an_utterance_gets_the_same_output_alone_and_in_a_batch(network: nn.Module) -> None:
    network.eval()
    lengths = [57, 40, 23, 6, 1]
    features, num_frames = random_batch(lengths)
    together, together_frames = network(features, num_frames)
    for i, length in enumerate(lengths):
        alone, alone_frames = network(features[i : i + 1, :length], num_frames[i : i + 1])
        assert int(alone_frames) == int(together_frames[i])
        count = int(alone_frames)
        torch.testing.assert_close(together[i, :count], alone[0, :count], atol=1e-4, rtol=1e-4)


def test_what_lies_in_the_padding_does_not_matter(network: nn.Module) -> None:
    network.eval()
    features, num_frames = random_batch([40, 16])
    spoiled = features.clone()
    spoiled[1, 16:] = 1e4
    expected, counts = network(features, num_frames)
    got, _ = network(spoiled, num_frames)
    count = int(counts[1])
    torch.testing.assert_close(got[1, :count], expected[1, :count], atol=1e-4, rtol=1e-4)


def test_silence_and_nothing_give_finite_outputs(network: nn.Module) -> None:
    network.eval()
    log_prob, _ = network(torch.full((2, 20, 12), -15.9), torch.tensor([20, 0]))
    assert torch.isfinite(log_prob).all()


def test_intermediate_outputs_come_before_the_last_one() -> None:
    torch.manual_seed(0)
    network = small_conformer().eval()
    features, num_frames = random_batch([20, 10])
    outputs, counts = network.forward_all_layers(features, num_frames)
    log_prob, same_counts = network(features, num_frames)
    assert len(outputs) == 2
    torch.testing.assert_close(outputs[-1], log_prob)
    assert counts.tolist() == same_counts.tolist()
    assert not torch.allclose(outputs[0], log_prob)


def test_dropout_and_skipped_branches_only_act_in_training() -> None:
    torch.manual_seed(0)
    network = small_conformer()
    batch = random_batch([20])
    assert not torch.equal(network.train()(*batch)[0], network(*batch)[0])
    assert torch.equal(network.eval()(*batch)[0], network(*batch)[0])


@pytest.mark.slow
def test_two_utterances_are_learnt_by_heart(network: nn.Module) -> None:
    torch.manual_seed(1)
    features, num_frames = random_batch([48, 36])
    tokens, num_tokens = torch.tensor([[1, 2, 3, 4], [4, 4, 1, 0]]), torch.tensor([4, 3])
    objective = TorchCtc()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(80):
        outputs, counts = network.forward_all_layers(features, num_frames)  # type: ignore[operator]
        loss = sum(objective(out, counts, tokens, num_tokens).sum() for out in outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    log_prob, counts = network.eval()(features, num_frames)
    assert greedy_tokens(log_prob, counts) == [[1, 2, 3, 4], [4, 4, 1]]


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads"):
        Conformer(12, 5, dim=30, num_heads=4, num_blocks=1)
    with pytest.raises(ValueError, match="odd"):
        Conformer(12, 5, dim=32, num_heads=4, num_blocks=1, kernel_size=4)
    wrong = {"num_heads": 0, "kernel_size": -1, "group_size": 0, "dropout": 1.0, "skip_probability": -0.1}
    for name, value in {**wrong, "intermediate_blocks": (1, 3)}.items():
        with pytest.raises(ValueError, match=f"^{name} is .*; it must be "):
            Conformer(12, 5, **{"dim": 32, "num_blocks": 2, name: value})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_papers_network_has_its_size() -> None:
    network = FeedForwardNetwork(num_features=41, num_tokens=40)
    assert sum(p.numel() for p in network.parameters()) == (451 + 1) * 2000 + 4 * 2001 * 2000 + 2001 * 40
