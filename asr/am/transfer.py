"""Starting from a network that was trained for other tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from asr.errors import AsrError

# The tensors of all our networks that have a dimension of tokens, and which it is.
_TOKEN_DIMENSION = {"out.weight": 0, "out.bias": 0, "feedback.weight": 1}


@torch.no_grad()
def transfer_weights(
    network: nn.Module, tokens: Sequence[str], weights: Mapping[str, Tensor], weight_tokens: Sequence[str]
) -> None:
    """Copies weights into a network of the same shape but for its tokens, which are matched by name.

    Tokens that the old network did not have keep their random start, with the bias of the old network's rarest token.

    Args:
        network: filled in place.
        tokens: its tokens, blank first.
        weights: state dict of the other network.
        weight_tokens: its tokens.

    Raises:
        AsrError: the networks differ in more than their tokens.
    """
    shared = [token for token in tokens if token in weight_tokens]
    new = torch.tensor([list(tokens).index(token) for token in shared])
    old = torch.tensor([list(weight_tokens).index(token) for token in shared])
    state = network.state_dict()
    if state.keys() != weights.keys():
        name = sorted(state.keys() ^ weights.keys())[0]
        raise AsrError(f"initial_checkpoint: only one of the networks has {name}; take one of the same class.")
    for name, target in state.items():
        source = weights[name]
        dim = _TOKEN_DIMENSION.get(name)
        if dim is not None:
            source = target.clone().fill_(source.min()) if target.ndim == 1 else target.clone()
            source.index_copy_(dim, new, weights[name].index_select(dim, old))
        if source.shape != target.shape:
            raise AsrError(
                f"initial_checkpoint: {name} is {tuple(source.shape)} there and {tuple(target.shape)} here; "
                "take a network of the same sizes."
            )
        target.copy_(source)
