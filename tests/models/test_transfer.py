"""Weights taken over from a network with other tokens."""

from __future__ import annotations

import pytest
import torch

from asr.errors import AsrError
from asr.models.feedforward import FeedForwardNetwork
from asr.models.tdnnf import Tdnnf
from asr.models.training import transfer_weights


def network(num_tokens: int, hidden_dim: int = 8) -> FeedForwardNetwork:
    return FeedForwardNetwork(
        6, num_tokens, num_hidden_layers=1, hidden_dim=hidden_dim, left_context=1, right_context=1
    )


def test_tokens_are_matched_by_name() -> None:
    torch.manual_seed(0)
    old, new = network(3), network(4)
    random_start = new.out.weight[1].clone()
    transfer_weights(new, ("<blk>", "A", "B", "C"), old.state_dict(), ("<blk>", "C", "B"))
    assert torch.equal(new.hidden[0].weight, old.hidden[0].weight)
    assert torch.equal(new.out.weight[[0, 2, 3]], old.out.weight[[0, 2, 1]])
    assert torch.equal(new.out.bias[[0, 2, 3]], old.out.bias[[0, 2, 1]])
    assert torch.equal(new.out.weight[1], random_start)
    assert new.out.bias[1] == old.out.bias.min()


def test_pieces_begin_as_the_mean_of_their_letters() -> None:
    old, new = network(4), network(6)
    random_start = new.out.weight[[4, 5]].clone()
    transfer_weights(new, ("<blk>", "▁AB", "▁C", "CAB", "▁", "AX"), old.state_dict(), ("<blk>", "A", "B", "C"))
    letters = [[1, 2], [3], [1, 2, 3]]
    for parameter in ("weight", "bias"):
        values = getattr(old.out, parameter)
        torch.testing.assert_close(getattr(new.out, parameter)[1:4], torch.stack([values[x].mean(0) for x in letters]))
    assert torch.equal(new.out.weight[[4, 5]], random_start)
    assert bool((new.out.bias[[4, 5]] == old.out.bias.min()).all())


def test_a_tdnnf_takes_other_tokens() -> None:
    sizes = {"num_features": 20, "dim": 16, "bottleneck_dim": 8, "num_layers": 2, "prefinal_dim": 8, "small_dim": 8}
    old, new = Tdnnf(num_tokens=5, **sizes), Tdnnf(num_tokens=3, **sizes)
    torch.nn.init.normal_(old.branch.out.weight)
    transfer_weights(new, ("<blk>", "A", "B"), old.state_dict(), ("SIL", "B", "s1", "s2", "<blk>"))
    assert torch.equal(new.prefinal.weight, old.prefinal.weight)
    assert torch.equal(new.branch.out.weight[[0, 2]], old.branch.out.weight[[4, 1]])
    assert not new.branch.out.weight[1].any()


def test_no_token_may_be_shared() -> None:
    old, new = network(3), network(2)
    random_start = new.out.weight.clone()
    transfer_weights(new, ("<blk>", "A"), old.state_dict(), ("SIL", "s1", "s2"))
    assert torch.equal(new.hidden[0].weight, old.hidden[0].weight) and torch.equal(new.out.weight, random_start)


def test_other_sizes_are_refused() -> None:
    with pytest.raises(AsrError, match=r"hidden\.0\.weight is \(9, 18\) there and \(8, 18\) here"):
        transfer_weights(network(3), ("<blk>", "A", "B"), network(3, hidden_dim=9).state_dict(), ("<blk>", "A", "B"))
    with pytest.raises(AsrError, match="same class"):
        transfer_weights(network(3), ("<blk>", "A", "B"), {}, ("<blk>", "A", "B"))
