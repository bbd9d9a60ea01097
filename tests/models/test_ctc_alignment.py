"""Forced alignment of a batch against all paths of each utterance written out."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.models.alignment import align_ctc
from tests.reference.ctc_paths import collapsed


@pytest.mark.slow
@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    utterances=st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 2), max_size=3)), min_size=1, max_size=3),
)
def test_alignment_is_the_best_of_all_paths(seed: int, utterances: list[tuple[int, list[int]]]) -> None:
    log_prob = torch.randn(len(utterances), 7, 3, generator=torch.Generator().manual_seed(seed)).log_softmax(2)
    num_frames = torch.tensor([frames for frames, _ in utterances])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(own, dtype=torch.int64) for _, own in utterances], True)
    num_tokens = torch.tensor([len(own) for _, own in utterances])
    position, found = align_ctc(log_prob, num_frames, tokens, num_tokens)
    for utt, (frames, own) in enumerate(utterances):
        paths = [path for path in itertools.product(range(3), repeat=frames) if collapsed(path) == own]
        assert bool(found[utt]) == bool(paths)
        assert (position[utt, frames:] == -1).all()
        if not paths:
            assert (position[utt] == -1).all()
            continue
        read = position[utt, :frames].tolist()
        labels = tuple(0 if place < 0 else own[place] for place in read)
        assert collapsed(labels) == own
        assert list(dict.fromkeys(place for place in read if place >= 0)) == list(range(len(own)))

        def total(path: tuple[int, ...], utt: int = utt) -> float:
            return sum(float(log_prob[utt, frame, label]) for frame, label in enumerate(path))

        assert total(labels) == pytest.approx(max(map(total, paths)), abs=1e-5)
