"""Alignments against every path, and a hand-worked one from CTC."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from asr.models.phone_alignment import align_transcript, phones_from_ctc, transcript_graph


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
