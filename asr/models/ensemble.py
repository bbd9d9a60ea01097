"""Several acoustic models as one: the mean of their frame scores.

Networks that were trained alike, but from other initial weights, err in different places. The mean of their
log-probabilities, normalized again, is that of a product of experts (Hinton 2002), with equal exponents that sum to 1.

Shapes: N utterances, T frames of features, F features, T' output frames, C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.models.interface import BoundedNetwork
from asr.serialization import ACOUSTIC_MODEL_CLASSES, ModelSpec, build_network


class Ensemble(BoundedNetwork):
    """Networks of bounded context with the same features, outputs and frame rate, whose scores are averaged.

    Args:
        members: the networks, at least one, each as `class`, its name in the registry, and `arguments`, those of its
            constructor.

    Raises:
        AsrError: a member cannot be built.
        ValueError: there is no member, a member's context is not bounded, or members differ in features, outputs or
            frame rate.
    """

    def __init__(self, members: Sequence[dict[str, Any]]) -> None:
        networks = [
            build_network(member["class"], member["arguments"], ACOUSTIC_MODEL_CLASSES, "Ensemble").network
            for member in members
        ]
        bounded = [network for network in networks if isinstance(network, BoundedNetwork)]
        if not networks or len(bounded) != len(networks):
            raise ValueError("an ensemble needs members, all of bounded context (TDNN-F)")
        kinds = {(each.num_features, each.num_tokens, each.subsampling_factor) for each in bounded}
        if len(kinds) > 1:
            raise ValueError(f"members differ in (features, outputs, frames per output): {sorted(kinds)}")
        super().__init__(*kinds.pop())
        self.members = nn.ModuleList(bounded)

    @classmethod
    def of(cls, specs: Sequence[ModelSpec]) -> ModelSpec:
        """An ensemble of trained networks, with copies of their weights.

        Ensembles among them are replaced by their members, so that all networks have the same weight.

        Raises:
            ValueError: as for the constructor.
        """
        single = [member for spec in specs for member in _members_of(spec)]
        arguments = {"members": [{"class": spec.class_name, "arguments": spec.arguments} for spec in single]}
        ensemble = cls(**arguments)
        for member, spec in zip(ensemble.members, single, strict=True):
            member.load_state_dict(spec.network.state_dict())
        return ModelSpec("Ensemble", arguments, ensemble.eval())

    @property
    def left_context(self) -> int:
        """See `BoundedNetwork`; the largest of the members."""
        return max(member.left_context for member in self._bounded())

    @property
    def right_context(self) -> int:
        """See `BoundedNetwork`; the largest of the members."""
        return max(member.right_context for member in self._bounded())

    @property
    def draft(self) -> BoundedNetwork:
        """See `BoundedNetwork`; the first member alone."""
        return self._bounded()[0]

    def forward_in_context(self, features: Tensor) -> Tensor:
        """See `BoundedNetwork`."""
        left, right = self.receptive_field
        total = torch.zeros((), device=features.device)
        for member in self._bounded():
            # A member that reads less context would give outputs for the rest of it.
            begin, end = left - member.left_context, features.shape[1] - (right - member.right_context)
            total = total + member.forward_in_context(features[:, begin:end])
        return F.log_softmax(total / len(self.members), dim=-1)

    def _bounded(self) -> list[BoundedNetwork]:
        return [member for member in self.members if isinstance(member, BoundedNetwork)]


def _members_of(spec: ModelSpec) -> list[ModelSpec]:
    if not isinstance(spec.network, Ensemble):
        return [spec]
    listed = zip(spec.arguments["members"], spec.network.members, strict=True)
    return [ModelSpec(each["class"], each["arguments"], network) for each, network in listed]
