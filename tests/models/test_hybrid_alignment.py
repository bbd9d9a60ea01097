"""Alignments by a network of tied states, against posteriors and paths worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.graph.context import TIED_STATES, TiedStates
from asr.models.hybrid_alignment import align_with_bundle, phone_likelihoods
from asr.text.lexicon import Lexicon

# Columns 0: silence; 1, 2: first frames of "a" by context; 3: its others; 4: "b".
STATES = TiedStates(
    ("SIL", "a", "b"), np.array([[0, 1, 4], [0, 2, 4], [0, 2, 4]]), np.array([[0, 3, 4], [0, 3, 4], [0, 3, 4]])
)
# What is spoken in each frame of 30 ms: silence, a, a, a, b, b, silence.
SPOKEN = [0, 1, 3, 3, 4, 4, 0]


class Oracle(nn.Module):
    """Gives each column that is spoken 0.9, the others the rest in equal parts."""

    num_features, num_tokens, subsampling_factor = 2, 5, 3

    def forward(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        posterior = torch.full((1, len(SPOKEN), 5), 0.025)
        posterior[0, torch.arange(len(SPOKEN)), torch.tensor(SPOKEN)] = 0.9
        return posterior.log(), torch.tensor([len(SPOKEN)])


class Corpus:
    num_features = 2
    utterances = (SimpleNamespace(utterance_id="u", text="AB"),)

    def __len__(self) -> int:
        return 1

    def features(self, utterance: int, condition: int) -> np.ndarray:
        return np.zeros((3 * len(SPOKEN), 2), dtype=np.float16)


def test_likelihoods_are_posteriors_of_phones_over_their_mean() -> None:
    (found,) = phone_likelihoods(Corpus(), Oracle(), STATES)  # type: ignore[arg-type]
    rows = {0: [0.9, 0.075, 0.025], 1: [0.025, 0.95, 0.025], 3: [0.025, 0.95, 0.025], 4: [0.025, 0.075, 0.9]}
    posterior = np.array([rows[column] for column in SPOKEN])
    expected = np.log(posterior) - np.log(posterior.mean(0))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_a_bundle_of_tied_states_aligns_with_any_pronunciation() -> None:
    bundle: Any = SimpleNamespace(
        acoustic_model=SimpleNamespace(network=Oracle()), graph=SimpleNamespace(meta={TIED_STATES: STATES.to_json()})
    )
    lexicon = Lexicon({"AB": [("b",), ("a", "b")]})
    alignment = align_with_bundle(Corpus(), lexicon, bundle)  # type: ignore[arg-type]
    phones, seconds = alignment.of(0)
    assert [alignment.phones[phone] for phone in phones] == ["SIL", "a", "b", "SIL"]
    assert seconds == pytest.approx([0.0, 0.03, 0.12, 0.18])
    with pytest.raises(AsrError, match="u: the model has no phone 'z'"):
        align_with_bundle(Corpus(), Lexicon({"AB": [("z",)]}), bundle)  # type: ignore[arg-type]
