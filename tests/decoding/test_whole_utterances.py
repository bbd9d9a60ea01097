"""`decode` takes what a network gives: without frame counts, and with a gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asr
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.results import StageTimes
from asr.testing.tones import tones


@pytest.fixture(scope="module")
def scored(tiny_bundle_folder: Path) -> tuple[TokenPassingDecoder, torch.Tensor, torch.Tensor]:
    recognizer = asr.load(tiny_bundle_folder, mode="ngram")
    log_prob, num_frames = recognizer.log_prob([tones(["PAT", "TWO"]), tones(["SICK", "KIT"])], StageTimes())
    return TokenPassingDecoder(recognizer.bundle.graph, recognizer.options), log_prob, num_frames


def words(results: list[asr.decoding.interface.DecodeResult]) -> list[tuple[str, ...]]:
    return [tuple(result.best.words) for result in results if result.best is not None]


def test_all_frames_count_where_no_numbers_are_given(scored) -> None:
    decoder, log_prob, num_frames = scored
    assert int(num_frames.min()) < log_prob.shape[1]
    whole = torch.full_like(num_frames, log_prob.shape[1])
    alone = log_prob[:1, : int(num_frames[0])]
    assert words(decoder.decode(alone)) == words(decoder.decode(alone, num_frames[:1])) == [("PAT", "TWO")]
    without, given = decoder.decode(log_prob), decoder.decode(log_prob, whole)
    assert [one.best.total for one in without] == [one.best.total for one in given]


def test_a_gradient_is_no_obstacle(scored) -> None:
    decoder, log_prob, num_frames = scored
    with torch.enable_grad():
        results = decoder.decode((log_prob * torch.ones(1, requires_grad=True)), num_frames)
    assert words(results) == words(decoder.decode(log_prob, num_frames))


def test_a_wrong_shape_is_still_one_sentence(scored) -> None:
    decoder, log_prob, _ = scored
    with pytest.raises(AsrError, match="give \\(utterances, frames, tokens\\)"):
        decoder.decode(log_prob[0])
