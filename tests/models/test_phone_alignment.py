"""Alignments against every path, a hand-worked one from CTC, and those by a network of tied states."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.graph.context import TIED_STATES, TiedStates
from asr.models.phone_alignment import (
    align_transcript,
    align_with_bundle,
    phone_likelihoods,
    phones_from_ctc,
    transcript_graph,
)
from asr.text.lexicon import Lexicon


def best_of_every_path(words: list[list[list[int]]], score: np.ndarray) -> float:
    """Every pronunciation, with and without silence, with every number of frames a phone."""
    best = -np.inf
    for variants in itertools.product(*words):
        for silences in itertools.product((False, True), repeat=len(words) + 1):
            phones = [0] if silences[0] else []
            for variant, silence in zip(variants, silences[1:], strict=True):
                phones += [*variant, *([0] if silence else [])]
            for cuts in itertools.combinations(range(1, len(score)), len(phones) - 1):
                bounds = [0, *cuts, len(score)]
                total = sum(score[bounds[i] : bounds[i + 1], phone].sum() for i, phone in enumerate(phones))
                best = max(best, float(total))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_viterbi_equals_every_path(seed: int) -> None:
    words = [[[1, 2], [2]], [[3]]]
    score = np.random.default_rng(seed).normal(size=(6, 4)).astype(np.float32)
    found = align_transcript(transcript_graph(words), score)
    assert found is not None
    phones, begins, mean = found
    assert mean * 6 == pytest.approx(best_of_every_path(words, score), abs=1e-4)
    bounds = [*begins, 6]
    along = sum(score[bounds[i] : bounds[i + 1], phone].sum() for i, phone in enumerate(phones))
    assert along == pytest.approx(mean * 6, abs=1e-4)


def test_too_few_frames_have_no_path() -> None:
    assert align_transcript(transcript_graph([[[1, 2, 3]]]), np.zeros((2, 4), dtype=np.float32)) is None


def test_a_phone_from_ctc_ends_halfway_to_the_next_and_far_from_all_is_silence() -> None:
    # 40 ms a frame: phone 1 in frame 5 (middle 0.22 s), phone 2 in frame 7 (0.30 s), phone 3 in frame 20 (0.82 s).
    log_prob = torch.full((30, 4), -20.0)
    log_prob[:, 0] = -0.01
    for frame, phone in ((5, 1), (7, 2), (20, 3)):
        log_prob[frame, phone] = 0.0
        log_prob[frame, 0] = -20.0
    found = phones_from_ctc(log_prob, [1, 2, 3], 0.04, 1.2)
    assert found is not None
    phones, seconds, _ = found
    assert phones == [0, 1, 2, 0, 3, 0]
    assert seconds == pytest.approx([0.0, 0.10, 0.26, 0.42, 0.70, 0.94])


def test_ctc_without_enough_frames_has_no_alignment() -> None:
    assert phones_from_ctc(torch.zeros(2, 4), [1, 2, 3], 0.04, 0.08) is None


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
